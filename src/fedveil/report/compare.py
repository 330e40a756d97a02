"""Comparison of runs: means and deviations over seeds, privacy-utility curves, one page and one table.

Runs are repetitions of one experiment if their experiment.toml files agree in everything except seeds and the seed
suffix of the name. Their mean is therefore a mean over seeds only. A :class:`Variant` holds such runs.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from markupsafe import Markup

from fedveil.errors import RunFolderError
from fedveil.privacy.claims import Role
from fedveil.privacy.statement import Statement
from fedveil.report import plots
from fedveil.report.document import (
    PRIVATE,
    Section,
    document,
    join_parts,
    notice,
    table,
    write_document,
)
from fedveil.report.drawing import Curve, Plot, show, show_delta, show_epsilon, words
from fedveil.report.run_data import NOT_COVERED, RunData, load_run
from fedveil.run.folder.documents import SCHEMA_VERSION, JsonObject, JsonValue, RoundRow


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
            epsilon=max(
                math.inf if statement.epsilon is None else statement.epsilon for statement in statements
            ),
            to_server=max(_to_server(statement) for statement in statements),
            # Runs of one variant differ only in seeds, so these fields are equal in all of them.
            delta=statements[0].delta,
            large_delta=any(statement.has_large_delta for statement in statements),
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
    epsilon = next((line.epsilon for line in statement.trust if line.role == Role.SERVER), None)
    return math.inf if epsilon is None else epsilon


_OF_ONE_RUN: Final = (
    "ε is that of one run (one seed) of the variant, whose privacy.json has the whole statement. All these runs on the "
    "same people cost more together: fedveil spent RUN... says how much, where their users are the same"
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of variants.

    Attributes:
        rows: one row per variant.
        warnings: reasons why the guarantees of the variants are not comparable, or absent.
        variants: the variants with their runs.
    """

    rows: tuple[ComparisonRow, ...]
    warnings: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def coverage(self) -> str:
        """Sentence about exact test metrics of private records; empty if there are none."""
        exact = [
            variant.label
            for variant in self.variants
            if variant.metrics and any(run.public_test is None for run in variant.runs)
        ]
        if not exact:
            return ""
        return f"Test metrics on private records that were held out are {NOT_COVERED}: {', '.join(exact)}."

    def to_json(self) -> JsonObject:
        """Return the table as JSON values; an infinite epsilon and a missing deviation are null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "warnings": list(self.warnings),
            "rows": [_row_json(row) for row in self.rows],
        }

    def write(self, path: Path) -> Path:
        """Write the page of the comparison.

        Raises:
            RunFolderError: the file cannot be written.
        """
        return write_document(path, self.page())

    def page(self) -> str:
        """Return the comparison as one HTML text."""
        runs = sum(row.seeds for row in self.rows)
        return document(
            title=f"{len(self.rows)} variants, {runs} runs",
            kicker="fedveil · comparison of runs",
            lead="Runs that differ only in their seeds form one variant.",
            sections=[
                Section(identifier="privacy", title="What is promised", body=self._promises()),
                Section(identifier="result", title="What is reached", body=self._results()),
                Section(identifier="curves", title="Curves", plots=self.plots, wide=True),
            ],
        )

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(metric for variant in self.variants for metric in variant.metrics))

    def _promises(self) -> Markup:
        header = ["variant", "ε", "ε to server", "δ", "unit", "neighbouring data sets", "accountant"]
        rows = [
            [
                row.variant,
                *(
                    show_epsilon(epsilon) if math.isfinite(epsilon) else "∞ (no guarantee)"
                    for epsilon in (row.epsilon, row.to_server)
                ),
                show_delta(row.delta),
                row.unit,
                words(row.adjacency).replace("-", " "),
                row.accountant,
            ]
            for row in self.rows
        ]
        warnings = join_parts([notice(warning, kind="warning") for warning in self.warnings])
        return warnings + table(header, rows, caption=_OF_ONE_RUN)

    def _results(self) -> Markup:
        metrics = self._metrics
        counted = any(row.bits is not None for row in self.rows)
        header = [
            "variant",
            *(f"test {words(metric)}" for metric in metrics),
            *(["bits per parameter"] if counted else []),
            "round",
            "seeds",
            "seconds",
        ]
        rows = [
            [
                row.variant,
                *(str(row.metrics[metric]) if metric in row.metrics else "" for metric in metrics),
                *(["" if row.bits is None else str(row.bits)] if counted else []),
                str(row.round),
                str(row.seeds),
                str(row.seconds),
            ]
            for row in self.rows
        ]
        for label, constant in self._baselines():
            cells = [show(constant[metric]) if metric in constant else "" for metric in metrics]
            rows.append([label, *cells, *([""] if counted else []), "", "", ""])
        return table(
            header,
            rows,
            caption="Mean ± sample standard deviation over seeds, at the last common round. "
            f"{self.coverage} {PRIVATE}",
        )

    def _baselines(self) -> list[tuple[str, Mapping[str, float]]]:
        """Return the metrics of the best constant answer: one line, or one per group of variants that differ."""
        groups: dict[tuple[tuple[str, float], ...], list[str]] = {}
        for variant in self.variants:
            constant = variant.runs[0].baseline
            if constant:
                groups.setdefault(tuple(constant.items()), []).append(variant.label)
        several = len(groups) > 1
        return [
            (
                f"constant baseline ({', '.join(labels)})" if several else "constant baseline",
                dict(items),
            )
            for items, labels in groups.items()
        ]

    @property
    def plots(self) -> tuple[Plot, ...]:
        """Curves of every metric over rounds, over epsilon, and over the bytes sent."""
        shown = []
        units = ", ".join(dict.fromkeys(row.unit for row in self.rows if math.isfinite(row.epsilon)))
        for metric in self._metrics:
            by_round = [curve for v in self.variants if (curve := v.curve(metric, over="rounds"))]
            if not by_round:
                continue
            shown.append(plots.compared_by_round(by_round, metric))
            private: list[Curve] = []
            unprotected: list[Curve] = []
            for variant, row in zip(self.variants, self.rows, strict=True):
                # A variant without a guarantee has no position on an axis of epsilon: only its last mean is drawn.
                guaranteed = math.isfinite(row.epsilon)
                if curve := variant.curve(metric, over="epsilon" if guaranteed else "rounds"):
                    (private if guaranteed else unprotected).append(curve)
            if private:
                shown.append(
                    plots.compared_by_epsilon(private, unprotected, metric, measured_by=f"one {units}")
                )
            by_communication = [
                curve for v in self.variants if (curve := v.curve(metric, over="communication_cost"))
            ]
            if by_communication:
                shown.append(plots.compared_by_communication(by_communication, metric))
        return tuple(shown)


def compare(run_folders: Sequence[Path]) -> Comparison:
    """Group runs into variants, in the order of the folders.

    Raises:
        RunFolderError: no folder is given; one is missing, damaged, of another version, or has no round yet;
            the seeds of a variant have no round in common.
    """
    if not run_folders:
        raise RunFolderError("There is nothing to compare: give at least one run folder.")
    runs = [load_run(folder) for folder in dict.fromkeys(run_folders)]
    for run in runs:
        if not run.rounds:
            raise RunFolderError(
                f"{run.folder / 'metrics.jsonl'} has no round yet: there is nothing to compare."
            )
    variants = _variants(runs)
    for variant in variants:
        if not variant.rounds:
            folders = ", ".join(str(run.folder) for run in variant.runs)
            raise RunFolderError(f"The seeds of {variant.label!r} have no round in common ({folders}).")
    rows = tuple(variant.row() for variant in variants)
    return Comparison(rows=rows, warnings=_warnings(rows), variants=variants)


def _variants(runs: Sequence[RunData]) -> tuple[Variant, ...]:
    """Group runs by experiment; the labels of variants of one name contain the settings that differ."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[RunData]] = {}
    for run in runs:
        settings = tuple(sorted(settings_of(run.experiment).items()))
        groups.setdefault((run.variant, settings), []).append(run)
    variants: list[Variant] = []
    # A label has the name, and the settings in which the variant differs from others of this name.
    for (name, settings), members in groups.items():
        rivals = [dict(other) for rival, other in groups if rival == name]
        differing = [
            f"{key}={value}" for key, value in settings if any(rival.get(key) != value for rival in rivals)
        ]
        missing = sorted({key for rival in rivals for key in rival} - {key for key, _ in settings})
        parts = [*differing, *(f"no {key}" for key in missing)]
        label = f"{name} ({', '.join(parts)})" if parts else name
        variants.append(Variant(label=label, runs=tuple(members), colour=len(variants)))
    return tuple(variants)


