"""Result of an evaluation: noisy vectors and all inputs of the figures, as stored in ``evaluation.json``.

Every figure is a function of this file; reading it again costs nothing and touches no record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from pydantic import ConfigDict

from fedveil.data.columns import Column, ColumnTable, State
from fedveil.data.schema import Amount, Label, Schema, Survival, refuse_late_entry
from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block, Layout, OneHot, decode
from fedveil.statistics.cells import UNREADABLE, Everybody, Partition, Silos, declared_groups
from fedveil.statistics.evaluation.amounts import Amounts
from fedveil.statistics.evaluation.binary import TwoClasses
from fedveil.statistics.evaluation.counts import Counts, accuracy, against_majority, balanced_accuracy
from fedveil.statistics.evaluation.evaluator import (
    SCORE,
    TARGET,
    Drawing,
    Evaluator,
    Figure,
    Group,
    ScoreBins,
    Sums,
    places,
)
from fedveil.statistics.evaluation.lifetimes import BINS, Lifetimes
from fedveil.statistics.figures import ALL, Row
from fedveil.statistics.intervals import Estimate, Interval
from fedveil.statistics.request import LEAST_BINS, SiloWeights, unit_of
from fedveil.statistics.result import NoisySums, figures_json, read_figures, restore_sums, restoring
from fedveil.validation import DocumentTable

# --- confusion matrix ---------------------------------------------------------------------------------------
# Test metrics of a classifier of more than two classes, from the noisy confusion matrix.
#
# A record is the unit vector of (its class, the class that is predicted): one release, whose K^2 counts have
# independent noise. Accuracy, its mean over classes and every class's recall are quotients of their sums.


_MATRIX: Final = "confusion"


@dataclass(frozen=True)
class ConfusionCells(Partition):
    """Class and predicted class at once; a record without a prediction of a class has a cell of its own."""

    classes: tuple[str, ...]
    columns: ClassVar[tuple[str, ...]] = (SCORE, TARGET)

    @property
    def labels(self) -> tuple[str, ...]:
        return (
            *(f"{actual} taken for {predicted}" for actual in self.classes for predicted in self.classes),
            UNREADABLE,
        )

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
        names: names of the classes.
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
        for index, name in enumerate(self.names):
            own = np.zeros_like(counts.cells)
            own[index] = 1.0
            yield "recall", name, counts.rate(own * counts.correct, own)
            yield "share", name, counts.rate(own, ones)

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


# --- evaluation ---------------------------------------------------------------------------------------------


FILE: Final = "evaluation.json"

EVALUATING: Final = "checkpoint/evaluation.json"
"""File in the run folder: releases of an unfinished evaluation."""


class EvaluationRequest(DocumentTable):
    """Request for an evaluation: public, and fixed before a record is read.

    Attributes:
        schema_: schema of the tables.
        silo_names: names of all silos.
        silos: a person's weights over silos.
        by: columns whose groups are compared.
        bins: number of bins of scores; None: the usual number, or scores have no bins.
        max_standard_error: the largest error of a target that is a number that counts in full; None for the width of
            its bounds.
        horizons: by which events of a survival time are predicted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Schema
    silo_names: tuple[str, ...]
    silos: SiloWeights
    by: tuple[str, ...]
    bins: int | None = None
    max_standard_error: float | None = None
    horizons: tuple[float, ...] = ()

    @property
    def unit(self) -> float:
        """Return the largest weight of a person's vector in the sum of one silo."""
        return unit_of(self.silos, len(self.silo_names))

    @property
    def evaluator(self) -> Evaluator:
        """Return the evaluator for this target.

        Raises:
            ConfigError: something that the target needs is not declared, or something is that it has not.
        """
        target = self.schema_.target
        if isinstance(target, Label):
            self._only("classes", ("bins",) if len(target.classes) == 2 else ())
            if len(target.classes) == 2:
                return TwoClasses(LEAST_BINS if self.bins is None else self.bins)
            return Classes(target.classes)
        if isinstance(target, Survival):
            refuse_late_entry(self.schema_, "the noisy evaluation ([evaluation])")
            self._only("survival times", ("bins", "horizons"))
            if not self.horizons:
                raise ConfigError(
                    "evaluation.horizons: give the times by which events are predicted, such as [365, 730]; "
                    "times taken from the records would leak information about them"
                )
            return Lifetimes(self.horizons, BINS if self.bins is None else self.bins)
        if not isinstance(target, Amount):
            raise ConfigError(
                f"evaluation: no release measures {len(target.columns)} targets of a record; leave [evaluation] out "
                "and test on a public table (data.table.test_file), or train a model for each target"
            )
        self._only("numbers", ("max_standard_error",))
        if target.bounds is None:
            raise ConfigError(
                "evaluation: give the bounds of the target, target.lower and target.upper of the schema; "
                "bounds taken from the records would leak information about them"
            )
        lower, upper = target.bounds
        return Amounts(
            lower, upper, upper - lower if self.max_standard_error is None else self.max_standard_error
        )

    def _only(self, task: str, keys: tuple[str, ...]) -> None:
        """Refuse keys of other targets."""
        for key in ("bins", "max_standard_error", "horizons"):
            if key not in keys and getattr(self, key) not in (None, ()):
                raise ConfigError(
                    f"evaluation.{key}: the schema's target is of {task}, which has no such key; remove it"
                )

    @property
    def partitions(self) -> Mapping[str, Partition]:
        """Everybody, and the groups by column.

        Raises:
            ConfigError: a column that is a number.
            DataError: one that the schema does not have.
        """
        return {ALL: Everybody(), **{name: self._partition(name) for name in self.by}}

    def _partition(self, name: str) -> Partition:
        return (
            Silos(self.silo_names) if name == "silo" else declared_groups(self.schema_, name, "evaluation.by")
        )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts of all releases, with placeholders of equal length and norm for bins not yet placed."""
        first = self.evaluator.first
        return (*(() if first is None else (first,)), self.last(self.evaluator.placeholder_bins))

    def score_bins(self, before: NoisySums) -> ScoreBins:
        """Return the bins by the releases before the last."""
        evaluator = self.evaluator
        if evaluator.first is None:
            return evaluator.placeholder_bins
        (noisy,) = before
        (cells,) = decode(evaluator.first, noisy.vector, noisy.std, self.unit).values()
        return replace(evaluator.score_bins(cells.values[0]), covariance=cells.covariance)

    def last(self, placed: ScoreBins) -> Layout:
        """Return the layout of the last release, of all people and of every group."""
        evaluator = self.evaluator
        return Layout(
            tuple(
                block
                for name, groups in self.partitions.items()
                for block in evaluator.blocks(name, groups, placed)
            )
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedEvaluation:
    """Result of one evaluation.

    Attributes:
        name: name of the run.
        round: after which its model was evaluated.
        request: the requested figures.
        releases: the released sums.
    """

    name: str
    round: int
    request: EvaluationRequest
    releases: NoisySums

    def __repr__(self) -> str:
        figures = ", ".join(
            f"{name}={'none' if interval is None else f'{interval.estimate:.4g}'}"
            for name, interval in self.headline.items()
        )
        return f"Evaluated(name='{self.name}', round={self.round}, {figures})"

    @cached_property
    def score_bins(self) -> ScoreBins:
        """Return the bins of scores."""
        return self.request.score_bins(self.releases[:-1])

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, Group]]:
        """Return the released figures of every group, by partition; the partition "all" has one group.

        Strategies of the last release are flat: sums are its numbers themselves, and their noise is white.
        """
        last, layout = self.releases[-1], self.request.last(self.score_bins)
        partitions: dict[str, dict[str, dict[str, Sums]]] = {}
        for slot in layout.slots:
            scale, block = slot.scale * self.request.unit, slot.block
            sums = last.vector[slot.place].reshape(block.groups.size, -1) / scale
            for label, values in zip(block.groups.labels, sums, strict=True):
                parts = partitions.setdefault(block.release, {}).setdefault(label, {})
                parts[block.part] = Sums(values=values, variance=(last.std / scale) ** 2)
        per_unit = 1 / self.request.unit
        return {
            name: {label: Group(parts=parts, people_per_unit=per_unit) for label, parts in groups.items()}
            for name, groups in partitions.items()
        }

    @property
    def overall(self) -> Group:
        """Return the released figures of all people."""
        return self.groups[ALL][ALL]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return every figure with its interval: of all people, and of every group, also minus all others."""
        evaluator = self.request.evaluator
        rows = [
            _row(name, ALL, interval, cell)
            for name, cell, interval in evaluator.figures(self.overall, self.score_bins)
        ]
        for partition, members in self.groups.items():
            if partition == ALL:
                continue
            whole = Group.union(tuple(members.values()))
            for name, group in members.items():
                label = f"{partition} = {name}"
                complement = evaluator.estimates(whole.complement(group), self.score_bins)
                for figure, own in evaluator.estimates(group, self.score_bins).items():
                    other = complement[figure]
                    rows.append(_row(figure, label, None if own is None else own.interval))
                    apart = None if own is None or other is None else own.minus(other)
                    rows.append(_row(f"{figure} minus the others'", label, apart))
        return tuple(rows)

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """Curves of all people."""
        return self.request.evaluator.drawings(self.overall, self.score_bins)

    @property
    def headline(self) -> dict[str, Interval | None]:
        """Return the figures of all people that runs are compared by; None for a figure without an interval."""
        headline = self.request.evaluator.headline
        return {row.figure: row.interval for row in self.rows if row.group == ALL and row.figure in headline}

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as JSON: what was released first, then what follows from it."""
        return figures_json(
            self.name,
            self.request,
            (release.to_json() for release in self.releases),
            round=self.round,
            edges=list(self.score_bins.edges),
            figures=[row.to_json() for row in self.rows],
        )

    @classmethod
    def from_json(cls, data: Any, origin: object) -> ReleasedEvaluation:
        """Return the evaluation of a document.

        Raises:
            RunFolderError: another version, or numbers that do not fit the request.
        """
        with restoring(data, origin):
            request = EvaluationRequest.model_validate(data["request"])
            lengths = [layout.length for layout in request.layouts]
            releases = restore_sums(data, lengths, origin, least=len(lengths))
            return cls(name=str(data["name"]), round=int(data["round"]), request=request, releases=releases)


def read_evaluated(folder: Path) -> ReleasedEvaluation | None:
    """Return what a run's evaluation released; None where there is none.

    Raises:
        RunFolderError: a damaged one.
    """
    return read_figures(folder / FILE, ReleasedEvaluation)


def _row(figure: str, group: str, interval: Interval | None, cell: str = "") -> Row:
    return Row(release="evaluation", figure=figure, group=group, cell=cell, interval=interval)
