"""Test metrics of a classifier of more than two classes, from the noisy confusion matrix.

A record is the unit vector of (its class, the class that is predicted): one release, whose K^2 counts have independent
noise. Accuracy, its mean over classes and every class's recall are quotients of their sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from fedveil.data.columns import Column, ColumnTable, State
from fedveil.statistics.blocks import Block, OneHot
from fedveil.statistics.cells import UNREADABLE, Partition
from fedveil.statistics.evaluation.counts import Counts, accuracy, against_majority, balanced_accuracy
from fedveil.statistics.evaluation.evaluator import SCORE, TARGET, Evaluator, Figure, Group, ScoreBins, places
from fedveil.statistics.intervals import Estimate

_MATRIX: Final = "confusion"


@dataclass(frozen=True)
class ConfusionCells(Partition):
    """Class and predicted class at once; a record without a prediction of a class has a cell of its own."""

    classes: tuple[str, ...]
    columns: ClassVar[tuple[str, ...]] = (SCORE, TARGET)

    @property
    def labels(self) -> tuple[str, ...]:
        return (*(f"{one} taken for {other}" for one in self.classes for other in self.classes), UNREADABLE)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        predicted, actual, k = table.places(SCORE), table.places(TARGET), len(self.classes)
        readable = (predicted.state == State.VALID) & (actual.state == State.VALID) & (predicted.values < k)
        return np.where(readable, actual.values * k + predicted.values, k * k).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Confusion(Counts):
    """Noisy counts of classes by predicted classes."""

    @property
    def correct(self) -> Float64[np.ndarray, "K K"]:
        return np.eye(len(self.cells))


@dataclass(frozen=True)
class Classes(Evaluator):
    """More than two classes, of which the largest output is predicted, the first of equal ones.

    Attributes:
        names: of the classes.
    """

    measure: ClassVar[str] = "balanced accuracy"

    names: tuple[str, ...]
    compared_figures: ClassVar[tuple[str, ...]] = ("accuracy", "balanced accuracy")

    def columns(
        self, outputs: Float64[np.ndarray, "t k"], targets: Shaped[np.ndarray, "t *target"]
    ) -> dict[str, Column]:
        readable = ~np.isnan(outputs).any(axis=1)
        return {SCORE: places(outputs.argmax(axis=1), readable), TARGET: places(targets)}

    def blocks(self, name: str, groups: Partition, placed: ScoreBins) -> tuple[Block, ...]:
        encoder = OneHot(ConfusionCells(self.names))
        return (Block(release=name, part=_MATRIX, encoder=encoder, groups=groups),)

    def estimates(self, group: Group, placed: ScoreBins) -> Mapping[str, Estimate | None]:
        counts = self._counts(group)
        return {"accuracy": accuracy(counts), "balanced accuracy": balanced_accuracy(counts)}

    def figures(self, everybody: Group, placed: ScoreBins) -> Iterator[Figure]:
        counts = self._counts(everybody)
        yield everybody.counted_unit, "", counts.total
        for name, estimate in self.estimates(everybody, placed).items():
            yield name, "", None if estimate is None else estimate.interval
        yield from against_majority(counts)
        ones = np.ones_like(counts.cells)
        for place, name in enumerate(self.names):
            own = np.zeros_like(counts.cells)
            own[place] = 1.0
            yield "recall", name, counts.quotient(own * counts.correct, own)
            yield "share", name, counts.quotient(own, ones)

    def predicted_error(self, variance: Mapping[str, float], people: float) -> float:
        """Return what noise alone gives the balanced accuracy, for classes of equal size of which half is predicted.

        A recall divides by n / K and has the gradient (correct - 1/2) K / n in K cells; the mean is of K such.
        """
        return math.sqrt(variance[_MATRIX]) * len(self.names) / (2 * people)

    def _counts(self, group: Group) -> Confusion:
        """Return the matrix without the cell of what is unreadable."""
        sums, k = group.parts[_MATRIX], len(self.names)
        return Confusion(
            cells=sums.values[:-1].reshape(k, k),
            variance=sums.variance,
            people_per_unit=group.people_per_unit,
        )
