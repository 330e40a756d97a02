"""Records that the releases of a run read: for its preprocessing, its exact metrics, and its evaluation.

Preprocessing reads columns of the training records, or the lengths of updates. Test records score a model: exact
metrics in a simulation, or held-out records for a release.

On a public test table the released model is also described by confusion counts, ROC curve and calibration. They follow
from the released model and public records, so they cost no privacy. Records that were held out of private tables are
never described: nothing exact may be computed from them beside the metrics that a run names as not covered.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.data.column_files import GrowingColumn, folder_beside
from fedveil.data.columns import ColumnTable, Numbers, State, read_columns
from fedveil.data.records import Population
from fedveil.data.tables import files_of
from fedveil.methods.method import training_bound
from fedveil.run.folder.run_folder import Row
from fedveil.run.releases.evaluation import attach_scores, outputs_of
from fedveil.run.setup import Prepared
from fedveil.statistics.preprocessing import LENGTH
from fedveil.training.metrics import measure
from fedveil.training.shapes import single_threaded
from fedveil.training.trainer import Progress

# --- preprocessing ---


def training_records(prepared: Prepared, n_released: int) -> ColumnTable:
    """Return the training records in the columns of the release after ``n_released`` others.

    Held-out records are left out.
    """
    population, table, planned = prepared.population, prepared.experiment.data.table, prepared.preprocessing
    assert planned is not None
    if planned.releases[n_released].of_model:
        return lengths_of_updates(prepared, prepared.task.initial())
    assert table is not None, "Experiment asks for it"
    files = files_of(population, table.files)
    records = read_columns(planned.request.schema_, files, planned.releases[n_released].step.columns)
    if population.test_rows is None:
        return records
    return records.take(np.setdiff1d(np.arange(len(records)), population.test_rows))


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


# --- scores on test records ---

_BLOCK: Final = 1 << 16
"""Test records whose features are scaled at a time: whole batches of a prediction."""

_SMALL: Final = 2**27
"""Most parameters times test records of an evaluation with one thread: about 20 ms of a linear model or a network."""


def evaluate(prepared: Prepared, model: Float32[Tensor, " d"]) -> dict[str, float | None] | None:
    """Return every metric of the task on the test table; None if test metrics are released instead.

    A metric is None if it is not defined, for example without a test record. If test metrics are released with
    noise, exact ones next to them would not be covered by epsilon, so none are computed.

    Args:
        prepared: the experiment that runs.
        model: (d,) float32 parameters.
    """
    if prepared.evaluation is not None:
        return None
    population = prepared.population
    if not len(population.test_targets):
        return dict.fromkeys(prepared.task.metrics)
    # Threads of a small evaluation wait longer for each other than they compute, on a machine with other work.
    small = prepared.length * len(population.test_targets) <= _SMALL
    with single_threaded() if small else nullcontext():
        outputs = outputs_on_test(prepared, model)
        targets = torch.from_numpy(population.test_targets)
        weights = None if population.test_weights is None else torch.from_numpy(population.test_weights)
        return measure(prepared.task.metrics, outputs, targets, weights)


def outputs_on_test(prepared: Prepared, model: Float32[Tensor, " d"]) -> Float32[Tensor, "n k"]:
    """Return the (n, k) outputs of a model for the test records.

    Args:
        prepared: the experiment that runs.
        model: (d,) float32 parameters.
    """
    features, scale = prepared.population.test_features, prepared.population.scale
    vector = model.to(prepared.setting.cohort.device)
    with GrowingColumn(folder_beside(features)) as outputs:
        for begin in range(0, max(1, len(features)), _BLOCK):
            raw = torch.from_numpy(scale.apply(np.asarray(features[begin : begin + _BLOCK])))
            outputs.append(prepared.task.predict(vector, raw).cpu().numpy())
        return torch.from_numpy(outputs.array())


def score_held_out(prepared: Prepared, model: Float32[Tensor, " d"]) -> ColumnTable:
    """Return the held-out records of all silos with the outputs of a model and the targets.

    Args:
        prepared: the experiment that runs, with an evaluation.
        model: (d,) float32 parameters.
    """
    assert prepared.evaluation is not None
    outputs = outputs_of(prepared.task, prepared.population, model)
    return attach_scores(prepared.evaluation.request, prepared.experiment, prepared.population, outputs)


# --- a public test table ---

FILE: Final = "public_test.json"
_BINS: Final = 10
_MOST_CLASSES: Final = 20
_MOST_POINTS: Final = 200


def describe_public_test(prepared: Prepared, model: Float32[Tensor, " d"]) -> Row | None:
    """Return the content of ``public_test.json``; None unless the test table is public.

    Args:
        prepared: the experiment that ran.
        model: (d,) float32 parameters that the run released.
    """
    population = prepared.population
    if not population.public_test or prepared.evaluation is not None:
        return None
    row: Row = {"records": len(population.test_targets)}
    if population.task != "classification" or population.n_classes is None or not row["records"]:
        return row
    probabilities = class_probabilities(outputs_on_test(prepared, model))
    targets = np.asarray(population.test_targets, dtype=np.int64)
    weights = population.test_weights
    weight = np.ones(len(targets)) if weights is None else np.asarray(weights, dtype=np.float64)
    if not np.isfinite(probabilities).all():
        return row
    if population.n_classes <= _MOST_CLASSES:
        names = population.classes or tuple(range(population.n_classes))
        row["classes"] = [str(name) for name in names]
        row["confusion"] = confusion(probabilities, targets, weight).tolist()
    if population.n_classes == 2:
        row["roc"] = roc_points(probabilities[:, 1], targets, weight).tolist()
        row["calibration"] = calibration_bins(probabilities[:, 1], targets, weight)
    return row


def class_probabilities(outputs: Tensor) -> Float64[np.ndarray, "n classes"]:
    """Return the (n, k) probabilities of a classifier's outputs; one output is the logit of class 1."""
    logits = outputs.double()
    if logits.shape[1] == 1:
        positive = torch.sigmoid(logits)
        return np.asarray(torch.cat((1 - positive, positive), dim=1))
    return np.asarray(torch.softmax(logits, dim=1))


