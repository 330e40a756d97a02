"""Which trainer a model gets: the fastest that can train it, by public facts alone.

The choice looks at the declared model, loss, local steps, bound and number of users, at the shape of a record, and at
what this machine's kernels do with made-up records: never at how many records, contributions or users with records
there are. A choice that did would change everybody's training when one user joins or leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from torch import nn

from fedveil.errors import ConfigError, ModelError
from fedveil.local.alone import WIDTHS, alone_in_a_batch, trains_alone, vmappable
from fedveil.local.loop import LoopTrainer
from fedveil.local.span.plan import linear_layer
from fedveil.local.span.steps import spannable
from fedveil.local.span.sums import MOST_WEIGHT
from fedveil.local.span.trainer import SpanTrainer
from fedveil.local.steps import LocalStep, as_sgd, check_computed
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, SplitTrainer
from fedveil.local.vectorized import VmapTrainer
from fedveil.privacy.bounds import Bound


def choose_trainer(
    task: Task,
    local: LocalStep,
    *,
    name: str = "auto",
    cohort: Cohort | None = None,
    bound: Bound | None = None,
    users: int | None = None,
) -> SplitTrainer:
    """Return the trainer with this name; ``auto`` is span for linear models, else vmap, else the loop.

    Args:
        task: model and loss.
        local: what each contribution computes.
        name: which trainer; all give the same sums.
        cohort: lets the model be tried on made-up records of the cohort's shape, which finds every model that vmap
            cannot batch and kernels that round one contribution by others; without it only the recurrent layers of
            PyTorch are known to be such.
        bound: keeps ``auto`` from span where it is l1; where it bounds, vmap and span must leave contributions alone.
        users: |U|, which bounds the weights of a silo: span's rounding is proved for up to 838,860 of them.

    Raises:
        ConfigError: a name that does not exist, or local steps of a class that trainers do not know.
        ModelError: ``span`` for a model that is not linear, for projected steps with momentum, under an l1 bound, in
            bfloat16, or for more users than its bound is proved for; ``vmap`` for a model that it cannot batch; either
            under a bound on a machine whose kernels let a contribution depend on those beside it.
    """
    check_computed(local)
    bounds = bound is not None and bound.bounded
    too_many = bounds and users is not None and users > MOST_WEIGHT
    if name == "auto":
        return _TRAINERS[_fastest(task, local, cohort, bound, span=not too_many)](task=task, local=local)
    if name not in _TRAINERS:
        raise ConfigError(f"no trainer is called {name!r}; use auto, loop, vmap or span")
    if name == "span" and too_many:
        raise ModelError(
            f"trainer.name = 'span': its bound is proved for up to {MOST_WEIGHT} users, and {users} are declared; "
            "use 'vmap' or 'loop' (or 'auto')"
        )
    if name == "span" and bound is not None and bound.order != 2:
        raise ModelError(
            "trainer.name = 'span' knows l2 norms alone, and the bound is l1; use 'vmap' (or 'auto')"
        )
    if name == "span" and task.precision != "float32":
        raise ModelError(
            f"trainer.precision = '{task.precision}': span computes in float32; use 'vmap' or 'loop' (or 'auto')"
        )
    if name == "vmap" and cohort is not None and not vmappable(task, cohort):
        raise ModelError("trainer.name = 'vmap': vmap cannot batch this model; use 'loop' (or 'auto')")
    if bounds and cohort is not None and not _alone(name, task, local, cohort):
        raise ModelError(_NOT_ALONE.format(name))
    return _TRAINERS[name](task=task, local=local)


def computes_alone(name: str) -> bool:
    """Return whether the trainer with this name says that it computes each contribution by itself.

    No other name does: ``auto`` may choose any trainer, and one that says nothing of it counts as one that batches.
    """
    return name in _TRAINERS and not _TRAINERS[name].side_by_side


def records_together(task: Task, cohort: Cohort) -> bool:
    """Return whether gradients of single records may be computed side by side; else DP-SGD computes one at a time.

    Raises:
        ModelError: vmap cannot batch the model, so that there are no gradients of single records.
    """
    if not vmappable(task, cohort):
        raise ModelError("DP-SGD clips gradients of single records, which vmap cannot compute for this model")
    return alone_in_a_batch(task, cohort, (1,))


_TRAINERS: Final[Mapping[str, type[SplitTrainer]]] = MappingProxyType(
    {trainer.name: trainer for trainer in (SpanTrainer, VmapTrainer, LoopTrainer)}
)
_NOT_ALONE: Final = (
    "trainer.name = {!r}: on this machine the update of one contribution depends on those computed beside it, so "
    "bounding each bounds nothing; use 'loop' (or 'auto')"
)
_WIDEST: Final = 64  # records a step that are tried at most
_EPOCHS: Final = 2  # that are tried


def _fastest(task: Task, local: LocalStep, cohort: Cohort | None, bound: Bound | None, *, span: bool) -> str:
    if (
        span
        and _linear(task)
        and task.precision == "float32"
        and spannable(as_sgd(local))
        and (bound is None or bound.order == 2)
        and (
            cohort is None
            or ((task.loss.in_closed_form or vmappable(task, cohort)) and _span_alone(task, local, cohort))
        )
    ):
        return "span"
    if any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return "loop"
    if cohort is None:
        return "vmap"
    return "vmap" if vmappable(task, cohort) and _vmap_alone(task, local, cohort) else "loop"


def _linear(task: Task) -> bool:
    return linear_layer(task.model) is not None


def _alone(name: str, task: Task, local: LocalStep, cohort: Cohort) -> bool:
    """Return whether a trainer leaves contributions alone."""
    if name == "span":  # the trainer refuses models that are not linear by itself
        return not _linear(task) or _span_alone(task, local, cohort)
    return computes_alone(name) or _vmap_alone(task, local, cohort)


def _span_alone(task: Task, local: LocalStep, cohort: Cohort) -> bool:
    sgd = as_sgd(local)
    if not spannable(sgd):
        return True  # the trainer refuses such steps itself
    trainer = SpanTrainer(task=task, local=replace(sgd, epochs=min(sgd.epochs, _EPOCHS)))
    batch_size = sgd.batch_size if sgd.batch_size is not None and sgd.batch_size <= _WIDEST else None
    return trains_alone(trainer, task.initial(), cohort, batch_size)


def _vmap_alone(task: Task, local: LocalStep, cohort: Cohort) -> bool:
    own = min(as_sgd(local).batch_size or max(WIDTHS), _WIDEST)
    return alone_in_a_batch(task, cohort, sorted({own, *(width for width in WIDTHS if width < own)}))
