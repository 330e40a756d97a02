"""Test metrics of a regression, from noisy sums of errors and targets that are scaled by declared bounds.

With a = min(|prediction - target|, R) / R and y the target scaled from its declared bounds to [-1, 1], a record is the
unit vector of its state and, where it is readable, (a, a^2, y, y^2), whose norm is at most 2. With n people and means
m1, m2 of a, a^2, and mu, s2 mean and variance of y, h half the width of the bounds:

    MAE = R m1,    RMSE = R sqrt(m2),    R^2 = 1 - rho,    rho = kappa m2 / s2,    kappa = R^2 / h^2.

Variances are those of the delta method: by the noise exactly, to first order. By the choice of n people, with moments
that were not released bounded by those that were (a in [0, 1], |y - mu| <= K = 1 + |mu|):

=========  =============================================================================================
figure     variance by the choice of people
=========  =============================================================================================
m1         (m2 - m1^2) / n
m2         at most (m2 - m2^2) / n, for a^2 lies in [0, 1]
s2         at most (K^2 s2 - s2^2) / n, for (y - mu)^2 lies in [0, K^2]
rho        at most (kappa + rho K^2) rho / (s2 n): its influence is (kappa a^2 - rho (y - mu)^2) / s2, of
           two terms that are not negative, have the mean rho each, and are at most kappa / s2 and rho K^2 / s2
=========  =============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from scipy import sparse

from fedveil.population.columns import Column, ColumnTable, State
from fedveil.statistics.blocks import Block, Encoder, OneHot
from fedveil.statistics.cells import UNREADABLE, Partition
from fedveil.statistics.counts import LEAST_CLASS
from fedveil.statistics.evaluator import SCORE, TARGET, Evaluator, Figure, Group, Placed, numbers
from fedveil.statistics.intervals import Estimate, normal, ratio
from fedveil.statistics.moments import LEAST_SPREAD
from fedveil.statistics.strategy import Strategy

_STATES: Final = "states"
_POWERS: Final = "powers"


@dataclass(frozen=True)
class ErrorStates(Partition):
    """Whether error and target of a record lie within what is declared of them.

    Attributes:
        lower, upper: bounds of the target.
        largest: R, bound of the error.
    """

    lower: float
    upper: float
    largest: float

    @property
    def columns(self) -> tuple[str, ...]:
        """Prediction and target."""
        return (SCORE, TARGET)

    @property
    def labels(self) -> tuple[str, ...]:
        """Four."""
        return ("within", "larger error", "target out of bounds", UNREADABLE)

    def of(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        """Return the state of every record; a target out of bounds comes first."""
        predicted, target = table.numbers(SCORE), table.numbers(TARGET)
        readable = (predicted.state == State.VALID) & (target.state == State.VALID)
        outside = (target.values < self.lower) | (target.values > self.upper)
        large = np.abs(predicted.values - target.values) > self.largest
        return np.where(~readable, 3, np.where(outside, 2, np.where(large, 1, 0))).astype(np.int64)


@dataclass(frozen=True)
class ErrorPowers(Encoder):
    """(a, a^2, y, y^2) of a record; zero where prediction or target is unreadable.

    Attributes:
        lower, upper: bounds of the target.
        largest: R, bound of the error.
    """

    lower: float
    upper: float
    largest: float

    @property
    def columns(self) -> tuple[str, ...]:
        """Prediction and target."""
        return (SCORE, TARGET)

    @property
    def width(self) -> int:
        """Four."""
        return 4

    @property
    def norm(self) -> float:
        """2: every number is at most 1 in size."""
        return 2.0

    def rows(self, table: ColumnTable) -> sparse.csr_array:
        """Return the powers of every record."""
        predicted, target = table.numbers(SCORE), table.numbers(TARGET)
        error = np.minimum(np.abs(predicted.values - target.values) / self.largest, 1.0)
        y = 2 * (np.clip(target.values, self.lower, self.upper) - self.lower) / (self.upper - self.lower) - 1
        found = np.stack((error, error**2, y, y**2), axis=1)
        found[(predicted.state != State.VALID) | (target.state != State.VALID)] = 0.0
        return sparse.csr_array(found)


@dataclass(frozen=True)
class Amounts(Evaluator):
    """A number that is predicted.

    Attributes:
        lower, upper: declared bounds of the target; targets out of them are taken for a bound.
        largest: R; larger errors are taken for it.
    """

    measure: ClassVar[str] = "mae / largest_error"

    lower: float
    upper: float
    largest: float

    @property
    def compared(self) -> tuple[str, ...]:
        """Mean absolute error, root mean squared error, share of the variance that is explained."""
        return ("mae", "rmse", "r2")

    def columns(
        self, outputs: Float64[np.ndarray, "t k"], targets: Shaped[np.ndarray, "t *target"]
    ) -> dict[str, Column]:
        """Return prediction and target."""
        return {SCORE: numbers(outputs[:, 0]), TARGET: numbers(targets.astype(np.float64))}

    def blocks(self, name: str, groups: Partition, placed: Placed) -> tuple[Block, ...]:
        """Return states and powers."""
        declared = (self.lower, self.upper, self.largest)
        encoders = {_STATES: OneHot(ErrorStates(*declared)), _POWERS: ErrorPowers(*declared)}
        return tuple(
            Block(
                release=name,
                part=part,
                encoder=encoder,
                groups=groups,
                strategy=Strategy("flat", 0, encoder.width),
            )
            for part, encoder in encoders.items()
        )

    def estimates(self, group: Group, placed: Placed) -> Mapping[str, Estimate | None]:
        """Return the three figures."""
        found = _Moments(self, group)
        return {"mae": found.mae, "rmse": found.rmse, "r2": found.r2}

    def figures(self, everybody: Group, placed: Placed) -> Iterator[Figure]:
        """Yield every figure of all people."""
        found, states = _Moments(self, everybody), everybody.parts[_STATES]
        yield everybody.counted, "", normal(float(states.values.sum()), 4 * states.variance, 0.0)
        for name, estimate in self.estimates(everybody, placed).items():
            yield name, "", None if estimate is None else estimate.interval
        baseline = found.spread
        yield "rmse of the mean of all targets", "", None if baseline is None else baseline.interval
        total = float(states.values.sum())
        for place, name in (
            (1, "share of errors above largest_error"),
            (2, "share of targets out of bounds"),
        ):
            part = float(states.values[place])
            p = float(np.clip(part / total, 0, 1)) if total > 0 else 0.0
            noise = (states.variance, 4 * states.variance, states.variance)
            people = everybody.people_per_unit * max(total, 0.0) * p * (1 - p)
            yield name, "", ratio(part, total, noise, people)

    def predicted_error(self, variance: Mapping[str, float], people: float) -> float:
        """Return what noise alone gives the mean absolute error, as a part of R, where it is half of it."""
        return math.sqrt(variance[_POWERS] + 3 * variance[_STATES] / 4) / people


class _Moments:
    """Means of a group's powers, and the figures that follow."""

    def __init__(self, of: Amounts, group: Group) -> None:
        states, powers = group.parts[_STATES], group.parts[_POWERS]
        self._of, self._powers, self._per_unit = of, powers, group.people_per_unit
        self._n, self._of_n = float(states.values[:3].sum()), 3 * states.variance
        self._enough = self._n >= LEAST_CLASS * math.sqrt(self._of_n) and self._n > 0
        n = self._n if self._enough else 1.0
        self._m1, self._m2, self._mu, square = (float(value) / n for value in powers.values)
        self._s2 = square - self._mu**2
        self._farthest = (1 + min(1.0, abs(self._mu))) ** 2

    @property
    def mae(self) -> Estimate | None:
        """R m1."""
        spread = float(np.clip(self._m2 - self._m1**2, 0, 1))
        return self._scaled(self._of.largest, self._m1, (1, 0, 0, 0), self._m1, spread)

    @property
    def rmse(self) -> Estimate | None:
        """R sqrt(m2); None where m2 is not clearly above its noise."""
        m2 = self._m2
        if m2 * self._n < LEAST_SPREAD * math.sqrt(self._powers.variance):
            return None
        slope = 1 / (2 * math.sqrt(m2))
        inside = min(m2, 1.0)
        return self._scaled(
            self._of.largest, math.sqrt(m2), (0, slope, 0, 0), slope * m2, slope**2 * (inside - inside**2)
        )

    @property
    def spread(self) -> Estimate | None:
        """The error of naming the targets' mean, h sqrt(s2); None where s2 is not clearly above its noise."""
        if not self._varied:
            return None
        mu, s2 = self._mu, self._s2
        slope = 1 / (2 * math.sqrt(s2))
        people = slope**2 * max(0.0, self._farthest * s2 - s2**2)
        by = (0.0, 0.0, -2 * mu * slope, slope)
        return self._scaled(self._half, math.sqrt(s2), by, slope * (s2 - mu**2), people)

    @property
    def r2(self) -> Estimate | None:
        """1 - rho; None where the targets' variance is not clearly above its noise."""
        if not self._varied:
            return None
        mu, s2, kappa = self._mu, self._s2, (self._of.largest / self._half) ** 2
        rho = kappa * self._m2 / s2
        error = max(0.0, rho)
        people = (kappa + error * self._farthest) * error / s2
        by = (0.0, -kappa / s2, -2 * rho * mu / s2, rho / s2)
        return self._scaled(1.0, 1 - rho, by, -rho * mu**2 / s2, people)

    @property
    def _half(self) -> float:
        return (self._of.upper - self._of.lower) / 2

    @property
    def _varied(self) -> bool:
        return self._s2 * self._n >= LEAST_SPREAD * math.sqrt(self._powers.variance)

    def _scaled(
        self,
        factor: float,
        value: float,
        by_powers: tuple[float, float, float, float],
        by_n: float,
        people: float,
    ) -> Estimate | None:
        """Return factor x value; None where there are too few people.

        Args:
            factor: of everything.
            value: the figure.
            by_powers: n times its derivatives by the sums of powers.
            by_n: -n times that by n.
            people: n times its variance by the choice of people.
        """
        if not self._enough:
            return None
        squares = math.fsum(one**2 for one in by_powers)
        noise = (self._powers.variance * squares + self._of_n * by_n**2) / self._n**2
        return Estimate(
            value=factor * value,
            noise=factor**2 * noise,
            people=factor**2 * self._per_unit * people / self._n,
        )
