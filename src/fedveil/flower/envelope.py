"""A letter in a Flower message: one record that holds its bytes."""

from __future__ import annotations

from typing import Final

from flwr.app import ConfigRecord, Message, RecordDict

from fedveil.protection.errors import ProtocolError

RECORD: Final = "fedveil"
"""The record of a Flower message that holds a letter under the key "letter"."""


def content_of(letter: bytes) -> RecordDict:
    """Return the content of a message that carries a letter."""
    return RecordDict({RECORD: ConfigRecord({"letter": letter})})


def letter_in(message: Message) -> bytes:
    """Return the letter that a message carries.

    Raises:
        ProtocolError: it carries none.
    """
    record = message.content.config_records.get(RECORD) if message.has_content() else None
    letter = None if record is None else record.get("letter")
    if not isinstance(letter, bytes):
        raise ProtocolError("a message holds no letter")
    return letter
