"""Families of estimating equations whose size is bounded for every record, whatever its cells hold.

A record with covariates x has z = (1, x) and the weight a = min(1, B / |z|)^2 in

    g(theta) = sum of a psi,    psi = z r(y, z'theta),    E[r | x] = 0 in the model.

The weight depends on x alone, so g has mean zero at the true theta for ANY bound B: nothing is biased by it. The score
itself is never shortened. Reference: Mallows-type weights, Hampel, Ronchetti, Rousseeuw, Stahel, "Robust Statistics"
(1986), section 6.3.

========  =================================  =========  ===========================  ==============
family    r                                  |a psi|    curvature v of a v z z'      |a v z z'|
========  =================================  =========  ===========================  ==============
logistic  y - p                              B          p (1 - p)                    B^2 / 4
linear    residual cut at k                  B k        1 where it is not cut        B^2
poisson   min(y, c) - E[min(Y, c)]           B c        mu P(Y < c)                  B^2 max of v
survival  stopped martingale, by interval    see there  cumulative hazard            c B^2
========  =================================  =========  ===========================  ==============
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit, pdtr, pdtrc

from fedveil.data.columns import ColumnTable, State

Each: TypeAlias = Float64[np.ndarray, " n"]
"""(n,) one number per record."""
Known: TypeAlias = tuple[Float64[np.ndarray, "n t"], Bool[np.ndarray, " n"]]
"""Targets (n, t), and which of the n records have all of them."""
Covariates: TypeAlias = Float64[np.ndarray, "n p"]
Target: TypeAlias = Float64[np.ndarray, "n t"]
Theta: TypeAlias = Float64[np.ndarray, " d"]
Terms: TypeAlias = tuple[Float64[np.ndarray, "n d"], Float64[np.ndarray, "n d d"]]
"""Every record's score and curvature."""

REACH = 30.0
"""Largest linear predictor in absolute value: beyond it a probability is within 1e-13 of 0 or 1."""


class Family(ABC):
    """One estimating equation.

    Attributes:
        name: in a request.
        leading: names of the coefficients before those of the covariates.
        least: how many standard deviations of its noise the smallest eigenvalue of the curvature must be from 0, for
            intervals to hold (measured; docs/theory/inference.md).
        exponential: whether the mean is e^predictor, so that the curvature changes with every step.
        stopped: whether records are followed up to a hazard under theta, so that what they add ends there.
        usual: the bound B of (1, x), as a part of its expected length, where none is given. A larger one needs more
            noise for all, above all for the curvature; a smaller one gives long records less weight.
        curved: whether the mean of the target is no straight line in its predictor.
        multiplies: whether e^coefficient is a ratio (of odds, rates, hazards).
        unit: unit of a coefficient on the scale of the equation, in units of the target.
        origin: what is added to the intercept, in units of the target.
    """

    name: ClassVar[str]
    least: ClassVar[float] = 3.0
    exponential: ClassVar[bool] = False
    stopped: ClassVar[bool] = False
    usual: ClassVar[float] = 0.875
    curved: ClassVar[bool] = True
    multiplies: ClassVar[bool] = True

    @property
    def unit(self) -> float:
        """1, unless a family has a scale of its own."""
        return 1.0

    @property
    def origin(self) -> float:
        """0, unless a family has a centre."""
        return 0.0

    @property
    def leading(self) -> tuple[str, ...]:
        """Return the names of the leading coefficients; the intercept by default."""
        return ("intercept",)

    @property
    def guess(self) -> float:
        """Leading coefficients at the start; 0, unless a family has a rate."""
        return 0.0

    @property
    def advice(self) -> str:
        """Return advice for more information other than fewer columns; empty by default."""
        return ""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the target."""

    @abstractmethod
    def score_norm(self, bound: float) -> float:
        """Return the largest l2 norm of a record's weighted score.

        Args:
            bound: B >= 1, of the covariates.
        """

    @abstractmethod
    def curvature_norm(self, bound: float) -> float:
        """Return the largest Frobenius norm of a record's weighted curvature."""

    @property
    @abstractmethod
    def expected(self) -> tuple[float, ...]:
        """Return a record's expected curvature by leading coefficient, from declared numbers, without effects."""

    def start(self, n_covariates: int) -> Theta:
        """Return a public theta to begin from: the guess, and no effects."""
        return np.concatenate((np.full(len(self.leading), self.guess), np.zeros(n_covariates)))

    def mean(self, predictor: float) -> tuple[float, float]:
        """Return the mean of the target (of a hazard) at a predictor, and its derivative; e^predictor here."""
        return math.exp(predictor), math.exp(predictor)

    @abstractmethod
    def target(self, table: ColumnTable) -> Known:
        """Return the target on the scale of the equation."""

    @abstractmethod
    def terms(self, covariates: Covariates, target: Target, theta: Theta) -> Terms:
        """Return every record's score and curvature at theta, before the weight of its covariates."""


