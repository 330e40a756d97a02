"""Answers on a served party's own host: whether it lives, whether it works, and its figures, over HTTP.

    run/metrics                  a Unix socket with mode 0600, always
    metrics = "127.0.0.1:9464"   in coordinator.toml or silo.toml: a port beside it; none by default

    GET /live      200 while the process answers
    GET /ready     200 where ``fedveil health`` ends with 0, else 503 and one line with the cause
    GET /connection  JSON: whether it is connected, the last contact, and the cause where it is not
    GET /metrics   Prometheus text 0.0.4 (:mod:`~.metrics`), 503 where the party's files cannot be read

Claim: nobody is answered but on the socket of the party's own user and, where the settings name a port, on an address
that other hosts do not reach, and there only who asks for that very address: no web page that is open on the host, by a
name of its own that leads there. Whoever asks changes nothing, and takes little of the process that has the keys: four
connections a socket, each for 5 seconds and 8 KiB, and figures that are computed once a second. Who can reach the port
can keep others from being answered there; not on the socket. ``tests/test_metrics_server.py`` tries each.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fedveil.errors import ConfigError
from fedveil.federation.hosts.sockets import RunningFolder, address, listen

SOCKET: Final = "metrics"
"""In the folder ``run`` of a party."""

AT_ONCE: Final = 4
"""Questions that are read at once on one socket; others wait in the kernel."""

_SECONDS: Final = 5.0
"""For how long a question may take to arrive whole, and its answer to leave."""

_LONGEST: Final = 8192
"""Bytes of a question, all its fields included."""

_FRESH_SECONDS: Final = 1.0
"""For how long figures are told again as they are."""

_LONGEST_ANSWER: Final = 1 << 20
_PAUSE_SECONDS: Final = 0.2
_NO_FIGURES: Final = (
    "files: certificate, membership or another file of the party is not valid; `fedveil status` says which"
)
_QUESTION: Final = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n((?:[^\r\n]+\r\n)*)\r\n")
_HOST: Final = re.compile(rb"^host:[ \t]*(\S*)[ \t]*\r$", re.MULTILINE | re.IGNORECASE)
_log = logging.getLogger("fedveil.metrics")


def local_port(text: str) -> tuple[str, int]:
    """Return host and port of an address that other hosts do not reach.

    Raises:
        ConfigError: it is another, or written in another form than a question names it in.
    """
    with suppress(ValueError):
        host, number = ipaddress.ip_address(text.rpartition(":")[0].strip("[]")), int(text.rpartition(":")[2])
        named = f"[{host}]:{number}" if host.version == 6 else f"{host}:{number}"
        if host.is_loopback and 0 < number < 1 << 16 and text == named and "%" not in text:
            return str(host), number
    raise ConfigError(
        f'metrics = "{text}": a loopback address and a port are needed, such as "127.0.0.1:9464" or "[::1]:9464"'
    )


def ask_party(party: Path, path: str) -> tuple[int, str] | None:
    """Ask the process that serves a party, and return status and text of its answer; None if no process serves it.

    No lock is taken for it.

    Args:
        party: the party's folder.
        path: ``/live``, ``/ready``, ``/connection`` or ``/metrics``.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2 * _SECONDS)
            connection.connect(address(party / "run" / SOCKET))
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            with connection.makefile("rb") as answer:
                head, _, text = answer.read(_LONGEST_ANSWER).partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), text.decode(errors="replace").strip()
    except (OSError, ValueError, IndexError):
        return None


class MetricsServer:
    """Answers, until it is closed.

    Args:
        running: the party's folder ``run``.
        port: a loopback address and port beside the socket; None: the socket alone.
        trouble: why the party does not do its work; empty if it does.
        figures: what it tells a collector.
        connection: facts of its connection, as JSON.
        question_seconds: for how long a question may take to arrive whole, and its answer to leave.

    Attributes:
        fresh_seconds: for how long figures are told again as they are.

    Raises:
        ConfigError: other hosts reach the address, or it is taken.
    """

    def __init__(
        self,
        running: RunningFolder,
        port: str | None,
        trouble: Callable[[], str],
        figures: Callable[[], str],
        connection: Callable[[], dict[str, Any]] = dict,
        question_seconds: float = _SECONDS,
    ) -> None:
        self.fresh_seconds, self._seconds = _FRESH_SECONDS, question_seconds
        self._trouble, self._figures, self._connection = trouble, figures, connection
        self._lock = threading.Lock()
        self._told: str | None = None
        self._until = 0.0
        self._open = True
        listeners: list[tuple[socket.socket, bytes | None]] = []
        if port is not None:
            listeners.append((_listen_locally(port), port.encode()))
        listeners.append((listen(running / SOCKET), None))
        self._listeners = listeners
        for listener, host in listeners:
            for _ in range(AT_ONCE):
                threading.Thread(target=self._serve, args=(listener, host), daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._open = False
        for listener, _ in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _serve(self, listener: socket.socket, host: bytes | None) -> None:
        while self._open:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed; or the process has no descriptor left, for now
                time.sleep(_PAUSE_SECONDS if self._open else 0)
                continue
            with connection, suppress(OSError):
                answer = self._answer(_read(connection, self._seconds), host)
                connection.settimeout(self._seconds)
                connection.sendall(answer)

    def _answer(self, question: bytes, host: bytes | None) -> bytes:
        """Return the answer to a question; on a port, its ``Host`` must be the port's address."""
        read = _QUESTION.match(question)
        if read is None:
            return _response(HTTPStatus.BAD_REQUEST)
        method, path, fields = read.groups()
        if host is not None and _HOST.findall(fields) != [host]:
            return _response(HTTPStatus.MISDIRECTED_REQUEST)
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        status, text = HTTPStatus.OK, None
        if path == b"/metrics":
            text = self._text()
            status = HTTPStatus.SERVICE_UNAVAILABLE if text is None else status
        elif path == b"/ready":
            if text := self._trouble() or ("" if self._text() is not None else _NO_FIGURES):
                status, text = HTTPStatus.SERVICE_UNAVAILABLE, f"{text}\n"
            else:
                text = None
        elif path == b"/connection":
            text = json.dumps(self._connection()) + "\n"
        elif path != b"/live":
            status = HTTPStatus.NOT_FOUND
        return _response(status, text, body=method == b"GET")

    def _text(self) -> str | None:
        """Return the figures; None where they cannot be told now."""
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._told = self._figures()
                except Exception as error:  # whatever it is: the next question may find it well again
                    _log.warning("figures cannot be told: %s", type(error).__name__)
                    self._told = None
                self._until = time.monotonic() + self.fresh_seconds
            return self._told


def _listen_locally(port: str) -> socket.socket:
    host, number = local_port(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, number), family=family, backlog=8)
    except OSError as error:
        raise ConfigError(f'metrics = "{port}": {error.strerror}') from None


def _read(connection: socket.socket, seconds: float) -> bytes:
    """Return a question up to its empty line; what is no whole one by then is returned as it is.

    Raises:
        OSError: it did not arrive in time.
    """
    until, question = time.monotonic() + seconds, b""
    while b"\r\n\r\n" not in question and len(question) < _LONGEST:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        some = connection.recv(_LONGEST - len(question))
        if not some:
            break
        question += some
    return question


def _response(status: HTTPStatus, text: str | None = None, *, body: bool = True) -> bytes:
    content = (f"{status.phrase}\n" if text is None else text).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; version=0.0.4; "
        f"charset=utf-8\r\nContent-Length: {len(content)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")
