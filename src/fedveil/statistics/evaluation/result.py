"""What an evaluation released: its noisy vectors with all that figures follow from, as ``evaluation.json`` keeps it.

Every figure is a function of this file; reading it again costs nothing and touches no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict

from fedveil.data.schema import Label, Schema, Survival
from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import read_json
from fedveil.statistics.cells import Everybody, Partition, Silos, declared_groups
from fedveil.statistics.decoding import decode
from fedveil.statistics.evaluation.amounts import Amounts
from fedveil.statistics.evaluation.binary import TwoClasses
from fedveil.statistics.evaluation.confusion import Classes
from fedveil.statistics.evaluation.evaluator import Drawing, Evaluator, Group, ScoreBins, Sums
from fedveil.statistics.evaluation.lifetimes import BINS, Lifetimes
from fedveil.statistics.figures import ALL, Row
from fedveil.statistics.intervals import Interval
from fedveil.statistics.layout import Layout
from fedveil.statistics.limits import LEAST_BINS, SiloWeights, unit_of
from fedveil.statistics.stored import SCHEMA_VERSION, NoisySum, NoisySums, restoring
from fedveil.validation import DocumentTable

FILE: Final = "evaluation.json"

EVALUATING: Final = "checkpoint/evaluation.json"
"""File in the run folder: releases of an unfinished evaluation."""


class EvaluationRequest(DocumentTable):
    """What an evaluation is of: public, and fixed before a record is looked at.

    Attributes:
        schema_: of the tables.
        silo_names: names of all silos.
        silos: a person's weights over silos.
        by: columns whose groups are compared.
        bins: of scores; None where there are none, or as many as are usual.
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
        """What a person's vector weighs in the sum of one silo at most."""
        return unit_of(self.silos, len(self.silo_names))

    @property
    def evaluator(self) -> Evaluator:
        """What is released of this target.

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
            self._only("survival times", ("bins", "horizons"))
            if not self.horizons:
                raise ConfigError(
                    "evaluation.horizons: give the times by which events are predicted, such as [365, 730]; times "
                    "taken from the records would tell of them"
                )
            return Lifetimes(self.horizons, BINS if self.bins is None else self.bins)
        self._only("numbers", ("max_standard_error",))
        if target.bounds is None:
            raise ConfigError(
                "evaluation: give the bounds of the target, target.lower and target.upper of the schema; bounds taken "
                "from the records would tell of them"
            )
        lower, upper = target.bounds
        return Amounts(
            lower, upper, upper - lower if self.max_standard_error is None else self.max_standard_error
        )

    def _only(self, of: str, keys: tuple[str, ...]) -> None:
        """Refuse keys of other targets."""
        for key in ("bins", "max_standard_error", "horizons"):
            if key not in keys and getattr(self, key) not in (None, ()):
                raise ConfigError(
                    f"evaluation.{key}: the schema's target is of {of}, which has no such key; remove it"
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
        """The layouts of all releases; bins that are not placed yet are stood in for, at the same length and norm."""
        first = self.evaluator.first
        return (*(() if first is None else (first,)), self.last(self.evaluator.placeholder_bins))

    def score_bins(self, before: NoisySums) -> ScoreBins:
        """Return the bins by the releases before the last."""
        evaluator = self.evaluator
        if evaluator.first is None:
            return evaluator.placeholder_bins
        (made,) = before
        (found,) = decode(evaluator.first, made.vector, made.std, self.unit).values()
        return replace(evaluator.score_bins(found.values[0]), covariance=found.covariance)

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
    """An evaluation.

    Attributes:
        name: of the run.
        round: after which its model was evaluated.
        asked: what it is of.
        releases: the released sums.
    """

    name: str
    round: int
    asked: EvaluationRequest
    releases: NoisySums

    def __repr__(self) -> str:
        found = ", ".join(
            f"{name}={'none' if one is None else f'{one.estimate:.4g}'}"
            for name, one in self.headline.items()
        )
        return f"Evaluated(name='{self.name}', round={self.round}, {found})"

    @cached_property
    def score_bins(self) -> ScoreBins:
        """The bins of scores."""
        return self.asked.score_bins(self.releases[:-1])

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, Group]]:
        """What was released of every group, by partition; "all" has one.

        Strategies of the last release are flat: sums are its numbers themselves, and their noise is white.
        """
        last, layout = self.releases[-1], self.asked.last(self.score_bins)
        found: dict[str, dict[str, dict[str, Sums]]] = {}
        for slot in layout.slots:
            scale, block = slot.scale * self.asked.unit, slot.block
            sums = last.vector[slot.place].reshape(block.groups.size, -1) / scale
            for label, values in zip(block.groups.labels, sums, strict=True):
                parts = found.setdefault(block.release, {}).setdefault(label, {})
                parts[block.part] = Sums(values=values, variance=(last.std / scale) ** 2)
        per_unit = 1 / self.asked.unit
        return {
            name: {label: Group(parts=parts, people_per_unit=per_unit) for label, parts in groups.items()}
            for name, groups in found.items()
        }

    @property
    def overall(self) -> Group:
        """What was released of all people."""
        return self.groups[ALL][ALL]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every figure with its interval: of all people, and of every group with its difference to all the others."""
        evaluator = self.asked.evaluator
        found = [
            _row(name, ALL, interval, cell)
            for name, cell, interval in evaluator.figures(self.overall, self.score_bins)
        ]
        for partition, members in self.groups.items():
            if partition == ALL:
                continue
            whole = Group.union(tuple(members.values()))
            for name, group in members.items():
                label = f"{partition} = {name}"
                others = evaluator.estimates(whole.complement(group), self.score_bins)
                for figure, own in evaluator.estimates(group, self.score_bins).items():
                    other = others[figure]
                    found.append(_row(figure, label, None if own is None else own.interval))
                    apart = None if own is None or other is None else own.minus(other)
                    found.append(_row(f"{figure} minus the others'", label, apart))
        return tuple(found)

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """Curves of all people."""
        return self.asked.evaluator.drawings(self.overall, self.score_bins)

    @property
    def headline(self) -> dict[str, Interval | None]:
        """The figures that runs are compared by, of all people; None for one that has no interval."""
        wanted = self.asked.evaluator.headline
        return {row.figure: row.interval for row in self.rows if row.group == ALL and row.figure in wanted}

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as JSON: what was released first, then what follows from it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "round": self.round,
            "asked": self.asked.model_dump(mode="json", exclude_none=True),
            "releases": [one.to_json() for one in self.releases],
            "edges": list(self.score_bins.edges),
            "figures": [row.to_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: Any, origin: object) -> ReleasedEvaluation:
        """Return the evaluation of a document.

        Raises:
            RunFolderError: another version, or numbers that do not fit what was asked for.
        """
        with restoring(data, origin):
            asked = EvaluationRequest.model_validate(data["asked"])
            releases = tuple(
                NoisySum.from_json(one, layout.length, origin)
                for one, layout in zip(data["releases"], asked.layouts, strict=True)
            )
            return cls(name=str(data["name"]), round=int(data["round"]), asked=asked, releases=releases)


def read_evaluated(folder: Path) -> ReleasedEvaluation | None:
    """Return what a run's evaluation released; None where there is none.

    Raises:
        RunFolderError: a damaged one.
    """
    path = folder / FILE
    if not path.exists():
        return None
    return ReleasedEvaluation.from_json(read_json(path, RunFolderError), path)


def _row(figure: str, group: str, interval: Interval | None, cell: str = "") -> Row:
    return Row(release="evaluation", figure=figure, group=group, cell=cell, interval=interval)