@dataclass(frozen=True)
class _Generalised(Family):
    """A family with one linear predictor."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @abstractmethod
    def residual(self, y: Each, predictor: Each) -> tuple[Each, Each]:
        """Return r and v."""

    def mean(self, predictor: float) -> tuple[float, float]:
        """Return what is subtracted from a target in r, and v."""
        r, v = self.residual(np.zeros(1), np.array([predictor]))
        return -float(r[0]), float(v[0])

    def terms(self, covariates: Covariates, target: Target, theta: Theta) -> Terms:
        """Return z r and v z z'."""
        z = np.concatenate((np.ones((len(covariates), 1)), covariates), axis=1)
        r, v = self.residual(target[:, 0], np.clip(predictor_of(z, theta), -REACH, REACH))
        return z * r[:, None], (z * v[:, None])[:, :, None] * z[:, None, :]


@dataclass(frozen=True)
class Logistic(_Generalised):
    """A 0/1 target whose log-odds are linear; e^coefficient is an odds ratio.

    Attributes:
        rate: a public guess at the share of records with a 1, to start from; None: one half.
    """

    name: ClassVar[str] = "logistic"

    rate: float | None = None

    @property
    def guess(self) -> float:
        return 0.0 if self.rate is None else float(logit(self.rate))

    @property
    def expected(self) -> tuple[float, ...]:
        """P (1 - p) at the guess; without one .2, as of probabilities between .28 and .72."""
        return (0.2 if self.rate is None else self.rate * (1 - self.rate),)

    def score_norm(self, bound: float) -> float:
        """B: a residual y - p is at most 1."""
        return bound

    def curvature_norm(self, bound: float) -> float:
        """B^2 / 4: p (1 - p) is at most 1/4."""
        return bound**2 / 4

    def target(self, table: ColumnTable) -> Known:
        """Return the place of the second category, 0 or 1."""
        column = table.places(self.column)
        return column.values.astype(np.float64)[:, None], column.state == State.VALID

    def residual(self, y: Each, predictor: Each) -> tuple[Each, Each]:
        """Return y - p and p (1 - p)."""
        p = expit(predictor)
        return y - p, p * (1 - p)


@dataclass(frozen=True)
class Linear(_Generalised):
    """A number whose mean is linear, by Huber's equation: residuals count up to ``cut``.

    The scale of the equation is cut / 2: residuals end at 2, and steps do not depend on the target's unit.

    Attributes:
        centre: a public value of the target that the first step starts from.
        cut: k, in units of the target; twice the standard deviation of the residuals is a good choice, and intervals
            hold for any where errors are symmetric.
    """

    name: ClassVar[str] = "linear"
    curved: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False

    centre: float
    cut: float
    expected: ClassVar[tuple[float, ...]] = (0.9,)  # one residual of ten is cut

    @property
    def unit(self) -> float:
        return self.cut / 2

    @property
    def origin(self) -> float:
        return self.centre

    def score_norm(self, bound: float) -> float:
        """2 B."""
        return 2 * bound

    def curvature_norm(self, bound: float) -> float:
        """B^2."""
        return bound**2

    def target(self, table: ColumnTable) -> Known:
        """Return the centred number on the scale of the equation; infinite ones are cut like any other."""
        column = table.numbers(self.column)
        return ((column.values - self.centre) / self.unit)[:, None], column.state == State.VALID

    def residual(self, y: Each, predictor: Each) -> tuple[Each, Each]:
        """Return the residual cut at 2, and 1 where it was not."""
        whole = y - predictor
        return np.clip(whole, -2, 2), (np.abs(whole) <= 2).astype(np.float64)


@dataclass(frozen=True)
class Poisson(_Generalised):
    """A count whose log-mean is linear, counted up to ``cap``; e^coefficient is a ratio of rates.

    Attributes:
        cap: c; larger counts are taken for it, on both sides of the equation.
        rate: a public guess at the mean count, to start from.
    """

    name: ClassVar[str] = "poisson"
    least: ClassVar[float] = 6.0
    exponential: ClassVar[bool] = True
    usual: ClassVar[float] = 0.75

    cap: int
    rate: float = 1.0

    def score_norm(self, bound: float) -> float:
        """B c: both terms of the residual lie in [0, c]."""
        return bound * self.cap

    def curvature_norm(self, bound: float) -> float:
        """B^2 times the largest curvature."""
        return bound**2 * self.largest

    @cached_property
    def largest(self) -> float:
        """Return the largest mu P(Y < c) over all means; curvatures are cut there."""
        optimum = minimize_scalar(
            lambda mu: -mu * pdtr(self.cap - 1, mu), bounds=(0, 3.0 * self.cap), method="bounded"
        )
        return float(-optimum.fun) * (1 + 1e-6)

    @property
    def guess(self) -> float:
        return math.log(self.rate)

    @property
    def expected(self) -> tuple[float, ...]:
        """Mu P(Y < c) at the guess."""
        return (self.mean(self.guess)[1],)

    def target(self, table: ColumnTable) -> Known:
        """Return the count, from 0 to the cap."""
        column = table.numbers(self.column)
        return np.clip(column.values, 0, self.cap)[:, None], column.state == State.VALID

    def residual(self, y: Each, predictor: Each) -> tuple[Each, Each]:
        """Return min(y, c) - E[min(Y, c)] and the derivative of the latter, mu P(Y < c).

        k P(Y = k) = mu P(Y = k - 1), so E[min(Y, c)] = mu P(Y < c - 1) + c P(Y >= c), whatever c, without a sum.
        """
        mu = np.exp(predictor)
        fewer = pdtr(self.cap - 2, mu) if self.cap > 1 else np.zeros_like(mu)
        mean = mu * fewer + self.cap * pdtrc(self.cap - 1, mu)
        curvature = np.minimum(mu * pdtr(self.cap - 1, mu), self.largest)
        return np.minimum(y, self.cap) - np.clip(mean, 0, self.cap), curvature


