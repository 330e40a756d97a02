"""Frames of messages between the coordinator and its mailbox, and the mailbox's paths and header fields.

frame: silo (4 bytes) | length (8 bytes) | message; a length of 0 withdraws the silo's current message
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

HEADER: Final = struct.Struct(">IQ")
"""Silo number and length of a message, big-endian."""

_PIECE_BYTES: Final = 1 << 18


def pack_frames(messages: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the bytes of frames in pieces of at most 256 KiB, so that no message is copied whole."""
    for silo, message in messages:
        yield HEADER.pack(silo, len(message))
        yield from split(message)


def frames_length(messages: Iterable[tuple[int, bytes]]) -> int:
    """Return how many bytes :func:`pack_frames` yields."""
    return sum(HEADER.size + len(message) for _, message in messages)


def unpack_frames(data: bytes) -> list[tuple[int, bytes]]:
    """Return the silo number and message of each frame.

    Raises:
        ValueError: a frame is cut short.
    """
    messages, start, view = [], 0, memoryview(data)
    while start < len(data):
        if len(data) - start < HEADER.size:
            raise ValueError("a frame is cut short")
        silo, length = HEADER.unpack_from(data, start)
        start += HEADER.size
        if length > len(data) - start:
            raise ValueError("a frame is cut short")
        messages.append((silo, bytes(view[start : start + length])))
        start += length
    return messages


def split(data: bytes) -> Iterator[bytes]:
    """Yield a body in pieces of 256 KiB.

    httpx sends a body of n bytes given as one ``bytes`` object under TLS in time that grows with n^2: it slices the
    rest after every call of ``send``.
    """
    view = memoryview(data)
    for start in range(0, len(data), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


# --- paths and header fields of the mailbox ------------------------------------------------------------------


MESSAGE_PATH: Final = "/v1/message"
ANSWER_PATH: Final = "/v1/answer"
MEMBERS_PATH: Final = "/v1/members"
MESSAGES_PATH: Final = "/v1/messages"
ANSWERS_PATH: Final = "/v1/answers"

TAG_HEADER: Final = "ETag"
"""Names the offer of a message; a silo returns it as ``If-None-Match``, and as ``Answers`` with its answer."""

MAILBOX_HEADER: Final = "Mailbox"
"""Name of the mailbox process; a new one means that nothing has been offered to it."""
