"""Trials of this machine's kernels, once each in a session: ``prepare`` tries the same models again and again.

A trial (:mod:`fedveil.training.batch_independence`) trains made-up records, so its answer follows from the model, its
loss, the local steps and the shapes of a record. Models of layers that are not torch's or ours, and trials while a
test listens in or interferes with kernels, are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fedveil.run.config import task_choice
from fedveil.training import trainer_choice
from fedveil.training.losses import Loss
from fedveil.training.task import Task


def remember_trials() -> None:
    """Let the choice of a trainer try each case once, and each built-in loss be tried once."""
    for name in (
        "is_training_batch_independent",
        "is_gradient_batch_independent",
        "batches_like_loop",
        "validate_gradient",
    ):
        setattr(trainer_choice, name, _remembering(getattr(trainer_choice, name)))
    validate, fit = task_choice.validate_loss, set[Hashable]()

    def validated(loss: Loss, task: str, outputs: int, like: torch.Tensor) -> None:
        case = type(loss), repr(sorted(vars(loss).items())), task, outputs, like.dtype, like.shape[1:]
        if case not in fit or not type(loss).__module__.startswith("fedveil."):
            validate(loss, task, outputs, like)
            fit.add(case)

    task_choice.validate_loss = validated


def _remembering(trial: Callable[..., bool | None]) -> Callable[..., bool | None]:
    answers: dict[Hashable, bool | None] = {}

    def tried(*arguments: Any, **named: Any) -> bool | None:
        try:
            case = *(_case(one) for one in arguments), *named.items()
        except ValueError:
            return trial(*arguments, **named)
        if case not in answers:
            answers[case] = trial(*arguments, **named)
        return answers[case]

    return tried


def _case(value: Any) -> Hashable:
    """Return all that a trial looks at of one of its arguments.

    Raises:
        ValueError: that cannot be told.
    """
    if _get_current_dispatch_mode() is not None:
        raise ValueError
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.cpu().numpy().tobytes()
    if isinstance(value, Task):
        layers = tuple(type(layer) for layer in value.model.modules())
        if not all(layer.__module__.startswith(("torch.", "fedveil.")) for layer in layers):
            raise ValueError
        state = tuple((name, _case(one)) for name, one in value.model.state_dict().items())
        return (
            repr(value.model),
            layers,
            state,
            value.precision,
            type(value.loss),
            repr(sorted(vars(value.loss).items())),
        )
    if hasattr(value, "task"):  # a trainer
        return type(value), _case(value.task), value.local, torch.get_num_threads()
    if hasattr(value, "targets"):  # a cohort
        of = [(str(one.dtype), tuple(one.shape[1:])) for one in (value.features, value.targets)]
        return *of, str(value.device)
    return tuple(value.items()) if isinstance(value, dict) else value
