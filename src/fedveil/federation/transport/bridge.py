"""Bridges: messages travel by the connections of another system, Flower or NVFlare, that the institutions run already.

    coordinator's host   link, socket run/bridge  <->  Bridge           in a process of the other system
    silo's host          ask_key_process          <->  key process      socket run/guard

This module has the two ends: from the mailbox of a federation, and to the key process of a silo. ``bridge_flower`` and
``bridge_nvflare`` put them into an app or a job. All three run inside the other system's processes. They import the
standard library, that system and one another, so that they can be copied where fedveil is not installed.

Claim: a bridge holds no key, no table and no state. It can lose, repeat, delay and read messages and can forge none:
they are signed. What is lost is fetched again, because the mailbox keeps a silo's message until it is answered.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from email.message import Message
from http import HTTPStatus
from typing import Any, Final

SendMessage = Callable[[bytes], bytes]
"""Sends a message to a silo by the other system, and returns the silo's answer. Raises OSError if there is none."""

_LENGTH: Final = struct.Struct(">Q")
_POLL_SECONDS: Final = 60.0
"""Longest wait for an answer of the mailbox, which keeps a request waiting for less."""

_KEY_PROCESS_SECONDS: Final = 75.0
"""Longest wait for an answer of the key process, which answers after 30 seconds that the silo is at work."""

LEAST_RATE: Final = float(1 << 20)
"""Least rate in bytes a second between processes of one host; below it a process counts as too slow."""

_PAUSE_SECONDS: Final = 2.0
_LONGEST_BYTES: Final = 1 << 28
"""Largest size of a message; no message of the protocol is longer."""

