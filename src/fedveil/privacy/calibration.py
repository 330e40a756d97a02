"""How much noise, or how many rounds: accountants run backwards.

Every search keeps a bracket whose good end was checked by the accountant itself, so what is returned meets the target
exactly as a later run will count it, and the other end of the bracket (``tolerance`` away) was seen to miss it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fedveil.errors import BudgetError, PrivacyError
from fedveil.privacy.accountant import Accountant, epsilon_on_grid
from fedveil.privacy.events import Event, GaussianEvent, SelfComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.privacy.statement import show_epsilon

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_MOST_ROUNDS = 10**9
_NOTHING = 1e-300
_SAYS_NOTHING = 500.0  # |ln(epsilon / target)|: epsilon is infinite or next to 0
_MESSAGE_TOLERANCE = 1e-4


def calibrate_noise(event: Callable[[float], Event], budget: Budget, tolerance: float = 1e-4) -> float:
    """Return the smallest noise multiplier whose event fits the budget; see :func:`least_noise`.

    Args:
        event: the run's event as a function of the noise multiplier.
        budget: target epsilon, delta and accountant.
        tolerance: as of :func:`least_noise`.
    """
    return least_noise(lambda z: epsilon_of(event(z), budget), budget, tolerance)


def least_noise(epsilon: Callable[[float], float], budget: Budget, tolerance: float = 1e-4) -> float:
    """Return the smallest noise multiplier whose epsilon fits the budget, to a relative ``tolerance``.

    A multiplier whose epsilon cannot be computed (its noise cannot be drawn exactly, or its loss is no number) is no
    answer in itself: the search goes on where epsilon can be computed, first at less noise, then at more.

    Args:
        epsilon: of the whole run as a function of the noise multiplier; it must fall as that grows. It raises
            PrivacyError where it cannot be computed.
        budget: target epsilon, delta and accountant.
        tolerance: relative; a multiplier smaller by this factor was seen to exceed the budget.

    Raises:
        BudgetError: no multiplier up to 1e6, or up to the largest that can be drawn, fits; one of 0.01 still does (no
            such budget needs calibration); or the target is infinite.
        PrivacyError: epsilon cannot be computed for any multiplier.
    """
    if math.isinf(budget.epsilon):
        raise BudgetError("epsilon inf: an infinite target asks for no noise; give a finite epsilon")
    curve = _Curve(epsilon, budget)
    high = curve.computable(_power_of_two(curve.excess(1.0)))
    while high <= _MOST_NOISE and curve.is_computable(high) and curve.excess(high) > 0:
        high *= 2
    if high > _MOST_NOISE:
        raise _infeasible(
            budget, high / 2, curve.spent(high / 2), f"the largest that is tried, {_MOST_NOISE:g}"
        )
    if curve.is_computable(high):
        low, fitting = curve.halved(high)
        return _least(curve.excess, (low, fitting), fitting, tolerance)
    low, fitting = high / 2, curve.fitting_below(high, tolerance)
    return _least(curve.excess, (low, high), fitting, tolerance)


class _Curve:
    """Epsilon as a function of the noise multiplier, where it can be computed; every value is computed once.

    Args:
        epsilon: of a noise multiplier; raises PrivacyError where it cannot be computed.
        budget: what it is compared with.
    """

    def __init__(self, epsilon: Callable[[float], float], budget: Budget) -> None:
        self._epsilon, self._budget = epsilon, budget
        self._known: dict[float, float | PrivacyError] = {}

    def _at(self, multiplier: float) -> float | PrivacyError:
        if multiplier not in self._known:
            try:
                self._known[multiplier] = self._epsilon(multiplier)
            except PrivacyError as error:
                self._known[multiplier] = error
        return self._known[multiplier]

    def is_computable(self, multiplier: float) -> bool:
        """Return whether epsilon can be computed at a multiplier."""
        return not isinstance(self._at(multiplier), PrivacyError)

    def spent(self, multiplier: float) -> float:
        """Return epsilon; infinity where it cannot be computed, so that no such multiplier counts as fitting."""
        found = self._at(multiplier)
        return math.inf if isinstance(found, PrivacyError) else found

    def excess(self, multiplier: float) -> float:
        """Return ln(epsilon / target): above 0 exactly where the budget is exceeded, infinite without a number."""
        spent, target = self.spent(multiplier), self._budget.epsilon
        above = math.log(max(spent, _NOTHING) / max(target, _NOTHING))
        return min(above, 0.0) if spent <= target else max(above, _NOTHING)

    def computable(self, start: float) -> float:
        """Return the first power of two at which epsilon can be computed: from ``start`` down, then up.

        Raises:
            PrivacyError: there is none; the refusal at ``start``.
        """
        steps = (math.ldexp(start, step) for step in (*range(0, -40, -1), *range(1, 40)))
        for multiplier in steps:
            if _LEAST_NOISE / 2 <= multiplier <= _MOST_NOISE and self.is_computable(multiplier):
                return multiplier
        refusal = self._at(start)
        assert isinstance(refusal, PrivacyError), "start was tried, and lies between the limits"
        raise refusal

    def halved(self, high: float) -> tuple[float, float]:
        """Halve a multiplier that fits until its half does not; return both ends of that bracket.

        Raises:
            BudgetError: almost no noise still fits.
        """
        low = high / 2
        while self.excess(low) <= 0:
            high, low = low, low / 2
            if low < _LEAST_NOISE:
                raise BudgetError(
                    f"epsilon {self._budget.epsilon:g} is met by almost no noise (multiplier {high:g}), which "
                    "protects nobody; give the noise multiplier itself, or a smaller epsilon"
                )
        return low, high

    def fitting_below(self, refused: float, tolerance: float) -> float:
        """Return a multiplier that fits between half of one without a number, which exceeds the budget, and that one.

        The points are those at which :func:`_cell` halves the same bracket.

        Raises:
            BudgetError: even the largest one with a number, to the tolerance, exceeds the budget; says what would do.
        """
        low, high = refused / 2, refused
        while low < high * (1 - tolerance):
            middle: float = (low * high) ** 0.5
            if not self.is_computable(middle):
                high = middle
            elif self.excess(middle) > 0:
                low = middle
            else:
                return middle
        raise _infeasible(self._budget, low, self.spent(low), f"the {low:.4g} that can be drawn exactly")


def _infeasible(budget: Budget, largest: float, spent: float, limit: str) -> BudgetError:
    """Return why no noise meets a budget, with the noise that would.

    Args:
        budget: the target.
        largest: the largest multiplier that was tried.
        spent: its epsilon.
        limit: what the needed noise is beyond, in words.
    """
    target = f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"
    needed, equal = _gaussian_noise(budget, budget.epsilon), _gaussian_noise(budget, spent)
    if needed is None:
        return BudgetError(
            f"{target} is met by no noise multiplier: at {largest:.4g} epsilon is {show_epsilon(spent)} (accountant "
            f"{budget.accountant.name}), and more noise lowers it no further; allow a larger epsilon or delta"
        )
    about = f"of about {largest * needed / equal:.4g}" if equal else f"above {largest:.4g}"
    return BudgetError(
        f"{target} needs a noise multiplier {about} (accountant {budget.accountant.name}), more than {limit}; allow a "
        "larger epsilon or fewer rounds"
    )


def _gaussian_noise(budget: Budget, epsilon: float) -> float | None:
    """Return the noise multiplier of one Gaussian release of this epsilon at the budget's delta; None: there is none.

    Many releases under much noise are about one Gaussian release, whose multiplier grows in proportion to theirs. This
    is for messages: nothing is charged by it.
    """
    low, high = 2.0**-30, 2.0**30
    if budget.accountant.epsilon(GaussianEvent(noise_multiplier=high), budget.delta) > epsilon:
        return None
    while low < high * (1 - _MESSAGE_TOLERANCE):
        middle = (low * high) ** 0.5
        fits = budget.accountant.epsilon(GaussianEvent(noise_multiplier=middle), budget.delta) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high


def _power_of_two(excess: float) -> float:
    """Return about how much noise brings the excess of noise 1 down to 0, as if epsilon fell like its inverse.

    It is 1 where the excess says nothing: epsilon is infinite there, or 0.
    """
    if not abs(excess) < _SAYS_NOTHING:
        return 1.0
    return float(2.0 ** min(max(math.ceil(excess / math.log(2)), -6), 19))


def _least(
    excess: Callable[[float], float], bracket: tuple[float, float], fitting: float, tolerance: float
) -> float:
    """Return the first of the points that halving would come to, ``tolerance`` apart, whose excess is not above 0.

    Halving takes 13 steps from a factor of 2 to 1e-4; here the line through the logarithms of both ends says where to
    look next, and it takes about four. The point itself and the one below it are looked at. Where that line misleads
    (an epsilon of 0 has no logarithm), two steps that did not halve the bracket are followed by one that does.

    Args:
        excess: of a noise multiplier.
        bracket: the ends of what is halved; the lower one does not fit.
        fitting: a multiplier that fits: the upper end, or a point that halving comes to.
        tolerance: relative.
    """
    missing, slow = bracket[0], 0
    while True:
        width = math.log(fitting / missing)
        share = excess(missing) / (excess(missing) - excess(fitting))
        if slow > 1 or not math.isfinite(share):
            share = 0.5
        guess = missing * (fitting / missing) ** share
        below, above = _cell(*bracket, tolerance, min(max(guess, math.nextafter(missing, fitting)), fitting))
        if excess(above) > 0:
            missing = above
        elif excess(below) > 0:
            return above
        else:
            fitting = below
        slow = slow + 1 if share != 0.5 and math.log(fitting / missing) > width / 2 else 0


def _cell(low: float, high: float, tolerance: float, at: float) -> tuple[float, float]:
    """Halve a bracket around a point until its ends are ``tolerance`` apart."""
    while low < high * (1 - tolerance):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at <= middle else (middle, high)
    return low, high


def calibrate_rounds(event: Event, budget: Budget) -> int:
    """Return the largest number of rounds of ``event`` that fit the budget.

    One more was seen to exceed it, or to have no number by the accountant: a run of so many could not be stated.

    Raises:
        BudgetError: one round is too much, or 10^9 rounds still fit.
        PrivacyError: the accountant has no number for one round.
    """

    def fits(rounds: int) -> bool:
        try:
            return epsilon_of(SelfComposedEvent(event=event, count=rounds), budget) <= budget.epsilon
        except PrivacyError:
            if rounds == 1:
                raise
            return False

    if not fits(1):
        raise BudgetError(
            f"one round costs epsilon {show_epsilon(budget.accountant.epsilon(event, budget.delta))} at delta "
            f"{budget.delta:g}, more than the budget of {budget.epsilon:g}; use more noise or a smaller sampling rate"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, high * 2
        if high > _MOST_ROUNDS:
            raise BudgetError(f"{low} rounds still fit epsilon {budget.epsilon:g}: the budget does not bind")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def epsilon_of(event: Event, budget: Budget, loss: float = 0.0) -> float:
    """Return the epsilon of an event at a budget's delta, by its accountant.

    Args:
        event: what is released.
        budget: its delta and accountant.
        loss: of the grids that the noise lies on, in all releases together.

    Raises:
        PrivacyError: the accountant does not support the event.
    """
    accountant: Accountant = budget.accountant
    if not accountant.supports(event):
        raise PrivacyError(f"accountant {accountant.name!r} cannot calibrate {event}: it does not support it")
    return epsilon_on_grid(accountant, event, budget.delta, loss)
