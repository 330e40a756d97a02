"""Figures of a classifier of two classes from noisy counts of labels in bins of its score, with 95 % intervals.

With counts h1, h0 of the classes' people in B bins by rising score, n1, n0 their sums and F0 = cumulative h0 up to the
middle of a bin:

    AUC = sum_i h1_i F0_i / (n1 n0) + sum_i h1_i h0_i delta_i / (12 n1 n0).

Within a bin the two classes are tied, which counts one half; but where log-odds rise across it by delta_i, a positive
is above a negative more often, by delta_i / 12 (tilted ties, to first order in delta_i). delta_i is read off the
isotonic regression of the rates. Every other figure is a quotient of linear sums of cells.

Variances: by the noise sigma^2 |gradient|^2, exact for sums; by the choice of people the multinomial's, sum_c h_c
gradient_c^2, which is an upper bound where a person is spread over cells. Quotients have Fieller's intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.figures import ALL, Row
from fedveil.statistics.intervals import Interval, normal, ratio
from fedveil.statistics.rising import isotonic_regression
from fedveil.statistics.scores import THRESHOLD

MOST_TIED: Final = 0.5
"""The largest share of people in one bin for which the area under the curve is told: scores so close together that bins
do not tell them apart would count as ties."""
LEAST_CLASS: Final = 8.0
"""How many standard deviations of its noise a class's number of people is from 0, where it has figures of its own."""
_STEEPEST: Final = 3.0
_EXTREME: Final = 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Noisy counts of labels by bins, of one group of people.

    Attributes:
        cells: (2, B) of class 0 and class 1, by rising score.
        variance: of the noise of every cell.
        edges: (B - 1,) of the bins.
        people_per_unit: how many counted units one person may be.
    """

    cells: Float64[np.ndarray, "2 B"]
    variance: float
    edges: tuple[float, ...]
    people_per_unit: float

    @property
    def counted(self) -> str:
        """What is counted, in words."""
        return "people" if self.people_per_unit == 1 else "person-silo pairs"

    @property
    def predicted(self) -> Float64[np.ndarray, " B"]:
        """1 in the bins whose scores predict class 1."""
        return np.where(np.concatenate((self.edges, [np.inf])) > THRESHOLD, 1.0, 0.0)

    @property
    def correct(self) -> Float64[np.ndarray, "2 B"]:
        """1 in the cells whose class is predicted."""
        return np.stack((1 - self.predicted, self.predicted))

    @property
    def enough(self) -> bool:
        """Whether each class has enough people for figures that divide by their number."""
        sd = float(np.sqrt(self.variance * self.cells.shape[1]))
        return bool((self.cells.sum(axis=1) >= LEAST_CLASS * sd).all())

    @property
    def tied(self) -> float:
        """The share of all people who are in the fullest bin."""
        return float(self.cells.sum(axis=0).max() / self.cells.sum())

    def without(self, part: Counts) -> Counts:
        """Return the counts of everybody but a part, whose noise is independent of what remains."""
        return replace(self, cells=self.cells - part.cells, variance=self.variance - part.variance)


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


def auc(counts: Counts) -> Estimate | None:
    """Return the area under the curve with corrected ties; None where a class has too few people or a bin too many."""
    if not counts.enough or counts.tied > MOST_TIED:
        return None
    (h0, h1), (n0, n1) = counts.cells, counts.cells.sum(axis=1)
    below, above = (np.cumsum(h0) - h0 / 2) / n0, 1 - (np.cumsum(h1) - h1 / 2) / n1
    area = float(h1 @ below) / float(n1)
    value = area + _tilted_ties(counts)
    return _estimate(counts, value, np.stack(((above - area) / n0, (below - area) / n1)))


def accuracy(counts: Counts) -> Estimate | None:
    """Return the share of people whose class is predicted; None where there are too few."""
    if not counts.enough:
        return None
    total = float(counts.cells.sum())
    value = float((counts.correct * counts.cells).sum()) / total
    return _estimate(counts, value, (counts.correct - value) / total)


def balanced_accuracy(counts: Counts) -> Estimate | None:
    """Return the mean over both classes of the share of their people that is predicted; None where one has too few."""
    if not counts.enough:
        return None
    totals = counts.cells.sum(axis=1, keepdims=True)
    shares = (counts.correct * counts.cells).sum(axis=1, keepdims=True) / totals
    return _estimate(counts, float(shares.mean()), (counts.correct - shares) / totals / 2)


COMPARED: Final[Mapping[str, Callable[[Counts], Estimate | None]]] = MappingProxyType(
    {"auc": auc, "accuracy": accuracy, "balanced accuracy": balanced_accuracy}
)
"""Figures that groups are compared by."""


def quotient(
    counts: Counts, above: Float64[np.ndarray, "2 B"], below: Float64[np.ndarray, "2 B"]
) -> Interval | None:
    """Return a quotient of two weighted sums of cells with Fieller's interval; None where it divides by nothing."""
    a, b = float((above * counts.cells).sum()), float((below * counts.cells).sum())
    noise = tuple(
        counts.variance * float((x * y).sum()) for x, y in ((above, above), (below, below), (above, below))
    )
    t = a / b if b > 0 else 0.0
    return ratio(a, b, (noise[0], noise[1], noise[2]), _people(counts, above - t * below))