def predictor_of(
    z: Float64[np.ndarray, "n p"], theta: Float64[np.ndarray, " p"]
) -> Float64[np.ndarray, " n"]:
    """Return z'theta of every record, column by column.

    A product of matrices rounds a row by how many others it is computed with, so that who is there would move
    everybody's stored numbers, and no bound has that.
    """
    predictor = np.zeros(len(z))
    for column, weight in zip(z.T, theta, strict=True):
        predictor += column * weight
    return predictor


# --- survival times -----------------------------------------------------------------------------------------
# The estimating equation of survival times: a hazard that is constant between the times of a grid.


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
        """Return the names of the leading coefficients, one log hazard per interval."""
        return tuple(
            f"log hazard {low:g} to {high:g}" for low, high in zip(self.grid, self.grid[1:], strict=False)
        )

    @property
    def advice(self) -> str:
        """Advise a shorter follow-up, ended where the guessed rate leaves nobody at risk, and longer intervals."""
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
            surviving = np.exp(-np.minimum(self.rate * (np.array(self.grid) - self.grid[0]), self.hazard))
        return tuple((surviving[:-1] - surviving[1:]).tolist())

    @property
    def guess(self) -> float:
        return math.log(self.rate)

    def target(self, table: ColumnTable) -> Known:
        """Return time, event, and the entry if one is declared.

        A record whose entry is missing, negative, or not before its time is left out, like one without a time.
        """
        time, event = table.numbers(self.time), table.places(self.event)
        complete = (time.state == State.VALID) & (event.state == State.VALID)
        columns = [time.values, event.values.astype(np.float64)]
        if self.entry is not None:
            entry = table.numbers(self.entry)
            complete &= (entry.state == State.VALID) & (entry.values >= 0) & (entry.values < time.values)
            columns.append(np.where(complete, entry.values, 0.0))
        return np.stack(columns, axis=1), complete

    def follow(
        self, target: Target, log_hazards: Float64[np.ndarray, "n j"]
    ) -> tuple[Float64[np.ndarray, "n j"], Float64[np.ndarray, "n j"]]:
        """Return the event of every record by interval, and the hazard through which it is followed there.

        Their difference is the stopped martingale. A record has at most one event, and its hazards add up to at most c.

        Args:
            target: (n, 2) of time and event, or (n, 3) with the entry.
            log_hazards: (n, j) log hazard of every record in every interval.
        """
        grid, size = np.array(self.grid), len(self.leading)
        time, happened = target.T[:2]
        entry = target[:, 2] if target.shape[1] > 2 else np.full(len(time), -np.inf)
        begin = np.maximum(grid[:-1], entry[:, None])
        exposed = np.clip(time[:, None] - begin, 0, np.maximum(grid[1:] - begin, 0))
        hazards = exposed * np.exp(np.clip(log_hazards, -REACH, REACH))
        until = np.cumsum(hazards, axis=1)
        before = np.concatenate((np.zeros((len(time), 1)), until[:, :-1]), axis=1)
        followed = np.clip(self.hazard - before, 0, hazards)
        events = np.zeros_like(followed)
        interval = np.clip(np.searchsorted(grid, time, side="left") - 1, 0, size - 1)
        counted = (happened > 0) & (until[:, -1] <= self.hazard) & (time > begin[:, 0]) & (time <= grid[-1])
        events[np.arange(len(time)), interval] = counted
        return events, followed

    def terms(self, covariates: Covariates, target: Target, theta: Theta) -> Terms:
        """Return (M, x sum M) and the sum over intervals of the hazard times the square of (e_j, x)."""
        size = len(self.leading)
        predictor = theta[:size] + predictor_of(covariates, theta[size:])[:, None]
        events, followed = self.follow(target, predictor)
        martingale = events - followed
        score = np.concatenate((martingale, covariates * martingale.sum(axis=1)[:, None]), axis=1)
        curvature = np.zeros((len(target), len(theta), len(theta)))
        diagonal = np.arange(size)
        curvature[:, diagonal, diagonal] = followed
        crossed = followed[:, :, None] * covariates[:, None, :]
        curvature[:, :size, size:] = crossed
        curvature[:, size:, :size] = crossed.transpose(0, 2, 1)
        curvature[:, size:, size:] = (
            covariates[:, :, None] * covariates[:, None, :] * followed.sum(axis=1)[:, None, None]
        )
        return score, curvature
