"""Choose model, loss and metrics: those of the experiment, of the data set, or of the kind of target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from fedveil.data.catalogue import data_set
from fedveil.data.records import Population
from fedveil.errors import ConfigError
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import Experiment, refuse_session
from fedveil.training.losses import ClassWeighted, Metric, load_loss
from fedveil.training.metrics import load_metrics
from fedveil.training.models import STARTS, build_model
from fedveil.training.pretrained import PublicModel, take_parameters
from fedveil.training.task import Task
from fedveil.training.validation import validate_loss


class Defaults(NamedTuple):
    """Default model, loss and metrics."""

    model: str
    loss: str
    metrics: tuple[str, ...]


BY_TASK: Final[Mapping[str, Defaults]] = {
    "classification": Defaults("linear", "cross_entropy", ("accuracy", "loss")),
    "two classes": Defaults("linear", "binary_cross_entropy", ("auc", "accuracy", "loss")),
    "multi-label": Defaults(
        "linear", "multi_label_cross_entropy", ("auc", "average_precision", "accuracy", "loss")
    ),
    "multi-output": Defaults("linear", "squared_error", ("r2", "mae", "loss")),
    "regression": Defaults("linear", "squared_error", ("r2", "mae", "loss")),
    "survival": Defaults("linear", "cox", ("c_index", "loss")),
}
"""Model, loss and metrics if neither the experiment nor the data set names them."""


def defaults_of(source: str | None, population: Population) -> Defaults:
    """Return the default model, loss and metrics: those of the data set, or of the kind of target.

    Args:
        source: name of the data set; None for tables and for data passed in Python.
        population: the population of the run.
    """
    default = BY_TASK["two classes" if population.n_classes == 2 else population.task]
    if source is None:
        return default
    chosen = data_set(source)
    return Defaults(
        model=chosen.model or default.model,
        loss=chosen.loss or default.loss,
        metrics=chosen.metrics or default.metrics,
    )


def task_of(experiment: Experiment, population: Population, begin: PublicModel | None = None) -> Task:
    """Build the model that an experiment names, with its loss and its metrics.

    Args:
        experiment: names the model, loss and metrics.
        population: the population of the run.
        begin: public model with the initial parameters; None: as the experiment's ``start`` and ``seed`` define.

    Raises:
        FedveilError: a name that does not exist, or a loss that does not fit the targets.
    """
    asked = experiment.model
    for key, named in (
        ("name", asked.name),
        ("loss", asked.loss),
        *(("metrics", one) for one in asked.metrics or ()),
    ):
        refuse_session(f"model.{key}", named or "")
    default = defaults_of(experiment.data.name, population)
    loss = load_loss(asked.loss or default.loss)
    loss.check_task(population.task)
    outputs = 1 if loss.name == "binary_cross_entropy" else population.n_outputs
    validate_loss(loss, population.task, outputs, torch.from_numpy(population.train.targets))
    model = build_model(
        asked.name or default.model,
        input_shape=population.feature_shape,
        n_outputs=outputs,
        randomness=ExperimentRandomness(experiment.seed),
    )
    STARTS[asked.start](model)
    if begin is not None:
        take_parameters(model, begin, asked.initial_layers)
    if asked.class_weights is not None:
        loss = ClassWeighted(loss, asked.class_weights, population.n_classes)
    loss.check_targets(torch.from_numpy(population.train.targets), outputs)
    loss.check_targets(torch.from_numpy(population.test_targets), outputs)
    found = dict[str, Metric]()
    for name in asked.metrics or default.metrics:
        found |= load_metrics(name, loss, population.task, population.target_names)
    return Task(model=model, loss=loss, metrics=found)


def beginning(experiment: Experiment) -> tuple[Experiment, PublicModel | None]:
    """Return the experiment with the digest of its initial model, and the initial model itself.

    The path belongs to the user's machine. The digest identifies the file: silos receive, state and sign it, and a
    resumed run must match it. The file is read once, so that the hashed bytes are the trained ones.

    Returns:
        The experiment and the public model; None if the experiment names no initial model.

    Raises:
        ModelError: the file does not exist.
        ConfigError: the experiment names another digest.
    """
    path, said = experiment.model.initial, experiment.model.sha256
    if path is None:
        return experiment, None
    begin = PublicModel.read(path)
    found = begin.sha256
    if said not in (None, found):
        raise ConfigError(
            f"model.initial: {path} has the SHA-256 {found}, and model.sha256 is {said}: give the file that it is of, "
            "or remove model.sha256"
        )
    named = experiment.model.model_copy(update={"sha256": found})
    return experiment.model_copy(update={"model": named}), begin
