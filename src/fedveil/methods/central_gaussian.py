"""Add Gaussian noise to the sum once, by a server that is trusted with every update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from fedveil.config_keys import NonNegative, Positive
from fedveil.methods.channels import NO_NOISE, Channel, refuses_unbounded
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, no_guarantee
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.noise import grid_gaussian, grid_law
from fedveil.privacy.sampling import published_epsilon
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.randomness import BitSource
from fedveil.stage import Published, Sensitivity


@dataclass(frozen=True, kw_only=True)
class CentralGaussian(Channel):
    """Noise that a trusted server adds once to the sum of all updates: std = noise_multiplier * scale.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: unit of the noise, same unit as the update: the bound of one contribution.
    """

    content: ClassVar[Reveals] = Reveals.EXACT
    noise_known: ClassVar[bool] = True

    noise_multiplier: NonNegative
    scale: Positive

    def refuses(self, method: Any) -> Iterable[str]:
        yield from refuses_unbounded(method)
        yield from super().refuses(method)

    def noise_std(self, n: int, summed: int) -> float:
        return self.std

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the sum, per coordinate."""
        return self.noise_multiplier * self.scale

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim the noise against readers of the noisy sum, and nothing against the server, which adds it."""
        if self.noise_multiplier == 0:
            return (no_guarantee(NO_NOISE),)
        # Multiplier of the Gaussian mechanism: standard deviation over l2 sensitivity, z = sigma * scale / Delta_2.
        event = GaussianEvent(noise_multiplier=self.std / sensitivity.total)
        return (
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN), event),
            no_guarantee("the server is trusted: it sees every update and adds the noise itself"),
        )

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        return (
            # Factor 2: the grid distorts the density in the numerator and in the denominator of the likelihood ratio.
            2 * grid_law(self.std, sensitivity.bound.grid).log_ratio_to_gaussian
            if self.noise_multiplier
            else 0.0
        )

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        if self.noise_multiplier == 0:
            return ()
        return (
            f"adding or removing one {sensitivity.unit} changes the sum by at most "
            f"{show_at_most(sensitivity.total)} (l2 norm), "
            "and replacing one by at most twice that; the server adds discrete Gaussian noise of standard deviation "
            f"{show_at_least(self.std)} to the sum, a noise multiplier of "
            f"{show_at_least(self.std / sensitivity.total)}",
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the trust in the server on which the guarantee rests."""
        if self.noise_multiplier == 0:
            return ()
        return (
            "departures from the method: epsilon relies on the server, which receives every update and alone adds the "
            "noise; no other party can check that it does, or that it shows no update to anybody",
        )

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the budget of Tables 3 and 6 of DP-Fed-LS, if clients are sampled as in the paper."""
        if self.noise_multiplier == 0 or method.sampler.adjacency is not Adjacency.REPLACE_ONE:
            return ()
        # The tables take z = nu / L, although replacing a client moves the sum by 2 L (Theorem 1).
        rate, multiplier = method.sampler.rate, self.std / method.bound.norm

        def tables(rounds: int, delta: float) -> float:
            return published_epsilon(rate, multiplier, rounds, delta)

        gap = "replacing a client moves the sum by 2L, as Theorem 1 says, but the tables take L"
        return (Published(name="Tables 3 and 6 of DP-Fed-LS (sensitivity L)", gap=gap, epsilon=tables),)

    def release(
        self, total: Float64[np.ndarray, " d"], grid: float, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Return the sum with exact discrete Gaussian noise on the grid of the contributions."""
        if self.noise_multiplier == 0:
            return total
        noisy = grid_gaussian(len(total), self.std, grid, source)
        noisy += total
        return noisy
