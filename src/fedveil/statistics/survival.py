"""Kaplan-Meier curves from noisy counts of exits and events by interval.

With r_j people at risk at the start of interval j (a suffix sum of exits), d_j events and c_j = exits - events censored
in it, the actuarial estimate is

    q_j = d_j / (r_j - c_j / 2),    S_k = prod_{j <= k} (1 - q_j).

The covariance of log S is L V L', L the lower triangle of ones and V = diag(q (1 - q) / n) / (1 - q)^2 + noise of the
events + q-weighted noise of the risk sets, n = r - c / 2 (Greenwood's formula with two more terms). Pointwise intervals
are of log(-log S), under noise joined with those of log S; the band's quantile is that of the largest absolute z of the
same Gaussian vector.
Reference: Kaplan and Meier, JASA 53 (1958); Greenwood (1926).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.intervals import NORMAL_95, Interval, between

LEAST_AT_RISK: Final = 10.0
"""People at risk that an interval has an estimate from, by the lower end of what noise leaves open.

Its hazard would be a ratio with a denominator near 0; and where noise alone decides what is looked at, no band holds.
"""
_DRAWS: Final = 4000


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A survival curve on a grid.

    Attributes:
        grid: (k,) times at the ends of the intervals that have an estimate: those before the first that may have too
            few at risk.
        survival: (k,) S; noise may take it above 1.
        covariance: (k, k) of log S.
        noise: (k, k) the part of it that is noise.
        few: (k,) what the events of z^2 / 2 more people would add to the standard deviation of log S.
    """

    grid: Float64[np.ndarray, " k"]
    survival: Float64[np.ndarray, " k"]
    covariance: Float64[np.ndarray, "k k"]
    noise: Float64[np.ndarray, "k k"]
    few: Float64[np.ndarray, " k"]

    def point(self, k: int) -> Interval:
        """Return S at the end of an interval with its pointwise interval, of log(-log S).

        Where there is noise it is the union with that of log S: near S = 1 noise is large beside -log S, and the
        interval of log(-log S) alone may lie far to one side.
        """
        s = float(np.clip(self.survival[k], 1e-9, 1 - 1e-9))
        both, here = float(self.covariance[k, k]), float(self.noise[k, k])

        def ends(variance: float) -> tuple[float, float]:
            half = NORMAL_95 * np.sqrt(variance)
            with np.errstate(over="ignore"):
                spread = np.exp(half / -np.log(s))
            low, high = float(s**spread), float(s ** (1 / spread))
            if not here:
                return low, high
            return min(low, max(0.0, s * (1 - half))), max(high, min(1.0, s * (1 + half)))

        estimate = float(np.clip(self.survival[k], 0, 1))
        return between(estimate, ends(both), ends(here), here / both if both > 0 else 1.0)

    def band(self) -> tuple[Float64[np.ndarray, " k"], Float64[np.ndarray, " k"]]:
        """Return the ends of the simultaneous 95 % band: S (1 ± c sd of log S), within [0, 1].

        Greenwood's variance is 0 where no event was seen, and too small where few were: those of z^2 / 2 people add
        theirs, as people at the ends do for shares.
        """
        covariance = self.covariance + np.outer(self.few, self.few)
        half = largest_z(covariance) * np.sqrt(np.diag(covariance)) * self.survival
        return np.clip(self.survival - half, 0, 1), np.clip(self.survival + half, 0, 1)


def curve(
    exits: tuple[Float64[np.ndarray, " J1"], Float64[np.ndarray, "J1 J1"]],
    events: tuple[Float64[np.ndarray, " J"], Float64[np.ndarray, "J J"]],
    grid: tuple[float, ...],
    people_per_unit: float,
) -> Curve:
    """Return the curve of one group.

    Args:
        exits: counts by interval, LAST FIRST (beyond the grid; J; ...; 1), and the covariance of their noise.
        events: counts by interval, first first, and the covariance of their noise.
        grid: (J + 1,) times.
        people_per_unit: how much more than one unit one person may add to a count.
    """
    size = len(grid) - 1
    suffix = np.tril(np.ones((size + 1, size + 1)))
    at_risk = (suffix @ exits[0])[::-1][:size]
    of_risk = (suffix @ exits[1] @ suffix.T)[::-1, ::-1][:size, :size]
    happened, left = events[0], exits[0][::-1][:size]
    effective = at_risk - np.clip(left - happened, 0, None) / 2
    surely = effective - NORMAL_95 * np.sqrt(np.diag(of_risk))
    short = np.flatnonzero(surely < LEAST_AT_RISK)
    k = int(short[0]) if len(short) else size
    effective = effective[:k]
    found = np.minimum(
        happened[:k] / effective, 0.999
    )  # below 0 by noise alone: cut off, it would pull S down
    hazard = np.maximum(found, 0)
    by_events = 1 / (effective * (1 - hazard))
    by_risk = hazard * by_events
    people = np.diag(people_per_unit * hazard * (1 - hazard) / effective / (1 - hazard) ** 2)
    noise = np.outer(by_events, by_events) * events[1][:k, :k] + np.outer(by_risk, by_risk) * of_risk[:k, :k]
    lower = np.tril(np.ones((k, k)))
    return Curve(
        grid=np.array(grid[1 : k + 1]),
        survival=np.cumprod(1 - found),
        covariance=lower @ (people + noise) @ lower.T,
        noise=lower @ noise @ lower.T,
        few=people_per_unit * NORMAL_95 / np.sqrt(2) / effective,
    )


def largest_z(covariance: Float64[np.ndarray, "k k"]) -> float:
    """Return the 95 % quantile of the largest absolute z of a Gaussian vector, simulated with a fixed public seed."""
    sd = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    if not len(sd):
        return NORMAL_95
    values, vectors = np.linalg.eigh(covariance / np.outer(sd, sd))
    root = vectors * np.sqrt(np.clip(values, 0, None))
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(sd))) @ root.T
    return float(np.quantile(np.abs(draws).max(axis=1), 0.95))
