"""Correlations and their intervals from noisy sums of columns x_i in [-1, 1].

The inputs are noisy n, first_i = sum x_i and second_ij = sum x_i x_j. Variances and covariances are estimated by

    s_ij = second_ij / n - first_i first_j / n^2,    s_ii = second_ii / n - first_i^2 / n^2 + v_first / n^2,

where v_first is the noise variance of first_i; it corrects the bias of the square. n^2 s_ij and n^2 s_ii are unbiased,
because the noise of different sums is independent. For correlation r and slope lambda = sd_j / sd_i, the statistic

    T(r, lambda) = s_ij - r (lambda s_ii + s_jj / lambda) / 2

is 0 up to noise and sampling error. It divides by no estimated variance, which noise can make 0 or negative. The
95 % interval is a test inversion in two steps:

1. Fieller's 99.5 % confidence set of lambda^2 = s_jj / s_ii.
2. The hull of all r in [-1, 1] with |T(r, lambda)| <= z sd(T) for a lambda of that set, with z of 95.5 %.

If T is normal, the interval misses the true r with probability at most 5 % (Bonferroni). If a variance may be 0, the
slope is unbounded and the interval is [-1, 1]. Every correlation is released with its interval: to show only those with
large estimated variances would select on noise, and the intervals would not cover.

The sampling variance of T over n people is at most (1 - r^2)(1 + |r|)(K_i s_j + K_j s_i)^2 / (4 n). Here s_i is the
standard deviation, replaced by the upper end of its interval, and K_i the largest distance from the mean within
[-1, 1]. Proof: the influence function of r is (1 - r) u^2 / 2 - (1 + r) v^2 / 2 with u, v = (z_i +- z_j) / sqrt 2 and
standardised z. Its mean absolute value is at most 1 - r^2, its maximum at most (1 + |r|)(K_i/s_i + K_j/s_j)^2 / 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.statistics.intervals import Interval, interval_between, mean_within, positive_ratio, share

_Z_SLOPE: Final = 2.807033768343811
"""Two-sided normal quantile of 99.5 %."""
_Z: Final = 2.0046544617650963
"""Two-sided normal quantile of 95.5 %."""
_SLOPES: Final = 9
_CORRELATIONS: Final = 33
_REFINEMENTS: Final = 4
_PROJECTIONS: Final = 200
_TOLERANCE: Final = 1e-9
_LEAST: Final = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Noisy sums over people without a missing value; the noise of different sums is independent.

    Attributes:
        n: noisy number of people.
        first: (m,) sums of x_i.
        second: (m, m) sums of x_i x_j, symmetric.
        variances: noise variances of n, of a first and of a second sum.
        people_per_unit: how much more than one unit one person may add to a count.
    """

    n: float
    first: Float64[np.ndarray, " m"]
    second: Float64[np.ndarray, "m m"]
    variances: tuple[float, float, float]
    people_per_unit: float


def correlations(sums: Sums) -> list[list[Interval]]:
    """Return the correlation of each pair i < j: row i holds j = i + 1, ..., m - 1. Requires n > 0."""
    size = len(sums.first)
    return [[_Pair.from_sums(sums, i, j).interval for j in range(i + 1, size)] for i in range(size)]


def nearest_correlation(matrix: Float64[np.ndarray, "m m"]) -> Float64[np.ndarray, "m m"]:
    """Return the nearest correlation matrix (Frobenius): positive semidefinite, with ones on the diagonal.

    Alternating projections with Dykstra's correction; reference: Higham, "Computing the nearest correlation matrix"
    (IMA J. Numer. Anal. 22, 2002). For display only: released values and intervals do not change.

    Args:
        matrix: symmetric, with ones on the diagonal; noise may have made eigenvalues negative.
    """
    projected, correction = matrix, np.zeros_like(matrix)
    for _ in range(_PROJECTIONS):
        uncorrected = projected - correction
        values, vectors = np.linalg.eigh(uncorrected)
        positive = (vectors * np.clip(values, 0, None)) @ vectors.T
        correction = positive - uncorrected
        projected = positive.copy()
        np.fill_diagonal(projected, 1.0)
        if np.abs(projected - positive).max() < _TOLERANCE:
            break
    scale = 1 / np.sqrt(np.diag(positive))
    nearest: np.ndarray = positive * np.outer(scale, scale)
    return nearest


