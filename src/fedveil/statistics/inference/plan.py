"""What a regression would show, before any record is read: predicted errors, and a refusal from public numbers alone.

Predictions take all n_users people to have one complete record each, covariates without correlation, and no effects.
Noise is exact; what effects, correlation and missing values do to a curvature is not known before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.errors import ConfigError
from fedveil.privacy.statement import show_epsilon
from fedveil.statistics.inference.equation import Equation
from fedveil.statistics.intervals import NORMAL_95


@dataclass(frozen=True, kw_only=True)
class PlannedEffect:
    """What is predicted of one coefficient.

    Attributes:
        name: of the coefficient.
        error: half width of its 95 % interval, in units of its column.
        privacy: the share of its variance that is noise.
        margin: its curvature over the noise of the curvature.
        needed: the least margin for which intervals hold.
    """

    name: str
    error: float
    privacy: float
    margin: float
    needed: float


def planned(releases: Sequence[tuple[Equation, float]], people: float) -> tuple[PlannedEffect, ...]:
    """Return what is predicted of every coefficient.

    Args:
        releases: the local step of every release, and the standard deviation of its noise.
        people: how much all people weigh in a sum: n_users, or n_users / |S| under uniform weights.
    """
    last, std = releases[-1]
    family, design = last.family, last.design
    weight = min(1.0, (last.bound / design.length) ** 2)
    leading = len(family.leading)
    spreads = [1 / leading] * leading + [spread for _, spread in design.expected]
    units = [1.0] * leading + [1 / unit for unit in design.units]
    names = (*family.leading, *design.names)
    precision = math.fsum((one.scales[0] / sd) ** 2 for one, sd in releases)
    found = []
    for name, spread, unit in zip(names, spreads, units, strict=True):
        information = people * family.typical * spread
        noise, sampling = 1 / precision / (weight * information) ** 2, 1 / information
        found.append(
            PlannedEffect(
                name=name,
                error=NORMAL_95 * math.sqrt(noise + sampling) * unit * family.unit,
                privacy=noise / (noise + sampling),
                margin=weight * information * last.scales[1] / std,
                needed=family.least,
            )
        )
    return tuple(found)


def check(found: Sequence[PlannedEffect], noise_multiplier: float, epsilon: Callable[[float], float]) -> None:
    """Refuse a regression whose curvature would be hidden by its noise, before anything is charged.

    Args:
        found: what is predicted.
        noise_multiplier: of all releases together.
        epsilon: what releases with another multiplier would cost.

    Raises:
        ConfigError: names the coefficient, and what would do.
    """
    worst = min(found, key=lambda one: one.margin)
    if worst.margin < worst.needed:
        factor = worst.needed / worst.margin
        raise ConfigError(
            f"inference: too few people for this budget: the curvature of '{worst.name}' would be {worst.margin:.2g} "
            f"standard deviations of its noise, and intervals hold from {worst.needed:g}; epsilon = "
            f"{show_epsilon(epsilon(noise_multiplier / factor))}, or fewer columns or categories, would do"
        )
