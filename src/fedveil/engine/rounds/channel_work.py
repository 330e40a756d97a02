"""What clients give of sums that go through a channel, whatever the sums are of: updates of a model, or statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from jaxtyping import Float64

from fedveil.methods.channels import Channel
from fedveil.methods.sending import MessageCost, Sender, Sending
from fedveil.protection.protocol import Agreement, Drawn
from fedveil.protection.weighting.silo import SEED_BYTES


class ChannelWork(ABC):
    """What clients give to one sum, as their protocol takes it (:class:`fedveil.protection.work.Work`).

    Attributes:
        agreed: what the parties agree on.
        costs: of every message of a channel that counts them.

    Args:
        agreed: what the parties agree on.
        channel: what makes messages of sums.
        length: d of a message.
    """

    def __init__(self, agreed: Agreement[Any, Any], channel: Channel, length: int) -> None:
        self.agreed, self._channel, self._length, self._attempt = agreed, channel, length, 0
        self.costs: list[MessageCost] = []

    def begin(self, attempt: int) -> Drawn | None:
        """Begin an attempt, whose noise is its own; return who was drawn, None for all."""
        self._attempt = attempt
        return None

    def give(self, client: int) -> Any:
        """Return what a client contributes to the attempt."""
        return self.agreed.given(self, client)

    @abstractmethod
    def bare(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's bounded, weighted sum before its channel."""

    @abstractmethod
    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return a client's contributions by themselves, each with weight 1."""

    def message(self, client: int) -> Float64[np.ndarray, " d"] | bytes:
        """Return what the channel makes of a client's sum, and note what it costs where that is counted."""
        sending = self._sent(self.bare(client), client)
        if sending.cost is not None:
            self.costs.append(sending.cost)
        return sending.payload

    def share(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's share of the noise."""
        return self._sent(np.zeros(self._length), client).numbers

    def dither(self, client: int) -> bytes:
        """Return the 32-byte key of a client's share of the remainders modulo C."""
        at = self._sender(client)
        return at.privacy.stream("dither", at.round, client, at.attempt).uint64(SEED_BYTES // 8).tobytes()

    def moved(self) -> Float64[np.ndarray, " d"]:
        """Return how far the model has moved: by zeros, where the sum is no step of one."""
        return np.zeros(self._length)

    @abstractmethod
    def _sender(self, client: int) -> Sender:
        """Return a client as the channel needs to know it, in this attempt."""

    def _sent(self, vector: Float64[np.ndarray, " d"], client: int) -> Sending:
        return self._channel.send(vector, self._sender(client))
