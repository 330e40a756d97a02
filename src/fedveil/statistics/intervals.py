"""Intervals: what noise adds is known exactly, what the choice of people adds is estimated from the release itself.

A figure is meant `for these people` (the noise alone) or `for the population they come from` (both). Variances of
people are plug-in estimates that err upwards: a person's spread over cells only lowers them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

NORMAL_95: Final = 1.959963984540054
LEAST_RATIO: Final = 4.0
"""How many standard deviations a denominator is from 0 at least, where a ratio has an interval."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with 95 % intervals; None for an end that nothing bounds.

    Attributes:
        estimate: the figure.
        low, high: of the interval for the population.
        low_here, high_here: of the interval for these people.
        privacy: the share of the population interval's variance that is noise.
    """

    estimate: float
    low: float | None
    high: float | None
    low_here: float | None
    high_here: float | None
    privacy: float

    def shifted(self, factor: float, shift: float) -> Interval:
        """Return the interval of factor x + shift, factor above 0."""

        def moved(value: float | None) -> float | None:
            return None if value is None else factor * value + shift

        return Interval(
            estimate=factor * self.estimate + shift,
            low=moved(self.low),
            high=moved(self.high),
            low_here=moved(self.low_here),
            high_here=moved(self.high_here),
            privacy=self.privacy,
        )

    def within(self, estimate: float, lower: float, upper: float) -> Interval:
        """Return the interval of a figure that lies between two bounds, with another estimate for display."""

        def cut(end: float | None) -> float | None:
            return None if end is None else min(max(end, lower), upper)

        return replace(
            self,
            estimate=float(estimate),
            low=cut(self.low),
            high=cut(self.high),
            low_here=cut(self.low_here),
            high_here=cut(self.high_here),
        )


def normal(estimate: float, noise: float, people: float) -> Interval:
    """Return the interval of a linear figure.

    Args:
        estimate: its value.
        noise: variance by the noise.
        people: variance by the choice of people.
    """
    both, here = NORMAL_95 * math.sqrt(noise + people), NORMAL_95 * math.sqrt(noise)
    return Interval(
        estimate=estimate,
        low=estimate - both,
        high=estimate + both,
        low_here=estimate - here,
        high_here=estimate + here,
        privacy=share(noise, people),
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with the variances that noise and the choice of people give it."""

    value: float
    noise: float
    people: float

    @property
    def interval(self) -> Interval:
        """The normal intervals."""
        return normal(self.value, self.noise, self.people)

    def minus(self, other: Estimate) -> Interval:
        """Return the difference to a figure of other people under other noise."""
        return normal(self.value - other.value, self.noise + other.noise, self.people + other.people)


def ratio(above: float, below: float, noise: tuple[float, float, float], people: float) -> Interval | None:
    """Return Fieller's interval of above / below; None where the denominator is less than 4 of its sd from 0.

    It holds all t for which (above - t below)^2 <= z^2 Var(above - t below).

    Args:
        above: numerator.
        below: denominator.
        noise: variances of numerator and denominator by the noise, and their covariance.
        people: variance of above - t below at the true t by the choice of people.
    """
    _, of_below, _ = noise
    if below <= 0 or below < LEAST_RATIO * math.sqrt(of_below):
        return None
    estimate = above / below
    of_above, of_below, joint = noise
    low, high = _fieller(above, below, (of_above + people, of_below, joint))
    low_here, high_here = _fieller(above, below, noise)
    at = max(0.0, of_above - 2 * estimate * joint + estimate**2 * of_below)
    return Interval(
        estimate=estimate,
        low=low,
        high=high,
        low_here=low_here,
        high_here=high_here,
        privacy=share(at, people),
    )


def share(noise: float, people: float) -> float:
    """Return the noise's share of a variance; 1 where there is no other."""
    return float(noise / (noise + people)) if noise + people > 0 else 1.0


def _fieller(above: float, below: float, variances: tuple[float, float, float]) -> tuple[float, float]:
    """Return the ends: the roots of (b^2 - z^2 v_b) t^2 - 2 (a b - z^2 c) t + a^2 - z^2 v_a, with b^2 > z^2 v_b."""
    of_above, of_below, joint = variances
    z2 = NORMAL_95**2
    lead, middle = below**2 - z2 * of_below, above * below - z2 * joint
    root = math.sqrt(max(0.0, middle**2 - lead * (above**2 - z2 * of_above)))
    return (middle - root) / lead, (middle + root) / lead
