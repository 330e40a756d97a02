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
from scipy.special import expit, logit

from fedveil.data.columns import ColumnTable, State

Each: TypeAlias = Float64[np.ndarray, " n"]
"""One number a record."""
Known: TypeAlias = tuple[Float64[np.ndarray, "n t"], Bool[np.ndarray, " n"]]
"""What is explained, and which records have it."""
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
        unit: of a coefficient on the scale of the equation, in units of the target.
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
        """The intercept, unless a family says otherwise."""
        return ("intercept",)

    @property
    def guess(self) -> float:
        """Leading coefficients at the start; 0, unless a family has a rate."""
        return 0.0

    @property
    def advice(self) -> str:
        """What would give a regression more information than fewer columns; nothing, unless a family knows more."""
        return ""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the target."""

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
        """The curvature that is expected of a record, by leading coefficient, under what is declared; no effects."""

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
        """The largest mu P(Y < c) over all means; curvatures are cut there."""
        from scipy.stats import poisson

        found = minimize_scalar(
            lambda mu: -mu * poisson.cdf(self.cap - 1, mu), bounds=(0, 3.0 * self.cap), method="bounded"
        )
        return float(-found.fun) * (1 + 1e-6)

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
        """Return min(y, c) - E[min(Y, c)] and the derivative of the latter, mu P(Y < c)."""
        from scipy.stats import poisson

        mu = np.exp(predictor)
        below = np.stack([poisson.cdf(k, mu) for k in range(self.cap)])
        mean = self.cap - below.sum(axis=0)
        return np.minimum(y, self.cap) - np.clip(mean, 0, self.cap), np.minimum(mu * below[-1], self.largest)


def predictor_of(
    z: Float64[np.ndarray, "n p"], theta: Float64[np.ndarray, " p"]
) -> Float64[np.ndarray, " n"]:
    """Return z'theta of every record, column by column.

    A product of matrices rounds a row by how many others it is computed with, so that who is there would move
    everybody's stored numbers, and no bound has that.
    """
    found = np.zeros(len(z))
    for column, weight in zip(z.T, theta, strict=True):
        found += column * weight
    return found
