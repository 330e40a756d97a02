"""Define the accounting rules of the built-in releases."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from fedveil.privacy.accountant import full_sensitivity
from fedveil.privacy.accounting_rule import AccountingRule, Divergences, Losses
from fedveil.privacy.events import (
    Adjacency,
    ConcentratedEvent,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
)
from fedveil.privacy.fixed_size import fixed_size_distribution, fixed_size_rdp, widest_loss
from fedveil.privacy.mixture import mixture_distribution
from fedveil.privacy.renyi import laplace_rdp, sampled_gaussian_rdp

_LEAST_RATE = 1e-30
"""Least sampling rate that is computed; lower rates are counted as this one, which costs more.

dp_accounting accepts no subnormal rate.
"""
_MOST_EXPONENT = 500.0  # exp(500) is still a float64 number


class GaussianRule(AccountingRule, event=GaussianEvent):
    """Gaussian noise: both bounds; under replace-one neighbours the sensitivity is doubled."""

    def losses(self, release: GaussianEvent, adjacency: Adjacency) -> Losses:
        """Return the loss, normal with mean mu^2 / 2 and standard deviation mu."""
        from dp_accounting.pld import privacy_loss_distribution as pld

        mu = full_sensitivity(adjacency) / release.noise_multiplier
        return Losses(
            typical=mu,
            largest=mu**2 / 2 + 10 * mu,
            spread=mu,
            discretise=lambda interval: pld.from_gaussian_mechanism(
                1 / mu, value_discretization_interval=interval
            ),
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
