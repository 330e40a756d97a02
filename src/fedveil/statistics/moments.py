"""Means and variances from noisy sums of powers of numbers scaled to [-1, 1].

Every figure is a smooth function of sums; their noise is white and known. What the choice of people adds would need
moments that were not released, so it is bounded by those that were and by the declared range: intervals may be wide,
and cover. With s^2 the released second central moment and K the largest distance from the mean within the range:

==============  ====================================================================================================
figure          variance by the choice of n people, at most
==============  ====================================================================================================
mean            s^2 / n                      (a person's records are averaged, which adds no spread)
variance        (K^2 s^2 - s^4) / n          ((x - m)^2 lies in [0, K^2] and has mean s^2)
==============  ====================================================================================================
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.intervals import LEAST_RATIO, Interval, normal, ratio


def mean(
    sums: Float64[np.ndarray, " 3"], covariance: Float64[np.ndarray, "3 3"], people_per_unit: float
) -> Interval | None:
    """Return the mean of numbers in [-1, 1] from (n, sum x, sum x^2); None where n is too close to 0."""
    n, first, second = (float(value) for value in sums)
    if n <= 0:
        return None
    spread = float(np.clip(second / n - (first / n) ** 2, 0, 1))
    noise = (float(covariance[1, 1]), float(covariance[0, 0]), float(covariance[0, 1]))
    return ratio(first, n, noise, people_per_unit * n * spread)


def variance(
    sums: Float64[np.ndarray, " 3"], covariance: Float64[np.ndarray, "3 3"], people_per_unit: float
) -> Interval | None:
    """Return the variance of numbers in [-1, 1] over records of people weighted 1; None as for the mean."""
    n, first, second = (float(value) for value in sums)
    if n <= 0 or n < LEAST_RATIO * math.sqrt(covariance[0, 0]):
        return None
    centre = first / n
    spread = second / n - centre**2
    gradient = np.array([(2 * centre**2 - second / n) / n, -2 * centre / n, 1 / n])
    farthest = (1 + min(1.0, abs(centre))) ** 2
    bounded = min(max(spread, 0.0), farthest)
    people = people_per_unit * max(0.0, farthest * bounded - bounded**2) / n
    return normal(spread, float(gradient @ covariance @ gradient), people)
