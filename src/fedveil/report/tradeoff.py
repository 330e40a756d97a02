"""Page of a sweep: test metrics, seconds and bytes against the swept key, and the Pareto front."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedveil.errors import RunFolderError
from fedveil.report import plots
from fedveil.report.compare import settings_of
from fedveil.report.document import PRIVATE, Section, document, table, write_document
from fedveil.report.drawing import Plot, show, words
from fedveil.report.run_data import DIRECTION, RunData, load_run

_LEFT_OUT: Final = "left out"
"""Value of a swept key if the experiment leaves out the key's whole table."""

_COVERAGE: Final = "Test metrics are exact: no guarantee covers them unless the test records are public."

_RESOLVED: Final = ("trainer.name", "model.sha256")
"""Settings that a run may derive from its other settings."""


@dataclass(frozen=True, kw_only=True)
class Traded:
    """One run at its last evaluated round.

    Attributes:
        run: name of the run folder.
        value: value of the swept key; "left out" if the experiment leaves out the key's whole table.
        metrics: test metrics.
        seconds: duration of all rounds.
        mebibytes: MiB sent to the server in all rounds; None if they were not counted.
        settings: settings of the experiment by dotted key, without its name and its seeds.
    """

    run: str
    value: str
    metrics: Mapping[str, float]
    seconds: float
    mebibytes: float | None
    settings: Mapping[str, str] = field(default_factory=dict)


def tradeoff_point(folder: Path, key: str) -> Traded:
    """Read the swept key, the last metrics and the costs of a run.

    Raises:
        RunFolderError: the folder is damaged, no round was evaluated, or the experiment has the key's table without
            the key.
    """
    run = load_run(folder)
    *path, last = key.split(".")
    table: Any = run.experiment
    for part in path:
        table = table.get(part) if isinstance(table, Mapping) else None
    value = _LEFT_OUT if table is None and path else table.get(last) if isinstance(table, Mapping) else None
    measured = [row for row in run.rounds if row.test]
    if value is None or not measured:
        raise RunFolderError(f"{folder}: its experiment has no key {key}, or no round was evaluated")
    return Traded(
        run=folder.name,
        value=str(value),
        metrics=measured[-1].test,
        seconds=sum(row.seconds for row in run.rounds),
        mebibytes=_mebibytes(run),
        settings=settings_of(run.experiment),
    )


def front(runs: Sequence[Traded], metric: str, cost: str) -> list[Traded]:
    """Return the Pareto front: the runs that no other run dominates.

    A run dominates another if it is at least as good and as cheap, and better or cheaper.

    Args:
        runs: the candidates; runs without the cost or the metric are left out.
        metric: test metric of quality.
        cost: "seconds" or "mebibytes".
    """
    sign = float(DIRECTION.get(metric, 1))  # a loss is negated, so that larger is better
    measured = [run for run in runs if getattr(run, cost) is not None and metric in run.metrics]
    places = [(sign * run.metrics[metric], -getattr(run, cost)) for run in measured]
    return [
        run
        for run, (good, cheap) in zip(measured, places, strict=True)
        if not any(a >= good and b >= cheap and (a, b) != (good, cheap) for a, b in places)
    ]


def write_tradeoff(folders: Sequence[Path], key: str, path: Path, *, spent: str = "") -> Path:
    """Write the page of a swept key.

    Args:
        folders: the run folders.
        key: the swept key, dotted.
        path: path of the page.
        spent: sentence about the composed privacy cost of all runs.

    Raises:
        RunFolderError: as :func:`tradeoff_point`; no folder is given, no experiment has the key, or the file cannot
            be written.
    """
    if not folders:
        raise RunFolderError("There is nothing to compare: give at least one run folder.")
    runs = [tradeoff_point(folder, key) for folder in dict.fromkeys(folders)]
    if all(run.value == _LEFT_OUT for run in runs):
        raise RunFolderError(f"{folders[0]}: its experiment has no key {key}, and no other run given has it")
    return write_document(path, page(runs, key, spent))


def curves(runs: Sequence[Traded], key: str) -> tuple[Plot, ...]:
    """Return the plots of every test metric and cost against the swept key."""
    metrics, costs = _measures(runs)
    labels = line_labels(runs, key)
    values = sorted({run.value for run in runs}, key=_place)
    return tuple(
        plots.against_key(_means(runs, labels, name), values, key, _title(name))
        for name in (*metrics, *costs)
    )


def fronts(runs: Sequence[Traded], key: str) -> tuple[Plot, ...]:
    """Return a plot of all runs with their Pareto front for every pair of a metric and a cost."""
    metrics, costs = _measures(runs)
    return tuple(
        plots.pareto(
            [
                (getattr(run, cost), run.metrics[metric], f"{run.run} ({key} = {run.value})", run in best)
                for run in runs
                if getattr(run, cost) is not None and metric in run.metrics
            ],
            x=_title(cost),
            y=f"test {words(metric)}",
        )
        for metric in metrics
        for cost in costs
        if (best := front(runs, metric, cost))
    )


def tradeoff_plots(folders: Sequence[Path], key: str) -> tuple[Plot, ...]:
    """Return all plots of a swept key.

    Raises:
        RunFolderError: as :func:`tradeoff_point`.
    """
    runs = [tradeoff_point(folder, key) for folder in dict.fromkeys(folders)]
    return (*curves(runs, key), *fronts(runs, key))


