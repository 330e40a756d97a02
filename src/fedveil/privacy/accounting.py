"""Turn events into epsilon: the accountants by name.

=============  =================================================  ==========================================
accountant     bound                                              used for
=============  =================================================  ==========================================
``pld``        privacy loss distributions, composed by FFT and    every reported epsilon: the tightest
               rounded up; exact if every release is an
               unsampled Gaussian release
``rdp``        Renyi divergences on Opacus' orders, converted by  reproduction of the published tables
               Balle et al. 2020, Theorem 21
``rdp-2017``   the same divergences, converted by Mironov 2017,   reproduction of older tables
               Proposition 3
=============  =================================================  ==========================================

An accountant is a value. It states which events it ``supports`` and refuses the others with a
:class:`~fedveil.errors.PrivacyError`: it never approximates an event by another event. All accountants support
:class:`NoGuarantee`, whose epsilon is infinite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from jaxtyping import Float64
from scipy.special import gammaln, logsumexp

from fedveil.errors import PrivacyError, show_argument
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
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    NearbyEvent,
    NoGuarantee,
    PoissonSampledEvent,
    at_distance,
    split_distance,
)

if TYPE_CHECKING:
    from dp_accounting.pld import privacy_loss_distribution as pld


# --- privacy loss distributions: discretised pessimistically, composed by FFT ---

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
        mu, other_releases = self._split(releases)
        if not other_releases:
            return gaussian_epsilon(mu, delta)
        slack = self._slack(releases)
        if delta <= slack:
            raise PrivacyError(
                f"delta = {delta}: the numerical error of {sum(releases.values())} composed releases is up to "
                f"{slack:.1e}; ask for a larger delta, or use accountant 'rdp'"
            )
        return _epsilon(self._compose(mu, other_releases), delta - slack)

    def _delta(self, releases: Counter[Event], epsilon: float) -> float:
        if any(isinstance(release, NoGuarantee) for release in releases):
            return 1.0
        mu, other_releases = self._split(releases)
        if not other_releases:
            return gaussian_delta(mu, epsilon)
        composed = float(self._compose(mu, other_releases).get_delta_for_epsilon(epsilon))
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
        other_releases = Counter[Event]()
        for event, n in counts.items():
            if not isinstance(event, GaussianEvent):
                other_releases[_counted_as(event)] += n
        return full_sensitivity(self.adjacency) * math.sqrt(square), other_releases

    @staticmethod
    def _slack(counts: Counter[Event]) -> float:
        return _FFT_ERROR + _FFT_ERROR_PER_RELEASE * sum(counts.values())

    def _compose(self, mu: float, other_releases: Counter[Event]) -> pld.PrivacyLossDistribution:
        interval = self.interval or _interval(mu, other_releases, self.adjacency)
        try:
            parts = [
                _distribution(e, self.adjacency, interval).self_compose(n) for e, n in other_releases.items()
            ]
        except (ValueError, OverflowError):  # raised by dp_accounting if exp(loss) overflows
            widest = max(_losses(release, self.adjacency).largest for release in other_releases)
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
        computed = float(distribution.get_epsilon_for_delta(delta))
    if computed < _FAITHFUL:
        return computed
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
    losses = rule_of(release).losses(release, adjacency)
    assert losses is not None, f"{release} has no loss distribution"
    return losses


def _interval(mu: float, other_releases: Counter[Event], adjacency: Adjacency) -> float:
    """Return the default grid spacing for these releases together with Gaussian ones of strength mu.

    Raises:
        PrivacyError: noise so small, or so many different releases, that their losses cannot be composed.
    """
    if max(other_releases.values()) > _MOST_RELEASES:
        raise PrivacyError(
            f"{max(other_releases.values())} sampled releases: accountant 'pld' composes at most {_MOST_RELEASES}; use "
            "accountant 'rdp'"
        )
    sizes = (len(getattr(release, "probabilities", ())) for release in other_releases)
    if sum(max(_COMPONENTS, size) for size in sizes) > _MOST_DIFFERENT:
        raise PrivacyError(
            f"{len(other_releases)} different releases are more than accountant 'pld' composes in any reasonable time"
        )
    losses = [_losses(release, adjacency) for release in other_releases]
    fine = min(1e-3, *(loss.typical / 10 for loss in losses))
    widest = mu * mu / 2 + 10 * mu
    for count, loss in zip(other_releases.values(), losses, strict=True):
        # The third bound: dp_accounting's own truncation leaves a composed distribution at least this wide.
        widest = max(widest, _REACH * math.sqrt(count) * loss.spread, count * loss.spread**2 / loss.largest)
    interval = max(fine, *(loss.largest / 1e5 for loss in losses), widest / _MOST_POINTS)
    if not interval <= _COARSEST:
        raise PrivacyError(
            f"the noise of these releases is so small that accountant 'pld' has no number for their cost (a loss of "
            f"about {widest:.1e}): nothing is protected; use more noise"
        )
    return interval


# A distribution has up to 2^21 points in each direction, 34 MB. A search for noise computes dozens, each once.
@lru_cache(maxsize=16)
def _distribution(release: Event, adjacency: Adjacency, interval: float) -> pld.PrivacyLossDistribution:
    """Return the discretised, dominating privacy loss distribution of one release."""
    return _losses(release, adjacency).discretise(interval)


@lru_cache(maxsize=16)
def _gaussian_distribution(mu: float, interval: float) -> pld.PrivacyLossDistribution:
    """Return the discretised distribution of Gaussian noise of standard deviation 1/mu; mu includes the sensitivity."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=interval)


