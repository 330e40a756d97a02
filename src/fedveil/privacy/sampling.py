"""Who takes part in a round: users drawn by an exactly known law, which fixes adjacency and event.

A sampler is a frozen value. It draws a mask over the PUBLIC list of users, from privacy randomness: the
amplification that sampling gives holds only while nobody can predict the draw.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Bool

from fedveil.config_keys import is_number, make_plain
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

_WORD_BITS: Final = 64


class Sampler(ABC):
    """What chooses the users of a round, and says what that choice does to a release; a frozen value.

    Attributes:
        rate: probability that a given user takes part; the server divides by it.
        samples: whether users are left out by chance.
        fixed_size: whether as many take part in every round; their number is public then.
        period: b, where each takes part in every b-th round at most.
        adjacency: which neighbours its event is for. Under adding or removing one user, who is away contributes zero,
            and the number of users is public; accountants double what a unit moves that is replaced.
    """

    rate: float
    samples: ClassVar[bool] = True
    fixed_size: ClassVar[bool]
    period: int = 1
    adjacency: ClassVar[Adjacency]

    @property
    def size(self) -> int | None:
        """Their number, where it is one of its own; None where it follows from who there is."""
        return None

    def check_among(self, n: int) -> None:
        """Return if it can draw among n users.

        Raises:
            PrivacyError: it draws more than there are, or from another number of them.
        """
        if self.size is not None and self.size > n:
            raise PrivacyError(f"this sampler draws {self.size} users; it cannot draw among {n}")

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse users of whole silos."""
        if not method.contribution.by_user:
            yield (
                "users are sampled, but a contribution is not one user's; sampling of users needs (silo, user) or "
                "client contributions"
            )

    @abstractmethod
    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return who of ``n`` users takes part."""

    @abstractmethod
    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return what the claims for a release over everybody are for one over those who take part."""

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        """Return who takes part in a round, in words; nothing where everybody does."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Everyone(Sampler):
    """Every user takes part in every round: no amplification, and nothing is drawn.

    >>> from fedveil.randomness import PrivacyRandomness
    >>> Everyone().draw(3, PrivacyRandomness.system().stream("participants")).tolist()
    [True, True, True]
    """

    samples: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    rate = 1.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Return nothing: all can take part in anything."""
        return ()

    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return True for each of ``n`` users; the source is left untouched."""
        _check_count(n)
        return np.ones(n, dtype=np.bool_)

    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return the claims, also for whoever is told that everyone takes part."""
        return tuple(replace(claim, covers=claim.covers | _DRAWS) for claim in claims)


