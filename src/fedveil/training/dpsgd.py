"""Run DP-SGD inside each silo (Abadi et al. 2016), as ULDP-GROUP does: private for single records.

One step on a silo's n records, with the bound C, the noise multiplier sigma and the sampling rate gamma:

    batch    every record joins independently with probability gamma
    masks    with dropout: every record has its own masks, from a 64-bit seed that is drawn for it in this step
    sum      G = sum over the batch of clip(gradient of its own loss, C)
    release  w <- w - eta (G + N) / (gamma n),      N of scale sigma C in every coordinate

The divisor is the expected batch size, as in Opacus, so the number of sampled records is not revealed. A silo without
records takes the steps of a silo with one record, of noise alone.

Sensitivity: given the random words and gradients of the other records, adding or removing one record changes G by at
most C in l2 norm, as stored (on the grid of :class:`~fedveil.privacy.bounds.Clip`). Gradients are computed in chunks
whose shapes prevent rounding from depending on the other records (:mod:`fedveil.training.shapes`). Rows that fill up
a chunk repeat one of its records, and their gradients are dropped. For small models, the silos of a simulation take
their steps in one batch, which costs little more than the steps of one silo. Each record is then paired with a copy
of its own silo's model.

Randomness: in a step, every record of the silo gets its own words from privacy randomness: one for whether it joins
and, for models with dropout, one for its masks. The words are independent of each other, from step to step (many
steps are drawn at once), and of all data. So the words of the remaining records have the same law whether or not
another record is present, and the claim is about laws. It does no harm that the words of a *repeated* run shift with
the rows. Masks that are a function of the row number would do harm: removing a record would give the others new masks
and change G by many C. docs/theory/group-privacy.md has the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.errors import CompositionError
from fedveil.privacy.bounds import Bound
from fedveil.privacy.row_norms import contribution_norms
from fedveil.randomness import BitSource, PrivacyRandomness
from fedveil.training.counters import seed_names
from fedveil.training.heap import keep_freed_memory
from fedveil.training.record_sums import SiloSums
from fedveil.training.shapes import round_up_slots, single_threaded, slot_multiple
from fedveil.training.state_leak_check import check_unchanged
from fedveil.training.steps import LocalDpSgd, PoissonSchedule, check_computed
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, Progress, ProgressMonitor, Sums, TrainJob, rows_in_memory
from fedveil.training.vectorized import BatchedGradients, without_fallback_warnings

NoiseSampler: TypeAlias = Callable[[int, float, float, BitSource], Float64[np.ndarray, " d"]]
"""``noise(d, std, grid, source)``: d independent values of this standard deviation, multiples of ``grid``."""

RECORD_MEMORY: Final = 48 << 20
"""Default of the bytes that the per-record gradients of a chunk may take."""
_SMALL: Final = 2**14
"""Largest number of parameters for which every record of a step has a copy of its silo's model."""
_DRAWN: Final = 2**16
"""Random numbers that are drawn in one call."""
_SILOS: Final = 64
"""Largest number of silos that take steps in one batch; each holds its drawn numbers, up to one or two megabytes."""


