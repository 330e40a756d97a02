"""Kaplan-Meier curves from noisy counts of exits and events by interval.

With r_j people at risk at the start of interval j (a suffix sum of exits), d_j events and c_j = exits - events censored
in it, the actuarial estimate is

    q_j = d_j / (r_j - c_j / 2),    S_k = prod_{j <= k} (1 - q_j).

The covariance of log S is L V L', L the lower triangle of ones and V = diag(q (1 - q) / n) / (1 - q)^2 + noise of the
events + q-weighted noise of the risk sets, n = r - c / 2 (Greenwood's formula with two more terms).

**Pointwise intervals** (:meth:`Curve.point`) hold all S that the estimate does not rule out, with the variance that S
itself would give it: S^2 times that of the noise of log S, and S (1 - S) / m for people (Rothman 1978: Wilson's
interval of m people); where log S is clear of 0 they hold the interval of log(-log S), too. Greenwood's variance is
(1 - S) / (S m) of log S, so that m is known from it; where hardly an event was seen, z^2 / 2 events, spread evenly over
the intervals, say how many people were followed. Near S = 1 such an interval is as narrow as noise and people allow;
that of log(-log S) is not, for noise is large beside -log S there.

**The curve** is the falling one that lies nearest to the estimates, weighted by their variances. Intervals are those of
the estimates as released, and hold the curve. The band's quantile is that of the largest absolute z of the Gaussian
vector log S; as S falls, it is cut off where a later lower end or an earlier upper end is nearer.
Reference: Kaplan and Meier, JASA 53 (1958); Greenwood (1926); Rothman, Journal of Chronic Diseases 31 (1978).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.blocks import isotonic_regression
from fedveil.statistics.intervals import NORMAL_95, Interval, interval_between

LEAST_AT_RISK: Final = 10.0
"""People at risk that an interval has an estimate from, by the lower end of what noise leaves open.

Its hazard would be a ratio with a denominator near 0; and where noise alone decides what is looked at, no band holds.
"""
MOST_WIDTH: Final = 0.9
"""Width of a pointwise interval above which it says nothing of a number between 0 and 1, and is not shown."""
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
        per_person: (k,) 1 / m: S (1 - S) / m is the variance of S by the choice of people.
    """

    grid: Float64[np.ndarray, " k"]
    survival: Float64[np.ndarray, " k"]
    covariance: Float64[np.ndarray, "k k"]
    noise: Float64[np.ndarray, "k k"]
    few: Float64[np.ndarray, " k"]
    per_person: Float64[np.ndarray, " k"]

    @cached_property
    def falling(self) -> Float64[np.ndarray, " k"]:
        """Return the falling curve in [0, 1] that lies nearest to S, weighted by the variances of log S."""
        if not len(self.survival):
            return self.survival
        weights = 1 / (np.diag(self.covariance) + self.few**2)
        return np.asarray(-isotonic_regression(-self.survival, sample_weight=weights, y_min=-1.0, y_max=0.0))

    def point(self, k: int) -> Interval | None:
        """Return S at the end of an interval with its pointwise interval; None where that says next to nothing."""
        both, by_noise, per_person = (
            float(part[k]) for part in (np.diag(self.covariance), np.diag(self.noise), self.per_person)
        )
        survival, estimate = float(np.clip(self.survival[k], 0, 1)), float(self.falling[k])
        ends, ends_here = (
            (min(estimate, *lows), max(estimate, *highs))
            for lows, highs in (
                zip(_possible(survival, by_noise, people), _far_from_one(survival, variance), strict=True)
                for people, variance in ((per_person, both), (0.0, by_noise))
            )
        )
        if ends[1] - ends[0] > MOST_WIDTH:
            return None
        return interval_between(estimate, ends, ends_here, by_noise / both if both > 0 else 1.0)

    def band(self) -> tuple[Float64[np.ndarray, " k"], Float64[np.ndarray, " k"]]:
        """Return the ends of the simultaneous 95 % band: S (1 ± c sd of log S), within [0, 1], as S falls.

        Greenwood's variance is 0 where no event was seen, and too small where few were: those of z^2 / 2 people add
        theirs, as people at the ends do for shares, z being the band's.
        """
        few = self.few * largest_z(self.covariance + np.outer(self.few, self.few)) / NORMAL_95
        covariance = self.covariance + np.outer(few, few)
        half = largest_z(covariance) * np.sqrt(np.diag(covariance)) * self.survival
        low, high = np.clip(self.survival - half, 0, 1), np.clip(self.survival + half, 0, 1)
        later, earlier = np.maximum.accumulate(low[::-1])[::-1], np.minimum.accumulate(high)
        return np.minimum(later, self.falling), np.maximum(earlier, self.falling)


def _possible(estimate: float, noise: float, per_person: float) -> tuple[float, float]:
    """Return the ends of all S in [0, 1] with (found - S)^2 <= z^2 (S^2 noise + S (1 - S) per_person).

    Args:
        estimate: the estimate, in [0, 1].
        noise: the variance of log S by the noise.
        per_person: 1 / m; 0 for these people.
    """
    z2 = NORMAL_95**2
    lead, middle = 1 - z2 * noise + z2 * per_person, estimate + z2 * per_person / 2
    root = math.sqrt(max(0.0, middle**2 - lead * estimate**2))
    low = estimate**2 / (middle + root) if middle + root > 0 else 0.0
    return low, min(1.0, (middle + root) / lead) if lead > 0 else 1.0


def _far_from_one(estimate: float, variance: float) -> tuple[float, float]:
    """Return the interval of log(-log S), which is skewed as few people make it, where log S is clear of 0; or S."""
    half = NORMAL_95 * math.sqrt(variance)
    if not 0 < estimate < 1 or half > -math.log(estimate):
        return estimate, estimate
    spread = math.exp(half / -math.log(estimate))
    return estimate**spread, estimate ** (1 / spread)


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
    happened, exited = events[0], exits[0][::-1][:size]
    effective = at_risk - np.clip(exited - happened, 0, None) / 2
    surely = effective - NORMAL_95 * np.sqrt(np.diag(of_risk))
    short = np.flatnonzero(surely < LEAST_AT_RISK)
    k = int(short[0]) if len(short) else size
    effective = effective[:k]
    raw_hazard = np.minimum(
        happened[:k] / effective, 0.999
    )  # below 0 by noise alone: cut off, it would pull S down
    hazard = np.maximum(raw_hazard, 0)
    by_events = 1 / (effective * (1 - hazard))
    by_risk = hazard * by_events
    people = np.diag(people_per_unit * hazard * (1 - hazard) / effective / (1 - hazard) ** 2)
    noise = np.outer(by_events, by_events) * events[1][:k, :k] + np.outer(by_risk, by_risk) * of_risk[:k, :k]
    lower = np.tril(np.ones((k, k)))
    likely = np.minimum(hazard + NORMAL_95**2 / 2 / size / effective, 0.999)
    odds = np.expm1(-np.cumsum(np.log1p(-likely)))
    return Curve(
        grid=np.array(grid[1 : k + 1]),
        survival=np.cumprod(1 - raw_hazard),
        covariance=lower @ (people + noise) @ lower.T,
        noise=lower @ noise @ lower.T,
        few=people_per_unit * NORMAL_95 / np.sqrt(2) / effective,
        per_person=people_per_unit * np.cumsum(likely / (1 - likely) / effective) / odds,
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
