"""Define the accounting rules of the built-in releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64
from scipy.special import log_ndtr, ndtr

from fedveil.privacy.accountant import AccountingRule, Divergences, Losses, full_sensitivity
from fedveil.privacy.accounting import laplace_rdp, sampled_gaussian_rdp
from fedveil.privacy.events import (
    Adjacency,
    ConcentratedEvent,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
)
from fedveil.privacy.sampling import fixed_size_distribution, fixed_size_rdp, widest_loss

if TYPE_CHECKING:  # imported when needed: it takes half a second
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


# --- mixtures -----------------------------------------------------------------------------------------------
# Discretise the privacy loss of a mixture of Gaussians with vectorised arithmetic.
#
# ``dp_accounting`` inverts the privacy loss by bisection, point by point. This module tabulates the loss once and
# inverts it by interpolation for all points together, so groups of hundreds of records are practical.


Values = Float64[np.ndarray, " n"]
Components = Float64[np.ndarray, " m"]
Table = Float64[np.ndarray, " t"]

_REACH = 10.0  # in standard deviations; the tail beyond has probability below 1e-22
_TABLE = 50_000
_COARSE = 1 / 500  # in standard deviations; a table with smaller steps leaves an error of delta below 1e-12
_NEWTON = 5


def mixture_distribution(event: MixtureOfGaussiansEvent, interval: float) -> PrivacyLossDistribution:
    """Return the discretised loss of P = sum_i p_i N(c_i, s^2) against Q = N(0, s^2), in both directions.

    The loss l(x) = ln sum_i p_i exp(c_i x / s^2 - c_i^2 / (2 s^2)) grows with x, so the set where P exceeds
    e^e Q is a half-line and

        delta(P || Q, e) = P(x > t) - e^e Q(x > t)   with l(t) =  e,
        delta(Q || P, e) = Q(x < t) - e^e P(x < t)   with l(t) = -e.

    A threshold with error h loses only O(h^2) of delta, because delta is largest at t. The threshold is read from a
    table of l. If shifts are so long that a step of the table exceeds s / 500, Newton's method refines it. Both leave
    an error below 1e-12. "Connect the dots" (Doroshenko et al. 2022) then gives the distribution on multiples of
    ``interval`` whose delta equals these values there and exceeds the true delta in between.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    sigma = event.noise_multiplier
    shifts = np.array(event.sensitivities)
    weights = np.array(event.probabilities)
    table = np.linspace(
        min(0.0, float(shifts.min())) - (_REACH + 2) * sigma,
        float(shifts.max()) + (_REACH + 2) * sigma,
        _TABLE,
    )
    losses = _loss(table, shifts, weights, sigma)
    coarse = table[1] - table[0] > _COARSE * sigma

    def threshold(e: Values) -> Values:
        t = _threshold(e, losses, table)
        return _refined(t, e, table, (shifts, weights, sigma)) if coarse else t

    def remove(e: Values) -> Values:
        t = threshold(e)
        above: Values = -np.exp(e + log_ndtr(-t / sigma))
        for shift, weight in zip(shifts, weights, strict=True):
            above += weight * ndtr((shift - t) / sigma)
        return above

    def add(e: Values) -> Values:
        t = threshold(-e)
        below: Values = ndtr(t / sigma)
        for shift, weight in zip(shifts, weights, strict=True):
            below -= np.exp(e + math.log(weight) + log_ndtr((t - shift) / sigma))
        return below

    tail = sum(p * ndtr((c - table) / sigma) for p, c in zip(weights, shifts, strict=True))
    top = float(table[int(np.argmax(tail < 1e-22))])
    bottom = -_REACH * sigma
    lowest, highest = _loss(np.array([bottom, top]), shifts, weights, sigma)
    base_lowest, base_highest = _loss(np.array([bottom, -bottom]), shifts, weights, sigma)
    return PrivacyLossDistribution(
        _connect_the_dots(remove, lowest, highest, interval),
        _connect_the_dots(add, -base_highest, -base_lowest, interval),
    )


def _loss(x: Values, shifts: Components, weights: Components, sigma: float) -> Values:
    """Return l(x), component by component (memory stays that of ``x``)."""
    total = np.full(len(x), -math.inf)
    for shift, weight in zip(shifts, weights, strict=True):
        total = np.logaddexp(total, math.log(weight) + shift * (x - shift / 2) / sigma**2)
    return total


