"""The silo's network process: fetches messages, hands each to the key process of its silo, and returns the answers.

It has the TLS client key and no other: no table, no identity key, no listening port.

Claim: an answer leaves only over TLS 1.3 to a server whose certificate is of the federation's authority, has not
expired, and has the key that the membership names. Whatever a server sends, this process holds at most ``largest``
bytes of it: no compression is asked for or undone, no redirect is followed, no cookie is kept. A request ends in time,
however slowly the server or a proxy sends or reads. ``tests/test_https_silo_client.py`` tries each.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from ssl import MemoryBIO, SSLContext, SSLError, SSLObject, SSLWantReadError
from typing import Any, Final, TypeVar

import httpcore

from fedveil.federation.enrollment.certificates import KeyDigests
from fedveil.federation.hosts.child_process import end_now, settings_of_parent
from fedveil.federation.transport.bridge import ask_key_process
from fedveil.federation.transport.https.connection_faults import (
    NETWORK_ERRORS,
    Fault,
    WrongServerKeyError,
    fault_of_error,
    fault_of_status,
    host_of_server,
    proxy_for,
    proxy_of_url,
)
from fedveil.federation.transport.interface import (
    ANSWER_PATH,
    MESSAGE_PATH,
    TAG_HEADER,
    AnswerMessage,
    NoAnswerError,
    split,
)
from fedveil.sanitize import FaultLog

_CONNECT_SECONDS: Final = 20.0
_ANSWER_SECONDS: Final = 60.0
"""For a request and its answer, beyond the time of their bytes: more than a poll takes."""

_LEAST_RATE: Final = float(1 << 14)
"""Bytes a second, below which a connection is too slow."""

_KEPT_SECONDS: Final = 25.0
"""Less than the mailbox keeps an idle connection."""

_REPLACED_SECONDS: Final = 10.0
_REPORT_SECONDS: Final = 5.0
_FINAL_STATUSES: Final = (
    HTTPStatus.NO_CONTENT,
    HTTPStatus.CONFLICT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
)
"""Of an answer that was brought: taken, answers no current message, too long. After any other it is brought again."""

_TAG: Final = re.compile(r"[\x21-\x7e]{1,100}")
_log = logging.getLogger("fedveil.silo")


class FaultError(Exception):
    """A request without a usable response.

    Args:
        fault: why.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.code)
        self.fault = fault


