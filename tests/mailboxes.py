"""Mailboxes of a federation in this process, with the keys and certificates of its silos, for tests of transports."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.federation.enrollment.certificates import (
    Authority,
    new_node_key,
    new_server_key,
    public_key_digest,
)
from fedveil.federation.hosts.link import Link
from fedveil.federation.hosts.link_folder import LinkFolder, LinkSettings
from fedveil.federation.hosts.sockets import LINK, RunningFolder, free_port
from fedveil.federation.transport.https.http_server import Limits
from fedveil.federation.transport.https.mailbox import Mailbox, MailboxClient, Members
from fedveil.federation.transport.https.silo_client import RetryPolicy, SiloClient, client_context
from fedveil.federation.transport.interface import AnswerMessage

LONGEST = 1 << 28
QUICK = RetryPolicy(first=0.02, longest=0.05)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Folders of a link and of silos, with all keys and certificates.

    Attributes:
        folder: has ``link/`` and a folder for each silo, by its name.
        authority: that sealed the certificates.
        members: the silos, as the mailbox knows them.
        server_key: digest of the link's key.
        port: of the link.
    """

    folder: Path
    authority: Authority
    members: Members
    server_key: str
    port: int

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def link(self) -> LinkFolder:
        return LinkFolder(self.folder / "link")

    def silo(self, number: int) -> Path:
        return self.folder / self.members.names[number]

    def context(self, number: int) -> ssl.SSLContext:
        return client_context(self.silo(number), self.server_key)

    def client(self, number: int, answer: AnswerMessage, **more: object) -> SiloClient:
        return SiloClient(self.server, self.context(number), answer, LONGEST, retry=QUICK, **more)  # type: ignore[arg-type]


def certify(authority: Authority, folder: Path, name: str, days: int = 397) -> ec.EllipticCurvePrivateKey:
    """Make a silo's folder with its key and client certificate."""
    folder.mkdir()
    key, public = new_node_key(folder / "node.key")
    (folder / "client.crt").write_bytes(authority.certify_silo(public.decode(), name, days))
    authority.publish(folder)
    return key


def make_place(folder: Path, silos: int) -> Place:
    """Make all folders, under an authority of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, link, port = Authority.create("test"), folder / "link", free_port()
    link.mkdir()
    request = new_server_key(link / "server.key").decode()
    (link / "server.crt").write_bytes(authority.certify(request, ("127.0.0.1",)))
    authority.publish(link)
    LinkSettings(port=port, proxy=True, bridge=True).write(link / "link.toml")
    names = tuple(f"silo-{number}" for number in range(silos))
    keys = [certify(authority, folder / name, name) for name in names]
    from fedveil.federation.enrollment.certificates import certificate_key_digest

    return Place(
        folder=folder,
        authority=authority,
        members=Members(keys=tuple(public_key_digest(key.public_key()) for key in keys), names=names),
        server_key=certificate_key_digest(link / "server.crt"),
        port=port,
    )


class ServedMailbox:
    """A link that is served by a thread of this process, and can be ended and started again at any moment.

    Args:
        place: its folder.
        limits: of the link.
    """

    def __init__(self, place: Place, limits: Limits | None = None) -> None:
        self.place, self._limits = place, limits or Limits()
        self.mailbox: Mailbox | None = None
        self.start()

    @property
    def run(self) -> Path:
        return self.place.folder / "link" / "run"

    def start(self) -> None:
        """Serve; return once it listens."""
        self._running = RunningFolder(self.place.link.path)
        link = Link(self.place.link, self._running, self._limits)
        self.mailbox, ready = link.mailbox, threading.Event()

        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(link.serve())
            ready.set()
            await asyncio.wait((self._task,))

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> None:
        """End it; whatever it holds is lost."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._running.close()

    def restart(self) -> None:
        """End it and start another."""
        self.stop()
        self.start()

    def coordinator(self, longest: int = LONGEST) -> MailboxClient:
        """Return the coordinator's end."""
        return MailboxClient(self.run / LINK, self.place.members, longest)


class SiloThread:
    """A silo's client in a thread; :meth:`stop` is abrupt: an answer that is under way may be lost.

    Args:
        serve: serves until its argument says that it ends.
    """

    def __init__(self, serve: Callable[[Callable[[], bool]], None]) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=serve, args=(self._over.is_set,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end; it may wait for a message still, which it then answers no more."""
        self._over.set()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(30)
        assert not self._thread.is_alive()
