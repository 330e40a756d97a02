"""Intervals: what noise adds is known exactly, what the choice of people adds is estimated from the release itself.

A figure is meant `for these people` (the noise alone) or `for the population they come from` (both). Variances of
people are plug-in estimates; a person's spread over cells only lowers them. A plug-in estimate is too small where a
share is near 0 or 1: those of shares have z^2 / 2 people added at either end (:func:`at_the_ends`), and means of
numbers between bounds have the interval of :func:`mean_within`, whose variance is the hypothesis's. Areas under curves,
and means and variances of columns, have neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

NORMAL_95: Final = 1.959963984540054
Ends: TypeAlias = tuple[float | None, float | None]
LEAST_RATIO: Final = 4.0
"""Least ratio of a denominator to its standard deviation for a quotient to have an interval."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with 95 % intervals; None for an end that nothing bounds.

    Attributes:
        estimate: the figure.
        low, high: of the interval for the population.
        low_here, high_here: of the interval for these people.
        privacy: the share of the population interval's variance that is noise.
        beyond: where the figure lies beyond the estimate, which is a declared bound then; None: it is the estimate.
    """

    estimate: float
    low: float | None
    high: float | None
    low_here: float | None
    high_here: float | None
    privacy: float
    beyond: Literal["below", "above"] | None = None

    def in_words(self, estimate: str) -> str:
        """Return the estimate in words, given its number in words; a bound that the figure lies beyond is so called."""
        return estimate if self.beyond is None else f"{self.beyond} {estimate}"

    def affine(self, factor: float, shift: float) -> Interval:
        """Return the interval of factor x + shift, factor above 0."""

        def rescale(value: float | None) -> float | None:
            return None if value is None else factor * value + shift

        return Interval(
            estimate=factor * self.estimate + shift,
            low=rescale(self.low),
            high=rescale(self.high),
            low_here=rescale(self.low_here),
            high_here=rescale(self.high_here),
            privacy=self.privacy,
        )

    def within(self, lower: float, upper: float) -> Interval:
        """Return the interval with its ends cut to a range that is known to hold the figure."""

        def cut(value: float | None) -> float | None:
            return None if value is None else min(max(value, lower), upper)

        return replace(
            self,
            low=cut(self.low),
            high=cut(self.high),
            low_here=cut(self.low_here),
            high_here=cut(self.high_here),
        )

    def minus(self, other: Interval, privacy: float) -> Interval:
        """Return the difference to an independent figure: a normal one's where both are (MOVER).

        The lower end is d - sqrt((x - x_low)^2 + (y_high - y)^2), the upper one likewise; reference: Zou and Donner,
        "Construction of confidence limits about effect measures" (Statistics in Medicine 27, 2008).

        Args:
            other: the figure that is subtracted.
            privacy: the share of the difference's variance that is noise.
        """
        difference, x, y = self.estimate - other.estimate, self, other

        def end(sign: int, own_end: float | None, other_end: float | None) -> float | None:
            if own_end is None or other_end is None:
                return None
            return difference + sign * math.hypot(own_end - x.estimate, other_end - y.estimate)

        return Interval(
            estimate=difference,
            low=end(-1, x.low, y.high),
            high=end(1, x.high, y.low),
            low_here=end(-1, x.low_here, y.high_here),
            high_here=end(1, x.high_here, y.low_here),
            privacy=privacy,
        )


def interval_between(estimate: float, ends: Ends, sample_ends: Ends, privacy: float) -> Interval:
    """Return the interval of a figure, given its ends for the population and for these people."""
    (low, high), (low_here, high_here) = ends, sample_ends
    return Interval(
        estimate=estimate, low=low, high=high, low_here=low_here, high_here=high_here, privacy=privacy
    )


def normal(estimate: float, noise: float, people: float) -> Interval:
    """Return the interval of a linear figure.

    Args:
        estimate: its value.
        noise: variance by the noise.
        people: variance by the choice of people.
    """
    both, noise_only = NORMAL_95 * math.sqrt(noise + people), NORMAL_95 * math.sqrt(noise)
    ends, ends_here = (estimate - both, estimate + both), (estimate - noise_only, estimate + noise_only)
    return interval_between(estimate, ends, ends_here, share(noise, people))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with the variances that noise and the choice of people give it."""

    value: float
    noise: float
    people: float

    @property
    def interval(self) -> Interval:
        """Return the normal intervals."""
        return normal(self.value, self.noise, self.people)

    def minus(self, other: Estimate) -> Interval:
        """Return the difference to a figure of other people under other noise."""
        privacy = share(self.noise + other.noise, self.people + other.people)
        return self.interval.minus(other.interval, privacy)


@dataclass(frozen=True, kw_only=True)
class Bounded(Estimate):
    """A figure whose intervals are not normal.

    Attributes:
        ends: its intervals.
    """

    ends: Interval

    @property
    def interval(self) -> Interval:
        return self.ends


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
    ends = _fieller(above, below, (of_above + people, of_below, joint))
    at = max(0.0, of_above - 2 * estimate * joint + estimate**2 * of_below)
    return interval_between(estimate, ends, _fieller(above, below, noise), share(at, people))


def at_the_ends(lowest: float, highest: float) -> float:
    """Return the variance that z^2 / 2 people at either end add, where the estimated variance of a share may be 0.

    Args:
        lowest, highest: what a person moves the figure by, at least and at most.
    """
    return NORMAL_95**2 / 2 * (lowest**2 + highest**2)


def mean_within(value: float, noise: float, top: float, per_person: float) -> tuple[float, float]:
    """Return the interval of the mean of numbers in [0, top]: Wilson's, with noise.

    It holds all t with (value - t)^2 <= z^2 (noise + (top t - t^2) / n). A number in [0, top] of mean t has no larger
    variance than top t - t^2, so that the interval does not shrink where a few large numbers make up the mean and none
    of them may have been drawn. A value outside of [0, top] is taken for an end, which the mean is nearer to.

    Args:
        value: the noisy mean.
        noise: its variance by the noise.
        top: the largest number.
        per_person: 1 / n, in people; 0 for these people.
    """
    z2, value = NORMAL_95**2, min(max(value, 0.0), top)
    lead, middle = 1 + z2 * per_person, value + z2 * per_person * top / 2
    root = math.sqrt(max(0.0, middle**2 - lead * (value**2 - z2 * noise)))
    low, high = ((middle + sign * root) / lead for sign in (-1, 1))
    return min(max(low, 0.0), top), min(max(high, 0.0), top)


def positive_ratio(
    above: float, below: float, variances: tuple[float, float, float], z: float = NORMAL_95
) -> tuple[float, float | None]:
    """Return the smallest interval of t >= 0 that holds Fieller's set of above / below, both of which are positive.

    The upper end is None where the denominator is less than z of its sd from 0. What is found holds the true ratio as
    often as z says, however far from 0 the denominator is: nothing need be known of it before. A numerator below 0 is
    taken for 0.

    Args:
        above: numerator.
        below: denominator.
        variances: variances of numerator and denominator, and their covariance.
        z: quantile of the normal law; that of 95 % unless it is given.
    """
    of_above, of_below, joint = variances
    z2, above = z**2, max(above, 0.0)
    lead, middle, last = below**2 - z2 * of_below, above * below - z2 * joint, above**2 - z2 * of_above
    root = math.sqrt(max(0.0, middle**2 - lead * last))
    clear = last > 0 and (below > 0 or lead < 0)
    low = last / (middle + root) if clear else 0.0
    return low, max(low, (middle + root) / lead) if below > 0 and lead > 0 else None


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
