"""Test metrics of a classifier of two classes, from noisy counts of labels in bins of its score.

There are two releases. In the first, a record contributes the prefix code of its score's bin, for fixed bins of the
log-odds from -8 to 8; the released counts give public bin edges of equal mass. In the second, a record contributes the
unit vector of its (label, bin), for all people and for each partition; the released counts give every figure here.

Let h1_i, h0_i be the counts of the two classes in bin i of B, by rising score, n1 and n0 their sums, and F0_i the
number of negatives below the middle of bin i. Then

    AUC = sum_i h1_i F0_i / (n1 n0) + sum_i h1_i h0_i delta_i / (12 n1 n0).

The first sum counts a pair within one bin as a tie, one half. The second corrects this: if the log-odds of class 1 rise
by delta_i across bin i, a positive has the larger score with probability 1/2 + delta_i / 12, to first order. delta_i
comes from the isotonic regression of the rates h1_i / (h0_i + h1_i). Every other figure is a quotient of linear sums of
cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from fedveil.data.columns import Column, ColumnTable, State
from fedveil.statistics.blocks import Block, Layout, OneHot, isotonic_regression
from fedveil.statistics.cells import UNREADABLE, Partition
from fedveil.statistics.evaluation.counts import (
    Counts,
    accuracy,
    against_majority,
    balanced_accuracy,
    equal_mass_edges,
    first_layout,
    probabilities,
    variance_of_means,
)
from fedveil.statistics.evaluation.evaluator import (
    SCORE,
    TARGET,
    Drawing,
    Evaluator,
    Figure,
    Group,
    ScoreBins,
    numbers,
    places,
)
from fedveil.statistics.intervals import Estimate, Interval

THRESHOLD: Final = 0.0
"""Log-odds above which class 1 is predicted."""
MOST_TIED: Final = 0.5
"""Largest share of people in one bin for which the area under the curve is shown.

Scores in one bin count as ties. If most people are in one bin, the area would say nothing about the model.
"""
_BINNING: Final = 0.1
"""Bound b on the error of the area: at most b / B^2 for B bins of equal mass, after the correction of ties.

Without the correction the error is about -.3 / B^2. Half of the bound counts as a standard deviation.
"""
_NOISE: Final = 0.29
"""Factor c of the area's standard deviation by noise, c sqrt(B) sigma sqrt(1/n1^2 + 1/n0^2)."""
STEEPEST: Final = 3.0
EXTREME: Final = 1e-4
BY_BIN: Final = "observed share of class 1"
"""Name of the calibration's figures, one per bin."""
_LABELS: Final = "labels"


@dataclass(frozen=True)
class LabelledBins(Partition):
    """Partition of records by (label, bin of the score), with one cell for scores that are no numbers.

    Bin i holds the scores in (edge i-1, edge i], so a score equal to the threshold predicts class 0.

    Attributes:
        edges: (B,) ascending; there are B + 1 bins. Equal edges leave bins between them empty.
    """

    edges: tuple[float, ...]
    columns: ClassVar[tuple[str, ...]] = (SCORE, TARGET)

    @property
    def bins(self) -> int:
        """Return the number of bins per label."""
        return len(self.edges) + 1

    @property
    def size(self) -> int:
        """Return the number of cells: the bins of both labels, and the cell of unreadable scores."""
        return 2 * self.bins + 1

    @property
    def labels(self) -> tuple[str, ...]:
        cells = [f"{label}, bin {index}" for label in (0, 1) for index in range(self.bins)]
        return (*cells, UNREADABLE)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        scores, labels = table.numbers(SCORE), table.places(TARGET)
        bin_index = np.searchsorted(np.array(self.edges), scores.values, side="left")
        readable = (scores.state == State.VALID) & (labels.state == State.VALID)
        return np.where(readable, labels.values * self.bins + bin_index, 2 * self.bins).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreCounts(Counts):
    """Noisy counts of people by label and bin.

    Attributes:
        cells: (2, B) of class 0 and class 1, by rising score.
        edges: (B - 1,) of the bins.
    """

    edges: tuple[float, ...]

    @property
    def predicted_classes(self) -> Float64[np.ndarray, " B"]:
        """Return (B,) 1 for bins whose scores predict class 1, else 0."""
        return np.where(np.concatenate((self.edges, [np.inf])) > THRESHOLD, 1.0, 0.0)

    @property
    def correct(self) -> Float64[np.ndarray, "2 B"]:
        return np.stack((1 - self.predicted_classes, self.predicted_classes))

    @property
    def fullest_bin_share(self) -> float:
        """Return the share of people in the fullest bin."""
        return float(self.cells.sum(axis=0).max() / self.cells.sum())


