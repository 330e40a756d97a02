"""The preprocessing of a run: each release charged, made, written down, and the run prepared again on what it gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.data.columns import ColumnTable, Numbers, State, read_columns
from fedveil.data.records import Population
from fedveil.errors import BudgetError, RunFolderError
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import show_epsilon
from fedveil.run.folder.diagnostics import RECORDS
from fedveil.run.folder.run_folder import PREPROCESSED, RunFolder
from fedveil.run.releases.preprocessing import (
    Preprocessing,
    check_declared,
    read_preprocessed,
    settle_schema,
    write_preprocessed,
)
from fedveil.run.releases.release import Release, noisy_sum
from fedveil.run.releases.side_releases import charge_releases
from fedveil.run.run_budget import release_over_budget
from fedveil.run.setup import Prepared, prepare
from fedveil.statistics.preprocessing import LENGTH
from fedveil.statistics.stored import NoisySums
from fedveil.training.trainer import Progress


def run_preprocessing(prepared: Prepared, folder: RunFolder) -> Prepared:
    """Return a run on what its preprocessing gives, which is released first where an experiment asks for it.

    What is charged and not written yet is charged again, unless its noise is from a seed, and where the budget has room
    for that beside one round and everything that is still due.

    Raises:
        ConfigError: the declared schema is one that another run has refined.
        BudgetError: charging it again would exceed the budget.
        RunFolderError: training has begun on what an earlier release gave, whose file is lost.
    """
    planned, asked, guarantee = prepared.preprocessing, prepared.experiment, prepared.guarantee
    if planned is None:
        return prepared
    check_declared(asked, folder)
    if settle_schema(folder):
        prepared = prepare(folder.with_refined_schema(asked))
    with Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency) as ledger:
        found = read_preprocessed(folder.path)
        made: NoisySums = () if found is None else found.made
        while len(made) < len(planned.releases):
            due = planned.releases[len(made)]
            _check_budget(prepared, folder, ledger, due)
            _check_untrained(prepared, folder)
            charge_releases(ledger, asked.name, [due], repeats=not prepared.secure)
            table, privacy = _records(prepared, planned, len(made)), asked.privacy.randomness()
            made = (*made, noisy_sum(planned.release(made), table, privacy))
            write_preprocessed(folder, planned.combine_releases(asked, made))
            prepared = prepare(folder.with_refined_schema(asked))
    return prepared


def _check_budget(prepared: Prepared, folder: RunFolder, ledger: Ledger, due: Release) -> None:
    repeatable = not prepared.secure
    needed = release_over_budget(prepared, folder, ledger, repeatable=repeatable, round_repeatable=repeatable)
    if needed is not None:
        raise BudgetError(
            f"{due.name}, what is due after it and one more round would bring epsilon to {show_epsilon(needed)}, above "
            f"the budget of {prepared.experiment.privacy.budget:g}"
        )


def _check_untrained(prepared: Prepared, folder: RunFolder) -> None:
    """Refuse to release again what training has begun on: fresh noise gives another schema or clip.

    The file that names the records is written once the preprocessing is whole. It would not fit the new schema, and the
    run would be refused after the charge. Noise from a seed gives the same schema again.
    """
    if prepared.secure and (folder / RECORDS).exists():
        raise RunFolderError(
            f"{folder.path}: {PREPROCESSED} is lost, and training has begun on what it gave; put it back, or begin "
            "another run: a release that is made again has other noise. Nothing was charged"
        )


def _records(prepared: Prepared, planned: Preprocessing, made: int) -> ColumnTable:
    """Return the records that are trained on, as the release after so many reads them; held-out ones have no part."""
    population, table = prepared.population, prepared.experiment.data.table
    if planned.releases[made].of_model:
        return lengths_of_updates(prepared, prepared.task.initial())
    assert table is not None, "Experiment asks for it"
    found = read_columns(planned.wanted.schema_, table.files, planned.releases[made].step.columns)
    if population.test_rows is None:
        return found
    return found.take(np.setdiff1d(np.arange(len(found)), population.test_rows))


def training_rows(population: Population) -> ColumnTable:
    """Return whose the records are that are trained on, without a column."""
    records = population.train
    return ColumnTable(
        columns={},
        silo=records.silo,
        user=records.user,
        n_users=population.n_users,
        silo_names=population.silo_names,
    )


def lengths_of_updates(
    prepared: Prepared, model: Float32[Tensor, " d"], progress: Progress | None = None
) -> ColumnTable:
    """Return the records that are trained on with the length of the update of each one's (silo, user) pair.

    The update is that of a first round: a function of the pair's records, of the model and of public things alone. A
    pair without weight is not trained, and has no length.

    Args:
        prepared: what runs.
        model: that the updates begin with.
        progress: called between chunks of local training.
    """
    experiment, setting = prepared.experiment, prepared.setting
    turn = prepared.round_context(1, model, {}, experiment.privacy.randomness(), progress=progress)
    groups, table = setting.cohort.groups, training_rows(prepared.population)
    members = torch.from_numpy(np.flatnonzero(setting.weights.cpu().numpy() > 0))
    norms, values = np.zeros(len(groups)), np.zeros(len(table))
    job = turn.job(members, setting.method.local_bound)
    norms[members.numpy()] = turn.trainer.sums(job, progress).norms.cpu().numpy()
    values[groups.order] = np.repeat(norms, groups.size)
    counted = np.isfinite(values) & (values > 0)
    state = np.where(counted, State.VALID, State.MISSING).astype(np.int8)
    return replace(table, columns={LENGTH: Numbers(values=np.where(counted, values, 0.0), state=state)})
