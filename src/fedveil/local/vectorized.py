"""The fast trainer: thousands of contributions at once, by ``torch.func.vmap`` over stacked parameters.

Contributions are sorted by size and cut into chunks. In a chunk, b models are the rows of one (b, d) matrix;
a step computes all b gradients in one batched call and updates the rows in place. Three observations make it
fast and small:

* the first step of every contribution starts from the same model, so its parameters are not batched;
* with sizes descending, those that still have batches left are a prefix of the rows: no work is masked away;
* finished rows are bounded and added to their silo's sum at once, so memory is O(chunk · d) whatever the
  number of contributions.

Padding within a batch carries mask 0 and repeats a record of the same contribution: no contribution ever
reads another's records. docs/theory/vectorised-training.md has the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedveil.local.counters import batch_order, contribution_seeds, step_seeds
from fedveil.local.dropout import seed_names
from fedveil.local.loop import steps_per_member
from fedveil.local.projection import project_
from fedveil.local.silo_sums import SiloSums
from fedveil.local.steps import LocalSgd, LocalStep, as_sgd
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Path, Progress, Sums
from fedveil.privacy.bounds import Bound
from fedveil.randomness import ExperimentRandomness

Tensors: TypeAlias = dict[str, Tensor]
GradientFunction: TypeAlias = Callable[[Tensors, Tensor, Tensor, Tensor, Tensor], Tensors]

_CPU_MEMORY = 48 << 20
_CUDA_MEMORY = 2 << 30

_COMPILED_SHAPES: Final = 256


@dataclass(frozen=True, kw_only=True)
class VmapTrainer:
    """Trains contributions in chunks; implements :class:`~fedveil.local.trainer.Trainer`.

    Args:
        task: model and loss; the model must be one that vmap can batch.
        local: what each contribution computes.
        memory: bytes that a chunk may take, beyond the model and the sums; None takes 48 MiB on a CPU, where
            larger chunks leave its caches and are slower, and 2 GiB on a CUDA device.
        compile: compile the batched gradient with ``torch.compile`` (needs a C++ compiler). It takes tens of
            seconds for every new set of sizes, pays for long runs of networks of affine layers only, and changes
            results by float32 rounding.
    """

    task: Task
    local: LocalStep
    memory: int | None = None
    compile: bool = False

    def sums(
        self,
        start: Float32[Tensor, " d"],
        cohort: Cohort,
        members: Int64[Tensor, " m"],
        weights: Float64[Tensor, " m"],
        bound: Bound,
        randomness: ExperimentRandomness,
        path: Path,
        progress: Progress | None = None,
    ) -> Sums:
        """Return the bounded sums; see :meth:`fedveil.local.trainer.Trainer.sums`."""
        start, weights = start.to(cohort.device), weights.to(cohort.device)
        seeds = contribution_seeds(cohort.groups, members, randomness, path)
        silos = cohort.silos(members)
        steps = steps_per_member(self.local, cohort, members)
        sums = SiloSums(cohort.n_silos, self.task.dimension, bound, cohort.device)
        norms = torch.zeros(len(members), dtype=torch.float64, device=cohort.device)
        sgd, gradients = as_sgd(self.local), BatchedGradients(self.task, cohort.device, self.compile)
        done, to_do = 0, int(steps.sum())
        for chunk in self._chunks(cohort, members):
            batches = Batches(sgd, cohort, members[chunk], seeds[chunk])
            deltas = train(sgd, gradients, start, batches)
            norms[chunk] = sums.add_(deltas, weights[chunk], silos[chunk])
            done += int(steps[chunk].sum())
            if progress is not None:
                progress(done, to_do)
        return Sums(total=sums.total(), norms=norms, nonfinite=int(norms.isnan().sum()), steps=to_do)

    def _chunks(self, cohort: Cohort, members: Int64[Tensor, " m"]) -> Iterator[Int64[Tensor, " b"]]:
        """Yield positions in ``members``, largest contributions first, as many at a time as memory takes."""
        sizes = cohort.sizes(members)
        descending = sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]
        sgd = as_sgd(self.local)
        per_record = floats_per_record(self.task, cohort)
        copies = 4 if sgd.momentum == 0 else 5  # parameters, gradients, a temporary of each; the velocity
        memory = self.memory or (_CUDA_MEMORY if cohort.device.type == "cuda" else _CPU_MEMORY)
        first = 0
        while first < len(descending):
            longest = int(sizes[descending[first]])
            batch = min(longest, sgd.batch_size or longest)
            floats = copies * self.task.dimension + batch * per_record + 8 * longest
            count = max(1, memory // (4 * floats))
            yield descending[first : first + count]
            first += count


class BatchedGradients:
    """The gradients of b mean losses: all at the same parameters, or each at its own."""

    def __init__(self, task: Task, device: torch.device, compile: bool) -> None:
        constants = task.constants(device)
        seeds = seed_names(task.model)

        def loss(
            parameters: Tensors, features: Tensor, targets: Tensor, mask: Tensor, seed: Tensor
        ) -> Tensor:
            state = (parameters, constants | dict.fromkeys(seeds, seed))
            return task.loss(functional_call(task.model, state, (features,)), targets, mask)

        self.layout = task.layout
        self.at_one: GradientFunction = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))
        self.at_each: GradientFunction = vmap(grad(loss), in_dims=(0, 0, 0, 0, 0))
        if compile:
            # One graph per shape of a chunk: contributions are sorted by size, so there are many shapes.
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, _COMPILED_SHAPES)
            self.at_one = torch.compile(self.at_one, dynamic=False)
            self.at_each = torch.compile(self.at_each, dynamic=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One step's batches of the contributions that take part in it: the first ones of a chunk."""

    features: Float32[Tensor, "active batch *shape"]
    targets: Tensor
    mask: Bool[Tensor, "active batch"]
    seeds: Int64[Tensor, " active"]


