"""Write and check a simulation's diagnostics of its records: distribution, hash and constant baseline.

The baseline is the result of the best constant prediction. A model that is not better has learned nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.errors import RunFolderError
from fedveil.files import parse_json, read_content
from fedveil.run.folder.documents import Diagnostics, read_document
from fedveil.run.folder.run_folder import Row, RunFolder
from fedveil.run.setup import Prepared
from fedveil.training.metrics import measure

RECORDS = "diagnostics.json"


def population_diagnostics(prepared: Prepared) -> Row:
    """Return the content of ``diagnostics.json``, computed from private records; no guarantee covers it."""
    per_user = prepared.population.records_per_user()
    return {
        "records_per_user": {
            "quantiles": np.quantile(per_user, np.linspace(0, 1, 11)).tolist(),
            "users_with_records": int((per_user > 0).sum()),
            "users": prepared.population.n_users,
        },
        "records_per_silo": prepared.population.records_per_silo().tolist(),
        "silo_names": list(prepared.population.silo_names),
        "baseline": baseline(prepared),
        "records_sha256": prepared.population.train.sha256,
    }


def require_same_records(folder: RunFolder, prepared: Prepared) -> None:
    """Check that the training records are those that a run was trained on.

    Raises:
        RunFolderError: the folder does not name its records (in a federation the records were never in one place),
            or the records differ: a table has changed, or the data set is another version.
    """
    path = folder / RECORDS
    try:
        recorded = parse_json(read_content(path, RunFolderError), path, RunFolderError).get("records_sha256")
    except (RunFolderError, AttributeError):
        recorded = None
    if recorded is None:
        raise RunFolderError(
            f"{folder.path}: which records were trained on is unknown: {RECORDS} does not name them (a run between "
            "institutions has none); only a simulation's folder, complete, can be audited or resumed"
        )
    if recorded != prepared.population.train.sha256:
        raise RunFolderError(
            f"{folder.path}: the training records are not those that this run began with, so its members are unknown: "
            "restore the data that experiment.toml names"
        )


def baseline_of(folder: Path) -> dict[str, float | None]:
    """Return the metrics of the best constant prediction in a run; empty if its folder has none.

    Raises:
        RunFolderError: ``diagnostics.json`` is damaged.
    """
    path = folder / RECORDS
    if not path.exists():
        return {}
    constant: dict[str, float | None] = {**read_document(path, Diagnostics).baseline}
    return constant


def baseline(prepared: Prepared) -> dict[str, float | None]:
    """Return every metric of the best constant prediction on the test records; None if not defined.

    The prediction follows from the test targets: the fractions of the classes, so that the most frequent class is
    predicted; the mean of numbers; equal risk for all users in survival. Like the model's metrics it is not covered
    by a guarantee, so it is empty if test metrics are released under one.
    """
    if prepared.evaluation is not None:
        return {}
    population, metrics = prepared.population, prepared.task.metrics
    if not len(population.test_targets):
        return dict.fromkeys(metrics)
    test_weights = population.test_weights
    weights = None if test_weights is None else torch.from_numpy(test_weights)
    targets = torch.from_numpy(population.test_targets)
    outputs = _constant(prepared).expand(len(targets), -1)
    values = measure(metrics, outputs, targets, weights)
    # The R2 of a mean is 0 but for rounding.
    return {name: 0.0 if value is not None and abs(value) < 1e-9 else value for name, value in values.items()}


def _constant(prepared: Prepared) -> Float[Tensor, "1 k"]:
    """Return the (1, k) outputs that every record gets."""
    population = prepared.population
    record = torch.zeros(1, *population.feature_shape)
    width = prepared.task.predict(prepared.task.initial().cpu(), record).shape[1]
    weights = (
        np.ones(len(population.test_targets)) if population.test_weights is None else population.test_weights
    )
    if population.task == "survival":
        return torch.zeros(1, width)
    if population.n_classes is None:
        means = np.average(population.test_targets.astype(np.float64), axis=0, weights=weights).reshape(1, -1)
        if (
            population.task == "multi-label"
        ):  # log-odds of a label's fraction; 1e-9 stands for an absent label
            means = np.log(np.maximum(means, 1e-9) / np.maximum(1 - means, 1e-9))
        return torch.from_numpy(means).float().expand(1, width)
    counts = np.bincount(population.test_targets, weights=weights, minlength=population.n_classes)
    # Log-fractions as logits make a softmax return the fractions; 1e-9 stands for an absent class. One output of a
    # binary loss is the difference of the two logits.
    logits = torch.from_numpy(np.log(np.maximum(counts / counts.sum(), 1e-9))).float()
    return logits[None] if width > 1 else (logits[1:] - logits[:1])[None]
