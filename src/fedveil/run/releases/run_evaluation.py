"""Score a model on test records: exact metrics in a simulation, or held-out records for a release."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.data.columns import ColumnTable
from fedveil.run.folder.run_folder import finite
from fedveil.run.releases.evaluation import attach_scores, outputs_of
from fedveil.run.setup import Prepared
from fedveil.training.shapes import single_threaded

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
        return {
            name: finite(metric(outputs, targets, weights)) for name, metric in prepared.task.metrics.items()
        }


def outputs_on_test(prepared: Prepared, model: Float32[Tensor, " d"]) -> Float32[Tensor, "n k"]:
    """Return the (n, k) outputs of a model for the test records.

    Args:
        prepared: the experiment that runs.
        model: (d,) float32 parameters.
    """
    population = prepared.population
    raw = torch.from_numpy(population.scale.apply(np.asarray(population.test_features)))
    return prepared.task.predict(model.to(prepared.setting.cohort.device), raw).cpu()


def score_held_out(prepared: Prepared, model: Float32[Tensor, " d"]) -> ColumnTable:
    """Return the held-out records of all silos with the outputs of a model and the targets.

    Args:
        prepared: the experiment that runs, with an evaluation.
        model: (d,) float32 parameters.
    """
    assert prepared.evaluation is not None
    outputs = outputs_of(prepared.task, prepared.population, model)
    return attach_scores(prepared.evaluation.asked, prepared.experiment, prepared.population, outputs)
