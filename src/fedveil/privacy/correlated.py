"""Correlate noise over rounds: sensitivity of one user's contributions, and the best coefficients.

A sender encodes its sums g_1, g_2, ... by a banded Toeplitz matrix C before it adds fresh noise,

    y_t = sum_{j<k} c_j g_{t-j} + Z_t,       1 = c_0 >= c_1 >= ... >= c_{k-1} >= 0,

and the reader decodes x_t = y_t - sum_{j>=1} c_j x_{t-j}, whose noise is C^-1 Z. A user takes part at most in every
b-th round. With k <= b, the columns of C for the rounds of one user do not overlap. A stream of rows of norm at most
1 therefore changes y_1 ... y_t by at most s_t,

    s_t^2 = max over sets P of rounds up to t, b apart, of sum_{i in P} ||C[1..t] e_i||^2
          = sum of the strengths of the first t rounds,   strength_t = c_j^2,   j = (t - 1) mod b   (0 for j >= k).

A user that takes part in round 1 and every b rounds after it attains the maximum. A user may have records at several
silos, with the same or with different rounds: ||C sum_s w_s delta_s|| <= sum_s w_s ||C delta_s|| <= s_t for weights
that sum to at most 1 and stay constant over the rounds. Sums depend on earlier releases through the model, but the
bound holds on every path. So T rounds with noise of standard deviation sigma are one Gaussian release of multiplier
sigma / s_T. Rounds that are charged sigma / sqrt(strength_t) each compose to that release after every round.
docs/theory/correlated-noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from fedveil.errors import PrivacyError

BITS: Final = 6
"""Number of fractional bits of a coefficient.

Coefficients are multiples of 2^-6, so the encoded sums lie exactly on a grid 2^-6 times that of the sums.
"""

_LEAST_GAIN: Final = 1e-9


def check_coefficients(coefficients: Sequence[float], period: int) -> None:
    """Check that coefficients start with 1, never rise, are not negative, dyadic, and at most b.

    Raises:
        PrivacyError: the first rule that the coefficients break.
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
    """Return s_t^2 - s_{t-1}^2 of the rounds of one period: c_j^2, and 0 after the last band.

    >>> strengths((1.0, 0.5), 3)
    (1.0, 0.25, 0.0)

    Raises:
        PrivacyError: coefficients that :func:`check_coefficients` refuses.
    """
    check_coefficients(coefficients, period)
    return (*(one * one for one in coefficients), *(0.0 for _ in range(period - len(coefficients))))


def squared_sensitivity(coefficients: Sequence[float], period: int, rounds: int) -> float:
    """Return s_T^2 after ``rounds`` rounds.

    >>> squared_sensitivity((1.0,), 5, 11), squared_sensitivity((1.0, 0.5), 2, 3)
    (3.0, 2.25)
    """
    repeated = strengths(coefficients, period)
    whole, left = divmod(rounds, period)
    return whole * math.fsum(repeated) + math.fsum(repeated[:left])


def decoded_error(coefficients: Sequence[float], rounds: int) -> float:
    """Return the root mean square over T rounds of the noise in the model x_1 + ... + x_t.

    The unit is the standard deviation of the noise of one message.

    >>> decoded_error((1.0,), 3) == 2**0.5
    True
    """
    from scipy.signal import lfilter

    # summed[i] is the sum of the first i + 1 coefficients of C^-1: the weight of a message's noise in the model i
    # rounds later. It occurs in T - i of the T models.
    summed = lfilter([1.0], coefficients, np.ones(rounds))
    return float(np.sqrt((summed**2 @ np.arange(rounds, 0, -1)) / rounds))


@lru_cache(maxsize=64)
def best_coefficients(rounds: int | None, period: int, bands: int) -> tuple[float, ...]:
    """Return coefficients with little noise in the models of T rounds at equal privacy.

    The objective is :func:`decoded_error` times s_T, a function of public numbers alone. A coordinate search over
    non-increasing multiples of 2^-6 with halving steps starts at the coefficients of (1 - x)^(-1/2). These are
    optimal for one participation without a limit on bands, and they are the result if T is not known.

    Args:
        rounds: T; None if it is not known.
        period: b.
        bands: k, at most b.
    """
    unit = 2.0**-BITS
    found = [1.0]
    for j in range(1, bands if rounds is None else min(bands, rounds)):
        # Power series of (1 - x)^(-1/2): the coefficient of x^j is the one before it times (2 j - 1) / (2 j).
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
