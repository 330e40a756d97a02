"""Sweeps and cross-validation from Python: train several models, and say what all runs cost together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool
from torch import nn

from fedveil.api.budget import Budget, Charge, joint_epsilon, note_fit
from fedveil.api.frame import Frame
from fedveil.api.objective import Objective
from fedveil.api.result import Result
from fedveil.api.training import TrainingArguments, play
from fedveil.arguments import explain_arguments
from fedveil.config_keys import whole_argument
from fedveil.data.records import Population
from fedveil.data.splits import fold_of_user
from fedveil.errors import ConfigError
from fedveil.files import as_path
from fedveil.privacy.statement import show_epsilon
from fedveil.report.figure_files import write_figures
from fedveil.report.tradeoff import tradeoff_plots, write_tradeoff
from fedveil.run.config.experiment import merge
from fedveil.run.setup import Prepared
from fedveil.run.sweep import Point, check_joint_accountant, joint_cost_of_points
from fedveil.run.sweep import sweep as play_points


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SweepFrame(Frame):
    """One row per run of a sweep, with its settings, test metrics and epsilon.

    Attributes:
        spent: joint cost of all runs in the folder: ``epsilon`` (None: nothing is guaranteed), ``delta``, ``runs``, and
            ``told``, the sentence about them. Whoever chooses among the runs has looked at all of them.
        folder: parent of the run folders.
    """

    spent: Mapping[str, Any]
    folder: Path

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"together": dict(self.spent)}

    def write(self, path: str | Path, key: str) -> Path:
        """Write a page that draws results and costs against a key of the experiments, such as ``rounds``.

        Raises:
            RunFolderError: the runs have no such key, or the file cannot be written.
        """
        folders = [self.folder / row["run"] for row in self.rows]
        return write_tradeoff(folders, key, as_path(path, "write"), spent=self.spent["told"])

    def figures(
        self, folder: str | Path, key: str, *, formats: Sequence[str] = ("svg", "pdf", "csv")
    ) -> list[Path]:
        """Write the plots of :meth:`write` into a folder; arguments and errors as those of ``Result.figures``."""
        plots = tradeoff_plots([self.folder / row["run"] for row in self.rows], key)
        return write_figures(plots, as_path(folder, "figures"), formats)


@explain_arguments
def sweep(
    model: nn.Module | str,
    people: Population,
    grid: Mapping[str, Iterable[Any]],
    *,
    seeds: int = 1,
    folder: str | Path = "runs/sweep",
    **arguments: Any,
) -> SweepFrame:
    """Train at every point of a grid, in this process; call it again to finish an interrupted sweep.

    Every point is checked before the first one trains. A complete run is not run again. ``epsilon`` is that of ONE
    run: :attr:`SweepFrame.spent` says what all of them cost together, because whoever chooses among runs has looked
    at all of them. Settings that were chosen on public data cost nothing.

    Args:
        model: as of :func:`fedveil.train`.
        people: as of :func:`fedveil.train`.
        grid: values by key. A key is a keyword argument of :func:`fedveil.train`, such as ``rounds`` or ``method``, or
            a dotted key of the experiment, such as ``method.clip``.
        seeds: number of runs per point, with consecutive seeds.
        folder: parent of the run folders.
        arguments: the other keyword arguments of :func:`fedveil.train`, the same at all points.

    Raises:
        ConfigError: no key or value, a point that is not valid, two points of one name, or a run folder that holds
            another experiment.
        FedveilError: a run failed; the others are complete.
    """
    axes = _axes(grid)
    seeds = whole_argument("fedveil.sweep: seeds", seeds, 1)
    chosen: dict[str, TrainingArguments] = {}
    points: list[Point] = []
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        words = {key: _label(value) for key, value in settings.items()}
        point_arguments = _with_settings(arguments, settings)
        first = whole_argument("fedveil.sweep: seed", point_arguments.get("seed", 0))
        for seed in range(first, first + seeds):
            suffix = f"-seed{seed}" if seeds > 1 else ""
            name = f"{point_arguments.get('name', 'run')}-{','.join(f'{k}={v}' for k, v in words.items())}{suffix}"
            name = re.sub(r"[^A-Za-z0-9._+-]", "_", name)
            if name in chosen:
                raise ConfigError(
                    f"fedveil.sweep: two points would both be the run {name}; give values whose texts differ"
                )
            chosen[name] = TrainingArguments.bind(
                "fedveil.sweep", {**point_arguments, "seed": seed, "name": name}
            )
            experiment = chosen[name].prepare(model, people)[0].experiment
            if experiment.preprocessing is not None:
                raise ConfigError(
                    "fedveil.sweep: preprocessing: each run would pay for it; refine the schema once in fedveil.train"
                )
            points.append(Point(experiment=experiment, settings=words))
    check_joint_accountant(points)

    def prepare_point(point: Point) -> Prepared:
        return chosen[point.experiment.name].prepare(model, people)[0]

    parent = as_path(folder, "fedveil.sweep: folder")
    rows = tuple(play_points(points, parent, prepare_point=prepare_point))
    return sweep_frame(rows, joint_cost_of_points(points, parent), parent)


def sweep_frame(rows: Iterable[Mapping[str, Any]], spent: Mapping[str, Any], folder: Path) -> SweepFrame:
    """Return the rows of ``sweep.jsonl`` as a frame, with one column per setting and test metric.

    Args:
        rows: the rows.
        spent: joint cost of all runs.
        folder: parent of the run folders.
    """
    flat = tuple(
        {"run": row["run"], **row["settings"], **(row["test"] or {})}
        | {key: row[key] for key in ("epsilon", "rounds", "stopped", "seconds")}
        for row in rows
    )
    return SweepFrame(rows=flat, notes=(spent["told"],), spent=spent, folder=folder)


def _axes(grid: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """Return the values of every key.

    Raises:
        ConfigError: no mapping of keys to lists of values, or a key that the sweep sets itself.
    """
    if not isinstance(grid, Mapping) or not grid or any(key in ("name", "seed") for key in grid):
        raise ConfigError(
            "fedveil.sweep: grid must have values by key, such as {'rounds': [10, 20]}; the sweep sets names and seeds"
        )
    axes = {}
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(
                f"fedveil.sweep: grid: {key} needs a list of values, not {type(values).__name__}"
            )
        axes[key] = list(values)
        if not axes[key]:
            raise ConfigError(f"fedveil.sweep: grid: {key} has no value")
    return axes


def _with_settings(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of :func:`fedveil.train` with the settings of one point.

    Raises:
        ConfigError: ``settings`` among the arguments is no mapping.
    """
    merged = dict(arguments)
    for key, value in settings.items():
        if "." not in key:
            merged[key] = value
            continue
        laid_over = merged.get("settings") or {}
        if not isinstance(laid_over, Mapping):
            raise ConfigError("fedveil.sweep: settings: tables by name are needed")
        inner: Any = value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        merged["settings"] = merge(dict(laid_over), inner)
    return merged


