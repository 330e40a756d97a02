"""Define the interfaces of accountants and accounting rules, and the closed form for unsampled Gaussian releases.

Define the accounting rule of a kind of release: what accountants need to know to bound it.

An accountant composes releases; the rule of an event says what a single release of it costs. A package that brings a
new event, for a new sampler say, brings its rule in the same file, and every accountant can count the event:

    @dataclass(frozen=True, kw_only=True)
    class HalvesEvent(Event, type="halves"): ...

    class HalvesRule(AccountingRule, event=HalvesEvent): ...

The definition of the class registers the rule. Registry kind ``accounting_rules`` names rules by the event's type, so
that a ledger is readable in a process that has not loaded the rule yet.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedveil.errors import PrivacyError
from fedveil.privacy.events import Adjacency, Event, atoms, is_known_type, split_distance, split_grid_loss
from fedveil.registry import PACKAGE, find, members

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


class Accountant(ABC):
    """Upper bounds on the (epsilon, delta) cost of events.

    An accountant is an immutable, hashable value, so that its results can be cached.

    Attributes:
        adjacency: the neighbouring populations that the bounds compare.
    """

    adjacency: Adjacency

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the accountant in reports."""

    def supports(self, event: Event) -> bool:
        """Return whether the accountant has a valid bound for every release of the event under its adjacency."""
        return all(self._supported(release) for release in atoms(split_grid_loss(event)[0]))

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon that this accountant can prove at a delta (infinite if none).

        Args:
            event: everything that was released, including losses of grids and statistical distances.
            delta: in [1e-300, 1).

        Raises:
            PrivacyError: delta is outside [1e-300, 1); a release without a bound; a numerical limit of the
                accountant.
        """
        _check_delta(delta)
        event, loss = split_grid_loss(event)
        if loss:
            # (epsilon, delta) with continuous noise is (epsilon + loss, e^loss delta) on the grid.
            remaining = delta * math.exp(-loss)
            return self.epsilon(event, remaining) + loss if remaining >= _LEAST_DELTA else math.inf
        event, distance = split_distance(event)
        return (
            self._apart(event, delta, distance) if distance else self._epsilon(self._released(event), delta)
        )

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta that this accountant can prove at an epsilon (1 without a guarantee).

        Raises:
            PrivacyError: a negative epsilon, or a release without a bound.
        """
        if not epsilon >= 0:
            raise PrivacyError(f"epsilon = {epsilon}: must not be negative")
        event, loss = split_grid_loss(event)
        if loss:
            if loss > _MOST_LOSS:
                return 1.0
            # P <= e^loss (Q + delta_0) with delta_0 = delta(max(epsilon - loss, 0)) of continuous noise. So for an
            # epsilon below the loss P - e^epsilon Q <= e^loss delta_0 + (e^loss - e^epsilon) Q, and Q is at most 1.
            excess = max(0.0, math.exp(epsilon) * math.expm1(loss - epsilon)) if epsilon < loss else 0.0
            shown = math.exp(loss) * self.delta(event, max(0.0, epsilon - loss)) + excess
            return min(1.0, shown * (1 + 1e-14))
        event, distance = split_distance(event)
        shown = self._delta(self._released(event), epsilon)
        return min(1.0, shown + _seen_apart(epsilon, distance)) if distance else shown

    @abstractmethod
    def _supported(self, release: Event) -> bool:
        """Return whether the accountant has a bound for one kind of release."""

    @abstractmethod
    def _epsilon(self, releases: Counter[Event], delta: float) -> float:
        """Return the epsilon of the composition of supported releases, given with their counts."""

    @abstractmethod
    def _delta(self, releases: Counter[Event], epsilon: float) -> float:
        """Return the delta of the composition of supported releases, given with their counts."""

    def _released(self, event: Event) -> Counter[Event]:
        """Return the releases of a supported event with their counts; refuse an unsupported release by name."""
        counts = atoms(event)
        for release in counts:
            if not self.supports(release):
                raise PrivacyError(
                    f"accountant {self.name!r} has no bound for {type(release).__name__} under "
                    f"{self.adjacency.value} ({release}); choose an accountant that supports it"
                )
        return counts

    def _apart(self, event: Event, delta: float, distance: float) -> float:
        """Return the epsilon of an event that is seen at a statistical distance d (:class:`NearbyEvent`).

        The result is the least fixed point of epsilon = epsilon_event(delta - (1 + e^epsilon) d). The right side
        grows with epsilon, so the iteration from epsilon = 0 rises monotonically to it. The result is infinite if the
        iteration leaves no positive delta; a finite result was checked against the equation.

        Raises:
            PrivacyError: the accountant has no number for the event.
        """
        epsilon = 0.0
        for step in range(_MOST_STEPS):
            remaining = delta - _seen_apart(epsilon, distance)
            if remaining < _LEAST_DELTA:
                return math.inf
            try:
                next_epsilon = self.epsilon(event, remaining)
            except PrivacyError:  # the rest of delta is below the accountant's numerical error
                if step == 0:
                    raise
                return math.inf
            if next_epsilon <= epsilon:
                return epsilon
            # Rounding up lets the iteration pass the fixed point; unrounded values may only converge to it.
            epsilon = next_epsilon * (1 + _STEP)
        try:
            return self._least_apart(event, delta, distance, epsilon)
        except PrivacyError:
            return math.inf

    def _least_apart(self, event: Event, delta: float, distance: float, low: float) -> float:
        """Return the least epsilon above ``low`` with delta_event(epsilon) + (1 + e^epsilon) d <= delta.

        Where the distance takes about all that delta can spare, fixed-point iteration rises too slowly. Both summands
        are convex in e^epsilon, so a search by thirds finds whether their least sum is small enough, and a bisection
        finds the least epsilon whose sum is. Every epsilon that is returned was checked against the inequality.
        """

        def excess(epsilon: float) -> float:
            return self.delta(event, epsilon) + _seen_apart(epsilon, distance) - delta

        left, right = low, max(low, math.log(delta / distance))
        for _ in range(_MOST_STEPS):
            first, second = left + (right - left) / 3, right - (right - left) / 3
            at_first, at_second = excess(first), excess(second)
            if min(at_first, at_second) <= 0:
                enough = first if at_first <= at_second else second
                break
            left, right = (left, second) if at_first <= at_second else (first, right)
        else:
            return math.inf
        while enough - low > _STEP * enough:
            middle = (low + enough) / 2
            low, enough = (low, middle) if excess(middle) <= 0 else (middle, enough)
        return enough


