"""Play the runs of a table that its result file does not have yet; each is kept when it ends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from fedveil import __version__
from fedveil.errors import FedveilError
from fedveil.privacy.claims import Role
from fedveil.run.audit import audit
from fedveil.run.config.experiment import parse
from fedveil.run.executors import Workers, play_tasks, task_of_checkout
from fedveil.run.folder.documents import read_rows
from fedveil.run.loop import NullObserver, Observer
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import resume, run
from reproduction.results import Curves, ResultFolder, Run, Values, rounded
from reproduction.run_counts import CHEAP_RUNS, runs_wanted
from reproduction.table import Cell, Table


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a table that its result file does not have: one of a cell, or one of the whole computation.

    Attributes:
        table: the table.
        seed: of the experiment or the computation; None for an exact computation.
        cell: what is trained; None for a computation.
        runs: where run folders are made.
    """

    table: Table
    seed: int | None
    cell: Cell | None
    runs: Path

    def play(self, observer: Observer | None = None, populations: PopulationCache | None = None) -> list[Run]:
        """Play the run, or go on with it where its folder exists, and return what it measured."""
        if self.cell is None:
            return list(_computed(self.table, self.seed))
        return [_trained(self, self.cell, observer or NullObserver(), populations or PopulationCache())]


def reproduce(
    table: Table,
    results: ResultFolder,
    runs: Path,
    observer: Observer,
    *,
    seeds: int | None = None,
    workers: Callable[[], AbstractContextManager[Workers]] | None = None,
) -> Iterator[Run]:
    """Play what is missing; yield every run when it is in the result file.

    All cells get their first run before any gets its second, so that an interrupted table is even. A cell whose runs
    turn out to take less than two CPU minutes gets at least five. What was interrupted goes on: a run folder from its
    last complete round, the table from its last run.

    Args:
        table: what to play.
        results: where its result file is.
        runs: where run folders are made.
        observer: who is told how a run goes on; nobody is told about runs of workers.
        seeds: runs a cell; None: as many as the table asks for, and five where they are cheap.
        workers: opens the workers that play one run at a time each; None: all runs are played in this process. The
            workers of other machines need the checkout, the folder of runs and the data at the same path.

    Raises:
        FedveilError: what a run refuses, or a result file that was edited. With workers, the other runs are kept
            first.
    """
    played: list[Job] = []
    while jobs := [job for job in _missing(table, results, runs, seeds) if job not in played]:
        for job in jobs:
            if job.cell is not None:
                job.cell.check()
        failed: FedveilError | None = None
        for found in _play_here(jobs, observer) if workers is None else _play_in_workers(jobs, workers()):
            if isinstance(found, FedveilError):
                failed = failed or found
                continue
            results.write(results.read(table.name).adding(found))
            yield from found
        if failed is not None:
            raise failed
        played += jobs


def _play_here(jobs: Sequence[Job], observer: Observer) -> Iterator[list[Run]]:
    """Play one run after the other; those of a seed share the records."""
    for _, of_seed in groupby(jobs, key=lambda job: job.seed):
        populations = PopulationCache()
        for job in of_seed:
            yield job.play(observer, populations)


def _play_in_workers(
    jobs: Sequence[Job], opened: AbstractContextManager[Workers]
) -> Iterator[list[Run] | FedveilError]:
    jobs = [replace(job, runs=job.runs.resolve()) for job in jobs]
    tasks = [task_of_checkout(Path(__file__).parents[1], Job.play, job) for job in jobs]
    for number, found in play_tasks(tasks, opened):
        if isinstance(found, FedveilError):
            cell = jobs[number].cell
            found = type(found)(f"{cell.name if cell else jobs[number].table.name}: {found}")
        yield found


def _missing(table: Table, results: ResultFolder, runs: Path, seeds: int | None) -> Iterator[Job]:
    """Yield the runs that the result file lacks, seed by seed."""
    kept = results.read(table.name)
    settings = table.computation()[1] if table.compute else ""
    known = list(dict.fromkeys(run.cell for run in kept.runs)) or [""]
    for seed in range(1 if table.exact else seeds or max(table.seeds, CHEAP_RUNS)):
        if table.compute:
            own = None if table.exact else seed
            there = any((run.seed, run.settings) == (own, settings) for run in kept.runs)
            if not there and any(seed < runs_wanted(table, kept, cell, seeds) for cell in known):
                yield Job(table=table, seed=own, cell=None, runs=runs)
            continue
        for cell in table.cells(seed):
            wanted = seed < runs_wanted(table, kept, cell.name, seeds)
            if wanted and not kept.has(cell.name, seed, cell.settings()):
                yield Job(table=table, seed=seed, cell=cell, runs=runs)


