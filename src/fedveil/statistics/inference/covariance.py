"""The covariance of an estimate: spread of people and noise of releases, neither left out.

    V = A^-1 (S_+ + Sigma) A^-1

with A and Sigma slope and noise of the combined equation (:mod:`fedveil.statistics.inference.newton`), and S_+ what the
released spread S says of the spread of scores (the sandwich of people). At the truth the equation is a score of people
plus noise, and A times the error of the estimate is exactly that; so noise of A is in error and width alike.

**The spread.** S has d (d + 1) / 2 noisy numbers, often with more noise than content. It is drawn towards what a spread
is like: c A + c' A J A, its projection on these two matrices, where J keeps the leading coefficients: c A where
residuals are as the model says, c' A J A for what the records of a person have in common. The distance to them is
multiplied by 1 - (k - 2) s^2 / distance^2 where that is positive, s the noise's standard deviation and k the dimensions
that remain (James and Stein 1961; towards a subspace: Efron and Morris 1973): nothing changes where S is well known.
Negative eigenvalues of the result are taken for 0.

**Intervals.** The part a' E a of a variance, E what is left of the noise of S, has a known standard deviation t. As for
any estimated variance the quantile is Student's, of 2 V^2 / t^2 degrees of freedom (Satterthwaite 1946); to the first
order in t^2 that gives the level for any distribution of the error in V.

The curvature is not raised by a floor that intervals could rest on: where its smallest eigenvalue is too close to its
noise there is no interval (measured: floors of a few standard deviations give 70 to 92 % coverage).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtr, stdtrit

from fedveil.statistics.inference.equation import Sums
from fedveil.statistics.inference.newton import Estimate
from fedveil.statistics.inference.scores import matrix, triangle

_UPPER: Final = 0.975


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A coefficient in units of its column.

    Attributes:
        name: of the coefficient.
        estimate: its value.
        low, high: of its 95 % interval for the population.
        z: estimate over standard error.
        freedom: degrees of freedom of Student's law for its interval and p.
        p: two-sided, of no effect.
        privacy: the share of its variance that is noise.
        ratio: e^estimate with its interval; None where the family has no such meaning.
    """

    name: str
    estimate: float
    low: float
    high: float
    z: float
    freedom: float
    p: float
    privacy: float
    ratio: tuple[float, float, float] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Covariance:
    """Of an estimate, on the scale of the equation.

    Attributes:
        whole: (d, d) V.
        noise: (d, d) the part of it that is noise.
        freedom: (d,) degrees of freedom of the variances.
    """

    whole: Float64[np.ndarray, "d d"]
    noise: Float64[np.ndarray, "d d"]
    freedom: Float64[np.ndarray, " d"]

    @property
    def reach(self) -> Float64[np.ndarray, " d"]:
        """Half the widths of the 95 % intervals."""
        found: np.ndarray = stdtrit(self.freedom, _UPPER) * np.sqrt(np.diag(self.whole))
        return found


def covariance(found: Estimate, last: Sums) -> Covariance:
    """Return the covariance of the estimate.

    Args:
        found: what all releases say.
        last: the release that the spread was sent with.
    """
    assert last.spread is not None
    inverse = np.linalg.inv(found.slope)
    noise = inverse @ found.noise @ inverse
    spread, basis, kept = shrunk_covariance(last.spread, last.spread_sd, found.slope, last.leading)
    whole = noise + inverse @ spread @ inverse
    squares = triangle(inverse[:, :, None] * inverse[:, None, :])
    inside, all_of_it = ((squares @ basis) ** 2).sum(axis=1), (squares**2).sum(axis=1)
    unsure = last.spread_sd**2 * (inside + kept**2 * (all_of_it - inside))
    with np.errstate(divide="ignore"):
        return Covariance(whole=whole, noise=noise, freedom=2 * np.diag(whole) ** 2 / unsure)


def shrunk_covariance(
    spread: Float64[np.ndarray, "d d"], sd: float, slope: Float64[np.ndarray, "d d"], leading: int
) -> tuple[Float64[np.ndarray, "d d"], Float64[np.ndarray, "k 2"], float]:
    """Return the spread drawn towards what a spread is like, the basis of that, and how much is kept of the rest.

    Args:
        spread: S, with noise.
        sd: of its noise.
        slope: A.
        leading: how many coefficients J keeps.
    """
    like = np.stack((slope, slope[:, :leading] @ slope[:leading]))
    basis, _ = np.linalg.qr(triangle(like).T)
    entries = triangle(spread[None])[0]
    inside = basis @ (basis.T @ entries)
    rest = entries - inside
    noise, length = max(0, len(entries) - 4) * sd**2, float(rest @ rest)
    kept = 1 - noise / length if noise < length else float(not noise)
    values, vectors = np.linalg.eigh(matrix(inside + kept * rest, len(spread)))
    return (vectors * np.maximum(values, 0)) @ vectors.T, basis, kept


def effect(
    name: str,
    values: tuple[float, float, float, float],
    unit: float,
    *,
    origin: float = 0.0,
    multiplies: bool,
) -> Effect:
    """Return one coefficient with its figures.

    Args:
        name: of the coefficient.
        values: coefficient, its variance, the part of that which is noise, and the degrees of freedom of the variance,
            on the scale of the equation.
        unit: what the coefficient is multiplied by.
        origin: what is added to it then.
        multiplies: whether e^coefficient means something.
    """
    value, variance, noise, freedom = values
    estimate, error = value * unit + origin, math.sqrt(variance) * unit
    reach = float(stdtrit(freedom, _UPPER)) * error
    low, high = estimate - reach, estimate + reach
    z = estimate / error if error > 0 else math.copysign(math.inf, estimate)
    return Effect(
        name=name,
        estimate=estimate,
        low=low,
        high=high,
        z=z,
        freedom=freedom,
        p=float(2 * stdtr(freedom, -abs(z))),
        privacy=noise / variance if variance > 0 else 1.0,
        ratio=(_exp(estimate), _exp(low), _exp(high)) if multiplies else None,
    )


def _exp(value: float) -> float:
    """Return e^value, at most the largest number."""
    return math.exp(min(value, 700.0))