@dataclass(frozen=True, kw_only=True)
class DpSgdTrainer:
    """Trainer that runs DP-SGD in every silo.

    It implements :class:`~fedveil.training.trainer.Trainer`, with a silo as a member.

    The bound of :meth:`sums` clips each record's gradient, not the silo's update. The update is private already, so
    it is weighted and summed without another bound, and ``Sums.norms`` are norms of noisy updates.

    Args:
        task: model and loss; the loss must be a mean of terms of single records.
        local: rates, epochs and noise.
        noise: samples the noise law; called with standard deviation ``noise_multiplier * C``.
        privacy: source of batches, dropout masks and noise.
        memory: bytes that the per-record gradients of a chunk may take.
        together: whether several records are computed in one batch
            (:func:`fedveil.training.trainer_choice.can_vectorise_records`), or one at a time.

    Raises:
        CompositionError: a loss whose terms depend on several records (Cox), because one record then has no
            gradient of its own.
    """

    name: ClassVar[str] = "dp-sgd"
    side_by_side: ClassVar[bool] = True
    has_generated_kernels: ClassVar[bool] = False

    task: Task
    local: LocalDpSgd
    noise: NoiseSampler
    privacy: PrivacyRandomness
    memory: int = RECORD_MEMORY
    together: bool = True
    silos_at_once: int = _SILOS
    numbers_at_once: int = _DRAWN

    def __post_init__(self) -> None:
        check_computed(self.local)
        if not self.task.loss.separable:
            raise CompositionError(
                f"DP-SGD clips the gradient of each record, but the loss {self.task.loss.name} has no "
                "terms of single records; use a method that bounds contributions (uldp-avg, uldp-sgd)"
            )

    def at_round(self, number: int) -> DpSgdTrainer:
        """Return this trainer, which is the same in every round."""
        return self

    @keep_freed_memory()
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return each silo's weighted DP-SGD update; the job's bound clips single records.

        The job's ``randomness`` is not used, because all random numbers here are part of the guarantee and come from
        ``privacy``.

        Raises:
            CompositionError: a bound that clips nothing, or one that is not l2.
        """
        bound = job.bound
        if not bound.bounded or bound.order != 2:
            raise CompositionError("DP-SGD needs an l2 bound to clip the gradients of single records")
        with check_unchanged(self.task):
            return self._sums(job.on_device(), progress)

    def _sums(self, job: TrainJob, progress: Progress | None) -> Sums:
        cohort, members = job.cohort, job.members
        silos = cohort.silos(members)
        runs = [
            SiloRun(
                rows=torch.from_numpy(cohort.groups.members(member)),
                plan=self.local.plan(size),
                path=(*job.path, silo),
            )
            for member, size, silo in zip(
                members.tolist(), cohort.sizes(members).tolist(), silos.tolist(), strict=True
            )
        ]
        records = RecordSums(self.task, job.bound, cohort, self.memory if self.together else 0)
        total = torch.zeros(cohort.n_silos, self.task.dimension, dtype=torch.float64, device=cohort.device)
        norms = torch.zeros(len(members), dtype=torch.float64, device=cohort.device)
        to_do = sum(run.plan.steps for run in runs)
        watch = ProgressMonitor(progress, to_do)
        together = self.silos_at_once if records.side_by_side else 1
        for first in range(0, len(runs), together):
            deltas = self._updates(runs[first : first + together], job, records, watch)
            for i, delta in enumerate(deltas, first):
                norms[i] = contribution_norms(delta[None])[0]
                # A silo whose model diverged adds exactly zero; it is counted in `nonfinite`.
                if not norms[i].isnan():
                    total[silos[i]] += job.weights[i] * delta
        return Sums(total=total, norms=norms, nonfinite=int(norms.isnan().sum()), steps=to_do)

    def _updates(
        self, runs: Sequence[SiloRun], job: TrainJob, records: RecordSums, watch: ProgressMonitor
    ) -> Float32[Tensor, "m d"]:
        """Return the updates of these silos, whose steps are computed in one batch."""
        models = job.start.repeat(len(runs), 1)
        batches = [self._batches(run, drops_out=records.drops_out) for run in runs]
        noise = [self._noise(run, job.bound) for run in runs]
        for step in range(max(run.plan.steps for run in runs)):
            active = [i for i, run in enumerate(runs) if step < run.plan.steps]
            sums = records.gradient_sums(models[active], [next(batches[i]) for i in active])
            for i, gradient in zip(active, sums, strict=True):
                # w <- w - eta (G + N) / (gamma n): the divisor is the expected batch size, not the sampled one.
                rate = self.local.learning_rate / (runs[i].plan.rate * max(1, len(runs[i].rows)))
                models[i] -= (rate * (gradient + next(noise[i]).to(gradient.device))).float()
            watch.add_steps(len(active))
        return models - job.start

    def _batches(self, run: SiloRun, *, drops_out: bool) -> Iterator[RecordBatch]:
        """Yield the records that join each step of one silo."""
        count = len(run.rows)
        for first, steps in _blocks(run.plan.steps, count, self.numbers_at_once):
            stream = (*run.path, first)
            source = self.privacy.stream("dp-sgd batch", *stream)
            memberships = poisson(steps * count, run.plan.rate, source).view(steps, count)
            if not drops_out:
                yield from (RecordBatch(rows=run.rows[members]) for members in memberships)
                continue
            words = self.privacy.stream("dp-sgd masks", *stream).uint64(steps * count)
            masks = torch.from_numpy(words.view(np.int64).copy()).view(steps, count)
            for members, seeds in zip(memberships, masks, strict=True):
                yield RecordBatch(rows=run.rows[members], seeds=seeds[members])

    def _noise(self, run: SiloRun, bound: Bound) -> Iterator[Float64[Tensor, " d"]]:
        """Yield the (d,) noise of each step of one silo."""
        d, std = self.task.dimension, self.local.noise_multiplier * bound.norm
        for first, steps in _blocks(run.plan.steps, d, self.numbers_at_once):
            if std == 0:
                yield from torch.zeros(steps, d, dtype=torch.float64)
                continue
            source = self.privacy.stream("dp-sgd noise", *run.path, first)
            yield from torch.from_numpy(self.noise(steps * d, std, bound.grid, source)).view(steps, d)


def _blocks(steps: int, numbers: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first step, number of steps) of each block that is drawn in one call.

    A block has at most ``most`` numbers, or one step.
    """
    at_once = max(1, most // max(1, numbers))
    for first in range(0, steps, at_once):
        yield first, min(at_once, steps - first)


@dataclass(frozen=True, kw_only=True, eq=False)
class SiloRun:
    """The DP-SGD of one silo in one round.

    Args:
        rows: (n,) the silo's records, as rows of the cohort's table.
        plan: its number of steps and its sampling rate.
        path: names its randomness in this round.
    """

    rows: Int64[Tensor, " n"]
    plan: PoissonSchedule
    path: tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordBatch:
    """The records that joined a step of one silo.

    Args:
        rows: (n,) rows of the cohort's table.
        seeds: (n,) seed of each record's dropout masks in this step; None for a model without dropout.
    """

    rows: Int64[Tensor, " n"]
    seeds: Int64[Tensor, " n"] | None = None


class RecordSums:
    """Sums of clipped gradients of single records, in O(chunk · d) memory.

    Attributes:
        drops_out: whether the model has dropout, so that :meth:`gradient_sums` reads the seeds.
        side_by_side: whether silos take their steps in one batch, each record with a copy of its silo's model.
            For small models a step costs the same for one silo as for many. The dimension alone decides.
    """

    def __init__(self, task: Task, bound: Bound, cohort: Cohort, memory: int) -> None:
        self._gradients = BatchedGradients.for_task(task, cohort.device)
        self._bound, self._cohort = bound, cohort
        self._rows = record_slots(task, cohort, memory)
        self.drops_out = bool(seed_names(task.model))
        self.side_by_side = self._rows > 1 and task.dimension <= _SMALL

    def gradient_sums(
        self, models: Float32[Tensor, "m d"], batches: Sequence[RecordBatch]
    ) -> Float64[Tensor, "m d"]:
        """Return sum_i clip(grad loss_i(model)) over the records of every batch, exact on the bound's grid.

        Args:
            models: (m, d) parameters of the silos.
            batches: batches of the silos, in the same order; exactly one unless ``side_by_side``.
        """
        layout, device = self._gradients.layout, self._cohort.device
        sums = SiloSums(len(models), layout.dimension, self._bound, device)
        all_rows = torch.cat([batch.rows for batch in batches])
        drawn = [batch.seeds for batch in batches if batch.seeds is not None]
        all_seeds = torch.cat(drawn) if drawn else torch.zeros_like(all_rows)
        counts = torch.tensor([len(batch.rows) for batch in batches])
        owners = torch.arange(len(batches)).repeat_interleave(counts)
        for first in range(0, len(all_rows), self._rows):
            chunk = slice(first, first + self._rows)
            n_rows = len(all_rows[chunk])
            # The last chunk is filled up to a multiple, so that its kernels round as those of full chunks do.
            slots = 1 if self._rows == 1 else round_up_slots(n_rows, 1)
            rows, own, seeds = (_filled(values[chunk], slots) for values in (all_rows, owners, all_seeds))
            features, targets = self._cohort.batch(rows[:, None])
            batch = (
                features,
                targets,
                torch.ones(slots, 1, dtype=torch.bool, device=device),
                seeds.to(device),
            )
            with single_threaded(), without_fallback_warnings():
                if self.side_by_side:
                    slopes = self._gradients.at_own_models(layout.unflatten(models[own.to(device)]), *batch)
                else:
                    slopes = self._gradients.at_shared_model(layout.unflatten(models[0]), *batch)
            flat = torch.cat([slope.reshape(slots, -1)[:n_rows] for slope in slopes.values()], dim=1)
            ones = torch.ones(n_rows, dtype=torch.float64, device=device)
            sums.add_(flat, ones, own[:n_rows].to(device))
        return sums.total()


def record_slots(task: Task, cohort: Cohort, memory: int) -> int:
    """Return the largest number of per-record gradients in one batch; 1 means one at a time."""
    return rows_in_memory(task, cohort, memory) // slot_multiple(1) * slot_multiple(1) or 1


def _filled(values: Int64[Tensor, " n"], slots: int) -> Int64[Tensor, " slots"]:
    """Return the values, with the last one repeated up to this number of slots."""
    return torch.cat([values, values[-1:].expand(slots - len(values))])


def poisson(n: int, rate: float, source: BitSource) -> Bool[Tensor, " n"]:
    """Sample the records that join a batch: each independently with probability ``rate``, to within 2^-64.

    Args:
        n: number of records.
        rate: the probability.
        source: source of uniform 64-bit words; a record joins if its word is below rate * 2^64.
    """
    words = source.uint64(n)
    threshold = round(rate * 2**64)
    # uint64 cannot hold 2^64, the threshold of rate 1.
    mask = np.ones(n, dtype=bool) if threshold >= 2**64 else words < np.uint64(threshold)
    return torch.from_numpy(mask)
