"""Define channels of numbers: the noise and encoding between a sender's sum and the released sum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64

from fedveil.errors import CompositionError
from fedveil.methods.capabilities import count_colluding, count_senders, sends_bytes, supports_decay
from fedveil.methods.message_encoding import EncodedMessage, Sender
from fedveil.privacy.claims import Claim, Reveals, no_guarantee
from fedveil.stage import Sensitivity, Source


class Channel(Source):
    """Operation of a sender on its sum before it leaves the sender, or of the server on the sum of all.

    A channel sends numbers, one message a sender, and its messages depend on one round only. What else a channel can do
    is a capability (:mod:`fedveil.methods.capabilities`).

    Attributes:
        content: information that a message reveals to its reader.
    """

    def send(self, total: Float64[np.ndarray, " d"], sender: Sender) -> EncodedMessage:
        """Return a sender's message; this default sends the sum unchanged if ``content`` declares that.

        Args:
            total: (d,) the bounded sum, or a client's bounded update.
            sender: the sender, round and attempt.

        Raises:
            CompositionError: the channel neither overrides this method nor declares that sums are sent unchanged.
        """
        if self.content is not Reveals.EXACT:
            raise CompositionError(
                f"{type(self).__name__} does not define how a silo's sum is sent; nothing was sent"
            )
        return EncodedMessage(values=total)

    @property
    def is_additive(self) -> bool:
        """Return whether messages are numbers with known Gaussian noise or none, so that sums need no decoder."""
        return not sends_bytes(self)

    @property
    def noise_known(self) -> bool:
        """Return whether the size of the noise on the sum is a public number."""
        return False

    def noise_std(self, n: int, summed: int) -> float | None:
        """Return the standard deviation of the noise on a sum, per coordinate; None if unknown.

        Args:
            n: number of senders.
            summed: number of senders in the sum.
        """
        return None

    def message_std(self, n: int) -> float:
        """Return the standard deviation of one of ``n`` messages' Gaussian noise; 0 for other noise or none."""
        return 0.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise decay without accounting for it, and a bound in another norm than the noise's."""
        yield from refuses_decay(self, method)
        if method.bound.bounded and method.bound.order != _L2:
            yield (
                "an l1 bound is what Laplace noise on a client's message needs; the noise here is Gaussian, which "
                "needs an l2 bound (Clip)"
            )


_L2: Final = 2


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


def refuses_decay(channel: Channel, method: Any) -> Iterable[str]:
    """Refuse noise decay that is not accounted for, or that a grid agreed in advance does not fit."""
    if method.noise_decay == 1:
        return
    if not (0 < method.noise_decay < 1 and supports_decay(channel) and not method.sampler.samples):
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


def check_pooled(method: Any, n_colluding: int, n_silos: int) -> None:
    """Refuse a larger coalition of senders than the noise of each sender is sized for.

    Raises:
        CompositionError: the noise is not sized for it; names the method.
    """
    channel = method.channel
    if channel.message_std(count_senders(channel, n_silos)) > 0 and n_colluding > count_colluding(channel):
        raise CompositionError(
            f"privacy.colluding_silos = {n_colluding}: the noise of {method.name} is not sized for senders that pool "
            "what they know, and its statement is about one of them; remove the key, and give a larger noise_multiplier"
        )


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
