"""Test metrics of a regression, from noisy sums of errors and targets that are scaled by declared bounds.

With a = min(|prediction - target|, R) / R and y the target scaled from its declared bounds to [-1, 1], a record is the
unit vector of its state and, where it is readable, (a, a^2, y, y^2), whose norm is at most 2. With n people and means
m1, m2 of a, a^2, and mu, s2 mean and variance of y, h half the width of the bounds:

    MAE = R m1,    RMSE = R sqrt(m2),    R^2 = 1 - rho,    rho = kappa m2 / s2,    kappa = R^2 / h^2.

The MAE has a normal interval, of variance (m2 - m1^2) / n by the choice of n people, with z^2 / 2 people added at
either end of [0, 1]. The others are shown whatever m2 and s2 are: figures shown only where those are many times
their noise are shown by luck, and their intervals would not cover. Moments that were not released are bounded by those
that were (a in [0, 1], |y - mu| <= K = 1 + |mu|):

=========  =============================================================================================
figure     interval
=========  =============================================================================================
m2         all t in [0, 1] with (m2 - t)^2 <= z^2 (noise + (t - t^2) / n), for a^2 lies in [0, 1]
s2         all t in [0, K^2] with (s2 - t)^2 <= z^2 (noise + (K^2 t - t^2) / n)
rho        Fieller's: all t >= 0 with (kappa m2 - t s2)^2 <= z^2 Var(kappa m2 - t s2). By the choice of
           people that is at most (kappa^2 m2 + t^2 K^2 s2) / n: kappa a^2 and t (y - mu)^2 are not negative
           and at most kappa and t K^2. Upper ends stand for m2 and s2 there. Where s2 is within z sd of 0,
           nothing bounds rho from above, nor R^2 from below.
=========  =============================================================================================

The noise of s2 is that of the sum of squares, of mu and of n: (1 + 4 mu^2) v + (s2 - mu^2)^2 v_n, over n^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from scipy import sparse

from fedveil.data.columns import Column, ColumnTable, State
from fedveil.statistics.blocks import Block, Encoder, OneHot
from fedveil.statistics.cells import UNREADABLE, Partition
from fedveil.statistics.evaluation.counts import LEAST_CLASS
from fedveil.statistics.evaluation.evaluator import (
    SCORE,
    TARGET,
    Evaluator,
    Figure,
    Group,
    ScoreBins,
    numbers,
)
from fedveil.statistics.intervals import (
    Bounded,
    Estimate,
    Interval,
    at_the_ends,
    interval_between,
    mean_within,
    normal,
    positive_ratio,
    ratio,
    share,
)

_STATES: Final = "states"
_POWERS: Final = "powers"


@dataclass(frozen=True)
class _Errors:
    """Prediction and target of a record.

    Attributes:
        largest: R, bound of the error.
    """

    largest: float
    columns: ClassVar[tuple[str, ...]] = (SCORE, TARGET)


class ErrorStates(_Errors, Partition):
    """Partition of records by whether their error lies within the declared range."""

    labels: ClassVar[tuple[str, ...]] = ("within", "larger error", UNREADABLE)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        predicted, target = table.numbers(SCORE), table.numbers(TARGET)
        readable = (predicted.state == State.VALID) & (target.state == State.VALID)
        large = np.abs(predicted.values - target.values) > self.largest
        return np.where(~readable, 2, np.where(large, 1, 0)).astype(np.int64)


@dataclass(frozen=True)
class ErrorPowers(_Errors, Encoder):
    """(a, a^2, y, y^2) of a record; zero where prediction or target is unreadable.

    Attributes:
        lower, upper: bounds of the target.
    """

    lower: float
    upper: float
    width: ClassVar[int] = 4
    norm: ClassVar[float] = 2.0  # of four numbers of at most 1 in size

    def rows(self, table: ColumnTable) -> sparse.csr_array:
        predicted, target = table.numbers(SCORE), table.numbers(TARGET)
        error = np.minimum(np.abs(predicted.values - target.values) / self.largest, 1.0)
        y = 2 * (np.clip(target.values, self.lower, self.upper) - self.lower) / (self.upper - self.lower) - 1
        values = np.stack((error, error**2, y, y**2), axis=1)
        values[(predicted.state != State.VALID) | (target.state != State.VALID)] = 0.0
        return sparse.csr_array(values)


@dataclass(frozen=True)
class Amounts(Evaluator):
    """A number that is predicted.

    Attributes:
        lower, upper: declared bounds of the target, within which the schema keeps it.
        largest: R; larger errors are taken for it.
    """

    measure: ClassVar[str] = "mae / max_standard_error"

    lower: float
    upper: float
    largest: float
    compared_figures: ClassVar[tuple[str, ...]] = ("mae", "rmse", "r2")

    def columns(
        self, outputs: Float64[np.ndarray, "t k"], targets: Shaped[np.ndarray, "t *target"]
    ) -> dict[str, Column]:
        return {SCORE: numbers(outputs[:, 0]), TARGET: numbers(targets.astype(np.float64))}

    def blocks(self, name: str, groups: Partition, placed: ScoreBins) -> tuple[Block, ...]:
        encoders = {
            _STATES: OneHot(ErrorStates(self.largest)),
            _POWERS: ErrorPowers(self.largest, self.lower, self.upper),
        }
        return tuple(
            Block(release=name, part=part, encoder=encoder, groups=groups)
            for part, encoder in encoders.items()
        )

    def estimates(self, group: Group, placed: ScoreBins) -> Mapping[str, Estimate | None]:
        moments = _Moments(self, group)
        return {"mae": moments.mae, "rmse": moments.rmse, "r2": moments.r2}

    def figures(self, everybody: Group, placed: ScoreBins) -> Iterator[Figure]:
        moments, states = _Moments(self, everybody), everybody.parts[_STATES]
        yield everybody.counted_unit, "", normal(float(states.values.sum()), 3 * states.variance, 0.0)
        for name, estimate in self.estimates(everybody, placed).items():
            yield name, "", None if estimate is None else estimate.interval
        baseline = moments.spread
        yield "rmse of the mean of all targets", "", None if baseline is None else baseline.interval
        total = float(states.values.sum())
        part = float(states.values[1])
        p = float(np.clip(part / total, 0, 1)) if total > 0 else 0.0
        noise = (states.variance, 3 * states.variance, states.variance)
        people = everybody.people_per_unit * (max(total, 0.0) * p * (1 - p) + at_the_ends(-p, 1 - p))
        yield "share of errors above max_standard_error", "", ratio(part, total, noise, people)

    def predicted_error(self, variance: Mapping[str, float], people: float) -> float:
        """Return what noise alone gives the mean absolute error, as a part of R, where it is half of it."""
        return math.sqrt(variance[_POWERS] + variance[_STATES] / 2) / people


class _Moments:
    """Means of a group's powers, and the figures that follow."""

    def __init__(self, target: Amounts, group: Group) -> None:
        states, powers = group.parts[_STATES], group.parts[_POWERS]
        self._of, self._powers, self._per_unit = target, powers, group.people_per_unit
        self._n, self._of_n = float(states.values[:2].sum()), 2 * states.variance
        self._enough = self._n >= LEAST_CLASS * math.sqrt(self._of_n) and self._n > 0
        n = self._n if self._enough else 1.0
        self._m1, self._m2, self._mu, square = (float(value) / n for value in powers.values)
        self._s2 = square - self._mu**2
        self._farthest = (1 + min(1.0, abs(self._mu))) ** 2
        v, of_n = powers.variance, self._of_n
        self._of_m2 = (v + of_n * self._m2**2) / n**2
        self._of_s2 = (v * (1 + 4 * self._mu**2) + of_n * (self._s2 - self._mu**2) ** 2) / n**2
        self._joint = of_n * self._m2 * (self._s2 - self._mu**2) / n**2
        self._per_person = self._per_unit / n

    @property
    def mae(self) -> Estimate | None:
        """R m1."""
        if not self._enough:
            return None
        factor, inside = self._of.largest**2, float(np.clip(self._m1, 0, 1))
        spread = float(np.clip(self._m2 - self._m1**2, 0, 1)) + at_the_ends(-inside, 1 - inside) / self._n
        noise = (self._powers.variance + self._of_n * self._m1**2) / self._n**2
        return Estimate(
            value=self._of.largest * self._m1, noise=factor * noise, people=factor * self._per_person * spread
        )

    @property
    def rmse(self) -> Estimate | None:
        """R sqrt(m2)."""
        return self._root(self._of.largest, self._m2, self._of_m2, 1.0)

    @property
    def spread(self) -> Estimate | None:
        """Return the RMSE of the constant prediction, the targets' mean: h sqrt(s2)."""
        return self._root(self._half, self._s2, self._of_s2, self._farthest)

    @property
    def r2(self) -> Estimate | None:
        """1 - rho, from s2 of one sd at least; its lower end is None where s2 is not clear of its noise."""
        if not self._enough:
            return None
        kappa, farthest = (self._of.largest / self._half) ** 2, self._farthest
        above, below = kappa * self._m2, self._s2
        noises = (kappa**2 * self._of_m2, self._of_s2, kappa * self._joint)
        _, m2 = mean_within(self._m2, self._of_m2, 1.0, self._per_person)
        _, s2 = mean_within(self._s2, self._of_s2, farthest, self._per_person)
        people = kappa**2 * m2 * self._per_person, farthest * s2 * self._per_person
        low, high = positive_ratio(above, below, (noises[0] + people[0], noises[1] + people[1], noises[2]))
        low_here, high_here = positive_ratio(above, below, noises)
        rho = max(above, 0.0) / max(below, math.sqrt(self._of_s2))
        rho = min(max(rho, low_here), math.inf if high_here is None else high_here)
        noise = max(0.0, noises[0] + rho**2 * noises[1] - 2 * rho * noises[2]) / s2**2
        chosen = (people[0] + rho**2 * people[1]) / s2**2
        ends = Interval(
            estimate=1 - rho,
            low=None if high is None else 1 - high,
            high=1 - low,
            low_here=None if high_here is None else 1 - high_here,
            high_here=1 - low_here,
            privacy=share(noise, chosen),
        )
        return Bounded(value=1 - rho, noise=noise, people=chosen, ends=ends)

    @property
    def _half(self) -> float:
        return (self._of.upper - self._of.lower) / 2

    def _root(self, factor: float, square: float, noise: float, top: float) -> Estimate | None:
        """Return factor x sqrt(square), the mean of numbers in [0, top]; None where there are too few people."""
        if not self._enough:
            return None
        ends, ends_here = (mean_within(square, noise, top, people) for people in (self._per_person, 0.0))
        inside = min(max(square, 0.0), top)
        value, slope = factor * math.sqrt(inside), factor / (2 * math.sqrt(max(inside, ends_here[1] / 4)))
        people = self._per_person * (top * inside - inside**2)
        low, high = ((factor * math.sqrt(pair[0]), factor * math.sqrt(pair[1])) for pair in (ends, ends_here))
        interval = interval_between(value, low, high, share(noise, people))
        return Bounded(value=value, noise=slope**2 * noise, people=slope**2 * people, ends=interval)
