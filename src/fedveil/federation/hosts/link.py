"""The coordinator's link: the mailbox in a process that the network reaches, with the TLS key and no other key.

Claim: whoever breaks into the link, a process of another user than the coordinator, has neither the identity key nor
the run folders; no code that was received is run, and no process is started for a message. Conditions: who can open
the coordinator's socket is the coordinator; who can read the TLS key can stand in for the link. Enforced by the modes
of the sockets, which both sides check, and by TLS 1.3 with client certificates of the federation's authority alone.
``tests/test_https_strangers.py`` tries each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedveil.crypto.keys import read_private_file
from fedveil.errors import FedveilError
from fedveil.federation.enrollment.certificates import KeyDigests
from fedveil.federation.hosts.child_process import settings_of_parent
from fedveil.federation.hosts.link_folder import LinkFolder
from fedveil.federation.hosts.sockets import BRIDGE, LINK, PROXY, RunningFolder, listen, listen_at
from fedveil.federation.transport.https.endpoints import (
    CoordinatorEndpoint,
    SiloEndpoint,
    by_certificate,
    by_proxy_header,
    by_silo_name,
)
from fedveil.federation.transport.https.http_server import HttpServer, Limits
from fedveil.federation.transport.https.mailbox import Mailbox

_FILES: Final = 8192
"""Descriptors that the process may have open, where its hard limit allows them."""

_BACKLOG: Final = 1024
_log = logging.getLogger("fedveil.link")
_LOOK_SECONDS: Final = 0.5


def server_context(folder: LinkFolder) -> ssl.SSLContext:
    """Return TLS 1.3 that asks for a client certificate of the federation's authority.

    Raises:
        CryptoError: others can read the TLS key.
    """
    read_private_file(folder / "server.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(cafile=folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # every connection shows its certificate
    return context


class Link:
    """The mailbox with its sockets, as ``link.toml`` asks for them.

    Args:
        folder: the link's.
        running: the folder of its Unix sockets.
        limits: bounds on what the network may ask for.

    Raises:
        BusyError: the address is taken, or this host does not have it yet.
        ConfigError: a socket cannot be opened.
    """

    def __init__(self, folder: LinkFolder, running: RunningFolder, limits: Limits) -> None:
        settings, group = folder.settings, folder.group
        self.mailbox = Mailbox()
        digests = KeyDigests()
        self._servers = list[HttpServer]()
        self._folder, self._stamp = folder, _stamp_of(folder)
        self._context: ssl.SSLContext | None = None
        if settings.port:
            context = self._context = server_context(folder)
            public = SiloEndpoint(self.mailbox, by_certificate(digests), limits)
            where = f'{folder / "link.toml"}: host = "{settings.host}", port = {settings.port}'
            opened = listen_at(settings.host, settings.port, where, _BACKLOG)

            def member_of(certificate: bytes) -> int | None:
                return self.mailbox.number(digests(certificate))

            self._servers.append(HttpServer(opened, public, limits, context, member_of))
        local = (
            {LINK: CoordinatorEndpoint(self.mailbox)}
            | ({PROXY: SiloEndpoint(self.mailbox, by_proxy_header, limits)} if settings.proxy else {})
            | (
                {BRIDGE: SiloEndpoint(self.mailbox, by_silo_name(self.mailbox), limits)}
                if settings.bridge
                else {}
            )
        )
        for name, endpoint in local.items():
            self._servers.append(HttpServer(listen(running / name, group), endpoint, limits))

    def read_certificate_again(self) -> None:
        """Use certificate and key from now on, where the coordinator has accepted others since they were read.

        Connections that are open stay. Files that do not fit one another are read again later: one of them may not be
        written yet.
        """
        stamp = _stamp_of(self._folder)
        if self._context is None or stamp == self._stamp:
            return
        with contextlib.suppress(OSError, FedveilError):  # an SSLError is an OSError
            server_context(self._folder)
            self._context.load_cert_chain(self._folder / "server.crt", self._folder / "server.key")
            self._stamp = stamp
            _log.info("serves a new certificate")

    async def serve(self) -> None:
        """Serve until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(server.serve())


def serve_link(
    folder: LinkFolder,
    is_ending: Callable[[], bool],
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve a link.

    Args:
        folder: the link's.
        is_ending: whether the link is to end; asked twice a second.
        limits: bounds on what the network may ask for.
        listening: called once, when the sockets are open.

    Raises:
        BusyError: the link is served already, its address is taken or not there yet, or its certificate begins later
            than this clock.
        ConfigError: its certificate is not valid, or it may not listen at its address.
        CryptoError: others can read the TLS key.
    """
    folder.check_certificate()
    _allow_descriptors()
    running = RunningFolder(folder.path, folder.group)
    try:
        link = Link(folder, running, limits)
        listening()

        async def serve() -> None:
            serving = asyncio.ensure_future(link.serve())
            while not serving.done() and not is_ending():
                await asyncio.wait((serving,), timeout=_LOOK_SECONDS)
                link.read_certificate_again()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

        asyncio.run(serve())
    finally:
        running.close()


def _stamp_of(folder: LinkFolder) -> tuple[tuple[int, int] | None, ...]:
    """Return when certificate and key were written; a replaced file has another number."""

    def file_stamp(path: Path) -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    return file_stamp(folder / "server.crt"), file_stamp(folder / "server.key")


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def main() -> None:
    """Serve until the parent ends, or ends this process; the sockets do not outlive it."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    settings = settings_of_parent(stopping.set)
    try:
        serve_link(LinkFolder(Path(settings["folder"])), stopping.is_set)
    except FedveilError as error:
        _log.error("%s", error)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
