"""What user-level privacy across silos costs: one model a data set, from no privacy to the paper's method and beyond.

Every cell is run on 16 seeds (20 to 35) that chose nothing: they draw the noise, the batches and the initial model,
while the split and the allocation of the records stay. Results are kept in ``results/price.json`` run by run, so that
an interrupted benchmark goes on; ``python -m benchmarks.price_page`` writes docs/price.md of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32
from reproduction.results import ResultFolder, Results, Run, Values, digest, rounded
from torch import Tensor

from benchmarks.harness import Row
from benchmarks.price_cases import COLUMNS, DATA, POOLED, PROFILE, SEEDS, PriceCell, cells
from fedveil import __version__
from fedveil.data.records import Population
from fedveil.errors import FedveilError
from fedveil.methods.channels import Identity
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import begin_state, released_model
from fedveil.methods.noise_ratio import noise_to_displacement
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.claims import Role
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.executors import Workers, play_tasks, task_of_checkout
from fedveil.run.populations import FixedPopulation, PopulationCache
from fedveil.run.releases.records import evaluate
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import SimulatedParties, play_round

TABLE: Final = "price"
FOLDER: Final = Path("results")
MORE: Final = 4
"""How many times the rounds the profile's last column plays."""


def rows(quick: bool, workers: AbstractContextManager[Workers] | None = None) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` two data sets on four seeds, kept nowhere.

    Every run is kept when it ends. With workers, an error of one ends the benchmark after the others.
    """
    asked = list(cells(quick))
    kept = Results(table=TABLE, command="fedveil bench price") if quick else read()
    missing = [
        (cell, seed, settings)
        for cell, seed in in_order(asked, 4 if quick else None)
        if not kept.has(cell.name, seed, settings := settings_of(cell))
    ]
    failed: FedveilError | None = None
    for run in _played_here(missing) if workers is None else _played_by(workers, missing):
        if isinstance(run, FedveilError):
            failed = failed or run
            continue
        kept = kept.adding([run])
        if not quick:
            ResultFolder(FOLDER).write(kept)
    if failed is not None:
        raise failed
    for cell in asked:
        runs = kept.runs_of(cell.name)
        found = [run.values[cell.case.metric] for run in runs]
        mean = float(np.mean([value for value in found if value is not None]))
        yield Row(case=f"{cell.name} ({len(runs)} seeds)", unit=cell.case.metric, ours=mean)


def _played_here(missing: list[tuple[PriceCell, int, str]]) -> Iterator[Run]:
    populations = PopulationCache()
    for cell, seed, settings in missing:
        yield played(cell, seed, settings, populations)


def _played_by(
    workers: AbstractContextManager[Workers], missing: list[tuple[PriceCell, int, str]]
) -> Iterator[Run | FedveilError]:
    checkout = Path(__file__).parents[1]
    tasks = [task_of_checkout(checkout, played, *one, PopulationCache()) for one in missing]
    for _, run in play_tasks(tasks, workers):
        yield run


def smallest() -> Iterator[Row]:
    """Play every column once on digits of few users, in few rounds."""
    digits = DATA[0]
    few = replace(digits, rounds=2, data={**digits.data, "n_users": 10}, local={**digits.local, "epochs": 1})
    populations = PopulationCache()
    for column in (*COLUMNS, *PROFILE):
        cell = PriceCell(case=few, column=column, epsilon=2.0 if column in PROFILE else None)
        if column != "longer" and column != "transferred":
            run = played(cell, SEEDS[0], settings_of(cell), populations)
            found = run.values[few.metric]
            assert found is not None, "there are test records"
            yield Row(case=cell.name, unit=few.metric, ours=found)


def in_order(asked: list[PriceCell], most: int | None) -> Iterator[tuple[PriceCell, int]]:
    """Yield data set by data set all columns of one seed before those of the next, so that what there is, is paired."""
    for name in dict.fromkeys(cell.case.name for cell in asked):
        found = [(seed, cell) for cell in asked if cell.case.name == name for seed in cell.seeds[:most]]
        yield from ((cell, seed) for seed, cell in sorted(found, key=lambda one: one[0]))


def read() -> Results:
    """Return the runs that are kept."""
    found = ResultFolder(FOLDER).read(TABLE)
    return found.model_copy(update={"command": "fedveil bench price"})


def settings_of(cell: PriceCell) -> str:
    """Return the digest of what a cell runs, the seed left out."""
    asked = {**cell.document(0), "pooled": cell.column in POOLED}
    return digest({**asked, "without": left_out(cell.column)} if cell.column in PROFILE else asked)


def played(cell: PriceCell, seed: int, settings: str, populations: PopulationCache) -> Run:
    """Run a cell once, with exact noise of the system's randomness, and return what it gave."""
    before = time.process_time()
    experiment = parse(cell.document(seed), cell.name)
    population = populations.load(experiment.data, experiment.seed)
    if cell.column in POOLED:
        population = pooled(population)
    prepared = without(cell.column, prepare(experiment, FixedPopulation(population)))
    found = evaluate(prepared, trained(prepared))
    assert found is not None, "no metric is released here"
    values = _values(prepared, found)
    return Run(
        cell=cell.name,
        seed=seed,
        settings=settings,
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values=values,
    )


def left_out(column: str | tuple[float, float]) -> list[str]:
    """Return what a column of the profile is played without: its own part, and those of all before it."""
    parts = list(PROFILE)
    return parts[: parts.index(column) + 1] if isinstance(column, str) and column in PROFILE else []


def without(column: str | tuple[float, float], prepared: Prepared) -> Prepared:
    """Return recipe U without what a column of the profile leaves out; all other columns as they are.

    Its rate and its denoiser stay those that the rule found for the noise.
    """
    parts, method, experiment = left_out(column), prepared.method, prepared.experiment
    if "no noise" in parts:
        method = replace(method, channel=Identity())
    if "no clip" in parts:
        method = replace(method, bound=Unbounded())
    if "more rounds" in parts:
        experiment = experiment.model_copy(update={"rounds": MORE * experiment.rounds})
    return replace(prepared, experiment=experiment, setting=replace(prepared.setting, method=method))


def pooled(population: Population) -> Population:
    """Return the population with all records in one silo."""
    train = population.train
    alone = replace(train, silo=np.zeros_like(train.silo))
    return replace(population, train=alone, silo_names=("all",))


def trained(prepared: Prepared) -> Float32[Tensor, " d"]:
    """Play all rounds and return the run's model."""
    experiment, method = prepared.experiment, prepared.method
    model = prepared.task.initial()
    state, privacy = begin_state(method, model), experiment.privacy.randomness()
    parties = SimulatedParties.in_the_open(prepared.setting)
    for number in range(1, experiment.rounds + 1):
        turn = RoundContext(
            setting=prepared.setting,
            model=model,
            state=state,
            round_number=number,
            experiment=ExperimentRandomness(experiment.seed),
            privacy=privacy,
        )
        model, state, _ = play_round(turn, parties)
    return released_model(method, model, state)


def _values(prepared: Prepared, metrics: dict[str, float | None]) -> Values:
    rounds, found = prepared.experiment.rounds, dict[str, Any](metrics)
    facts = PublicFacts(
        n_silos=prepared.population.n_silos,
        n_users=prepared.population.n_users,
        dimension=prepared.length,
    )
    try:
        found["epsilon"] = prepared.epsilon_after(rounds)
        found["epsilon to the server"] = prepared.epsilon_with(Role.SERVER, rounds, ())
        hidden = replace(prepared.method, weights=Weights.by_power(2.0), protection=PrivateWeighting())
        weighted = replace(prepared, guarantee=derive(hidden, facts))
        found["epsilon to the server, private weights p = 2"] = weighted.epsilon_with(Role.SERVER, rounds, ())
        found["rho"] = noise_to_displacement(prepared.method, facts, rounds)
    except FedveilError:
        found["epsilon"] = None
    return {
        name: None if value is None or not np.isfinite(value) else rounded(value)
        for name, value in found.items()
    }
