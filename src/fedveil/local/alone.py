"""Whether this machine's kernels compute a contribution alike wherever it lies in a batch, and beside which others.

The shapes of :mod:`fedveil.local.shapes` leave a kernel no reason to round one contribution by another; that it has
none cannot be proved from here, for a model of one's own least of all. So before any training made-up records are
trained, or their gradients computed, beside other made-up ones and without some of them, and compared bit for bit.
Nothing of this looks at private data: the answer, and the trainer that follows from it, is public.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedveil.local.replay import Tensors
from fedveil.local.shapes import same, undivided, unit
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Trainer, TrainJob
from fedveil.local.vectorized import BatchedGradients
from fedveil.population.records import Affine, Records
from fedveil.privacy.bounds import Unbounded
from fedveil.randomness import ExperimentRandomness

WIDTHS: Final = (1, 4, 16)
"""Records a step that are tried whatever the batch size; their units are 32, 8 and 2 slots."""

_SIZES: Final = (1, 2, 5, 5, 5, 9, 17, 33, 49, 65)
_MANY: Final = (257, 300)  # records of contributions with more of them than features, where features are few


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


def alone_in_a_batch(task: Task, cohort: Cohort, widths: Iterable[int] = WIDTHS) -> bool:
    """Return whether no made-up contribution's gradient depends on its place, its neighbours or their number.

    Args:
        task: a task that vmap can batch.
        cohort: tells the shapes of a record.
        widths: how many records each contribution has.
    """
    with undivided():
        for width in widths:
            slots = unit(width)
            few, many = (_MadeUp(task, cohort, width, count) for count in (slots, 2 * slots))
            places = {0: 0, slots // 2: 1, slots - 1: 2 * slots - 1}
            for here, there in places.items():
                many.take(there, few, here)
            ours, theirs = _gradients(task, cohort, few), _gradients(task, cohort, many)
            for one, other in zip(ours, theirs, strict=True):
                for here, there in places.items():
                    if any(not same(one[name][here], other[name][there]) for name in one):
                        return False
    return True


def trains_alone(trainer: Trainer, start: Tensor, cohort: Cohort, batch_size: int | None) -> bool:
    """Return whether a trainer gives made-up contributions the same updates when some of them are gone.

    Args:
        trainer: of a few epochs, or of as many as the trial may take.
        start: the model.
        cohort: tells the shapes of a record.
        batch_size: more contributions than its unit have one record more.
    """
    sizes = [*_SIZES, *(_MANY if cohort.features[0].numel() < _MANY[0] else ())]
    few = len(sizes)
    sizes += [] if batch_size is None else [batch_size + 1] * (unit(batch_size) + 1)
    user = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    made_up = _made_up_cohort(cohort, user)

    def updates(gone: set[int]) -> tuple[Tensor, Tensor]:
        left = torch.tensor([member for member in range(len(sizes)) if member not in gone])
        weights = torch.ones(len(left), dtype=torch.float64)
        job = TrainJob(start, made_up, left, weights, Unbounded(), ExperimentRandomness(0), ("trial",))
        return trainer.sums(job.apart()).total, left

    everybody, _ = updates(set())
    for gone in ({0, 3, few - 1}, {2, 7, *range(few, len(sizes))}):
        without, left = updates(gone)
        if not same(without, everybody[left.to(everybody.device)]):
            return False
    return True


def _made_up_cohort(cohort: Cohort, user: np.ndarray) -> Cohort:
    """Return records of these users, in one silo, of the shape of the cohort's and with nothing else of them."""
    shape, kind = cohort.features.shape[1:], cohort.targets
    records = Records(
        features=np.random.default_rng(0).normal(size=(len(user), *shape)).astype(np.float32),
        targets=_made_up_targets(len(user), kind).numpy(),
        silo=np.zeros_like(user),
        user=user,
    )
    return Cohort.of(records, groups=records.by_silo_user(), n_silos=1, scale=Affine(), device=cohort.device)


def _made_up_targets(count: int, kind: Tensor) -> Tensor:
    """Return targets that every loss for targets of this kind takes, 0 and 1 in turn, so that few batches are alike."""
    turns = (torch.arange(count) + 1) % 2 if kind.is_floating_point() else torch.arange(count) % 2
    return turns.to(kind.dtype).reshape(-1, *(1 for _ in kind.shape[1:])).repeat(1, *kind.shape[1:])


class _MadeUp:
    """Models and records of as many contributions as are asked for, of the shape of the cohort's and with no others."""

    def __init__(self, task: Task, cohort: Cohort, width: int, slots: int) -> None:
        generator = torch.Generator().manual_seed(slots)
        self.start = task.initial().to(cohort.device)
        moves = torch.randn(slots, task.dimension, generator=generator) / task.dimension**0.5
        self.models = self.start + moves.to(cohort.device)
        shape, kind = cohort.features.shape[1:], cohort.targets
        self.features = torch.randn(slots, width, *shape, generator=generator).to(cohort.device)
        self.targets = (
            _made_up_targets(slots * width, kind).reshape(slots, width, *kind.shape[1:]).to(cohort.device)
        )
        self.mask = torch.ones(slots, width, dtype=torch.bool, device=cohort.device)
        self.seeds = torch.arange(slots, device=cohort.device)

    def take(self, place: int, other: _MadeUp, theirs: int) -> None:
        """Put another's contribution at a place."""
        for mine, its in (
            (self.models, other.models),
            (self.features, other.features),
            (self.targets, other.targets),
            (self.seeds, other.seeds),
        ):
            mine[place] = its[theirs]


def _gradients(task: Task, cohort: Cohort, made_up: _MadeUp) -> tuple[Tensors, Tensors]:
    """Return the gradients of made-up contributions, all at the model's start and each at its own model."""
    gradients, layout = BatchedGradients.of(task, cohort.device), task.layout
    batch = (made_up.features, made_up.targets, made_up.mask, made_up.seeds)
    return (
        gradients.at_one(layout.unflatten(made_up.start), *batch),
        gradients.at_each(layout.unflatten(made_up.models), *batch),
    )
