"""Comparison of runs: means and deviations over seeds, privacy-utility curves, one page and one table.

Runs are repetitions of one experiment when their experiment.toml agree in everything but seeds and the name's
seed suffix; their mean is then a mean over seeds and over nothing else.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from fedveil.engine.documents import SCHEMA_VERSION, JsonObject, JsonValue, RoundRow
from fedveil.errors import RunFolderError
from fedveil.privacy.claims import Role
from fedveil.privacy.statement import Statement
from fedveil.report import comparison_plots
from fedveil.report.document import Section, document, figures, notice, table, write_document
from fedveil.report.drawing import Curve, show, show_epsilon, words
from fedveil.report.run_data import RunData, load_run


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean over seeds and the sample standard deviation (n - 1 in its denominator; None for one seed)."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(mean=statistics.fmean(values), std=statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return show(self.mean) if self.std is None else f"{show(self.mean)} ± {self.std:.2g}"


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One variant at the last round that all its seeds have reached and evaluated.

    `epsilon` and `to_server`, of the last round, are the largest over the seeds, `math.inf` where any of them
    guarantees nothing; `seconds` are those of the rounds up to `round`, and `bits` the bits a parameter of their
    messages, None where none were counted.
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
    unit: str
    adjacency: str
    accountant: str


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """Runs that differ only by seed, and the rounds they all have."""

    label: str
    runs: tuple[RunData, ...]
    colour: int

    @cached_property
    def rounds(self) -> dict[int, list[RoundRow]]:
        """The rows of every seed, by the rounds that all of them have, in order."""
        by_number = [{row.round: row for row in run.rounds} for run in self.runs]
        common = sorted(set.intersection(*map(set, by_number)))
        return {number: [rows[number] for rows in by_number] for number in common}

    @property
    def metrics(self) -> list[str]:
        return [metric for metric in self.runs[0].metrics if all(metric in run.metrics for run in self.runs)]

    def values(self, metric: str) -> dict[int, list[float]]:
        """The metric of every seed, for the common rounds in which every seed measured it."""
        return {
            number: [row.test[metric] for row in rows]
            for number, rows in self.rounds.items()
            if all(metric in row.test for row in rows)
        }

    def epsilon(self, number: int) -> float:
        """The largest epsilon over seeds up to a round: what holds for every one of them."""
        return max(row.epsilon for row in self.rounds[number])

    @cached_property
    def sent(self) -> dict[int, float]:
        """The MiB of all messages up to each round with any, mean over seeds; empty where they were not counted."""
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
        """Bits a parameter of all messages up to a round, over seeds."""
        of_seeds = []
        for run in self.runs:
            counted = [row for row in run.rounds if row.bytes_up is not None and row.round <= last]
            plain = sum(
                row.communication_cost.float32_bytes for row in counted if row.communication_cost is not None
            )
            if not plain:
                return None
            of_seeds.append(32 * sum(row.bytes_up or 0 for row in counted) / plain)
        return Spread.of(of_seeds)

    def curve(self, metric: str, *, over: Literal["rounds", "epsilon", "communication_cost"]) -> Curve | None:
        """The metric over rounds, over the epsilon of rounds that have spent any, or over what was sent until then."""
        places = {
            "rounds": {number: float(number) for number in self.rounds},
            "epsilon": {number: spent for number in self.rounds if (spent := self.epsilon(number)) > 0},
            "communication_cost": self.sent,
        }[over]
        points = [
            (places[number], Spread.of(values))
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
        measured = {metric: values for metric in self.metrics if (values := self.values(metric))}
        last = max((max(values) for values in measured.values()), default=max(self.rounds))
        statements = [run.statement for run in self.runs]
        return ComparisonRow(
            variant=self.label,
            seeds=len(self.runs),
            round=last,
            metrics={
                metric: Spread.of(values[last]) for metric, values in measured.items() if last in values
            },
            seconds=Spread.of(
                [sum(row.seconds for row in run.rounds if row.round <= last) for run in self.runs]
            ),
            bits=self.bits(last),
            epsilon=self.epsilon(last) if all(one.epsilon is not None for one in statements) else math.inf,
            to_server=max(_to_server(one) for one in statements),
            delta=statements[0].delta,
            unit=statements[0].unit,
            adjacency=statements[0].adjacency.value,
            accountant=statements[0].accountant,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side: a row a variant, and warnings where they promise unlike things."""

    rows: tuple[ComparisonRow, ...]
    warnings: tuple[str, ...]
    variants: tuple[_Variant, ...]

    def to_json(self) -> JsonObject:
        """The table for machines; an infinite epsilon and a missing deviation are null."""
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
        """The comparison as one HTML text."""
        runs = sum(row.seeds for row in self.rows)
        return document(
            title=f"{len(self.rows)} variants, {runs} runs",
            kicker="fedveil · comparison of runs",
            lead="Runs that differ only by their seed are one variant.",
            sections=[
                Section(identifier="privacy", title="What is promised", body=self._promises()),
                Section(identifier="result", title="What is reached", body=self._results()),
                Section(identifier="curves", title="Curves", body=self._curves()),
            ],
        )

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(metric for variant in self.variants for metric in variant.metrics))

    def _promises(self) -> str:
        header = ["variant", "ε", "ε to server", "δ", "one", "neighbouring data sets", "accountant"]
        rows = [
            [
                row.variant,
                *(
                    show_epsilon(one) if math.isfinite(one) else "∞ (no guarantee)"
                    for one in (row.epsilon, row.to_server)
                ),
                show(row.delta),
                row.unit,
                words(row.adjacency).replace("-", " "),
                row.accountant,
            ]
            for row in self.rows
        ]
        warnings = "".join(notice(warning, kind="warning") for warning in self.warnings)
        return warnings + table(
            header, rows, caption="Each run folder's privacy.json has the whole statement"
        )

    def _results(self) -> str:
        metrics = self._metrics
        counted = any(row.bits is not None for row in self.rows)
        header = [
            "variant",
            *(f"test {words(metric)}" for metric in metrics),
            *(["bits a parameter"] if counted else []),
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
            header, rows, caption="Mean ± sample standard deviation over seeds, at the last common round"
        )

    def _baselines(self) -> list[tuple[str, Mapping[str, float]]]:
        """What the best constant answer reaches: one line for all variants, or one for each that has another."""
        found: dict[tuple[tuple[str, float], ...], list[str]] = {}
        for variant in self.variants:
            constant = variant.runs[0].baseline
            if constant:
                found.setdefault(tuple(constant.items()), []).append(variant.label)
        told = len(found) > 1
        return [
            (
                f"always the same answer ({', '.join(labels)})" if told else "always the same answer",
                dict(items),
            )
            for items, labels in found.items()
        ]

    def _curves(self) -> str:
        shown = []
        units = ", ".join(dict.fromkeys(row.unit for row in self.rows if math.isfinite(row.epsilon)))
        for metric in self._metrics:
            by_round = [curve for v in self.variants if (curve := v.curve(metric, over="rounds"))]
            if not by_round:
                continue
            shown.append(comparison_plots.compared_by_round(by_round, metric))
            private: list[Curve] = []
            unprotected: list[Curve] = []
            for variant, row in zip(self.variants, self.rows, strict=True):
                guaranteed = math.isfinite(row.epsilon)
                if curve := variant.curve(metric, over="epsilon" if guaranteed else "rounds"):
                    (private if guaranteed else unprotected).append(curve)
            if private:
                shown.append(
                    comparison_plots.compared_by_epsilon(
                        private, unprotected, metric, measured_by=f"one {units}"
                    )
                )
            by_communication = [
                curve for v in self.variants if (curve := v.curve(metric, over="communication_cost"))
            ]
            if by_communication:
                shown.append(comparison_plots.compared_by_communication(by_communication, metric))
        return figures(shown, wide=True)


