"""The estimating equation of survival times: a hazard that is constant between the times of a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedveil.data.columns import ColumnTable, State
from fedveil.statistics.inference.families import (
    REACH,
    Covariates,
    Family,
    Known,
    Target,
    Terms,
    Theta,
    predictor_of,
)


@dataclass(frozen=True)
class PiecewiseExponential(Family):
    """A survival time whose hazard is constant in every interval of a grid, times e^(x'beta).

    The first coefficients are log hazards at the centre of the covariates. A record is followed until its event, its
    censoring, or the time at which its cumulative hazard under theta reaches ``hazard`` = c. That time is known before
    it comes, so the martingale stopped there has mean zero in the model (optional stopping), and is at most
    max(1, c) = 1 in size. With the hazards of the intervals in the simplex of sum c <= 1 the squared norm of
    (M, x sum M) is convex, so its largest value is at a corner: max(2, |z|^2). An event at a point of the grid is one
    of the interval before it; what is after the grid's end counts as censored there.

    With late entry a record is followed from its entry on, and its cumulative hazard begins there at 0. The entry is
    known before anything of the record counts, so the martingale from the entry on still has mean zero among those
    who had no event before it. The hazards of the intervals are in the same simplex, so every bound stays the same.

    Attributes:
        grid: g_0 < ... < g_J, times.
        rate: a public guess at events per unit of time, to start from.
        hazard: c, at most 1.
        entry: column of the time at which a record came under observation; None: all are from the beginning.
    """

    name: ClassVar[str] = "survival"
    least: ClassVar[float] = 6.0
    exponential: ClassVar[bool] = True
    stopped: ClassVar[bool] = True
    usual: ClassVar[float] = 0.75

    time: str
    event: str
    grid: tuple[float, ...]
    rate: float
    hazard: float = 0.6
    entry: str | None = None

    @property
    def leading(self) -> tuple[str, ...]:
        """One log hazard an interval."""
        return tuple(
            f"log hazard {low:g} to {high:g}" for low, high in zip(self.grid, self.grid[1:], strict=False)
        )

    @property
    def advice(self) -> str:
        """Where the guessed rate says that nobody is followed any more, and longer intervals."""
        end = self.grid[0] + self.hazard / self.rate
        if end >= self.grid[-1]:
            return "longer intervals in inference.grid"
        return (
            f"an inference.grid that ends at {end:.4g} or before (there the hazard at inference.rate = {self.rate:g} "
            f"adds up to inference.hazard = {self.hazard:g}, to which records are followed)"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.time, self.event, *(() if self.entry is None else (self.entry,)))

    def score_norm(self, bound: float) -> float:
        """max(sqrt 2, B)."""
        return max(math.sqrt(2), bound)

    def curvature_norm(self, bound: float) -> float:
        """Return c B^2: hazards of all intervals add up to c at most."""
        return self.hazard * bound**2

    @property
    def expected(self) -> tuple[float, ...]:
        """Probability of an event in every interval, before the cumulative hazard is c and nobody being censored.

        It is the mean hazard that a record is followed through, for the martingale has mean zero.
        """
        with np.errstate(over="ignore"):
            left = np.exp(-np.minimum(self.rate * (np.array(self.grid) - self.grid[0]), self.hazard))
        return tuple((left[:-1] - left[1:]).tolist())

    @property
    def guess(self) -> float:
        return math.log(self.rate)

    def target(self, table: ColumnTable) -> Known:
        """Return time, event, and the entry if one is declared.

        A record whose entry is missing, negative, or not before its time is left out, like one without a time.
        """
        time, event = table.numbers(self.time), table.places(self.event)
        known = (time.state == State.VALID) & (event.state == State.VALID)
        found = [time.values, event.values.astype(np.float64)]
        if self.entry is not None:
            entry = table.numbers(self.entry)
            known &= (entry.state == State.VALID) & (entry.values >= 0) & (entry.values < time.values)
            found.append(np.where(known, entry.values, 0.0))
        return np.stack(found, axis=1), known

    def terms(self, covariates: Covariates, target: Target, theta: Theta) -> Terms:
        """Return (M, x sum M) and the sum over intervals of the hazard times the square of (e_j, x)."""
        grid, size = np.array(self.grid), len(self.leading)
        time, happened = target.T[:2]
        entry = target[:, 2] if target.shape[1] > 2 else np.full(len(time), -np.inf)
        begin = np.maximum(grid[:-1], entry[:, None])
        exposed = np.clip(time[:, None] - begin, 0, np.maximum(grid[1:] - begin, 0))
        predictor = theta[:size] + predictor_of(covariates, theta[size:])[:, None]
        hazards = exposed * np.exp(np.clip(predictor, -REACH, REACH))
        until = np.cumsum(hazards, axis=1)
        before = np.concatenate((np.zeros((len(time), 1)), until[:, :-1]), axis=1)
        followed = np.clip(self.hazard - before, 0, hazards)
        counted = (happened > 0) & (until[:, -1] <= self.hazard) & (time > begin[:, 0]) & (time <= grid[-1])
        martingale = -followed
        place = np.clip(np.searchsorted(grid, time, side="left") - 1, 0, size - 1)
        martingale[np.arange(len(time)), place] += counted
        score = np.concatenate((martingale, covariates * martingale.sum(axis=1)[:, None]), axis=1)
        curvature = np.zeros((len(time), len(theta), len(theta)))
        diagonal = np.arange(size)
        curvature[:, diagonal, diagonal] = followed
        crossed = followed[:, :, None] * covariates[:, None, :]
        curvature[:, :size, size:] = crossed
        curvature[:, size:, :size] = crossed.transpose(0, 2, 1)
        curvature[:, size:, size:] = (
            covariates[:, :, None] * covariates[:, None, :] * followed.sum(axis=1)[:, None, None]
        )
        return score, curvature
