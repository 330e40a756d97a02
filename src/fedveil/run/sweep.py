"""Sweep a study over a grid of keys: run every experiment at every grid point in worker processes.

The run folder of a point is named after the experiment and the point. A complete folder is not run again and an
interrupted one is resumed, so repeating the command after a crash finishes the sweep. ``sweep.jsonl`` has one row
per run, including the runs of earlier sweeps into the folder. A reader who chooses among the runs has looked at all
of them, so their joint privacy cost covers all of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fedveil import __version__
from fedveil.errors import ConfigError, FedveilError, RunFolderError
from fedveil.files import (
    check_schema_version,
    parse_json,
    read_text,
    read_toml,
    reading,
    replace_file,
    writing,
)
from fedveil.privacy.joint_cost import joint_cost
from fedveil.run.config.experiment import Experiment, parse, parse_assignment
from fedveil.run.config.study import Selection, load_study
from fedveil.run.executors import Workers, check_worker, local_workers, play_tasks
from fedveil.run.folder.documents import RoundRow, read_lines
from fedveil.run.folder.run_folder import Row, RunFolder, drop_unbegun, finite
from fedveil.run.loop import NullObserver
from fedveil.run.process_group import require_one_process
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import continue_run

ROWS: Final = "sweep.jsonl"
_SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One swept key with its values.

    >>> Axis.read("method.clip=0.5,1.0").values
    ('0.5', '1.0')
    """

    key: str
    values: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Axis:
        """Parse an axis from ``KEY=VALUE,VALUE,...``.

        Raises:
            ConfigError: no key, no value, or a repeated value.
        """
        key, equals, value_text = text.partition("=")
        values = tuple(value.strip() for value in value_text.split(","))
        if not equals or not key.strip() or not all(values) or len(set(values)) < len(values):
            raise ConfigError(
                f"--over {text}: expected KEY=VALUE,VALUE,... with different values, for instance "
                "--over protection.ratio=0.05,0.1"
            )
        return cls(key=key.strip(), values=values)

    def assignments(self) -> list[str]:
        """Return one KEY=VALUE per value."""
        return [f"{self.key}={value}" for value in self.values]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep: its experiment, and the keys that the sweep sets."""

    experiment: Experiment
    settings: dict[str, str]


def points(source: str, selection: Selection, axes: Sequence[Axis]) -> list[Point]:
    """Return every run of a sweep, each with a unique name, validated before any run starts.

    Args:
        source: name of a preset, or path of a TOML file.
        selection: the part of the study to run.
        axes: the swept keys.

    Raises:
        ConfigError: a repeated key, a point that is not a valid experiment, a swept name, two points with the same
            folder name, or points with different accountants (one accountant bounds their joint cost).
    """
    keys = [axis.key for axis in axes]
    if not keys or len(set(keys)) < len(keys) or "name" in keys:
        raise ConfigError(
            "a sweep needs at least one --over KEY=VALUE,..., each key once, and sets the runs' names itself"
        )
    sweep_points = []
    for chosen in itertools.product(*(axis.assignments() for axis in axes)):
        overrides = (*selection.overrides, *(parse_assignment(text) for text in chosen))
        settings = dict(text.split("=", 1) for text in chosen)
        label = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
        for experiment in load_study(source, replace(selection, overrides=overrides)).experiments:
            # Two values may become the same folder name here, such as "a b" and "a_b"; `twice` refuses them.
            name = re.sub(r"[^A-Za-z0-9._+-]", "_", f"{experiment.name}-{label}")
            document = experiment.model_dump(mode="json", exclude_none=True) | {"name": name}
            sweep_points.append(Point(experiment=parse(document, f"{source} ({label})"), settings=settings))
    names = [point.experiment.name for point in sweep_points]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--over: two points would both be the run {twice}, and one of them would go on with the other's folder "
            "and be counted with it as one; give values that differ in messages, digits or . _ + -"
        )
    check_joint_accountant(sweep_points)
    return sweep_points


def check_joint_accountant(sweep_points: Sequence[Point]) -> None:
    """Check that one accountant bounds the joint cost of all points.

    Raises:
        ConfigError: the points have different accountants.
    """
    accountants = sorted({point.experiment.privacy.accountant for point in sweep_points})
    if len(accountants) > 1:
        raise ConfigError(
            f"privacy.accountant: the points have {' and '.join(accountants)}, and one accountant must bound what all "
            "of them cost together; give --set privacy.accountant=pld, or sweep them one after the other"
        )


def sweep(
    sweep_points: Sequence[Point],
    folder: Path,
    *,
    workers: AbstractContextManager[Workers] | None = None,
    prepare_point: Callable[[Point], Prepared] | None = None,
) -> Iterator[Row]:
    """Run every point that is not complete; yield each row as its run ends.

    All rows are written to ``sweep.jsonl`` after every run. Rows of earlier sweeps into the folder stay in the
    file.

    Args:
        sweep_points: the points from :func:`points`.
        folder: parent of the run folders, also of those of an interrupted sweep.
        workers: play one run at a time each (:mod:`fedveil.run.executors`); None: one process of this machine. The
            workers of other machines need the folder, and the data, at the same path.
        prepare_point: prepares a point over objects of this process; all runs are then played in this process.

    Raises:
        FedveilError: a run failed; the other runs are complete or can be resumed.
        ConfigError: a run folder of a point's name has another experiment.
        RunFolderError: a folder of a point's name has files but no experiment, or ``sweep.jsonl`` is damaged or
            cannot be written.
    """
    require_one_process("a sweep")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be made: {error.strerror}") from None
    for point in sweep_points:
        _check_same(point, folder)
    names = {point.experiment.name for point in sweep_points}
    earlier = [row for name, row in _recorded(folder).items() if name not in names]
    rows: dict[str, Row] = {}
    results = (
        _play_in_workers(sweep_points, folder, local_workers(1) if workers is None else workers)
        if prepare_point is None
        else _play_here(sweep_points, folder, prepare_point)
    )
    failed: FedveilError | None = None
    for point, row in results:
        if isinstance(row, FedveilError):
            # Go on after a failure, so that finished runs are recorded; the first error is raised at the end.
            failed = row.with_place(point.experiment.name) if failed is None else failed
            continue
        rows[point.experiment.name] = row
        # Replace the whole file after every run, in the points' order: a crash leaves a complete older file.
        ordered = [rows[other.experiment.name] for other in sweep_points if other.experiment.name in rows]
        text = "".join(json.dumps(entry) + "\n" for entry in (*earlier, *ordered))
        with writing(folder / ROWS, RunFolderError):
            replace_file(folder / ROWS, text.encode())
        yield row
    if failed is not None:
        raise failed


def _play_in_workers(
    sweep_points: Sequence[Point], folder: Path, opened: AbstractContextManager[Workers]
) -> Iterator[tuple[Point, Row | FedveilError]]:
    """Yield the row of every point, or its error, as its run ends in a worker process."""
    tasks = [(play_point, point, folder.resolve(), __version__) for point in sweep_points]
    for number, row in play_tasks(tasks, opened):
        yield sweep_points[number], row


def _play_here(
    sweep_points: Sequence[Point], folder: Path, prepare_point: Callable[[Point], Prepared]
) -> Iterator[tuple[Point, Row | FedveilError]]:
    """Yield the row of every point, or its error, one after the other."""
    for point in sweep_points:
        try:
            row: Row | FedveilError = _play_prepared(point, folder, prepare_point(point))
        except FedveilError as error:
            row = error
        yield point, row


def _recorded(folder: Path) -> dict[str, Row]:
    """Return the rows of ``sweep.jsonl`` by run name; empty if the file does not exist."""
    path = folder / ROWS
    if not path.exists():
        return {}
    rows = {}
    for number, line in enumerate(read_text(path, RunFolderError).splitlines(), start=1):
        location = f"{path}, line {number}"
        row = check_schema_version(parse_json(line, location, RunFolderError), location, _SCHEMA_VERSION)
        with reading(location, RunFolderError):
            rows[_name(row["run"])] = row
    return rows


def _name(run: str) -> str:
    """Return the name of a run folder.

    The name comes from a file, so a path that leaves the sweep's folder is refused.

    Raises:
        ValueError: the name is empty or contains a path.
    """
    if run in ("", "..") or Path(run).name != run:
        raise ValueError("run: the name of a folder in this one is needed")
    return run


def _others(names: Collection[str], folder: Path) -> list[Path]:
    """Return the folders of all other runs of a sweep's folder, found on disk or named in its rows."""
    marks = ("experiment.toml", "privacy.json", "ledger.jsonl")
    existing = {path.parent.name for mark in marks for path in folder.glob(f"*/{mark}")}
    return [folder / name for name in sorted((existing | set(_recorded(folder))) - set(names))]