@dataclass(frozen=True, kw_only=True)
class PoissonUsers(Sampler):
    """Every user takes part with probability q, independently of all others and of all other rounds.

    One 64-bit word w per user decides: the user takes part iff w < floor(q · 2^64). The probability is therefore
    exactly floor(q · 2^64) / 2^64, which is q itself for every float q >= 2^-12 and never above q. The
    privacy loss grows with the probability, so an account for q covers the smaller one (Mironov, Talwar and
    Zhang 2019 for RDP of the sampled Gaussian; Algorithm 4 of ULDP-FL draws users so, once for all silos).

    =====================  ===========================================================================
    input                  result
    =====================  ===========================================================================
    q = 1                  everyone, with no draw; the event is the unsampled one
    0 < q < 2^-64          nobody, ever: a probability of 0 is not above q
    q = 0                  refused: no round would use any data
    q < 0, q > 1, NaN      refused
    n = 0                  empty mask
    nobody drawn           an all-False mask; the release is then noise alone, and must still be made
    =====================  ===========================================================================

    Args:
        rate: the sampling rate q in (0, 1].

    Raises:
        PrivacyError: a rate outside (0, 1].
    """

    fixed_size: ClassVar[bool] = False
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE

    rate: float

    def __post_init__(self) -> None:
        """Refuse a rate that is no probability, or that would never draw anybody."""
        make_plain(self)
        if not (is_number(self.rate) and 0.0 < self.rate <= 1.0):
            raise PrivacyError(
                f"sampling rate is {self.rate}; it must be above 0 and at most 1 (1: every user takes part)"
            )

    def draw(self, n: int, source: BitSource) -> Bool[np.ndarray, " n"]:
        """Return who of ``n`` users takes part; uses ``n`` words of the source unless the rate is 1."""
        _check_count(n)
        if self.rate == 1.0:
            return np.ones(n, dtype=np.bool_)
        threshold = np.uint64(math.floor(math.ldexp(self.rate, _WORD_BITS)))
        return source.uint64(n) < threshold

    def event(self, base: Event) -> Event:
        """Return ``base`` amplified by Poisson sampling at the rate; ``base`` itself at rate 1."""
        return base if self.rate == 1.0 else PoissonSampledEvent(rate=self.rate, event=base)

    def amplify(self, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        """Return the claims over the sample (:func:`over_sample`); draws are independent: one's own tells nothing."""
        return over_sample(claims, unknowing=self.event, knowing_own=self.event)

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        return (
            f"each {moves.unit} takes part in each round with probability {show_at_most(self.rate)} (Poisson sampling)",
        )


@dataclass(frozen=True, kw_only=True)
class UniformClients(Sampler):
    """Exactly m of n clients take part, every set of m equally likely, independently of all other rounds.

    Every client gets one 64-bit word and the m smallest take part. If the m-th and the next are equal, all words are
    drawn again: given that they differ, every set is exactly equally likely, by symmetry.

    Its neighbours replace one client's data (n is public and fixed), so it brings replace-one and
    :class:`~fedveil.privacy.events.SampledWithoutReplacementEvent`: no accountant can count it as Poisson sampling,
    nor a Poisson sample as this.

    Args:
        population: n >= 1, the public number of clients.
        sample: m in 1 .. n, the clients of a round.

    Raises:
        PrivacyError: m outside 1 .. n; later, a draw among another number of clients than n.
    """

    fixed_size: ClassVar[bool] = True
    adjacency: ClassVar[Adjacency] = Adjacency.REPLACE_ONE

    population: int
    sample: int

    def __post_init__(self) -> None:
        """Refuse a cohort that cannot be drawn."""
        make_plain(self)
        whole = all(isinstance(one, int) and is_number(one) for one in (self.sample, self.population))
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

        One who knows of its own draw knows that m or m - 1 of the other n - 1 are drawn: the amplification of m of n
        - 1 covers both.
        """
        if self.sample == self.population:
            return Everyone().amplify(claims)
        others = UniformClients(population=self.population - 1, sample=self.sample)
        return over_sample(claims, unknowing=self.event, knowing_own=others.event)

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        drawn = f"{self.sample} of {self.population} {moves.unit}s"
        return (f"{drawn} take part in each round, sampled uniformly without replacement",)


_DRAWS: Final = frozenset({Reveals.OWN_DRAW, Reveals.DRAWN})


def over_sample(
    claims: Iterable[Claim], *, unknowing: Callable[[Event], Event], knowing_own: Callable[[Event], Event]
) -> tuple[Claim, ...]:
    """Return claims over a sample: amplified for whoever does not learn who was drawn, as they are for whoever does.

    Nor is a claim amplified that says it is not (:attr:`~fedveil.privacy.claims.Claim.amplified`).

    Args:
        claims: over everybody.
        unknowing: amplifies an event for whoever knows of no draw.
        knowing_own: the same for whoever knows of its own alone.
    """
    found = []
    for claim in claims:
        # of other events no accountant has a bound
        amplified = claim.amplified and isinstance(claim.event, GaussianEvent | LaplaceEvent)
        own = claim.covers | {Reveals.OWN_DRAW}
        found += [
            replace(claim, event=unknowing(claim.event) if amplified else claim.event),
            replace(claim, covers=own, event=knowing_own(claim.event) if amplified else claim.event),
            replace(claim, covers=own | _DRAWS),
        ]
    return tuple(found)


def _check_count(n: int) -> None:
    if n < 0:
        raise PrivacyError(f"cannot draw participants among {n} users; the number of users is 0 or more")
