"""Channels of numbers: what a sender does to its sum before it leaves, or the server to the sum of all."""

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
    """What a sender does to its sum before it leaves, or the server to the sum of all.

    Unless it says otherwise, its messages tell of one round each: nothing is remembered, and all rounds cost the same.

    Attributes:
        content: what a message tells whoever reads it.
        coded: whether a message is bytes that travel sealed, with a key of their own, and not numbers.
        order: p of the norm l_p in which the noise is measured.
        by_server: whether the server adds the noise, so that it is trusted with every update.
        by_clients: whether every client sends a message of its own, with noise of its own.
        whole: whether messages are whole numbers of one grid, in a range known beforehand and with their share of one
            noise: masks fit on them, and their sum is of use.
        memory: how many of its sums before this round's a sender adds parts of to its message.
        gain: how many times as long as its sum a sender's message can be, its noise left aside.
        strengths: of the rounds, repeated: z / sqrt(strength) is the multiplier of a round whose claims say z. A round
            of strength 0 is charged nothing, because one unit moved what it tells in an earlier one.
    """

    order: ClassVar[int] = 2
    by_server: ClassVar[bool] = False
    by_clients: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    # --- what it does ------------------------------------------------------------------------------------------

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> EncodedMessage:
        """Return a sender's message: here the sum as it is, if the channel says that it is.

        Args:
            total: (d,) the bounded sum, or a client's bounded update.
            at: who sends it, and when.

        Raises:
            CompositionError: a channel that neither makes a message nor says that sums travel as they are.
        """
        if self.content is not Reveals.EXACT:
            raise CompositionError(
                f"{type(self).__name__} does not say how a silo's sum travels; nothing was sent"
            )
        return EncodedMessage(values=total)

    def decode(self, coded: CodedMessage, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Return the vector of ``length`` numbers that one of ``senders`` messages of bytes stands for, with its noise.

        Raises:
            CompositionError: this channel's messages are no bytes.
            ChannelError: no message of this channel.
        """
        raise CompositionError(f"{type(self).__name__} sends numbers; there is nothing to decode")

    def release(
        self, total: Float64[np.ndarray, " d"], grid: float, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Return the sum of all messages as it is released: with the noise of a server that adds its own."""
        return total

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the step of what a silo sends, given that of the contributions: the same where none is added."""
        return grid

    def n_senders(self, n_silos: int) -> int:
        """Return how many messages a round has."""
        return n_silos

    def sized_for_dropouts(self, max_dropouts: int) -> Channel:
        """Return the channel with its noise sized for sums that lack so many senders, where it can be."""
        return self

    def sized_for_users(self, n_users: int) -> Channel:
        """Return the channel with a grid of its noise on which sums over so many users are exact."""
        return self

    def check_fine(self, n_silos: int, grid: float) -> None:
        """Return if noise that falls has lost no more by its grid than what is stated for rounds of any number.

        Raises:
            CompositionError: sums over so many users leave its grid too coarse.
        """

    def scaled_noise(self, factor: float) -> Channel:
        """Return the channel with its noise times a factor, where it :attr:`supports_noise_decay`."""
        raise NotImplementedError

    # --- what it shows -----------------------------------------------------------------------------------------

    @property
    def sends_bytes(self) -> bool:
        """Whether a message is bytes."""
        return False

    @property
    def is_additive(self) -> bool:
        """Whether messages are numbers with Gaussian noise of a known size, or without: sums need no decoder."""
        return not self.sends_bytes

    @property
    def noise_known(self) -> bool:
        """Whether the size of the noise of the sum is a public number."""
        return False

    def noise_std(self, n: int, summed: int) -> float | None:
        """Return the standard deviation of the noise on a sum, per coordinate; None where it is not known.

        Args:
            n: how many senders there are.
            summed: how many of them the sum is over.
        """
        return None

    def nominal(self) -> float:
        """Return the noise multiplier of the sum that senders share, in units of the scale; 0 where they share none."""
        return 0.0

    def message_std(self, n: int) -> float:
        """Return the standard deviation of the noise of one of ``n`` messages, where it is Gaussian; 0 otherwise."""
        return 0.0

    @property
    def colluding_silos(self) -> int:
        """How many senders may pool what they know without weakening the noise against them."""
        return 0

    @property
    def max_dropouts(self) -> int:
        """How many senders may be missing from a sum, with their noise, without weakening it."""
        return 0

    @property
    def supports_noise_decay(self) -> bool:
        """Whether noise that falls from round to round is accounted for; not unless the channel says so."""
        return False

    # --- what it refuses ---------------------------------------------------------------------------------------

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise that falls where that is not accounted for, and a bound in another norm than the noise's."""
        yield from self.refuses_decay(method)
        if method.bound.bounded and method.bound.order != self.order:
            yield (
                "an l1 bound is what Laplace noise on a client's message needs; the noise here is Gaussian, which "
                "needs an l2 bound (Clip)"
            )

    def refuses_decay(self, method: Any) -> Iterable[str]:
        """Refuse falling noise where it is not accounted for, or where a grid was agreed on for the first round's."""
        if method.noise_decay == 1:
            return
        if not (0 < method.noise_decay < 1 and self.supports_noise_decay and not method.sampler.samples):
            yield (
                f"noise_decay = {method.noise_decay:g}: noise that falls by a factor between 0 and 1 a round is "
                "Gaussian noise on the messages of everybody"
            )
        if method.protection.agrees:
            yield (
                f"its noise falls, and under {type(method.protection).__name__} the grid of the messages is agreed "
                "before the run; take noise_decay = 1, or no protection"
            )

    def check_pooled(self, asked: int, n_silos: int, name: str) -> None:
        """Refuse senders that pool what they know where the noise that each adds is not sized for so many.

        Raises:
            CompositionError: it is not; names the method.
        """
        if self.message_std(self.n_senders(n_silos)) > 0 and asked > self.colluding_silos:
            raise CompositionError(
                f"privacy.colluding_silos = {asked}: the noise of {name} is not sized for senders that pool what they "
                "know, and its statement is about one of them; remove the key, and give a larger noise_multiplier"
            )

    # --- what is remembered from round to round ----------------------------------------------------------------

    @property
    def memory(self) -> int:
        """None."""
        return 0

    @property
    def gain(self) -> float:
        """Its sum is its message."""
        return 1.0

    @property
    def strengths(self) -> tuple[float, ...]:
        """Every round costs what is claimed."""
        return (1.0,)

    def encode_sums(self, sums: Sequence[Float64[np.ndarray, " d"]]) -> Float64[np.ndarray, " d"]:
        """Return what a silo sends parts of its sums as, this round's first and then those it remembers."""
        return sums[0]

    def init(self, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
        """Return what the reader of the sums remembers before the first round, messages of a length."""
        return {}

    def decode_sum(
        self,
        total: Float64[np.ndarray, " length"],
        state: Mapping[str, Tensor],
        model: Float32[Tensor, " d"],
        unit: float,
    ) -> tuple[Float64[np.ndarray, " length"], Mapping[str, Tensor]]:
        """Return the round's own sum with its noise, of what was received, and what is remembered after it.

        Args:
            total: the sum of all messages.
            state: what :meth:`init` or the round before returned.
            model: that the round began with.
            unit: of the round's messages.
        """
        return total, {}


@dataclass(frozen=True)
class Identity(Channel):
    """The silo's sum travels as it is."""

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
    """Return why a channel's noise guarantees nothing, where contributions are not bounded."""
    if not method.bound.bounded:
        yield "noise on unbounded contributions guarantees nothing; give the method a clip bound"


def refuses_clients(method: Any) -> Iterable[str]:
    """Return why shares of one noise are not the clients'."""
    if method.contribution.per == "client":
        yield (
            "clients have no silo to add a share of the noise; use CentralGaussian, ClientMessages with noise of their "
            "own, or, if all of them take part, shares under secure aggregation"
        )
