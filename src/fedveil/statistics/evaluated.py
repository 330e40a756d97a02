"""What an evaluation released: both noisy vectors with all that figures follow from, as ``evaluation.json`` keeps it.

Every figure is a function of this file; reading it again costs nothing and touches no record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float64
from pydantic import BaseModel, ConfigDict, ValidationError

from fedveil.errors import ConfigError, DataError, RunFolderError
from fedveil.files import parse_json, read_text, reading
from fedveil.population.columns import categories_of
from fedveil.population.schema import Schema
from fedveil.statistics.binary import COMPARED, Counts, calibration, roc, rows
from fedveil.statistics.cells import Categories, Partition, Silos
from fedveil.statistics.decoding import decode
from fedveil.statistics.figures import ALL, Row
from fedveil.statistics.intervals import Interval
from fedveil.statistics.layout import Layout
from fedveil.statistics.limits import SiloWeights
from fedveil.statistics.scores import equal_mass_edges, first_layout, probabilities, second_layout

SCHEMA_VERSION: Final = 1
FILE: Final = "evaluation.json"


class Asked(BaseModel):
    """What an evaluation is of: public, and fixed before a record is looked at.

    Attributes:
        schema_: of the tables.
        silo_names: names of all silos.
        silos: a person's weights over silos.
        by: columns whose groups are compared.
        bins: of scores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Schema
    silo_names: tuple[str, ...]
    silos: SiloWeights
    by: tuple[str, ...]
    bins: int

    @property
    def unit(self) -> float:
        """What a person's vector weighs in the sum of one silo at most."""
        return 1 / len(self.silo_names) if self.silos == "uniform" else 1.0

    @property
    def partitions(self) -> Mapping[str, Partition]:
        """The groups, by column.

        Raises:
            ConfigError: a column that is a number.
            DataError: one that the schema does not have.
        """
        return {name: self._partition(name) for name in self.by}

    def _partition(self, name: str) -> Partition:
        if name == "silo":
            return Silos(self.silo_names)
        declared = categories_of(self.schema_, name)
        if declared is None:
            raise ConfigError(
                f"evaluation.by: '{name}' is a number, and groups are declared categories, of which a record has one"
            )
        return Categories(name, declared, pooled=True)

    def edges(self, first: Float64[np.ndarray, " d"], noise_std: float) -> tuple[float, ...]:
        """Return the edges of the bins, a function of the first release."""
        return equal_mass_edges(self.scores(first, noise_std), self.bins)

    def scores(self, first: Float64[np.ndarray, " d"], noise_std: float) -> Float64[np.ndarray, " cells"]:
        """Return the decoded cells of the first release."""
        found: np.ndarray = decode(first_layout(), first, noise_std, self.unit)["scores", "cells"].values[0]
        return found

    def layout(self, edges: tuple[float, ...]) -> Layout:
        """Return the layout of the second release."""
        return second_layout(edges, self.partitions)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluated:
    """An evaluation.

    Attributes:
        name: of the run.
        round: after which its model was evaluated.
        asked: what it is of.
        first, second: the released sums.
        first_std, second_std: standard deviations of their noise, per number.
    """

    name: str
    round: int
    asked: Asked
    first: Float64[np.ndarray, " d1"]
    second: Float64[np.ndarray, " d2"]
    first_std: float
    second_std: float

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Of the bins."""
        return self.asked.edges(self.first, self.first_std)

    @cached_property
    def groups(self) -> Mapping[str, tuple[tuple[str, Counts], ...]]:
        """The counts of every group, by partition; "all" has one."""
        layout = self.asked.layout(self.edges)
        found = {}
        for (
            slot
        ) in layout.slots:  # flat strategies: cells are the numbers themselves, and their noise is white
            scale = slot.scale * self.asked.unit
            cells = self.second[slot.place].reshape(slot.block.groups.size, -1) / scale
            variance = (self.second_std / scale) ** 2
            found[slot.block.release] = tuple(
                (label, self._counts(values, variance))
                for label, values in zip(slot.block.groups.labels, cells, strict=True)
            )
        return found

    @property
    def everybody(self) -> Counts:
        """The counts of all people."""
        return self.groups[ALL][0][1]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every figure with its interval."""
        return rows(self.groups, self._probabilities)

    @cached_property
    def _probabilities(self) -> tuple[Float64[np.ndarray, " bins"], Float64[np.ndarray, " bins"]]:
        return probabilities(self.asked.scores(self.first, self.first_std), self.edges)

    @property
    def calibration(self) -> tuple[tuple[float, Interval | None], ...]:
        """Mean predicted probability and observed share of class 1, bin by bin."""
        return calibration(self.everybody, self._probabilities[0])

    @property
    def headline(self) -> dict[str, float | None]:
        """The figures that runs are compared by, of all people; None for one that has no interval."""
        return {
            row.figure: None if row.interval is None else row.interval.estimate
            for row in self.rows
            if row.group == ALL and row.figure in COMPARED
        }

    @property
    def roc(self) -> tuple[tuple[float, Interval | None, Interval | None], ...]:
        """Thresholds with rates of false and true positives."""
        return roc(self.everybody)

    def _counts(self, values: Float64[np.ndarray, " width"], variance: float) -> Counts:
        return Counts(
            cells=values[:-1].reshape(2, -1),
            variance=variance,
            edges=self.edges,
            people_per_unit=1 / self.asked.unit,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as JSON: what was released first, then what follows from it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "round": self.round,
            "asked": self.asked.model_dump(mode="json", exclude_none=True),
            "releases": [
                {"noise_std": self.first_std, "vector": self.first.tolist()},
                {"noise_std": self.second_std, "vector": self.second.tolist()},
            ],
            "edges": list(self.edges),
            "figures": [row.to_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: Any, origin: object) -> Evaluated:
        """Return the evaluation of a document.

        Raises:
            RunFolderError: another version, or numbers that do not fit what was asked for.
        """
        if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
            raise RunFolderError(f"{origin}: no evaluation of schema version {SCHEMA_VERSION}")
        with reading(origin, RunFolderError):
            try:
                first, second = data["releases"]
                found = cls(
                    name=str(data["name"]),
                    round=int(data["round"]),
                    asked=Asked.model_validate(data["asked"]),
                    first=np.array(first["vector"], dtype=np.float64),
                    second=np.array(second["vector"], dtype=np.float64),
                    first_std=float(first["noise_std"]),
                    second_std=float(second["noise_std"]),
                )
                found.check()
            except (ValidationError, ConfigError, DataError) as error:
                raise RunFolderError(
                    f"{origin} is damaged: it is of nothing that can be evaluated"
                ) from error
            except ValueError as error:
                raise RunFolderError(
                    f"{origin} is damaged: its numbers do not fit what was asked for"
                ) from error
            return found

    def check(self) -> None:
        """Return if the numbers fit.

        Raises:
            ValueError: they do not.
        """
        for vector, std, layout in (
            (self.first, self.first_std, first_layout()),
            (self.second, self.second_std, self.asked.layout((0.0,) * self.asked.bins)),
        ):
            if vector.shape != (layout.length,) or not np.isfinite(vector).all():
                raise ValueError
            if not (math.isfinite(std) and std > 0):
                raise ValueError


def read_evaluated(folder: Path) -> Evaluated | None:
    """Return what a run's evaluation released; None where there is none.

    Raises:
        RunFolderError: a damaged one.
    """
    path = folder / FILE
    if not path.exists():
        return None
    return Evaluated.from_json(parse_json(read_text(path, RunFolderError), path, RunFolderError), path)


def dumps(evaluated: Evaluated) -> bytes:
    """Return the file's content."""
    return (json.dumps(evaluated.to_json(), indent=1, allow_nan=False) + "\n").encode()