class Batches:
    """The steps of a chunk: contributions with records, sorted by size, largest first."""

    def __init__(
        self, sgd: LocalSgd, cohort: Cohort, members: Int64[Tensor, " b"], seeds: Int64[Tensor, " b"]
    ) -> None:
        self._sgd, self._cohort, self._seeds = sgd, cohort, seeds
        self._sizes = cohort.sizes(members)
        self._start = torch.from_numpy(cohort.groups.start[members.cpu().numpy()])
        self._records = torch.from_numpy(cohort.groups.order)
        self._longest = int(self._sizes[0])
        self._width = min(self._longest, sgd.batch_size or self._longest)
        self.count = len(members)
        self.steps = sgd.count(self._longest)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the steps in order; contributions without records left are a suffix, and left out."""
        for epoch in range(self._sgd.epochs):
            order = batch_order(self._seeds, self._sizes, epoch, self._sgd.batch_size)
            for batch, first in enumerate(range(0, self._longest, self._width)[: self._sgd.steps]):
                if epoch == 0 or self._width < self._longest:
                    features, targets, mask = self._gather(order, first)
                seeds = step_seeds(self._seeds[: len(mask)], epoch, batch).to(self._cohort.device)
                yield Batch(features=features, targets=targets, mask=mask, seeds=seeds)

    def _gather(self, order: Int64[Tensor, "b longest"], first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read the records at positions first, first + 1, ... of the order, padded to the longest batch."""
        active = int((self._sizes > first).sum())
        positions = order[:active, first : first + self._width]
        left = self._sizes[:active, None] - first
        mask = torch.arange(positions.shape[1]) < left
        records = self._records[self._start[:active, None] + torch.where(mask, positions, 0)]
        features, targets = self._cohort.batch(records)
        return features, targets, mask.to(self._cohort.device)


def train(
    sgd: LocalSgd, gradients: BatchedGradients, start: Float32[Tensor, " d"], batches: Batches
) -> Float32[Tensor, "b d"]:
    """Return the updates of the contributions of a chunk, one per row, in the order of the batches."""
    layout = gradients.layout
    models = torch.empty(batches.count, layout.dimension, device=start.device)
    velocity: Tensors = {}
    for step, batch in enumerate(batches):
        named = layout.unflatten(models[: len(batch.mask)])
        at = layout.unflatten(start) if step == 0 else named
        gradient_at = gradients.at_one if step == 0 else gradients.at_each
        slopes = gradient_at(at, batch.features, batch.targets, batch.mask, batch.seeds)
        for name, slope in slopes.items():
            if sgd.weight_decay:
                slope = slope.add_(at[name], alpha=sgd.weight_decay)
            if sgd.momentum:
                if step > 0:
                    slope = velocity[name][: len(slope)].mul_(sgd.momentum).add_(slope)
                else:
                    velocity[name] = slope
            if batches.steps == 1:
                torch.mul(slope, -sgd.learning_rate, out=named[name])
            else:
                torch.add(at[name], slope, alpha=-sgd.learning_rate, out=named[name])
        if sgd.projection is not None:
            centre = None if batches.steps == 1 else start
            project_(models[: len(batch.mask)], centre, sgd.projection)
    return models if batches.steps == 1 else models.sub_(start)


def rows_in_memory(task: Task, cohort: Cohort, memory: int) -> int:
    """Return how many contributions of one record each fit into this many bytes, at least 1."""
    return max(1, memory // (4 * (4 * task.dimension + floats_per_record(task, cohort))))


def floats_per_record(task: Task, cohort: Cohort) -> int:
    """Return about how many numbers one record of a batch takes while its gradient is computed.

    Counts its features and, twice, the outputs of the layers: once for the forward pass, once for the
    backward.
    """
    counted = 0

    def count(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal counted
        counted += output.numel() if isinstance(output, Tensor) else 0

    hooks = [
        layer.register_forward_hook(count) for layer in task.model.modules() if not any(layer.children())
    ]
    features, _ = cohort.batch(torch.zeros(1, dtype=torch.int64))
    try:
        with torch.no_grad():
            functional_call(task.model, (task.constants(cohort.device)), (features,))
    finally:
        for hook in hooks:
            hook.remove()
    return int(features.numel() + 2 * counted)
