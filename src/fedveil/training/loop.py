"""Train one contribution after another in plain PyTorch: the readable trainer.

The tests compare the fast trainers with this one. It also trains models that ``torch.func.vmap`` cannot batch, such
as an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from fedveil.errors import ModelError
from fedveil.training.counters import batch_order, derive, seed_names, step_seeds
from fedveil.training.heap import keep_freed_memory
from fedveil.training.local_algorithms import direction
from fedveil.training.record_sums import SiloSums
from fedveil.training.state_leak_check import check_algorithm_unchanged, check_unchanged
from fedveil.training.steps import LocalStep, as_sgd, project_
from fedveil.training.task import Task
from fedveil.training.trainer import (
    LARGEST_BATCH,
    Cohort,
    PartitionedTrainer,
    Progress,
    ProgressMonitor,
    Sums,
    TrainJob,
    records_at_once,
    steps_per_member,
)


@dataclass(frozen=True, kw_only=True)
class LoopTrainer(PartitionedTrainer):
    """Trainer that computes one contribution at a time.

    It implements :class:`~fedveil.training.trainer.Trainer`.

    Args:
        memory: bytes that the records of a batch may take at once; a larger batch is computed in parts.
    """

    name: ClassVar[str] = "loop"
    side_by_side: ClassVar[bool] = False

    memory: int = LARGEST_BATCH

    def configured(self, *, memory: int | None = None, compile: bool = False) -> LoopTrainer:
        return self if memory is None else replace(self, memory=memory)

    @keep_freed_memory()
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        job = job.on_device()
        cohort, members, seeds = job.cohort, job.members, job.seeds
        silos = cohort.silos(members)
        steps = steps_per_member(self.local, cohort, members)
        sums = SiloSums(cohort.n_silos, self.task.dimension, job.bound, cohort.device)
        norms = torch.zeros(len(members), dtype=torch.float64, device=cohort.device)
        at_once = records_at_once(self.task, cohort, self.memory)
        to_do = int(steps.sum())
        watch = ProgressMonitor(progress, to_do)
        gradient = BatchGradient(self.task, cohort.device, at_once, watch.check)
        with check_unchanged(self.task), check_algorithm_unchanged(self.local, job.start):
            for i, member in enumerate(members.tolist()):
                if steps[i] == 0:
                    continue
                row = slice(i, i + 1)
                delta = single_update(self.local, gradient, job.start, cohort, member, seeds[row])
                norms[row] = sums.add_(delta[None], job.weights[row], silos[row])
                watch.add_steps(int(steps[i]))
        return Sums(total=sums.total(), norms=norms, nonfinite=int(norms.isnan().sum()), steps=to_do)


def single_update(
    local: LocalStep,
    gradient: BatchGradient,
    start: Float32[Tensor, " d"],
    cohort: Cohort,
    member: int,
    seed: Int64[Tensor, " 1"],
) -> Float32[Tensor, " d"]:
    """Return the update Delta = w_end - w_start of one contribution with records, computed separately.

    The next call overwrites it.

    Args:
        local: the local steps.
        gradient: the gradient of the mean loss of a batch.
        start: (d,) the model w_start.
        cohort: the records.
        member: index of the contribution in ``cohort.groups``.
        seed: (1,) its seed, for batches and dropout masks.
    """
    sgd = as_sgd(local)
    records = torch.from_numpy(cohort.groups.members(member))
    batch_size = sgd.batch_size or len(records)
    # A large model spends more time on fresh memory than on arithmetic: every step writes to the same vectors.
    delta, model, slope = gradient.scratch(start)
    delta.zero_()
    velocity = torch.zeros_like(start) if sgd.momentum else slope
    for epoch in range(sgd.epochs):
        order = batch_order(seed, torch.tensor([len(records)]), epoch, sgd.batch_size)[0]
        for step, batch in enumerate(torch.split(records[order], batch_size)[: sgd.steps]):
            torch.add(start, delta, out=model)
            masks = step_seeds(seed, epoch, step) if gradient.drops_out else seed
            gradient.evaluate(model, *cohort.batch(batch), masks[0], out=slope)
            if sgd.algorithm.changes:
                slope.copy_(direction(sgd.algorithm, slope[None], model[None], start)[0])
            # v <- mu v + (grad + lambda w), w <- w - eta v. The update is accumulated, not the model: the difference
            # of two models would lose the low bits of a small update.
            if sgd.momentum:
                velocity.mul_(sgd.momentum).add_(slope)
            if sgd.weight_decay:
                velocity.add_(model.mul_(sgd.weight_decay))
            delta.sub_(torch.mul(velocity, sgd.learning_rate, out=model))
            if sgd.projection is not None:
                project_(delta[None], None, sgd.projection)
    return delta


class BatchGradient:
    """The gradient of a task's mean loss over one batch of records.

    A batch of more than ``at_once`` records is computed in parts. Their gradients are added up, which equals the
    gradient of the batch up to float32 rounding. Every part has its own dropout masks. A loss whose terms depend on
    one another is not divided.

    Args:
        task: model and loss.
        device: device of the parameters.
        at_once: number of records of a part.
        look: called before every part.
    """

    def __init__(
        self, task: Task, device: torch.device, at_once: int, look: Callable[[], None] = lambda: None
    ) -> None:
        self._task, self._look = task, look
        self._at_once = at_once if task.loss.separable else None
        self._constants = task.constants(device)
        self._seeds = seed_names(task.model)
        self._scratch: tuple[Tensor, Tensor, Tensor] | None = None

    def scratch(self, like: Float32[Tensor, " d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return three (d,) vectors, the same ones at every call, whose numbers nobody relies on."""
        if self._scratch is None:
            self._scratch = torch.empty_like(like), torch.empty_like(like), torch.empty_like(like)
        return self._scratch

    @property
    def drops_out(self) -> bool:
        """Return whether the model has dropout, so that :meth:`evaluate` reads its seed."""
        return bool(self._seeds)

    def evaluate(
        self,
        model: Float32[Tensor, " d"],
        features: Tensor,
        targets: Tensor,
        seed: Int64[Tensor, ""],
        out: Float32[Tensor, " d"] | None = None,
    ) -> Float32[Tensor, " d"]:
        """Return the gradient of the mean loss at a model, as one vector.

        Args:
            model: (d,) the parameters.
            features: (n, ...) float32 features of the batch.
            targets: (n, ...) its targets.
            seed: int64 scalar that determines the dropout masks of this step.
            out: (d,) vector that receives the result; None makes one.
        """
        total = torch.empty_like(model) if out is None else out
        if self._at_once is None or len(features) <= self._at_once:
            return self._of(model, features, targets, seed, total)
        total.zero_()
        part = torch.empty_like(model)
        parts = zip(torch.split(features, self._at_once), torch.split(targets, self._at_once), strict=True)
        for number, (part_features, part_targets) in enumerate(parts):
            self._of(model, part_features, part_targets, derive(seed, number), part)
            # The mean over the batch is the mean over each part, weighted by its share of the records.
            total.add_(part, alpha=len(part_features) / len(features))
        return total

    def _of(
        self,
        model: Float32[Tensor, " d"],
        features: Tensor,
        targets: Tensor,
        seed: Int64[Tensor, ""],
        out: Float32[Tensor, " d"],
    ) -> Float32[Tensor, " d"]:
        self._look()
        task = self._task
        named = task.layout.unflatten(model)
        parameters = {name: _laid_out(view.detach()).requires_grad_() for name, view in named.items()}
        constants = self._constants | dict.fromkeys(self._seeds, seed.to(model.device))
        with torch.enable_grad():
            outputs = task.outputs(parameters | constants, features)
            everyone = torch.ones(len(features), dtype=torch.bool, device=model.device)
            loss = task.loss(outputs, targets, everyone)
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        for (name, slice_), gradient in zip(task.layout.unflatten(out).items(), gradients, strict=True):
            if gradient.layout != torch.strided:
                raise ModelError(
                    f"parameter {name} has a sparse gradient, and a bound is computed of dense ones; give its layer "
                    "sparse=False"
                )
            slice_.copy_(gradient)
        return out


def _laid_out(parameter: Tensor) -> Tensor:
    """Return a convolution kernel with its channels innermost in memory, and other parameters unchanged.

    CPU kernels are fastest with this layout. Only the strides change. The output of a convolution inherits the layout
    of its kernel, and so do the layers after it.
    """
    if parameter.ndim != 4:
        return parameter
    channels, height, width = parameter.shape[1:]
    strides = (height * width * channels, 1, width * channels, channels)
    return torch.empty_strided(parameter.shape, strides, device=parameter.device).copy_(parameter)
