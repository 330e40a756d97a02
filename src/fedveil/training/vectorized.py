"""Train thousands of contributions at once, with ``torch.func.vmap`` over stacked parameters.

This is the fast trainer.

Contributions of one width (records per step) are sorted by size and cut into chunks. In a chunk, b models are the
rows of one (b, d) matrix. A step computes all b gradients in one batched call and updates the rows in place. Three
facts make this fast and small:

* The first step of every contribution starts from the same model, so its parameters are not batched.
* With descending sizes, the contributions that still have batches left are a prefix of the rows.
* Finished rows are bounded and added to their silo's sum at once, so memory is O(chunk · d) for any number of
  contributions.

Padding within a batch has mask 0 and repeats a record of the same contribution, so no contribution reads another's
records. The rounding of an update does not depend on the other contributions either. A width follows from a
contribution's own number of records, and slots come in multiples that kernels treat alike
(:mod:`fedveil.training.shapes`). Rows that fill up a multiple repeat a contribution of the chunk, and their results
are dropped. docs/theory/vectorised-training.md and docs/theory/batch-independence.md have the arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn
from torch.func import grad, vmap

from fedveil.training.counters import batch_order, seed_names, step_seeds
from fedveil.training.heap import keep_freed_memory
from fedveil.training.kernel_replay import (
    CALLS,
    CALLS_OF_POOLING,
    GradientFunction,
    ReplayedGradient,
    Tensors,
)
from fedveil.training.local_algorithms import direction
from fedveil.training.loop import BatchGradient, single_update
from fedveil.training.record_sums import SiloSums
from fedveil.training.shapes import padded_sizes, round_up_slots, single_threaded, slot_multiple
from fedveil.training.state_leak_check import check_algorithm_unchanged, check_unchanged
from fedveil.training.steps import LocalSgd, as_sgd, project_
from fedveil.training.task import Task
from fedveil.training.trainer import (
    LARGEST_BATCH,
    Cohort,
    PartitionedTrainer,
    Progress,
    ProgressMonitor,
    Sums,
    TrainJob,
    floats_per_record,
    records_at_once,
    steps_per_member,
)

_CPU_MEMORY = 48 << 20
_CUDA_MEMORY = 2 << 30

_COMPILED_SHAPES: Final = 256

# Records per step at which, on a CPU, convolutions of single contributions become faster than batched ones.
_CROSSING: Final = 32
_LARGE: Final = 512  # records per step from which batching saves no time
# Number of slots if kernels are compiled, or chosen by a library, for one number of slots (CUDA, torch.compile).
_FIXED_SLOTS: Final = 64


@dataclass(frozen=True, kw_only=True)
class VmapTrainer(PartitionedTrainer):
    """Trainer that computes chunks of contributions.

    It implements :class:`~fedveil.training.trainer.Trainer`.

    Args:
        task: model and loss; the model must be one that vmap can batch.
        local: the local steps of each contribution.
        memory: bytes that a chunk may take, in addition to the model and the sums. None takes 48 MiB on a CPU,
            where larger chunks exceed the caches and are slower, and 2 GiB on a CUDA device. A given value also
            limits a batch that is trained separately.
        compile: compile the batched gradient with ``torch.compile`` (needs a C++ compiler). This takes tens of
            seconds for every new set of sizes, pays only for long runs of networks of affine layers, and changes
            results by float32 rounding.
        slots: number of slots of every batch, or as many of them as memory permits. A library that chooses its kernels
            by the number of slots then chooses the same for all. None takes 64 on a CUDA device and with ``compile``,
            and any number elsewhere.
    """

    name: ClassVar[str] = "vmap"

    memory: int | None = None
    compile: bool = False
    slots: int | None = None

    @property
    def has_generated_kernels(self) -> bool:
        return self.compile

    def configured(self, *, memory: int | None = None, compile: bool = False) -> VmapTrainer:
        return replace(self, memory=memory, compile=compile)

    @keep_freed_memory()
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        job = job.on_device()
        cohort, weights = job.cohort, job.weights
        silos = cohort.silos(job.members)
        steps = steps_per_member(self.local, cohort, job.members)
        sums = SiloSums(cohort.n_silos, self.task.dimension, job.bound, cohort.device)
        norms = torch.zeros(len(silos), dtype=torch.float64, device=cohort.device)
        n_steps = int(steps.sum())
        monitor = ProgressMonitor(progress, n_steps)
        with check_unchanged(self.task), check_algorithm_unchanged(self.local, job.start):
            for chunk, deltas in self._updates(job, monitor):
                norms[chunk] = sums.add_(deltas, weights[chunk], silos[chunk])
                monitor.add_steps(int(steps[chunk].sum()))
        return Sums(total=sums.total(), norms=norms, nonfinite=int(norms.isnan().sum()), steps=n_steps)

    def _updates(
        self, job: TrainJob, monitor: ProgressMonitor
    ) -> Iterator[tuple[Int64[Tensor, " b"], Float32[Tensor, "b d"]]]:
        """Yield positions in the members, and the updates of these contributions."""
        cohort, members, seeds = job.cohort, job.members, job.seeds
        at_once = records_at_once(self.task, cohort, self.memory or LARGEST_BATCH)
        sgd, single_gradient = (
            as_sgd(self.local),
            BatchGradient(self.task, cohort.device, at_once, monitor.check),
        )
        batched = BatchedGradients.for_task(self.task, cohort.device, compile=self.compile)
        for chunk in self._chunks(cohort, members):
            if chunk.slots == 1:
                for position in torch.split(chunk.positions, 1):
                    member = int(members[position])
                    yield (
                        position,
                        single_update(sgd, single_gradient, job.start, cohort, member, seeds[position])[None],
                    )
                continue
            padded_positions = torch.cat(
                [chunk.positions, chunk.positions[-1:].expand(chunk.slots - len(chunk.positions))]
            )
            batches = Batches(
                sgd, cohort, members[padded_positions], seeds[padded_positions], chunk, monitor.check
            )
            with single_threaded(), without_fallback_warnings():
                deltas = train(sgd, batched, job.start, batches)
            yield chunk.positions, deltas[: len(chunk.positions)]

    def _chunks(self, cohort: Cohort, members: Int64[Tensor, " m"]) -> Iterator[Chunk]:
        """Yield chunks of contributions of one width, largest first, as many at a time as memory permits.

        Contributions of one step have separate chunks. Their updates are computed directly. The difference of two
        models would round them, and this would then depend on whether another contribution of the chunk takes a
        second step.
        """
        sizes = cohort.sizes(members)
        sgd = as_sgd(self.local)
        is_one_step = steps_per_member(self.local, cohort, members) == 1
        per_record = floats_per_record(self.task, cohort)
        widths = torch.from_numpy(self._widths(sizes.numpy(), sgd, per_record))
        for width, single in product(np.unique(widths.numpy())[::-1].tolist(), (False, True)):
            candidates = ((widths == width) & (is_one_step == single)).nonzero().flatten()
            if width == 0 or not len(candidates):
                continue
            candidates = candidates[sizes[candidates].argsort(descending=True, stable=True)]
            most = self._most_slots(width, cohort, per_record)
            if most == 1:
                yield Chunk(width=width, slots=1, positions=candidates)
                continue
            for positions in torch.split(candidates, most):
                fixed = self.has_fixed_slots(cohort)
                slots = most if fixed else round_up_slots(len(positions), width)
                yield Chunk(width=width, slots=slots, positions=positions, fixed=fixed)

    def batch_shapes(self, cohort: Cohort) -> dict[int, int]:
        """Return the batch shapes that may occur, whatever the records are.

        Args:
            cohort: gives the shape of a record and the device.

        Returns:
            For every width (records per step of one contribution, padding included) the largest number of slots
            of a batch. It is the only one where the number of slots is fixed; elsewhere the others of this width are
            the smaller multiples of its :func:`slot_multiple`. Widths whose contributions are always computed one by
            one are omitted.
        """
        per_record = floats_per_record(self.task, cohort)
        # Contributions with more records have one of these widths too, or are computed one by one.
        sizes = np.arange(1, self._min_separate_width + 1)
        widths = np.unique(self._widths(sizes, as_sgd(self.local), per_record)).tolist()
        most = {width: self._most_slots(width, cohort, per_record) for width in widths}
        return {width: slots for width, slots in most.items() if slots > 1}

    def _most_slots(self, width: int, cohort: Cohort, per_record: int) -> int:
        """Return the largest number of contributions of a width in one batch; 1 means one by one."""
        # Numbers per slot and parameter: parameters, gradients and a temporary for each (4), and with momentum a
        # velocity (5).
        copies = 4 if as_sgd(self.local).momentum == 0 else 5
        memory = self.memory or (_CUDA_MEMORY if cohort.device.type == "cuda" else _CPU_MEMORY)
        fitting = memory // (4 * (copies * self.task.dimension + width * per_record))
        if width >= self._min_separate_width or fitting < slot_multiple(width):
            return 1
        most = fitting // slot_multiple(width) * slot_multiple(width)
        if self.has_fixed_slots(cohort):
            return min(most, round_up_slots(self.slots or _FIXED_SLOTS, width))
        return most

    def has_fixed_slots(self, cohort: Cohort) -> bool:
        """Return whether all batches of a width have the same number of slots, in every step."""
        return self.slots is not None or self.compile or cohort.device.type == "cuda"

    @property
    def _min_separate_width(self) -> int:
        """Width from which contributions are trained one by one.

        Batched convolutions run as grouped convolutions, whose kernels are slower per record. Batching saves the
        fixed cost of a step, and a wide step divides this cost among many records.
        """
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return _CROSSING if any(isinstance(module, kinds) for module in self.task.model.modules()) else _LARGE

    def _widths(
        self, sizes: Int64[np.ndarray, " m"], sgd: LocalSgd, per_record: int
    ) -> Int64[np.ndarray, " m"]:
        """Return the records per step of each contribution, padding included.

        The width is a function of the contribution's own number of records. A model with many parameters makes slots
        and steps expensive, so its widths are few (one per octave). A model with many activations makes records
        expensive, so its widths are fine (four per octave).
        """
        finest, an_octave = (4, 1) if self.task.dimension > 2 * per_record else (2, 4)
        widths = padded_sizes(np.maximum(sizes, 1), finest, an_octave)
        if sgd.batch_size is not None:
            widths = np.minimum(widths, sgd.batch_size)
        return np.where(sizes > 0, widths, 0)


@contextmanager
def without_fallback_warnings() -> Iterator[None]:
    """Hide PyTorch's warning about operations that vmap computes slot by slot.

    The warning asks users to report them. These operations are slow and correct.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="There is a performance drop because we have not yet implemented"
        )
        yield


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Contributions that are trained in one batch.

    Args:
        width: records per step of each, padding included.
        slots: number of computed contributions, repeated ones included; 1 means one by one.
        positions: (b,) their positions in the members, largest first.
        fixed: whether every step computes all slots, and not only those of contributions with records left.
    """

    width: int
    slots: int
    positions: Int64[Tensor, " b"]
    fixed: bool = False


class BatchedGradients:
    """The gradients of b mean losses, all at the same parameters or each at its own.

    Attributes:
        at_shared_model: gradient function at the same parameters; results have one row per contribution.
        at_own_models: gradient function at parameters with one row per contribution.
    """

    @classmethod
    def for_task(cls, task: Task, device: torch.device, *, compile: bool = False) -> BatchedGradients:
        """Return the gradients of a task, cached in the task.

        The cache keeps compiled and traced functions for all rounds.
        """
        name = (cls, device, compile)
        if name not in task.cache:
            task.cache[name] = cls(task, device, compile)
        gradients: BatchedGradients = task.cache[name]
        return gradients

    def __init__(self, task: Task, device: torch.device, compile: bool) -> None:
        constants = task.constants(device)
        seeds = seed_names(task.model)

        def loss(
            parameters: Tensors, features: Tensor, targets: Tensor, mask: Tensor, seed: Tensor
        ) -> Tensor:
            state = parameters | constants | dict.fromkeys(seeds, seed)
            return task.loss(task.outputs(state, features), targets, mask)

        self.layout = task.layout
        at_shared_model: GradientFunction = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))
        at_own_models: GradientFunction = vmap(grad(loss), in_dims=(0, 0, 0, 0, 0))
        if compile:
            # torch.compile makes one graph per shape of a chunk, and contributions sorted by size give many shapes.
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, _COMPILED_SHAPES)
            self.at_shared_model: GradientFunction = torch.compile(at_shared_model, dynamic=False)
            self.at_own_models: GradientFunction = torch.compile(at_own_models, dynamic=False)
        elif task.precision != "float32":
            self.at_shared_model, self.at_own_models = at_shared_model, at_own_models
        else:
            pools = any(isinstance(module, nn.MaxPool2d) for module in task.model.modules())
            self.at_shared_model, self.at_own_models = (
                ReplayedGradient(gradient, constants.values(), CALLS_OF_POOLING if pools else CALLS)
                for gradient in (at_shared_model, at_own_models)
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The batches of one step of a chunk.

    The chunk's first contributions take part in the step. Rows beyond ``active`` have no record in it and keep their
    models; they fill the number of slots up to a multiple.
    """

    active: int
    features: Float32[Tensor, "rows batch *shape"]
    targets: Tensor
    mask: Bool[Tensor, "rows batch"]
    seeds: Int64[Tensor, " rows"]