def display_correlations(rows: list[list[Interval]]) -> list[list[Interval]]:
    """Return correlations for display: estimates replaced by the nearest correlation matrix, intervals unchanged.

    Args:
        rows: from :func:`correlations`.
    """
    matrix = np.eye(len(rows))
    upper = np.triu_indices(len(rows), 1)
    matrix[upper] = [interval.estimate for row in rows for interval in row]
    nearest = nearest_correlation(matrix + np.triu(matrix, 1).T)
    return [
        [replace(interval, estimate=float(nearest[i, j])) for j, interval in enumerate(row, start=i + 1)]
        for i, row in enumerate(rows)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pair:
    """Estimates for one pair of columns. Entries of ``raw`` and ``spread`` are in the order (ij, ii, jj).

    Attributes:
        centre: (2,) means of x_i and x_j.
        raw: (3,) second moments about 0.
        spread: (3,) covariance and variances, s_ij, s_ii, s_jj.
        noise: noise variances of n, a first and a second sum, divided by n^2.
        per_person: 1 / n, in people.
    """

    centre: Float64[np.ndarray, " 2"]
    raw: Float64[np.ndarray, " 3"]
    spread: Float64[np.ndarray, " 3"]
    noise: tuple[float, float, float]
    per_person: float

    @classmethod
    def from_sums(cls, sums: Sums, i: int, j: int) -> _Pair:
        centre = sums.first[[i, j]] / sums.n
        raw = sums.second[[i, i, j], [j, i, j]] / sums.n
        of_n, of_first, of_second = (variance / sums.n**2 for variance in sums.variances)
        products = np.array([centre[0] * centre[1], centre[0] ** 2, centre[1] ** 2])
        return cls(
            centre=centre,
            raw=raw,
            spread=raw - products + np.array([0, of_first, of_first]),
            noise=(of_n, of_first, of_second),
            per_person=sums.people_per_unit / sums.n,
        )

    @property
    def interval(self) -> Interval:
        """Return the correlation with its interval, within [-1, 1]."""
        r, (_, first, second) = self._estimate, self._clear
        weights = self._weights(np.array([r]), np.array([np.sqrt(second / first)]))
        noise, people = (
            float(self._noise(weights)[0, 0]),
            float(self._people(np.array([r]), self.per_person)[0]),
        )
        return interval_between(r, self._ends(self.per_person), self._ends(0.0), share(noise, people))

    @property
    def _clear(self) -> Float64[np.ndarray, " 3"]:
        """(3,) ``spread`` with each variance raised to at least one standard deviation of its noise."""
        sd = np.sqrt(self._noise(np.eye(3)))
        return np.array([self.spread[0], *np.maximum(np.maximum(self.spread, sd)[1:], _LEAST)])

    @property
    def _estimate(self) -> float:
        joint, first, second = self._clear
        return float(np.clip(joint / np.sqrt(first * second), -1, 1))

    def _noise(self, weights: Float64[np.ndarray, "*n 3"]) -> Float64[np.ndarray, "*n"]:
        """Return the noise variance of weights @ spread, products of two noises included."""
        of_n, of_first, of_second = self.noise
        (a, b), (joint, first, second) = self.centre, np.moveaxis(weights, -1, 0)
        squares = joint**2 + first**2 + second**2
        variance: np.ndarray = (
            of_second * (1 + of_n) * squares
            + of_n * (weights @ self.raw) ** 2
            + of_first * ((joint * b + 2 * first * a) ** 2 + (joint * a + 2 * second * b) ** 2)
            + of_first**2 * (2 * squares - joint**2)
        )
        return variance

    def _people(self, r: Float64[np.ndarray, " R"], per_person: float) -> Float64[np.ndarray, " R"]:
        """Return an upper bound of the sampling variance of T."""
        reach = float(self._farthest @ np.sqrt(self._largest(per_person))[::-1])
        variance: np.ndarray = per_person * (1 - r**2) * (1 + np.abs(r)) * reach**2 / 4
        return variance

    @property
    def _farthest(self) -> Float64[np.ndarray, " 2"]:
        """(2,) K_i and K_j, the largest distances from the means within [-1, 1]."""
        return np.asarray(1 + np.minimum(1, np.abs(self.centre)))

    def _largest(self, per_person: float) -> Float64[np.ndarray, " 2"]:
        """Return (2,) upper ends of the intervals of both variances."""
        _, *noise = self._noise(np.eye(3)).tolist()
        return np.array(
            [
                mean_within(float(value), of_value, float(farthest) ** 2, per_person)[1]
                for value, of_value, farthest in zip(self.spread[1:], noise, self._farthest, strict=True)
            ]
        )

    def _slopes(self, per_person: float) -> Float64[np.ndarray, " L"] | None:
        """Return a grid of the confidence set of slopes; None if it is unbounded."""
        _, of_first, of_second = self._noise(np.eye(3)).tolist()
        first, second = per_person * self._farthest**2 * self._largest(per_person)
        low, high = positive_ratio(
            float(self.spread[2]),
            float(self.spread[1]),
            (of_second + second, of_first + first, self.noise[0] * float(self.raw[1] * self.raw[2])),
            _Z_SLOPE,
        )
        if low <= 0 or high is None:
            return None
        slopes: np.ndarray = np.sqrt(
            np.append(np.geomspace(low, high, _SLOPES), self.spread[2] / self.spread[1])
        )
        return slopes

    @staticmethod
    def _weights(
        r: Float64[np.ndarray, " R"], slopes: Float64[np.ndarray, " L"]
    ) -> Float64[np.ndarray, "R L 3"]:
        """Return the coefficients of s_ij, s_ii and s_jj in T, for all r and slopes."""
        first, second = -np.outer(r, slopes) / 2, -np.outer(r, 1 / slopes) / 2
        return np.stack((np.ones_like(first), first, second), axis=-1)

    def _ends(self, per_person: float) -> tuple[float, float]:
        """Return the hull of all accepted correlations, rounded outwards by less than 10^-4.

        If no correlation of the grid is accepted, the end is -1 or 1.
        """
        slopes = self._slopes(per_person)
        if slopes is None:
            return -1.0, 1.0

        def is_within_noise(r: Float64[np.ndarray, " R"]) -> Bool[np.ndarray, " R"]:
            weights = self._weights(r, slopes)
            variance = self._noise(weights) + self._people(r, per_person)[:, None]
            accepted: np.ndarray = (np.abs(weights @ self.spread) <= _Z * np.sqrt(variance)).any(axis=1)
            return accepted

        def end(sign: float) -> float:
            grid = np.linspace(-sign, sign, _CORRELATIONS)
            inside, outside = self._estimate, sign
            for _ in range(_REFINEMENTS):
                last = int(np.flatnonzero(is_within_noise(grid)).max(initial=-1))
                if last >= 0:
                    inside, outside = grid[last], grid[min(last + 1, len(grid) - 1)]
                grid = np.linspace(inside, outside, _CORRELATIONS)
            return float(outside)

        return min(end(-1.0), self._estimate), max(end(1.0), self._estimate)
