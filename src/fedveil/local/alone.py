"""Whether this machine's kernels compute a contribution alike wherever she lies in a batch, and beside whom.

The shapes of :mod:`fedveil.local.shapes` leave a kernel no reason to round one contribution by another; that it has
none cannot be proved from here, for a model of one's own least of all. So before any training the gradients of made-up
records are computed at several places of batches of two lengths, beside other made-up records, and compared bit for
bit. Nothing of this looks at private data: the answer, and the trainer that follows from it, is public.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fedveil.local.shapes import undivided, unit
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort
from fedveil.local.vectorized import BatchedGradients, Tensors

_WIDTHS: Final = (1, 4)  # records a step that are tried; their units are 32 and 8 slots


def vmappable(task: Task, cohort: Cohort) -> bool:
    """Return whether ``torch.func.vmap`` can batch the gradient of a task, on records of the cohort's shape.

    Data-dependent control flow, writes to tensors that are not batched, and custom autograd functions without a vmap
    rule fail.
    """
    try:
        _gradients(task, cohort, _MadeUp(task, cohort, 1, 2))
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def alone_in_a_batch(task: Task, cohort: Cohort) -> bool:
    """Return whether no made-up contribution's gradient depends on its place, its neighbours or their number."""
    with undivided():
        for width in _WIDTHS:
            slots = unit(width)
            few, many = (_MadeUp(task, cohort, width, count) for count in (slots, 2 * slots))
            places = {0: 0, slots // 2: 1, slots - 1: 2 * slots - 1}
            for here, there in places.items():
                many.take(there, few, here)
            ours, theirs = _gradients(task, cohort, few), _gradients(task, cohort, many)
            for one, other in zip(ours, theirs, strict=True):
                for here, there in places.items():
                    if any(not _same(one[name][here], other[name][there]) for name in one):
                        return False
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool((one.isnan() == other.isnan()).all() and one.isnan().any())


class _MadeUp:
    """Models and records of as many contributions as are asked for, of the shape of the cohort's and with no others."""

    def __init__(self, task: Task, cohort: Cohort, width: int, slots: int) -> None:
        generator = torch.Generator().manual_seed(slots)
        self.start = task.initial().to(cohort.device)
        moves = torch.randn(slots, task.dimension, generator=generator) / task.dimension**0.5
        self.models = self.start + moves.to(cohort.device)
        shape, kind = cohort.features.shape[1:], cohort.targets
        self.features = torch.randn(slots, width, *shape, generator=generator).to(cohort.device)
        self.targets = torch.zeros(slots, width, *kind.shape[1:], dtype=kind.dtype, device=cohort.device)
        if kind.is_floating_point():
            self.targets += 1
        self.mask = torch.ones(slots, width, dtype=torch.bool, device=cohort.device)
        self.seeds = torch.arange(slots, device=cohort.device)

    def take(self, place: int, other: _MadeUp, theirs: int) -> None:
        """Put another's contribution at a place."""
        for mine, its in (
            (self.models, other.models),
            (self.features, other.features),
            (self.seeds, other.seeds),
        ):
            mine[place] = its[theirs]


def _gradients(task: Task, cohort: Cohort, made_up: _MadeUp) -> tuple[Tensors, Tensors]:
    """Return the gradients of made-up contributions, all at the model's start and each at its own model."""
    gradients, layout = BatchedGradients(task, cohort.device, compile=False), task.layout
    batch = (made_up.features, made_up.targets, made_up.mask, made_up.seeds)
    return (
        gradients.at_one(layout.unflatten(made_up.start), *batch),
        gradients.at_each(layout.unflatten(made_up.models), *batch),
    )
