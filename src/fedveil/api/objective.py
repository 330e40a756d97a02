"""Objective of a training run from Python: a model, a loss and metrics, as objects or by name.

An object that can be imported again is recorded by its import path, ``package.module:name``. Any other object is
recorded as ``session:name``, with the digest of a model, and of the attributes of a loss. Only the names of code are
recorded, not its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fedveil.data.records import Population
from fedveil.errors import ConfigError, FedveilError, ModelError, did_you_mean, show_argument
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.in_memory_method import SESSION
from fedveil.run.config.task_choice import defaults_of
from fedveil.training.copying import copy_module, unwrap
from fedveil.training.losses import LOSSES, ClassWeighted, Loss, Metric, RecordLoss, load_loss
from fedveil.training.metrics import check_metric, load_metrics
from fedveil.training.models import STARTS, build_model
from fedveil.training.state_leak_check import fingerprint, snapshot, tensor_bytes
from fedveil.training.task import Task
from fedveil.training.validation import validate_behaviour, validate_layers, validate_loss
from fedveil.user_code import import_object

LossLike: TypeAlias = str | Loss | nn.Module | Callable[[Tensor, Tensor], Tensor]
MetricLike: TypeAlias = str | Metric


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """A model, its loss and its metrics, with their record for the run folder.

    Attributes:
        module: the initial model: a copy of the object that was passed, or built from its name.
        loss: the loss that training minimises.
        metrics: metrics by their name in reports.
        section: the table ``[model]`` of the experiment.
    """

    module: nn.Module
    loss: Loss
    metrics: Mapping[str, Metric]
    section: Mapping[str, Any]

    @property
    def task(self) -> Task:
        """The model, loss and metrics in the form that trainers take."""
        return Task(model=self.module, loss=self.loss, metrics=self.metrics)


class Beginning(NamedTuple):
    """Changes of a model and a loss before training.

    Attributes:
        start: a word of ``model.start``; None changes nothing.
        class_weights: declared weights of the classes in the loss; None: all 1.
    """

    start: str | None = None
    class_weights: tuple[float, ...] | None = None


UNCHANGED: Final = Beginning()


def objective(
    model: nn.Module | str,
    people: Population,
    seed: int,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] | None = None,
    beginning: Beginning = UNCHANGED,
) -> Objective:
    """Check a model, a loss and metrics against a population; the model sees synthetic records only.

    Args:
        model: a module, or the name or import path of one.
        people: the population; its targets are checked against the loss.
        seed: seed of the initial values of a model given by name.
        loss: a loss or its name; None takes the default of the task and the number of outputs.
        metrics: metrics or their names; None takes the defaults of the task.
        beginning: how the initial values and the loss are changed.

    Raises:
        ModelError: the model mixes records, has no trainable parameter, fails on records of this shape, or has the
            wrong number of outputs for the targets; the loss keeps state, draws random numbers, or has a term that
            depends on other records although it claims not to.
        ConfigError: a name does not exist; an object is no model, loss or metric.
    """
    # One logit for two classes, as an experiment's document gives it; other losses take an output per class.
    single_logit = (
        isinstance(loss, str) and loss == "binary_cross_entropy" and people.task == "classification"
    )
    n_outputs = 1 if single_logit else people.n_outputs
    module, recorded = _module(model, people, n_outputs, seed, beginning.start)
    outputs = _outputs(module, people)
    resolved_loss = _loss(loss, people, outputs)
    if beginning.class_weights is not None:
        resolved_loss = ClassWeighted(resolved_loss, beginning.class_weights, people.n_classes)
        recorded["class_weights"] = list(beginning.class_weights)
    resolved_loss.check_task(people.task)
    validate_loss(resolved_loss, people.task, outputs, torch.from_numpy(people.train.targets))
    resolved_loss.check_targets(torch.from_numpy(people.train.targets), outputs)
    resolved_loss.check_targets(torch.from_numpy(people.test_targets), outputs)
    named = _metrics(metrics, people, resolved_loss)
    section = {
        **recorded,
        "loss": resolved_loss.name,
        "loss_sha256": _loss_digest(resolved_loss),
        "metrics": list(named),
    }
    metrics_by_name = {name: metric for metrics in named.values() for name, metric in metrics.items()}
    return Objective(module=module, loss=resolved_loss, metrics=metrics_by_name, section=section)


def model_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model: layers in order, settings, parameters and buffers.

    Two models have the same digest if they have the same architecture and the same initial values. Settings are the
    ``extra_repr`` of a layer and its attributes: numbers, texts and containers of them by value, other objects by
    name. Not claimed: equality of code, which the digest does not cover.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"layer {name} {type(module).__name__}({module.extra_repr()})\n".encode())
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, value in named:
            trained = bool(getattr(value, "requires_grad", False))
            digest.update(f"{kind} {name} {value.dtype} {tuple(value.shape)} {trained}\n".encode())
            digest.update(tensor_bytes(value))
    for name, setting in sorted(fingerprint(model, _called).items()):
        digest.update(f"setting {name} {setting}\n".encode())
    return digest.hexdigest()


def _called(value: Any) -> str:
    """Return the name of a function or class, or the class name of another object; stable over processes."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _loss_digest(loss: Loss) -> str | None:
    """Return the SHA-256 of a loss's attributes, None without attributes; its code enters by names only."""
    return hashlib.sha256(repr(snapshot(loss, _called)).encode()).hexdigest() if vars(loss) else None


def recorded_name(obj: Any, argument: str) -> str:
    """Return an object's import path, or ``session:name`` if the path does not import the same object."""
    name = getattr(obj, "__name__", None) or type(obj).__name__
    path = f"{getattr(obj, '__module__', '')}:{name}"
    try:
        imported = import_object(path, argument)
    except (FedveilError, ValueError):
        imported = None
    return path if imported is obj and not path.startswith("__main__") else f"{SESSION}{name}"