def _warnings(rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    """Return the reasons why the epsilons of the variants are not comparable, or protect no unit."""
    # An epsilon holds for one unit, one neighbouring relation and one delta: with others it is another quantity.
    private = [row for row in rows if math.isfinite(row.epsilon)]
    unlike = [
        name
        for name, values in (
            ("units of privacy", {row.unit for row in private}),
            ("adjacencies", {row.adjacency for row in private}),
            ("values of δ", {row.delta for row in private}),
        )
        if len(values) > 1
    ]
    warnings = []
    if unlike:
        warnings.append(
            f"The guarantees are for different {' and different '.join(unlike)}: their ε are not comparable as numbers."
        )
    if len(private) < len(rows):
        names = ", ".join(row.variant for row in rows if not math.isfinite(row.epsilon))
        warnings.append(f"No privacy guarantee at all: {names}.")
    if large := ", ".join(row.variant for row in private if row.large_delta):
        warnings.append(
            f"δ is not below one over the number of units, which protects no single one of them: {large}."
        )
    return tuple(warnings)


def _finite(value: float) -> float | None:
    """Return a finite value, None for any other: JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def _row_json(row: ComparisonRow) -> JsonObject:
    def spread(value: Spread) -> JsonValue:
        return {"mean": _finite(value.mean), "std": None if value.std is None else _finite(value.std)}

    return {
        "variant": row.variant,
        "seeds": row.seeds,
        "round": row.round,
        "metrics": {name: spread(value) for name, value in row.metrics.items()},
        "seconds": spread(row.seconds),
        "bits_per_parameter": None if row.bits is None else spread(row.bits),
        "epsilon": _finite(row.epsilon),
        "to_server": _finite(row.to_server),
        "delta": row.delta,
        "unit": row.unit,
        "adjacency": row.adjacency,
        "accountant": row.accountant,
    }
