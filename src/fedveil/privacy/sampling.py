"""Sample the users of a round by an exactly known law, which fixes adjacency and amplification.

A sampler is a frozen value and a registry kind: the table ``[sampler]`` names the sampler of a method that has no
sampling of its own. A sampler of another package brings its event and the event's accounting rule
(:mod:`fedveil.privacy.accountant`) in the same file. It samples a mask over the PUBLIC list of users, from
privacy randomness: sampling amplifies privacy only as long as nobody can predict the sample.

Amplify Gaussian releases by sampling m of n units, for neighbours that replace one unit's data.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np
from jaxtyping import Bool, Float64, Int32, Integer
from pydantic import Field
from scipy.special import gammaln, log_ndtr, logsumexp

from fedveil.config_keys import Count, Fraction, check_ranges, composed_field, is_number, make_plain
from fedveil.errors import PrivacyError
from fedveil.privacy.claims import Claim, Reveals
from fedveil.privacy.events import (
    Adjacency,
    Event,
    GaussianEvent,
    LaplaceEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
)
from fedveil.privacy.statement import show_at_most
from fedveil.randomness import BitSource

if TYPE_CHECKING:
    from dp_accounting.pld import privacy_loss_distribution as pld


_WORD_BITS: Final = 64


class Sampler(ABC):
    """Law by which users are sampled for a round, and its effect on privacy events; a frozen value.

    Attributes:
        rate: probability that a given user takes part; the server divides by it.
        samples: whether users are left out by chance.
        fixed_size: whether the number of participants is the same in every round, and therefore public.
        period: b. Above 1, a user takes part in each silo at most in every b-th round, by the public schedule of
            :func:`is_due`; the turns of silos differ.
        adjacency: neighbours of the amplified event. If neighbours add or remove one user, an absent user contributes
            zero, and the number of users is public. If neighbours replace a user, accountants double the sensitivity.
    """

    rate: float
    samples: ClassVar[bool] = True
    fixed_size: ClassVar[bool]
    period: int = 1
    adjacency: ClassVar[Adjacency]

    @property
    def size(self) -> int | None:
        """Number of sampled users, if the sampler fixes it; None if it follows from the number of users."""
        return None

    def check_among(self, n: int) -> None:
        """Check that the sampler can sample among n users.

        Raises:
            PrivacyError: n is negative; the sample is larger than n, or the sampler is for another number of users.
        """
        if n < 0:
            raise PrivacyError(f"cannot draw participants among {n} users; the number of users is 0 or more")
        if self.size is not None and self.size > n:
            raise PrivacyError(f"this sampler draws {self.size} users; it cannot draw among {n}")

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why a method cannot use the sampler: contributions must belong to single users."""
        if not method.contribution.by_user:
            yield (
                "users are sampled, but a contribution is not one user's; sampling of users needs (silo, user) or "
                "client contributions"
            )

    @abstractmethod
    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return a mask of the sampled users among ``n``."""

    def checked_draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return a mask that :meth:`draw` drew, in an array of its own.

        Anything else would have other users take part than the claim counts: where nothing is returned, all of them.

        Raises:
            PrivacyError: what was drawn is no mask of n users, or not of the declared number of them.
        """
        mask: Any = self.draw(n, source)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (n,):
            kind = f"{mask.shape} of {mask.dtype}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise PrivacyError(
                f"{type(self).__name__}, given as sampler: draw() is {kind}; an array of {n} booleans is needed, True "
                "for a user who takes part"
            )
        if self.size is not None and int(mask.sum()) != self.size:
            raise PrivacyError(
                f"{type(self).__name__}, given as sampler: draw() has another number of users than its size, "
                f"{self.size}"
            )
        return mask.copy()

    @abstractmethod
    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Amplify claims by subsampling: turn claims over all users into claims over the sampled users."""

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        """Return the sampling law in words; empty if every user takes part."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Everyone(Sampler):
    """Sampler in which every user takes part in every round: no amplification and no randomness.

    >>> from fedveil.randomness import PrivacyRandomness
    >>> Everyone().draw(3, PrivacyRandomness.system().stream("participants")).tolist()
    [True, True, True]
    """

    samples: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    rate = 1.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Return no reasons: every method can use this sampler."""
        return ()

    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return True for each of ``n`` users; no random bits are used."""
        self.check_among(n)
        return np.ones(n, dtype=np.bool_)

    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return the claims, extended to parties that know the participants: everyone takes part."""
        return tuple(replace(claim, covers=claim.covers | _DRAWS) for claim in claims)


@dataclass(frozen=True, kw_only=True)
class PoissonUsers(Sampler):
    """Poisson sampling: every user takes part with probability q, independently of other users and rounds.

    One 64-bit word w per user decides: the user takes part iff w < floor(q · 2^64). The probability is therefore
    exactly floor(q · 2^64) / 2^64, which is q itself for every float q >= 2^-12 and never above q. The
    privacy loss grows with the probability, so an account for q covers the smaller probability (Mironov, Talwar and
    Zhang 2019 for RDP of the sampled Gaussian). Algorithm 4 of ULDP-FL samples users in this way, once for all silos.

    =====================  ===========================================================================
    input                  result
    =====================  ===========================================================================
    q = 1                  everyone, with no random bits; the event is the unsampled one
    0 < q < 2^-64          nobody, ever: a probability of 0 is not above q
    q = 0                  refused: no round would use any data
    q < 0, q > 1, NaN      refused
    n = 0                  empty mask
    nobody sampled         an all-False mask; the release is then noise alone, and must still be made
    =====================  ===========================================================================

    Args:
        rate: the sampling rate q in (0, 1].

    Raises:
        PrivacyError: a rate outside (0, 1].
    """

    fixed_size: ClassVar[bool] = False
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE

    rate: Fraction

    def __post_init__(self) -> None:
        """Refuse a rate outside (0, 1]."""
        make_plain(self)
        if not (is_number(self.rate) and 0.0 < self.rate <= 1.0):
            raise PrivacyError(
                f"sampling rate is {self.rate}; it must be above 0 and at most 1 (1: every user takes part)"
            )

    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return a mask of the sampled users among ``n``; uses ``n`` words of the source unless the rate is 1."""
        self.check_among(n)
        if self.rate == 1.0:
            return np.ones(n, dtype=np.bool_)
        # ldexp and floor are exact for a float64 rate below 1, so the probability is never above q.
        threshold = np.uint64(math.floor(math.ldexp(self.rate, _WORD_BITS)))
        return source.uint64(n) < threshold

    def event(self, base: Event) -> Event:
        """Return ``base`` amplified by Poisson sampling at the rate; ``base`` itself at rate 1."""
        return base if self.rate == 1.0 else PoissonSampledEvent(rate=self.rate, event=base)

    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return the claims over the sample (:func:`over_sample`).

        Users are sampled independently: a user's own flag carries no information about other users.
        """
        return over_sample(claims, unknowing=self.event, knowing_own=self.event)

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        return (
            f"each {moves.unit} takes part in each round with probability {show_at_most(self.rate)} (Poisson sampling)",
        )


@dataclass(frozen=True, kw_only=True)
class UniformClients(Sampler):
    """Fixed-size sampling: m of n clients, every set equally likely, independently of other rounds.

    Every client gets one 64-bit word, and the m smallest words take part. If the m-th smallest word equals the next
    one, all words are drawn again. Given that the two differ, every set is exactly equally likely, by symmetry.

    Neighbours replace one client's data (n is public and fixed). The sampler therefore implies replace-one adjacency
    and :class:`~fedveil.privacy.events.SampledWithoutReplacementEvent`: no accountant can count it as Poisson
    sampling, or a Poisson sample as this event.

    Args:
        population: n >= 1, the public number of clients.
        sample: m in 1 .. n, the number of clients in a round.

    Raises:
        PrivacyError: m outside 1 .. n; later, a sample among another number of clients than n.
    """

    fixed_size: ClassVar[bool] = True
    adjacency: ClassVar[Adjacency] = Adjacency.REPLACE_ONE

    population: int
    sample: int

    def __post_init__(self) -> None:
        """Refuse a sample size that is not a whole number in 1 .. n."""
        make_plain(self)
        whole = all(isinstance(count, int) and is_number(count) for count in (self.sample, self.population))
        if not whole or not 1 <= self.sample <= self.population:
            raise PrivacyError(
                f"a cohort of {self.sample} out of {self.population} clients cannot be drawn without replacement; "
                f"it must be a whole number, at least 1 and at most {self.population}"
            )

    @property
    def size(self) -> int:
        return self.sample

    @property
    def rate(self) -> float:  # type: ignore[override]
        """Probability that a given client takes part: m / n."""
        return self.sample / self.population

    def check_among(self, n: int) -> None:
        if n != self.population:
            raise PrivacyError(
                f"this sampler draws {self.sample} of {self.population} clients; it cannot draw among {n}"
            )

    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        self.check_among(n)
        if self.sample == n:
            return np.ones(n, dtype=np.bool_)
        while True:
            words = source.uint64(n)
            # On a tie, `words <= smallest[m - 1]` would select more than m. P(tie) is about n / 2^64 per attempt.
            smallest = np.partition(words, (self.sample - 1, self.sample))
            if smallest[self.sample - 1] < smallest[self.sample]:
                return np.asarray(words <= smallest[self.sample - 1])

    def event(self, base: Event) -> Event:
        """Return ``base`` amplified by a fixed-size sample; ``base`` itself if everyone takes part."""
        if self.sample == self.population:
            return base
        return SampledWithoutReplacementEvent(population=self.population, sample=self.sample, event=base)

    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return the claims over the sample (:func:`over_sample`).

        A client that knows its own flag knows that m or m - 1 of the other n - 1 clients are sampled. The
        amplification of m of n - 1 covers both cases.
        """
        if self.sample == self.population:
            return Everyone().amplify(claims)
        other_clients = UniformClients(population=self.population - 1, sample=self.sample)
        return over_sample(claims, unknowing=self.event, knowing_own=other_clients.event)

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        drawn = f"{self.sample} of {self.population} {moves.unit}s"
        return (f"{drawn} take part in each round, sampled uniformly without replacement",)


