"""What a swept key buys and costs: each test metric, seconds and bytes against it, and the runs that no other beats."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedveil.errors import RunFolderError
from fedveil.report import comparison_plots
from fedveil.report.document import PRIVATE, Section, document, figures, table, write_document
from fedveil.report.drawing import show, words
from fedveil.report.run_data import DIRECTION, RunData, load_run
from fedveil.report.variant import settings_of

_LEFT_OUT: Final = "left out"
"""The value of a swept key whose whole table an experiment leaves out."""

_RESOLVED: Final = ("trainer.name", "model.sha256")
"""Settings that a run may resolve by itself, from the others."""


@dataclass(frozen=True, kw_only=True)
class Traded:
    """One run at its last evaluated round.

    Attributes:
        run: its folder's name.
        value: of the swept key, as the experiment has it; "left out" where it leaves the whole table out.
        metrics: its test metrics.
        seconds: of all rounds.
        mebibytes: sent to the server in all rounds; None where nobody counted.
        settings: all settings of the experiment, by dotted key, without its name and its seeds.
    """

    run: str
    value: str
    metrics: Mapping[str, float]
    seconds: float
    mebibytes: float | None
    settings: Mapping[str, str] = field(default_factory=dict)


def tradeoff_point(folder: Path, key: str) -> Traded:
    """Return what a run folder says about a key.

    Raises:
        RunFolderError: the folder is damaged, has no round, or an experiment with the key's table and without the key.
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
    """Return the runs that no other run beats: none is as good and cheaper, or better and as cheap (Pareto).

    Args:
        runs: the candidates; those without the cost are left out.
        metric: which test metric is good.
        cost: "seconds" or "mebibytes".
    """
    sign = float(DIRECTION.get(metric, 1))
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
        RunFolderError: what :func:`tradeoff_point` raises, no folder, no experiment that has the key, or a file that
        cannot be
            written.
    """
    if not folders:
        raise RunFolderError("There is nothing to compare: give at least one run folder.")
    runs = [tradeoff_point(folder, key) for folder in dict.fromkeys(folders)]
    if all(run.value == _LEFT_OUT for run in runs):
        raise RunFolderError(f"{folders[0]}: its experiment has no key {key}, and no other run given has it")
    return write_document(path, page(runs, key, spent))


def page(runs: Sequence[Traded], key: str, spent: str = "") -> str:
    """Return the page of a swept key as one HTML text: one line for each combination of the other settings."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    costs = ["seconds", *(["mebibytes"] if any(run.mebibytes is not None for run in runs) else [])]
    labels = line_labels(runs, key)
    values = sorted({run.value for run in runs}, key=_place)
    drawn = [
        comparison_plots.against_key(_means(runs, labels, name), values, key, _title(name))
        for name in (*metrics, *costs)
    ]
    fronts = [
        comparison_plots.pareto(
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
    ]
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


def line_labels(runs: Sequence[Traded], key: str) -> list[str]:
    """Return the label of each run's line: the settings beside the key that tell the lines apart.

    Runs of one label differ in the key and in their seeds alone. A label names as few settings as are needed, names of
    stages first; it is empty where there is one line. What follows from the key is no setting of its own: the keys that
    a stage brings along where the key names the stage, and what a run resolves by itself.

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
        {name for one in settings for name in one} - {key}, key=lambda name: (not _is_name(name), name)
    )
    others = [name for name in varying if name not in _RESOLVED and not _is_brought_by(name, key, settings)]
    others += [
        name for name in _RESOLVED if name in varying and not _is_determined(name, [key, *others], settings)
    ]
    telling: list[str] = []
    for name in others:
        if _count(settings, [*telling, name]) > _count(settings, telling):
            telling.append(name)
    return [
        ", ".join(f"{name}={one[name]}" if name in one else f"no {name}" for name in telling)
        for one in settings
    ]


def _is_name(key: str) -> bool:
    """Return whether a key names a stage, a model, a data set or a law of allocation."""
    return key.endswith((".name", ".law"))


def _is_brought_by(name: str, key: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a setting is there for some values of the key alone, and follows from the key's value.

    That holds for the parameters of a stage that the key names, and for the other keys of a table that is left out
    where it has its defaults.
    """
    table = f"{key.rpartition('.')[0]}."
    tables = (table, "local.") if key == "method.name" else (table,)  # methods bring [local] or refuse it
    without = [one for one in settings if name not in one]
    if not without or not name.startswith(tables) or not _is_determined(name, [key], settings):
        return False
    return _is_name(key) or all(one[key] == _LEFT_OUT for one in without)


def _is_determined(name: str, by: Sequence[str], settings: Sequence[Mapping[str, str]]) -> bool:
    """Return whether runs that agree in some settings agree in another."""
    return _count(settings, by) == _count(settings, [*by, name])


def _count(settings: Iterable[Mapping[str, str]], names: Sequence[str]) -> int:
    """Return how many different combinations of some settings there are."""
    return len({tuple(one.get(name) for name in names) for one in settings})


def _place(value: str) -> tuple[bool, float, str]:
    """Return where a value of the key stands: numbers in their order, then texts."""
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, value


def _means(runs: Sequence[Traded], labels: Sequence[str], name: str) -> dict[str, list[tuple[str, float]]]:
    """Return, for each line, the mean of a metric or cost at each value of the key, numbers in their order."""
    grouped: dict[str, dict[str, list[float]]] = {label: {} for label in dict.fromkeys(labels)}
    for run, label in sorted(zip(runs, labels, strict=True), key=lambda one: _place(one[0].value)):
        number = run.metrics.get(name, getattr(run, name, None))
        if number is not None:
            grouped[label].setdefault(run.value, []).append(number)
    return {
        label: [(value, statistics.fmean(numbers)) for value, numbers in values.items()]
        for label, values in grouped.items()
    }


def _mebibytes(run: RunData) -> float | None:
    sent = [row.bytes_up for row in run.rounds if row.round > 0]
    counted = [one for one in sent if one is not None]
    return sum(counted) / 2**20 if sent and len(counted) == len(sent) else None
