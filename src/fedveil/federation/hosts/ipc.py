"""Frames on local sockets, between a silo's key process and its transport and to submit a run; a run's outcome.

frame: length (8) | bytes        request: one frame        answer: one byte, 0 message or 1 refusal, and one frame
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fedveil.errors import ProtocolError
from fedveil.federation.transport.interface import BEGINNING, LARGEST_MESSAGE

_LENGTH: Final = struct.Struct(">Q")


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Send bytes, preceded by their length."""
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive_frame(
    connection: socket.socket,
    longest: Callable[[bytes], int] = lambda beginning: LARGEST_MESSAGE,
    allow: Callable[[int], None] = lambda length: None,
) -> bytes:
    """Return the bytes of a frame.

    Args:
        connection: where they come from.
        longest: how many they may be, by the first :data:`BEGINNING` of them; no more are read of a longer frame.
        allow: called with their number, before the rest of them is read.

    Raises:
        ProtocolError: longer than that, or cut short.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, b"", _LENGTH.size))
    beginning = _exactly(connection, b"", min(length, BEGINNING))
    if length > (limit := longest(beginning)):
        raise ProtocolError(f"a frame of {length} bytes is above the limit of {limit}")
    allow(length)
    return _exactly(connection, beginning, length)


def _exactly(connection: socket.socket, begun: bytes, length: int) -> bytes:
    """Return so many bytes, of which some have been received."""
    received = bytearray(begun)
    while len(received) < length:
        some = connection.recv(min(length - len(received), 1 << 20))
        if not some:
            raise ProtocolError(f"a frame ends {length - len(received)} bytes early")
        received += some
    return bytes(received)


# --- outcome of a submitted run ---


END: Final = "run_end.json"
"""Written when a run's play ends: an :class:`RunOutcome`."""

SOCKET: Final = "party"
"""The coordinator's socket for submissions, in its folder ``run``."""


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a submitted run.

    Attributes:
        error: what went wrong, if anything.
        stopped: why it ended before its last round, if it did.
        silent: silos whose silence has ended it.
    """

    error: str | None
    stopped: str | None
    silent: tuple[str, ...]