@dataclass(frozen=True)
class TwoClasses(Evaluator):
    """Evaluator of a classifier of two classes whose score is the log-odds of class 1.

    Attributes:
        bins: number of bins of equal mass; the threshold is one more edge.
    """

    measure: ClassVar[str] = "auc"

    bins: int
    compared_figures: ClassVar[tuple[str, ...]] = ("auc", "accuracy", "balanced accuracy")

    @property
    def first(self) -> Layout:
        """Return the layout of the first release: the scores of all people, without labels."""
        return first_layout()

    def score_bins(self, cells: Float64[np.ndarray, " cells"]) -> ScoreBins:
        """Return bins of equal mass, and an edge at the threshold."""
        return ScoreBins(edges=equal_mass_edges(cells, self.bins, THRESHOLD), cells=cells)

    @property
    def placeholder_bins(self) -> ScoreBins:
        return ScoreBins(edges=(0.0,) * self.bins, cells=np.zeros(0))

    def columns(
        self, outputs: Float64[np.ndarray, "t k"], targets: Shaped[np.ndarray, "t *target"]
    ) -> dict[str, Column]:
        """Return score and label: the logit, or the difference of the two logits."""
        score = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
        return {SCORE: numbers(score), TARGET: places(targets)}

    def blocks(self, name: str, groups: Partition, placed: ScoreBins) -> tuple[Block, ...]:
        encoder = OneHot(LabelledBins(placed.edges))
        return (Block(release=name, part=_LABELS, encoder=encoder, groups=groups),)

    def estimates(self, group: Group, placed: ScoreBins) -> Mapping[str, Estimate | None]:
        counts = _counts(group, placed)
        return dict(
            zip(
                self.compared_figures, (auc(counts), accuracy(counts), balanced_accuracy(counts)), strict=True
            )
        )

    def figures(self, everybody: Group, placed: ScoreBins) -> Iterator[Figure]:
        counts, (p, _) = _counts(everybody, placed), probabilities(placed.cells, placed.edges)
        ones = np.ones_like(counts.cells)
        positive = np.stack((np.zeros_like(p), np.ones_like(p)))
        yield everybody.counted_unit, "", counts.total
        for name, estimate in self.estimates(everybody, placed).items():
            yield name, "", None if estimate is None else estimate.interval
        yield from against_majority(counts)
        for name, above, below in (
            ("sensitivity", counts.correct * positive, positive),
            ("specificity", counts.correct * (1 - positive), 1 - positive),
            ("share of class 1", positive, ones),
        ):
            yield name, "", counts.rate(above, below) if counts.enough else None
        yield (
            "observed minus predicted",
            "",
            observed_minus_predicted(counts, placed) if counts.enough else None,
        )
        yield "brier", "", brier(counts, placed) if counts.enough else None
        for mean, interval in calibration(counts, p):
            yield BY_BIN, f"predicted {mean:.3f}", interval

    def drawings(self, everybody: Group, placed: ScoreBins) -> tuple[Drawing, ...]:
        """Return the ROC curve and the calibration."""
        counts = _counts(everybody, placed)
        area, drawings = auc(counts), []
        rates = [(f.estimate, t.estimate) for _, f, t in roc(counts) if f is not None and t is not None]
        if rates and area is not None:
            drawings.append(
                Drawing(
                    title="ROC",
                    x="false positive rate",
                    y="true positive rate",
                    points=((0.0, 0.0), *rates, (1.0, 1.0)),
                    line=((0.0, 0.0), (1.0, 1.0)),
                    line_name="chance",
                    caption="Noisy rates at the edges of the bins; the area under the curve is "
                    f"{area.value:.3g}, between {area.interval.low:.3g} and {area.interval.high:.3g} with 95 %.",
                )
            )
        p, _ = probabilities(placed.cells, placed.edges)
        shares = tuple(
            (mean, interval.estimate) for mean, interval in calibration(counts, p) if interval is not None
        )
        if shares:
            drawings.append(
                Drawing(
                    title="Calibration",
                    x="predicted probability of class 1",
                    y="observed share",
                    points=shares,
                    line=((0.0, 0.0), (1.0, 1.0)),
                    line_name="calibrated",
                    caption="Noisy shares in bins of the score; a calibrated model lies on the diagonal.",
                )
            )
        return tuple(drawings)

    def predicted_error(self, variance: Mapping[str, float], people: float) -> float:
        """Return the standard deviation of the area by noise, for two classes of equal size."""
        return predicted_error(self.bins, math.sqrt(variance[_LABELS]), people)


def predicted_error(bins: int, noise_std: float, people: float) -> float:
    """Return the standard deviation of the area under the curve by noise, for two classes of equal size.

    Args:
        bins: B.
        noise_std: standard deviation of the noise on a cell, in people.
        people: how many are tested.
    """
    return _NOISE * math.sqrt(bins) * noise_std * math.sqrt(2.0) * 2 / people


def enough_bins(bins: int, noise_std: float, people: float) -> bool:
    """Return whether the corrected binning error is below a quarter of the predicted noise."""
    return _BINNING / bins**2 < predicted_error(bins, noise_std, people) / 4


