"""One message of a channel in a test: who sends it, and what the server has of it."""

from __future__ import annotations

import numpy as np

from fedveil.methods.channels import Channel
from fedveil.methods.message_encoding import CodedMessage, Sender
from fedveil.randomness import PrivacyRandomness


def sender(
    privacy: PrivacyRandomness, number: int = 0, *, senders: int = 1, grid: float = 1.0, round: int = 1
) -> Sender:
    """Return a sender of a round, which counts what its message could cost at least."""
    return Sender(number=number, senders=senders, round=round, grid=grid, privacy=privacy)


def received(channel: Channel, values: np.ndarray, at: Sender) -> np.ndarray:
    """Return what the server has of a message: its numbers, or what it decodes from the bytes that travel."""
    message = channel.send(values, at)
    if message.coded is None:
        return message.numbers
    coded = CodedMessage.from_bytes(message.coded.to_bytes())
    return np.asarray(channel.decode(coded, senders=at.senders, length=len(values)))