class Batches:
    """The steps of a chunk of contributions with records, sorted by size, largest first.

    Args:
        sgd: the local steps.
        cohort: the records.
        members: (b,) indices of the contributions.
        seeds: (b,) their seeds.
        chunk: how the contributions are computed.
        before_step: called before every step; it reports progress and may raise to end the training.
    """

    def __init__(
        self,
        sgd: LocalSgd,
        cohort: Cohort,
        members: Int64[Tensor, " b"],
        seeds: Int64[Tensor, " b"],
        chunk: Chunk,
        before_step: Callable[[], None],
    ) -> None:
        self._sgd, self._cohort, self._seeds, self._width = sgd, cohort, seeds, chunk.width
        self._fixed = chunk.fixed
        self._before_step = before_step
        self._sizes = cohort.sizes(members)
        self._start = torch.from_numpy(cohort.groups.start[members.cpu().numpy()])
        self._records = torch.from_numpy(cohort.groups.order)
        self._longest = int(self._sizes[0])
        self.count = len(members)
        self.steps = sgd.count(self._longest)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the steps in order; contributions without records left are a suffix and are omitted."""
        for epoch in range(self._sgd.epochs):
            order = batch_order(self._seeds, self._sizes, epoch, self._sgd.batch_size)
            for batch, first in enumerate(range(0, self._longest, self._width)[: self._sgd.steps]):
                self._before_step()
                # If every epoch is one batch, its records are the same in every epoch and are read once.
                if epoch == 0 or self._width < self._longest:
                    active, features, targets, mask = self._gather(order, first)
                seeds = step_seeds(self._seeds[: len(mask)], epoch, batch).to(self._cohort.device)
                yield Batch(active=active, features=features, targets=targets, mask=mask, seeds=seeds)

    def _gather(self, order: Int64[Tensor, "b longest"], first: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Read the records at positions first, first + 1, ... of the order, padded to the width."""
        active = int((self._sizes > first).sum())
        # The number of contributions with records left depends on their sizes, and a library may choose kernels by
        # this number. With a fixed number of slots every step therefore computes all rows.
        rows = self.count if self._fixed else min(round_up_slots(active, self._width), self.count)
        offsets = torch.arange(first, first + self._width)
        mask = offsets < self._sizes[:rows, None]
        positions = order[:rows, offsets.clamp(max=order.shape[1] - 1)]
        records = self._records[self._start[:rows, None] + torch.where(mask, positions, 0)]
        features, targets = self._cohort.batch(records)
        return active, features, targets, mask.to(self._cohort.device)


