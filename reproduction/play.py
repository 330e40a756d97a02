"""Playing a table: the runs that its result file does not have yet, one after the other, each kept when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from fedveil import __version__
from fedveil.privacy.claims import Role
from fedveil.run.audit import audit
from fedveil.run.config.experiment import parse
from fedveil.run.folder.documents import read_rows
from fedveil.run.observer import Observer
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import resume, run
from reproduction.results import Curves, ResultFolder, Run, Values, rounded
from reproduction.run_counts import CHEAP_RUNS, runs_wanted
from reproduction.table import Cell, Table


def reproduce(
    table: Table, results: ResultFolder, runs: Path, observer: Observer, *, seeds: int | None = None
) -> Iterator[Run]:
    """Play what is missing; yield every run when it is in the result file.

    All cells get their first run before any gets its second, so that an interrupted table is even. A cell whose runs
    turn out to take less than two CPU minutes gets at least five. What was interrupted goes on: a run folder from its
    last complete round, the table from its last run.

    Args:
        table: what to play.
        results: where its result file is.
        runs: where run folders are made.
        observer: who is told how a run goes on.
        seeds: runs a cell; None: as many as the table asks for, and five where they are cheap.

    Raises:
        FedveilError: what a run refuses, or a result file that was edited.
    """
    for seed in range(1 if table.exact else seeds or max(table.seeds, CHEAP_RUNS)):
        if table.compute:
            yield from _computed(table, results, None if table.exact else seed, seeds)
        else:
            yield from _trained(table, results, runs, observer, seed, seeds)


def _computed(table: Table, results: ResultFolder, seed: int | None, seeds: int | None) -> Iterator[Run]:
    compute, settings = table.computation()
    kept = results.read(table.name)
    if any((run.seed, run.settings) == (seed, settings) for run in kept.runs):
        return
    known = dict.fromkeys(run.cell for run in kept.runs)
    if known and not any((seed or 0) < runs_wanted(table, kept, cell, seeds) for cell in known):
        return
    found, before = [], time.process_time()
    for cell, values in compute(seed or 0):
        now = time.process_time()
        found.append(
            Run(
                cell=cell,
                seed=seed,
                settings=settings,
                version=__version__,
                cpu_seconds=rounded(now - before),
                values={name: rounded(value) for name, value in values.items()},
            )
        )
        before = now
    results.write(kept.adding(found))
    yield from found


def _trained(
    table: Table, results: ResultFolder, runs: Path, observer: Observer, seed: int, seeds: int | None
) -> Iterator[Run]:
    kept = results.read(table.name)
    missing = [
        cell
        for cell in table.cells(seed)
        if seed < runs_wanted(table, kept, cell.name, seeds)
        and not kept.has(cell.name, seed, cell.settings())
    ]
    for cell in missing:
        cell.check()
    populations = PopulationCache()
    for cell in missing:
        settings = cell.settings()
        parent = runs / table.name / settings[:16]
        interrupted = (parent / str(cell.document["name"]) / "experiment.toml").is_file()
        before = time.process_time()
        outcome = _play(cell, parent, observer, populations, interrupted=interrupted)
        spent = None if interrupted else rounded(time.process_time() - before)
        values, curves = _measured(table, outcome)
        if table.attack:
            values |= _attacked(outcome.folder)
        found = Run(
            cell=cell.name,
            seed=seed,
            settings=settings,
            version=__version__,
            cpu_seconds=spent,
            values=values,
            curve=curves,
        )
        results.write(results.read(table.name).adding([found]))
        yield found


def _play(
    cell: Cell, parent: Path, observer: Observer, populations: PopulationCache, *, interrupted: bool
) -> Outcome:
    if interrupted:
        return resume(parent / str(cell.document["name"]), observer)
    return run(prepare(parse(cell.document, cell.name), populations), parent, observer)


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
