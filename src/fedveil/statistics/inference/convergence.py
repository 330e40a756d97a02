"""How the first step comes near the solution, and whether the last release lies near enough to it for intervals.

Newton's method takes the mean of a target for a straight line in its predictor. From one outcome in two to one in
twenty that line is far off: three of its steps do not arrive, and an interval around where they end holds nothing.

**The leap.** At the start all records have the same predictor (slopes are 0), so the mean m is known there, and what
the first release says of it is undone by m itself: with Newton's move e_j of an interval's mean predictor,

    m(eta_j + leap_j) = m(eta_j) + m'(eta_j) e_j,

and slopes are Newton's times m' at the start over m' there. Two standard deviations of noise are left between m and its
limits. A leap of 1 or less is left to Newton's method.

**What is left.** Around the last theta the equation is taken for a straight line; d is how far the solution is from
there, A the slope, and T[d] the bend of A (:func:`~fedveil.statistics.inference.newton.bend`), c the share of it that
the mean has there, |d log m' / d eta|. What the line misses moves the estimate by about

    beta = (c / 2) A^-1 T[d] d.

For d the distance of the estimate is taken, less what its noise explains of d d'. Intervals are shown where no |beta_j|
is above three quarters of its standard error, the mean of z'd over records is at most .6, and its root mean square at
most 1. For survival beta is in the estimate. docs/theory/inference.md has what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq

from fedveil.statistics.inference.covariance import covariance
from fedveil.statistics.inference.equation import Sums
from fedveil.statistics.inference.families import Family
from fedveil.statistics.inference.identified import moving, restricted
from fedveil.statistics.inference.newton import LONGEST_STEP, Estimate, bend, solvable, step

LONGEST_LAST: Final = 1.0
"""Largest root mean square of what is left of the records' predictors."""
LONGEST_TOGETHER: Final = 0.6
"""Largest mean of it (in an interval): of what is left in many directions the line misses little, of this all."""
MOST_BENT: Final = 0.75
"""Largest share of a standard error that the bend of the last equation may be."""
_LIMIT: Final = 12.0
_SHORT: Final = 1.0
_LEAST_SLOPE: Final = 1e-6


def next_theta(family: Family, releases: Sequence[Sums]) -> Float64[np.ndarray, " d"]:
    """Return where the next release is made: Newton's step, or the leap after the first one.

    A coefficient of an empty interval or category stays where it is.
    """
    kept = moving(releases[-1])
    own = restricted(releases, kept)
    found = leap(family, own[0]) if len(own) == 1 and family.curved else None
    at = releases[-1].theta.copy()
    at[kept] = step(own) if found is None else found
    return at


def leap(family: Family, one: Sums) -> Float64[np.ndarray, " d"] | None:
    """Return the theta that the mean of the target says, where all records had one predictor; None where that is near.

    Args:
        family: whose mean it is.
        one: the first release, at slopes of 0.
    """
    size = one.leading
    slope, _ = solvable(one.curvature, one.curvature_sd)
    move, weight = np.linalg.solve(slope, one.gradient), np.diag(slope)[:size]
    means = slope[:size] / weight[:, None]
    leaps, fallen = np.transpose(
        [
            _undone(family, at, newton, unsure)
            for at, newton, unsure in zip(one.theta, means @ move, one.gradient_sd / weight, strict=False)
        ]
    )
    if np.abs(leaps).max() <= _SHORT:
        return None
    effects = move[size:] * weight.sum() / (weight @ fallen)
    effects *= min(1.0, LONGEST_STEP / max(float(np.linalg.norm(effects)), 1e-300))
    found = one.theta.copy()
    found[:size] += leaps - means[:, size:] @ effects
    found[size:] += effects
    return found


def has_converged(family: Family, releases: Sequence[Sums], found: Estimate) -> bool:
    """Return whether the last release lies near enough to the solution for intervals around the estimate to hold.

    Distances are those of the estimate, less what its noise explains of their squares.
    """
    last, slope = releases[-1], found.slope
    distance, known = found.theta - last.theta, covariance(found, last)
    weight = np.diag(slope)[: last.leading]
    left = float(distance @ slope @ distance) - float(np.trace(slope @ known.noise))
    together = np.abs(slope[: last.leading] @ distance) / weight
    if left > LONGEST_LAST**2 * float(weight.sum()) or together.max() > LONGEST_TOGETHER:
        return False
    if family.stopped or not family.curved:
        return True
    at, (values, vectors) = replace(last, curvature=slope), np.linalg.eigh(known.noise)
    turned = bend(at, distance) @ distance
    for value, vector in zip(values, vectors.T, strict=True):
        turned = turned - value * (bend(at, vector) @ vector)
    middle = float(slope[0] @ last.theta) / float(slope[0, 0])
    curved = abs(math.log(family.mean(middle + 0.5)[1] / family.mean(middle - 0.5)[1]))
    missed = curved / 2 * np.abs(np.linalg.solve(slope, turned))
    return bool((missed <= MOST_BENT * np.sqrt(np.diag(known.whole))).all())


def _undone(family: Family, at: float, newton: float, unsure: float) -> tuple[float, float]:
    """Return how far a predictor moves with the mean, and its slope there over that where it was."""
    mean, slope = family.mean(at)
    low, high = family.mean(at - _LIMIT)[0], family.mean(at + _LIMIT)[0]
    left = 2 * unsure * slope
    wanted = min(max(mean + slope * newton, min(mean, low + left)), max(mean, high - left))
    to = float(brentq(lambda move: family.mean(at + move)[0] / wanted - 1, -_LIMIT, _LIMIT))
    return to, max(family.mean(at + to)[1] / slope, _LEAST_SLOPE)
