"""Prediction of the errors of a regression from public numbers, and refusal of a hopeless one, before a record is read.

Predictions take all n_users people to have one complete record each, covariates of different columns to be independent
and without effects, and outcomes at the declared rate (logistic, Poisson), with the declared spread (linear), or at the
declared hazard until the end of the grid (survival). Noise is exact; what effects, correlation, missing values and
earlier censoring do to a curvature is not known before. Where a plan is admitted and people are as it takes them to be,
every coefficient has an interval in 95 % of runs or more (measured; tests/test_inference_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq, minimize_scalar

from fedveil.errors import ConfigError
from fedveil.privacy.statement import show_epsilon
from fedveil.statistics.inference.design import Design
from fedveil.statistics.inference.equation import Equation
from fedveil.statistics.inference.families import Family
from fedveil.statistics.intervals import NORMAL_95

_NOTHING: Final = 1e-12
"""Least eigenvalue of an expected curvature: nobody is in an interval that has less."""
_FARTHEST: Final = 12.0
"""Largest distance at which a slope is looked at, in units of the predictor."""
_AROUND: Final = 0.5
"""Spread of the smallest eigenvalue about the edge of its law, in standard deviations of the noise."""
_DRAWS: Final = 10_000
_LEAST_NOISE: Final = math.log(1e-3)
"""Logarithm of the least multiple of the noise that a budget is proposed for."""


@dataclass(frozen=True, kw_only=True)
class PlannedEffect:
    """Predicted errors of one coefficient.

    Attributes:
        name: name of the coefficient.
        error: half width of its 95 % interval, in units of its column.
        privacy: the share of its variance that is noise.
        margin: what noise leaves of its curvature, over the standard deviation of that noise.
        needed: the least margin for which intervals hold.
    """

    name: str
    error: float
    privacy: float
    margin: float
    needed: float


def predict_errors(
    releases: Sequence[tuple[Equation, float]], n_users: int, unit: float = 1.0
) -> tuple[PlannedEffect, ...]:
    """Return what is predicted of every coefficient.

    With w = E a the mean weight of a record, M = E a v z z' / w and N how much all people weigh, a curvature is
    H = w N M. The variance of a coefficient is a diagonal entry of M^-1 / N for the choice of people, and of
    H^-1 H^-1 s_g^2 for the noise of all gradients together. The margin of a curvature allows for three things: its
    noise, one standard deviation of the number of people who make it up, and the distance of the last theta from the
    truth, where the slope is smaller.

    Args:
        releases: the local step of every release, and the standard deviation of its noise.
        n_users: public.
        unit: what a person weighs in a sum: 1, or 1 / |S| under uniform weights.
    """
    people = n_users * unit
    last, std = releases[-1]
    family, design = last.family, last.design
    weight, of_numbers = expected_weights(design, last.bound)
    names, size = (*family.leading, *design.names), len(family.leading)
    expected = expected_curvature(family, design, of_numbers)
    sd = std / last.scales[1]
    precisions = [(equation.scales[0] / sd) ** 2 for equation, sd in releases]
    values, vectors = np.linalg.eigh(expected)
    values = np.maximum(values, _NOTHING)
    sampling = (vectors**2) @ (1 / (people * values))
    curvatures = weight * people * values
    noise = (vectors**2) @ (1 / curvatures**2) / math.fsum(precisions)
    moved = math.sqrt(
        float((1 / curvatures).sum())
        / (weight * people * float(expected[:size, :size].sum()) * math.fsum(precisions[:-1]))
    )
    fewest = max(n_users * smallest_part(family, design), _NOTHING)
    certain = max(0.0, 1 - 1 / math.sqrt(fewest))
    margin = least_margin(curvatures * certain * kept_slope(family, moved) / sd)
    units = [1.0] * size + [1 / unit for unit in design.units]
    return tuple(
        PlannedEffect(
            name=name,
            error=NORMAL_95 * math.sqrt(by_noise + by_people) * unit * family.unit,
            privacy=by_noise / (by_noise + by_people),
            margin=margin * sampling.max() / by_people,
            needed=family.least,
        )
        for name, by_noise, by_people, unit in zip(
            names, noise.tolist(), sampling.tolist(), units, strict=True
        )
    )


def expected_weights(design: Design, bound: float) -> tuple[float, float]:
    """Return the mean weight a = min(1, B / |z|)^2 of a record, and E a x^2 / E a of a number x.

    Numbers are normal, categories equally frequent; both are means over draws with a fixed public seed.
    """
    rng, categories = np.random.default_rng(0), [len(levels) for levels in design.levels]
    numbers = len(design.names) - sum(categories)
    of_numbers = rng.chisquare(numbers, _DRAWS) if numbers else np.zeros(_DRAWS)
    other = [rng.random(_DRAWS) * (size + 1) > 1 for size in categories]
    weight = np.minimum(1.0, bound**2 / (1 + of_numbers + sum(other, np.zeros(_DRAWS))))
    mean = float(weight.mean())
    return mean, float((weight * of_numbers).mean()) / (numbers * mean) if numbers else 1.0


def expected_curvature(family: Family, design: Design, of_numbers: float) -> Float64[np.ndarray, "d d"]:
    """Return E a v z z' / E a of one record, covariates of different columns being independent and without effects.

    Args:
        family: with what is declared of it.
        design: the covariates.
        of_numbers: E a x^2 / E a of a number.
    """
    leading = np.maximum(family.expected, _NOTHING)
    mean = np.array([mean for mean, _ in design.expected_moments])
    second = of_numbers * np.eye(len(mean))
    for levels in design.levels:  # a record has one category: p (1 - p) on the diagonal, -p p' beside it
        p = mean[list(levels)]
        second[np.ix_(levels, levels)] = np.diag(p) - np.outer(p, p)
    second += np.outer(mean, mean)
    crossed = np.outer(leading, mean)
    return np.block([[np.diag(leading), crossed], [crossed.T, leading.sum() * second]])


def smallest_part(family: Family, design: Design) -> float:
    """Return the expected number of events a person, in the interval or the category that has the fewest."""
    leading = family.expected
    fewest = min(1 / (len(levels) + 1) for levels in (*design.levels, ()))
    return min(1.0, *leading, sum(leading) * fewest)


def kept_slope(family: Family, moved: float) -> float:
    """Return the share of the slope of the mean that is left where noise has moved the predictor by 2 ``moved``.

    Args:
        family: whose mean it is, at its start.
        moved: root mean square of what the noise of all releases but the last one moves predictors of records by.
    """
    at, away = family.guess, min(2 * moved, _FARTHEST)
    slope = family.mean(at)[1]
    return min(family.mean(at - away)[1], family.mean(at + away)[1], slope) / slope if slope > 0 else 0.0


def least_margin(values: Float64[np.ndarray, " d"]) -> float:
    """Return what noise leaves of the smallest eigenvalue of a curvature, in standard deviations of a diagonal entry.

    Symmetric noise E pushes eigenvalues apart: the smallest one of diag(values) + E lies near the edge

        max over w < min(values) of w - sum 1 / (values - w) / 2

    of their law (Pastur 1972). Half a standard deviation is left for what it moves around there.
    """
    smallest, size = float(values.min()), len(values)

    def edge(below: float) -> float:
        return below + float((0.5 / (values - smallest + below)).sum())

    optimum = minimize_scalar(edge, bounds=(1e-3, math.sqrt(size)), method="bounded")
    return max(_NOTHING, smallest - float(optimum.fun) - _AROUND)


def check(
    planned_at: Callable[[float], Sequence[PlannedEffect]],
    family: Family,
    noise_multiplier: float,
    epsilon: Callable[[float], float],
) -> None:
    """Refuse a regression whose curvature would be hidden by its noise, before anything is charged.

    Args:
        planned_at: what is predicted under a multiple of the noise.
        family: whose it is.
        noise_multiplier: noise multiplier of all releases together.
        epsilon: what releases with another multiplier would cost.

    Raises:
        ConfigError: names the coefficient, and what would do.
    """

    def missing(log_factor: float) -> float:
        worst = min(planned_at(math.exp(log_factor)), key=lambda effect: effect.margin)
        return worst.needed - worst.margin

    worst = min(planned_at(1.0), key=lambda effect: effect.margin)
    if worst.margin >= worst.needed:
        return
    instead = [family.advice, "fewer columns or categories", "more people"]
    if missing(_LEAST_NOISE) < 0:
        factor = math.exp(float(brentq(missing, _LEAST_NOISE, 0.0, xtol=1e-3)) - 0.01)
        instead.insert(0, f"epsilon = {show_epsilon(epsilon(noise_multiplier * factor))}")
    ratio = "less than 0.01" if worst.margin < 0.01 else f"{worst.margin:.2g}"
    raise ConfigError(
        f"inference: too few people for this budget: the information about '{worst.name}' would be {ratio} "
        f"times its noise, and an interval needs {worst.needed:g} times. Any of these would do: "
        f"{'; '.join(remedy for remedy in instead if remedy)}"
    )
