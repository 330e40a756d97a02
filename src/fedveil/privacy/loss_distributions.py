"""Privacy loss distributions of releases, rounded up, and the accountant that composes them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
from dp_accounting import privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld

from fedveil.errors import PrivacyError
from fedveil.privacy.accountant import Accountant, full_sensitivity, gaussian_delta, gaussian_epsilon
from fedveil.privacy.events import (
    Adjacency,
    Event,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    NearbyEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
)
from fedveil.privacy.fixed_size import fixed_size_distribution, widest_loss
from fedveil.privacy.mixture import mixture_distribution

_FFT_ERROR = 1e-12
_FFT_ERROR_PER_RELEASE = 1e-15
_LEAST_RATE = 1e-30
"""A rate below costs what this one costs, which is more: dp_accounting takes no subnormal number."""
_MOST_NOISE = 1e6
"""Releases with more noise cost what one with so much costs, which is more: of a weaker loss rounding is all that is
left, and dp_accounting fails on it."""
_MOST_POINTS = 1 << 21
"""Of a composed distribution, about: beyond, its grid is coarser."""
_REACH = 16.0  # standard deviations of a composed loss between its ends
_COARSEST = 500.0  # e to the power of it is still a number
_MOST_DIFFERENT = 20_000
"""Components of different releases that are discretised for one figure; a component takes some milliseconds."""
_COMPONENTS = 50  # as much time as they take takes a release that is no mixture
_MOST_RELEASES = 1 << 20
"""Of one kind, but for Gaussian ones that nobody samples: more take gigabytes, and cost more than anybody would pay."""
_FAITHFUL = 600.0
"""Epsilon up to which sums of exp(-loss) are normal numbers of float64."""
_HELD = 700.0
"""A loss to whose power e is a number of float64, whatever dp_accounting does with it."""
_LARGEST = 2.0**60
_CLOSE = 1e-12
"""By what share of epsilon the bisection may end above the smallest one."""


@dataclass(frozen=True, kw_only=True)
class PldAccountant(Accountant):
    """Numerical composition of privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022).

    Each kind of release gets one discretised distribution, dominating the true one ("connect the dots"), which is
    cached and composed with itself by one FFT, so T equal rounds cost the same as one. Full Gaussian releases are
    merged into one exactly, and need no discretisation when nothing else was released.

    ``interval`` is the spacing of the loss grid. By default it is a tenth of the standard deviation of the
    narrowest loss, at most 1e-3, unless the widest loss would then need more than 2e5 points, or the composition about
    2e6. A coarser grid gives a larger epsilon, never an invalid one. Rounding errors of the FFT are covered by asking
    for delta - 1e-12 - 1e-15 per release; a smaller delta is refused, and so is noise so small that no grid holds its
    losses, more different releases than can be discretised in minutes, and more than 2^20 of one kind.

    Under replace-one, full releases have twice the sensitivity, Poisson-sampled Gaussian ones their own
    distribution and fixed-size samples of Gaussian ones that of :mod:`fedveil.privacy.fixed_size`;
    Poisson-sampled Laplace and mixtures are refused. Under add-or-remove, fixed-size samples are.
    """

    name: ClassVar[str] = "pld"

    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    interval: float | None = None

    def _supported(self, release: Event) -> bool:
        """Whether it is Gaussian or Laplace, full or sampled, a mixture of Gaussians, or a distance."""
        match release:
            case (
                GaussianEvent()
                | LaplaceEvent()
                | NoGuarantee()
                | NearbyEvent()
                | PoissonSampledEvent(event=GaussianEvent())
            ):
                return True
            case MixtureOfGaussiansEvent() | PoissonSampledEvent(event=LaplaceEvent()):
                return self.adjacency is Adjacency.ADD_OR_REMOVE_ONE
            case SampledWithoutReplacementEvent(event=GaussianEvent()):
                return self.adjacency is Adjacency.REPLACE_ONE
        return False

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
        """Return the strength mu of all full Gaussian releases together, and the other releases."""
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
        interval = self.interval or _interval(mu, others)
        try:
            parts = [_distribution(e, self.adjacency, interval).self_compose(n) for e, n in others.items()]
        except (ValueError, OverflowError):  # of dp_accounting, where e to the power of a loss is no number
            if full_sensitivity(self.adjacency) * max(_shape(one)[1] for one in others) < _HELD:
                raise
            raise PrivacyError(
                "the noise of these releases is so small that accountant 'pld' has no number for their cost (a loss"
                " beyond 700): nothing is protected; use more noise"
            ) from None
        if mu > 0:
            parts.append(
                pld.from_gaussian_mechanism(
                    1 / mu, value_discretization_interval=interval
                )  # mu has the adjacency
            )
        composed = parts[0]
        for part in parts[1:]:
            composed = composed.compose(part)
        return composed


def _epsilon(distribution: pld.PrivacyLossDistribution, delta: float) -> float:
    """Return the smallest epsilon at ``delta``.

    dp_accounting sums exp(-loss), which leaves the normal numbers of float64 near 708: where epsilon lies between that
    and 745 it returns infinity, or a number with few correct bits. From 600 on the smallest epsilon is bisected for and
    the upper end returned: delta of an epsilon takes differences of losses alone.
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
    """Return a release as it is counted: with no more noise than a loss can be computed for."""
    if hasattr(release, "event"):
        return cast(Event, replace(release, event=_counted_as(release.event)))
    most = _MOST_NOISE * (max(getattr(release, "sensitivities", ()), default=1.0) or 1.0)
    return cast(Event, replace(release, noise_multiplier=min(release.noise_multiplier, most)))


