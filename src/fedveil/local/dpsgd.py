"""DP-SGD inside each silo (Abadi et al. 2016): what ULDP-GROUP trains, private for single records.

One step on a silo's n records, with the bound C, the noise multiplier sigma and the sampling rate gamma:

    batch    every record joins independently with probability gamma
    masks    with dropout: every record has masks of its own, from a 64-bit seed that is drawn for it in this step
    sum      G = sum over the batch of clip(gradient of its own loss, C)
    release  w <- w - eta (G + N) / (gamma n),      N of scale sigma C in every coordinate

The divisor is the expected batch size, as in Opacus; the number of records drawn is not revealed. A silo without
records takes the steps of a silo with one, of noise alone. Adding or
removing one record changes G by at most C in l2 norm, as stored (the grid of
:class:`~fedveil.privacy.bounds.Clip`), given what the other records drew and their gradients. Gradients are computed
in chunks whose shapes let no kernel round one by who else is there (:mod:`fedveil.local.shapes`); rows that fill a
chunk up repeat a record of it, and their gradients are dropped.

In a step every record of the silo draws its own words from privacy randomness: one for whether it joins and, for models
with dropout, one for its masks. They are independent of each other and of all data, so the words of the records that
stay have the same law whether or not another record is there, and the claim is about laws: that the words of a
*repeated* run shift with the rows does no harm. Masks that are a function of the row's number would: removing a record
gave the others new masks and moved G by many C. docs/theory/group-privacy.md has the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.errors import CompositionError
from fedveil.local.dropout import seed_names
from fedveil.local.memory import rows_in_memory
from fedveil.local.shapes import undivided, unit, whole
from fedveil.local.silo_sums import SiloSums
from fedveil.local.steps import LocalDpSgd
from fedveil.local.stillness import unchanged
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Progress, Sums, TrainJob, Watch
from fedveil.local.vectorized import BatchedGradients
from fedveil.privacy.bounds import Bound
from fedveil.privacy.rows import contribution_norms
from fedveil.randomness import BitSource, PrivacyRandomness

NoiseSampler: TypeAlias = Callable[[int, float, float, BitSource], Float64[np.ndarray, " d"]]
"""``noise(d, std, grid, source)``: d independent values of this standard deviation, multiples of ``grid``."""


@dataclass(frozen=True, kw_only=True)
class DpSgdTrainer:
    """Runs DP-SGD in every silo; implements :class:`~fedveil.local.trainer.Trainer` with a silo as a member.

    The bound of :meth:`sums` clips each record's gradient, not the silo's update: the update is private
    already, so it is weighted and summed as it is, and ``Sums.norms`` are norms of noisy updates.

    Args:
        task: model and loss; the loss must be a mean of terms of single records.
        local: rates, epochs and noise.
        noise: samples the noise law; called with standard deviation ``noise_multiplier * C``.
        privacy: where batches, dropout masks and noise come from.
        memory: bytes that the per-record gradients of a chunk may take.
        together: whether records are computed side by side (:func:`fedveil.local.choice.records_together`), or one at
            a time.

    Raises:
        CompositionError: a loss whose terms depend on several records (Cox): one record then has no gradient
            of its own.
    """

    name: ClassVar[str] = "dp-sgd"
    side_by_side: ClassVar[bool] = True
    generated: ClassVar[bool] = False

    task: Task
    local: LocalDpSgd
    noise: NoiseSampler
    privacy: PrivacyRandomness
    memory: int = 48 << 20
    together: bool = True

    def __post_init__(self) -> None:
        if not self.task.loss.separable:
            raise CompositionError(
                f"DP-SGD clips the gradient of each record, but the loss {self.task.loss.name} has no "
                "terms of single records; use a method that bounds contributions (uldp-avg, uldp-sgd)"
            )

    def at_round(self, number: int) -> DpSgdTrainer:
        """Return the same trainer in every round."""
        return self

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return each silo's weighted DP-SGD update; the job's bound is the clip of single records.

        The job's ``randomness`` is not used: everything that is drawn here is part of the guarantee.

        Raises:
            CompositionError: the bound clips nothing.
        """
        bound = job.bound
        if not bound.bounded or bound.order != 2:
            raise CompositionError("DP-SGD needs an l2 bound to clip the gradients of single records")
        with unchanged(self.task):
            return self._sums(job.on_device(), progress)

    def _sums(self, job: TrainJob, progress: Progress | None) -> Sums:
        bound = job.bound
        start, cohort, members, weights = job.start, job.cohort, job.members, job.weights
        silos = cohort.silos(members)
        plans = [self.local.plan(size) for size in cohort.sizes(members).tolist()]
        records = RecordSums(self.task, bound, cohort, self.memory if self.together else 0)
        total = torch.zeros(cohort.n_silos, self.task.dimension, dtype=torch.float64, device=cohort.device)
        norms = torch.zeros(len(members), dtype=torch.float64, device=cohort.device)
        to_do = sum(plan.steps for plan in plans)
        watch = Watch(progress, to_do)
        for i, (member, plan) in enumerate(zip(members.tolist(), plans, strict=True)):
            held = torch.from_numpy(cohort.groups.members(member))
            model = start
            for step in range(plan.steps):
                stream = (*job.path, int(silos[i]), step)
                joined = poisson(len(held), plan.rate, self.privacy.stream("dp-sgd batch", *stream))
                seeds = torch.zeros(len(held), dtype=torch.int64)
                if records.drops_out:
                    words = self.privacy.stream("dp-sgd masks", *stream).uint64(len(held))
                    seeds = torch.from_numpy(words.view(np.int64).copy())
                gradient = records.gradient_sum(model, held[joined], seeds[joined])
                if self.local.noise_multiplier > 0:
                    std = self.local.noise_multiplier * bound.norm
                    source = self.privacy.stream("dp-sgd noise", *stream)
                    noise = self.noise(self.task.dimension, std, bound.grid, source)
                    gradient = gradient + torch.from_numpy(noise).to(cohort.device)
                model = (
                    model - (self.local.learning_rate / (plan.rate * max(1, len(held))) * gradient).float()
                )
                watch.took(1)
            delta = (model - start)[None]
            norms[i] = contribution_norms(delta)[0]
            if not norms[i].isnan():
                total[silos[i]] += weights[i] * delta[0]
        return Sums(total=total, norms=norms, nonfinite=int(norms.isnan().sum()), steps=to_do)


