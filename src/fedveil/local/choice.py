"""Which trainer a model gets: the fastest that can train it."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from fedveil.errors import ConfigError
from fedveil.local.loop import LoopTrainer
from fedveil.local.span import SpanTrainer
from fedveil.local.span_plan import linear_layer
from fedveil.local.span_steps import spannable
from fedveil.local.steps import LocalStep, as_sgd
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Trainer
from fedveil.local.vectorized import BatchedGradients, VmapTrainer
from fedveil.privacy.bounds import Bound, ClipL1

_CROSSING: Final = 32  # records a step at which the loop overtakes vmap on convolutions, on a CPU


def choose_trainer(
    task: Task,
    local: LocalStep,
    *,
    name: str = "auto",
    memory: int | None = None,
    compile: bool = False,
    cohort: Cohort | None = None,
    bound: Bound | None = None,
) -> Trainer:
    """Return the trainer with this name; ``auto`` is span for linear models, else vmap, else the loop.

    Convolutions on large batches take the loop too.

    Args:
        task: model and loss.
        local: what each contribution computes.
        name: which trainer; all give the same sums.
        memory: bytes that a chunk of the vmap trainer may take; None is its own default.
        compile: compile the vmap trainer's gradients.
        cohort: lets ``auto`` try the model on a made-up record of the cohort's shape, which finds every model
            that vmap cannot batch; without it only the recurrent layers of PyTorch are known to be such.
        bound: keeps ``auto`` from span where it is l1.

    Raises:
        ConfigError: a name that does not exist.
        ModelError: ``span`` for a model that is not linear, or for projected steps with momentum.
    """
    if name == "auto":
        name = _fastest(task, local, cohort, bound)
    if name == "span":
        return SpanTrainer(task=task, local=local)
    if name == "vmap":
        return VmapTrainer(task=task, local=local, memory=memory, compile=compile)
    if name == "loop":
        return LoopTrainer(task=task, local=local)
    raise ConfigError(f"no trainer is called {name!r}; use auto, loop, vmap or span")


def _fastest(task: Task, local: LocalStep, cohort: Cohort | None, bound: Bound | None) -> str:
    linear = linear_layer(task.model) is not None
    if linear and spannable(as_sgd(local)) and not isinstance(bound, ClipL1):
        return "span"
    if cohort is not None and _large_convolutions(task, local, cohort):
        return "loop"
    return "vmap" if vmappable(task, cohort) else "loop"


def _large_convolutions(task: Task, local: LocalStep, cohort: Cohort) -> bool:
    """Return whether convolutions see so many records a step that batching contributions slows them down.

    Batched convolutions run as grouped ones, whose kernels are slower record for record; what batching saves is the
    cost of a step, which many records share. The two cross at about 32 records a step.
    """
    if not any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in task.model.modules()):
        return False
    sizes = torch.from_numpy(cohort.groups.size)
    batch_size = as_sgd(local).batch_size or int(sizes.max())
    steps = (sizes + batch_size - 1) // batch_size
    return bool(sizes.sum() >= _CROSSING * steps.sum())


def vmappable(task: Task, cohort: Cohort | None = None) -> bool:
    """Return whether ``torch.func.vmap`` can batch the gradient of a task.

    Recurrent layers cannot be batched. With a cohort, the gradient is also tried on all-zero records of its
    shape: data-dependent control flow, writes to tensors that are not batched, and custom autograd functions
    without a vmap rule fail there.
    """
    if any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return False
    if cohort is None:
        return True
    gradients = BatchedGradients(task, cohort.device, compile=False)
    features, targets = cohort.batch(torch.zeros(2, 2, dtype=torch.int64))
    mask = torch.ones(2, 2, dtype=torch.bool, device=cohort.device)
    seeds = torch.zeros(2, dtype=torch.int64, device=cohort.device)
    start = task.initial().to(cohort.device)
    stacked = task.layout.unflatten(start.repeat(2, 1))
    try:
        gradients.at_one(task.layout.unflatten(start), features * 0, targets * 0, mask, seeds)
        gradients.at_each(stacked, features * 0, targets * 0, mask, seeds)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True
