"""Add to each silo's sum its share of one Gaussian noise, before the sum leaves the silo.

This module ties the exact noise laws of ``privacy`` to the grid on which contributions are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from jaxtyping import Float64
from pydantic import Field

from fedveil.config_keys import Count, NonNegative, Positive, composed_field
from fedveil.errors import CompositionError
from fedveil.methods.channels import NO_NOISE, Channel, refuses_clients, refuses_unbounded
from fedveil.methods.message_encoding import EncodedMessage, Sender
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, no_guarantee
from fedveil.privacy.events import Event, GaussianEvent, NoGuarantee
from fedveil.privacy.noise import DiscreteGaussian, finest_grid, grid_law, is_finest
from fedveil.privacy.rounding import LEAST_STEPS, coarse_step, round_to_grid, rounding_loss, sum_bound
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.stage import Sensitivity, everyone_adds, redefined

WordBits: TypeAlias = Annotated[
    Literal["auto", 16, 24, 32, 64],
    Field(
        description="bits of a masked word: each silo rounds its sum, after its noise, to a grid that is coarse enough "
        'for them ([how](../theory/round-after-noise.md)); `"auto"` takes the fewest under secure aggregation and '
        "rounds nothing without it, 64 rounds nothing"
    ),
]


@dataclass(frozen=True, kw_only=True)
class GaussianShares(Channel):
    """Shares of one Gaussian noise, one added by every silo to its sum (ULDP-FL, Algorithms 1 and 3).

    n = |S| - ``colluding_silos`` - ``max_dropouts`` shares together have the standard deviation ``noise_multiplier *
    scale``. So one share has the standard deviation noise_multiplier * scale / sqrt(n). The noise keeps this size in
    a sum that lacks up to ``max_dropouts`` shares, and against silos that pool their own shares.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: unit of the noise, same unit as the update (C for ULDP-AVG, |S| C for ULDP-NAIVE).
        colluding_silos: number of silos that may pool their knowledge without weakening the noise against them.
        max_dropouts: number of silos that may be missing from a sum, with their shares, without weakening it.
        users: |U|, for a noise grid on which sums over the users are exact in float64. Composition sets it
            (:meth:`sized_for_users`). A method by itself knows no users; its sums are exact for one user per silo.
        word_bits: bits of a masked word. Each silo rounds its noisy sum to a grid that is coarse enough for them
            (docs/theory/round-after-noise.md). "auto" rounds under masks only, to the fewest bits for which a share
            has at least 2 steps; 64 rounds nothing.
        step: g, the coarse grid, in the unit of the update; 0 without rounding. Composition sets it
            (:meth:`sized_for_words`).
    """

    supports_noise_decay: ClassVar[bool] = True
    noise_known: ClassVar[bool] = True

    noise_multiplier: NonNegative
    scale: Positive
    colluding_silos: Annotated[int, Field(ge=0)] = 0
    max_dropouts: Annotated[int, Field(ge=0)] = 0
    users: Annotated[Count, composed_field()] = 1
    word_bits: WordBits = "auto"
    step: Annotated[NonNegative, composed_field()] = 0.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse unbounded contributions, and clients unless all take part and masks hide each message."""
        yield from refuses_unbounded(method)
        if method.sampler.samples or not method.protection.masks:
            yield from refuses_clients(method)
        if self.step or self.word_bits not in ("auto", 64):
            yield from self._refuses_rounding(method)
        yield from super().refuses(method)

    def _refuses_rounding(self, method: Any) -> Iterable[str]:
        """Yield why messages of this method cannot be rounded after their noise."""
        key = f"word_bits = {self.word_bits}"
        if method.protection.weighs or method.protection.divides:
            yield (
                f"{key}: no silo sees its own weighted sum with its noise under "
                f"{type(method.protection).__name__}, so that it cannot round it; remove the key"
            )
        if self.noise_multiplier == 0:
            yield f"{key}: rounding is private after noise only, and noise_multiplier is 0; remove the key"
        if method.noise_decay != 1:
            yield (
                f"{key}: shares of noise that falls from round to round would lie on a grid that is too coarse for "
                "them; take noise_decay = 1, or remove the key"
            )

    def scaled_noise(self, factor: float) -> GaussianShares:
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def noise_std(self, n: int, summed: int) -> float:
        # Rounding errors are all but uniform on one step and independent: g^2 / 12 for each message.
        return math.sqrt(summed * (self.share_std(n) ** 2 + self.step**2 / 12))

    def sized_for_dropouts(self, max_dropouts: int) -> GaussianShares:
        """Return larger shares, so that those of the remaining silos add up to the noise."""
        return replace(self, max_dropouts=max_dropouts)

    def sized_for_users(self, n_users: int) -> GaussianShares:
        """Return shares whose grid leaves enough bits for the sum of ``n_users`` users' contributions."""
        return replace(self, users=n_users)

    def with_word_bits(self, word_bits: WordBits) -> GaussianShares:
        """Return shares for masked words of another number of bits."""
        return replace(self, word_bits=word_bits)

    def sized_for_words(self, n_senders: int, bound: Bound, *, masked: bool) -> GaussianShares:
        """Return shares whose sums are rounded to the grid of :attr:`word_bits`, from public numbers alone.

        Args:
            n_senders: number of senders.
            bound: bound of a contribution.
            masked: whether messages are masked, so that "auto" rounds.

        Raises:
            CompositionError: ``word_bits`` is a number, and this object is of another package's class that overrides
                the noise or the messages; or words of so few bits cannot hold the rounding errors of all senders.
        """
        overridden = redefined(self, "send", "law", "share_std", "claims", "grid_loss")
        if overridden and self.word_bits not in ("auto", 64):
            raise CompositionError(
                f"word_bits = {self.word_bits}: {type(self).__name__} defines {overridden[0]}(), and rounding is "
                "covered after shares of Gaussian noise alone; remove the key"
            )
        rounds = masked and not overridden if self.word_bits == "auto" else self.word_bits != 64
        if not rounds or self.noise_multiplier == 0:
            return replace(self, step=0.0)
        longest, std = self._largest_norm(n_senders, bound), self.share_std(n_senders)
        fine = self.message_grid_before_rounding(bound.grid, n_senders)
        for bits in (16, 24, 32) if self.word_bits == "auto" else (self.word_bits,):
            coarse = coarse_step(longest, std, n_senders, bits)
            if coarse is None and self.word_bits == "auto":
                continue
            if coarse is None:
                raise CompositionError(
                    f"word_bits = {bits}: words of so few bits have no room for the rounding errors of {n_senders} "
                    "messages; take word_bits = 'auto'"
                )
            # At least 8 fine steps, so that 5, 6 or 7 times a power of two is a multiple of the fine grid.
            step = max(coarse, 8 * fine)
            if std / step >= LEAST_STEPS or self.word_bits != "auto":
                return replace(self, step=step)
        return replace(self, step=0.0)

    def largest_sum(self, n_senders: int, bound: Bound) -> int | None:
        """Return the largest coordinate of a sum of rounded messages, in steps; None without rounding."""
        if not self.step:
            return None
        return sum_bound(
            self._largest_norm(n_senders, bound), self.share_std(n_senders), n_senders, self.step
        )

    def _largest_norm(self, n_senders: int, bound: Bound) -> float:
        """Return an upper bound of the norm of the sum of all contributions, without noise."""
        # The weights of a unit sum to at most 1 over the senders, or every sender contributes once.
        return max(self.users, n_senders) * bound.norm * self.gain

    def check_steps(self, n_senders: int) -> None:
        """Check that the standard deviation of a share is at least ``LEAST_STEPS`` coarse steps, as the claims need.

        Raises:
            CompositionError: it is less; the error names ``word_bits``.
        """
        steps = self.share_std(n_senders) / self.step if self.step else math.inf
        if steps < LEAST_STEPS:
            raise CompositionError(
                f"word_bits = {self.word_bits}: words of so few bits need a grid on which one silo's share of the "
                f"noise has {steps:.2g} steps, and the guarantee needs {LEAST_STEPS:g}; take word_bits = 'auto', more "
                "noise, or fewer users"
            )

    @property
    def content(self) -> Reveals:
        """Information that a message reveals: a sum with its share of the noise, or the exact sum."""
        return Reveals.MESSAGE if self.noise_multiplier else Reveals.EXACT

    @property
    def gain(self) -> float:
        """Largest ratio of the norm of a message, without noise, to the norm of its sums."""
        return 1.0

    @property
    def sum_unit(self) -> float:
        """Step of the grid of sums before noise, over that of contributions: a power of two, at most 1."""
        return 1.0

    def law(self, n_silos: int, grid: float) -> DiscreteGaussian:
        """Return the law of one share, on a grid that divides the contributions' and keeps all sums exact.

        If exact sums force a coarser grid than the finest (2^29 steps per standard deviation), the stated grid loss
        is larger.
        """
        grid *= self.sum_unit
        longest = max(self.users, n_silos) * self.gain / self.sum_unit
        return grid_law(self.share_std(n_silos), grid, finest_grid(grid, longest))

    def check_fine(self, n_silos: int, grid: float) -> None:
        """Check that exact sums leave the share's noise its finest grid: 2^29 steps per standard deviation.

        Raises:
            CompositionError: exact sums over all users force a coarser grid.
        """
        if self.noise_multiplier and not is_finest(self.law(n_silos, grid), grid * self.sum_unit):
            raise CompositionError(
                f"noise_decay: shares of noise of multiplier {self.noise_multiplier:g} in the last round are too small "
                f"beside exact sums over {self.users} users in {n_silos} silos; let it fall less, or take more noise"
            )

    def share_std(self, n_silos: int) -> float:
        """Return the standard deviation of one silo's share per coordinate."""
        # Variances of independent shares add: `honest` shares of variance (sigma scale)^2 / honest give (sigma
        # scale)^2.
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
        """Return the guarantee for each kind of party, by what the party knows.

            knows                                  protected by
            the sum                                all shares
            the sum and every message              one share, because one message carries one share
            the sum and own shares (a coalition)   shares of the other silos that did not drop out
            all three                              the smaller multiplier of the two preceding lines

        A coalition of c silos knows its own shares and records. The claims against it protect the data that a user has
        at other silos (:meth:`~fedveil.stage.Sensitivity.pooled_sensitivity`). Sampling amplifies these claims only
        if a user's records at one silo do not change the user's weights at others (``reweighs``).
        """
        if self.noise_multiplier == 0:
            return (no_guarantee(NO_NOISE),)
        n, share = sensitivity.n_senders, self.share_std(sensitivity.n_senders)
        coalition = sensitivity.together  # c
        # One message carries one share, so its multiplier is share / (sensitivity of all messages). A party that sees
        # the messages also sees the sum, so it is never promised more than the sum's multiplier.
        single = min(share / sensitivity.messages, self._nominal(sensitivity).noise_multiplier)
        # The noise is sized for `honest` shares; against the coalition of this statement, `unknown` shares remain.
        honest = n - self.colluding_silos - self.max_dropouts
        unknown = n - self.max_dropouts - coalition
        by_sum: Event = NoGuarantee(reason="no share of the noise is left")
        by_message = by_sum
        if unknown > 0:
            multiplier = share / sensitivity.pooled_sensitivity(unknown, coalition, honest)
            by_sum, by_message = (
                GaussianEvent(noise_multiplier=multiplier),
                GaussianEvent(noise_multiplier=min(multiplier, single)),
            )
        return (
            Claim(covered_knowledge(Reveals.SUM), self._nominal(sensitivity)),
            Claim(covered_knowledge(Reveals.SUM, Reveals.MESSAGE), GaussianEvent(noise_multiplier=single)),
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN), by_sum, amplified=not sensitivity.reweighs),
            Claim(
                covered_knowledge(Reveals.SUM, Reveals.OWN, Reveals.MESSAGE),
                by_message,
                amplified=not sensitivity.reweighs,
            ),
        )

    def _nominal(self, sensitivity: Sensitivity) -> GaussianEvent:
        """Return the event of the sum for a party that knows no share."""
        return GaussianEvent(noise_multiplier=self.noise_multiplier * self.scale / sensitivity.total)

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        if self.noise_multiplier == 0:
            return 0.0
        n = sensitivity.n_senders
        # The sum carries one grid error per share, and the likelihood ratio has two densities.
        fine = 2 * n * self.law(n, sensitivity.bound.grid).log_ratio_to_gaussian
        return fine + (rounding_loss(self.share_std(n) / self.step, n) if self.step else 0.0)

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        shares = self.describe_shares(sensitivity, "each silo adds discrete Gaussian noise")
        return (*shares, *self.describe_rounding(sensitivity))

    def describe_rounding(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return a sentence on the rounding of messages after their noise."""
        if not self.step:
            return ()
        steps = self.share_std(sensitivity.n_senders) / self.step
        return (
            "each silo rounds its sum, with its share of the noise, to a multiple of "
            f"{self.step:g}; a share's standard deviation is {show_at_least(steps)} of these steps, and the loss "
            "of the rounding is part of the grid loss",
        )

    def describe_shares(self, sensitivity: Sensitivity, law: str) -> tuple[str, ...]:
        """Return a sentence on the sensitivity and the shares; ``law`` names the source of a share."""
        if self.noise_multiplier == 0:
            return ()
        n = sensitivity.n_senders
        changed = (
            f"one user changes the sum over {n} silos by at most {show_at_most(sensitivity.total)} (l2 norm)"
        )
        # Under partial encryption a message has two parts with separate noise, which the protection describes.
        if sensitivity.divided:
            return (changed,)
        counted = n - self.colluding_silos - self.max_dropouts
        shares = "" if counted == n else f" from {counted} of these shares"
        return (
            f"{changed}; {law} of standard deviation {show_at_least(self.share_std(n))} to its sum, which gives the "
            f"total a noise multiplier of {show_at_least(self._nominal(sensitivity).noise_multiplier)}{shares}",
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the assumption that all but the colluding silos add their shares of the noise."""
        return (everyone_adds("silo", self.colluding_silos),) if self.noise_multiplier else ()

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the grid step of a silo's message, coarse if messages are rounded; its multiples add up exactly."""
        return self.step or self.message_grid_before_rounding(grid, n_silos)

    def message_grid_before_rounding(self, grid: float, n_silos: int) -> float:
        """Return the grid step of a silo's sum with its share: a power of two that divides the contributions' grid."""
        return grid * self.sum_unit if self.noise_multiplier == 0 else self.law(n_silos, grid).grid

    def send(self, total: Float64[np.ndarray, " d"], sender: Sender) -> EncodedMessage:
        """Return a silo's sum with its share: exact discrete Gaussian noise on a grid that divides the sum's.

        The noisy sum is then rounded to the coarse grid, if there is one. Rounding before the noise would change the
        sensitivity.
        """
        if self.noise_multiplier == 0:
            return EncodedMessage(values=total)
        self.check_steps(sender.senders)
        law = self.law(sender.senders, sender.grid)
        noisy = total + law.sample((len(total),), sender.source("noise"))
        return EncodedMessage(values=round_to_grid(noisy, law.grid, self.step) if self.step else noisy)
