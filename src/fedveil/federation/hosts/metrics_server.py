"""Answers on a served party's own host: whether it lives, whether it works, and its figures, over HTTP.

    run/metrics                  a Unix socket with mode 0600, always
    metrics = "127.0.0.1:9464"   in coordinator.toml or silo.toml: a port beside it; none by default

    GET /live      200 while the process answers
    GET /ready     200 where ``fedveil health`` ends with 0, else 503 and one line with the cause
    GET /connection  JSON: whether it is connected, the last contact, and the cause where it is not
    GET /metrics   Prometheus text 0.0.4 (:func:`as_metrics`), 503 where the party's files cannot be read

Claim: nobody is answered but on the socket of the party's own user and, where the settings name a port, on an address
that other hosts do not reach, and there only who asks for that very address: no web page that is open on the host, by a
name of its own that leads there. Whoever asks changes nothing, and takes little of the process that has the keys: four
connections a socket, each for 5 seconds and 8 KiB, and figures that are computed once a second. Who can reach the port
can keep others from being answered there; not on the socket.

Claim: no figure is a record count, or depends on one but by how long a silo takes to answer, which the coordinator sees
anyway and its page tells; a silo's own page tells no time. Nothing says what a message held. Refusals are counted by
their code, which is public, and not by silo. ``tests/test_metrics_server.py`` tries each.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fedveil.errors import ConfigError
from fedveil.federation.hosts.sockets import RunningFolder, accept_connections, address, listen, listen_at
from fedveil.sanitize import sanitize

# --- figures of a served party ---

_BOUNDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, math.inf)


class Meter:
    """Counts what passes at the coordinator since it is served; any thread may.

    Args:
        silos: names of those that messages come from.
    """

    def __init__(self, silos: tuple[str, ...]) -> None:
        self._silos = silos
        self._lock = threading.Lock()
        self._messages: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._below: Counter[float] = Counter()
        self._waited = 0.0
        self._heard: dict[str, float] = {}

    def set_silos(self, silos: tuple[str, ...]) -> None:
        """Set the names, where the membership has changed."""
        with self._lock:
            self._silos = silos

    def count_message(self, outcome: str) -> None:
        """Count a silo's message by what became of it."""
        with self._lock:
            self._messages[outcome] += 1

    def count_refusal(self, code: str) -> None:
        """Count a refusal that ended a run, by the name of its code."""
        with self._lock:
            self._refusals[code.lower()] += 1

    def observe_latency(self, seconds: float) -> None:
        """Count an answer, by how long it was waited for."""
        with self._lock:
            self._waited += seconds
            self._below.update(bound for bound in _BOUNDS if seconds <= bound)

    def note_alive(self, silo: int) -> None:
        """Note that a silo lives, by its number."""
        with self._lock:
            self._heard[self._silos[silo]] = time.monotonic()

    def text(self) -> str:
        """Return all of it as Prometheus reads it."""
        with self._lock:
            lines = [
                *_by_label("fedveil_messages_total", "counter", "outcome", self._messages),
                *_by_label("fedveil_refusals_total", "counter", "code", self._refusals),
            ]
            if self._below:
                name = "fedveil_exchange_seconds"
                below = {
                    "+Inf" if bound == math.inf else f"{bound:g}": self._below[bound] for bound in _BOUNDS
                }
                lines.append(f"# TYPE {name} histogram")
                lines += [_sample(f"{name}_bucket", number, le=bound) for bound, number in below.items()]
                lines += [_sample(f"{name}_sum", self._waited), _sample(f"{name}_count", below["+Inf"])]
            now = time.monotonic()
            ago = {silo: now - contact for silo, contact in self._heard.items()}
            lines += _by_label("fedveil_silo_last_seen_seconds", "gauge", "silo", ago)
        return "".join(f"{line}\n" for line in lines)


def as_metrics(status: Mapping[str, Any]) -> str:
    """Return a party's status (:func:`~fedveil.federation.hosts.status.party_status`) as Prometheus reads it."""
    lines = [
        "# TYPE fedveil_build_info gauge",
        _sample("fedveil_build_info", 1, role=status["role"], version=status["version"]),
    ]
    figures = {
        "fedveil_served": int(status["served"]),
        "fedveil_membership_serial": status["membership"],
        "fedveil_certificate_days": status["certificate_days"],
        "fedveil_round": status.get("round"),
        "fedveil_rounds": status.get("rounds"),
        "fedveil_budget_spent_ratio": status.get("spent_ratio"),
    }
    if "spent_ratio" in status and status["spent_ratio"] is None:  # no epsilon is enough: above every limit
        figures["fedveil_budget_spent_ratio"] = "+Inf"
    connection = status.get("connection", {})
    if (connected := connection.get("link", connection.get("connected"))) is not None:
        figures["fedveil_connected"] = int(connected)
    for name, value in figures.items():
        if value is not None:
            lines += [f"# TYPE {name} gauge", _sample(name, value)]
    contact = connection.get("last_contact_seconds")
    if isinstance(contact, Mapping):
        lines += _by_label("fedveil_silo_contact_seconds", "gauge", "silo", contact)
    elif contact is not None:
        lines += [
            "# TYPE fedveil_last_contact_seconds gauge",
            _sample("fedveil_last_contact_seconds", contact),
        ]
    return "".join(f"{line}\n" for line in lines)


def _by_label(name: str, kind: str, label: str, values: Mapping[str, float]) -> list[str]:
    if not values:
        return []
    return [
        f"# TYPE {name} {kind}",
        *(_sample(name, value, **{label: text}) for text, value in sorted(values.items())),
    ]


def _sample(name: str, value: float | str, **labels: str) -> str:
    quoted = ",".join(
        f"{key}={json.dumps(sanitize(text), ensure_ascii=False)}" for key, text in labels.items()
    )
    return f"{name}{{{quoted}}} {value}" if quoted else f"{name} {value}"


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
        BusyError: the address is taken.
        ConfigError: other hosts reach the address.
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
        for connection in accept_connections(listener, lambda: not self._open):
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
                    _log.warning("the metrics cannot be computed: %s", type(error).__name__)
                    self._told = None
                self._until = time.monotonic() + self.fresh_seconds
            return self._told


def _listen_locally(port: str) -> socket.socket:
    host, number = local_port(port)
    return listen_at(host, number, f'metrics = "{port}"', backlog=8)


def _read(connection: socket.socket, seconds: float) -> bytes:
    """Return a question up to its empty line; what is no whole one by then is returned as it is.

    Raises:
        OSError: it did not arrive in time.
    """
    until, question = time.monotonic() + seconds, b""
    while b"\r\n\r\n" not in question and len(question) < _LONGEST:
        seconds_left = until - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError
        connection.settimeout(seconds_left)
        piece = connection.recv(_LONGEST - len(question))
        if not piece:
            break
        question += piece
    return question


def _response(status: HTTPStatus, text: str | None = None, *, body: bool = True) -> bytes:
    content = (f"{status.phrase}\n" if text is None else text).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; version=0.0.4; "
        f"charset=utf-8\r\nContent-Length: {len(content)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if body else b"")
