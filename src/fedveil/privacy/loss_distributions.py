"""Discretise privacy loss distributions pessimistically, and compose them by FFT."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from fedveil.errors import PrivacyError
from fedveil.privacy.accountant import (
    Accountant,
    Losses,
    full_sensitivity,
    gaussian_delta,
    gaussian_epsilon,
    rule_of,
)
from fedveil.privacy.events import (
    Adjacency,
    Event,
    GaussianEvent,
    NearbyEvent,
    NoGuarantee,
)

if TYPE_CHECKING:  # imported when needed: it takes half a second
    from dp_accounting.pld import privacy_loss_distribution as pld

_FFT_ERROR = 1e-12
_FFT_ERROR_PER_RELEASE = 1e-15
_MOST_NOISE = 1e6
"""Largest noise multiplier that is computed. More noise is counted as this much, which never lowers epsilon.

With more noise the losses would consist of rounding errors, and dp_accounting fails on them.
"""
_MOST_POINTS = 1 << 21
"""Approximate limit of the points of a composed distribution; beyond it the grid becomes coarser."""
_REACH = 16.0  # width of a composed loss distribution, in standard deviations
_COARSEST = 500.0  # exp(500) is still a float64 number
_MOST_DIFFERENT = 20_000
"""Limit of discretised components over all different releases; a component takes some milliseconds."""
_COMPONENTS = 50  # a release that is no mixture takes the time of this many components
_MOST_RELEASES = 1 << 20
"""Limit of equal releases, except unsampled Gaussian ones.

