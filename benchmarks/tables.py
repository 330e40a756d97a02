"""Which model for a table: the recommended updates, Newton steps and boosted trees, beside no privacy.

Tables come with installed packages; nothing is downloaded. Numbers are scaled to [-1, 1] by bounds that are the table's
range rounded outwards by 2 %, as a schema would declare them; categories are 0/1 features. Where a table names no
person, every record is one person's; each person has a main silo among four, and the made-up hospital has 1 to 4
records a person, a quarter of them elsewhere. A quarter of the people is held out. Runs are kept in
``results/tables.json``, seed by seed, so that an interrupted benchmark goes on; a seed draws the held-out people, the
noise and the trees. ``python -m benchmarks.tables_page`` writes docs/which-model.md of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from reproduction.results import ResultFolder, Results, Run, digest, rounded
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import fedveil as fv
from benchmarks.harness import Row
from benchmarks.price import trained
from fedveil import __version__
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare

TABLE: Final = "tables"
COMMAND: Final = "fedveil bench tables"
FOLDER: Final = Path("results")
SEEDS: Final = range(40, 56)
"""Seeds of the benchmark; they chose nothing."""
EPSILONS: Final = (1.0, 2.0, 5.0)
SILOS: Final = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A table with a 0/1 target.

    Attributes:
        numbers: (n, p) numbers.
        categories: (n, q) category numbers.
        target: (n,) 0 or 1.
        user, silo: (n,) of every record.
    """

    numbers: Float64[np.ndarray, "n p"]
    categories: Int64[np.ndarray, "n q"]
    target: Int64[np.ndarray, " n"]
    user: Int64[np.ndarray, " n"]
    silo: Int64[np.ndarray, " n"]

    @property
    def features(self) -> Float32[np.ndarray, "n d"]:
        """Numbers in [-1, 1], and one 0/1 feature a category."""
        low, high = self.numbers.min(axis=0), self.numbers.max(axis=0)
        pad = 0.02 * (high - low) + 1e-9
        scaled = [2 * (self.numbers - low + pad) / (high - low + 2 * pad) - 1]
        for column in self.categories.T:
            scaled.append((column[:, None] == np.unique(column)).astype(np.float64))
        return np.concatenate(scaled, axis=1).astype(np.float32)


def one_each(numbers: Any, categories: Any, target: Any, silo: Any = None) -> Table:
    """Return a table in which every record is one person's, with people dealt out to four silos."""
    n = len(target)
    dealt = np.random.default_rng(0).choice(SILOS, size=n, p=(0.4, 0.3, 0.2, 0.1))
    none = np.zeros((n, 0), dtype=np.int64)
    return Table(
        numbers=np.asarray(numbers, dtype=np.float64),
        categories=none if categories is None else np.asarray(categories, dtype=np.int64),
        target=np.asarray(target, dtype=np.int64),
        user=np.arange(n),
        silo=dealt if silo is None else np.asarray(silo, dtype=np.int64),
    )


def breast_cancer() -> Table:
    """Return scikit-learn's breast cancer table: 569 people, 30 numbers."""
    found = load_breast_cancer()
    return one_each(found.data, None, found.target)


def fair() -> Table:
    """Return statsmodels' survey of affairs: 6,366 people, 7 numbers and 2 occupations."""
    from statsmodels.datasets import fair as source

    frame = source.load_pandas().data
    columns = ["rate_marriage", "age", "yrs_married", "children", "religious", "educ"]
    return one_each(frame[columns], frame[["occupation", "occupation_husb"]], frame["affairs"] > 0)


def anes96() -> Table:
    """Return statsmodels' election study: 944 people, 8 numbers; the vote."""
    from statsmodels.datasets import anes96 as source

    frame = source.load_pandas().data
    columns = ["popul", "TVnews", "selfLR", "ClinLR", "DoleLR", "age", "educ", "income"]
    return one_each(frame[columns], None, frame["vote"])