def confusion(
    probabilities: Float64[np.ndarray, "n k"],
    targets: Int64[np.ndarray, " n"],
    weight: Float64[np.ndarray, " n"],
) -> Float64[np.ndarray, "k k"]:
    """Return the weight of the records of each class (row) that are predicted as each class (column)."""
    counts = np.zeros((probabilities.shape[1],) * 2)
    np.add.at(counts, (targets, probabilities.argmax(axis=1)), weight)
    return counts


def roc_points(
    score: Float64[np.ndarray, " n"], targets: Int64[np.ndarray, " n"], weight: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, "m 2"]:
    """Return the ROC curve as (false, true) positive rates from (0, 0) to (1, 1); empty without both classes.

    Records of equal score are one step. A curve of many steps is thinned to 200 points.
    """
    order = np.argsort(-score, kind="stable")
    ends = np.append(np.nonzero(np.diff(score[order]))[0], len(score) - 1)
    positive = np.cumsum(weight[order] * (targets[order] == 1))[ends]
    negative = np.cumsum(weight[order] * (targets[order] == 0))[ends]
    if not positive[-1] or not negative[-1]:
        return np.empty((0, 2))
    points = np.column_stack((negative / negative[-1], positive / positive[-1]))
    points = np.concatenate((np.zeros((1, 2)), points))
    if len(points) > _MOST_POINTS:
        points = points[np.unique(np.linspace(0, len(points) - 1, _MOST_POINTS).round().astype(int))]
    return points


def calibration_bins(
    score: Float64[np.ndarray, " n"], targets: Int64[np.ndarray, " n"], weight: Float64[np.ndarray, " n"]
) -> list[dict[str, Any]]:
    """Return mean probability, observed fraction and weight of class 1 in the bins of equal width that have records."""
    bins = np.minimum((score * _BINS).astype(int), _BINS - 1)
    total = np.bincount(bins, weights=weight, minlength=_BINS)
    predicted = np.bincount(bins, weights=weight * score, minlength=_BINS)
    observed = np.bincount(bins, weights=weight * (targets == 1), minlength=_BINS)
    return [
        {
            "predicted": predicted[index] / total[index],
            "observed": observed[index] / total[index],
            "weight": total[index],
        }
        for index in np.nonzero(total)[0]
    ]
