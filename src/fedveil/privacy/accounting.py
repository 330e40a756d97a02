"""What a release costs: accountants that turn an event into epsilon, or refuse it.

=============  =================================================  ==========================================
accountant     bound                                              used for
=============  =================================================  ==========================================
``pld``        privacy loss distributions, composed by FFT and    every reported epsilon: the tightest
               rounded up; exact where every release is a full
               Gaussian one
``rdp``        Renyi divergences on Opacus' orders, converted by  reproduction of the published tables
               Balle et al. 2020, Theorem 21
``rdp-2017``   the same divergences, converted by Mironov 2017,   reproduction of older tables
               Proposition 3
=============  =================================================  ==========================================

An accountant is a value. It says which events it ``supports`` and refuses the others with a
:class:`~fedveil.errors.PrivacyError`: it never approximates an event by another one. :class:`NoGuarantee` is
supported by all of them and costs epsilon = infinity.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Protocol, cast, runtime_checkable

import numpy as np
from dp_accounting import privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from jaxtyping import Float64
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, logsumexp

from fedveil.errors import PrivacyError
from fedveil.privacy.events import (
    Adjacency,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    atoms,
)
from fedveil.privacy.fixed_size import fixed_size_distribution, fixed_size_rdp, widest_loss
from fedveil.privacy.mixture import mixture_distribution

OPACUS_ORDERS: tuple[float, ...] = (*(1 + step / 10 for step in range(1, 100)), *map(float, range(12, 64)))
"""Renyi orders of Opacus' default grid: 1.1 to 10.9 in steps of 0.1, then 12 to 63."""


@runtime_checkable
class Accountant(Protocol):
    """What every accountant offers: upper bounds, for ``delta`` in (0, 1) and ``epsilon`` >= 0."""

    @property
    def name(self) -> str:
        """Name under which reports show the figure."""
        ...

    @property
    def adjacency(self) -> Adjacency:
        """The neighbours that the bound compares."""
        ...

    def supports(self, event: Event) -> bool:
        """Whether the accountant has a valid bound for the event under its adjacency."""
        ...

    def epsilon(self, event: Event, delta: float) -> float:
        """Smallest epsilon this accountant can show for ``delta`` (infinite without a guarantee)."""
        ...

    def delta(self, event: Event, epsilon: float) -> float:
        """Smallest delta this accountant can show for ``epsilon`` (1 without a guarantee)."""
        ...


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta}: must be above 0 and below 1 (well below 1 / number of users)")


def _check_epsilon(epsilon: float) -> None:
    if not epsilon >= 0:
        raise PrivacyError(f"epsilon = {epsilon}: must not be negative")


def _require(accountant: Accountant, event: Event) -> Counter[Event]:
    """Return the releases of a supported event; refuse an unsupported one, naming the release."""
    counts = atoms(event)
    for release in counts:
        if not accountant.supports(release):
            raise PrivacyError(
                f"accountant {accountant.name!r} has no bound for {type(release).__name__} under "
                f"{accountant.adjacency.value} ({release}); choose an accountant that supports it"
            )
    return counts


def epsilon_on_grid(accountant: Accountant, event: Event, delta: float, loss: float) -> float:
    """Return the epsilon of an event whose noise lies on a grid.

    Args:
        accountant: what counts the event as if its noise were continuous.
        event: everything that was released.
        delta: of the statement.
        loss: the most by which the grid changes a log-likelihood ratio, of all releases together: what is
            (epsilon, delta) with continuous noise is (epsilon + loss, e^loss delta) on the grid.
    """
    return accountant.epsilon(event, delta * math.exp(-loss)) + loss


# --- Gaussian releases without sampling: closed form --------------------------------------------------------


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta of Gaussian releases of total strength ``mu``.

    mu^2 = sum_t (sensitivity_t / std_t)^2, and
    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)   (Balle and Wang 2018, Theorem 8; the
    composition is Dong, Roth and Su 2022, Corollary 3.3). ``mu`` = 0 means nothing was released.
    """
    if mu == 0:
        return 0.0
    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, -math.exp(upper) * math.expm1(min(0.0, lower - upper)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon with :func:`gaussian_delta` at most ``delta``, rounded up by 1e-12 of it.

    >>> round(gaussian_epsilon(200**0.5 / 5, 1e-5), 4)
    15.4562
    """
    _check_delta(delta)
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    highest = mu * mu / 2 + mu * (math.sqrt(2 * math.log(1 / delta)) + 1)
    root = float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, highest, xtol=1e-14, rtol=1e-14))
    return root * (1 + 1e-12) + 1e-13