def hospital(people: int) -> Callable[[], Table]:
    """Return the maker of a made-up hospital table in which thresholds and interactions decide."""

    def made() -> Table:
        rng = np.random.default_rng(0)
        size = rng.choice([1, 2, 3, 4], p=[0.6, 0.2, 0.12, 0.08], size=people)
        user = np.repeat(np.arange(people), size)
        n = len(user)
        z = rng.normal(size=(people, 8))[user] * 0.8 + rng.normal(size=(n, 8)) * 0.6
        age, bmi = np.clip(60 + 16 * z[:, 0], 18, 100), np.clip(26 + 5 * z[:, 1], 14, 50)
        pressure = np.clip(128 + 20 * z[:, 2] + 0.2 * (age - 60), 70, 220)
        glucose = np.clip(np.exp(4.65 + 0.3 * z[:, 3]), 50, 500)
        creatinine = np.clip(np.exp(-0.05 + 0.35 * z[:, 4]), 0.3, 8)
        heat, pulse = np.clip(37 + 0.7 * z[:, 5], 34, 41.5), np.clip(80 + 15 * z[:, 7], 40, 180)
        protein = np.clip(np.exp(1.5 + 1.1 * z[:, 6]), 0.1, 300)
        sex, ward, drug = rng.integers(0, 2, people)[user], rng.integers(0, 6, n), rng.integers(0, 2, n)
        odds = -2.6 + 1.3 * ((bmi < 20) | (bmi > 33)) + 1.4 * ((pressure < 100) | (pressure > 165))
        odds += 1.2 * (np.abs(heat - 37) > 0.9) + 1.5 * ((age > 65) & (creatinine > 1.1))
        odds += 1.3 * np.where(drug == 1, glucose < 80, glucose > 140) + ((sex == 1) ^ (ward >= 3))
        odds += 0.5 * np.log(protein / 5) + 0.02 * (age - 60)
        home = rng.choice(SILOS, p=(0.4, 0.3, 0.2, 0.1), size=people)
        numbers = [age, bmi, pressure, glucose, np.log1p(creatinine), heat, np.log1p(protein), pulse]
        return Table(
            numbers=np.stack([*numbers, *rng.normal(size=(2, n))], axis=1),
            categories=np.stack([sex, ward, drug], axis=1),
            target=(rng.random(n) < 1 / (1 + np.exp(-odds))).astype(np.int64),
            user=user,
            silo=np.where(rng.random(n) < 0.25, rng.integers(0, SILOS, n), home[user]),
        )

    return made


TABLES: Final[dict[str, Callable[[], Table]]] = {
    "breast cancer": breast_cancer,
    "anes96": anes96,
    "fair": fair,
    "hospital, 2,000 people": hospital(2000),
    "hospital, 10,000 people": hospital(10000),
}
"""Tables by name, smallest first."""

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
    names = ["breast cancer"] if quick else list(TABLES)
    asked = list(cells(names, (2.0,) if quick else EPSILONS))
    for seed in list(SEEDS)[:2] if quick else SEEDS:
        for name in names:
            table = TABLES[name]()
            for cell in (one for one in asked if one[0] == name):
                settings = digest({"table": name, "model": cell[1], "asked": _asked(cell)})
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
    rng = np.random.default_rng(seed)
    tested = (rng.random(int(table.user.max()) + 1) < 0.25)[table.user]
    _, model, epsilon = cell
    score = _private if epsilon else _public
    asked = _asked(cell) | ({} if rounds is None or not epsilon else {"rounds": rounds})
    auc = score(table, tested, model, asked, seed)
    return Run(
        cell=named(cell),
        seed=seed,
        settings=settings,
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={"auc": rounded(auc)},
    )


def _asked(cell: Cell) -> dict[str, Any]:
    _, model, epsilon = cell
    if not epsilon:
        return {}
    found = MODELS[model]
    method = {**found["method"], "noise_multiplier": "calibrated"}
    return {**found, "method": method, "privacy": {"epsilon": epsilon, "delta": 1e-5}}


def _private(
    table: Table, tested: Bool[np.ndarray, " n"], model: str, asked: dict[str, Any], seed: int
) -> float:
    features, target, rng = table.features, table.target, np.random.default_rng(seed)
    _, user = np.unique(table.user[~tested], return_inverse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts about features, for owners of tables
        people = fv.population(
            features[~tested],
            target[~tested],
            user=user,
            silo=table.silo[~tested],
            n_users=int(user.max()) + 1,
            task="classification",
            classes=[0, 1],
            silos=list(range(SILOS)),
            # A placeholder: tables of surveys have equal records, of which a public test may not have many.
            test=(rng.uniform(-1, 1, (8, features.shape[1])), np.arange(8) % 2),
        )
    # The records are those of `people`; an experiment's data section needs the name of some data set.
    data = {"name": "digits", "n_users": people.n_users, "n_silos": SILOS}
    asked = {**asked, "model": {**asked["model"], "metrics": ["auc"]}}
    document = {"name": "bench", "seed": seed, "data": data, **asked}
    prepared = prepare(parse(document, model), FixedPopulation(people))
    outputs = prepared.task.predict(trained(prepared), torch.from_numpy(features[tested]))
    return float(roc_auc_score(target[tested], outputs[:, 0].numpy()))


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