class RecordSums:
    """Sums of clipped gradients of single records, in O(chunk · d) memory.

    Attributes:
        drops_out: whether the model has dropout, so that :meth:`gradient_sum` reads the seeds.
    """

    def __init__(self, task: Task, bound: Bound, cohort: Cohort, memory: int) -> None:
        self._gradients = BatchedGradients.of(task, cohort.device)
        self._bound, self._cohort = bound, cohort
        fitting = rows_in_memory(task, cohort, memory)
        self._rows = fitting // unit(1) * unit(1) or 1
        self.drops_out = bool(seed_names(task.model))

    def gradient_sum(
        self, model: Float32[Tensor, " d"], batch: Int64[Tensor, " n"], seeds: Int64[Tensor, " n"]
    ) -> Float64[Tensor, " d"]:
        """Return sum_i clip(grad loss_i(model)) over the records of a batch, exact on the bound's grid.

        Args:
            model: (d,) parameters.
            batch: rows of the cohort's table.
            seeds: of each record's dropout masks in this step; not read unless :attr:`drops_out`.
        """
        layout, device = self._gradients.layout, self._cohort.device
        sums = SiloSums(1, layout.dimension, self._bound, device)
        for first in range(0, len(batch), self._rows):
            rows = batch[first : first + self._rows]
            taken, slots = len(rows), 1 if self._rows == 1 else whole(len(rows), 1)
            rows = torch.cat([rows, rows[-1:].expand(slots - taken)])
            features, targets = self._cohort.batch(rows[:, None])
            mask = torch.ones(len(rows), 1, dtype=torch.bool, device=device)
            own = seeds[first : first + self._rows]
            own = torch.cat([own, own[-1:].expand(slots - taken)]).to(device)
            with undivided():
                slopes = self._gradients.at_one(layout.unflatten(model), features, targets, mask, own)
            flat = torch.cat([slope.reshape(slots, -1)[:taken] for slope in slopes.values()], dim=1)
            ones = torch.ones(taken, dtype=torch.float64, device=device)
            sums.add_(flat, ones, torch.zeros(taken, dtype=torch.int64, device=device))
        return sums.total()[0]


def poisson(n: int, rate: float, source: BitSource) -> Bool[Tensor, " n"]:
    """Draw which of n records join a batch: independently with probability ``rate``, to within 2^-64."""
    words = source.uint64(n)
    threshold = round(rate * 2**64)
    joined = np.ones(n, dtype=bool) if threshold >= 2**64 else words < np.uint64(threshold)
    return torch.from_numpy(joined)
