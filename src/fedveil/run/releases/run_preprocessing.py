"""Read the records that the preprocessing of a run releases: columns, or the lengths of updates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.data.columns import ColumnTable, Numbers, State, read_columns
from fedveil.data.records import Population
from fedveil.data.tables import files_of
from fedveil.methods.method import training_bound
from fedveil.run.setup import Prepared
from fedveil.statistics.preprocessing import LENGTH
from fedveil.training.trainer import Progress


def training_records(prepared: Prepared, made: int) -> ColumnTable:
    """Return the training records in the columns of the release after ``made`` others.

    Held-out records are left out.
    """
    population, table, planned = prepared.population, prepared.experiment.data.table, prepared.preprocessing
    assert planned is not None
    if planned.releases[made].of_model:
        return lengths_of_updates(prepared, prepared.task.initial())
    assert table is not None, "Experiment asks for it"
    files = files_of(population, table.files)
    found = read_columns(planned.wanted.schema_, files, planned.releases[made].step.columns)
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
    context = prepared.round_context(1, model, {}, experiment.privacy.randomness(), progress=progress)
    groups, table = setting.cohort.groups, training_rows(prepared.population)
    members = torch.from_numpy(np.flatnonzero(setting.weights.cpu().numpy() > 0))
    norms, values = np.zeros(len(groups)), np.zeros(len(table))
    job = context.job(members, training_bound(setting.method))
    norms[members.numpy()] = context.trainer.sums(job, progress).norms.cpu().numpy()
    # `groups.order` lists the records by contribution: every record gets the length of its pair's update.
    values[groups.order] = np.repeat(norms, groups.size)
    # Updates that are not finite count as zero in training; here they count as a missing length.
    counted = np.isfinite(values) & (values > 0)
    state = np.where(counted, State.VALID, State.MISSING).astype(np.int8)
    return replace(table, columns={LENGTH: Numbers(values=np.where(counted, values, 0.0), state=state)})