def compare(run_folders: Sequence[Path]) -> Comparison:
    """Group runs into variants and put them side by side, in the order given.

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


def _to_server(statement: Statement) -> float:
    """Return the epsilon against the server; infinite where no line speaks of it."""
    found = next((line.epsilon for line in statement.trust if line.role == Role.SERVER), None)
    return math.inf if found is None else found


def _variants(runs: Sequence[RunData]) -> tuple[_Variant, ...]:
    """Group runs by experiment; variants of one name are told apart by the settings in which they differ."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[RunData]] = {}
    for run in runs:
        settings = tuple(sorted(_settings(run.experiment).items()))
        groups.setdefault((run.variant, settings), []).append(run)
    variants: list[_Variant] = []
    for (name, settings), members in groups.items():
        rivals = [dict(other) for rival, other in groups if rival == name]
        differing = [
            f"{key}={value}" for key, value in settings if any(rival.get(key) != value for rival in rivals)
        ]
        missing = sorted({key for rival in rivals for key in rival} - {key for key, _ in settings})
        parts = [*differing, *(f"no {key}" for key in missing)]
        label = f"{name} ({', '.join(parts)})" if parts else name
        variants.append(_Variant(label=label, runs=tuple(members), colour=len(variants)))
    return tuple(variants)


def _settings(experiment: JsonObject, path: str = "") -> dict[str, str]:
    """Every setting by its dotted key, but for the experiment's name and all seeds."""
    settings: dict[str, str] = {}
    for key, value in experiment.items():
        if key == "seed" or f"{path}{key}" == "name":
            continue
        if key == "insecure_seed":  # its value is a seed, but its presence changes the guarantee
            settings[f"{path}{key}"] = "given"
        elif isinstance(value, Mapping):
            settings |= _settings(value, f"{path}{key}.")
        else:
            settings[f"{path}{key}"] = str(value)
    return settings


def _warnings(rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    """What makes epsilons of different variants unlike: they must not be read against each other unsaid."""
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
            f"The guarantees are for different {' and different '.join(unlike)}: "
            "their ε are not comparable as numbers."
        )
    if len(private) < len(rows):
        names = ", ".join(row.variant for row in rows if not math.isfinite(row.epsilon))
        warnings.append(f"No privacy guarantee at all: {names}.")
    return tuple(warnings)


def _finite(value: float) -> float | None:
    """What JSON can hold."""
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