def _check_same(point: Point, folder: Path) -> None:
    """Check that the folder of a point is new or holds the same experiment.

    Raises:
        ConfigError: the folder holds another experiment.
        RunFolderError: the folder has files but is not a run folder.
    """
    path = folder / point.experiment.name / "experiment.toml"
    if not path.is_file():
        drop_unbegun(path.parent)
        return
    requested, stored = point.experiment, parse(read_toml(path), str(path))
    # A run folder stores the name of the trainer that `auto` chose, so "auto" equals any stored name.
    if requested.trainer.name == "auto":
        stored = stored.model_copy(update={"trainer": stored.trainer.model_copy(update={"name": "auto"})})
    if stored != requested:
        raise ConfigError(f"{path.parent}: holds another experiment; choose another --runs folder")


def play_point(point: Point, folder: Path, version: str) -> Row:
    """Prepare and play a point in a worker process.

    Args:
        point: the run.
        folder: parent of the run folders.
        version: fedveil's version in the process that sweeps.

    Raises:
        ConfigError: the worker has another version of fedveil.
        RunFolderError: the worker does not see the sweep's folder.
    """
    check_worker(version, folder)
    path = folder / point.experiment.name
    exists = (path / "experiment.toml").is_file()
    return _play_prepared(point, folder, prepare(RunFolder.open(path)[1] if exists else point.experiment))


