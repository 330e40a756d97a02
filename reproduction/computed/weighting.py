"""What ULDP-FL's private weighting (Protocol 1) costs: on the medical sets, by parameters, and by users.

All parties take turns on one core, so the seconds are those of the server and all silos together; a run between
institutions divides them. Of every case the same run is played with the protocol and without; what is told is the
difference, but for local training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from fedveil.data.arrays import population
from fedveil.data.records import Population
from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.populations import FixedPopulation, PopulationCache
from fedveil.run.setup import prepare
from reproduction.computed.clock import Clock
from reproduction.results import Values

_ROUNDS: Final = 4
_PROTOCOL: Final = {"name": "private-weighting", "n_max": 2000}
_RECORDS, _SILOS = 10_000, 3


def figure_10(seed: int) -> Iterator[tuple[str, Values]]:
    """HeartDisease and TcgaBrca under the settings of Figures 6 and 7, zipf allocation, 10 and 100 users."""
    populations = PopulationCache()
    for name, preset in (("HeartDisease", "figure-6-heart-disease"), ("TcgaBrca", "figure-7-tcga-brca")):
        for users in (10, 100):
            laid_over = (
                {"seed": seed, "rounds": _ROUNDS, "evaluate_every": _ROUNDS},
                {"data": {"n_users": users}},
            )
            chosen = Selection(scenarios=("users50-zipf",), variants=("uldp-avg-w",), overrides=laid_over)
            (document,) = study_documents(preset, chosen)
            yield f"{name}, {users} users", _overhead(document, populations)


def figure_11(seed: int) -> Iterator[tuple[str, Values]]:
    """10,000 artificial records in three silos: by parameters with 20 users, and by users with 16 parameters."""
    for parameters in (16, 30, 58, 107):
        yield f"{parameters} parameters, 20 users", _artificial(parameters, 20, seed)
    for users in (10, 40):
        yield f"16 parameters, {users} users", _artificial(16, users, seed)


def _artificial(parameters: int, users: int, seed: int) -> Values:
    document = {
        "name": "artificial",
        "seed": seed,
        "rounds": _ROUNDS,
        "evaluate_every": _ROUNDS,
        "data": {"name": "digits", "n_users": users},
        "model": {"name": "linear"},
        "method": {"name": "uldp-avg-w", "clip": 1.0, "noise_multiplier": 5.0},
        "server": {"learning_rate": 1 / _SILOS},
        "local": {"learning_rate": 0.1, "epochs": 1, "batch_size": 64},
        "privacy": {"delta": 1e-5},
    }
    return _overhead(document, FixedPopulation(_people(parameters, users, seed), "this"))


def _people(parameters: int, users: int, seed: int) -> Population:
    """Return records of two classes for a linear model with so many parameters: one of them is its intercept."""
    drawn = np.random.default_rng(seed)
    features = drawn.standard_normal((_RECORDS, parameters - 1))
    return population(
        features,
        (features.sum(axis=1) > 0).astype(int),
        user=drawn.integers(users, size=_RECORDS),
        silo=drawn.integers(_SILOS, size=_RECORDS),
        n_users=users,
        task="classification",
        classes=[0, 1],
        silos=list(range(_SILOS)),
        name="artificial records",
    )


def _overhead(document: dict[str, Any], populations: PopulationCache) -> Values:
    """Return CPU seconds of the run without the protocol, and by how many more it takes with it."""
    plain, private = (
        Clock.measure(prepare(parse(document | added, "overhead"), populations))
        for added in ({}, {"protection": _PROTOCOL})
    )
    return {
        "a round": private.later - plain.later,
        "keys and setup": private.setup - plain.setup,
        "the first round": private.first - plain.first,
        "a round of training": plain.later,
    }
