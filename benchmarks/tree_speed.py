"""Boosted trees of 100,000 records of 30 columns: CPU seconds of a whole run of 31 rounds, on one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

import fedveil as fv
from benchmarks.harness import Row, at_most
from benchmarks.price import trained
from benchmarks.tables import DELTA, MODELS
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare

COLUMNS, SILOS, MOST = 30, 4, 60.0


def rows(quick: bool) -> Iterator[Row]:
    """Train on 100,000 records once; ``quick`` takes 10,000."""
    yield _run(10_000 if quick else 100_000, MODELS["boosted-trees"]["rounds"])


def smallest() -> Iterator[Row]:
    """Train on 50 records in two rounds."""
    yield _run(50, 2)


def _run(records: int, rounds: int) -> Row:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    features = rng.uniform(-1, 1, size=(records, COLUMNS)).astype(np.float32)
    target = (features[:, 0] + features[:, 1] * features[:, 2] + rng.normal(size=records) > 0).astype(int)
    people = fv.population(
        features,
        target,
        user=np.arange(records),
        silo=rng.integers(0, SILOS, records),
        n_users=records,
        silos=list(range(SILOS)),
        task="classification",
        classes=[0, 1],
    )
    found = MODELS["boosted-trees"]
    document = {
        "name": "bench",
        "seed": 0,
        "data": {"name": "digits", "n_users": records, "n_silos": SILOS},
        **found,
        "rounds": rounds,
        "method": {**found["method"], "noise_multiplier": "calibrated"},
        "privacy": {"epsilon": 2.0, "delta": min(DELTA, 0.1 / records)},
    }
    before = time.process_time()
    trained(prepare(parse(document, "tree speed"), FixedPopulation(people)))
    spent = time.process_time() - before
    return at_most(f"{records:,} records of {COLUMNS} columns, {rounds} rounds", "CPU s", spent, MOST)
