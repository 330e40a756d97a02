"""What a swept key buys and costs: each test metric, seconds and bytes against it, and the runs that no other beats."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import RunFolderError
from fedveil.report import comparison_plots
from fedveil.report.document import PRIVATE, Section, document, figures, table, write_document
from fedveil.report.drawing import show, words
from fedveil.report.run_data import RunData, load_run

LOWER_IS_BETTER = frozenset({"loss"})


@dataclass(frozen=True, kw_only=True)
class Traded:
    """One run at its last evaluated round.

    Attributes:
        run: its folder's name.
        value: of the swept key, as the experiment has it.
        metrics: its test metrics.
        seconds: of all rounds.
        mebibytes: sent to the server in all rounds; None where nobody counted.
    """

    run: str
    value: str
    metrics: Mapping[str, float]
    seconds: float
    mebibytes: float | None


def traded(folder: Path, key: str) -> Traded:
    """Return what a run folder says about a key.

    Raises:
        RunFolderError: the folder is damaged, has no round, or an experiment without the key.
    """
    run = load_run(folder)
    value: Any = run.experiment
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    measured = [row for row in run.rounds if row.test]
    if value is None or not measured:
        raise RunFolderError(f"{folder}: its experiment has no key {key}, or no round was evaluated")
    return Traded(
        run=folder.name,
        value=str(value),
        metrics=measured[-1].test,
        seconds=sum(row.seconds for row in run.rounds),
        mebibytes=_mebibytes(run),
    )


def front(runs: Sequence[Traded], metric: str, cost: str) -> list[Traded]:
    """Return the runs that no other run beats: none is as good and cheaper, or better and as cheap (Pareto).

    Args:
        runs: the candidates; those without the cost are left out.
        metric: which test metric is good.
        cost: "seconds" or "mebibytes".
    """
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    known = [run for run in runs if getattr(run, cost) is not None and metric in run.metrics]
    places = [(sign * run.metrics[metric], -getattr(run, cost)) for run in known]
    return [
        run
        for run, (good, cheap) in zip(known, places, strict=True)
        if not any(a >= good and b >= cheap and (a, b) != (good, cheap) for a, b in places)
    ]


def write_tradeoff(folders: Sequence[Path], key: str, path: Path, *, spent: str = "") -> Path:
    """Write the page of a swept key; ``spent`` says what all runs together have spent.

    Raises:
        RunFolderError: what :func:`traded` raises, no folder, or a file that cannot be written.
    """
    if not folders:
        raise RunFolderError("There is nothing to compare: give at least one run folder.")
    return write_document(path, page([traded(folder, key) for folder in folders], key, spent))


def page(runs: Sequence[Traded], key: str, spent: str = "") -> str:
    """Return the page of a swept key as one HTML text."""
    metrics = list(runs[0].metrics)
    costs = ["seconds", *(["mebibytes"] if any(run.mebibytes is not None for run in runs) else [])]
    drawn = [
        comparison_plots.against_key(_by_value(runs, name), key, _title(name)) for name in (*metrics, *costs)
    ]
    fronts = [
        comparison_plots.pareto(
            [
                (getattr(run, cost), run.metrics[metric], f"{run.run} ({key} = {run.value})", run in best)
                for run in runs
                if getattr(run, cost) is not None
            ],
            x=_title(cost),
            y=f"test {words(metric)}",
        )
        for metric in metrics
        for cost in costs
        if (best := front(runs, metric, cost))
    ]
    header = [key, "run", *(f"test {words(metric)}" for metric in metrics), "seconds", "MiB up"]
    rows = [
        [
            run.value,
            run.run,
            *(show(run.metrics[metric]) for metric in metrics),
            show(run.seconds),
            "" if run.mebibytes is None else show(run.mebibytes),
        ]
        for run in runs
    ]
    return document(
        title=f"What {key} buys and costs",
        kicker="fedveil · sweep",
        lead=f"{len(runs)} runs, each at its last evaluated round. {spent[:1].upper()}{spent[1:]}".strip(),
        sections=[
            Section(identifier="curves", title=f"Against {key}", body=figures(drawn, wide=True)),
            Section(identifier="front", title="Runs that no other beats", body=figures(fronts, wide=True)),
            Section(
                identifier="rows",
                title="Every run",
                body=table(header, rows, caption=f"One row a run. {PRIVATE}"),
            ),
        ],
    )


def _title(name: str) -> str:
    return {"seconds": "seconds, all rounds", "mebibytes": "MiB sent to the server, all rounds"}.get(
        name, f"test {words(name)}"
    )


def _by_value(runs: Sequence[Traded], name: str) -> list[tuple[str, float]]:
    """Return the mean of a metric or cost at each value of the key, numbers in their order."""
    grouped: dict[str, list[float]] = {}
    for run in runs:
        number = run.metrics.get(name, getattr(run, name, None))
        if number is not None:
            grouped.setdefault(run.value, []).append(number)
    return [(value, statistics.fmean(numbers)) for value, numbers in sorted(grouped.items(), key=_order)]


def _order(item: tuple[str, list[float]]) -> tuple[float, str]:
    try:
        return float(item[0]), ""
    except ValueError:
        return 0.0, item[0]


def _mebibytes(run: RunData) -> float | None:
    sent = [row.bytes_up for row in run.rounds if row.round > 0]
    counted = [one for one in sent if one is not None]
    return sum(counted) / 2**20 if sent and len(counted) == len(sent) else None
