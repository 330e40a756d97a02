"""A letter in a Flower message: one record that holds its bytes."""

from __future__ import annotations

import hashlib
from typing import Final

from flwr.app import ConfigRecord, Message, RecordDict

from fedveil.protection.errors import ProtocolError

RECORD: Final = "fedveil"
"""The record of a Flower message that holds a letter under the key "letter"."""


def content_of(letter: bytes) -> RecordDict:
    """Return the content of a message that carries a letter."""
    return RecordDict({RECORD: ConfigRecord({"letter": letter})})


def reminder_of(letter: bytes) -> RecordDict:
    """Return the content of a message that asks again for the answer to a letter, and does not bring the letter."""
    return RecordDict({RECORD: ConfigRecord({"again": hashlib.sha256(letter).digest()})})


def letter_in(message: Message) -> bytes:
    """Return the letter that a message carries.

    Raises:
        ProtocolError: it carries none.
    """
    return _bytes_in(message, "letter")


class LastLetter:
    """The letter that came last, for the messages that remind of it."""

    def __init__(self) -> None:
        self._letter = b""

    def of(self, message: Message) -> bytes:
        """Return the letter that a message carries or reminds of.

        Raises:
            ProtocolError: it does neither.
        """
        try:
            self._letter = letter_in(message)
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