# --- Renyi differential privacy -----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def sampled_gaussian_rdp(
    rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> Float64[np.ndarray, " orders"]:
    """Return the Renyi divergences of one Poisson-sampled Gaussian release, adding or removing one unit.

    rho(alpha) = ln A_alpha / (alpha - 1) with, for sigma = ``noise_multiplier`` and q = ``rate``, A_alpha =
    E_{z ~ N(0, sigma^2)} [((1-q) + q exp((2z-1) / (2 sigma^2)))^alpha] (Mironov, Talwar and Zhang 2019,
    section 3.3: this direction is the larger one). Integer orders use the finite binomial sum. The others
    are integrated by the trapezoidal rule, which converges exponentially for this analytic integrand: steps
    of min(sigma/16, sigma^2/2) leave a relative error below 1e-12. Below sigma = 0.01 fractional orders are
    left out (infinite), which keeps the bound valid.

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
        i = np.arange(order + 1)
        log_binomial = gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
        terms = log_binomial + i * math.log(rate) + (order - i) * math.log1p(-rate)
        return max(0.0, float(logsumexp(terms + (i * i - i) / (2 * sigma**2))) / (order - 1))
    if sigma < 0.01:
        return math.inf
    step = min(sigma / 16, sigma**2 / 2)
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
    """How a Renyi bound becomes epsilon and delta."""

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
class RdpAccountant:
    """Renyi accountant: full and sampled Gaussian releases, concentrated and Laplace ones.

    Under replace-one a full release has twice the sensitivity, samples of a fixed size are accounted with that
    sensitivity, and Poisson-sampled releases are refused; under add-or-remove it is the other way round.
    """

    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    orders: tuple[float, ...] = OPACUS_ORDERS
    conversion: Conversion = Conversion.BALLE_2020

    @property
    def name(self) -> str:
        """``rdp`` or ``rdp-2017``, by the conversion."""
        return self.conversion.value

    def supports(self, event: Event) -> bool:
        """Whether all releases are Gaussian, concentrated, Laplace, sampled Gaussian, or without a guarantee."""
        return all(self._supported(release) for release in atoms(event))

    def _supported(self, release: Event) -> bool:
        match release:
            case GaussianEvent() | ConcentratedEvent() | LaplaceEvent() | NoGuarantee():
                return True
            case PoissonSampledEvent(event=GaussianEvent()):
                return self.adjacency is Adjacency.ADD_OR_REMOVE_ONE
            case SampledWithoutReplacementEvent(event=GaussianEvent()):
                return self.adjacency is Adjacency.REPLACE_ONE
        return False

    def rdp(self, event: Event) -> Float64[np.ndarray, " orders"]:
        """Return the event's Renyi divergence at every order (Renyi bounds add up under composition)."""
        total = np.zeros(len(self.orders))
        for release, count in _require(self, event).items():
            total += count * self._release_rdp(release)
        return total

    def _release_rdp(self, release: Event) -> Float64[np.ndarray, " orders"]:
        sensitivity = _sensitivity(self.adjacency)
        match release:
            case GaussianEvent() | ConcentratedEvent():
                return sampled_gaussian_rdp(1.0, release.noise_multiplier / sensitivity, self.orders)
            case LaplaceEvent():
                return laplace_rdp(release.noise_multiplier / sensitivity, self.orders)
            case PoissonSampledEvent(event=GaussianEvent(noise_multiplier=sigma)):
                return sampled_gaussian_rdp(release.rate, sigma, self.orders)
            case SampledWithoutReplacementEvent(event=GaussianEvent(noise_multiplier=sigma)):
                return fixed_size_rdp(release.rate, sigma / sensitivity, self.orders)
            case _:  # NoGuarantee: _require has refused everything else
                return np.full(len(self.orders), math.inf)

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon over the orders."""
        _check_delta(delta)
        return self.conversion.epsilon(self.orders, self.rdp(event), delta) if atoms(event) else 0.0

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta over the orders."""
        _check_epsilon(epsilon)
        return self.conversion.delta(self.orders, self.rdp(event), epsilon) if atoms(event) else 0.0