def _threshold(e: Values, losses: Table, table: Table) -> Values:
    """Return t with l(t) = e; minus infinity if e is below every loss (the half-line is the line)."""
    threshold: Values = np.interp(e, losses, table, left=-math.inf)
    return threshold


def _refined(t: Values, e: Values, table: Table, mixture: tuple[Components, Components, float]) -> Values:
    """Refine t with l(t) = e by Newton's method, within its step of the table.

    l is convex, so Newton's steps converge.
    """
    shifts, weights, sigma = mixture
    refined = t.copy()
    inside = (t > table[0]) & (t < table[-1])
    at, target = t[inside], e[inside]
    index = np.searchsorted(table, at)
    for _ in range(_NEWTON):
        loss, slope = _loss(at, shifts, weights, sigma), np.zeros(len(at))
        for shift, weight in zip(shifts, weights, strict=True):
            slope += shift * np.exp(math.log(weight) + shift * (at - shift / 2) / sigma**2 - loss) / sigma**2
        at = np.clip(at - (loss - target) / np.maximum(slope, 1e-300), table[index - 1], table[index])
    refined[inside] = at
    return refined


def _connect_the_dots(
    delta: Callable[[Values], Values], lowest: float, highest: float, interval: float
) -> pld_pmf.PLDPmf:
    """Return the dominating distribution on multiples of ``interval`` between two losses."""
    from dp_accounting.pld import pld_pmf

    first, last = math.floor(lowest / interval), math.ceil(highest / interval)
    values = np.clip(delta(np.arange(first, last + 1) * interval), 0.0, 1.0)
    # The true delta does not rise with epsilon; rounding may disturb this order.
    decreasing = np.maximum.accumulate(values[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, decreasing)


# --- rules --------------------------------------------------------------------------------------------------


_LEAST_RATE = 1e-30
"""Least sampling rate that is computed; lower rates are counted as this one, which costs more.

dp_accounting accepts no subnormal rate.
"""
_MOST_EXPONENT = 500.0  # exp(500) is still a float64 number


def _gaussian_distribution(mu: float, interval: float) -> PrivacyLossDistribution:
    """Return the distribution of a Gaussian release, which a run whose releases are all Gaussian does not need."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # imports SciPy's signal: 0.8 s

    return pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=interval)


class GaussianRule(AccountingRule, event=GaussianEvent):
    """Gaussian noise: both bounds; under replace-one neighbours the sensitivity is doubled."""

    def losses(self, release: GaussianEvent, adjacency: Adjacency) -> Losses:
        """Return the loss, normal with mean mu^2 / 2 and standard deviation mu."""
        mu = full_sensitivity(adjacency) / release.noise_multiplier
        return Losses(
            typical=mu, largest=mu**2 / 2 + 10 * mu, spread=mu, discretise=partial(_gaussian_distribution, mu)
        )

    def divergences(self, release: GaussianEvent, adjacency: Adjacency) -> Divergences:
        return partial(sampled_gaussian_rdp, 1.0, release.noise_multiplier / full_sensitivity(adjacency))


class ConcentratedRule(AccountingRule, event=ConcentratedEvent):
    """Zero-concentrated release: the Renyi divergences of Gaussian noise, and no loss distribution."""

    def divergences(self, release: ConcentratedEvent, adjacency: Adjacency) -> Divergences:
        return partial(sampled_gaussian_rdp, 1.0, release.noise_multiplier / full_sensitivity(adjacency))


class LaplaceRule(AccountingRule, event=LaplaceEvent):
    """Laplace noise: both bounds; under replace-one neighbours the sensitivity is doubled."""

    def losses(self, release: LaplaceEvent, adjacency: Adjacency) -> Losses:
        from dp_accounting.pld import privacy_loss_distribution as pld

        scale, sensitivity = release.noise_multiplier, full_sensitivity(adjacency)
        return Losses(
            typical=1 / scale,
            largest=1 / scale,
            spread=1 / scale,
            discretise=lambda interval: pld.from_laplace_mechanism(
                scale / sensitivity, value_discretization_interval=interval
            ),
        )

    def divergences(self, release: LaplaceEvent, adjacency: Adjacency) -> Divergences:
        return partial(laplace_rdp, release.noise_multiplier / full_sensitivity(adjacency))


class PoissonSampledRule(AccountingRule, event=PoissonSampledEvent):
    """Poisson sample: losses of Gaussian and Laplace noise, divergences of Gaussian noise.

    Divergences and the losses of Laplace noise are those of adding or removing one unit.
    """

    def losses(self, release: PoissonSampledEvent, adjacency: Adjacency) -> Losses | None:
        from dp_accounting.pld import privacy_loss_distribution as pld
        from dp_accounting.privacy_accountant import NeighboringRelation

        rate = max(release.rate, _LEAST_RATE)
        match release.event:
            case LaplaceEvent(noise_multiplier=scale) if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
                return Losses(
                    typical=release.rate / scale,
                    largest=1 / scale,
                    spread=1 / scale,
                    discretise=lambda interval: pld.from_laplace_mechanism(
                        scale, value_discretization_interval=interval, sampling_prob=rate
                    ),
                )
            case GaussianEvent(noise_multiplier=sigma):
                largest = 1 / (2 * sigma**2) + 10 / sigma
                spread = release.rate * math.sqrt(math.expm1(min(1 / sigma**2, _MOST_EXPONENT)))
                return Losses(
                    typical=release.rate / sigma,
                    largest=largest,
                    spread=min(largest, spread),
                    discretise=lambda interval: pld.from_gaussian_mechanism(
                        sigma,
                        value_discretization_interval=interval,
                        sampling_prob=rate,
                        neighboring_relation=NeighboringRelation[adjacency.name],
                    ),
                )
        return None

    def divergences(self, release: PoissonSampledEvent, adjacency: Adjacency) -> Divergences | None:
        if adjacency is Adjacency.ADD_OR_REMOVE_ONE and isinstance(release.event, GaussianEvent):
            return partial(sampled_gaussian_rdp, release.rate, release.event.noise_multiplier)
        return None


class FixedSizeRule(AccountingRule, event=SampledWithoutReplacementEvent):
    """Sample of fixed size: both bounds of Gaussian noise, for neighbours that replace one unit."""

    def losses(self, release: SampledWithoutReplacementEvent, adjacency: Adjacency) -> Losses | None:
        if adjacency is not Adjacency.REPLACE_ONE or not isinstance(release.event, GaussianEvent):
            return None
        mu = full_sensitivity(adjacency) / release.event.noise_multiplier
        largest = widest_loss(release.rate, mu)
        return Losses(
            typical=mu * release.rate,
            largest=largest,
            spread=min(largest, release.rate * math.sqrt(math.expm1(min(mu**2, _MOST_EXPONENT)))),
            discretise=lambda interval: fixed_size_distribution(release.rate, mu, interval),
        )

    def divergences(
        self, release: SampledWithoutReplacementEvent, adjacency: Adjacency
    ) -> Divergences | None:
        if adjacency is not Adjacency.REPLACE_ONE or not isinstance(release.event, GaussianEvent):
            return None
        return partial(
            fixed_size_rdp, release.rate, release.event.noise_multiplier / full_sensitivity(adjacency)
        )


class MixtureRule(AccountingRule, event=MixtureOfGaussiansEvent):
    """Mixture of Gaussians: the losses of adding or removing one unit."""

    def losses(self, release: MixtureOfGaussiansEvent, adjacency: Adjacency) -> Losses | None:
        if adjacency is not Adjacency.ADD_OR_REMOVE_ONE:
            return None
        shifts = np.array(release.sensitivities) / release.noise_multiplier
        mean, most = float(shifts @ release.probabilities), float(shifts.max())
        largest = most**2 / 2 + 10 * most
        # E_Q[(P/Q)^2] - 1 for shifts of c standard deviations is below sum_i p_i (exp(c_i^2) - 1). The variance of a
        # loss is about this divergence, if it is small.
        square = float(np.expm1(np.minimum(shifts**2, _MOST_EXPONENT)) @ release.probabilities)
        return Losses(
            typical=mean,
            largest=largest,
            spread=min(largest, math.sqrt(square)),
            discretise=lambda interval: mixture_distribution(release, interval),
        )