def _module(
    model: nn.Module | str, people: Population, n_outputs: int, seed: int, start: str | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy of the model, and its name and digest for ``[model]``.

    Raises:
        ConfigError: the argument is neither a module nor a known name.
        ModelError: the model has no trainable parameter, or does not compute records independently.
    """
    shape = people.feature_shape
    if start is not None and (not isinstance(start, str) or start not in STARTS):
        raise ConfigError(
            f"start: must be one of {', '.join(STARTS)}, not {show_argument(start)}"
            f"{did_you_mean(start, STARTS) if isinstance(start, str) else ''}"
        )
    if isinstance(model, str):
        built = build_model(
            model, input_shape=shape, n_outputs=n_outputs, randomness=ExperimentRandomness(seed)
        )
        STARTS[start or "seed"](built)
        return built, {"name": model, "start": start or "seed"}
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ConfigError(
            f"model: {model.__name__} is a class; hand over a model of it: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: a torch.nn.Module or a name is needed, not {type(model).__name__}; names are listed in "
            "docs/reference/experiment.md"
        )
    model = unwrap(model)
    validate_layers(model)
    _check_trainable(model)
    module_copy = copy_module(model).cpu()
    STARTS[start or "seed"](module_copy)
    # The check runs on synthetic records: its error message must not depend on private ones. The fork leaves the
    # caller's random state unchanged.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made_up = torch.randn(4, *shape)
    validate_behaviour(module_copy, made_up)
    name = f"{SESSION}{type(model).__name__}"
    return module_copy, {"name": name, "sha256": model_digest(module_copy), "start": start or "seed"}


def _check_trainable(model: nn.Module) -> None:
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise ModelError(
            "the model has no trainable parameter: all are frozen; call requires_grad_(True) on what shall be trained"
        )


def _outputs(module: nn.Module, people: Population) -> int:
    """Return the number of outputs per record, after a check against the number of classes.

    Raises:
        ModelError: the outputs are not (records, outputs), or their number does not fit the classes.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made_up = module(torch.zeros(3, *people.feature_shape))
    if made_up.ndim != 2:
        raise ModelError(
            f"the model must return (records, outputs), but gives {tuple(made_up.shape[1:])} a record; flatten them, "
            "or unsqueeze a single output"
        )
    outputs = int(made_up.shape[1])
    classes = people.n_classes
    if classes is not None and outputs not in ((1, 2) if classes == 2 else (classes,)):
        raise ModelError(
            f"the model gives {outputs} outputs a record, but there are {classes} classes; its last layer must give "
            f"{'1 (a logit) or 2' if classes == 2 else classes}"
        )
    targets = len(people.target_names)
    if targets and outputs != targets:
        raise ModelError(
            f"the model gives {outputs} outputs a record, but there are {targets} targets; its last layer must give "
            f"{targets}, one for each"
        )
    return outputs


def _loss(loss_argument: LossLike | None, people: Population, outputs: int) -> Loss:
    if loss_argument is None:
        if people.task == "classification":
            return LOSSES["binary_cross_entropy" if outputs == 1 else "cross_entropy"]
        return load_loss(defaults_of(None, people).loss)
    if isinstance(loss_argument, str):
        return load_loss(loss_argument)
    if isinstance(loss_argument, Loss):
        return loss_argument
    if isinstance(loss_argument, type) or not callable(loss_argument):
        description = (
            f"{loss_argument.__name__} is a class; hand over {loss_argument.__name__}()"
            if isinstance(loss_argument, type)
            else f"not {type(loss_argument).__name__}"
        )
        raise ConfigError(
            f"loss: a name or a function (outputs, targets) -> one term a record is needed: {description}"
        )
    if isinstance(loss_argument, nn.Module):
        loss_argument = copy_module(loss_argument, "loss")
        reduction = getattr(loss_argument, "reduction", "none")
        if reduction not in ("none", "mean"):
            raise ConfigError(
                f"loss: {type(loss_argument).__name__} has reduction = {reduction!r}, and training takes the mean "
                "over the records of a batch; set reduction='mean', and scale the learning rate instead"
            )
        # Methods need one term per record: a mean over the batch would hide the record's own gradient.
        if reduction == "mean":
            loss_argument.reduction = "none"  # type: ignore[assignment]
        return RecordLoss(f"{SESSION}{type(loss_argument).__name__}", loss_argument)
    return RecordLoss(recorded_name(loss_argument, "loss"), loss_argument)


def _metrics(
    metric_arguments: Sequence[MetricLike] | None, people: Population, loss: Loss
) -> dict[str, dict[str, Metric]]:
    """Return by each name that was given the metrics for which it stands."""
    if metric_arguments is None:
        metric_arguments = defaults_of(None, people).metrics
    if isinstance(metric_arguments, str) or not isinstance(metric_arguments, Sequence):
        raise ConfigError("metrics: a list of names or functions is needed")
    metrics_by_name: dict[str, dict[str, Metric]] = {}
    for argument in metric_arguments:
        if isinstance(argument, str):
            name, metrics = argument, load_metrics(argument, loss, people.task, people.target_names)
        elif callable(argument) and not isinstance(argument, type):
            name = recorded_name(argument, "metric")
            metrics = {name: check_metric(name, argument)}
        else:
            raise ConfigError(
                f"metrics: a name or a function (outputs, targets, weights) -> number is needed, not "
                f"{type(argument).__name__}"
            )
        if name in metrics_by_name:
            raise ConfigError(
                f"metrics: two are called {name}; a report distinguishes them by name, so give each its own"
            )
        metrics_by_name[name] = metrics
    return metrics_by_name
