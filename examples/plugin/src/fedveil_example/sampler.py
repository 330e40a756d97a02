"""A sampler with its accounting: its law, its event, and what a release of the event costs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedveil.privacy.accountant import AccountingRule, Divergences, Losses
from fedveil.privacy.claims import Claim
from fedveil.privacy.events import Adjacency, Event, GaussianEvent
from fedveil.privacy.sampling import Sampler, fixed_size_deltas, over_sample, widest_loss
from fedveil.randomness import BitSource


@dataclass(frozen=True, kw_only=True)
class OneOfTwo(Sampler):
    """One of the users 2k and 2k + 1 takes part, by a fair coin for each pair."""

    fixed_size: ClassVar[bool] = False  # of an odd number of users, the last has a coin alone
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    rate = 0.5

    def draw(self, n: int, source: BitSource) -> np.ndarray:
        """Return the mask of one user of each pair; a last user without a partner has a coin alone."""
        self.check_among(n)
        first = source.uint64(-(-n // 2)) % 2 == 0
        return np.stack([first, ~first], axis=1).ravel()[:n]

    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Amplify for parties that do not know the sample; a user's own flag tells that of its partner."""
        return over_sample(
            claims, unknowing=lambda base: OneOfTwoEvent(event=base), knowing_own=lambda base: base
        )

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        """Return the law in words."""
        return (f"one {moves.unit} of each pair takes part in each round, by a fair coin",)


@dataclass(frozen=True, kw_only=True)
class OneOfTwoEvent(Event, type="one-of-two"):
    """An event over one user of each pair."""

    event: Event


class OneOfTwoRule(AccountingRule, event=OneOfTwoEvent):
    """Bounds of Gaussian noise for adding or removing a user: those of a release that also shows the coins.

    With the coins known, a user who takes part loses as in the release of everyone, and any other user loses nothing.
    """

    def losses(self, release: OneOfTwoEvent, adjacency: Adjacency) -> Losses | None:
        """Return the mixture of a Gaussian loss and no loss, by its curve delta(epsilon)."""
        if adjacency is not Adjacency.ADD_OR_REMOVE_ONE or not isinstance(release.event, GaussianEvent):
            return None
        mu = 1 / release.event.noise_multiplier
        largest = widest_loss(1.0, mu)

        def discretise(interval: float) -> PrivacyLossDistribution:
            top = math.ceil(largest / interval)
            epsilons = np.arange(-top, top + 1) * interval
            deltas = (fixed_size_deltas(1.0, mu, epsilons) - np.expm1(np.minimum(epsilons, 0.0))) / 2
            pmf = create_pmf_pessimistic_connect_dots_fixed_gap(
                interval, -top, top, np.minimum.accumulate(deltas)
            )
            return PrivacyLossDistribution(pmf)

        return Losses(typical=mu, largest=largest, spread=mu, discretise=discretise)

    def divergences(self, release: OneOfTwoEvent, adjacency: Adjacency) -> Divergences | None:
        """Return ln((1 + e^{(a - 1) a / (2 z^2)}) / 2) / (a - 1), with the noise multiplier z."""
        if adjacency is not Adjacency.ADD_OR_REMOVE_ONE or not isinstance(release.event, GaussianEvent):
            return None
        z = release.event.noise_multiplier

        def by_order(orders: tuple[float, ...]) -> np.ndarray:
            a = np.array(orders)
            return (np.logaddexp(0.0, (a - 1) * a / (2 * z**2)) - math.log(2)) / (a - 1)

        return by_order
