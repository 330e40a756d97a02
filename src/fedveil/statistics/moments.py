"""Means, variances and correlations from noisy sums of powers of numbers scaled to [-1, 1].

Every figure is a smooth function of sums; their noise is white and known. What the choice of people adds would need
moments that were not released, so it is bounded by those that were and by the declared range: intervals may be wide,
and cover. With s^2 the released second central moment and K the largest distance from the mean within the range:

==============  ====================================================================================================
figure          variance by the choice of n people, at most
==============  ====================================================================================================
mean            s^2 / n                      (a person's records are averaged: her spread is no more than theirs)
variance        (K^2 s^2 - s^4) / n          ((x - m)^2 lies in [0, K^2] and has mean s^2)
correlation     (1 - r^2)(1 + |r|)(K_i/s_i + K_j/s_j)^2 / (4 n)
==============  ====================================================================================================

The last: the influence function of r is (1 - r) u^2 / 2 - (1 + r) v^2 / 2 with u, v = (z_i +- z_j) / sqrt 2, z
standardised. Its mean absolute value is at most 1 - r^2, and its largest at most (1 + |r|) (K_i/s_i + K_j/s_j)^2 / 4.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.intervals import LEAST_RATIO, Interval, normal, ratio

LEAST_SPREAD = 6.0
"""How many standard deviations of its noise a variance is from 0 at least, where a correlation has an estimate."""
_PROJECTIONS = 200
_TOLERANCE = 1e-9


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


def correlations(
    n: float,
    first: Float64[np.ndarray, " m"],
    second: Float64[np.ndarray, "m m"],
    variances: tuple[float, float, float],
    people_per_unit: float,
) -> list[list[Interval | None]]:
    """Return r for every pair i < j, in rows; None where a number has too little spread for this noise.

    Args:
        n: noisy number of complete people.
        first: noisy sums of x_i.
        second: noisy sums of x_i x_j, symmetric.
        variances: of the noise of n, of a first and of a second sum.
        people_per_unit: how much more than one unit one person may add to a count.
    """
    size = len(first)
    return [
        [_correlation(n, first, second, (i, j), variances, people_per_unit) for j in range(i + 1, size)]
        for i in range(size)
    ]


def nearest_correlation(matrix: Float64[np.ndarray, "m m"]) -> Float64[np.ndarray, "m m"]:
    """Return the nearest correlation matrix (Frobenius): positive semidefinite, with ones on the diagonal.

    Alternating projections with Dykstra's correction; reference: Higham, "Computing the nearest correlation matrix"
    (IMA J. Numer. Anal. 22, 2002). For display: what is released stays as it is, and intervals are of that.

    Args:
        matrix: symmetric, with ones on the diagonal; noise may have taken its eigenvalues below 0.
    """
    found, correction = matrix, np.zeros_like(matrix)
    for _ in range(_PROJECTIONS):
        uncorrected = found - correction
        values, vectors = np.linalg.eigh(uncorrected)
        positive = (vectors * np.clip(values, 0, None)) @ vectors.T
        correction = positive - uncorrected
        found = positive.copy()
        np.fill_diagonal(found, 1.0)
        if np.abs(found - positive).max() < _TOLERANCE:
            break
    scale = 1 / np.sqrt(np.diag(positive))
    nearest: np.ndarray = positive * np.outer(scale, scale)
    return nearest


def displayed(rows: list[list[Interval | None]]) -> list[list[Interval | None]]:
    """Return correlations as they are shown: estimates of one correlation matrix, and ends between -1 and 1.

    The matrix is the nearest to the estimates of all numbers that have some. The ends are those of what was released.

    Args:
        rows: from :func:`correlations`.
    """
    size = len(rows)
    matrix = np.eye(size)
    there = np.zeros((size, size), dtype=np.bool_)
    for i, row in enumerate(rows):
        for j, one in enumerate(row, start=i + 1):
            if one is not None:
                matrix[i, j] = matrix[j, i] = one.estimate
                there[i, j] = there[j, i] = True
    some = np.flatnonzero(there.any(axis=0))
    matrix[np.ix_(some, some)] = nearest_correlation(matrix[np.ix_(some, some)])
    return [
        [None if one is None else one.within(matrix[i, j], -1, 1) for j, one in enumerate(row, start=i + 1)]
        for i, row in enumerate(rows)
    ]


def _correlation(
    n: float,
    first: Float64[np.ndarray, " m"],
    second: Float64[np.ndarray, "m m"],
    pair: tuple[int, int],
    variances: tuple[float, float, float],
    people_per_unit: float,
) -> Interval | None:
    i, j = pair
    of_n, of_first, of_second = variances
    if n < LEAST_RATIO * math.sqrt(of_n) or n <= 0:
        return None
    a, b = first[i] / n, first[j] / n
    si, sj = second[i, i] / n - a**2, second[j, j] / n - b**2
    if min(si, sj) < LEAST_SPREAD * math.sqrt(of_second) / n:
        return None
    joint = second[i, j] / n - a * b
    root = math.sqrt(si * sj)
    r = float(joint / root)
    # gradient of r by (n, x_i, x_j, x_i^2, x_j^2, x_i x_j), each over n
    by_i, by_j, by_ij = -r / (2 * si), -r / (2 * sj), 1 / root
    by_a, by_b = -2 * a * by_i - b * by_ij, -2 * b * by_j - a * by_ij
    by_n = -(
        by_a * a + by_b * b + by_i * second[i, i] / n + by_j * second[j, j] / n + by_ij * second[i, j] / n
    )
    noise = (
        by_n**2 * of_n + (by_a**2 + by_b**2) * of_first + (by_i**2 + by_j**2 + by_ij**2) * of_second
    ) / n**2
    reach = sum((1 + min(1.0, abs(centre))) / math.sqrt(spread) for centre, spread in ((a, si), (b, sj)))
    inside = float(np.clip(r, -1, 1))
    people = people_per_unit * (1 - inside**2) * (1 + abs(inside)) * reach**2 / (4 * n)
    return normal(r, float(noise), people)
