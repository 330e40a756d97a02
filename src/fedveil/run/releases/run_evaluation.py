"""Compute the test metrics of a run: one release of its last model, or exact values in a simulation."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import show_epsilon
from fedveil.run.folder.run_folder import Checkpoint, RunFolder, finite
from fedveil.run.releases.evaluation import attach_scores, make_evaluation, outputs_of
from fedveil.run.releases.side_releases import charge_releases
from fedveil.run.run_budget import release_over_budget
from fedveil.run.setup import Prepared
from fedveil.statistics.evaluation.result import FILE, read_evaluated


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
    raw = torch.from_numpy(population.scale.apply(np.asarray(population.test_features)))
    outputs = prepared.task.predict(model.to(prepared.setting.cohort.device), raw).cpu()
    targets = torch.from_numpy(population.test_targets)
    weights = None if population.test_weights is None else torch.from_numpy(population.test_weights)
    return {name: finite(metric(outputs, targets, weights)) for name, metric in prepared.task.metrics.items()}


def evaluated_already(folder: RunFolder) -> str | None:
    """Return the reason why a run may not train on; None if its model is not evaluated yet.

    Raises:
        RunFolderError: a damaged evaluation.
    """
    found = read_evaluated(folder.path)
    if found is None:
        return None
    return f"the model after round {found.round} was evaluated; another evaluation would need another budget"


def release_evaluation(
    prepared: Prepared, folder: RunFolder, checkpoint: Checkpoint, ledger: Ledger
) -> str | None:
    """Charge, make and store the evaluation of the last model, if it is requested and not stored yet.

    A run that was killed between charge and file charges the evaluation again. A charge that would exceed the
    budget is never made, neither again nor for the first time: earlier repeated charges may have used its part of
    the budget.

    Returns:
        The reason why no evaluation is made; None if it is made or not requested.
    """
    evaluation, experiment = prepared.evaluation, prepared.experiment
    if evaluation is None or read_evaluated(folder.path) is not None:
        return None
    repeatable = not prepared.secure
    needed = release_over_budget(prepared, folder, ledger, repeatable=repeatable, round_repeatable=None)
    if needed is not None:
        return (
            f"the evaluation would bring epsilon to {show_epsilon(needed)}, above the budget of "
            f"{experiment.privacy.budget:g}"
        )
    # Both releases are charged before the first is made, so that a crash leaves no uncharged release.
    charge_releases(ledger, experiment.name, evaluation.releases, repeats=not prepared.secure)
    model = prepared.method.model_of(checkpoint.model, checkpoint.state)
    outputs = outputs_of(prepared.task, prepared.population, model)
    table = attach_scores(evaluation.asked, experiment, prepared.population, outputs)
    privacy = experiment.privacy.randomness()
    found = make_evaluation(evaluation, experiment, checkpoint.round, table, privacy)
    folder.write_json(FILE, found.to_json())
    return None