def _shape(release: Event) -> tuple[float, float, float]:
    """Return a typical, a largest and the standard deviation's privacy loss of one release, for the choice of the grid.

    The variance of the loss is about the chi-square divergence, where that is small.
    """
    match release:
        case MixtureOfGaussiansEvent(noise_multiplier=sigma):
            shifts = np.array(release.sensitivities) / sigma
            mean, most = float(shifts @ release.probabilities), float(shifts.max())
            largest = most**2 / 2 + 10 * most
            square = float(np.expm1(np.minimum(shifts**2, _COARSEST)) @ release.probabilities)
            return mean, largest, min(largest, math.sqrt(square))
        case PoissonSampledEvent(event=GaussianEvent(noise_multiplier=sigma)):
            largest = 1 / (2 * sigma**2) + 10 / sigma
            spread = release.rate * math.sqrt(math.expm1(min(1 / sigma**2, _COARSEST)))
            return release.rate / sigma, largest, min(largest, spread)
        case PoissonSampledEvent(event=LaplaceEvent(noise_multiplier=scale)):
            return release.rate / scale, 1 / scale, 1 / scale
        case SampledWithoutReplacementEvent(event=GaussianEvent(noise_multiplier=sigma)):
            largest = widest_loss(release.rate, 2 / sigma)
            spread = release.rate * math.sqrt(math.expm1(min(4 / sigma**2, _COARSEST)))
            return 2 * release.rate / sigma, largest, min(largest, spread)
        case LaplaceEvent(noise_multiplier=scale):
            return 1 / scale, 1 / scale, 1 / scale
    raise AssertionError(f"{release} has no discretised distribution")


def _interval(mu: float, others: Counter[Event]) -> float:
    """Return the default grid spacing for these releases beside Gaussian ones of strength mu; all share one.

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
    shapes = [_shape(release) for release in others]
    fine = min(1e-3, *(typical / 10 for typical, _, _ in shapes))
    widest = mu * mu / 2 + 10 * mu
    for count, (_, largest, spread) in zip(others.values(), shapes, strict=True):
        # the second: the ends that dp_accounting finds are no better than that
        widest = max(widest, _REACH * math.sqrt(count) * spread, count * spread**2 / largest)
    interval = max(fine, *(largest / 1e5 for _, largest, _ in shapes), widest / _MOST_POINTS)
    if not interval <= _COARSEST:
        raise PrivacyError(
            f"the noise of these releases is so small that accountant 'pld' has no number for their cost (a loss of "
            f"about {widest:.1e}): nothing is protected; use more noise"
        )
    return interval


@lru_cache(maxsize=64)
def _distribution(release: Event, adjacency: Adjacency, interval: float) -> pld.PrivacyLossDistribution:
    """Return the dominating, discretised privacy loss distribution of one release."""
    relation = {
        Adjacency.ADD_OR_REMOVE_ONE: privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: privacy_accountant.NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    match release:
        case LaplaceEvent(noise_multiplier=scale):
            return pld.from_laplace_mechanism(
                scale / full_sensitivity(adjacency), value_discretization_interval=interval
            )
        case PoissonSampledEvent(event=LaplaceEvent(noise_multiplier=scale)):
            return pld.from_laplace_mechanism(
                scale, value_discretization_interval=interval, sampling_prob=max(release.rate, _LEAST_RATE)
            )
        case PoissonSampledEvent(event=GaussianEvent(noise_multiplier=sigma)):
            return pld.from_gaussian_mechanism(
                sigma,
                value_discretization_interval=interval,
                sampling_prob=max(release.rate, _LEAST_RATE),
                neighboring_relation=relation,
            )
        case MixtureOfGaussiansEvent():
            return mixture_distribution(release, interval)
        case SampledWithoutReplacementEvent(event=GaussianEvent(noise_multiplier=sigma)):
            return fixed_size_distribution(release.rate, full_sensitivity(adjacency) / sigma, interval)
    raise AssertionError(f"{release} has no discretised distribution")
