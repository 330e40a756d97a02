"""Find the least noise, or the most rounds, that fit a privacy budget.

The accountant itself checks both ends of every search bracket. The returned end fits the budget by the same
computation that the run's statement uses. The other end (``tolerance`` away) exceeds the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fedveil.errors import BudgetError, PrivacyError
from fedveil.privacy.accountant import Accountant, cached_epsilon
from fedveil.privacy.events import Event, GaussianEvent, SelfComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.privacy.statement import show_epsilon

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_MOST_ROUNDS = 10**9
_NOTHING = 1e-300
_SAYS_NOTHING = 500.0  # |ln(epsilon / target)| above it: epsilon is infinite or practically 0
_MESSAGE_TOLERANCE = 1e-4


def calibrate_noise(event: Callable[[float], Event], budget: Budget, tolerance: float = 1e-4) -> float:
    """Return the smallest noise multiplier whose event fits the budget; see :func:`least_noise`.

    Args:
        event: the run's event as a function of the noise multiplier.
        budget: target epsilon, delta and accountant.
        tolerance: relative, as of :func:`least_noise`.
    """
    return least_noise(lambda z: epsilon_of(event(z), budget), budget, tolerance)


def least_noise(epsilon: Callable[[float], float], budget: Budget, tolerance: float = 1e-4) -> float:
    """Return the smallest noise multiplier whose epsilon fits the budget, to a relative ``tolerance``.

    Epsilon may be uncomputable at a multiplier: the noise cannot be sampled exactly, or the privacy loss has no
    number. The search then continues where epsilon is computable, first at less noise, then at more.

    Args:
        epsilon: epsilon of the run as a function of the noise multiplier; it must fall as the multiplier grows. It
            raises PrivacyError if it cannot be computed.
        budget: target epsilon, delta and accountant.
        tolerance: relative; a multiplier smaller by this factor exceeds the budget.

    Raises:
        BudgetError: no multiplier up to 1e6, or up to the largest that can be sampled, fits; a multiplier of 0.01
            still fits (calibration is pointless for this budget); or the target is infinite.
        PrivacyError: epsilon cannot be computed for any multiplier.
    """
    if math.isinf(budget.epsilon):
        raise BudgetError("epsilon inf: an infinite target asks for no noise; give a finite epsilon")
    curve = _Curve(epsilon, budget)
    # Epsilon is about proportional to 1 / noise, so the excess at multiplier 1 gives the first guess.
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
    """Epsilon as a function of the noise multiplier; every value is computed once.

    Args:
        epsilon: epsilon as a function of the noise multiplier; raises PrivacyError if it cannot be computed.
        budget: the budget that epsilon is compared with.
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
        """Return epsilon; infinity if it cannot be computed, so that the multiplier does not count as fitting."""
        epsilon = self._at(multiplier)
        return math.inf if isinstance(epsilon, PrivacyError) else epsilon

    def excess(self, multiplier: float) -> float:
        """Return ln(epsilon / target): positive exactly if the budget is exceeded, infinite without a number."""
        spent, target = self.spent(multiplier), self._budget.epsilon
        above = math.log(max(spent, _NOTHING) / max(target, _NOTHING))
        # Rounding of the logarithm must not change the sign: the sign decides whether the budget is exceeded.
        return min(above, 0.0) if spent <= target else max(above, _NOTHING)

    def computable(self, start: float) -> float:
        """Return the first power of two at which epsilon can be computed: from ``start`` down, then up.

        Raises:
            PrivacyError: epsilon is computable at none of them; the error is the one at ``start``.
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
            BudgetError: a multiplier below 0.01 still fits.
        """
        low = high / 2
        while self.excess(low) <= 0:
            high, low = low, low / 2
            if low < _LEAST_NOISE:
                raise BudgetError(
                    f"epsilon {self._budget.epsilon:g} is met by almost no noise (multiplier {high:g}), "
                    "which gives no privacy; give the noise multiplier itself, or a smaller epsilon"
                )
        return low, high

    def fitting_below(self, refused: float, tolerance: float) -> float:
        """Return a multiplier in [refused / 2, refused] that fits, where ``refused`` has no epsilon.

        ``refused`` / 2 exceeds the budget. The tried points are those at which :func:`_cell` halves the same bracket.

        Raises:
            BudgetError: the largest computable multiplier, to the tolerance, exceeds the budget; the message gives
                the noise that would fit.
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
    """Return the error for a budget that no noise meets, with the noise that would meet it.

    Args:
        budget: the target.
        largest: the largest multiplier that was tried.
        spent: its epsilon.
        limit: the limit that the needed noise exceeds, in words.
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
    """Return the noise multiplier of one Gaussian release of this epsilon at the budget's delta.

    None if even a multiplier of 2^30 costs more. Many releases under much noise cost about as much as one Gaussian
    release, whose multiplier is proportional to theirs. Error messages alone use this estimate; no charge depends on
    it.
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
    """Return a power of two near the fitting multiplier, as if epsilon were proportional to 1 / noise.

    The result is 1 if the excess at multiplier 1 carries no information: epsilon is infinite or 0.
    """
    if not abs(excess) < _SAYS_NOTHING:
        return 1.0
    return float(2.0 ** min(max(math.ceil(excess / math.log(2)), -6), 19))


def _least(
    excess: Callable[[float], float], bracket: tuple[float, float], fitting: float, tolerance: float
) -> float:
    """Return the first bisection point, ``tolerance`` apart from the next, that fits the budget.

    Bisection takes 13 steps from a factor of 2 to 1e-4. This search takes about four: the secant through the
    logarithms of both ends proposes a point, and the bisection point above it and the one below it are evaluated. The
    secant can mislead (an epsilon of 0 has no logarithm), so after two steps that did not halve the bracket, one step
    halves it.

    Args:
        excess: the excess as a function of the noise multiplier.
        bracket: the ends of the bisected interval; the lower end does not fit.
        fitting: a multiplier that fits: the upper end, or a point of the bisection.
        tolerance: relative.
    """
    missing, slow = bracket[0], 0
    while True:
        width = math.log(fitting / missing)
        share = excess(missing) / (excess(missing) - excess(fitting))
        if slow > 1 or not math.isfinite(share):
            share = 0.5
        guess = missing * (fitting / missing) ** share
        # The result lies on the bisection grid of the bracket, so it does not depend on the path of the secant steps.
        below, above = _cell(*bracket, tolerance, min(max(guess, math.nextafter(missing, fitting)), fitting))
        if excess(above) > 0:
            missing = above
        elif excess(below) > 0:
            return above
        else:
            fitting = below
        slow = slow + 1 if share != 0.5 and math.log(fitting / missing) > width / 2 else 0


def _cell(low: float, high: float, tolerance: float, target: float) -> tuple[float, float]:
    """Bisect a bracket around the point ``target`` until its ends are ``tolerance`` apart."""
    while low < high * (1 - tolerance):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if target <= middle else (middle, high)
    return low, high


def calibrate_rounds(event: Event, budget: Budget) -> int:
    """Return the largest number of rounds of ``event`` that fit the budget.

    One more round exceeds the budget, or the accountant has no number for it (a run of that length could not be
    stated).

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


def epsilon_of(event: Event, budget: Budget) -> float:
    """Return the epsilon of an event at a budget's delta, by the budget's accountant.

    Args:
        event: the released event.
        budget: gives delta and accountant.

    Raises:
        PrivacyError: the accountant does not support the event.
    """
    accountant: Accountant = budget.accountant
    if not accountant.supports(event):
        raise PrivacyError(f"accountant {accountant.name!r} cannot calibrate {event}: it does not support it")
    return cached_epsilon(accountant, event, budget.delta)