def train(
    sgd: LocalSgd, gradients: BatchedGradients, start: Float32[Tensor, " d"], batches: Batches
) -> Float32[Tensor, "b d"]:
    """Return the updates of the contributions of a chunk, one per row, in the order of the batches.

    Args:
        sgd: the local steps.
        gradients: gradients of the task.
        start: (d,) the model from which they start.
        batches: the steps of the chunk.
    """
    layout = gradients.layout
    models = torch.empty(batches.count, layout.dimension, dtype=torch.float32, device=start.device)
    velocity: Tensors = {}
    for step, batch in enumerate(batches):
        rows = len(batch.mask)
        # Rows from `active` on only fill up the slots. Their models and velocities are saved here and restored below.
        saved = [
            (matrix, matrix[batch.active : rows].clone()) for matrix in (models, *velocity.values()) if step
        ]
        updated = layout.unflatten(models[:rows])
        parameters = layout.unflatten(start) if step == 0 else updated
        gradient_at = gradients.at_shared_model if step == 0 else gradients.at_own_models
        slopes = gradient_at(parameters, batch.features, batch.targets, batch.mask, batch.seeds)
        if sgd.algorithm.changes:
            gradient = torch.cat([slopes[name].reshape(rows, -1) for name in layout.names], 1)
            current = models[:rows] if step else start.expand(rows, -1)
            slopes = layout.unflatten(direction(sgd.algorithm, gradient, current, start))
        for name, slope in slopes.items():
            if sgd.weight_decay:
                slope = slope.add_(parameters[name], alpha=sgd.weight_decay)
            if sgd.momentum:
                if step > 0:
                    slope = velocity[name][:rows].mul_(sgd.momentum).add_(slope)
                else:
                    # Two parameters that are added in the model may receive one tensor as their gradient.
                    velocity[name] = slope.clone()
            # A single step yields the update itself: start + update - start would round it.
            if batches.steps == 1:
                torch.mul(slope, -sgd.learning_rate, out=updated[name])
            else:
                torch.add(parameters[name], slope, alpha=-sgd.learning_rate, out=updated[name])
        if sgd.projection is not None:
            project_(models[:rows], None if batches.steps == 1 else start, sgd.projection)
        for matrix, unchanged in saved:
            matrix[batch.active : rows] = unchanged
    return models if batches.steps == 1 else models.sub_(start)
