"""Round sums to a coarse grid after their noise: the privacy loss, and the grid for short words.

Sender s has the sum x_s and the share N_s of the noise, of standard deviation sigma_s. It sends k_s = floor((x_s + N_s)
/ g + 1/2). A party that sees the sum of all k_s sees the Gaussian mechanism without rounding, up to a loss of
log-likelihood ratios that :func:`rounding_loss` bounds. The proof is in docs/theory/round-after-noise.md.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.errors import PrivacyError

LEAST_STEPS: Final = 2.0
"""Least standard deviation of one share in coarse steps. At 2 the loss is 2.9e-17 a coordinate and round."""

SUM_REACH: Final = 12.0
"""Standard deviations of the sum's noise that the range of the transmitted integers covers.

A coordinate exceeds them with probability at most 2 exp(-72) = 1.1e-31: sums of discrete Gaussians are sub-Gaussian.
"""


def rounding_loss(steps: float, shares: int) -> float:
    """Bound the change of a log-likelihood ratio, per coordinate of a sum of rounded messages: 2 L(r, n).

    L(r, n) = sum_{m=1}^{n-1} -ln(1 - eta_m), eta_m = 2 sum_{j>=1} exp(-2 pi^2 r^2 j^2 m / (m + 1)). L grows with n, so
    n may count shares that are missing, or that a coalition knows.

    Args:
        steps: r, the standard deviation of one share in coarse steps; equal for all shares.
        shares: n, the largest number of shares in the sum.

    Returns:
        The loss; infinite below :data:`LEAST_STEPS`, where the claim may fail.

    >>> rounding_loss(2.0, 2) < 2.9e-17, rounding_loss(2.0, 1), rounding_loss(1.9, 2)
    (True, 0.0, inf)
    """
    if not steps >= LEAST_STEPS:
        return math.inf
    m = np.arange(1, shares, dtype=np.float64)
    # Terms with j >= 2 are below exp(-8 pi^2) times the first, and -ln(1 - eta) is below eta (1 + eta): the factor
    # covers both, and the rounding of this sum.
    eta = 2 * np.exp(-2 * math.pi**2 * steps**2 * m / (m + 1))
    return 2 * math.fsum(eta) * (1 + 1e-9)


def round_to_grid(values: Float64[np.ndarray, " d"], fine: float, coarse: float) -> Float64[np.ndarray, " d"]:
    """Return g floor(y / g + 1/2) for every value y, exactly.

    Args:
        values: (d,) multiples of ``fine``, below 2^53 of its steps.
        fine: step of the values, a power of two.
        coarse: g, a multiple of ``fine``.

    >>> round_to_grid(np.array([0.5, -0.5, 0.75, 2.0]), fine=0.25, coarse=1.0).tolist()
    [1.0, 0.0, 1.0, 2.0]
    """
    ratio = coarse / fine
    if ratio != int(ratio):
        raise PrivacyError(f"a grid of {coarse:g} is no multiple of the noise's grid of {fine:g}")
    # In whole numbers, floor((2 y + g) / 2 g): in float64, y / g + 1/2 could round up where y has 53 bits, and the
    # fractions of the proof would no longer lie in one half-open interval.
    units = (values / fine).astype(np.int64)
    return np.asarray((2 * units + int(ratio)) // (2 * int(ratio)) * coarse)


def sum_bound(norm_bound: float, std: float, senders: int, step: float) -> int:
    """Return the largest absolute value of a coordinate of a sum of rounded messages, in coarse steps.

    Args:
        norm_bound: bound of the norm of the sum of all contributions.
        std: standard deviation of one share of the noise.
        senders: number of senders.
        step: g.
    """
    noise = SUM_REACH * math.sqrt(senders) * std
    # Rounding changes every message by at most half a step.
    return math.ceil((norm_bound + noise) / step + senders / 2)


def coarse_step(norm_bound: float, std: float, senders: int, bits: int) -> float | None:
    """Return the least step g for which words of ``bits`` bits hold every sum within :func:`sum_bound`.

    All arguments are public numbers, so the step depends on no record. It is 4, 5, 6 or 7 times a power of two: sums
    of its multiples are exact in float64, and it is at most a quarter above what is needed. None if the rounding
    errors of so many senders alone do not fit.

    >>> coarse_step(norm_bound=1000.0, std=5 / 5**0.5, senders=5, bits=16)
    0.0390625
    """
    largest_sum = 2 ** (bits - 1) - 2 - senders / 2
    if largest_sum < 1:
        return None
    needed = (norm_bound + SUM_REACH * math.sqrt(senders) * std) / largest_sum
    mantissa, exponent = math.frexp(needed)
    return math.ldexp(math.ceil(8 * mantissa), exponent - 3)
