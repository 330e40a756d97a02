"""How much noise, or how many rounds: accountants run backwards.

Every search keeps a bracket whose good end was checked by the accountant itself, so what is returned meets the target
exactly as a later run will count it, and the other end of the bracket (``tolerance`` away) was seen to miss it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from fedveil.errors import BudgetError, PrivacyError
from fedveil.privacy.accountant import Accountant, epsilon_on_grid
from fedveil.privacy.events import Event, SelfComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.privacy.statement import show_epsilon

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_MOST_ROUNDS = 10**9
_NOTHING = 1e-300


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

    Args:
        epsilon: of the whole run as a function of the noise multiplier; it must fall as that grows.
        budget: target epsilon, delta and accountant.
        tolerance: relative; a multiplier smaller by this factor was seen to exceed the budget.

    Raises:
        BudgetError: even a multiplier of 1e6, or the largest that can be drawn, does not fit, or one of 0.01 still
            does (no such budget needs calibration).
    """

    @cache
    def cost(noise_multiplier: float) -> float:
        spent = epsilon(noise_multiplier)
        above = math.log(max(spent, _NOTHING) / max(budget.epsilon, _NOTHING))
        return min(above, 0.0) if spent <= budget.epsilon else max(above, _NOTHING)

    high = _power_of_two(cost(1.0))
    try:
        while high <= _MOST_NOISE and cost(high) > 0:
            high *= 2
    except PrivacyError as error:
        raise BudgetError(
            f"epsilon {budget.epsilon:g} at delta {budget.delta:g} asks for a noise multiplier near {high:g}, more "
            "than can be drawn exactly; allow a larger epsilon or fewer rounds"
        ) from error
    if high > _MOST_NOISE:
        raise BudgetError(
            f"no noise multiplier up to {_MOST_NOISE:g} meets epsilon {budget.epsilon:g} at delta "
            f"{budget.delta:g} (accountant {budget.accountant.name}); allow a larger epsilon or fewer rounds"
        )
    low = high / 2
    while cost(low) <= 0:
        high, low = low, low / 2
        if low < _LEAST_NOISE:
            raise BudgetError(
                f"epsilon {budget.epsilon:g} is met by almost no noise (multiplier {high:g}), which "
                "protects nobody; give the noise multiplier itself, or a smaller epsilon"
            )
    return _least(cost, low, high, tolerance)


def _power_of_two(cost: float) -> float:
    """Return about how much noise brings the cost of noise 1 down to 0, as if epsilon fell like its inverse."""
    if not math.isfinite(cost):
        return 1.0
    return float(2.0 ** min(max(math.ceil(cost / math.log(2)), -6), 19))


def _least(cost: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return the first of the points that halving would come to, ``tolerance`` apart, whose cost is not above 0.

    Halving takes 13 steps from a factor of 2 to 1e-4; here the line through the logarithms of both ends says where to
    look next, and it takes about four. The point itself and the one below it are looked at.
    """
    missing, fitting = low, high
    while True:
        share = cost(missing) / (cost(missing) - cost(fitting))
        guess = missing * (fitting / missing) ** (share if math.isfinite(share) else 0.5)
        below, above = _cell(low, high, tolerance, min(max(guess, math.nextafter(missing, high)), fitting))
        if cost(above) > 0:
            missing = above
        elif cost(below) > 0:
            return above
        else:
            fitting = below


def _cell(low: float, high: float, tolerance: float, at: float) -> tuple[float, float]:
    """Halve a bracket around a point until its ends are ``tolerance`` apart."""
    while low < high * (1 - tolerance):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at <= middle else (middle, high)
    return low, high


def calibrate_rounds(event: Event, budget: Budget) -> int:
    """Return the largest number of rounds of ``event`` that fit the budget; one more was seen to exceed it.

    Raises:
        BudgetError: one round is too much, or 10^9 rounds still fit.
    """

    def fits(rounds: int) -> bool:
        return epsilon_of(SelfComposedEvent(event=event, count=rounds), budget) <= budget.epsilon

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
