"""The covariance of an estimate: spread of people and noise of releases, neither left out.

    V = H^-1 S_+ H^-1 + A^-1 Sigma A^-1

with H the last curvature and S_+ the released spread of scores (the sandwich of people), A and Sigma slope and noise of
the combined equation (:mod:`fedveil.statistics.inference.newton`). S_+ is the nearest positive semidefinite matrix to
the noisy S of the same trace: cutting negative eigenvalues off would add to the trace, and widen every interval.

The curvature is not raised by a floor that intervals could rest on: where its smallest eigenvalue is too close to its
noise there is no interval (measured: floors of a few standard deviations give 70 to 92 % coverage).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy.special import erfc

from fedveil.statistics.inference.equation import Sums
from fedveil.statistics.inference.newton import Estimate, solvable
from fedveil.statistics.intervals import NORMAL_95


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A coefficient in units of its column.

    Attributes:
        name: of the coefficient.
        estimate: its value.
        low, high: of its 95 % interval for the population.
        z: estimate over standard error.
        p: two-sided, of no effect.
        privacy: the share of its variance that is noise.
        ratio: e^estimate with its interval; None where the family has no such meaning.
    """

    name: str
    estimate: float
    low: float
    high: float
    z: float
    p: float
    privacy: float
    ratio: tuple[float, float, float] | None


def covariance(found: Estimate, last: Sums) -> tuple[Float64[np.ndarray, "d d"], Float64[np.ndarray, "d d"]]:
    """Return the covariance of the estimate, and the part of it that is noise.

    Args:
        found: what all releases say.
        last: the release that the spread was sent with.
    """
    assert last.spread is not None
    curvature, _ = solvable(last.curvature, last.curvature_sd)
    people = np.linalg.solve(curvature, np.linalg.solve(curvature, positive(last.spread)).T)
    noise = np.linalg.solve(found.slope, np.linalg.solve(found.slope, found.noise).T)
    return people + noise, noise


def positive(matrix: Float64[np.ndarray, "d d"]) -> Float64[np.ndarray, "d d"]:
    """Return the nearest positive semidefinite matrix of the same trace (zero where the trace is not above 0).

    Its eigenvalues are those of the matrix projected onto the simplex of their sum (Held, Wolfe, Crowder 1974).

    >>> positive(np.diag([3.0, 1.0, -1.0])).round(12).tolist()
    [[2.5, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """
    values, vectors = np.linalg.eigh(matrix)
    total = float(values.sum())
    if total <= 0:
        return np.zeros_like(matrix)
    descending = values[::-1]
    excess = (np.cumsum(descending) - total) / np.arange(1, len(values) + 1)
    level = excess[np.flatnonzero(descending > excess)[-1]]
    found: np.ndarray = (vectors * np.maximum(values - level, 0)) @ vectors.T
    return found


def effect(
    name: str, values: tuple[float, float, float], unit: float, *, origin: float = 0.0, multiplies: bool
) -> Effect:
    """Return one coefficient with its figures.

    Args:
        name: of the coefficient.
        values: coefficient, its variance, and the part of that which is noise, on the scale of the equation.
        unit: what the coefficient is multiplied by.
        origin: what is added to it then.
        multiplies: whether e^coefficient means something.
    """
    value, variance, noise = values
    estimate, error = value * unit + origin, math.sqrt(variance) * unit
    low, high = estimate - NORMAL_95 * error, estimate + NORMAL_95 * error
    z = estimate / error if error > 0 else math.copysign(math.inf, estimate)
    return Effect(
        name=name,
        estimate=estimate,
        low=low,
        high=high,
        z=z,
        p=float(erfc(abs(z) / math.sqrt(2))),
        privacy=noise / variance if variance > 0 else 1.0,
        ratio=(_exp(estimate), _exp(low), _exp(high)) if multiplies else None,
    )


def _exp(value: float) -> float:
    """Return e^value, at most the largest number."""
    return math.exp(min(value, 700.0))