_LEAST_DELTA: Final = 1e-300
_MOST_LOSS: Final = 700.0
"""Largest loss of grids whose exponential is a float64 number."""
_LEAST_STRENGTH: Final = 1e-6
"""Least strength mu of Gaussian releases; weaker releases are counted with it.

Below it, rounding errors exceed delta.
"""
_MOST_STEPS: Final = 100
_STEP: Final = 1e-10
"""Relative amount by which an epsilon found by iteration is rounded up."""
_LARGEST_POWER: Final = 700.0
"""Largest exponent x for which e^x is treated as a float64 number."""
_LARGEST_STRENGTH: Final = 1e8
"""Strength mu above which rounding loses delta.

The tail bound of the loss replaces delta; it makes epsilon larger by a relative 1e-6.
"""


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta}: must be above 0 and below 1 (well below 1 / number of users)")
    if delta < _LEAST_DELTA:
        raise PrivacyError(
            f"delta = {delta}: must be at least {_LEAST_DELTA:g}, for double precision to count with it"
        )


def is_large_delta(delta: float, units: int) -> bool:
    """Return whether delta is at least 1 / units.

    A mechanism that publishes the data of one unit, chosen at random, is (0, 1 / units)-differentially private.

    >>> is_large_delta(1e-5, 99_999), is_large_delta(1e-5, 100_000)
    (False, True)
    """
    return delta >= 1 / units


def explain_large_delta(delta: float, units: int) -> str:
    """Return the reason why a delta of 1 / units or more is refused, and the delta that is acceptable."""
    return (
        f"delta = {delta:g} is not below 1 / n_users = 1 / {units}: publishing the data of one user, chosen at random, "
        f"has such a delta. Give a delta well below {1 / units:.3g}"
    )


# A run evaluates the same event before a round, after it, once per party of the statement, and at its end.
@lru_cache(maxsize=256)
def cached_epsilon(accountant: Accountant, event: Event, delta: float) -> float:
    """Return :meth:`Accountant.epsilon`, computed once for equal arguments."""
    return accountant.epsilon(event, delta)