More releases need gigabytes, and their epsilon is too large to be of use.
"""
_FAITHFUL = 600.0
"""Largest epsilon up to which sums of exp(-loss) are normal float64 numbers."""
_HELD = 700.0
"""Largest loss L for which exp(L) is a finite float64 number everywhere in dp_accounting."""
_LARGEST = 2.0**60
"""Epsilon above which the bisection returns infinity."""
_CLOSE = 1e-12
"""Relative distance to the smallest epsilon at which the bisection ends, above it."""


@dataclass(frozen=True, kw_only=True)
class PldAccountant(Accountant):
    """Accountant that composes privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022).

    Each class of release has one discretised distribution that dominates the true one ("connect the dots"). It is
    cached and composed with itself by one FFT, so T equal rounds cost the same time as one. Unsampled Gaussian
    releases are merged into one exactly, and need no discretisation if nothing else was released.

    ``interval`` is the spacing of the loss grid. By default it is a tenth of the typical loss of the narrowest
    release, and at most 1e-3. It is larger if the widest loss would then need more than 2e5 points, or the
    composition about 2e6. A coarser grid gives a larger epsilon, never an invalid one. Rounding errors of the FFT are
    covered by evaluating at delta - 1e-12 - 1e-15 per release. The accountant refuses a smaller delta, noise so small
    that no grid holds its losses, more different releases than can be discretised in minutes, and more than 2^20
    equal releases.

    Under replace-one, unsampled releases have twice the sensitivity. Poisson-sampled Gaussian releases have a
    distribution of their own, and fixed-size samples that of :mod:`fedveil.privacy.sampling`. Poisson-sampled
    Laplace releases and mixtures are refused. Under add-or-remove, fixed-size samples are refused.
    """

    name: ClassVar[str] = "pld"

    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    interval: float | None = None

    def _supported(self, release: Event) -> bool:
        """Return whether the accountant can count the release.

        It counts releases with a loss distribution, releases without a guarantee, and statistical distances.
        """
        if isinstance(release, NoGuarantee | NearbyEvent):
            return True
        return rule_of(release).losses(release, self.adjacency) is not None

    def _epsilon(self, releases: Counter[Event], delta: float) -> float:
        """Return the smallest epsilon for ``delta``, which must exceed the numerical error."""
        if any(isinstance(release, NoGuarantee) for release in releases):
            return math.inf
        mu, others = self._split(releases)
        if not others:
            return gaussian_epsilon(mu, delta)
        slack = self._slack(releases)
        if delta <= slack:
            raise PrivacyError(
                f"delta = {delta}: the numerical error of {sum(releases.values())} composed releases is up to "
                f"{slack:.1e}; ask for a larger delta, or use accountant 'rdp'"
            )
        return _epsilon(self._compose(mu, others), delta - slack)

    def _delta(self, releases: Counter[Event], epsilon: float) -> float:
        if any(isinstance(release, NoGuarantee) for release in releases):
            return 1.0
        mu, others = self._split(releases)
        if not others:
            return gaussian_delta(mu, epsilon)
        composed = float(self._compose(mu, others).get_delta_for_epsilon(epsilon))
        return min(1.0, composed + self._slack(releases))

    def _split(self, counts: Counter[Event]) -> tuple[float, Counter[Event]]:
        """Return the strength mu of all unsampled Gaussian releases together, and the other releases."""
        # Gaussian releases compose exactly: mu^2 = sum_t (sensitivity / std_t)^2 (Dong, Roth and Su 2022, Corollary
        # 3.3).
        square = sum(
            count / event.noise_multiplier**2
            for event, count in counts.items()
            if isinstance(event, GaussianEvent)
        )
        others = Counter[Event]()
        for event, n in counts.items():
            if not isinstance(event, GaussianEvent):
                others[_counted_as(event)] += n
        return full_sensitivity(self.adjacency) * math.sqrt(square), others

    @staticmethod
    def _slack(counts: Counter[Event]) -> float:
        return _FFT_ERROR + _FFT_ERROR_PER_RELEASE * sum(counts.values())

    def _compose(self, mu: float, others: Counter[Event]) -> pld.PrivacyLossDistribution:
        interval = self.interval or _interval(mu, others, self.adjacency)
        try:
            parts = [_distribution(e, self.adjacency, interval).self_compose(n) for e, n in others.items()]
        except (ValueError, OverflowError):  # raised by dp_accounting if exp(loss) overflows
            widest = max(_losses(one, self.adjacency).largest for one in others)
            if full_sensitivity(self.adjacency) * widest < _HELD:
                raise
            raise PrivacyError(
                "the noise of these releases is so small that accountant 'pld' has no number for their cost (a loss"
                " beyond 700): nothing is protected; use more noise"
            ) from None
        if mu > 0:
            parts.append(_gaussian_distribution(mu, interval))
        composed = parts[0]
        for part in parts[1:]:
            composed = composed.compose(part)
        return composed


def _epsilon(distribution: pld.PrivacyLossDistribution, delta: float) -> float:
    """Return the smallest epsilon at ``delta``.

    dp_accounting sums exp(-loss), which leaves the normal float64 numbers near loss 708. If epsilon lies between 708
    and 745, dp_accounting returns infinity, or a number with few correct bits. From 600 on, this function bisects for
    the smallest epsilon and returns the upper end: delta at an epsilon uses differences of losses alone.
    """
    with np.errstate(over="ignore"):
        found = float(distribution.get_epsilon_for_delta(delta))
    if found < _FAITHFUL:
        return found
    above = 2 * _FAITHFUL
    while distribution.get_delta_for_epsilon(above) > delta:
        above *= 2
        if above > _LARGEST:
            return math.inf
    below = _FAITHFUL / 2
    while above - below > _CLOSE * above:
        middle = (below + above) / 2
        if distribution.get_delta_for_epsilon(middle) > delta:
            below = middle
        else:
            above = middle
    return above


def _counted_as(release: Any) -> Event:
    """Return the release with its noise multiplier lowered to the largest one that is computed."""
    if isinstance(getattr(release, "event", None), Event):
        return cast(Event, replace(release, event=_counted_as(release.event)))
    if not hasattr(release, "noise_multiplier"):
        return cast(Event, release)
    most = _MOST_NOISE * (max(getattr(release, "sensitivities", ()), default=1.0) or 1.0)
    return cast(Event, replace(release, noise_multiplier=min(release.noise_multiplier, most)))


def _losses(release: Event, adjacency: Adjacency) -> Losses:
    """Return the loss of a release that the accountant supports."""
    found = rule_of(release).losses(release, adjacency)
    assert found is not None, f"{release} has no loss distribution"
    return found


def _interval(mu: float, others: Counter[Event], adjacency: Adjacency) -> float:
    """Return the default grid spacing for these releases together with Gaussian ones of strength mu.

    Raises:
        PrivacyError: noise so small, or so many different releases, that their losses cannot be composed.
    """
    if max(others.values()) > _MOST_RELEASES:
        raise PrivacyError(
            f"{max(others.values())} sampled releases: accountant 'pld' composes at most {_MOST_RELEASES}; use "
            "accountant 'rdp'"
        )
    sizes = (len(getattr(release, "probabilities", ())) for release in others)
    if sum(max(_COMPONENTS, size) for size in sizes) > _MOST_DIFFERENT:
        raise PrivacyError(
            f"{len(others)} different releases are more than accountant 'pld' composes in any reasonable time"
        )
    losses = [_losses(release, adjacency) for release in others]
    fine = min(1e-3, *(one.typical / 10 for one in losses))
    widest = mu * mu / 2 + 10 * mu
    for count, one in zip(others.values(), losses, strict=True):
        # The third bound: dp_accounting's own truncation leaves a composed distribution at least this wide.
        widest = max(widest, _REACH * math.sqrt(count) * one.spread, count * one.spread**2 / one.largest)
    interval = max(fine, *(one.largest / 1e5 for one in losses), widest / _MOST_POINTS)
    if not interval <= _COARSEST:
        raise PrivacyError(
            f"the noise of these releases is so small that accountant 'pld' has no number for their cost (a loss of "
            f"about {widest:.1e}): nothing is protected; use more noise"
        )
    return interval


@lru_cache(maxsize=64)
def _distribution(release: Event, adjacency: Adjacency, interval: float) -> pld.PrivacyLossDistribution:
    """Return the discretised, dominating privacy loss distribution of one release."""
    return _losses(release, adjacency).discretise(interval)


@lru_cache(maxsize=64)
def _gaussian_distribution(mu: float, interval: float) -> pld.PrivacyLossDistribution:
    """Return the discretised distribution of Gaussian noise of standard deviation 1/mu; mu includes the sensitivity."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=interval)
