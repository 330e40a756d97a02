"""Channels of numbers: what a sender does to its sum before it leaves, or the server to the sum of all.

Additive noise ties the exact noise laws of ``privacy`` to the grid on which contributions are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64

from fedveil.errors import CompositionError
from fedveil.keys import NonNegative
from fedveil.methods.sending import Coded, Sender, Sending
from fedveil.methods.single_rounds import SingleRounds
from fedveil.privacy.claims import Claim, Tells, covering, unprotected
from fedveil.privacy.events import Event, GaussianEvent, NoGuarantee
from fedveil.privacy.noise.on_grid import grid_gaussian, grid_law
from fedveil.randomness import BitSource
from fedveil.stage import Moves, Source


class Channel(SingleRounds, Source):
    """What a sender does to its sum before it leaves, or the server to the sum of all.

    Attributes:
        content: what a message tells whoever reads it.
        coded: whether a message is bytes that travel sealed, with a key of their own, and not numbers.
        order: p of the norm l_p in which the noise is measured.
        by_server: whether the server adds the noise, so that it is trusted with the sum.
        by_clients: whether every client sends a message of its own, with noise of its own.
        whole: whether messages are whole numbers of one grid, in a range known beforehand and with their share of one
            noise: masks fit on them, and their sum is of use.
    """

    order: ClassVar[int] = 2
    by_server: ClassVar[bool] = False
    by_clients: ClassVar[bool] = False
    whole: ClassVar[bool] = False

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
        if not (0 < method.noise_decay < 1 and self.falls and not method.sampler.samples):
            yield (
                f"noise_decay = {method.noise_decay:g}: noise that falls by a factor between 0 and 1 a round is "
                "Gaussian noise on the messages of everybody"
            )
        if method.protection.agrees:
            yield (
                f"its noise falls, and under {type(method.protection).__name__} the grid of the messages is agreed "
                "before the run; take noise_decay = 1, or no protection"
            )

    @property
    def falls(self) -> bool:
        """Whether noise that falls from round to round is accounted for; not unless the channel says so."""
        return False

    def fallen(self, factor: float) -> Channel:
        """Return the channel with its noise times a factor, where it :attr:`falls`."""
        raise NotImplementedError

    @property
    def addable(self) -> bool:
        """Whether messages are numbers with Gaussian noise of a known size, or without: sums need no decoder."""
        return not self.coded

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

    @property
    def content(self) -> Tells:
        """What a message tells whoever reads it; a channel that does not say tells UNDECLARED."""
        return Tells.UNDECLARED

    @property
    def coded(self) -> bool:
        """Whether a message is bytes."""
        return False

    @property
    def colluding(self) -> int:
        """How many senders may pool what they know without weakening the noise against them."""
        return 0

    @property
    def missing(self) -> int:
        """How many senders may be missing from a sum, with their noise, without weakening it."""
        return 0

    def lacking(self, missing_silos: int) -> Channel:
        """Return the channel with its noise sized for sums that lack so many senders, where it can be."""
        return self

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> Sending:
        """Return a sender's message: here the sum as it is, if the channel says that it is.

        Args:
            total: (d,) the bounded sum, or a client's bounded update.
            at: who sends it, and when.

        Raises:
            CompositionError: a channel that neither makes a message nor says that sums travel as they are.
        """
        if self.content is not Tells.EXACT:
            raise CompositionError(
                f"{type(self).__name__} does not say how a silo's sum travels; nothing was sent"
            )
        return Sending(values=total)

    def decode(self, coded: Coded, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
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

    def nominal(self) -> float:
        """Return the noise multiplier of the sum that senders share, in units of the scale; 0 where they share none."""
        return 0.0

    def message_std(self, n: int) -> float:
        """Return the standard deviation of the noise of one of ``n`` messages, where it is Gaussian; 0 otherwise."""
        return 0.0


@dataclass(frozen=True)
class Identity(Channel):
    """The silo's sum travels as it is."""

    @property
    def content(self) -> Tells:
        """What a message tells."""
        return Tells.EXACT

    @property
    def noise_known(self) -> bool:
        """True: there is none."""
        return True

    def noise_std(self, n: int, summed: int) -> float:
        """Return 0."""
        return 0.0

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim nothing."""
        if math.isinf(moves.total):
            return (unprotected("contributions are not bounded and no noise is added"),)
        return (unprotected(NO_NOISE),)

    def grid_loss(self, moves: Moves) -> float:
        """Return 0: there is no noise."""
        return 0.0


NO_NOISE: Final = "no noise is added to the sums"


@dataclass(frozen=True, kw_only=True)
class GaussianShares(Channel):
    """Every silo adds its share of one Gaussian noise to its sum (ULDP-FL, Algorithms 1 and 3).

    The shares of all silos together have standard deviation ``noise_multiplier * scale``:
    share std = noise_multiplier * scale / sqrt(|S| - colluding_silos - missing_silos). Against silos that pool what
    they know of their own shares, and in a sum that lacks some, the shares of the others still add up to it.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: what the noise is measured in, same unit as the update (C for ULDP-AVG, |S| C for ULDP-NAIVE).
        colluding_silos: how many silos may pool their knowledge without weakening the noise against them.
        missing_silos: how many silos may be missing from a sum, with their shares, without weakening it.
    """

    whole: ClassVar[bool] = True

    noise_multiplier: NonNegative
    scale: float
    colluding_silos: int = 0
    missing_silos: int = 0

    @property
    def content(self) -> Tells:
        """What a message tells."""
        return Tells.MESSAGE

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise on unbounded contributions, and clients, unless their shares are summed under masks."""
        yield from refuses_unbounded(method)
        if method.sampler.samples or not method.protection.masks:
            yield from refuses_clients(method)
        yield from super().refuses(method)

    @property
    def falls(self) -> bool:
        """True: Gaussian noise."""
        return True

    def fallen(self, factor: float) -> GaussianShares:
        """Return the channel with its noise times a factor."""
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    @property
    def noise_known(self) -> bool:
        """True."""
        return True

    def noise_std(self, n: int, summed: int) -> float:
        """Return the noise of so many shares."""
        return self.share_std(n) * math.sqrt(summed)

    @property
    def missing(self) -> int:
        """How many silos."""
        return self.missing_silos

    def lacking(self, missing_silos: int) -> GaussianShares:
        """Return shares that are larger, so that the others' add up to the noise."""
        return replace(self, missing_silos=missing_silos)

    def share_std(self, n_silos: int) -> float:
        """Return the standard deviation of one silo's share per coordinate."""
        honest = n_silos - self.colluding_silos - self.missing_silos
        if honest < 1:
            raise CompositionError(
                f"colluding_silos = {self.colluding_silos} and missing_silos = {self.missing_silos} of {n_silos} "
                "silos: at least one silo must be honest and there"
            )
        return self.noise_multiplier * self.scale / math.sqrt(honest)

    @property
    def colluding(self) -> int:
        """How many silos."""
        return self.colluding_silos

    def nominal(self) -> float:
        """Return sigma."""
        return self.noise_multiplier

    def message_std(self, n: int) -> float:
        """Return the standard deviation of one share."""
        return self.share_std(n)

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim all shares for the sum, one for a message, and the others' against silos that pool what they know.

        A coalition of c silos knows its own shares. What a user holds in the others is guaranteed to her
        (:meth:`~fedveil.stage.Moves.pooled`), under the noise of the honest ones that are there.
        """
        if self.noise_multiplier == 0:
            return (unprotected(NO_NOISE),)
        n, share = moves.n_senders, self.share_std(moves.n_senders)
        coalition = max(1, self.colluding_silos)
        single = min(share / moves.messages, self._nominal(moves).noise_multiplier)
        honest = n - self.colluding_silos - self.missing_silos
        unknown = n - self.missing_silos - coalition
        pooled: Event = NoGuarantee(reason="no share of the noise is left")
        singly = pooled
        if unknown > 0:
            left = share / moves.pooled(unknown, coalition, honest)
            pooled, singly = (
                GaussianEvent(noise_multiplier=left),
                GaussianEvent(noise_multiplier=min(left, single)),
            )
        return (
            Claim(covering(Tells.SUM), self._nominal(moves)),
            Claim(covering(Tells.SUM, Tells.MESSAGE), GaussianEvent(noise_multiplier=single)),
            Claim(covering(Tells.SUM, Tells.OWN), pooled, amplified=not moves.reweighs),
            Claim(covering(Tells.SUM, Tells.OWN, Tells.MESSAGE), singly, amplified=not moves.reweighs),
        )

    def _nominal(self, moves: Moves) -> GaussianEvent:
        """Return the event of the sum for whoever knows no share."""
        return GaussianEvent(noise_multiplier=self.noise_multiplier * self.scale / moves.total)

    def grid_loss(self, moves: Moves) -> float:
        """Return what the grid of all shares costs a coordinate."""
        if self.noise_multiplier == 0:
            return 0.0
        return (
            2
            * moves.n_senders
            * grid_law(self.share_std(moves.n_senders), moves.bound.grid).log_ratio_to_gaussian
        )

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        """Return the sensitivity and the shares."""
        return self.told(moves, "discrete Gaussian shares")

    def told(self, moves: Moves, law: str) -> tuple[str, ...]:
        """Return the sensitivity and the shares, whose law has a name."""
        if self.noise_multiplier == 0:
            return ()
        n = moves.n_senders
        return (
            f"the sum over {n} silos moves by at most {moves.total:g} (l2) with one user; {law} of std "
            f"{self.share_std(n):g} per silo, noise multiplier {self._nominal(moves).noise_multiplier:g} of the sum",
        )

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the step of what a silo sends: a power of two that divides the contributions' grid."""
        return grid if self.noise_multiplier == 0 else grid_law(self.share_std(n_silos), grid).grid

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> Sending:
        """Return a silo's sum with its share: exact discrete Gaussian noise on the grid of the contributions."""
        if self.noise_multiplier == 0:
            return Sending(values=total)
        share = grid_gaussian(len(total), self.share_std(at.senders), at.grid, at.source("noise"))
        return Sending(values=total + share)


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