def client_context(folder: Path, server_key: str) -> ssl.SSLContext:
    """Return TLS 1.3 with the silo's certificate, for a server of one authority and one key.

    Args:
        folder: has ``ca.crt``, ``client.crt`` and ``node.key``.
        server_key: SHA-256 (hex) of the server's SubjectPublicKeyInfo.
    """
    digest_of = KeyDigests()

    def check(certificate: bytes | None) -> None:
        digest = digest_of(certificate or b"")
        if not digest or digest != server_key:
            raise WrongServerKeyError("the server has another key than the membership names")

    class PinnedSocket(ssl.SSLSocket):
        def getpeername(self) -> Any:
            """Close a socket without a peer: ``wrap_socket`` asks first, and would leave it open or without TLS."""
            try:
                return super().getpeername()
            except OSError as error:
                self.close()
                raise ConnectionResetError(errno.ECONNRESET, "closed before TLS began") from error

        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            check(self.getpeercert(binary_form=True))

    class PinnedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            check(self.getpeercert(binary_form=True))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "client.crt", folder / "node.key")
    context.sslsocket_class, context.sslobject_class = PinnedSocket, PinnedObject
    return context


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Deadline of a request, and waits between requests: exponential back-off with jitter, so that silos do not
    reconnect all at once.

    Attributes:
        first: seconds of the first wait.
        longest: seconds of the longest.
        answer_seconds: for a request and its answer, beyond the time of their bytes.
        sleep: waits.
    """

    first: float = 2.0
    longest: float = 30.0
    answer_seconds: float = _ANSWER_SECONDS
    sleep: Callable[[float], None] = time.sleep

    def wait(self, attempt: int) -> None:
        """Wait after a number of failures in a row."""
        seconds = min(self.longest, self.first * 2.0 ** min(attempt - 1, 10))
        self.sleep(seconds * random.uniform(0.3, 1.0))  # noqa: S311 (no secret)


@dataclass(frozen=True)
class Contact:
    """One request that the coordinator answered.

    Attributes:
        seconds: for which it took.
        skew: seconds by which this host's clock is ahead of the coordinator's, to about a second; None if the answer
            has no time.
    """

    seconds: float
    skew: float | None


def _skew(date: str) -> float | None:
    try:
        return time.time() - parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _expiry(response: httpcore.Response) -> float:
    """Return when the certificate of the server that answered expires (seconds since 1970)."""
    secured = response.extensions["network_stream"].get_extra_info("ssl_object")
    return float(ssl.cert_time_to_seconds(secured.getpeercert()["notAfter"]))


class SiloClient:
    """Fetches and answers messages until the caller ends it.

    Args:
        server: host and port of the coordinator.
        context: TLS.
        answer: the silo's key process.
        largest: bytes of the longest message that is read.
        report: called with a fault when the connection is lost, and with None when it is there again.
        retry: how long a request may take, and when it is made again.
    """

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext,
        answer: AnswerMessage,
        largest: int,
        report: Callable[[Fault | None], None] = lambda fault: None,
        retry: RetryPolicy = RetryPolicy(),
    ) -> None:
        self._server, self._answer, self._largest = server, answer, largest
        self._report, self._retry = report, retry
        self._proxy = proxy_for(server)
        self._host = host_of_server(server).encode("idna")
        self._port = int(server.rpartition(":")[2])
        self._network = TimedBackend()
        self._pool = httpcore.ConnectionPool(
            ssl_context=context,
            proxy=None if self._proxy is None else proxy_of_url(self._proxy),
            max_connections=1,
            keepalive_expiry=_KEPT_SECONDS,
            network_backend=self._network,
        )
        self._expires = math.inf  # when the certificate of the server does
        self._faults = FaultLog(_log)
        self._failures, self._connected = 0, False
        self._tag, self._message = "", b""
        self._next_report = 0.0

    def serve(self, is_ending: Callable[[], bool]) -> None:
        """Answer messages until ``is_ending()``."""
        with self._pool:
            while not is_ending():
                try:
                    if not self._connected:
                        self._greet()
                    if self._fetch():
                        self._answer_current(is_ending)
                except FaultError as error:
                    self._note_fault(error.fault)

    def ping(self) -> Contact:
        """Make one request that does not wait for a message; return what it shows.

        Raises:
            FaultError: there is no connection; says why.
        """
        with self._pool:
            began = time.monotonic()
            headers = self._greet()
            return Contact(time.monotonic() - began, _skew(headers.get("date", "")))

    def _greet(self) -> dict[str, str]:
        """Make a request that is answered at once: an answer to no message, which no mailbox takes."""
        status, headers, _ = self._request("POST", ANSWER_PATH, {"Answers": "none", "Content-Length": "0"})
        if status != HTTPStatus.CONFLICT:
            raise FaultError(fault_of_status(status, headers.get("cause", "")))
        self._note_connected()
        return headers

    def _fetch(self) -> bool:
        """Ask for the current message; return whether there is one to answer."""
        digest = sha256(self._message).hexdigest()
        status, headers, body = self._request(
            "GET", MESSAGE_PATH, {"If-None-Match": self._tag, "Have": digest}
        )
        if status not in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
            raise FaultError(fault_of_status(status, headers.get("cause", "")))
        self._note_connected()
        if "replaced" in headers:
            sentence = "another process fetches messages with this silo's key; is it served twice?"
            self._faults.warn("replaced", sentence)
            self._retry.sleep(_REPLACED_SECONDS)
        if status != HTTPStatus.OK:
            return False
        tag = headers.get(TAG_HEADER.lower(), "")
        if not _TAG.fullmatch(tag):
            raise FaultError(Fault("tag", f"{self._server}: sent a message without a valid {TAG_HEADER}"))
        self._tag = tag
        if "again" not in headers:
            self._message = body
        return True

    def _answer_current(self, is_ending: Callable[[], bool]) -> None:
        """Have the current message answered, and bring the answer, again after a fault."""
        try:
            answer = self._answer(self._message)
        except NoAnswerError as error:
            self._faults.warn("no-answer", f"a message was not answered: {error}")
            self._tag = ""  # the message is asked for again
            self._retry.wait(1)
            return
        while not is_ending():
            headers = {"Answers": self._tag, "Content-Length": str(len(answer))}
            try:
                status, headers_back, _ = self._request("POST", ANSWER_PATH, headers, split(answer))
                if status not in _FINAL_STATUSES:
                    raise FaultError(fault_of_status(status, headers_back.get("cause", "")))
            except FaultError as error:
                self._note_fault(error.fault)
                continue
            if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                self._faults.warn(
                    "answer-too-long", f"the coordinator accepts no answer of {len(answer)} bytes"
                )
            return  # taken, or another message is current: that one is asked for next

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], content: Iterator[bytes] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers (names in lower case) and body of an answer, of at most ``largest`` bytes.

        Args:
            method: HTTP method of the request.
            path: path of the request.
            headers: headers of the request, with ``Content-Length`` where there is content.
            content: pieces of the body; None: there is none.

        Raises:
            FaultError: there is no usable answer.
        """
        if time.time() > self._expires:
            self._pool.close()  # the next handshake finds out what the server has now
            self._expires = math.inf
        fields = {"Host": self._server, "Accept-Encoding": "identity", **headers}
        seconds = self._retry.answer_seconds + int(headers.get("Content-Length", 0)) / _LEAST_RATE
        until = time.monotonic() + seconds
        self._network.until = until
        try:
            with self._pool.stream(
                method,
                httpcore.URL(scheme=b"https", host=self._host, port=self._port, target=path),
                headers=[(name.encode(), value.encode()) for name, value in fields.items()],
                content=content,
                extensions={"timeout": {"connect": _CONNECT_SECONDS}},
            ) as response:
                self._expires = _expiry(response)
                answer_headers = {
                    key.decode("latin-1").lower(): value.decode("latin-1") for key, value in response.headers
                }
                if answer_headers.get("content-encoding", "identity") != "identity":
                    raise FaultError(Fault("encoded", f"{self._server}: sent a compressed answer"))
                body = bytearray()
                for piece in response.iter_stream():
                    body += piece
                    if len(body) > self._largest:
                        limit = f"{self._largest} bytes (policy.toml: max_message_bytes)"
                        raise FaultError(Fault("message-too-long", f"{self._server}: sent more than {limit}"))
                    self._network.until = until + len(body) / _LEAST_RATE
                return response.status, answer_headers, bytes(body)
        except NETWORK_ERRORS as error:
            raise FaultError(fault_of_error(error, self._server, self._proxy)) from error

    def _note_connected(self) -> None:
        """Log a new connection, and report the contact, every few seconds at most."""
        if not self._connected:
            _log.info("connected to the coordinator at %s", self._server)
            self._faults.forget()
        now = time.monotonic()
        if not self._connected or now >= self._next_report:
            self._report(None)
            self._next_report = now + _REPORT_SECONDS
        self._failures, self._connected = 0, True

    def _note_fault(self, fault: Fault) -> None:
        self._failures, self._connected = self._failures + 1, False
        self._faults.warn(fault.code, fault.sentence)
        self._report(fault)
        self._retry.wait(self._failures)


