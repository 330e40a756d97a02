"""Which trainer a model gets: the fastest that can train it, by public facts alone.

The choice looks at the declared model, loss, local steps and bound, at the shape of a record, and at what this
machine's kernels do with made-up records: never at how many records, users or contributions there are. A choice that
did would change everybody's training when one user joins or leaves.
"""

from __future__ import annotations

from torch import nn

from fedveil.errors import ConfigError, ModelError
from fedveil.local.alone import alone_in_a_batch, vmappable
from fedveil.local.loop import LoopTrainer
from fedveil.local.span import SpanTrainer
from fedveil.local.span_plan import linear_layer
from fedveil.local.span_steps import spannable
from fedveil.local.steps import LocalStep, as_sgd
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Trainer
from fedveil.local.vectorized import VmapTrainer
from fedveil.privacy.bounds import Bound, ClipL1, Unbounded


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

    Args:
        task: model and loss.
        local: what each contribution computes.
        name: which trainer; all give the same sums.
        memory: bytes that a chunk of the vmap trainer may take; None is its own default.
        compile: compile the vmap trainer's gradients.
        cohort: lets the model be tried on made-up records of the cohort's shape, which finds every model that vmap
            cannot batch and kernels that round one contribution by others; without it only the recurrent layers of
            PyTorch are known to be such.
        bound: keeps ``auto`` from span where it is l1; where it bounds, vmap must leave contributions alone.

    Raises:
        ConfigError: a name that does not exist.
        ModelError: ``span`` for a model that is not linear, or for projected steps with momentum; ``vmap`` under a
            bound on a machine whose kernels let a contribution depend on those beside it.
    """
    if name == "auto":
        name, cohort = _fastest(task, local, cohort, bound), None
    if name == "span":
        return SpanTrainer(task=task, local=local)
    if name == "vmap":
        bounds = bound is not None and not isinstance(bound, Unbounded)
        if cohort is not None and bounds and vmappable(task, cohort) and not alone_in_a_batch(task, cohort):
            raise ModelError(
                "trainer.name = 'vmap': on this machine the gradient of one contribution depends on those computed "
                "beside it, so bounding each bounds nothing; use 'loop' (or 'auto')"
            )
        return VmapTrainer(task=task, local=local, memory=memory, compile=compile)
    if name == "loop":
        return LoopTrainer(task=task, local=local)
    raise ConfigError(f"no trainer is called {name!r}; use auto, loop, vmap or span")


def _fastest(task: Task, local: LocalStep, cohort: Cohort | None, bound: Bound | None) -> str:
    linear = linear_layer(task.model) is not None
    if linear and spannable(as_sgd(local)) and not isinstance(bound, ClipL1):
        return "span"
    if any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return "loop"
    if cohort is None:
        return "vmap"
    return "vmap" if vmappable(task, cohort) and alone_in_a_batch(task, cohort) else "loop"
