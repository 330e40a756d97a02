"""The seam between the parties of a federation and whatever carries their messages.

The coordinator has at most one current message for each silo. A transport delivers the current message to its silo, and
again to a silo that asks again. So a transport needs no acknowledgements, no timers that send again, and no list of
the silos that are online: what it loses, the silo fetches again. This module imports the standard library alone,
because the processes that face the network are small.

Frames of messages between the coordinator and its mailbox, and the mailbox's paths and header fields.

frame: silo (4 bytes) | length (8 bytes) | message; a length of 0 withdraws the silo's current message

Size limits that every party applies to input before it parses the input.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

# --- the seam ---

AnswerMessage = Callable[[bytes], bytes]
"""The silo's end of a transport: returns the answer to a message. Raises NoAnswerError."""


class NoAnswerError(OSError):
    """The silo's key process refused the message or is not there; its own log says why."""


@dataclass(frozen=True)
class Received:
    """A message of a silo, as a transport delivers it.

    Attributes:
        silo: number of the silo that the transport authenticated. The coordinator verifies the signature itself: a
            transport that reports another number can stop a run and do nothing else.
        message: the bytes.
    """

    silo: int
    message: bytes


class Transport(Protocol):
    """The coordinator's end of a transport; one thread uses it."""

    def offer(self, messages: Mapping[int, bytes], withdrawn: Collection[int] = ()) -> None:
        """Set the current message of some silos.

        A message is delivered until it is replaced or withdrawn. Offering the same bytes again asks the silo again.

        Args:
            messages: the messages by silo number.
            withdrawn: silos that have no current message any more.
        """

    def collect(self, seconds: float) -> list[Received]:
        """Return the answers that have arrived; wait for the first of them at most this long.

        An answer may be returned twice, late, or after a newer offer.
        """

    def close(self) -> None:
        """Release connections. The last offer may still be delivered: a silo that was away learns that a run ended."""


# --- frames between coordinator and mailbox ---

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

    httpcore sends a body of n bytes given as one ``bytes`` object under TLS in time that grows with n^2: it slices the
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


# --- size limits ---


LARGEST_MESSAGE: Final = 1 << 28
"""Largest signed message in bytes; a longer one is refused unread. A policy may set a lower limit."""

LARGEST_OPENING: Final = 1 << 22
"""Largest message in bytes outside a current session.

Also the allowance for a message of a session in addition to the model and the protocol's messages.
"""

BEGINNING: Final = 128
"""Bytes of a message that decide whether the rest is read. The header of a message is shorter."""

LARGEST_EXPERIMENT: Final = 1 << 16
"""Largest experiment document, in characters, that a silo parses."""

LARGEST_STATEMENT: Final = 1 << 20
"""Largest privacy statement, in characters, that a silo reads and signs."""
