"""How much noise, or how many rounds: accountants run backwards.

Every search keeps a bracket whose good end was checked by the accountant itself, so what is returned meets
the target exactly as a later run will count it, and the other end of the bracket (``tolerance`` away) was
seen to miss it.
"""

from __future__ import annotations

from collections.abc import Callable

from fedveil.errors import BudgetError, PrivacyError
from fedveil.privacy.accountant import Accountant, epsilon_on_grid
from fedveil.privacy.events import Event, GaussianEvent, PoissonSampledEvent, SelfComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.privacy.statement import show_epsilon

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_MOST_ROUNDS = 10**9


def gaussian_rounds(*, noise_multiplier: float, rounds: int, rate: float = 1.0) -> Event:
    """Return ``rounds`` Gaussian releases over Poisson samples of ``rate``: the event of a ULDP-AVG run."""
    release: Event = GaussianEvent(noise_multiplier=noise_multiplier)
    if rate != 1:
        release = PoissonSampledEvent(rate=rate, event=release)
    return SelfComposedEvent(event=release, count=rounds)


def calibrate_noise(
    event: Callable[[float], Event],
    budget: Budget,
    tolerance: float = 1e-4,
    *,
    loss: Callable[[float], float] = lambda noise_multiplier: 0.0,
) -> float:
    """Return the smallest noise multiplier whose event fits the budget, to a relative ``tolerance``.

    Args:
        event: the run's event as a function of the noise multiplier; epsilon must fall as it grows.
        budget: target epsilon, delta and accountant.
        tolerance: relative; a multiplier smaller by this factor was seen to exceed the budget.
        loss: of the grid that the noise lies on, for the whole run, as a function of the noise multiplier.

    Raises:
        BudgetError: even a multiplier of 1e6 does not fit, or one of 0.01 still does (no such budget needs
            calibration).
    """

    def fits(noise_multiplier: float) -> bool:
        return _fits(event(noise_multiplier), budget, loss(noise_multiplier))

    high = 1.0
    while not fits(high):
        high *= 2
        if high > _MOST_NOISE:
            raise BudgetError(
                f"no noise multiplier up to {_MOST_NOISE:g} meets epsilon {budget.epsilon:g} at delta "
                f"{budget.delta:g} (accountant {budget.accountant.name}); allow a larger epsilon or fewer "
                "rounds"
            )
    low = high / 2
    while fits(low):
        high, low = low, low / 2
        if low < _LEAST_NOISE:
            raise BudgetError(
                f"epsilon {budget.epsilon:g} is met by almost no noise (multiplier {high:g}), which "
                "protects nobody; give the noise multiplier itself, or a smaller epsilon"
            )
    while low < high * (1 - tolerance):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def calibrate_rounds(event: Event, budget: Budget) -> int:
    """Return the largest number of rounds of ``event`` that fit the budget; one more was seen to exceed it.

    Raises:
        BudgetError: one round is too much, or 10^9 rounds still fit.
    """

    def fits(rounds: int) -> bool:
        return _fits(SelfComposedEvent(event=event, count=rounds), budget)

    if not fits(1):
        raise BudgetError(
            f"one round costs epsilon {show_epsilon(budget.accountant.epsilon(event, budget.delta))} at delta "
            f"{budget.delta:g}, more than the budget of {budget.epsilon:g}; use more noise or a smaller "
            "sampling rate"
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


def _fits(event: Event, budget: Budget, loss: float = 0.0) -> bool:
    accountant: Accountant = budget.accountant
    if not accountant.supports(event):
        raise PrivacyError(f"accountant {accountant.name!r} cannot calibrate {event}: it does not support it")
    return epsilon_on_grid(accountant, event, budget.delta, loss) <= budget.epsilon
