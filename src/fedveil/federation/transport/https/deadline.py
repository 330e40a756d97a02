"""Network streams for httpcore whose reads and writes end by one moment together.

A timeout of each read alone, which httpcore has, lets a server or proxy hold the caller without end by sending one
byte after another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from ssl import SSLContext
from typing import Any, Final

import httpcore

_PIECE_BYTES: Final = 1 << 14
"""Of one write: TLS takes a record of at most so many bytes whole, or fails."""


class TimedBackend(httpcore.NetworkBackend):
    """Opens the connections of a client that makes one request at a time.

    Attributes:
        until: on the monotonic clock; later nothing is read or written any more.
    """

    def __init__(self) -> None:
        self.until = math.inf
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
        """Connect to a host and port."""
        left = self.seconds_left(timeout)
        return _TimedStream(self._network.connect_tcp(host, port, left, local_address, socket_options), self)


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
        left = self._backend.seconds_left(timeout)
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._backend)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