def figures(
    counts: Counts, moments: tuple[Float64[np.ndarray, " B"], Float64[np.ndarray, " B"]]
) -> Iterator[tuple[str, str, Interval | None]]:
    """Yield name, cell and value of every figure of all people.

    Args:
        counts: of all people.
        moments: mean of the predicted probability and of its square in every bin.
    """
    p, square = moments
    ones = np.ones_like(counts.cells)
    positive = np.stack((np.zeros_like(p), np.ones_like(p)))
    yield counts.counted, "", _count(counts)
    for name, of in COMPARED.items():
        estimate = of(counts)
        yield name, "", None if estimate is None else estimate.interval
    majority = positive if float(counts.cells[1].sum()) > float(counts.cells[0].sum()) else 1 - positive
    enough = counts.enough
    for name, above, below in (
        ("majority baseline", majority, ones),
        ("accuracy minus majority baseline", counts.correct - majority, ones),
        ("sensitivity", counts.correct * positive, positive),
        ("specificity", counts.correct * (1 - positive), 1 - positive),
        ("share of class 1", positive, ones),
        ("observed minus predicted", positive - p, ones),
        ("brier", np.stack((square, 1 - 2 * p + square)), ones),
    ):
        yield name, "", quotient(counts, above, below) if enough else None
    for mean, found in calibration(counts, p):
        yield "observed share of class 1", f"predicted {mean:.3f}", found


def calibration(
    counts: Counts, predicted: Float64[np.ndarray, " B"]
) -> tuple[tuple[float, Interval | None], ...]:
    """Return (mean predicted probability, observed share of class 1) in every bin."""
    found = []
    for place, mean in enumerate(predicted.tolist()):
        cell, positive = np.zeros_like(counts.cells), np.zeros_like(counts.cells)
        cell[:, place], positive[1, place] = 1.0, 1.0
        found.append((mean, quotient(counts, positive, cell)))
    return tuple(found)


def roc(counts: Counts) -> tuple[tuple[float, Interval | None, Interval | None], ...]:
    """Return (threshold, false positive rate, true positive rate) at every edge, by falling threshold."""
    positive = np.zeros_like(counts.cells)
    positive[1] = 1.0
    found = []
    for place in reversed(range(len(counts.edges))):
        beyond = np.zeros_like(counts.cells)
        beyond[:, place + 1 :] = 1.0
        false = quotient(counts, beyond * (1 - positive), 1 - positive)
        found.append((counts.edges[place], false, quotient(counts, beyond * positive, positive)))
    return tuple(found)


def rows(
    groups: Mapping[str, Sequence[tuple[str, Counts]]],
    moments: tuple[Float64[np.ndarray, " B"], Float64[np.ndarray, " B"]],
) -> tuple[Row, ...]:
    """Return every row: figures of all people, and of every group with its difference to all the others.

    Args:
        groups: by partition, name and counts of every group; the partition "all" has one.
        moments: of predicted probabilities in every bin.
    """
    ((_, everybody),) = groups[ALL]
    found = [
        Row(release="evaluation", figure=name, group=ALL, cell=cell, interval=interval)
        for name, cell, interval in figures(everybody, moments)
    ]
    for partition, members in groups.items():
        if partition == ALL:
            continue
        whole = replace(
            members[0][1],
            cells=np.sum([counts.cells for _, counts in members], axis=0),
            variance=sum(counts.variance for _, counts in members),
        )
        for name, counts in members:
            rest, label = whole.without(counts), f"{partition} = {name}"
            for figure, of in COMPARED.items():
                own, other = of(counts), of(rest)
                found.append(_row(figure, label, None if own is None else own.interval))
                apart = None if own is None or other is None else own.minus(other)
                found.append(_row(f"{figure} minus the others'", label, apart))
    return tuple(found)


def _row(figure: str, group: str, interval: Interval | None) -> Row:
    return Row(release="evaluation", figure=figure, group=group, interval=interval)


def _count(counts: Counts) -> Interval:
    return normal(float(counts.cells.sum()), counts.variance * counts.cells.size, 0.0)


def _people(counts: Counts, gradient: Float64[np.ndarray, "2 B"]) -> float:
    """Return the variance by the choice of people of a sum that a person in a cell moves by its gradient."""
    return counts.people_per_unit * float((np.clip(counts.cells, 0, None) * gradient**2).sum())


def _estimate(counts: Counts, value: float, gradient: Float64[np.ndarray, "2 B"]) -> Estimate:
    noise = counts.variance * float((gradient**2).sum())
    return Estimate(value=value, noise=noise, people=_people(counts, gradient))


def _tilted_ties(counts: Counts) -> float:
    """Return what positives in a bin gain over negatives there, because log-odds rise across it."""
    h0, h1 = np.clip(counts.cells, 0, None)
    both = h0 + h1
    rates = np.where(both > 0, h1 / np.maximum(both, 1e-300), 0.5)
    smooth = isotonic_regression(
        rates, sample_weight=np.maximum(both, 1.0), y_min=_EXTREME, y_max=1 - _EXTREME
    )
    rise = np.clip(np.gradient(np.log(smooth / (1 - smooth))), 0, _STEEPEST)
    n0, n1 = counts.cells.sum(axis=1)
    return float((h0 * h1 * rise).sum() / (12 * n0 * n1))
