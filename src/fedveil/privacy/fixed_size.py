"""Amplify Gaussian releases by sampling m of n units, for neighbours that replace one unit's data.

Replacing one sampled unit moves the mean of the Gaussian base release by ``mu`` standard deviations. For
contributions of norm at most L and noise std nu, mu = 2 L / nu: the old contribution is removed and another one is
added. With q = m / n:

* Renyi divergence: Wang, Balle and Kasiviswanathan 2019, "Subsampled Renyi differential privacy and analytical
  moments accountant", Theorem 9 (any mechanism) and its strengthening for mechanisms like the Gaussian one, section
  3.
* Privacy loss distribution: the pair of Dong, Roth and Su 2022, Theorem 4.2: M over a uniform sample is C_q(f)-DP if
  M is f-DP, and C_q(f) = min(f_q, f_q^{-1})** with f_q = q f + (1 - q) Id. As a hockey-stick divergence,

      delta(eps) = q delta_mu(ln(1 + (e^eps - 1) / q))         for eps >= 0
      delta(eps) = 1 - e^eps + e^eps delta(-eps)               for eps < 0

  with delta_mu the Gaussian one. A distribution that dominates this curve on a grid ("connect the dots", Doroshenko
  et al. 2022) can be composed by FFT like any other.

docs/theory/accounting.md.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float64
from scipy.special import gammaln, log_ndtr, logsumexp

if TYPE_CHECKING:  # imported when needed: it takes half a second
    from dp_accounting.pld import privacy_loss_distribution as pld

_TAIL_STDS: Final = 8.5  # a standard normal is beyond with probability 1e-17
_LITTLE_NOISE: Final = 0.1
"""Noise multiplier below which the Gaussian strengthening is skipped.

It is never the smaller bound there, and its integral has too many points.
"""
_PUBLISHED_ORDERS: Final = tuple(float(order) for order in range(2, 257))


@lru_cache(maxsize=256)
def fixed_size_rdp(
    rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> Float64[np.ndarray, " orders"]:
    """Return the Renyi divergences of one Gaussian release over a fixed-size sample, replacing one unit.

    For integer alpha, (alpha - 1) rho(alpha) = ln(1 + sum_{j=2}^alpha C(alpha, j) q^j zeta_j) with, for
    D(i) = i (i - 1) / (2 sigma^2) and B(l) = E|p/q - 1|^l = sum_i (-1)^{l-i} C(l, i) e^{D(i)} for even l,

        zeta_2 = min(4 (e^{D(2)} - 1), 2 e^{D(2)}),
        zeta_j = min(4 sqrt(B(2 floor(j/2)) B(2 ceil(j/2))), 2 e^{D(j)}).

    (alpha - 1) rho is convex in alpha, so that other orders are interpolated from above.

    Args:
        rate: q = m / n in (0, 1].
        noise_multiplier: sigma = noise std / distance of the two sums (2 L for contributions bounded by L).
        orders: alpha > 1.

    Returns:
        One divergence per order, read-only (cached).
    """
    if rate == 1:
        values = np.array(orders) / (2 * noise_multiplier**2)
    else:
        most = math.ceil(max(orders))
        moments = np.array(
            [0.0, *(_log_moment(rate, noise_multiplier, order) for order in range(2, most + 1))]
        )
        alphas = np.array(orders)
        # Linear interpolation of a convex function lies above it, so the bound stays valid.
        values = np.interp(alphas, np.arange(1, most + 1), moments) / (alphas - 1)
    values.flags.writeable = False
    return values


def published_epsilon(rate: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return the figure of Tables 3 and 6 of DP-Fed-LS.

    The tables use Theorem 9 of Wang et al. at integer orders, with Mironov's conversion. The figure is a bound only
    if ``noise_multiplier`` is relative to the distance of the two sums. The tables insert nu / L although that
    distance is 2 L.

    >>> as_published, correct = (published_epsilon(0.05, z, 200, 2000**-1.1) for z in (1.1, 1.1 / 2))
    >>> round(as_published, 2), round(correct, 1)
    (7.84, 33.9)
    """
    bounds = [
        (rounds * _log_moment(rate, noise_multiplier, int(order), general=True) - math.log(delta))
        / (order - 1)
        for order in _PUBLISHED_ORDERS
    ]
    return min(bounds)


