"""Which trainer a model gets: the fastest that can train it."""

from __future__ import annotations

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


def choose_trainer(
    task: Task,
    local: LocalStep,
    *,
    name: str = "auto",
    memory: int | None = None,
    compile: bool = False,
    cohort: Cohort | None = None,
) -> Trainer:
    """Return the trainer with this name; ``auto`` is span for linear models, else vmap, else the loop.

    Args:
        task: model and loss.
        local: what each contribution computes.
        name: which trainer; all give the same sums.
        memory: bytes that a chunk of the vmap trainer may take; None is its own default.
        compile: compile the vmap trainer's gradients.
        cohort: lets ``auto`` try the model on a made-up record of the cohort's shape, which finds every model
            that vmap cannot batch; without it only the recurrent layers of PyTorch are known to be such.

    Raises:
        ConfigError: a name that does not exist.
        ModelError: ``span`` for a model that is not linear, or for projected steps with momentum.
    """
    if name == "auto":
        name = _fastest(task, local, cohort)
    if name == "span":
        return SpanTrainer(task=task, local=local)
    if name == "vmap":
        return VmapTrainer(task=task, local=local, memory=memory, compile=compile)
    if name == "loop":
        return LoopTrainer(task=task, local=local)
    raise ConfigError(f"no trainer is called {name!r}; use auto, loop, vmap or span")


def _fastest(task: Task, local: LocalStep, cohort: Cohort | None) -> str:
    if linear_layer(task.model) is not None and spannable(as_sgd(local)):
        return "span"
    return "vmap" if vmappable(task, cohort) else "loop"


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