def _computed(table: Table, seed: int | None) -> Iterator[Run]:
    compute, settings = table.computation()
    before = time.process_time()
    for cell, values in compute(seed or 0):
        now = time.process_time()
        yield Run(
            cell=cell,
            seed=seed,
            settings=settings,
            version=__version__,
            cpu_seconds=rounded(now - before),
            values={name: rounded(value) for name, value in values.items()},
        )
        before = now


def _trained(job: Job, cell: Cell, observer: Observer, populations: PopulationCache) -> Run:
    table, settings = job.table, cell.settings()
    parent = job.runs / table.name / settings[:16]
    folder = parent / str(cell.document["name"])
    if cell.training_records and folder.exists():  # a run that goes on would be evaluated on test records
        shutil.rmtree(folder)
    interrupted = (folder / "experiment.toml").is_file()
    before = time.process_time()
    outcome = _play(cell, parent, observer, populations, interrupted=interrupted)
    spent = None if interrupted else rounded(time.process_time() - before)
    values, curves = _measured(table, outcome)
    if table.attack:
        values |= _attacked(outcome.folder)
    return Run(
        cell=cell.name,
        seed=job.seed,
        settings=settings,
        version=__version__,
        cpu_seconds=spent,
        values=values,
        curve=curves,
    )


def _play(
    cell: Cell, parent: Path, observer: Observer, populations: PopulationCache, *, interrupted: bool
) -> Outcome:
    if interrupted:
        return resume(parent / str(cell.document["name"]), observer)
    prepared = prepare(parse(cell.document, cell.name), populations)
    return run(_on_training_records(prepared) if cell.training_records else prepared, parent, observer)


def _on_training_records(prepared: Prepared) -> Prepared:
    """Put the training records in the place of the test records."""
    population = prepared.population
    train = population.train
    trained = replace(
        population,
        test_features=train.features,
        test_targets=train.targets,
        test_weights=None,
        test_rows=None,
    )
    return replace(prepared, population=trained)


def _attacked(folder: Path) -> Values:
    """Return how well the loss of the run's last model tells its training records from test records."""
    found = audit(folder, canaries=0).inference
    rates = {f"true positives at {rate:g}": rounded(share) for rate, share in found.true_positive_rates}
    return {"attack AUC": rounded(found.auc), **rates}


def _measured(table: Table, outcome: Outcome) -> tuple[Values, Curves]:
    """Return the values of a run, and its curves over all evaluated rounds where the table shows any."""
    rows = read_rows(outcome.folder / "metrics.jsonl")
    evaluated = [row for row in rows if row["test"] is not None]
    late = evaluated[-table.last :]
    values: Values = {}
    for name in outcome.row["test"]:
        found = [row["test"][name] for row in late]
        values[name] = None if None in found else rounded(sum(found) / len(found))
    values["rounds"] = float(outcome.rounds)
    values["epsilon"] = rounded(outcome.statement.epsilon)
    values["epsilon to the server"] = rounded(outcome.statement.line_for(Role.SERVER))
    for name, value in outcome.statement.epsilons:
        values[f"epsilon ({name})"] = rounded(value)
    sent = [row["bytes_up"] for row in rows[1:]]
    values["bytes_up"] = float(sum(sent)) if sent and None not in sent else None
    costs = [row["communication_cost"] for row in rows[1:] if row["communication_cost"]]
    if costs:
        bits = [cost["bits_per_parameter"] for cost in costs]
        values["bits a parameter"] = rounded(sum(bits) / len(bits))
    if not table.rounds:
        return values, {}
    curves = {
        name: tuple((row["round"], rounded(row["test"][name])) for row in evaluated)
        for name in dict.fromkeys((*table.curved, *table.figures))
    }
    return values, curves
