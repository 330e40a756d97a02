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
from jaxtyping import Float64

from fedveil.statistics.evaluation.evaluator import Figure
from fedveil.statistics.intervals import LEAST_RATIO, Estimate, Interval, at_the_ends, normal, ratio

LEAST_CLASS: Final = 8.0
"""How many standard deviations of its noise a number of people is from 0, where figures divide by it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Noisy counts of one group of people.

    Attributes:
        cells: (K, B) people of class k in cell b.
        variance: of the noise of every cell.
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
        """Whether there are enough people for figures that divide by their number."""
        return bool(self.cells.sum() >= LEAST_CLASS * np.sqrt(self.variance * self.cells.size))

    @property
    def enough(self) -> bool:
        """Whether each class has enough people for figures that divide by their number."""
        sd = float(np.sqrt(self.variance * self.cells.shape[1]))
        return bool((self.cells.sum(axis=1) >= LEAST_CLASS * sd).all())

    @property
    def total(self) -> Interval:
        """How many there are: fixed people, so that the noise alone counts."""
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
        self, above: Float64[np.ndarray, "K B"], below: Float64[np.ndarray, "K B"], beside: float = 0.0
    ) -> Interval | None:
        """Return a quotient of two weighted sums with Fieller's interval; None where it divides by nothing.

        Args:
            above, below: weights of the cells.
            beside: variance of the numerator by other noise than that of the cells.
        """
        a, b = float((above * self.cells).sum()), float((below * self.cells).sum())
        noise = tuple(
            self.variance * float((x * y).sum()) for x, y in ((above, above), (below, below), (above, below))
        )
        t = a / b if b > 0 else 0.0
        return ratio(a, b, (noise[0] + beside, noise[1], noise[2]), self._people_and_ends(above - t * below))


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
        found = []
        for place in largest:
            own = np.zeros_like(ones)
            own[place] = sign
            found.append(counts.quotient(correct + own, ones))
        yield name, "", _hull([one for one in found if one is not None])


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
    return [first, *(int(place) for place in near if place != first)]


def _hull(intervals: list[Interval]) -> Interval | None:
    """Return the first estimate with the ends of all, which are bounded; None where there is none."""
    if not intervals:
        return None

    def ends(of: str) -> list[float]:
        return [float(getattr(one, of)) for one in intervals]

    return replace(
        intervals[0],
        low=min(ends("low")),
        high=max(ends("high")),
        low_here=min(ends("low_here")),
        high_here=max(ends("high_here")),
    )
