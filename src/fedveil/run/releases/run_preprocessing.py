"""Run the preprocessing of a run: charge, make and store each release, then prepare the run again."""

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
    """Return the run on its refined schema and clip, after making the releases that are missing.

    A release that was charged but not stored is charged again, unless its noise is from a seed. The budget must
    allow this charge in addition to one round and everything that is still due.

    Raises:
        ConfigError: another run refined the declared schema.
        BudgetError: a second charge would exceed the budget.
        RunFolderError: training began on an earlier release whose file is lost.
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
            # Charge before the release; all checks that can refuse come before the charge.
            charge_releases(ledger, asked.name, [due], repeats=not prepared.secure)
            table, privacy = _records(prepared, planned, len(made)), asked.privacy.randomness()
            made = (*made, noisy_sum(planned.release(made), table, privacy))
            write_preprocessed(folder, planned.combine_releases(asked, made))
            prepared = prepare(folder.with_refined_schema(asked))
    return prepared


def _check_budget(prepared: Prepared, folder: RunFolder, ledger: Ledger, due: Release) -> None:
    """Check that the budget allows a release, everything due after it, and one more round.

    Raises:
        BudgetError: it does not.
    """
    repeatable = not prepared.secure
    needed = release_over_budget(prepared, folder, ledger, repeatable=repeatable, round_repeatable=repeatable)
    if needed is not None:
        raise BudgetError(
            f"{due.name}, what is due after it and one more round would bring epsilon to {show_epsilon(needed)}, above "
            f"the budget of {prepared.experiment.privacy.budget:g}"
        )


def _check_untrained(prepared: Prepared, folder: RunFolder) -> None:
    """Check that no training began on a release that is about to be made again with fresh noise.

    The file that names the records is written after the preprocessing is complete. Another release would give
    another schema or clip, which that file does not fit, and the run would be refused after the charge. Noise from
    a seed gives the same schema again.

    Raises:
        RunFolderError: training began.
    """
    if prepared.secure and (folder / RECORDS).exists():
        raise RunFolderError(
            f"{folder.path}: {PREPROCESSED} is lost, and training has begun on what it gave; put it back, or begin "
            "another run: a release that is made again has other noise. Nothing was charged"
        )


def _records(prepared: Prepared, planned: Preprocessing, made: int) -> ColumnTable:
    """Return the training records in the columns of the release after ``made`` others.

    Held-out records are left out.
    """
    population, table = prepared.population, prepared.experiment.data.table
    if planned.releases[made].of_model:
        return lengths_of_updates(prepared, prepared.task.initial())
    assert table is not None, "Experiment asks for it"
    found = read_columns(planned.wanted.schema_, table.files, planned.releases[made].step.columns)
    if population.test_rows is None:
        return found
    return found.take(np.setdiff1d(np.arange(len(found)), population.test_rows))


def training_rows(population: Population) -> ColumnTable:
    """Return the silo and user of every training record, without columns."""
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
    """Return the training records with the length of the update of each record's (silo, user) pair.

    The update is that of a first round: a function of the pair's records, the model and public facts only. A pair
    with weight 0 is not trained and has no length.

    Args:
        prepared: the experiment that runs.
        model: (d,) float32 model from which the updates start.
        progress: called between chunks of local training.
    """
    experiment, setting = prepared.experiment, prepared.setting
    turn = prepared.round_context(1, model, {}, experiment.privacy.randomness(), progress=progress)
    groups, table = setting.cohort.groups, training_rows(prepared.population)
    members = torch.from_numpy(np.flatnonzero(setting.weights.cpu().numpy() > 0))
    norms, values = np.zeros(len(groups)), np.zeros(len(table))
    job = turn.job(members, setting.method.local_bound)
    norms[members.numpy()] = turn.trainer.sums(job, progress).norms.cpu().numpy()
    # `groups.order` lists the records by contribution: every record gets the length of its pair's update.
    values[groups.order] = np.repeat(norms, groups.size)
    # Updates that are not finite count as zero in training; here they count as a missing length.
    counted = np.isfinite(values) & (values > 0)
    state = np.where(counted, State.VALID, State.MISSING).astype(np.int8)
    return replace(table, columns={LENGTH: Numbers(values=np.where(counted, values, 0.0), state=state)})
