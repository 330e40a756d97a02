"""Define channels of numbers: the noise and encoding between a sender's sum and the released sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.errors import CompositionError
from fedveil.methods.message_encoding import CodedMessage, EncodedMessage, Sender
from fedveil.privacy.claims import Claim, Reveals, no_guarantee
from fedveil.randomness import BitSource
from fedveil.stage import Sensitivity, Source


class Channel(Source):
    """Operation of a sender on its sum before it leaves the sender, or of the server on the sum of all.

    By default, a message depends on one round only: the channel has no memory, and all rounds cost the same.

    Attributes:
        content: information that a message reveals to its reader.
        sends_bytes: whether a message is a byte string that is sealed under its own key, instead of numbers.
        order: p of the norm l_p in which the noise is measured.
        by_server: whether the server adds the noise, so that it is trusted with every update.
        by_clients: whether every client sends its own message, with its own noise.
        whole: whether messages are whole numbers on one grid, in a range known in advance, with their share of one
            noise. Only then can masks be added, and only then is the sum useful by itself.
        memory: number of earlier sums of which a sender adds parts to its message.
        gain: largest ratio of the norm of a sender's message to the norm of its sums, without noise.
        strengths: strengths of the rounds, repeated. If the claims state the multiplier z, a round has z /
            sqrt(strength). A round of strength 0 is not charged: it does not increase the largest change that one
            unit can cause over all rounds so far.
    """

    order: ClassVar[int] = 2
    by_server: ClassVar[bool] = False
    by_clients: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    # --- sending and decoding -------------------------------------------------------------------------------

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> EncodedMessage:
        """Return a sender's message; this default sends the sum unchanged if ``content`` declares that.

        Args:
            total: (d,) the bounded sum, or a client's bounded update.
            at: the sender, round and attempt.

        Raises:
            CompositionError: the channel neither overrides this method nor declares that sums are sent unchanged.
        """
        if self.content is not Reveals.EXACT:
            raise CompositionError(
                f"{type(self).__name__} does not say how a silo's sum travels; nothing was sent"
            )
        return EncodedMessage(values=total)

    def decode(self, coded: CodedMessage, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode one byte message to the vector that it represents, noise included.

        Args:
            coded: the message with its key.
            senders: number of messages in the round.
            length: number of coordinates.

        Raises:
            CompositionError: the channel sends numbers.
            ChannelError: not a message of this channel.
        """
        raise CompositionError(f"{type(self).__name__} sends numbers; there is nothing to decode")

    def release(
        self, total: Float64[np.ndarray, " d"], grid: float, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Return the released sum of all messages; a server that adds noise adds it here."""
        return total

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the grid step of a silo's message, given that of the contributions; equal without noise."""
        return grid

    def n_senders(self, n_silos: int) -> int:
        """Return the number of messages in a round."""
        return n_silos

    def sized_for_dropouts(self, max_dropouts: int) -> Channel:
        """Return the channel with noise sized for sums without ``max_dropouts`` senders, if supported."""
        return self

    def sized_for_users(self, n_users: int) -> Channel:
        """Return the channel with a noise grid on which sums over ``n_users`` users are exact."""
        return self

    def check_fine(self, n_silos: int, grid: float) -> None:
        """Check that the grid of decaying noise stays fine enough for the loss that is stated for every round.

        Raises:
            CompositionError: sums over so many users leave the grid too coarse.
        """

    def scaled_noise(self, factor: float) -> Channel:
        """Return the channel with its noise multiplied by a factor, if it :attr:`supports_noise_decay`."""
        raise NotImplementedError

    # --- public facts ---------------------------------------------------------------------------------------

    @property
    def sends_bytes(self) -> bool:
        """Whether a message is bytes."""
        return False

    @property
    def is_additive(self) -> bool:
        """Whether messages are numbers with known Gaussian noise or none, so that sums need no decoder."""
        return not self.sends_bytes

    @property
    def noise_known(self) -> bool:
        """Whether the size of the noise on the sum is a public number."""
        return False

    def noise_std(self, n: int, summed: int) -> float | None:
        """Return the standard deviation of the noise on a sum, per coordinate; None if unknown.

        Args:
            n: number of senders.
            summed: number of senders in the sum.
        """
        return None

    def nominal(self) -> float:
        """Return the noise multiplier of the sum, in units of the scale; 0 if senders share no noise."""
        return 0.0

    def message_std(self, n: int) -> float:
        """Return the standard deviation of one of ``n`` messages' Gaussian noise; 0 for other noise or none."""
        return 0.0

    @property
    def colluding_silos(self) -> int:
        """Number of senders that may pool their knowledge without weakening the noise against them."""
        return 0

    @property
    def max_dropouts(self) -> int:
        """Number of senders that may be missing from a sum, with their noise, without weakening it."""
        return 0

    @property
    def supports_noise_decay(self) -> bool:
        """Whether the claims account for noise that decays from round to round."""
        return False

    # --- refusals -------------------------------------------------------------------------------------------

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise decay without accounting for it, and a bound in another norm than the noise's."""
        yield from self.refuses_decay(method)
        if method.bound.bounded and method.bound.order != self.order:
            yield (
                "an l1 bound is what Laplace noise on a client's message needs; the noise here is Gaussian, which "
                "needs an l2 bound (Clip)"
            )

    def refuses_decay(self, method: Any) -> Iterable[str]:
        """Refuse noise decay that is not accounted for, or that a grid agreed in advance does not fit."""
        if method.noise_decay == 1:
            return
        if not (0 < method.noise_decay < 1 and self.supports_noise_decay and not method.sampler.samples):
            yield (
                f"noise_decay = {method.noise_decay:g}: noise that falls by a factor between 0 and 1 a round is "
                "Gaussian noise on the messages of everybody"
            )
        # A grid for the first round's noise is too coarse for the smaller noise of later rounds.
        if method.protection.agrees:
            yield (
                f"its noise falls, and under {type(method.protection).__name__} the grid of the messages is agreed "
                "before the run; take noise_decay = 1, or no protection"
            )

    def check_pooled(self, asked: int, n_silos: int, name: str) -> None:
        """Refuse a larger coalition of senders than the noise of each sender is sized for.

        Raises:
            CompositionError: the noise is not sized for it; names the method.
        """
        if self.message_std(self.n_senders(n_silos)) > 0 and asked > self.colluding_silos:
            raise CompositionError(
                f"privacy.colluding_silos = {asked}: the noise of {name} is not sized for senders that pool what they "
                "know, and its statement is about one of them; remove the key, and give a larger noise_multiplier"
            )

    # --- state between rounds -------------------------------------------------------------------------------

    @property
    def memory(self) -> int:
        """Number of earlier sums in a message: 0."""
        return 0

    @property
    def gain(self) -> float:
        """Ratio of the norms of message and sum: 1."""
        return 1.0

    @property
    def strengths(self) -> tuple[float, ...]:
        """Strengths of the rounds: all 1."""
        return (1.0,)

    def encode_sums(self, sums: Sequence[Float64[np.ndarray, " d"]]) -> Float64[np.ndarray, " d"]:
        """Return the message before noise, given a silo's sums, this round's first."""
        return sums[0]

    def init(self, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
        """Return the reader's state before the first round, for messages of ``length`` coordinates."""
        return {}

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
        return total, {}


@dataclass(frozen=True)
class Identity(Channel):
    """Channel that sends the silo's sum unchanged."""

    content: ClassVar[Reveals] = Reveals.EXACT
    noise_known: ClassVar[bool] = True

    def noise_std(self, n: int, summed: int) -> float:
        return 0.0

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        if math.isinf(sensitivity.total):
            return (no_guarantee("contributions are not bounded and no noise is added"),)
        return (no_guarantee(NO_NOISE),)


NO_NOISE: Final = "no noise is added to the sums"


def refuses_unbounded(method: Any) -> Iterable[str]:
    """Refuse noise on unbounded contributions, which guarantees nothing."""
    if not method.bound.bounded:
        yield "noise on unbounded contributions guarantees nothing; give the method a clip bound"


def refuses_clients(method: Any) -> Iterable[str]:
    """Refuse shares of one noise for clients, which belong to no silo."""
    if method.contribution.per == "client":
        yield (
            "clients have no silo to add a share of the noise; use CentralGaussian, ClientMessages with noise of their "
            "own, or, if all of them take part, shares under secure aggregation"
        )
