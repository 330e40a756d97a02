"""Noise that is correlated over rounds: how far one user's stream moves what is encoded, and which code is best.

A sender encodes its sums g_1, g_2, ... by a banded Toeplitz matrix C before fresh noise is added,

    y_t = sum_{j<k} c_j g_{t-j} + Z_t,       1 = c_0 >= c_1 >= ... >= c_{k-1} >= 0,

and the reader decodes x_t = y_t - sum_{j>=1} c_j x_{t-j}, whose noise is C^-1 Z. A user takes part in every b-th round
at most. With k <= b the columns of C that one user's rounds meet do not overlap, so a stream of rows of norm at most 1
moves y_1 ... y_t by at most s_t,

    s_t^2 = max over sets P of rounds up to t, b apart, of sum_{i in P} ||C[1..t] e_i||^2
          = the strengths of the first t rounds,     strength_t = c_j^2,   j = (t - 1) mod b   (0 for j >= k),

which is attained from round 1 on every b rounds. At several silos at once nothing changes, whether or not the rounds
there are the same: ||C sum_s w_s delta_s|| <= sum_s w_s ||C delta_s|| <= s_t for weights that sum to at most 1 and stay
the same over the rounds. Sums depend on earlier releases through the model, but the bound holds on every path, so T
rounds with noise of standard deviation sigma are one Gaussian release of multiplier sigma / s_T, and rounds charged
sigma / sqrt(strength_t) compose to it at every stop. docs/theory/correlated-noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from scipy.signal import lfilter

from fedveil.errors import PrivacyError

BITS: Final = 6
"""Coefficients are multiples of 2^-6, so that what is encoded lies on a grid 2^-6 times that of the sums, exactly."""

_LEAST_GAIN: Final = 1e-9


def check_coefficients(coefficients: Sequence[float], period: int) -> None:
    """Return if coefficients are those of the theory: 1 first, falling, not negative, dyadic, at most b of them.

    Raises:
        PrivacyError: they are not; says which rule they break.
    """
    if not coefficients or coefficients[0] != 1:
        raise PrivacyError(f"coefficients {tuple(coefficients)}: the first must be 1")
    if len(coefficients) > period:
        raise PrivacyError(
            f"{len(coefficients)} bands, and a user takes part every {period} rounds: with more bands than that the "
            "user's rounds overlap in what is sent, and the sensitivity is larger; take at most as many bands as rounds"
        )
    if not all(0 <= after <= before for before, after in pairwise(coefficients)):
        raise PrivacyError(
            f"coefficients {tuple(coefficients)}: with signs, or if they rise, the sensitivity is known as a bound "
            "alone; take coefficients that fall and are not negative"
        )
    if any(one * 2**BITS != math.floor(one * 2**BITS) for one in coefficients):
        raise PrivacyError(
            f"coefficients {tuple(coefficients)}: multiples of 2^-{BITS} are needed, so that sums stay on a grid"
        )


def strengths(coefficients: Sequence[float], period: int) -> tuple[float, ...]:
    """Return s_t^2 - s_{t-1}^2 of the rounds of one period, which repeat: c_j^2, and 0 where there is no band.

    >>> strengths((1.0, 0.5), 3)
    (1.0, 0.25, 0.0)

    Raises:
        PrivacyError: coefficients that the theory does not have.
    """
    check_coefficients(coefficients, period)
    return (*(one * one for one in coefficients), *(0.0 for _ in range(period - len(coefficients))))


def squared_sensitivity(coefficients: Sequence[float], period: int, rounds: int) -> float:
    """Return s_T^2 of so many rounds.

    >>> squared_sensitivity((1.0,), 5, 11), squared_sensitivity((1.0, 0.5), 2, 3)
    (3.0, 2.25)
    """
    repeated = strengths(coefficients, period)
    whole, left = divmod(rounds, period)
    return whole * math.fsum(repeated) + math.fsum(repeated[:left])


def decoded_error(coefficients: Sequence[float], rounds: int) -> float:
    """Return the root mean square over T rounds of the noise in x_1 + ... + x_t, in units of the noise of one message.

    >>> decoded_error((1.0,), 3) == 2**0.5
    True
    """
    summed = lfilter([1.0], coefficients, np.ones(rounds))  # a row sum of C^-1 for each of the last rounds
    return float(np.sqrt((summed**2 @ np.arange(rounds, 0, -1)) / rounds))


@lru_cache(maxsize=64)
def best_coefficients(rounds: int | None, period: int, bands: int) -> tuple[float, ...]:
    """Return the coefficients with the least noise in the models of T rounds, at one s_T; public numbers alone.

    What is minimised is :func:`decoded_error` times s_T, over falling multiples of 2^-6, one at a time with steps that
    halve, from the coefficients of (1 - x)^(-1/2), which are best for one participation and no limit on bands; they
    are what there is where T is not known.
    """
    unit = 2.0**-BITS
    found = [1.0]
    for j in range(1, bands if rounds is None else min(bands, rounds)):
        found.append(found[-1] * (2 * j - 1) / (2 * j))
    found = [round(one / unit) * unit for one in found]
    if rounds is None:
        return tuple(found)

    def error(tried: list[float]) -> float:
        return decoded_error(tried, rounds) * math.sqrt(squared_sensitivity(tried, period, rounds))

    least, step = error(found), 2.0**-3
    while step >= unit:
        moved = False
        for place in range(1, len(found)):
            for move in (step, -step):
                tried = [*found[:place], found[place] + move, *found[place + 1 :]]
                below = found[place + 1] if place + 1 < len(found) else 0.0
                if below <= tried[place] <= found[place - 1] and error(tried) < least * (1 - _LEAST_GAIN):
                    found, least, moved = tried, error(tried), True
        if not moved:
            step /= 2
    return tuple(found)