def fixed_size_distribution(rate: float, mu: float, interval: float) -> pld.PrivacyLossDistribution:
    """Return a privacy loss distribution on a grid that dominates one release.

    The distribution is symmetric, because replacing a unit is a symmetric relation.

    Args:
        rate: q = m / n in (0, 1].
        mu: distance of the two sums in standard deviations of the noise.
        interval: spacing of the grid; a coarser grid gives a larger epsilon, never an invalid one.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    top = math.ceil(widest_loss(rate, mu) / interval)
    deltas = fixed_size_deltas(rate, mu, np.arange(-top, top + 1) * interval)
    deltas = np.minimum.accumulate(deltas)  # rounding must not make the curve rise
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -top, top, deltas)
    return pld.PrivacyLossDistribution(pmf)


def widest_loss(rate: float, mu: float) -> float:
    """Return a loss that one release exceeds with probability below 1e-16.

    The discretisation counts larger losses as infinite.
    """
    unsampled = mu * mu / 2 + _TAIL_STDS * mu
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + unsampled)) if rate < 1 else unsampled


def fixed_size_deltas(
    rate: float, mu: float, epsilons: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Return delta(epsilon) of one release for any real epsilon: the curve of the module docstring."""
    positive = np.abs(epsilons)
    # ln(1 + (e^eps - 1) / q) = eps + ln(1 - (1 - q) e^-eps) - ln q, without overflow for large eps.
    unsampled = positive + np.log1p(-(1 - rate) * np.exp(-positive)) - math.log(rate)
    upper = log_ndtr(mu / 2 - unsampled / mu)
    lower = unsampled + log_ndtr(-mu / 2 - unsampled / mu)
    deltas = -rate * np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))
    mirrored = -np.expm1(-positive) + np.exp(-positive) * deltas
    return np.asarray(np.clip(np.where(epsilons >= 0, deltas, mirrored), 0.0, 1.0))


@lru_cache(maxsize=4096)
def _log_moment(rate: float, sigma: float, order: int, *, general: bool = False) -> float:
    """Return (alpha - 1) rho(alpha) at an integer order; ``general`` omits the Gaussian strengthening."""
    j = np.arange(2, order + 1)
    log_binomial = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    # ln zeta_j: first the bound 2 e^D(j) for every mechanism, then the smaller ones where they apply.
    zeta = math.log(2) + j * (j - 1) / (2 * sigma**2)
    first = 1 / sigma**2  # D(2)
    zeta[0] = min(math.log(4) + first + math.log(-math.expm1(-first)), zeta[0])
    if not general and sigma > _LITTLE_NOISE:
        even = np.array([0.0, *(_log_difference(sigma, 2 * half) for half in range(1, order // 2 + 2))])
        zeta[1:] = np.minimum(zeta[1:], math.log(4) + (even[j // 2] + even[-(-j // 2)])[1:] / 2)
    return max(0.0, float(logsumexp(np.append(0.0, log_binomial + j * math.log(rate) + zeta))))


@lru_cache(maxsize=1024)
def _log_difference(sigma: float, power: int) -> float:
    """Return ln E_{z ~ N(0, sigma^2)} |e^{(2z - 1) / (2 sigma^2)} - 1|^l for even l.

    The binomial sum alternates in sign and cancels numerically; the integral does not. It uses the trapezoidal rule,
    as :func:`fedveil.privacy.renyi.sampled_gaussian_rdp`.
    """
    step = min(sigma / 16, sigma**2 / 2)
    z = np.arange(-14 * sigma, power + 14 * sigma, step)
    exponent = (2 * z - 1) / (2 * sigma**2)
    with np.errstate(divide="ignore"):
        log_distance = np.maximum(exponent, 0.0) + np.log(-np.expm1(-np.abs(exponent)))
    log_density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    return float(logsumexp(log_density + power * log_distance)) + math.log(step)
