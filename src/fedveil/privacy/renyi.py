"""Compute Renyi divergences of releases, add them up, and convert them to epsilon."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import cast

import numpy as np
from jaxtyping import Float64
from scipy.special import gammaln, logsumexp

from fedveil.privacy.accountant import Accountant, rule_of
from fedveil.privacy.events import Adjacency, Event, NearbyEvent, NoGuarantee

OPACUS_ORDERS: tuple[float, ...] = (*(1 + step / 10 for step in range(1, 100)), *map(float, range(12, 64)))
"""Renyi orders of Opacus' default grid: 1.1 to 10.9 in steps of 0.1, then 12 to 63."""


@lru_cache(maxsize=256)
def sampled_gaussian_rdp(
    rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> Float64[np.ndarray, " orders"]:
    """Return the Renyi divergences of one Poisson-sampled Gaussian release, adding or removing one unit.

    With sigma = ``noise_multiplier`` and q = ``rate``, rho(alpha) = ln A_alpha / (alpha - 1), where A_alpha = E_{z ~
    N(0, sigma^2)} [((1-q) + q exp((2z-1) / (2 sigma^2)))^alpha] (Mironov, Talwar and Zhang 2019, section 3.3: this
    direction is the larger one). Integer orders use the finite binomial sum. Other orders use the trapezoidal rule,
    which converges exponentially for this analytic integrand: steps of min(sigma/16, sigma^2/2) leave a relative
    error below 1e-12. Below sigma = 0.01 fractional orders are left out (infinite), which keeps the bound valid.

    Args:
        rate: sampling probability q in (0, 1].
        noise_multiplier: sigma > 0.
        orders: alpha > 1.

    Returns:
        One divergence per order, read-only (cached).
    """
    values = np.array([_one_order(rate, noise_multiplier, order) for order in orders])
    values.flags.writeable = False
    return values


def _one_order(rate: float, sigma: float, order: float) -> float:
    if rate == 1:
        return order / (2 * sigma**2)
    if order.is_integer():
        # A_alpha = sum_i C(alpha, i) (1-q)^(alpha-i) q^i exp((i^2 - i) / (2 sigma^2)), in logarithms against
        # overflow.
        i = np.arange(order + 1)
        log_binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
        terms = log_binomial + i * math.log(rate) + (order - i) * math.log1p(-rate)
        return max(0.0, float(logsumexp(terms + (i * i - i) / (2 * sigma**2))) / (order - 1))
    if sigma < 0.01:
        return math.inf
    step = min(sigma / 16, sigma**2 / 2)
    # The integrand peaks between 0 and z = alpha; beyond 12 sigma of these points it is negligible.
    z = np.arange(-12 * sigma, order + 12 * sigma, step)
    likelihood_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * sigma**2))
    log_density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    log_moment = float(logsumexp(log_density + order * likelihood_ratio)) + math.log(step)
    return max(0.0, log_moment / (order - 1))


def laplace_rdp(noise_multiplier: float, orders: tuple[float, ...]) -> Float64[np.ndarray, " orders"]:
    """Return the Renyi divergences of a Laplace release of scale b (Mironov 2017, Proposition 6).

    (alpha-1) rho(alpha) = ln(alpha/(2 alpha-1) e^{(alpha-1)/b} + (alpha-1)/(2 alpha-1) e^{-alpha/b}), with
    b = ``noise_multiplier``.
    """
    a = np.array(orders)
    first = np.log(a / (2 * a - 1)) + (a - 1) / noise_multiplier
    second = np.log((a - 1) / (2 * a - 1)) - a / noise_multiplier
    return cast("Float64[np.ndarray, ' orders']", np.maximum(np.logaddexp(first, second) / (a - 1), 0.0))


class Conversion(Enum):
    """Formula that turns a Renyi bound into epsilon and delta."""

    BALLE_2020 = "rdp"
    MIRONOV_2017 = "rdp-2017"

    def epsilon(self, orders: tuple[float, ...], rdp: Float64[np.ndarray, " orders"], delta: float) -> float:
        """Return the smallest epsilon over the orders.

        BALLE_2020: rho + ln((alpha-1)/alpha) - (ln delta + ln alpha)/(alpha-1)   (Balle et al. 2020, Theorem
        21; Lemma 2 of ULDP-FL). MIRONOV_2017: rho + ln(1/delta)/(alpha-1)   (Mironov 2017, Proposition 3).
        """
        a = np.array(orders)
        bounds = rdp - math.log(delta) / (a - 1)
        if self is Conversion.BALLE_2020:
            bounds = bounds + np.log1p(-1 / a) - np.log(a) / (a - 1)
        return max(0.0, float(np.min(bounds)))

    def delta(self, orders: tuple[float, ...], rdp: Float64[np.ndarray, " orders"], epsilon: float) -> float:
        """Return the smallest delta over the orders: the same formulas solved for delta."""
        a = np.array(orders)
        bounds = (a - 1) * (rdp - epsilon)
        if self is Conversion.BALLE_2020:
            bounds = bounds + (a - 1) * np.log1p(-1 / a) - np.log(a)
        return math.exp(min(0.0, float(np.min(bounds))))


@dataclass(frozen=True, kw_only=True)
class RdpAccountant(Accountant):
    """Renyi accountant for unsampled and sampled Gaussian releases, concentrated and Laplace releases.

    Under replace-one an unsampled release has twice the sensitivity, fixed-size samples are accounted with that
    sensitivity, and Poisson-sampled releases are refused. Under add-or-remove, Poisson-sampled Gaussian releases are
    supported, and fixed-size samples are refused.
    """

    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    orders: tuple[float, ...] = OPACUS_ORDERS
    conversion: Conversion = Conversion.BALLE_2020

    @property
    def name(self) -> str:
        """``rdp`` or ``rdp-2017``, by the conversion."""
        return self.conversion.value

    def _supported(self, release: Event) -> bool:
        """Return whether the release has Renyi divergences, or is without a guarantee, or a distance."""
        if isinstance(release, NoGuarantee | NearbyEvent):
            return True
        return rule_of(release).divergences(release, self.adjacency) is not None

    def _rdp(self, releases: Counter[Event]) -> Float64[np.ndarray, " orders"]:
        """Return the sum of the releases' Renyi divergences at every order (Renyi bounds add up).

        A statistical distance bounds no Renyi divergence, so its divergence is infinite.
        """
        total = np.zeros(len(self.orders))
        for release, count in releases.items():
            total += count * self._release_rdp(release)
        return total

    def _release_rdp(self, release: Event) -> Float64[np.ndarray, " orders"]:
        found = rule_of(release).divergences(release, self.adjacency)
        # NoGuarantee and NearbyEvent have no divergences; everything else was refused.
        return np.full(len(self.orders), math.inf) if found is None else found(self.orders)

    def _epsilon(self, releases: Counter[Event], delta: float) -> float:
        return self.conversion.epsilon(self.orders, self._rdp(releases), delta) if releases else 0.0

    def _delta(self, releases: Counter[Event], epsilon: float) -> float:
        return self.conversion.delta(self.orders, self._rdp(releases), epsilon) if releases else 0.0