def _play_prepared(point: Point, folder: Path, prepared: Prepared) -> Row:
    """Run or resume a point, and return its row."""
    path = folder / point.experiment.name
    # Not in a numbered folder: where an engine takes a slow worker for a dead one, two may arrive here at once.
    exists = (path / "experiment.toml").is_file()
    own = RunFolder.open(path)[0] if exists else RunFolder.create(folder, prepared.experiment, numbered=False)
    return _row(point, continue_run(own, prepared, NullObserver()))


def joint_cost_of_points(sweep_points: Sequence[Point], folder: Path) -> Row:
    """Return the joint privacy cost of all runs in a sweep's folder.

    A reader who chooses among the runs has looked at all of them. The cost is that of
    :func:`fedveil.privacy.joint_cost.joint_cost` at the smallest delta of the points, including runs of earlier
    sweeps in the folder. If runs protect different units, or one of them has not ended, no single epsilon covers
    them, and the sentence says so.

    Args:
        sweep_points: the points of a complete sweep.
        folder: parent of the run folders.

    Returns:
        A row with the number of runs, epsilon (None if nothing is guaranteed), delta, and a sentence about them.
    """
    names = [point.experiment.name for point in sweep_points]
    other_folders = _others(names, folder)
    folders = [*(folder / name for name in names), *other_folders]
    delta = min(point.experiment.privacy.delta for point in sweep_points)
    accountant, epsilon = sweep_points[0].experiment.privacy.accountant, None
    try:
        spent = joint_cost(folders, delta, accountant)
    except FedveilError as error:
        cost = f"{error}; each run's statement is about that run alone"
    else:
        epsilon, cost = spent.epsilon, "no guarantee"
        if spent.promise is not None:
            cost = f"{spent.promise}, against whoever reads all that they released and chooses among it"
    earlier = f" ({len(other_folders)} of them from earlier sweeps into {folder})" if other_folders else ""
    sentence = f"together, {len(folders)} runs on the same people{earlier}: {cost}"
    if any(point.experiment.evaluation is None for point in sweep_points) or any(
        map(_shows_metrics, other_folders)
    ):
        sentence += (
            ". Metrics on test records are exact and covered by no epsilon: choosing by them is covered only where the "
            "test records are public"
        )
    return {
        "runs": len(folders),
        "epsilon": None if epsilon is None else finite(epsilon),
        "delta": delta,
        "told": sentence,
    }


def _shows_metrics(folder: Path) -> bool:
    """Return whether a run may have shown exact test metrics: it trained without releasing them."""
    path = folder / "experiment.toml"
    return path.is_file() and "evaluation" not in read_toml(path)


def _row(point: Point, outcome: Outcome) -> Row:
    """Return the row of a run in ``sweep.jsonl``."""
    # Row 0 is the initial model, for which no silo sends anything.
    sent = [row.bytes_up for row in read_lines(outcome.folder / "metrics.jsonl", RoundRow)[0][1:]]
    return {
        "schema_version": _SCHEMA_VERSION,
        "run": outcome.folder.name,
        "settings": point.settings,
        "rounds": outcome.rounds,
        "stopped": outcome.stopped,
        "test": outcome.row["test"],
        "seconds": outcome.seconds,
        "bytes_up": sum(message or 0 for message in sent) if sent and None not in sent else None,
        "epsilon": outcome.statement.epsilon,
    }
