"""Test whether this machine's kernels are batch-independent.

Batch-independent means that the bits of a contribution depend neither on its slot nor on its batch neighbours.

With the shapes of :mod:`fedveil.training.shapes`, rounding should not depend on the other contributions of a batch.
This cannot be proved for every kernel, least of all for a user's own model. So before any training, made-up records
are trained (or their gradients computed) with other made-up records and without some of them, and the results are
compared bit for bit. No private data is read, so the answer, and the trainer that follows from it, is public.

If a contribution leaves, those behind it move one slot forward. The first one of the next chunk becomes the last of
the previous chunk, and the last chunk may shrink by a :func:`slot_multiple`. :func:`is_gradient_batch_independent`
therefore puts one made-up contribution into every slot. If all slots give the same bits, no shift changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from hashlib import sha256
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from fedveil.data.records import Affine, Groups, Records
from fedveil.privacy.bounds import Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.kernel_replay import GradientFunction, Tensors
from fedveil.training.shapes import equal_with_nan, single_threaded, slot_multiple
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, Trainer, TrainJob
from fedveil.training.vectorized import BatchedGradients, without_fallback_warnings

LINE: Final = 16
"""Float32 numbers of a cache line, and of the widest vector.

Slot i of an array with s numbers per slot starts i s modulo 16 numbers behind the start of a line. So 16 consecutive
slots have all offsets that any slot can have.
"""

_N_EQUAL_SIZES: Final = 8
_SIZES: Final = (1, 1, 2, *_N_EQUAL_SIZES * (5,), 9, 9, 17, 33, 49, 65)
# Sizes above the number of features, which train_primal trains; used if a record has few features.
_LARGE_SIZES: Final = (257, 300)
_N_MADE_UP_RECORDS: Final = 1000  # number of made-up records; contributions share them


def trial_slots(width: int, most: int, *, fixed: bool = False) -> tuple[int, int]:
    """Return the numbers of slots of the two batches that test a width: a long and a short one.

    The long batch has a slot at every offset from a cache line (:data:`LINE`), or is the largest batch of this width.
    The short batch is the shortest. It is shorter than the long one if two lengths exist.

    Args:
        width: records of each contribution.
        most: slots of the largest batch of this width, a multiple of its :func:`slot_multiple`.
        fixed: whether all batches of this width have that number of slots; no other number is tried then.

    >>> trial_slots(16, 2), trial_slots(16, 100), trial_slots(1, 1000), trial_slots(1, 64, fixed=True)
    ((2, 2), (16, 2), (64, 32), (64, 64))
    """
    if fixed:
        return most, most
    multiple = slot_multiple(width)
    return min(most, max(2 * multiple, LINE)), multiple


def is_gradient_batch_independent(
    task: Task, cohort: Cohort, shapes: Mapping[int, int], *, fixed: bool = False
) -> bool:
    """Return whether a made-up contribution's gradient is independent of its slot and neighbours.

    For every width, the gradients of one contribution are computed in all slots of a long batch, and among others in
    a short batch. All of them must be equal, bit for bit.

    Args:
        task: a task that vmap can batch.
        cohort: gives the shapes of a record.
        shapes: slots of the largest batch, by the number of records of each contribution.
        fixed: whether these are the only numbers of slots.
    """
    gradients = BatchedGradients.for_task(task, cohort.device)
    with single_threaded(), without_fallback_warnings():
        for width, most in shapes.items():
            # Gradients in all slots of a long batch must equal the gradient in the middle of a short one, among
            # others.
            long, short = trial_slots(width, most, fixed=fixed)
            among_others = _MadeUpBatch(task, cohort, width, short)
            slot = short // 2
            copies = among_others.repeated(slot, long)
            # One pair of gradients at a time, and one slot of the short batch: a chunk's models and gradients are all
            # that the memory of a chunk holds.
            for gradient in (gradients.at_shared_model, gradients.at_own_models):
                own_models = gradient is gradients.at_own_models
                other = {
                    name: slope[slot].clone()
                    for name, slope in among_others.gradients(gradient, own_models).items()
                }
                first = copies.gradients(gradient, own_models)
                if not all(equal_with_nan(first[name], other[name]) for name in first):
                    return False
                del first
    return True


def trial_memory(dimension: int, cohort: Cohort, batch_size: int | None) -> int:
    """Return the bytes of made-up records and updates in :func:`is_training_batch_independent`, from public facts."""
    sizes = _sizes(cohort, batch_size)
    return 8 * dimension * len(sizes) + 4 * cohort.features[0].numel() * min(sum(sizes), _N_MADE_UP_RECORDS)


def is_training_batch_independent(
    trainer: Trainer, start: Tensor, cohort: Cohort, batch_size: int | None
) -> bool:
    """Return whether a trainer gives made-up contributions the same updates after some of them leave.

    Args:
        trainer: with few epochs, or with as many as the trial may take.
        start: (d,) the model.
        cohort: gives the shapes of a record.
        batch_size: batch size of the local steps, or None. The trial adds so many contributions of ``batch_size`` + 1
            records that they start at every offset from a cache line.
    """
    sizes = _sizes(cohort, batch_size)
    n_basic_sizes = len(_sizes(cohort, None))
    made_up = _made_up_cohort(cohort, np.array(sizes, dtype=np.int64))

    def updates(absent: set[int]) -> dict[int, bytes]:
        """Return a digest of each update: the updates of one run at a time are in memory."""
        present = [member for member in range(len(sizes)) if member not in absent]
        weights = torch.ones(len(present), dtype=torch.float64)
        job = TrainJob(
            start, made_up, torch.tensor(present), weights, Unbounded(), ExperimentRandomness(0), ("trial",)
        )
        total = trainer.sums(job.per_contribution()).total.cpu()
        total[total.isnan()] = torch.nan
        rows = total.add_(0.0).numpy()  # -0 counts as 0
        return {member: sha256(row).digest() for member, row in zip(present, rows, strict=True)}

    complete = updates(set())
    # First one contribution of each group of equal sizes leaves, so that those behind it move by one slot. Then half
    # of all leave, so that batches shrink.
    for absent in ({0, _SIZES.index(5), n_basic_sizes}, set(range(1, len(sizes), 2))):
        if not updates(absent).items() <= complete.items():
            return False
    return True


def _sizes(cohort: Cohort, batch_size: int | None) -> list[int]:
    """Return the numbers of records of the made-up contributions."""
    sizes = [*_SIZES, *(_LARGE_SIZES if cohort.features[0].numel() < _LARGE_SIZES[0] else ())]
    if batch_size is None:
        return sizes
    return sizes + [batch_size + 1] * (max(slot_multiple(batch_size), LINE) + 1)


def _made_up_cohort(cohort: Cohort, sizes: Int64[np.ndarray, " m"]) -> Cohort:
    """Return made-up contributions of these sizes, in one silo, with the record shape of the cohort.

    Contributions share a pool of records, each with another start, so that large ones take no more memory.
    """
    shape, targets = cohort.features.shape[1:], cohort.targets
    total, user = int(sizes.sum()), np.arange(len(sizes), dtype=np.int32)
    count = min(total, _N_MADE_UP_RECORDS)
    records = Records(
        features=np.random.default_rng(0).standard_normal((count, *shape), dtype=np.float32),
        targets=made_up_targets(count, targets).numpy(),
        silo=np.zeros(count, dtype=np.int32),
        user=np.zeros(count, dtype=np.int32),
    )
    groups = Groups(
        order=np.arange(total) % count,
        start=np.cumsum(sizes) - sizes,
        size=sizes,
        silo=np.zeros_like(user),
        user=user,
    )
    return Cohort.from_records(records, groups=groups, n_silos=1, scale=Affine(), device=cohort.device)


def made_up_targets(count: int, example: Tensor) -> Tensor:
    """Return targets that every loss for targets of this kind accepts: 0 and 1 in turn.

    Alternating targets make few batches equal.
    """
    values = (torch.arange(count) + 1) % 2 if example.is_floating_point() else torch.arange(count) % 2
    return values.to(example.dtype).reshape(-1, *(1 for _ in example.shape[1:])).repeat(1, *example.shape[1:])


class _MadeUpBatch:
    """Models and records of made-up contributions, with the record shape of the cohort."""

    def __init__(self, task: Task, cohort: Cohort, width: int, slots: int) -> None:
        generator = torch.Generator().manual_seed(slots)
        self.start = task.initial().to(cohort.device)
        self._layout = task.layout
        models = torch.randn(slots, task.dimension, generator=generator).div_(task.dimension**0.5)
        self.models = models.to(cohort.device).add_(self.start)
        shape, targets = cohort.features.shape[1:], cohort.targets
        self.features = torch.randn(slots, width, *shape, generator=generator).to(cohort.device)
        self.targets = (
            made_up_targets(slots * width, targets)
            .reshape(slots, width, *targets.shape[1:])
            .to(cohort.device)
        )
        self.mask = torch.ones(slots, width, dtype=torch.bool, device=cohort.device)
        self.seeds = torch.arange(slots, device=cohort.device)

    def repeated(self, slot: int, slots: int) -> _MadeUpBatch:
        """Return ``slots`` copies of the contribution in slot ``slot``."""
        other = copy(self)
        other.models, other.features, other.targets, other.mask, other.seeds = (
            tensor[slot].expand(slots, *tensor.shape[1:]).contiguous()
            for tensor in (self.models, self.features, self.targets, self.mask, self.seeds)
        )
        return other

    def gradients(self, gradient: GradientFunction, own_models: bool) -> Tensors:
        """Return the gradients of the contributions, each at its own model or all at the model's start."""
        models = self.models if own_models else self.start
        return gradient(self._layout.unflatten(models), self.features, self.targets, self.mask, self.seeds)