def _seen_apart(epsilon: float, distance: float) -> float:
    """Return (1 + e^epsilon) d; infinite where float64 does not hold the power."""
    return (1 + math.exp(epsilon)) * distance if epsilon <= _LARGEST_POWER else math.inf


def full_sensitivity(adjacency: Adjacency) -> float:
    """Return the sensitivity of an unsampled sum in clip units.

    It is 1 if neighbours add or remove a contribution, and 2 if they replace a contribution.
    """
    return 1.0 if adjacency is Adjacency.ADD_OR_REMOVE_ONE else 2.0


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta of composed Gaussian releases of total strength ``mu`` at an epsilon.

    With mu^2 = sum_t (sensitivity_t / std_t)^2,
    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)   (Balle and Wang 2018, Theorem 8; the
    composition is Dong, Roth and Su 2022, Corollary 3.3). ``mu`` = 0 means that nothing was released.
    """
    if mu == 0:
        return 0.0
    # Both terms are evaluated as logarithms: Phi of a far tail underflows long before their difference does.
    mu = max(mu, _LEAST_STRENGTH)
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
    mu = max(mu, _LEAST_STRENGTH)
    highest = mu * mu / 2 + mu * (math.sqrt(2 * math.log(1 / delta)) + 1)
    # P(loss > mu^2/2 + mu x) = Phi(-x) <= delta for x = sqrt(2 ln(1/delta)), so `highest` always meets delta.
    if mu > _LARGEST_STRENGTH:
        return highest
    root = float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, highest, xtol=1e-14, rtol=1e-14))
    return root * (1 + 1e-12) + 1e-13


# --- accounting rules ---

Orders: TypeAlias = tuple[float, ...]
Divergences: TypeAlias = Callable[[Orders], Float64[np.ndarray, " orders"]]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Privacy loss of one release, for accountants that compose loss distributions.

    Attributes:
        typical: typical loss; the grid of losses is a tenth of the smallest one.
        largest: loss that is exceeded with negligible probability.
        spread: standard deviation of the loss.
        discretise: returns, for the spacing of the grid, a distribution on its multiples that dominates the loss for
            both orders of the neighbours: a wider spacing may cost more, never less.
    """

    typical: float
    largest: float
    spread: float
    discretise: Callable[[float], PrivacyLossDistribution]


class AccountingRule:
    """Cost of one release of an event; bounds that a rule does not have are None.

    A rule is trusted as a proof is: both bounds must hold for every pair of neighbours, whatever other people's
    contributions are. ``tests/contract/test_samplers.py`` tries to break them.

    Attributes:
        event: the event's class.
    """

    event: ClassVar[type[Event]]

    def __init_subclass__(cls, *, event: type[Event]) -> None:
        """Register the rule of an event."""
        if event in _RULES:
            raise PrivacyError(f"{cls.__name__}: events of type {event.type!r} have a rule already")
        cls.event = event
        _RULES[event] = cls()

    def losses(self, release: Any, adjacency: Adjacency) -> Losses | None:
        """Return the privacy loss of a release; None if there is no bound under this adjacency."""
        return None

    def divergences(self, release: Any, adjacency: Adjacency) -> Divergences | None:
        """Return the Renyi divergences of a release by order, for both orders of the neighbours; None as above."""
        return None


_RULES: Final[dict[type[Event], AccountingRule]] = {}


def rule_of(release: Event) -> AccountingRule:
    """Return the rule of a release; a rule without bounds if its event has none."""
    kind = type(release)
    if kind not in _RULES and any(member.name == kind.type for member in members("accounting_rules")):
        find("accounting_rules", kind.type).load()
    return _RULES.get(kind, _UNBOUNDED)


_UNBOUNDED: Final = object.__new__(AccountingRule)


def load_event_types(event: object) -> None:
    """Load the packages that define the events of a document of one's own.

    An event's type is looked up among accounting rules and samplers of this name. Documents of other parties are read
    without this call, so that they load no package.

    Args:
        event: an event in its JSON form.
    """
    for name in _unknown_types(event):
        for kind in ("accounting_rules", "samplers"):
            if any(member.name == name and member.package != PACKAGE for member in members(kind)):
                find(kind, name).load()


def _unknown_types(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        name = value.get("type")
        if isinstance(name, str) and not is_known_type(name):
            yield name
        for inner in value.values():
            yield from _unknown_types(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _unknown_types(inner)
