"""The process at a silo that has the table and the keys: it answers messages on a local socket, and nothing else.

The network process (:mod:`fedveil.federation.transport.https.silo_client`) gets no table and no identity key: it hands
a message to the key process and carries the answer back. What is refused is refused here.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

from fedveil.errors import ConfigError, ProtocolError
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.sockets import accept_connections, listen, receive_frame, send_frame
from fedveil.federation.membership import MEMBERSHIP, Membership
from fedveil.federation.silo import SiloParty, Standing
from fedveil.federation.transport.bridge import TimedSocket
from fedveil.files import sync_folder, writing
from fedveil.sanitize import quiet_log

SIGN_OF_LIFE: Final = 30.0
"""Seconds after which a silo that is at work says so."""

_QUESTION_SECONDS: Final = 60.0
_log = quiet_log("fedveil.silo")


_Answer = tuple[int, bytes]
"""0 and a message, or 1 and why there is none."""


@dataclass(frozen=True)
class _Reading:
    """A message that is read, and its answer once there is one."""

    message: bytes
    answer: Future[_Answer]


def open_silo(folder: SiloFolder, after: Membership | None = None) -> SiloParty:
    """Read a silo's folder and table.

    Args:
        folder: the silo's.
        after: a membership that the one in the folder has to follow, or be.

    Raises:
        FedveilError: whatever is wrong with keys, policy, schema or table.
    """
    settings, membership = folder.settings, folder.membership
    if after is not None:
        membership.check_follows(after, folder / MEMBERSHIP)

    def standing() -> Standing:
        now = folder.membership
        now.check_follows(membership, folder / MEMBERSHIP)
        # The silo goes on under a membership that only lacks new silos (:class:`~.silo_service.ServedSilo`).
        return Standing(membership=membership if now.extends(membership) else now, policy=folder.policy)

    number = membership.number(settings.name)
    folder.check_own_keys()
    share = folder.share()
    state = folder / "state"
    with writing(state, ConfigError):
        state.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.path)
    return SiloParty(
        standing=standing,
        number=number,
        identity=folder.identity,
        share=share,
        state=state,
    )


class Answering(Protocol):
    """A silo, as the key process calls it."""

    def receive(self, data: bytes) -> bytes:
        """Read a message of the coordinator and return the answer."""

    def in_progress_message(self, data: bytes) -> bytes:
        """Return a keep-alive that answers a message."""

    def longest(self, beginning: bytes) -> int:
        """Return the size limit in bytes of a message with this beginning."""

    def close(self) -> None:
        """Close what is open."""


class KeyProcess:
    """Serves one silo on a Unix socket that only its user can open, or a group for a bridge.

    Messages are read one after another by a thread of their own. A caller gets an answer within ``sign_of_life``
    seconds: by the answer, or by the word that the silo is at work; the same question asked again then gets the answer.

    Args:
        party: the silo; closed if the socket cannot be opened.
        path: path of the socket; a stale one is replaced.
        sign_of_life: seconds after which a question is not kept waiting any longer.
        group: number of the group that may open the socket; None: the owner alone.
        note_contact: called when a message of the coordinator's was answered.
        question_seconds: for how long a caller may take to send a message and to read its answer, beyond a second for
            each MiB.
    """

    def __init__(
        self,
        party: Answering,
        path: Path,
        sign_of_life: float = SIGN_OF_LIFE,
        group: int | None = None,
        note_contact: Callable[[], None] = lambda: None,
        question_seconds: float = _QUESTION_SECONDS,
    ) -> None:
        self._party, self._sign_of_life, self._note_contact = party, sign_of_life, note_contact
        self._question_seconds = question_seconds
        self._messages: SimpleQueue[_Reading] = SimpleQueue()
        self._reading: _Reading | None = None
        self._over = threading.Event()
        try:
            self._socket = listen(path, group)
        except BaseException:
            party.close()
            raise
        threading.Thread(target=self._read_all, daemon=True).start()

    def serve(self) -> None:
        """Answer one question after another, until :meth:`close`."""
        for connection in accept_connections(self._socket, self._over.is_set):
            with TimedSocket(fileno=connection.detach()) as opened:
                try:
                    self._answer(opened)
                except (OSError, ProtocolError) as error:
                    _log.warning("a question was not answered: %s", error)
                except Exception:  # no memory for a long message, say: the next question is answered
                    _log.exception("a question could not be answered")

    def close(self) -> None:
        """Stop serving and give the silo's ledger back."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._party.close()

    def _answer(self, connection: TimedSocket) -> None:
        def allow(length: int) -> None:
            connection.allow(self._question_seconds, length)

        allow(0)
        message = receive_frame(connection, self._party.longest, allow)
        status, answer = self._answer_to(message, time.monotonic() + self._sign_of_life)
        if status == 0:
            self._note_contact()
        allow(len(answer))
        connection.sendall(bytes([status]))
        send_frame(connection, answer)

    def _answer_to(self, message: bytes, until: float) -> _Answer:
        """Return the answer to a message, or at that time the word that the silo is at work."""
        while True:
            reading = self._reading
            if reading is None or reading.answer.done():
                reading = self._reading = _Reading(message, Future())
                self._messages.put(reading)
            wait([reading.answer], max(0.0, until - time.monotonic()))
            if not reading.answer.done():
                return _tried(self._party.in_progress_message, message)
            if reading.message == message:
                return reading.answer.result()

    def _read_all(self) -> None:
        while True:
            reading = self._messages.get()
            reading.answer.set_result(_tried(self._party.receive, reading.message))


def _tried(answer: Callable[[bytes], bytes], message: bytes) -> _Answer:
    """Return a silo's answer to a message, or the status 1 with the reason for no answer."""
    try:
        return 0, answer(message)
    except ProtocolError as error:
        _log.warning("a message was refused: %s", error)
        return 1, str(error).encode()
    except Exception:
        _log.exception("a message could not be answered")
        return 1, b"the silo failed; its own log says where"
