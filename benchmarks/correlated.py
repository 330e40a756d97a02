"""A fifth of the users a round: independent noise, noise that is correlated over rounds, and everyone in every round.

All at one epsilon, which under secure aggregation is the server's too: 1,000 users over 5 silos, one gradient a pair,
main-silo weights, T = 100; clip and rate are those of the price benchmark's best declared row, which was chosen on the
test set, alike for all three. Noise is the system's, so that another run gives other figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.harness import Row
from benchmarks.price import trained
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation, PopulationCache
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import prepare

PERIOD, ROUNDS, EPSILON = 5, 100, 3.85
SEEDS: Final = range(20, 24)
KINDS: Final[dict[str, dict[str, Any]]] = {
    "independent noise, 1/5 of the users": {"correlated": {"period": PERIOD, "bands": 1}},
    "correlated noise, 1/5 of the users": {"correlated": {"period": PERIOD}},
    "everyone in every round": {},
}


def document(data: str, kind: str, seed: int, rounds: int = ROUNDS, users: int = 1000) -> dict[str, Any]:
    """Return the experiment of one run."""
    method = {"name": "uldp-sgd-w", "clip": 1.0, "power": "main"}
    return {
        "name": "correlated",
        "seed": seed,
        "rounds": rounds,
        "evaluate_every": rounds,
        "data": {
            "name": data,
            "n_users": users,
            "n_silos": 5,
            "seed": 0,
            "allocation": {"law": "zipf"},
        },
        "model": {"name": "linear", "start": "zeros"},
        "method": {**method, "noise_multiplier": "calibrated", **KINDS[kind]},
        "privacy": {"epsilon": EPSILON, "delta": 1e-5},
    }


def rows(quick: bool) -> Iterator[Row]:
    """Train MNIST's linear model on four seeds; with ``quick`` digits on two."""
    yield from compared("digits" if quick else "mnist", SEEDS[:2] if quick else SEEDS)


def smallest() -> Iterator[Row]:
    """Train on digits of few users in few rounds."""
    yield from compared("digits", SEEDS[:2], rounds=6, users=10)


def compared(data: str, seeds: Sequence[int], rounds: int = ROUNDS, users: int = 1000) -> Iterator[Row]:
    """Train a linear model with each kind of noise on some seeds."""
    populations = PopulationCache()
    for kind in KINDS:
        found, seconds = [], []
        for seed in seeds:
            before = time.process_time()
            experiment = parse(document(data, kind, seed, rounds, users), kind)
            population = populations.load(experiment.data, experiment.seed)
            prepared = prepare(experiment, FixedPopulation(population))
            metrics = evaluate(prepared, trained(prepared))
            assert metrics is not None, "no metric is released here"
            value = metrics["accuracy"]
            assert value is not None, "there are test records"
            found.append(value)
            seconds.append(time.process_time() - before)
        told = f"{data}, epsilon {EPSILON:g}, {kind} ({len(found)} seeds, sd {np.std(found, ddof=1):.4f})"
        yield Row(case=told, unit="accuracy", ours=float(np.mean(found)))
        yield Row(case=f"{data}, {kind}", unit="CPU s a run", ours=float(np.median(seconds)))