def auc(counts: ScoreCounts) -> Estimate | None:
    """Return the AUC with corrected ties; None if a class has too few people or one bin has too many."""
    if not counts.enough or counts.fullest_bin_share > MOST_TIED:
        return None
    (h0, h1), (n0, n1) = counts.cells, counts.cells.sum(axis=1)
    below, above = (np.cumsum(h0) - h0 / 2) / n0, 1 - (np.cumsum(h1) - h1 / 2) / n1
    area = float(h1 @ below) / float(n1)
    gradient = np.stack(((above - area) / n0, (below - area) / n1))
    estimate = counts.estimate(area + tilted_ties(counts.cells), gradient)
    lost = _BINNING / counts.cells.shape[1] ** 2 / 2
    untold = counts.people_per_unit * untold_orders(counts.cells)  # pairs of one person may all be alike
    return replace(estimate, noise=estimate.noise + untold + lost**2)


def untold_orders(cells: Float64[np.ndarray, "2 B"]) -> float:
    """Return the variance of the area due to the unknown order of scores within bins.

    In a bin with h1 positives and h0 negatives in random order, the number of pairs with the positive above has the
    variance h1 h0 (h1 + h0 + 1) / 12 (Mann and Whitney 1947). For B bins of equal mass this gives the area a variance
    of about 1 / (3 B^2 n), which neither more people nor less noise removes.
    """
    h0, h1 = np.clip(cells, 0, None)
    return float((h1 * h0 * (h1 + h0 + 1)).sum() / (12 * (h0.sum() * h1.sum()) ** 2))


def observed_minus_predicted(counts: ScoreCounts, placed: ScoreBins) -> Interval | None:
    """Return the share of class 1 less the mean predicted probability, with the noise of both releases."""
    p, _ = probabilities(placed.cells, placed.edges)
    positive = np.stack((np.zeros_like(p), np.ones_like(p)))
    noise = variance_of_means(placed, counts.cells.sum(axis=0))
    return counts.quotient(positive - p, np.ones_like(counts.cells), noise)


def brier(counts: ScoreCounts, placed: ScoreBins) -> Interval | None:
    """Return the mean of (label - p)^2, with an interval that holds wherever scores lie in their bins.

    The estimate assumes that both classes have the same mean p within a bin. This is false: a useful model gives class
    1 larger values. So the interval's ends use the smallest and the largest square of each cell, for p between the
    edges of its bin.
    """
    p, square = probabilities(placed.cells, placed.edges)
    ones = np.ones_like(counts.cells)
    edges = np.array(placed.edges)
    least, most = (1 / (1 + np.exp(-ends)) for ends in (np.append(-np.inf, edges), np.append(edges, np.inf)))
    estimate = counts.quotient(np.stack((square, 1 - 2 * p + square)), ones)
    low = counts.quotient(np.stack((least**2, (1 - most) ** 2)), ones)
    high = counts.quotient(np.stack((most**2, (1 - least) ** 2)), ones)
    if estimate is None or low is None or high is None:
        return None
    return replace(estimate, low=low.low, high=high.high, low_here=low.low_here, high_here=high.high_here)


def calibration(
    counts: ScoreCounts, predicted: Float64[np.ndarray, " B"]
) -> tuple[tuple[float, Interval | None], ...]:
    """Return (mean predicted probability, observed share of class 1) of every bin."""
    points = []
    for index, mean in enumerate(predicted.tolist()):
        cell, positive = np.zeros_like(counts.cells), np.zeros_like(counts.cells)
        cell[:, index], positive[1, index] = 1.0, 1.0
        points.append((mean, counts.rate(positive, cell)))
    return tuple(points)


def roc(counts: ScoreCounts) -> tuple[tuple[float, Interval | None, Interval | None], ...]:
    """Return (threshold, false positive rate, true positive rate) at every edge, by falling threshold."""
    positive = np.zeros_like(counts.cells)
    positive[1] = 1.0
    points = []
    for index in reversed(range(len(counts.edges))):
        beyond = np.zeros_like(counts.cells)
        beyond[:, index + 1 :] = 1.0
        false = counts.rate(beyond * (1 - positive), 1 - positive)
        points.append((counts.edges[index], false, counts.rate(beyond * positive, positive)))
    return tuple(points)


def tilted_ties(cells: Float64[np.ndarray, "2 B"]) -> float:
    """Return the correction of ties, sum_i h1_i h0_i delta_i / (12 n1 n0); see the module's docstring."""
    h0, h1 = np.clip(cells, 0, None)
    both = h0 + h1
    rates = np.where(both > 0, h1 / np.maximum(both, 1e-300), 0.5)
    smooth = isotonic_regression(rates, sample_weight=np.maximum(both, 1.0), y_min=EXTREME, y_max=1 - EXTREME)
    rise = np.clip(np.gradient(np.log(smooth / (1 - smooth))), 0, STEEPEST)
    n0, n1 = cells.sum(axis=1)
    return float((h0 * h1 * rise).sum() / (12 * n0 * n1))


def _counts(group: Group, placed: ScoreBins) -> ScoreCounts:
    """Return a group's counts without the cell of unreadable scores."""
    sums = group.parts[_LABELS]
    return ScoreCounts(
        cells=sums.values[:-1].reshape(2, -1),
        variance=sums.variance,
        people_per_unit=group.people_per_unit,
        edges=placed.edges,
    )
