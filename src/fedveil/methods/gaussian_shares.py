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

from fedveil.config_keys import Count, NonNegative, Positive, composed_field
from fedveil.errors import CompositionError
from fedveil.methods.channels import NO_NOISE, Channel, refuses_clients, refuses_unbounded
from fedveil.methods.message_encoding import EncodedMessage, Sender
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, no_guarantee
from fedveil.privacy.events import Event, GaussianEvent, NoGuarantee
from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.on_grid import finest_grid, grid_law, is_finest
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.stage import Sensitivity, everyone_adds


@dataclass(frozen=True, kw_only=True)
class GaussianShares(Channel):
    """Every silo adds its share of one Gaussian noise to its sum (ULDP-FL, Algorithms 1 and 3).

    The shares of the silos that are left without those have standard deviation ``noise_multiplier * scale`` together:
    share std = noise_multiplier * scale / sqrt(|S| - colluding_silos - max_dropouts). Against silos that pool what
    they know of their own shares, and in a sum that lacks some, the shares of the others still add up to it.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: what the noise is measured in, same unit as the update (C for ULDP-AVG, |S| C for ULDP-NAIVE).
        colluding_silos: how many silos may pool their knowledge without weakening the noise against them.
        max_dropouts: how many silos may be missing from a sum, with their shares, without weakening it.
        users: |U|, for a grid of the noise on which sums over them are exact in float64. Composition gives it
            (:meth:`sized_for_users`); by itself a method knows of no users, and its sums are exact for one in each
            silo.
    """

    whole: ClassVar[bool] = True
    supports_noise_decay: ClassVar[bool] = True
    noise_known: ClassVar[bool] = True

    noise_multiplier: NonNegative
    scale: Positive
    colluding_silos: Annotated[int, Field(ge=0)] = 0
    max_dropouts: Annotated[int, Field(ge=0)] = 0
    users: Annotated[Count, composed_field()] = 1

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise on unbounded contributions, and clients, unless their shares are summed under masks."""
        yield from refuses_unbounded(method)
        if method.sampler.samples or not method.protection.masks:
            yield from refuses_clients(method)
        yield from super().refuses(method)

    def scaled_noise(self, factor: float) -> GaussianShares:
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def noise_std(self, n: int, summed: int) -> float:
        return self.share_std(n) * math.sqrt(summed)

    def sized_for_dropouts(self, max_dropouts: int) -> GaussianShares:
        """Return shares that are larger, so that the others' add up to the noise."""
        return replace(self, max_dropouts=max_dropouts)

    def sized_for_users(self, n_users: int) -> GaussianShares:
        """Return shares whose grid leaves room for the sum of so many users' contributions."""
        return replace(self, users=n_users)

    @property
    def content(self) -> Reveals:
        """What a message tells whoever reads it: of a sum with its share of the noise, or without any."""
        return Reveals.MESSAGE if self.noise_multiplier else Reveals.EXACT

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
        honest = n_silos - self.colluding_silos - self.max_dropouts
        if honest < 1:
            raise CompositionError(
                f"colluding_silos = {self.colluding_silos} and max_dropouts = {self.max_dropouts} of {n_silos} "
                "silos: at least one silo must be honest and there"
            )
        return self.noise_multiplier * self.scale / math.sqrt(honest)

    def nominal(self) -> float:
        """Return sigma."""
        return self.noise_multiplier

    def message_std(self, n: int) -> float:
        return self.share_std(n)

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim all shares for the sum, one for a message, and the others' against silos that pool what they know.

        A coalition of c silos knows its own shares. What a user holds in the others is protected
        (:meth:`~fedveil.stage.Sensitivity.pooled_sensitivity`), under the noise of the honest ones that are there.
        """
        if self.noise_multiplier == 0:
            return (no_guarantee(NO_NOISE),)
        n, share = sensitivity.n_senders, self.share_std(sensitivity.n_senders)
        coalition = sensitivity.together
        single = min(share / sensitivity.messages, self._nominal(sensitivity).noise_multiplier)
        honest = n - self.colluding_silos - self.max_dropouts
        unknown = n - self.max_dropouts - coalition
        pooled: Event = NoGuarantee(reason="no share of the noise is left")
        singly = pooled
        if unknown > 0:
            left = share / sensitivity.pooled_sensitivity(unknown, coalition, honest)
            pooled, singly = (
                GaussianEvent(noise_multiplier=left),
                GaussianEvent(noise_multiplier=min(left, single)),
            )
        return (
            Claim(covered_knowledge(Reveals.SUM), self._nominal(sensitivity)),
            Claim(covered_knowledge(Reveals.SUM, Reveals.MESSAGE), GaussianEvent(noise_multiplier=single)),
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN), pooled, amplified=not sensitivity.reweighs),
            Claim(
                covered_knowledge(Reveals.SUM, Reveals.OWN, Reveals.MESSAGE),
                singly,
                amplified=not sensitivity.reweighs,
            ),
        )

    def _nominal(self, moves: Sensitivity) -> GaussianEvent:
        """Return the event of the sum for whoever knows no share."""
        return GaussianEvent(noise_multiplier=self.noise_multiplier * self.scale / moves.total)

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        if self.noise_multiplier == 0:
            return 0.0
        return (
            2
            * sensitivity.n_senders
            * self.law(sensitivity.n_senders, sensitivity.bound.grid).log_ratio_to_gaussian
        )

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        return self.describe_shares(sensitivity, "each silo adds discrete Gaussian noise")

    def describe_shares(self, moves: Sensitivity, law: str) -> tuple[str, ...]:
        """Return the sensitivity and the shares; ``law`` says how a share comes to a message."""
        if self.noise_multiplier == 0:
            return ()
        n = moves.n_senders
        changed = f"one user changes the sum over {n} silos by at most {show_at_most(moves.total)} (l2 norm)"
        if moves.divided:  # each part has its own noise, which the protection tells
            return (changed,)
        counted = n - self.colluding_silos - self.max_dropouts
        shares = "" if counted == n else f" from {counted} of these shares"
        return (
            f"{changed}; {law} of standard deviation {show_at_least(self.share_std(n))} to its sum, which gives the "
            f"total a noise multiplier of {show_at_least(self._nominal(moves).noise_multiplier)}{shares}",
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return what the guarantee takes on trust of the silos."""
        return (everyone_adds("silo", self.colluding_silos),) if self.noise_multiplier else ()

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the step of what a silo sends: a power of two that divides the contributions' grid."""
        return grid if self.noise_multiplier == 0 else self.law(n_silos, grid).grid

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> EncodedMessage:
        """Return a silo's sum with its share: exact discrete Gaussian noise on the grid of the contributions."""
        if self.noise_multiplier == 0:
            return EncodedMessage(values=total)
        share = self.law(at.senders, at.grid).sample((len(total),), at.source("noise"))
        return EncodedMessage(values=total + share)
