"""A letter in a Flower message: one record that holds its bytes; or beside one, as the one object that it names.

object: "ConfigRecord  LENGTH" | 0 | nonce (32) | letter        named by its SHA-256, as the message that it is beside

A SuperNode sends what it answers as such an object, and takes no message that names none: a letter to it is in its
message, and the object beside it holds nothing but the nonce.
"""

from __future__ import annotations

import hashlib
from typing import Final

from flwr.app import ConfigRecord, Message, RecordDict

from fedveil.protocols.errors import ProtocolError

_TO_LETTER: Final = (2, 2, 1, 4, 1, 2, 6)
"""Numbers of the fields that lead from a push to the bytes of a letter: message, content, record, its configuration,
entry, value, bytes."""
_TO_OBJECT: Final = (4,)
"""The same of the push of an object."""
_LENGTH: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of protobuf's numbers of a fixed size, by their kind on the wire."""
_NOWHERE: Final = 1 << 62
_BEHIND: Final = 1 << 12
"""Bytes that may stand behind a letter."""

_HEAD: Final = b"ConfigRecord  %d\0"
_LONGEST_HEAD: Final = 64
NONCE_BYTES: Final = 32

RECORD: Final = "fedveil"
"""The record of a Flower message that holds a letter under the key "letter"."""


def pack_message(letter: bytes) -> RecordDict:
    """Return the content of a message that carries a letter."""
    return RecordDict({RECORD: ConfigRecord({"letter": letter})})


def pack_reminder(letter: bytes) -> RecordDict:
    """Return the content of a message that asks again for the answer to a letter, and does not bring the letter."""
    return RecordDict({RECORD: ConfigRecord({"again": hashlib.sha256(letter).digest()})})


def unpack_message(message: Message) -> bytes:
    """Return the letter that a message carries.

    Raises:
        ProtocolError: it carries none.
    """
    return _bytes_in(message, "letter")


def object_of(nonce: bytes, letter: bytes = b"") -> bytes:
    """Return the object that carries a letter, or none; 32 random bytes make it another one each time."""
    return _HEAD % (len(nonce) + len(letter)) + nonce + letter


def name_of(content: bytes) -> str:
    """Return the name of an object."""
    return hashlib.sha256(content).hexdigest()


def letter_of(content: bytes) -> bytes:
    """Return the letter that an object carries; no bytes, where it carries none.

    Raises:
        ProtocolError: it is no such object.
    """
    head = content[: content.find(b"\0", 0, _LONGEST_HEAD) + 1]
    if head != _HEAD % (len(content) - len(head)) or len(content) < len(head) + NONCE_BYTES:
        raise ProtocolError("an object holds no letter")
    return content[len(head) + NONCE_BYTES :]


def object_end(head: bytes) -> int:
    """Return where the object ends that a push brings, as :func:`letter_end` does for a message."""
    return letter_end(head, _TO_OBJECT)


def letter_end(head: bytes, fields: tuple[int, ...] = _TO_LETTER) -> int:
    """Return where the letter ends that a push of one message brings: nothing of it is parsed.

    Args:
        head: the bytes that the push begins with; it is longer.
        fields: numbers of the fields that lead to it.

    Raises:
        ValueError: no letter goes beyond them, or nearly to their end.
    """
    at = 0
    for number in fields:
        while True:
            tag, at = _varint(head, at)
            length, after = (
                _varint(head, at) if tag & 7 in (0, _LENGTH) else (_FIXED.get(tag & 7, _NOWHERE), at)
            )
            end = after if tag & 7 == 0 else after + length
            if tag == number << 3 | _LENGTH and end > len(head) - _BEHIND:
                at = after
                break
            at = end
    return end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's at a place, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("no number")


class LastMessage:
    """The letter that came last, for the messages that remind of it."""

    def __init__(self) -> None:
        self._letter = b""

    def resolve(self, message: Message) -> bytes:
        """Return the letter that a message carries or reminds of.

        Raises:
            ProtocolError: it does neither.
        """
        try:
            self._letter = unpack_message(message)
        except ProtocolError:
            if _bytes_in(message, "again") != hashlib.sha256(self._letter).digest():
                raise
        return self._letter


def _bytes_in(message: Message, name: str) -> bytes:
    record = message.content.config_records.get(RECORD) if message.has_content() else None
    value = None if record is None else record.get(name)
    if not isinstance(value, bytes):
        raise ProtocolError("a message holds no letter")
    return value