def uniform_clients(*, n_users: Annotated[int, composed_field()], sample: Count) -> UniformClients:
    """Fixed-size sampling: a fixed number of the clients, every set equally likely, independently of other rounds.

    Args:
        n_users: |U|, the public number of clients.
        sample: m, the number of clients in a round.
    """
    return UniformClients(population=n_users, sample=sample)


_DRAWS: Final = frozenset({Reveals.OWN_DRAW, Reveals.DRAWN})


def over_sample(
    claims: Iterable[Claim], *, unknowing: Callable[[Event], Event], knowing_own: Callable[[Event], Event]
) -> tuple[Claim, ...]:
    """Return claims over a sample: amplified for parties that do not know it, unchanged for others.

    A claim with :attr:`~fedveil.privacy.claims.Claim.amplified` = False stays unamplified for every party.

    Args:
        claims: over all users.
        unknowing: amplifies an event for a party without any knowledge of the sample.
        knowing_own: amplifies an event for a party that knows only whether it is sampled itself.
    """
    sampled_claims = []
    for claim in claims:
        # No accountant has an amplification bound for other events; unamplified claims stay valid over a sample.
        amplified = claim.amplified and isinstance(claim.event, GaussianEvent | LaplaceEvent)
        own = claim.covers | {Reveals.OWN_DRAW}
        sampled_claims += [
            replace(claim, event=unknowing(claim.event) if amplified else claim.event),
            replace(claim, covers=own, event=knowing_own(claim.event) if amplified else claim.event),
            replace(claim, covers=own | _DRAWS),
        ]
    return tuple(sampled_claims)