def _sensitivity(adjacency: Adjacency) -> float:
    """Sensitivity of a full sum in clip units: 1, or 2 when a contribution is replaced by another one."""
    return 1.0 if adjacency is Adjacency.ADD_OR_REMOVE_ONE else 2.0


# --- Privacy loss distributions -----------------------------------------------------------------------------

_FFT_ERROR = 1e-12
_FFT_ERROR_PER_RELEASE = 1e-15


@dataclass(frozen=True, kw_only=True)
class PldAccountant:
    """Numerical composition of privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022).

    Each kind of release gets one discretised distribution, dominating the true one ("connect the dots"),
    which is cached and composed with itself by one FFT, so T equal rounds cost the same as one. Full
    Gaussian releases are merged into one exactly, and need no discretisation when nothing else was
    released.

    ``interval`` is the spacing of the loss grid. By default it is a tenth of the standard deviation of the
    narrowest loss, at most 1e-3, unless the widest loss would then need more than 2e5 points. A coarser grid
    gives a larger epsilon, never an invalid one. Rounding errors of the FFT are covered by asking for
    delta - 1e-12 - 1e-15 per release; a smaller delta is refused.

    Under replace-one, full releases have twice the sensitivity, Poisson-sampled Gaussian ones their own
    distribution and fixed-size samples of Gaussian ones that of :mod:`fedveil.privacy.fixed_size`;
    Poisson-sampled Laplace and mixtures are refused. Under add-or-remove, fixed-size samples are.
    """

    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    interval: float | None = None

    @property
    def name(self) -> str:
        """Always ``pld``."""
        return "pld"

    def supports(self, event: Event) -> bool:
        """Whether all releases are Gaussian or Laplace, full or Poisson-sampled, or mixtures of Gaussians."""
        return all(self._supported(release) for release in atoms(event))

    def _supported(self, release: Event) -> bool:
        match release:
            case (
                GaussianEvent() | LaplaceEvent() | NoGuarantee() | PoissonSampledEvent(event=GaussianEvent())
            ):
                return True
            case MixtureOfGaussiansEvent() | PoissonSampledEvent(event=LaplaceEvent()):
                return self.adjacency is Adjacency.ADD_OR_REMOVE_ONE
            case SampledWithoutReplacementEvent(event=GaussianEvent()):
                return self.adjacency is Adjacency.REPLACE_ONE
        return False

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon for ``delta``, which must exceed the numerical error."""
        _check_delta(delta)
        counts = _require(self, event)
        if any(isinstance(release, NoGuarantee) for release in counts):
            return math.inf
        mu, others = self._split(counts)
        if not others:
            return gaussian_epsilon(mu, delta)
        slack = self._slack(counts)
        if delta <= slack:
            raise PrivacyError(
                f"delta = {delta}: the numerical error of {sum(counts.values())} composed releases is up to "
                f"{slack:.1e}; ask for a larger delta, or use accountant 'rdp'"
            )
        return float(self._compose(mu, others).get_epsilon_for_delta(delta - slack))

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta for ``epsilon``."""
        _check_epsilon(epsilon)
        counts = _require(self, event)
        if any(isinstance(release, NoGuarantee) for release in counts):
            return 1.0
        mu, others = self._split(counts)
        if not others:
            return gaussian_delta(mu, epsilon)
        composed = float(self._compose(mu, others).get_delta_for_epsilon(epsilon))
        return min(1.0, composed + self._slack(counts))

    def _split(self, counts: Counter[Event]) -> tuple[float, Counter[Event]]:
        """Return the strength mu of all full Gaussian releases together, and the other releases."""
        square = sum(
            count / event.noise_multiplier**2
            for event, count in counts.items()
            if isinstance(event, GaussianEvent)
        )
        others = Counter({event: n for event, n in counts.items() if not isinstance(event, GaussianEvent)})
        return _sensitivity(self.adjacency) * math.sqrt(square), others

    @staticmethod
    def _slack(counts: Counter[Event]) -> float:
        return _FFT_ERROR + _FFT_ERROR_PER_RELEASE * sum(counts.values())

    def _compose(self, mu: float, others: Counter[Event]) -> pld.PrivacyLossDistribution:
        interval = self.interval or _interval(tuple(others))
        parts = [_distribution(e, self.adjacency, interval).self_compose(n) for e, n in others.items()]
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


