"""Variant: runs that differ only in their seed, with means and deviations over the seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedveil.privacy.claims import Role
from fedveil.privacy.statement import Statement
from fedveil.report.drawing import Curve, show
from fedveil.report.run_data import RunData
from fedveil.run.folder.documents import JsonObject, RoundRow


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean over seeds, and sample standard deviation (denominator n - 1; None for one seed)."""

    mean: float
    std: float | None

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Spread":
        """Return mean and deviation of one or more values."""
        return cls(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return show(self.mean) if self.std is None else f"{show(self.mean)} ± {self.std:.2g}"


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One variant at the last round that all its seeds have reached and evaluated.

    Attributes:
        variant: label of the variant.
        seeds: number of seeds.
        round: the last common evaluated round.
        metrics: test metrics in this round.
        seconds: duration of the rounds up to `round`.
        bits: bits per parameter of all messages up to `round`; None if they were not counted.
        epsilon: largest epsilon over the seeds, of whole runs with all side releases; `math.inf` without a guarantee.
        to_server: largest epsilon against the server, likewise.
        delta: delta of the runs.
        large_delta: whether delta is at least one over the number of units in some run.
        unit: unit of privacy.
        adjacency: neighbouring relation.
        accountant: accountant of epsilon.
    """

    variant: str
    seeds: int
    round: int
    metrics: Mapping[str, Spread]
    seconds: Spread
    bits: Spread | None
    epsilon: float
    to_server: float
    delta: float
    large_delta: bool
    unit: str
    adjacency: str
    accountant: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Runs that differ only in their seed; `colour` is the variant's index in the palette."""

    label: str
    runs: tuple[RunData, ...]
    colour: int

    @cached_property
    def rounds(self) -> dict[int, list[RoundRow]]:
        """Rows of all seeds by round, for the rounds that all seeds have, in order."""
        by_number = [{row.round: row for row in run.rounds} for run in self.runs]
        common = sorted(set.intersection(*map(set, by_number)))
        return {number: [rows[number] for rows in by_number] for number in common}

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that all seeds have."""
        return [metric for metric in self.runs[0].metrics if all(metric in run.metrics for run in self.runs)]

    def values(self, metric: str) -> dict[int, list[float]]:
        """Return the metric of every seed by round, for the common rounds in which all seeds measured it."""
        return {
            number: [row.test[metric] for row in rows]
            for number, rows in self.rounds.items()
            if all(metric in row.test for row in rows)
        }

    def epsilon(self, number: int) -> float:
        """Return the largest epsilon over seeds up to a round, which bounds every seed."""
        return max(row.epsilon for row in self.rounds[number])

    @cached_property
    def sent_mebibytes(self) -> dict[int, float]:
        """Mean over seeds of the MiB sent up to each round; empty if some round was not counted."""
        cumulative, total = {}, 0.0
        for number, rows in self.rounds.items():
            lengths = [row.bytes_up for row in rows if row.bytes_up is not None]
            if number > 0 and len(lengths) < len(rows):
                return {}
            total += statistics.fmean(lengths) / 2**20 if lengths else 0.0
            if total > 0:
                cumulative[number] = total
        return cumulative

    def bits(self, last: int) -> Spread | None:
        """Return the bits per parameter of all messages up to a round, over seeds; None if not counted."""
        of_seeds = []
        for run in self.runs:
            counted = [row for row in run.rounds if row.bytes_up is not None and row.round <= last]
            plain = sum(
                row.communication_cost.float32_bytes for row in counted if row.communication_cost is not None
            )
            if not plain:
                return None
            # `plain` is the length of the same updates in float32, that is, 32 bits per parameter.
            of_seeds.append(32 * sum(row.bytes_up or 0 for row in counted) / plain)
        return Spread.from_values(of_seeds)

    def curve(self, metric: str, *, over: Literal["rounds", "epsilon", "communication_cost"]) -> Curve | None:
        """Return the curve of a metric over rounds, over epsilon, or over the MiB sent so far; None if empty.

        Rounds with epsilon 0 are left out of a curve over epsilon.
        """
        places = {
            "rounds": {number: float(number) for number in self.rounds},
            "epsilon": {number: spent for number in self.rounds if (spent := self.epsilon(number)) > 0},
            "communication_cost": self.sent_mebibytes,
        }[over]
        points = [
            (places[number], Spread.from_values(values))
            for number, values in self.values(metric).items()
            if number in places
        ]
        if not points:
            return None
        stds = [spread.std for _, spread in points if spread.std is not None]
        return Curve(
            label=self.label,
            colour=self.colour,
            x=[x for x, _ in points],
            mean=[spread.mean for _, spread in points],
            std=stds or None,
        )

    def row(self) -> ComparisonRow:
        """Return the variant's row at the last round that all seeds have evaluated."""
        measured = {metric: values for metric in self.metrics if (values := self.values(metric))}
        last = max((max(values) for values in measured.values()), default=max(self.rounds))
        statements = [run.statement for run in self.runs]
        return ComparisonRow(
            variant=self.label,
            seeds=len(self.runs),
            round=last,
            metrics={
                metric: Spread.from_values(values[last])
                for metric, values in measured.items()
                if last in values
            },
            seconds=Spread.from_values(
                [sum(row.seconds for row in run.rounds if row.round <= last) for run in self.runs]
            ),
            bits=self.bits(last),
            epsilon=max(math.inf if one.epsilon is None else one.epsilon for one in statements),
            to_server=max(_to_server(one) for one in statements),
            # Runs of one variant differ only in seeds, so these fields are equal in all of them.
            delta=statements[0].delta,
            large_delta=any(one.has_large_delta for one in statements),
            unit=statements[0].unit,
            adjacency=statements[0].adjacency.value,
            accountant=statements[0].accountant,
        )


def settings_of(experiment: JsonObject, path: str = "") -> dict[str, str]:
    """Return all settings by dotted key, without the name of the experiment and without seeds."""
    settings: dict[str, str] = {}
    for key, value in experiment.items():
        if key == "seed" or f"{path}{key}" == "name":
            continue
        if key == "insecure_seed":  # its value is a seed, but its presence changes the guarantee
            settings[f"{path}{key}"] = "given"
        elif isinstance(value, Mapping):
            settings |= settings_of(value, f"{path}{key}.")
        else:
            settings[f"{path}{key}"] = str(value)
    return settings


def _to_server(statement: Statement) -> float:
    """Return the epsilon against the server; infinite if the statement has no line about the server."""
    found = next((line.epsilon for line in statement.trust if line.role == Role.SERVER), None)
    return math.inf if found is None else found
