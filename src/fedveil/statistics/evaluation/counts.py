"""Figures of classifiers from noisy counts of people by class and by what is predicted of them.

Variances: by the noise sigma^2 |gradient|^2, exact for sums; by the choice of people the multinomial's, sum_c h_c
gradient_c^2, which is an upper bound where a person is spread over cells, and for shares z^2 / 2 people more at either
end. Quotients have Fieller's intervals.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.statistics.blocks import Block, Layout, OneHot, isotonic_regression
from fedveil.statistics.cells import Bins
from fedveil.statistics.evaluation.evaluator import SCORE, Figure, ScoreBins
from fedveil.statistics.intervals import LEAST_RATIO, Estimate, Interval, at_the_ends, normal, ratio

LEAST_CLASS: Final = 8.0
"""Least ratio of a released number of people to the standard deviation of its noise, for figures that divide by it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Noisy counts of one group of people.

    Attributes:
        cells: (K, B) people of class k in cell b.
        variance: variance of the noise of every cell.
        people_per_unit: how many counted units one person may be.
    """

    cells: Float64[np.ndarray, "K B"]
    variance: float
    people_per_unit: float

    @property
    @abstractmethod
    def correct(self) -> Float64[np.ndarray, "K B"]:
        """1 in the cells whose class is predicted."""

    @property
    def some(self) -> bool:
        """Return whether figures may divide by the number of people."""
        return bool(self.cells.sum() >= LEAST_CLASS * np.sqrt(self.variance * self.cells.size))

    @property
    def enough(self) -> bool:
        """Return whether figures may divide by the number of people of each class."""
        sd = float(np.sqrt(self.variance * self.cells.shape[1]))
        return bool((self.cells.sum(axis=1) >= LEAST_CLASS * sd).all())

    @property
    def total(self) -> Interval:
        """Return the number of people with its interval, which covers the noise alone: the people are fixed."""
        return normal(float(self.cells.sum()), self.variance * self.cells.size, 0.0)

    def people(self, gradient: Float64[np.ndarray, "K B"]) -> float:
        """Return the variance by the choice of people of a sum that a person in a cell moves by its gradient."""
        return self.people_per_unit * float((np.clip(self.cells, 0, None) * gradient**2).sum())

    def estimate(self, value: float, gradient: Float64[np.ndarray, "K B"]) -> Estimate:
        """Return a figure with the variances that its gradient gives it."""
        noise = self.variance * float((gradient**2).sum())
        return Estimate(value=value, noise=noise, people=self.people(gradient))

    def share(self, value: float, gradient: Float64[np.ndarray, "K B"]) -> Estimate:
        """Return a figure that is made of shares, whose estimated spread is 0 where all or none are predicted."""
        return replace(self.estimate(value, gradient), people=self._people_and_ends(gradient))

    def _people_and_ends(self, gradient: Float64[np.ndarray, "K B"]) -> float:
        ends = at_the_ends(float(gradient.min()), float(gradient.max()))
        return self.people(gradient) + self.people_per_unit * ends

    def quotient(
        self,
        above: Float64[np.ndarray, "K B"],
        below: Float64[np.ndarray, "K B"],
        other_variance: float = 0.0,
    ) -> Interval | None:
        """Return a quotient of two weighted sums with Fieller's interval; None where it divides by nothing.

        Args:
            above, below: weights of the cells.
            other_variance: variance of the numerator by other noise than that of the cells.
        """
        a, b = float((above * self.cells).sum()), float((below * self.cells).sum())
        noise = tuple(
            self.variance * float((x * y).sum()) for x, y in ((above, above), (below, below), (above, below))
        )
        t = a / b if b > 0 else 0.0
        return ratio(
            a, b, (noise[0] + other_variance, noise[1], noise[2]), self._people_and_ends(above - t * below)
        )

    def rate(self, above: Float64[np.ndarray, "K B"], below: Float64[np.ndarray, "K B"]) -> Interval | None:
        """Return :meth:`quotient` of a part and its whole, with an interval within [0, 1]."""
        interval = self.quotient(above, below)
        return None if interval is None else interval.within(0.0, 1.0)


def accuracy(counts: Counts) -> Estimate | None:
    """Return the share of people whose class is predicted; None where there are too few."""
    if not counts.some:
        return None
    total = float(counts.cells.sum())
    value = float((counts.correct * counts.cells).sum()) / total
    return counts.share(value, (counts.correct - value) / total)


def balanced_accuracy(counts: Counts) -> Estimate | None:
    """Return the mean over classes of the share of their people that is predicted; None where one has too few."""
    if not counts.enough:
        return None
    totals = counts.cells.sum(axis=1, keepdims=True)
    shares = (counts.correct * counts.cells).sum(axis=1, keepdims=True) / totals
    return counts.share(float(shares.mean()), (counts.correct - shares) / totals / len(counts.cells))


def against_majority(counts: Counts) -> Iterator[Figure]:
    """Yield the accuracy of always naming the largest class, and what the model gains over it.

    Which class is the largest is not known: intervals hold those of every class that may be
    (:func:`_largest`), and cover whichever it is.
    """
    largest = _largest(counts) if counts.some else []
    ones = np.ones_like(counts.cells)
    for name, correct, sign in (
        ("majority baseline", np.zeros_like(ones), 1.0),
        ("accuracy minus majority baseline", counts.correct, -1.0),
    ):
        quotients = []
        for index in largest:
            own = np.zeros_like(ones)
            own[index] = sign
            quotients.append(counts.quotient(correct + own, ones))
        yield name, "", _hull([quotient for quotient in quotients if quotient is not None])


def _largest(counts: Counts) -> list[int]:
    """Return the classes that may be the largest, first the one that is by these counts.

    Another one may be unless its people are fewer by 4 standard deviations of the difference, by noise and people.
    """
    totals, width = np.clip(counts.cells, 0, None).sum(axis=1), counts.cells.shape[1]
    shown = counts.cells.sum(axis=1)
    first = int(shown.argmax())
    people = totals + totals[first] + at_the_ends(-1.0, 1.0)
    sd = np.sqrt(2 * width * counts.variance + counts.people_per_unit * people)
    near = np.flatnonzero(shown[first] - shown < LEAST_RATIO * sd)
    return [first, *(int(index) for index in near if index != first)]


def _hull(intervals: list[Interval]) -> Interval | None:
    """Return the first estimate with the ends of all, which are bounded; None where there is none."""
    if not intervals:
        return None

    def ends(end: str) -> list[float]:
        return [float(getattr(interval, end)) for interval in intervals]

    return replace(
        intervals[0],
        low=min(ends("low")),
        high=max(ends("high")),
        low_here=min(ends("low_here")),
        high_here=max(ends("high_here")),
    )


# --- scores -------------------------------------------------------------------------------------------------
# Scores of held-out people: the release that places the bins of the next one.
#
# A record is the prefix code of the bin of its score, of all people and all targets together. It decodes to edges of
# equal mass, which are public then. Bins of equal width fail for rare classes: nearly all positives would share a bin.
# Records of one person are averaged and weighted over silos as in any release (docs/theory/statistics.md), so a
# person moves it by at most 1.


_WIDE: Final = tuple(0.125 * step for step in range(1, 65))
_NARROW: Final = tuple(0.125 / 2**step for step in range(8, 0, -1))
_RISING: Final = (*_NARROW, *_WIDE)
FINE: Final = (*(-edge for edge in reversed(_RISING)), 0.0, *_RISING)
"""Edges of the bins of the first release: log-odds or log-hazards in steps of 1/8 up to 8, and by halves close to 0,
where the scores of models lie that noise keeps small."""
_STEPS: Final = 16
"""Points of a fine bin."""
_OUTER: Final = np.concatenate(([FINE[0] - 2.0], FINE, [FINE[-1] + 2.0]))


def first_layout() -> Layout:
    """Return the layout of the first release: the scores of all people."""
    return Layout((Block(release="scores", part="cells", encoder=OneHot(Bins(SCORE, FINE)), kind="prefix"),))


def equal_mass_edges(cells: Float64[np.ndarray, " cells"], bins: int, *fixed: float) -> tuple[float, ...]:
    """Return the B - 1 edges between bins of equal mass, and others that are fixed, in order.

    Args:
        cells: decoded cells of the first release: bins, missing, unreadable.
        bins: B.
        fixed: edges beside those.
    """
    shares = _shares(cells)
    levels = np.linspace(0, 1, bins + 1)[1:-1]
    rising = shares[:-1] + 1e-12 * np.arange(len(FINE))
    inner = np.interp(levels, rising, np.array(FINE))
    return tuple(sorted((*inner.tolist(), *fixed)))


def probabilities(
    cells: Float64[np.ndarray, " cells"], edges: tuple[float, ...]
) -> tuple[Float64[np.ndarray, " bins"], Float64[np.ndarray, " bins"]]:
    """Return what the mean of a predicted probability, and of its square, is in every bin, by the first release.

    Within a fine bin scores are taken for even; in a bin without mass for the middle of its edges.
    """
    p, mass, bins = _points(cells, edges)
    total = np.bincount(bins, weights=mass, minlength=len(edges) + 1)
    first = np.bincount(bins, weights=mass * p, minlength=len(edges) + 1)
    second = np.bincount(bins, weights=mass * p**2, minlength=len(edges) + 1)
    bounds = np.concatenate((_OUTER[:1], edges, _OUTER[-1:]))
    middle = 1 / (1 + np.exp(-(bounds[:-1] + bounds[1:]) / 2))
    occupied = total > 0
    whole = np.where(occupied, total, 1.0)
    return np.where(occupied, first / whole, middle), np.where(occupied, second / whole, middle**2)


def variance_of_means(placed: ScoreBins, people: Float64[np.ndarray, " bins"]) -> float:
    """Return the variance by the first release's noise of sum_b people_b p_b, p_b the mean probability of a bin.

    Args:
        placed: the bins, and the first release with its covariance.
        people: number of people in every bin, as the second release counts them.
    """
    if placed.covariance is None:
        return 0.0
    p, mass, bins = _points(placed.cells, placed.edges)
    total = np.bincount(bins, weights=mass, minlength=len(people))
    means = np.bincount(bins, weights=mass * p, minlength=len(people)) / np.maximum(total, 1e-300)
    fine, everybody = len(FINE) + 1, max(float(placed.cells[: len(FINE) + 1].sum()), 1.0)
    weight = np.clip(people, 0, None) / np.maximum(total, 1 / everybody) / everybody
    gradient = (weight[bins] * (p - means[bins])).reshape(fine, _STEPS).mean(axis=1)
    return float(gradient @ placed.covariance[:fine, :fine] @ gradient)


def _points(
    cells: Float64[np.ndarray, " cells"], edges: tuple[float, ...]
) -> tuple[Float64[np.ndarray, " points"], Float64[np.ndarray, " points"], Int64[np.ndarray, " points"]]:
    """Return probability, mass and bin of points that lie evenly in the fine bins."""
    within = (np.arange(_STEPS) + 0.5) / _STEPS
    points = (_OUTER[:-1, None] + np.diff(_OUTER)[:, None] * within).ravel()
    mass = np.repeat(np.diff(_shares(cells), prepend=0.0) / _STEPS, _STEPS) + 1e-12
    bins: np.ndarray = np.searchsorted(np.array(edges), points, side="left")
    return 1 / (1 + np.exp(-points)), mass, bins


def _shares(cells: Float64[np.ndarray, " cells"]) -> Float64[np.ndarray, " fine"]:
    """Return the isotonic distribution function at the ends of the fine bins; even where there is no mass."""
    ordered = cells[: len(FINE) + 1]
    total = float(ordered.sum())
    if total <= 0:
        return np.linspace(0, 1, len(FINE) + 2)[1:]
    shares = isotonic_regression(np.cumsum(ordered) / total, y_min=0.0, y_max=1.0)
    shares[-1] = 1.0
    return shares
