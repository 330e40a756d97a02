"""Declare what a stage can do beyond its kind: a channel beyond sending numbers, a protection that has votes.

A channel implements the capabilities that it has, and nothing of the others. The composition and the protocols ask
``isinstance(channel, Capability)`` for a capability, never for a concrete class. The functions below give a fact of
any channel: that of the capability, or the fact of a channel without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.methods.message_encoding import CodedMessage
from fedveil.randomness import BitSource


@runtime_checkable
class ServerNoise(Protocol):
    """Noise that the server adds to the sum, so that it is trusted with every update."""

    def release(
        self, total: Float64[np.ndarray, " d"], grid: float, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Return the released sum of all messages, with the noise of the server."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Messages that may be byte strings, each sealed under its own key.

    Attributes:
        sends_bytes: whether messages are bytes, instead of numbers.
    """

    @property
    def sends_bytes(self) -> bool: ...

    def decode(self, coded: CodedMessage, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode one byte message to the vector that it represents, noise included.

        Args:
            coded: the message with its key.
            senders: number of messages in the round.
            length: number of coordinates.

        Raises:
            ChannelError: not a message of this channel.
        """
        ...


@runtime_checkable
class ClientSender(Protocol):
    """Every client sends its own message, with its own noise.

    Attributes:
        senders: number of clients that send in a round.
    """

    @property
    def senders(self) -> int: ...


@runtime_checkable
class SharedNoise(Protocol):
    """Senders add shares of one noise.

    Attributes:
        colluding_silos: number of senders that may pool their knowledge without weakening the noise against them.
    """

    @property
    def colluding_silos(self) -> int: ...

    def nominal(self) -> float:
        """Return the noise multiplier of the sum, in units of the scale."""
        ...


@runtime_checkable
class GridShares(SharedNoise, Protocol):
    """Shares of one noise on whole numbers of one grid, in a range known in advance.

    Only then can masks be added to messages, and only then is the sum useful by itself.

    Attributes:
        max_dropouts: number of senders that may be missing from a sum, with their noise, without weakening it.
    """

    @property
    def max_dropouts(self) -> int: ...

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the grid step of a silo's message, given that of the contributions."""
        ...

    def sized_for_dropouts(self, max_dropouts: int) -> Any:
        """Return the channel with noise sized for sums without ``max_dropouts`` senders."""
        ...

    def sized_for_users(self, n_users: int) -> Any:
        """Return the channel with a noise grid on which sums over ``n_users`` users are exact."""
        ...

    def with_word_bits(self, word_bits: Any) -> Any:
        """Return the channel with messages for masked words of another number of bits."""
        ...

    def sized_for_words(self, n_senders: int, bound: Any, *, masked: bool) -> Any:
        """Return the channel with the grid to which messages are rounded after their noise."""
        ...

    def largest_sum(self, n_senders: int, bound: Any) -> int | None:
        """Return the largest coordinate of a sum for which words have room, in grid steps; None if any sum fits."""
        ...

    def check_steps(self, n_senders: int) -> None:
        """Check that rounded messages have enough noise for the claims.

        Raises:
            CompositionError: they have less.
        """
        ...


@runtime_checkable
class DecayingNoise(Protocol):
    """Noise that may decay from round to round.

    Attributes:
        supports_noise_decay: whether the claims account for it.
    """

    @property
    def supports_noise_decay(self) -> bool: ...

    def scaled_noise(self, factor: float) -> Any:
        """Return the channel with its noise multiplied by a factor."""
        ...

    def check_fine(self, n_silos: int, grid: float) -> None:
        """Check that the grid of decaying noise stays fine enough for the loss that is stated for every round.

        Raises:
            CompositionError: sums over so many users leave the grid too coarse.
        """
        ...


@runtime_checkable
class StatefulNoise(Protocol):
    """Messages that contain parts of a sender's earlier sums, so that noise of different rounds cancels.

    Attributes:
        memory: number of earlier sums of which a sender adds parts to its message.
        gain: largest ratio of the norm of a sender's message to the norm of its sums, without noise.
        strengths: strengths of the rounds, repeated. If the claims state the multiplier z, a round has z /
            sqrt(strength). A round of strength 0 is not charged: it does not increase the largest change that one
            unit can cause over all rounds so far.
    """

    @property
    def memory(self) -> int: ...

    @property
    def gain(self) -> float: ...

    @property
    def strengths(self) -> tuple[float, ...]: ...

    def encode_sums(self, sums: Sequence[Float64[np.ndarray, " d"]]) -> Float64[np.ndarray, " d"]:
        """Return the message before noise, given a silo's sums, this round's first."""
        ...

    def init(self, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
        """Return the reader's state before the first round, for messages of ``length`` coordinates."""
        ...

    def decode_sum(
        self,
        total: Float64[np.ndarray, " length"],
        state: Mapping[str, Tensor],
        model: Float32[Tensor, " d"],
        unit: float,
    ) -> tuple[Float64[np.ndarray, " length"], Mapping[str, Tensor]]:
        """Return the round's own sum with its noise, given the received total, and the reader's next state.

        Args:
            total: the sum of all messages.
            state: the reader's state from :meth:`init` or the previous round.
            model: model at the start of the round.
            unit: unit in which the round's messages are measured.
        """
        ...


@runtime_checkable
class VoteNoise(Protocol):
    """Protection whose senders vote for coordinates.

    Attributes:
        noisy_votes: whether the counts of the votes have noise.
    """

    @property
    def noisy_votes(self) -> bool: ...

    def with_vote_noise(self, multiplier: float, ballots: int) -> Any:
        """Return the protection with votes that are a Gaussian release of this multiplier in every round.

        Args:
            multiplier: noise multiplier of one round's votes.
            ballots: number of ballots that one unit can change.

        Raises:
            CompositionError: the votes' noise is already set.
        """
        ...


# --- facts of any channel -----------------------------------------------------------------------------------------


def sends_bytes(channel: Any) -> bool:
    """Return whether messages are bytes."""
    return isinstance(channel, Codec) and channel.sends_bytes


def count_senders(channel: Any, n_silos: int) -> int:
    """Return the number of messages in a round."""
    return channel.senders if isinstance(channel, ClientSender) else n_silos


def count_colluding(channel: Any) -> int:
    """Return the number of senders that may pool their knowledge without weakening the noise against them."""
    return channel.colluding_silos if isinstance(channel, SharedNoise) else 0


def count_dropouts(channel: Any) -> int:
    """Return the number of senders that may be missing from a sum without weakening its noise."""
    return channel.max_dropouts if isinstance(channel, GridShares) else 0


def nominal_multiplier(channel: Any) -> float:
    """Return the noise multiplier of the sum, in units of the scale; 0 if senders share no noise."""
    return channel.nominal() if isinstance(channel, SharedNoise) else 0.0


def supports_decay(channel: Any) -> bool:
    """Return whether the claims account for noise that decays from round to round."""
    return isinstance(channel, DecayingNoise) and channel.supports_noise_decay


def round_strengths(channel: Any) -> tuple[float, ...]:
    """Return the strengths of the rounds, repeated; all 1 if a message depends on one round only."""
    return channel.strengths if isinstance(channel, StatefulNoise) else (1.0,)


def memory_of(channel: Any) -> int:
    """Return the number of earlier sums in a message."""
    return channel.memory if isinstance(channel, StatefulNoise) else 0


def gain_of(channel: Any) -> float:
    """Return the largest ratio of the norm of a sender's message to the norm of its sums, without noise."""
    return channel.gain if isinstance(channel, StatefulNoise) else 1.0
