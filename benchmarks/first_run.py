"""The variants of the preset `digits`, which `make run` trains, on 16 seeds: README's table.

Runs are kept in ``results/first-run.json``. A cell's epsilon is against readers, the server, one silo, and the server
with one silo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from reproduction.results import ResultFolder, Results, Run, Values, digest, rounded

from benchmarks.harness import Row
from benchmarks.price import trained
from fedveil import __version__
from fedveil.privacy.claims import Role
from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.populations import PopulationCache
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import Prepared, prepare

TABLE: Final = "first-run"
FOLDER: Final = Path("results")
SEEDS: Final = range(40, 56)
ROLES: Final = {
    "readers": Role.READER,
    "server": Role.SERVER,
    "silo": Role.SILO,
    "server and silo": Role.SERVER | Role.SILO,
}


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` one seed, kept nowhere."""
    kept = Results(table=TABLE, command="fedveil bench first_run") if quick else read()
    populations = PopulationCache()
    for seed in SEEDS[:1] if quick else SEEDS:
        for document in documents():
            if kept.has(document["name"], seed, _settings(document)):
                continue
            kept = kept.adding([played(document, seed, populations)])
            if not quick:
                ResultFolder(FOLDER).write(kept)
    for document in documents():
        found = [run.values["accuracy"] or 0.0 for run in kept.runs_of(document["name"])]
        yield Row(case=document["name"], unit="accuracy", ours=float(np.mean(found)))


def smallest() -> Iterator[Row]:
    """Play every variant in one round."""
    populations = PopulationCache()
    for document in documents():
        found = played({**document, "rounds": 1}, SEEDS[0], populations).values["accuracy"]
        yield Row(case=document["name"], unit="accuracy", ours=found or 0.0)


def documents() -> list[dict[str, Any]]:
    """Return the experiment of every variant of the preset, on records that no seed moves."""
    found = study_documents("digits", Selection())
    return [{**one, "data": {**one["data"], "seed": 0}, "seed": 0} for one in found]


def played(document: dict[str, Any], seed: int, populations: PopulationCache) -> Run:
    """Run a variant once, in the open: masks change no bit of a model."""
    before = time.process_time()
    prepared = prepare(parse({**document, "seed": seed}, document["name"]), populations)
    found = evaluate(prepared, trained(prepared))
    assert found is not None, "no metric is released here"
    return Run(
        cell=document["name"],
        seed=seed,
        settings=_settings(document),
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={name: rounded(value) for name, value in {**found, **_epsilons(prepared)}.items()},
    )


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": "fedveil bench first_run"})


def _settings(document: dict[str, Any]) -> str:
    return digest(document)


def _epsilons(prepared: Prepared) -> Values:
    """Return the epsilon of the whole run by role; None without a guarantee."""
    stated = {view.role for view in prepared.guarantee.views} | {Role.READER}
    found = {
        name: prepared.epsilon_with(role, prepared.experiment.rounds, ()) if role in stated else float("inf")
        for name, role in ROLES.items()
    }
    return {f"epsilon, {name}": value if np.isfinite(value) else None for name, value in found.items()}