def _shape(release: Event) -> tuple[float, float]:
    """Return a typical and a largest privacy loss of one release, for the choice of the grid only."""
    match release:
        case MixtureOfGaussiansEvent(noise_multiplier=sigma):
            mean = sum(p * c for p, c in zip(release.probabilities, release.sensitivities, strict=True))
            most = max(release.sensitivities)
            return mean / sigma, most**2 / (2 * sigma**2) + 10 * most / sigma
        case PoissonSampledEvent(event=GaussianEvent(noise_multiplier=sigma)):
            return release.rate / sigma, 1 / (2 * sigma**2) + 10 / sigma
        case PoissonSampledEvent(event=LaplaceEvent(noise_multiplier=scale)):
            return release.rate / scale, 1 / scale
        case SampledWithoutReplacementEvent(event=GaussianEvent(noise_multiplier=sigma)):
            return 2 * release.rate / sigma, widest_loss(release.rate, 2 / sigma)
        case LaplaceEvent(noise_multiplier=scale):
            return 1 / scale, 1 / scale
    raise AssertionError(f"{release} has no discretised distribution")


def _interval(releases: tuple[Event, ...]) -> float:
    """Return the default grid spacing for these releases (all must share one)."""
    shapes = [_shape(release) for release in releases]
    fine = min(1e-3, *(typical / 10 for typical, _ in shapes))
    return max(fine, *(largest / 1e5 for _, largest in shapes))


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
                scale / _sensitivity(adjacency), value_discretization_interval=interval
            )
        case PoissonSampledEvent(event=LaplaceEvent(noise_multiplier=scale)):
            return pld.from_laplace_mechanism(
                scale, value_discretization_interval=interval, sampling_prob=release.rate
            )
        case PoissonSampledEvent(event=GaussianEvent(noise_multiplier=sigma)):
            return pld.from_gaussian_mechanism(
                sigma,
                value_discretization_interval=interval,
                sampling_prob=release.rate,
                neighboring_relation=relation,
            )
        case MixtureOfGaussiansEvent():
            return mixture_distribution(release, interval)
        case SampledWithoutReplacementEvent(event=GaussianEvent(noise_multiplier=sigma)):
            return fixed_size_distribution(release.rate, _sensitivity(adjacency) / sigma, interval)
    raise AssertionError(f"{release} has no discretised distribution")


# --- By name ------------------------------------------------------------------------------------------------

ACCOUNTANTS = ("pld", "rdp", "rdp-2017")


def make_accountant(name: str, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> Accountant:
    """Return the accountant of that name (one of ``ACCOUNTANTS``) with its default settings."""
    match name:
        case "pld":
            return PldAccountant(adjacency=adjacency)
        case "rdp" | "rdp-2017":
            return RdpAccountant(adjacency=adjacency, conversion=Conversion(name))
    raise PrivacyError(f"accountant {name!r} is unknown; choose one of {', '.join(ACCOUNTANTS)}")


def epsilon(
    event: Event,
    delta: float,
    accountant: str = "pld",
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> float:
    """Return the event's epsilon at ``delta`` by the named accountant (infinite without a guarantee).

    >>> from fedveil.privacy.events import GaussianEvent, SelfComposedEvent
    >>> rounds = SelfComposedEvent(event=GaussianEvent(noise_multiplier=5.0), count=200)
    >>> round(epsilon(rounds, 1e-5, "rdp"), 4), round(epsilon(rounds, 1e-5), 4)
    (16.5129, 15.4562)
    """
    return make_accountant(name=accountant, adjacency=adjacency).epsilon(event, delta)