def _measures(runs: Sequence[Traded]) -> tuple[list[str], list[str]]:
    """Return the names of the metrics, and of the costs that were counted."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    return metrics, ["seconds", *(["mebibytes"] if any(run.mebibytes is not None for run in runs) else [])]


def page(runs: Sequence[Traded], key: str, spent: str = "") -> str:
    """Return the page of a swept key as HTML, with one line for each combination of the other settings."""
    metrics, _ = _measures(runs)
    labels = line_labels(runs, key)
    several = any(labels)
    header = [key, *(["other settings"] if several else []), "run"]
    header += [*(f"test {words(metric)}" for metric in metrics), "seconds", "MiB up"]
    rows = [
        [
            run.value,
            *([label] if several else []),
            run.run,
            *(show(run.metrics[metric]) if metric in run.metrics else "" for metric in metrics),
            show(run.seconds),
            "" if run.mebibytes is None else show(run.mebibytes),
        ]
        for run, label in zip(runs, labels, strict=True)
    ]
    return document(
        title=f"What {key} buys and costs",
        kicker="fedveil · sweep",
        lead=f"{len(runs)} runs, each at its last evaluated round. {spent[:1].upper()}{spent[1:]}".strip(),
        sections=[
            Section(identifier="curves", title=f"Against {key}", plots=curves(runs, key), wide=True),
            Section(identifier="front", title="Runs that no other beats", plots=fronts(runs, key), wide=True),
            Section(
                identifier="rows",
                title="Every run",
                body=table(header, rows, caption=f"One row a run. {_COVERAGE} {PRIVATE}"),
            ),
        ],
    )


def _title(name: str) -> str:
    return {"seconds": "seconds, all rounds", "mebibytes": "MiB sent to the server, all rounds"}.get(
        name, f"test {words(name)}"
    )


def line_labels(runs: Sequence[Traded], key: str) -> list[str]:
    """Return the label of each run's line: the other settings that distinguish the lines.

    Runs with one label differ only in the key and in their seeds. A label contains as few settings as necessary,
    names of stages first. It is empty if the page has one line. Settings that follow from the key are not used: the
    keys of a stage that the key names, and settings that a run derives from others.

    Args:
        runs: the runs of a page.
        key: the swept key.
    """
    settings = [
        {name: value for name, value in run.settings.items() if not f"{name}.".startswith(f"{key}.")}
        | {key: run.value}
        for run in runs
    ]
    varying = sorted(
        {name for setting in settings for name in setting} - {key},
        key=lambda name: (not _is_name(name), name),
    )
    candidates = [
        name for name in varying if name not in _RESOLVED and not _is_brought_by(name, key, settings)
    ]
    candidates += [
        name
        for name in _RESOLVED
        if name in varying and not _is_determined(name, [key, *candidates], settings)
    ]
    telling: list[str] = []
    for name in candidates:  # greedy: keep a setting if it splits the runs further
        if _count(settings, [*telling, name]) > _count(settings, telling):
            telling.append(name)
    return [
        ", ".join(f"{name}={setting[name]}" if name in setting else f"no {name}" for name in telling)
        for setting in settings
    ]


def _is_name(key: str) -> bool:
    """Return whether a key names a stage, a model, a data set or a law of allocation."""
    return key.endswith((".name", ".law"))


def _is_brought_by(name: str, key: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a setting exists only for some values of the key, and follows from the key's value.

    Examples are the parameters of a stage that the key names, and the other keys of a table that an experiment leaves
    out because it has the defaults.
    """
    table = f"{key.rpartition('.')[0]}."
    tables = (table, "local.") if key == "method.name" else (table,)  # methods bring [local] or refuse it
    without = [setting for setting in settings if name not in setting]
    if not without or not name.startswith(tables) or not _is_determined(name, [key], settings):
        return False
    return _is_name(key) or all(setting[key] == _LEFT_OUT for setting in without)


def _is_determined(name: str, by: Sequence[str], settings: Sequence[Mapping[str, str]]) -> bool:
    """Return whether runs that agree in the settings ``by`` also agree in the setting ``name``."""
    return _count(settings, by) == _count(settings, [*by, name])


def _count(settings: Iterable[Mapping[str, str]], names: Sequence[str]) -> int:
    """Return the number of distinct combinations of some settings."""
    return len({tuple(setting.get(name) for name in names) for setting in settings})


def _place(value: str) -> tuple[bool, float, str]:
    """Return the sort key of a value of the swept key: numbers in their order, then texts."""
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, value


def _means(runs: Sequence[Traded], labels: Sequence[str], name: str) -> dict[str, list[tuple[str, float]]]:
    """Return, for each line, the mean of a metric or cost at each value of the key, in sorted order."""
    grouped: dict[str, dict[str, list[float]]] = {label: {} for label in dict.fromkeys(labels)}
    for run, label in sorted(zip(runs, labels, strict=True), key=lambda pair: _place(pair[0].value)):
        number = run.metrics.get(name, getattr(run, name, None))
        if number is not None:
            grouped[label].setdefault(run.value, []).append(number)
    return {
        label: [(value, statistics.fmean(numbers)) for value, numbers in values.items()]
        for label, values in grouped.items()
    }


def _mebibytes(run: RunData) -> float | None:
    """Return the MiB that all rounds sent to the server; None if some round was not counted."""
    sent = [row.bytes_up for row in run.rounds if row.round > 0]
    counted = [size for size in sent if size is not None]
    return sum(counted) / 2**20 if sent and len(counted) == len(sent) else None
