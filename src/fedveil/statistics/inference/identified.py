"""Which coefficients a regression's releases identify: an empty interval or category costs its own coefficient only.

The log hazard of an interval in which nobody is followed, and the coefficient of a category that nobody has, are in no
record's score. Their rows of the curvature are noise, so the smallest eigenvalue of the whole curvature is noise too.
Without these rows the other equations are as they were, and they do not depend on the coefficients that are left out.

The weight of an interval or of a category is its diagonal entry of H (covariates are 0 or 1). That of a reference
category is the weight of all records less that of the other categories; where nobody has it, the intercept and every
contrast with it are unknown, and one of the contrasts is held at its last value so that the rest can be solved.

**A weight that is small and not 0.** A coefficient j that is left out is held at its last value. What that moves in the
other equations is sum a z r over the records of j alone, about m r_j with m the mean of z among them and r_j the
residual of equation j at the estimate. r_j is released: r_j^2 less what noise explains counts as noise along E zz',
which stands for mm'. :data:`MOST_LEFT_OUT` limits how much of all weight is treated this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Int64

from fedveil.statistics.inference.equation import Sums
from fedveil.statistics.inference.newton import SOLVABLE, Estimate, estimate, solvable

MOST_LEFT_OUT: Final = 0.1
"""Largest share of the weight of all records that coefficients without an interval may have together."""
_LIGHT: Final = 3.0
"""Largest weight of what is left out, in smallest eigenvalues that are enough: beside an intercept, an indicator with
the weight w has an eigenvalue of w / 3 at least unless most records have it."""


@dataclass(frozen=True, kw_only=True)
class Indicator:
    """An interval, a category, or a reference category, with the weight of its records.

    Attributes:
        weight: of its records.
        sd: of the noise on it.
        held: the coefficient that is held where the records are too few.
        lost: the coefficients that have no interval then.
    """

    weight: float
    sd: float
    held: int
    lost: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Identified:
    """The estimate of the coefficients that are identified.

    Attributes:
        kept: (k,) which coefficients are solved for.
        lost: those that have no interval, whether they are solved for or not.
        releases: the releases, restricted to what is solved for.
        estimate: of these.
        enough: whether their curvature is clear of its noise.
    """

    kept: Int64[np.ndarray, " k"]
    lost: frozenset[int]
    releases: tuple[Sums, ...]
    estimate: Estimate
    enough: bool


def indicators(one: Sums) -> Iterator[Indicator]:
    """Yield the intervals, the categories and the reference categories of a release."""
    weight, sd = np.diag(one.curvature), one.curvature_sd
    leading = range(one.leading)
    if one.stopped and one.leading > 1:
        yield from (Indicator(weight=float(weight[j]), sd=sd, held=j, lost=(j,)) for j in leading)
    for levels in one.levels:
        yield from (Indicator(weight=float(weight[j]), sd=sd, held=j, lost=(j,)) for j in levels)
        yield Indicator(
            weight=float(weight[list(leading)].sum() - weight[list(levels)].sum()),
            sd=sd * float(np.sqrt(len(leading) + len(levels))),
            held=max(levels, key=lambda j: float(weight[j])),
            lost=(*leading, *levels),
        )


def moving(one: Sums) -> Int64[np.ndarray, " k"]:
    """Return the coefficients that the next step may move: the noise of an empty one would use up the step."""
    held = {found.held for found in indicators(one) if found.weight < SOLVABLE * found.sd}
    return _without(one, held)


def restricted(releases: Sequence[Sums], kept: Int64[np.ndarray, " k"]) -> tuple[Sums, ...]:
    """Return releases about some coefficients, the others being held at their values of the last release.

    A gradient at other values of these is moved there along its own curvature, whose noise is counted.
    """
    last = releases[-1]
    if len(kept) == len(last.theta):
        return tuple(releases)
    held = np.setdiff1d(np.arange(len(last.theta)), kept)
    places = {int(old): new for new, old in enumerate(kept)}
    found = []
    for one in releases:
        away = last.theta[held] - one.theta[held]
        square = np.ix_(kept, kept)
        found.append(
            replace(
                one,
                theta=one.theta[kept],
                gradient=one.gradient[kept] - one.curvature[np.ix_(kept, held)] @ away,
                curvature=one.curvature[square],
                spread=None if one.spread is None else one.spread[square],
                gradient_sd=float(
                    np.hypot(one.gradient_sd, one.curvature_sd * np.linalg.norm(away) / np.sqrt(2))
                ),
                leading=int((kept < one.leading).sum()),
                levels=tuple(tuple(places[j] for j in levels if j in places) for levels in one.levels),
            )
        )
    return tuple(found)


def identify(releases: Sequence[Sums], least: float) -> Identified:
    """Return the estimate of what the releases identify: the lightest indicators are left out until that is enough.

    Args:
        releases: all, in order.
        least: how many standard deviations of its noise the smallest eigenvalue of the slope must be from 0.
    """
    last = releases[-1]
    room = MOST_LEFT_OUT * float(np.diag(last.curvature)[: last.leading].sum())
    light = [one for one in indicators(last) if one.weight < _LIGHT * least * one.sd]
    light.sort(key=lambda one: one.weight / one.sd)
    left: list[Indicator] = []
    while True:
        found = _identified(releases, left, least)
        if found.enough or not light:
            return found
        left.append(light.pop(0))
        if sum(max(0.0, one.weight) for one in left) > room:
            return found


def _identified(releases: Sequence[Sums], left: Sequence[Indicator], least: float) -> Identified:
    last = releases[-1]
    kept = _without(last, (one.held for one in left))
    own = restricted(releases, kept)
    found = estimate(own)
    _, smallest = solvable(own[-1].curvature, own[-1].curvature_sd)
    held = np.setdiff1d(np.arange(len(last.theta)), kept)
    if len(held):
        moved = last.curvature[np.ix_(held, kept)] @ (found.theta - own[-1].theta)
        residual = last.gradient[held] - moved
        excess = float(np.maximum(0.0, residual**2 - last.gradient_sd**2).sum())
        weight = float(np.diag(found.slope)[: own[-1].leading].sum())
        found = replace(found, noise=found.noise + excess * found.slope / weight)
    return Identified(
        kept=kept,
        lost=frozenset(j for one in left for j in one.lost),
        releases=own,
        estimate=found,
        enough=bool(smallest >= SOLVABLE and found.least >= least),
    )


def _without(one: Sums, held: Iterable[int]) -> Int64[np.ndarray, " k"]:
    return np.setdiff1d(np.arange(len(one.theta)), list(held))
