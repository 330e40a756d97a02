"""Define how the server's learning rate changes over the rounds: public factors with mean 1.

With t the round, T the last one and u_t = (t - 1/2) / T:

========  ========================  ==========================================
schedule  eta_t / eta               over the rounds
========  ========================  ==========================================
constant  1                         stays
linear    2 (1 - u_t)               from nearly 2 eta down to nearly 0
cosine    1 + cos(pi u_t)           the same, flat at both ends
========  ========================  ==========================================

The factors add up to T over the T rounds. A schedule therefore changes when a model moves, and not how far it can
move. It reads only the number of the round: no record, no random number, and no result of the run.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]

# Taylor coefficients of sin(pi v / 2), highest power first (v^21 ... v). math.sin and math.cos are not correctly
# rounded, and their last bit depends on the C library.
_SINE: Final[tuple[float, ...]] = tuple(
    (-1) ** k * (math.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10, -1, -1)
)


def factor(schedule: Schedule, number: int, rounds: int) -> float:
    """Return eta_t / eta; 0 after the last round.

    Only operations that IEEE 754 rounds correctly are used, so that parties that make the same step agree on every
    bit.

    Args:
        schedule: its name.
        number: t, from 1.
        rounds: T >= 1.

    >>> [factor("linear", number, 4) for number in (1, 2, 3, 4)]
    [1.75, 1.25, 0.75, 0.25]
    >>> sum(factor("cosine", number, 4) for number in (1, 2, 3, 4))
    4.0
    """
    if schedule == "constant":
        return 1.0
    left = max(0.0, 1.0 - (number - 0.5) / rounds)
    if schedule == "linear":
        return 2.0 * left
    sine = _sine_of_quarters(left)  # 1 + cos(pi u) = 2 cos(pi u / 2)^2 = 2 sin(pi (1 - u) / 2)^2
    return 2.0 * (sine * sine)


def _sine_of_quarters(v: float) -> float:
    """Return sin(pi v / 2) for v in [0, 1], within 1e-15."""
    value = _SINE[0]
    for coefficient in _SINE[1:]:
        value = value * (v * v) + coefficient
    return value * v
