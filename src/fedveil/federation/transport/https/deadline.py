"""Network streams for httpcore whose reads and writes end by one moment together.

A timeout of each read alone, which httpcore has, lets a server or proxy hold the caller without end by sending one
byte after another. Within an https proxy, httpcore's own TLS has such a timeout too, so that it is carried here.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from ssl import MemoryBIO, SSLContext, SSLError, SSLObject, SSLWantReadError
from typing import Any, Final, TypeVar

import httpcore

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
        left = min(self.until - time.monotonic(), math.inf if timeout is None else timeout)
        if left <= 0:
            raise httpcore.ReadTimeout("too slow")
        return left

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
            found = self._resolve(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(error) from error
        failed: Exception = httpcore.ConnectError(f"{host} has no address")
        for *_, address in found:
            left = self.seconds_left(timeout)
            try:
                stream = self._network.connect_tcp(str(address[0]), port, left, local_address, socket_options)
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
        left = self._backend.seconds_left(timeout)
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._backend)

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
                done, found = True, step()
            except SSLWantReadError:
                done = False
            self._stream.write(self._to_send.read(), timeout)
            if done:
                return found
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
