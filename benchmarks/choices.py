"""Does a private choice among models pay? A part of the budget is spent on comparing newton and boosted-trees.

With mu^2 the budget of (epsilon, delta) as one Gaussian release, and s the share that is spent on choosing:

    candidates   each is trained on 3/4 of the people, at s mu^2 / 2
    scores       the other 1/4 release sum_u (Brier score of newton - Brier score of trees) + N(0, 1 / (s mu^2)), where
                 a person's score is the mean over the person's records; it lies in [-1, 1]
    model        the candidate with the smaller noisy score is trained on everybody, at (1 - s) mu^2

A person is in one of the two parts, so each person spends at most s mu^2 on the choice, and mu^2 in all. This favours
choosing: the scores need a trusted server, main silos are not looked at, and the split is not charged. With two
candidates, report-noisy-max is the sign of one noisy difference.

Beside it stands the choice of the rule (docs/which-model.md) at the whole budget, on the same seeds, from
``results/tables.json`` (``fedveil bench tables``): the people who are held out are the same.
``fedveil bench choices`` keeps its runs in ``results/choices.json``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64
from reproduction.results import ResultFolder, Results, Run, digest, rounded
from scipy.optimize import brentq
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from benchmarks.harness import Row
from benchmarks.table_data import TABLES, Table, hospital
from benchmarks.tables import DELTA, FOLDER, SEEDS, held_out, private_outputs, settings_at
from fedveil import __version__
from fedveil.privacy.accountant import gaussian_delta, gaussian_epsilon
from fedveil.run.config.recommended import TREES_FROM, TREES_FROM_A_COLUMN

TABLE: Final = "choices"
COMMAND: Final = "fedveil bench choices"
CANDIDATES: Final = ("newton", "boosted-trees")
SHARES: Final = (0.1, 0.25)
Cell = tuple[str, float]
"""Table and epsilon."""

CELLS: Final[tuple[Cell, ...]] = tuple(
    (name, 2.0) for name in ("breast cancer", "anes96", "hospital, 2,000 people")
)
"""Small tables: on one of them trees are better at this epsilon, and the rule takes newton on all."""


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` the smallest table on two seeds, kept nowhere."""
    kept = Results(table=TABLE, command=COMMAND) if quick else read()
    cells = (("breast cancer", 2.0),) if quick else CELLS
    for cell in cells:
        table = TABLES[cell[0]]()
        settings = settings_of(cell)
        for seed in list(SEEDS)[:2] if quick else SEEDS:
            if kept.has(named(cell), seed, settings):
                continue
            kept = kept.adding([played(table, cell, seed, settings)])
            if not quick:
                ResultFolder(FOLDER).write(kept)
    for cell in cells:
        yield from _rows_of(cell, kept)


def smallest() -> Iterator[Row]:
    """Compare once on a few people, in few rounds."""
    cell = ("hospital, 60 people", 5.0)
    kept = Results(table=TABLE, command=COMMAND)
    run = played(hospital(60)(), cell, SEEDS[0], digest({}), rounds=3, shares=SHARES[1:])
    yield from _rows_of(cell, kept.adding([run]))


def _rows_of(cell: Cell, kept: Results) -> Iterator[Row]:
    found = kept.runs_of(named(cell))
    for value in found[0].values if found else ():
        mean = float(np.mean([run.values[value] for run in found]))
        yield Row(case=f"{named(cell)}: {value} ({len(found)} seeds)", unit="auc", ours=mean)


def named(cell: Cell) -> str:
    """Return the name of a cell in the result file."""
    return f"{cell[0]}, epsilon {cell[1]:g}"


def settings_of(cell: Cell) -> str:
    """Return the digest of a cell's settings."""
    asked = [settings_at(model, cell[1]) for model in CANDIDATES]
    return digest({"table": cell[0], "candidates": asked, "shares": list(SHARES)})


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": COMMAND})


def strength(epsilon: float) -> float:
    """Return mu of (epsilon, DELTA)."""
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - DELTA, 1e-3, 50.0))


def played(
    table: Table,
    cell: Cell,
    seed: int,
    settings: str,
    rounds: int | None = None,
    shares: tuple[float, ...] = SHARES,
) -> Run:
    """Choose once with each share, and return the AUCs on the people who are held out."""
    before, epsilon = time.process_time(), cell[1]
    tested, mu = held_out(table, seed), strength(epsilon)

    def outputs(model: str, part: float, people: Bool[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        asked = settings_at(model, gaussian_epsilon(mu * math.sqrt(part), DELTA))
        return private_outputs(table, people, model, asked | ({"rounds": rounds} if rounds else {}), seed)

    values: dict[str, float] = {}
    scoring = ~tested & (np.random.default_rng([seed, 1]).random(len(tested)) < 0.25)[table.user]
    for share in shares:
        tried = [outputs(model, share / 2, ~tested & ~scoring) for model in CANDIDATES]
        noise = float(np.random.default_rng([seed, 2]).normal()) / (mu * math.sqrt(share))
        trees = _brier(table, tried[0], scoring) - _brier(table, tried[1], scoring) + noise > 0
        scores = outputs(CANDIDATES[int(trees)], 1 - share, ~tested)
        values[f"auc, share {share:g}"] = float(roc_auc_score(table.target[tested], scores[tested]))
        values[f"trees chosen, share {share:g}"] = float(trees)
    return Run(
        cell=named(cell),
        seed=seed,
        settings=settings,
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={name: rounded(value) for name, value in values.items()},
    )


def rule(name: str, epsilon: float) -> str:
    """Return the candidate that the rule of public facts takes, with the people who are not held out."""
    table = TABLES[name]()
    users = len(np.unique(table.user[~held_out(table, SEEDS[0])]))
    columns = table.numbers.shape[1] + table.categories.shape[1]
    return CANDIDATES[int(users * epsilon >= max(TREES_FROM, TREES_FROM_A_COLUMN * columns))]


def _brier(table: Table, outputs: Float64[np.ndarray, " n"], people: Bool[np.ndarray, " n"]) -> float:
    """Return the sum over users of the mean squared error of their probabilities."""
    squared = (expit(outputs[people]) - table.target[people]) ** 2
    _, user = np.unique(table.user[people], return_inverse=True)
    return float((np.bincount(user, squared) / np.bincount(user)).sum())