def _label(value: Any) -> str:
    """Return a value as text for the name of its run."""
    return str(getattr(value, "name", value))


# --- cross-validation by users ---

_WHERE: Final = "fedveil.cross_validate"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CrossValidation(Frame):
    """Metrics of every fold on the users that it held out: exact figures of private records.

    Attributes:
        epsilon: epsilon of the models of all folds together, for one user.
        delta: delta of :attr:`epsilon`.
        results: the result of every fold.
    """

    epsilon: float
    delta: float
    results: tuple[Result, ...]

    @property
    def mean(self) -> dict[str, float | None]:
        """Mean of every metric over the folds; None if it is not defined in one of them."""
        means: dict[str, float | None] = {}
        for name in self.results[0].metrics:
            values = [result.metrics[name] for result in self.results]
            defined = [value for value in values if value is not None]
            means[name] = float(np.mean(defined)) if len(defined) == len(values) else None
        return means


@explain_arguments
def cross_validate(
    model: nn.Module | str,
    people: Population,
    *,
    folds: int = 5,
    epsilon: float,
    delta: float = 1e-5,
    folder: str | Path = "runs/cross-validation",
    **arguments: Any,
) -> CrossValidation:
    """Train once per fold on all users but those of the fold, and test on these; all fits stay within one epsilon.

    **Claim.** The models of all folds are together (epsilon, delta)-differentially private for one user. The fold of a
    user follows from the user's id and ``seed`` alone, so adding or removing a user changes the records of the other
    k - 1 fits, and of none else: k - 1 events are composed, not k. Not covered: the metrics, which are exact figures of
    the held-out records, and any choice that is made by them.

    Args:
        model: as of :func:`fedveil.train`; every fold begins with the same model.
        people: the population; its own test records are left out.
        folds: k, at least 2.
        epsilon: epsilon of all folds together.
        delta: delta of the guarantee.
        folder: parent of the run folders.
        arguments: other keyword arguments of :func:`fedveil.train`.

    Raises:
        ConfigError: an argument is wrong, or the method protects something else than a user.
        FedveilError: as :func:`fedveil.train`.
    """
    folds = whole_argument(f"{_WHERE}: folds", folds, 2)
    if not isinstance(people, Population):
        raise ConfigError(f"{_WHERE}: people: a population is needed, not {type(people).__name__}")
    if folds > people.n_users:
        raise ConfigError(f"{_WHERE}: folds must be at most the {people.n_users} users, not {folds}")
    seed = whole_argument(f"{_WHERE}: seed", arguments.get("seed", 0))
    keys = people.train.key
    fold = fold_of_user(people.train.user.astype(np.int64) if keys is None else keys, folds, seed)
    # Every user is in k - 1 fits, so k - 1 charges share the budget. The last fold is admitted beside all earlier ones
    # but the cheapest: its users are in all of these but one.
    budget = Budget(epsilon, fits=folds - 1, delta=delta)
    parent, results = as_path(folder, f"{_WHERE}: folder"), list[Result]()
    charges = list[Charge]()
    prepared: Prepared  # of the last admitted fold
    for number in range(folds):
        own = _without_fold(people, fold == number, number + 1, folds)
        fold_arguments = {
            **arguments,
            "delta": delta,
            "name": f"{arguments.get('name', 'fold')}-{number + 1}",
        }
        learned = list[Objective]()

        def prepare(
            spends: float,
            fold: Population = own,
            fold_arguments: Any = fold_arguments,
            learned: Any = learned,
        ) -> Prepared:
            prepared, objective = TrainingArguments.bind(
                _WHERE, fold_arguments | {"epsilon": spends}
            ).prepare(model, fold)
            if prepared.guarantee.unit != "user":
                raise ConfigError(
                    f"{_WHERE}: folds are by users, and the method protects a {prepared.guarantee.unit}; take a method "
                    "that protects users"
                )
            learned.append(objective)
            return prepared

        spent = budget if number < folds - 1 else budget.without_cheapest(prepared.accountant)
        prepared, charge = spent.admit(prepare)
        note_fit(prepared, charge, budget)
        results.append(play(prepared, learned[-1], parent))
        # The statement includes attempts at rounds that were repeated.
        charges.append(replace(charge, event=results[-1].statement.event))
    # A user of fold j is in all fits but the j-th.
    together = max(
        joint_epsilon(
            [charge for at, charge in enumerate(charges) if at != number], prepared.accountant, delta
        )
        for number in range(folds)
    )
    rows = tuple(
        {"fold": at + 1, **result.metrics, "rounds": result.rounds} for at, result in enumerate(results)
    )
    sentence = (
        f"the models of all {folds} folds together protect each user with epsilon {show_epsilon(together)} at delta "
        f"{delta:g}; the metrics are exact figures of held-out records, and no guarantee covers them or a choice "
        "by them"
    )
    return CrossValidation(
        rows=rows, notes=(sentence,), private=True, epsilon=together, delta=delta, results=tuple(results)
    )


def _without_fold(people: Population, held_out: Bool[np.ndarray, "n"], number: int, folds: int) -> Population:
    """Return the population with the users of one fold held out for testing."""
    train, rows = people.train, np.arange(len(people.train))
    aside = rows[held_out]
    return replace(
        people,
        train=train.select(rows[~held_out]),
        test_features=train.features[aside],
        test_targets=train.targets[aside],
        test_weights=None,
        test_rows=None,
        public_test=False,
        source=None,
        notes=(
            *people.notes,
            f"Fold {number} of {folds}: its users, chosen by their ids alone, are held out for testing.",
        ),
    )