_DELIVERED: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""Replies after which an answer is not sent again: it was taken, another message is current, or it is too long."""

_log = logging.getLogger("fedveil.bridge")


def ask_key_process(path: str, message: bytes) -> bytes:
    """Hand a message to the key process of this host; return its answer.

    Args:
        path: path of the key process's socket: ``run/guard`` in the silo's folder.
        message: a signed message of the coordinator.

    Raises:
        OSError: the key process refused the message or is not there; the silo's own log says why.
    """
    with (
        _connect(path, _KEY_PROCESS_SECONDS, len(message)) as connection,
        connection.makefile("rb") as stream,
    ):
        connection.sendall(_LENGTH.pack(len(message)))
        connection.sendall(message)
        beginning = stream.read(1 + _LENGTH.size)
        if len(beginning) == 1 + _LENGTH.size:
            (length,) = _LENGTH.unpack(beginning[1:])
            connection.allow(_KEY_PROCESS_SECONDS, length)
            answer = stream.read(length)
            if len(answer) == length and beginning[0] == 0:
                return answer
    raise OSError("the silo's key process did not answer the message")


class Bridge:
    """Carries the messages of silos between a mailbox and another system, each silo's by a thread of its own.

    Args:
        path: path of the link's socket ``run/bridge``.
        pause: seconds between a failure and the next attempt.
    """

    def __init__(self, path: str, pause: float = _PAUSE_SECONDS) -> None:
        self._path, self._pause = path, pause
        self._ending = threading.Event()
        self._connections: dict[str, MailboxConnection] = {}
        self._last = time.monotonic()

    def add(self, silo: str, send: SendMessage) -> None:
        """Begin to carry the messages of a silo, unless they are carried already.

        Args:
            silo: its name in the federation.
            send: sends a message to it.
        """
        if silo not in self._connections:
            self._connections[silo] = MailboxConnection(self._path)
            threading.Thread(target=self._serve, args=(silo, send), daemon=True).start()

    def idle_seconds(self) -> float:
        """Return for how long no message has passed."""
        return time.monotonic() - self._last

    def close(self) -> None:
        """Stop: no message is fetched any more, and an answer that is under way is dropped."""
        self._ending.set()
        for connection in self._connections.values():
            connection.end()

    def _serve(self, silo: str, send: SendMessage) -> None:
        tag, failed = "", False
        while not self._ending.is_set():
            try:
                tag = self._exchange(silo, send, tag)
                failed = False
            except OSError as error:
                if not (failed or self._ending.is_set()):
                    _log.warning("silo %s: no exchange, trying again: %s", silo, error)
                tag, failed = "", True  # the message is asked for again
                self._ending.wait(self._pause)
        self._connections[silo].close()

    def _exchange(self, silo: str, send: SendMessage, tag: str) -> str:
        """Fetch the current message, unless it is the one of the tag, and bring its answer; return its tag."""
        mailbox = self._connections[silo]
        status, headers, message = mailbox.request_whole(
            "GET", "/v1/message", {"Silo": silo, "If-None-Match": tag}
        )
        if status == HTTPStatus.NO_CONTENT:
            if "Replaced" in headers:
                raise OSError("another bridge or silo fetches these messages; is the silo served twice?")
            return tag
        if status != HTTPStatus.OK:
            raise OSError(f"the mailbox answered {status}")
        self._last = time.monotonic()
        new_tag, answer = headers.get("ETag", ""), send(message)
        self._last = time.monotonic()
        status, _, _ = mailbox.request_whole("POST", "/v1/answer", {"Silo": silo, "Answers": new_tag}, answer)
        if status not in _DELIVERED:
            raise OSError(f"the mailbox answered {status}")
        return new_tag


class TimedSocket(socket.socket):
    """A socket whose reads and writes end by one moment together, however slowly the peer sends or reads.

    A timeout of each read alone would let a peer that sends one byte after another hold the caller without end.
    """

    _until = _seconds = math.inf

    def allow(self, seconds: float, size: int = 0) -> None:
        """Set how long all reads and writes may take from now on.

        Args:
            seconds: for each, and for all together beyond the time that the bytes may take.
            size: bytes that are to pass; :data:`LEAST_RATE` of them a second is allowed.
        """
        self._seconds, self._until = seconds, time.monotonic() + seconds + size / LEAST_RATE

    def _set_time_left(self) -> None:
        seconds_left = self._until - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError("too slow")
        self.settimeout(None if math.isinf(seconds_left) else min(self._seconds, seconds_left))

    def connect(self, *arguments: Any) -> None:
        """Connect, within what is left of the time."""
        self._set_time_left()
        super().connect(*arguments)

    def recv(self, *arguments: Any) -> bytes:
        """Read, within what is left of the time."""
        self._set_time_left()
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        """Read into a buffer, within what is left of the time."""
        self._set_time_left()
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """Write, within what is left of the time."""
        self._set_time_left()
        super().sendall(*arguments)


class MailboxConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket of a link; opened by the first request, and again after the link has closed it.

    Claim: the link's process, which faces the network, holds a caller for no longer than twice ``seconds``, and one
    second for each MiB of the request and of the announced answer. ``tests/test_https_strangers.py`` tries it.

    Args:
        path: path of the socket.
        seconds: longest wait for the head of an answer.
    """

    def __init__(self, path: str, seconds: float = _POLL_SECONDS) -> None:
        super().__init__("mailbox", timeout=seconds)
        self._path, self._seconds, self._sent = path, seconds, 0

    def connect(self) -> None:
        """Open the socket, within the time of the request that needs it."""
        self.sock = self._timed = _connect(self._path, self._seconds, self._sent)

    def end(self) -> None:
        """Have a request of another thread fail at once."""
        if (opened := self.sock) is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def request_whole(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | Iterable[bytes] = b"",
        longest: int = _LONGEST_BYTES,
    ) -> tuple[int, Message, bytes]:
        """Return status, header fields and body of the answer; after any failure the socket is closed.

        Args:
            method: such as ``GET``.
            path: and query.
            headers: fields of the request, with ``Content-Length`` where the body comes in pieces.
            body: body of the request.
            longest: bytes of the longest body that is read.

        Raises:
            OSError: there is no link, it does not answer in time, or the body is of no announced length, incomplete or
                longer than ``longest``.
        """
        try:
            if self.sock is not None and _is_readable(self.sock):
                self.close()  # nothing was asked for: the link has closed the connection, or restarted
            self._sent = len(body) if isinstance(body, bytes) else int(headers["Content-Length"])
            if self.sock is None:
                self.connect()
            else:
                self._timed.allow(self._seconds, self._sent)
            opened = self._timed
            self.request(method, path, body or None, headers)
            response = self.getresponse()
            if (length := response.length) is None:
                raise OSError("the mailbox announced no length of its answer")
            if length > longest:
                raise OSError(f"the mailbox sent more than {longest} bytes")
            opened.allow(self._seconds, length)
            content = response.read()  # raises IncompleteRead where less came than was announced
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise OSError(f"no answer of the mailbox: {error or type(error).__name__}") from error
        return response.status, response.headers, content


def _is_readable(opened: socket.socket) -> bool:
    poll = select.poll()
    poll.register(opened, select.POLLIN)
    return bool(poll.poll(0))


def _connect(path: str, seconds: float, size: int) -> TimedSocket:
    """Connect to a Unix socket; its path may be longer than the 108 bytes that the kernel takes.

    Args:
        path: path of the socket.
        seconds: for the connection and all that passes by it; see :meth:`TimedSocket.allow`.
        size: bytes that are to pass.
    """
    opened = TimedSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.allow(seconds, size)
        folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY)
        try:
            opened.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        finally:
            os.close(folder)
    except BaseException:
        opened.close()
        raise
    return opened