def answer_by_key_process(path: Path) -> AnswerMessage:
    """Return a function that sends a message to the key process at a socket and returns its answer."""

    def answer(message: bytes) -> bytes:
        try:
            return ask_key_process(str(path), message)
        except OSError as error:
            raise NoAnswerError(str(error)) from error

    return answer


def report_to_parent(fault: Fault | None) -> None:
    """Write the state of the connection as a line of JSON for the process that started this one."""
    state = None if fault is None else {"code": fault.code, "sentence": fault.sentence}
    print(json.dumps({"fault": state}), flush=True)


# --- streams with one deadline ---
# Network streams for httpcore whose reads and writes end by one moment together. A timeout of each read alone, which
# httpcore has, lets a server or proxy hold the caller without end by sending one byte after another. Within an https
# proxy, httpcore's own TLS has such a timeout too, so that it is carried here.


_PIECE_BYTES: Final = 1 << 14
"""Of one write: TLS takes a record of at most so many bytes whole, or fails."""
_T = TypeVar("_T")


class TimedBackend(httpcore.NetworkBackend):
    """Opens the connections of a client that makes one request at a time.

    Attributes:
        until: on the monotonic clock; later nothing is read or written any more.

    Args:
        resolve: finds the addresses of a host, as ``socket.getaddrinfo`` does, whose own time is the resolver's.
    """

    def __init__(self, resolve: Callable[..., Any] = socket.getaddrinfo) -> None:
        self.until, self._resolve = math.inf, resolve
        self._network = httpcore.SyncBackend()

    def seconds_left(self, timeout: float | None) -> float:
        """Return the time left for a read or write with a timeout of its own.

        Raises:
            httpcore.ReadTimeout: none.
        """
        seconds = min(self.until - time.monotonic(), math.inf if timeout is None else timeout)
        if seconds <= 0:
            raise httpcore.ReadTimeout("too slow")
        return seconds

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of a host that answers."""
        try:
            addresses = self._resolve(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(error) from error
        failed: Exception = httpcore.ConnectError(f"{host} has no address")
        for *_, address in addresses:
            seconds = self.seconds_left(timeout)
            try:
                stream = self._network.connect_tcp(
                    str(address[0]), port, seconds, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
            else:
                return _TimedStream(stream, self)
        raise failed


class _TimedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, backend: TimedBackend) -> None:
        self._stream, self._backend = stream, backend

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._backend.seconds_left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            self._stream.write(piece, self._backend.seconds_left(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        if self._stream.get_extra_info("ssl_object") is not None:
            return _InnerTls(self, ssl_context, server_hostname, timeout)
        seconds = self._backend.seconds_left(timeout)
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, seconds), self._backend)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _InnerTls(httpcore.NetworkStream):
    """TLS within the TLS of a proxy, carried by reads and writes of a timed stream."""

    def __init__(
        self, stream: _TimedStream, context: SSLContext, hostname: str | None, timeout: float | None
    ) -> None:
        self._stream, self._received, self._to_send = stream, MemoryBIO(), MemoryBIO()
        self._tls: SSLObject = context.wrap_bio(self._received, self._to_send, server_hostname=hostname)
        try:
            self._carry(self._tls.do_handshake, timeout)
        except SSLError as error:
            self.close()
            raise httpcore.ConnectError(error) from error
        except httpcore.TimeoutException as error:
            self.close()
            raise httpcore.ConnectTimeout(error) from error

    def _carry(self, step: Callable[[], _T], timeout: float | None) -> _T:
        """Take a step of TLS; send what it wants sent, and receive until it has what it needs."""
        while True:
            try:
                is_done, result = True, step()
            except SSLWantReadError:
                is_done = False
            self._stream.write(self._to_send.read(), timeout)
            if is_done:
                return result
            if piece := self._stream.read(_PIECE_BYTES, timeout):
                self._received.write(piece)
            else:
                self._received.write_eof()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return self._carry(lambda: self._tls.read(max_bytes), timeout)
        except SSLError as error:
            raise httpcore.ReadError(error) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            for start in range(0, len(buffer), _PIECE_BYTES):
                piece = buffer[start : start + _PIECE_BYTES]
                self._carry(partial(self._tls.write, piece), timeout)
        except SSLError as error:
            raise httpcore.WriteError(error) from error

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._tls if info == "ssl_object" else self._stream.get_extra_info(info)


# --- the process ---


def main() -> None:
    """Serve until the parent ends."""
    settings = settings_of_parent(end_now)
    folder = Path(settings["folder"])
    client = SiloClient(
        settings["coordinator"],
        client_context(folder, settings["server_key"]),
        answer_by_key_process(Path(settings["key_process"])),
        settings["largest"],
        report_to_parent,
    )
    client.serve(lambda: False)


if __name__ == "__main__":
    main()
