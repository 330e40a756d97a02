"""Shares of one Gaussian noise: every silo adds its own to its sum before it leaves.

Additive noise ties the exact noise laws of ``privacy`` to the grid on which contributions are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from jaxtyping import Float64
from pydantic import Field

from fedveil.errors import CompositionError
from fedveil.keys import Count, NonNegative, Positive, filled
from fedveil.methods.channels import NO_NOISE, Channel, refuses_clients, refuses_unbounded
from fedveil.methods.sending import Sender, Sending
from fedveil.privacy.claims import Claim, Tells, covering, unprotected
from fedveil.privacy.events import Event, GaussianEvent, NoGuarantee
from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.on_grid import finest_grid, grid_law, is_finest
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.stage import Moves, everyone_adds


@dataclass(frozen=True, kw_only=True)
class GaussianShares(Channel):
    """Every silo adds its share of one Gaussian noise to its sum (ULDP-FL, Algorithms 1 and 3).

    The shares of the silos that are left without those have standard deviation ``noise_multiplier * scale`` together:
    share std = noise_multiplier * scale / sqrt(|S| - colluding_silos - missing_silos). Against silos that pool what
    they know of their own shares, and in a sum that lacks some, the shares of the others still add up to it.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: what the noise is measured in, same unit as the update (C for ULDP-AVG, |S| C for ULDP-NAIVE).
        colluding_silos: how many silos may pool their knowledge without weakening the noise against them.
        missing_silos: how many silos may be missing from a sum, with their shares, without weakening it.
        users: |U|, for a grid of the noise on which sums over them are exact in float64. Composition gives it
            (:meth:`among`); by itself a method knows of no users, and its sums are exact for one in each silo.
    """

    whole: ClassVar[bool] = True
    falls: ClassVar[bool] = True
    noise_known: ClassVar[bool] = True

    noise_multiplier: NonNegative
    scale: Positive
    colluding_silos: Annotated[int, Field(ge=0)] = 0
    missing_silos: Annotated[int, Field(ge=0)] = 0
    users: Annotated[Count, filled()] = 1

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise on unbounded contributions, and clients, unless their shares are summed under masks."""
        yield from refuses_unbounded(method)
        if method.sampler.samples or not method.protection.masks:
            yield from refuses_clients(method)
        yield from super().refuses(method)

    def fallen(self, factor: float) -> GaussianShares:
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def noise_std(self, n: int, summed: int) -> float:
        return self.share_std(n) * math.sqrt(summed)

    def lacking(self, missing_silos: int) -> GaussianShares:
        """Return shares that are larger, so that the others' add up to the noise."""
        return replace(self, missing_silos=missing_silos)

    def among(self, n_users: int) -> GaussianShares:
        """Return shares whose grid leaves room for the sum of so many users' contributions."""
        return replace(self, users=n_users)

    @property
    def content(self) -> Tells:
        """What a message tells whoever reads it: of a sum with its share of the noise, or without any."""
        return Tells.MESSAGE if self.noise_multiplier else Tells.EXACT

    @property
    def lengthening(self) -> float:
        """How many times as long as the sum of contributions that a message adds up it may be, in steps of its grid."""
        return 1.0

    def law(self, n_silos: int, grid: float) -> DiscreteGaussian:
        """Return the law of one share, on a grid that divides the contributions' and keeps all sums exact.

        Where it is not the finest (2^29 steps a standard deviation), the loss that is stated for it is larger.
        """
        longest = max(self.users, n_silos) * self.lengthening
        return grid_law(self.share_std(n_silos), grid, finest_grid(grid, longest))

    def check_fine(self, n_silos: int, grid: float) -> None:
        """Return if the grid of a share is the finest."""
        if self.noise_multiplier and not is_finest(self.law(n_silos, grid), grid):
            raise CompositionError(
                f"noise_decay: shares of noise of multiplier {self.noise_multiplier:g} in the last round are too small "
                f"beside exact sums over {self.users} users in {n_silos} silos; let it fall less, or take more noise"
            )

    def share_std(self, n_silos: int) -> float:
        """Return the standard deviation of one silo's share per coordinate."""
        honest = n_silos - self.colluding_silos - self.missing_silos
        if honest < 1:
            raise CompositionError(
                f"colluding_silos = {self.colluding_silos} and missing_silos = {self.missing_silos} of {n_silos} "
                "silos: at least one silo must be honest and there"
            )
        return self.noise_multiplier * self.scale / math.sqrt(honest)

    def nominal(self) -> float:
        """Return sigma."""
        return self.noise_multiplier

    def message_std(self, n: int) -> float:
        return self.share_std(n)

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim all shares for the sum, one for a message, and the others' against silos that pool what they know.

        A coalition of c silos knows its own shares. What a user holds in the others is protected
        (:meth:`~fedveil.stage.Moves.pooled`), under the noise of the honest ones that are there.
        """
        if self.noise_multiplier == 0:
            return (unprotected(NO_NOISE),)
        n, share = moves.n_senders, self.share_std(moves.n_senders)
        coalition = moves.together
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
        if self.noise_multiplier == 0:
            return 0.0
        return 2 * moves.n_senders * self.law(moves.n_senders, moves.bound.grid).log_ratio_to_gaussian

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        return self.told(moves, "each silo adds discrete Gaussian noise")

    def told(self, moves: Moves, law: str) -> tuple[str, ...]:
        """Return the sensitivity and the shares; ``law`` says how a share comes to a message."""
        if self.noise_multiplier == 0:
            return ()
        n = moves.n_senders
        changed = f"one user changes the sum over {n} silos by at most {show_at_most(moves.total)} (l2 norm)"
        if moves.divided:  # each part has its own noise, which the protection tells
            return (changed,)
        counted = n - self.colluding_silos - self.missing_silos
        shares = "" if counted == n else f" from {counted} of these shares"
        return (
            f"{changed}; {law} of standard deviation {show_at_least(self.share_std(n))} to its sum, which gives the "
            f"total a noise multiplier of {show_at_least(self._nominal(moves).noise_multiplier)}{shares}",
        )

    def uncovered(self, method: Any) -> tuple[str, ...]:
        """Return what the guarantee takes on trust of the silos."""
        return (everyone_adds("silo", self.colluding_silos),) if self.noise_multiplier else ()

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the step of what a silo sends: a power of two that divides the contributions' grid."""
        return grid if self.noise_multiplier == 0 else self.law(n_silos, grid).grid

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> Sending:
        """Return a silo's sum with its share: exact discrete Gaussian noise on the grid of the contributions."""
        if self.noise_multiplier == 0:
            return Sending(values=total)
        share = self.law(at.senders, at.grid).sample((len(total),), at.source("noise"))
        return Sending(values=total + share)