# --- Renyi divergences: added up, and converted to epsilon ---

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
        divergences = rule_of(release).divergences(release, self.adjacency)
        # NoGuarantee and NearbyEvent have no divergences; everything else was refused.
        return np.full(len(self.orders), math.inf) if divergences is None else divergences(self.orders)

    def _epsilon(self, releases: Counter[Event], delta: float) -> float:
        return self.conversion.epsilon(self.orders, self._rdp(releases), delta) if releases else 0.0

    def _delta(self, releases: Counter[Event], epsilon: float) -> float:
        return self.conversion.delta(self.orders, self._rdp(releases), epsilon) if releases else 0.0


# --- accountants by name ---

ACCOUNTANTS = ("pld", "rdp", "rdp-2017")


def make_accountant(name: str, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> Accountant:
    """Return the accountant of a name (one of ``ACCOUNTANTS``) with its default settings.

    Raises:
        PrivacyError: an unknown name.
    """
    match name if isinstance(name, str) else "":
        case "pld":
            return PldAccountant(adjacency=adjacency)
        case "rdp" | "rdp-2017":
            return RdpAccountant(adjacency=adjacency, conversion=Conversion(name))
    raise PrivacyError(f"accountant {show_argument(name)} is unknown; choose one of {', '.join(ACCOUNTANTS)}")


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


# --- dominating event ---------------------------------------------------------------------------------------
# Compare events by cost, and find an event that dominates several events.


def covers(event: Event, other: Event) -> bool:
    """Return whether ``event`` is known to cost at least as much as ``other``.

    The comparison holds for every delta and in every composition. False means "not known".

    >>> covers(GaussianEvent(noise_multiplier=1.0), GaussianEvent(noise_multiplier=2.0))
    True
    """
    (event, seen_at), (other, other_at) = split_distance(event), split_distance(other)
    if seen_at < other_at and not isinstance(event, NoGuarantee):
        return False
    match event, other:
        case (NoGuarantee(), _) | (_, ComposedEvent(events=())):
            return True
        case (
            (GaussianEvent(noise_multiplier=noise), GaussianEvent(noise_multiplier=other_noise))
            | (LaplaceEvent(noise_multiplier=noise), LaplaceEvent(noise_multiplier=other_noise))
            | (
                ConcentratedEvent(noise_multiplier=noise),
                ConcentratedEvent(noise_multiplier=other_noise) | GaussianEvent(noise_multiplier=other_noise),
            )
        ):
            return noise <= other_noise
        # A larger sampling rate costs more. An unsampled event covers its sampled version (next case): sampling
        # never increases the cost.
        case PoissonSampledEvent(), PoissonSampledEvent():
            return event.rate >= other.rate and covers(event.event, other.event)
        case _, PoissonSampledEvent():
            return covers(event, other.event)
    return event == other


def dominating_event(events: Iterable[Event]) -> Event:
    """Return an event that costs at least as much as each of several events.

    The result is one of the events if it covers all others, and otherwise the composition of the events that no other
    covers. If some of these are seen at a distance, the result is the dominating release at the largest distance.
    """
    uncovered: list[Event] = []
    for event in events:
        if not any(covers(candidate, event) for candidate in uncovered):
            uncovered = [candidate for candidate in uncovered if not covers(event, candidate)] + [event]
    if len(uncovered) == 1:
        return uncovered[0]
    parts = [split_distance(event) for event in uncovered]
    if distance := max((seen_at for _, seen_at in parts), default=0.0):
        return at_distance(dominating_event(release for release, _ in parts), distance)
    return ComposedEvent(events=tuple(uncovered))
