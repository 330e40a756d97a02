"""What always giving the same answer would reach: a result that is no better has learned nothing."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.engine.run_folder.folder import finite
from fedveil.engine.setup import Prepared


def baseline(prepared: Prepared) -> dict[str, float | None]:
    """Return every metric of the best constant answer to the test records, None where it is not defined.

    The answer is made of the test targets themselves: the shares of the classes, so that the most frequent one is
    predicted; the mean of numbers; no difference between people for survival. It is of the same kind as the metrics of
    the model, and as little covered by a guarantee: nothing at all where test metrics are released under one.
    """
    if prepared.evaluation is not None:
        return {}
    population, metrics = prepared.population, prepared.task.metrics
    if not len(population.test_targets):
        return dict.fromkeys(metrics)
    given = population.test_weights
    weights = None if given is None else torch.from_numpy(given)
    targets = torch.from_numpy(population.test_targets)
    outputs = _constant(prepared).expand(len(targets), -1)
    return {name: finite(metric(outputs, targets, weights)) for name, metric in metrics.items()}


def _constant(prepared: Prepared) -> Float[Tensor, "1 k"]:
    """Return the outputs that a record gets, whoever it is."""
    population = prepared.population
    one = torch.zeros(1, *population.feature_shape)
    width = prepared.task.predict(prepared.task.initial().cpu(), one).shape[1]
    weights = (
        np.ones(len(population.test_targets)) if population.test_weights is None else population.test_weights
    )
    if population.task == "survival":
        return torch.zeros(1, width)
    if population.n_classes is None:
        return torch.full((1, width), float(np.average(population.test_targets, weights=weights)))
    counts = np.bincount(population.test_targets, weights=weights, minlength=population.n_classes)
    logits = torch.from_numpy(np.log(np.maximum(counts / counts.sum(), 1e-9))).float()
    return logits[None] if width > 1 else (logits[1:] - logits[:1])[None]
