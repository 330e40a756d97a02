"""Frames on the local socket between a silo's guard and whoever carries its letters.

frame: length (8) | bytes        question: one frame        answer: one byte, 0 letter or 1 refusal, and one frame
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedveil.federation.limits import BEGINNING, LARGEST_LETTER
from fedveil.flower.sockets import address
from fedveil.protocols.errors import ProtocolError
from fedveil.sanitize import sanitize

_LENGTH: Final = struct.Struct(">Q")


def ask(path: Path, letter: bytes) -> bytes:
    """Hand a letter to the guard of this host; return the answering letter.

    Raises:
        ProtocolError: the guard refused the letter.
        OSError: there is no guard.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address(path))
        send_frame(connection, letter)
        status = _exactly(connection, b"", 1)[0]
        answer = receive_frame(connection)
    if status:
        raise ProtocolError(sanitize(answer.decode(errors="replace")))
    return answer


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Send bytes, preceded by their length."""
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive_frame(
    connection: socket.socket, longest: Callable[[bytes], int] = lambda beginning: LARGEST_LETTER
) -> bytes:
    """Return the bytes of a frame.

    Args:
        connection: where they come from.
        longest: how many they may be, by the first :data:`BEGINNING` of them; no more are read of a longer frame.

    Raises:
        ProtocolError: longer than that, or cut short.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, b"", _LENGTH.size))
    beginning = _exactly(connection, b"", min(length, BEGINNING))
    if length > (limit := longest(beginning)):
        raise ProtocolError(f"a frame of {length} bytes is above the limit of {limit}")
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