# --- schedule -----------------------------------------------------------------------------------------------
# Schedule users to take part in every b-th round by a public rule, without sampling or amplification.


@dataclass(frozen=True, kw_only=True)
class Scheduled(Everyone):
    """Public schedule: a user takes part in silo s in the rounds t with (number + s) mod b = t mod b.

    ``number`` is the user's number. The schedule is a function of the user and the silo alone: other users that join
    or leave do not change it, and silos need not agree on it. The schedule is public, so it amplifies no claim. The
    server divides a sum by |U| / b, never by the number of participants.

    Args:
        period: b.

    Raises:
        CompositionError: a period below 1.
    """

    period: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        """Refuse a period below 1."""
        check_ranges(self)

    @property
    def rate(self) -> float:  # type: ignore[override]
        """Share of the users in a round, 1 / b; the server divides by it."""
        return 1.0 / self.period

    def refuses(self, method: Any) -> Iterable[str]:
        """Return a reason to refuse channels that ignore the schedule, and so charge every round in full."""
        if len(getattr(method.channel, "strengths", (1.0,))) != self.period:
            yield (
                f"users take part once in {self.period} rounds, and the channel charges every round in full: take "
                "correlated noise of the same period (bands = 1 for independent noise)"
            )

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        return (
            f"each {moves.unit} takes part, in each silo, in one of every {self.period} rounds, by a public schedule",
        )


def is_due(
    owner: Integer[np.ndarray, " m"], silo: Int32[np.ndarray, " m"], period: int, number: int
) -> Bool[np.ndarray, " m"]:
    """Return a mask of the contributions that take part in round ``number``.

    Args:
        owner: (m,) user number of each contribution.
        silo: (m,) silo number of each contribution.
        period: b.
        number: number of the round.

    >>> [bool(is_due(np.array([5]), np.array([0], dtype=np.int32), 3, number)[0]) for number in (1, 2, 3, 4, 5)]
    [False, True, False, False, True]
    """
    due: np.ndarray = (owner % period + silo - number) % period == 0
    return due


# --- cost of samples of a fixed size ---

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
    as :func:`fedveil.privacy.accounting.sampled_gaussian_rdp`.
    """
    step = min(sigma / 16, sigma**2 / 2)
    z = np.arange(-14 * sigma, power + 14 * sigma, step)
    exponent = (2 * z - 1) / (2 * sigma**2)
    with np.errstate(divide="ignore"):
        log_distance = np.maximum(exponent, 0.0) + np.log(-np.expm1(-np.abs(exponent)))
    log_density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    return float(logsumexp(log_density + power * log_distance)) + math.log(step)
