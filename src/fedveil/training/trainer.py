"""The interface between methods and training: a cohort of contributions in, one bounded sum per silo out.

A method says which records form a contribution, what each computes (:mod:`fedveil.training.steps`), how it is
bounded and weighted; a trainer returns

    total[s] = sum over members i in silo s of weights[i] * clip(Delta_i)

and never the single updates. Every trainer computes the same sums (up to float32 rounding inside the training itself):
``LoopTrainer`` readably, ``VmapTrainer`` thousands of contributions at once, ``GramTrainer`` for linear models.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.data.records import Affine, Groups, Records
from fedveil.privacy.bounds import Bound
from fedveil.randomness import ExperimentRandomness
from fedveil.training.counters import contribution_seeds
from fedveil.training.steps import LocalStep, as_sgd
from fedveil.training.task import Task

Path: TypeAlias = tuple[str | int, ...]
Progress: TypeAlias = Callable[[int, int], None]
"""``progress(done, total)`` in local steps, called between chunks of contributions, and every second within one."""

_SECOND: Final = 1.0


class ProgressMonitor:
    """Says how far training is: after every chunk, and once a second within one, so that who watches can end it.

    Args:
        progress: who watches; None: nobody.
        steps: of all contributions.
    """

    def __init__(self, progress: Progress | None, steps: int) -> None:
        self._progress, self._done, self._steps = progress, 0, steps
        self._next = monotonic() + _SECOND

    def add_steps(self, steps: int) -> None:
        """Note that a chunk of so many steps has ended."""
        self._done += steps
        if self._progress is not None:
            self._progress(self._done, self._steps)

    def check(self) -> None:
        """Be called within a chunk, before every step."""
        if self._progress is not None and monotonic() >= self._next:
            self._next = monotonic() + _SECOND
            self._progress(self._done, self._steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cohort:
    """The records of one round, as the trainers read them.

    Args:
        features: (n, ...) stored features (float32 or uint8), on any device; may be a memory-mapped table.
        targets: (n, ...) targets, on the device of the features.
        scale: the affine map that makes features float32, one batch at a time.
        groups: which records each contribution holds, and its silo and user.
        n_silos: |S|; the sums have one row per silo.
        device: where to compute.
        rows: (m,) the row of the sums that each contribution goes into; None: that of its silo.
    """

    features: Tensor
    targets: Tensor
    scale: Affine
    groups: Groups
    n_silos: int
    device: torch.device
    rows: Int64[np.ndarray, " m"] | None = None

    @classmethod
    def from_records(
        cls, records: Records, *, groups: Groups, n_silos: int, scale: Affine, device: torch.device
    ) -> Cohort:
        """Wrap a table without copying it (on a CUDA device it is moved there once).

        A table without any record gets one of zeros that belongs to nobody: shapes are read off the first.
        """
        features, targets = records.features, records.targets
        if not len(records):
            features, targets = (
                np.zeros((1, *column.shape[1:]), column.dtype) for column in (features, targets)
            )
        return cls(
            features=_shared(features).to(device),
            targets=_shared(targets).to(device),
            scale=scale,
            groups=groups,
            n_silos=n_silos,
            device=device,
        )

    def sizes(self, members: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Return how many records each member holds (on the CPU)."""
        return torch.from_numpy(self.groups.size[members.cpu().numpy()])

    @property
    def sum_rows(self) -> Int64[np.ndarray, " m"]:
        """The row of the sums that each contribution goes into."""
        return self.groups.silo.astype(np.int64) if self.rows is None else self.rows

    def silos(self, members: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Return the row of the sums of each member, on the device: its silo."""
        return torch.from_numpy(self.sum_rows[members.cpu().numpy()]).to(self.device)

    def per_contribution(self, members: Int64[Tensor, " m"]) -> Cohort:
        """Return the same cohort with a row of the sums for each of these members: their sums are contributions.

        Batches and dropout are those of the silo that a contribution lies in, as before.
        """
        rows = np.full(len(self.groups), -1)
        rows[members.cpu().numpy()] = np.arange(len(members))
        return replace(self, n_silos=len(members), rows=rows)

    def batch(self, rows: Int64[Tensor, "*batch"]) -> tuple[Tensor, Tensor]:
        """Return the float32 features and the targets of these rows, (*batch, ...) each, on the device."""
        targets = self.targets.index_select(0, rows.reshape(-1).to(self.targets.device)).to(self.device)
        return self.features_of(rows), targets.view(*rows.shape, *targets.shape[1:])

    def features_of(self, rows: Int64[Tensor, "*batch"]) -> Tensor:
        """Return the float32 features of these rows, (*batch, ...), on the device."""
        flat = rows.reshape(-1).to(self.features.device)
        features = self.features.index_select(0, flat).to(self.device)
        if features.dtype != torch.float32:
            features = features.to(torch.float32).mul_(self.scale.factor).add_(self.scale.shift)
        elif self.scale != Affine():
            features = features.mul_(self.scale.factor).add_(self.scale.shift)
        return features.view(*rows.shape, *features.shape[1:])


def _shared(array: np.ndarray) -> Tensor:
    """View an array as a tensor; a read-only table may be viewed too, because trainers never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """What a round of local training releases to the next stage.

    Args:
        total: (silos, d) float64, the weighted, bounded sum of each silo's updates.
        norms: (m,) l2 norm of each member's update before clipping; NaN where it was not finite.
        nonfinite: members whose update had a NaN or an infinity and counted as zero.
        steps: gradient steps taken, over all members.
    """

    total: Float64[Tensor, "silos d"]
    norms: Float64[Tensor, " m"]
    nonfinite: int
    steps: int

    def with_clip_marks(self, job: TrainJob) -> Sums:
        """Return the sums with what the job's bound adds beside them, in whole numbers of its grid: they stay exact."""
        if not job.bound.extra:
            return self
        marks = job.bound.marks(self.norms.cpu(), job.weights.cpu())
        beside = torch.zeros(len(self.total), job.bound.extra, dtype=torch.float64)
        beside.index_add_(0, job.cohort.silos(job.members).cpu(), marks)
        return replace(self, total=torch.cat([self.total, beside.to(self.total.device)], dim=1))


@dataclass(frozen=True, eq=False)
class TrainJob:
    """What a trainer is asked for: which contributions train from which model, and how they enter the sums.

    Args:
        start: (d,) the model w_t.
        cohort: the records.
        members: (m,) indices into ``cohort.groups`` of the contributions that take part; each at most once.
        weights: (m,) the weight of each member.
        bound: how an update is bounded before it is weighted.
        randomness: of the experiment; batches and dropout of a contribution depend on it, on ``path`` and on the
            contribution's (silo, user) alone, so they do not change when others join or leave.
        path: names this round's randomness, for instance ``("round", 3)``.
    """

    start: Float32[Tensor, " d"]
    cohort: Cohort
    members: Int64[Tensor, " m"]
    weights: Float64[Tensor, " m"]
    bound: Bound
    randomness: ExperimentRandomness
    path: Path

    def per_contribution(self) -> TrainJob:
        """Return the job whose sums are its contributions, one row each."""
        return replace(self, cohort=self.cohort.per_contribution(self.members))

    @property
    def seeds(self) -> Int64[Tensor, " m"]:
        """Return one seed per member, for its batches and dropout."""
        return contribution_seeds(self.cohort.groups, self.members, self.randomness, self.path)

    def on_device(self) -> TrainJob:
        """Return the job with model and weights on the device of the cohort."""
        device = self.cohort.device
        return replace(self, start=self.start.to(device), weights=self.weights.to(device))

    def subset(self, chosen: Int64[Tensor, " k"]) -> TrainJob:
        """Return the job for some of the members, by their positions."""
        return replace(self, members=self.members[chosen], weights=self.weights[chosen])


@runtime_checkable
class Trainer(Protocol):
    """Computes the bounded sums of a cohort; see the module's text for the contract."""

    @property
    def name(self) -> str:
        """What people call it: as ``trainer.name`` in an experiment."""
        ...

    def at_round(self, number: int) -> Trainer:
        """Return the trainer of round 1, 2, ...: with that round's learning rate."""
        ...

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Train every member from the start and return the sum of the bounded, weighted updates of each silo.

        Args:
            job: what is asked for.
            progress: called between chunks, and every second within one.

        Guarantees: a contribution without records, or with an update that is not finite, adds exactly zero.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PartitionedTrainer(ABC):
    """A trainer whose members train by themselves, so that processes can share them.

    Args:
        task: model and loss.
        local: what each contribution computes.

    Attributes:
        name: as ``trainer.name`` in an experiment.
        side_by_side: whether several contributions are computed at once, by kernels that could tell.
    """

    name: ClassVar[str]
    side_by_side: ClassVar[bool] = True

    task: Task
    local: LocalStep

    def at_round(self, number: int) -> PartitionedTrainer:
        """Return the trainer of round 1, 2, ...: with that round's learning rate."""
        local = self.local.at_round(number)
        return self if local is self.local else replace(self, local=local)

    def configured(self, *, memory: int | None = None, compile: bool = False) -> PartitionedTrainer:
        """Return the trainer with a chunk's memory in bytes, and its gradients compiled or not, where it has such."""
        return self

    @property
    def has_generated_kernels(self) -> bool:
        """Whether kernels are compiled for it."""
        return False

    def partition(self, job: TrainJob, rank: int, world: int) -> Int64[Tensor, " share"]:
        """Return the positions among the members that one of ``world`` alike processes trains, ascending.

        By steps, largest first: sums are exact, whoever adds them. Processes on several machines may round unlike, so
        there it is :func:`partition_by_key`: whose share an update is in must not depend on who else takes part.
        """
        steps = steps_per_member(self.local, job.cohort, job.members)
        return steps.argsort(descending=True, stable=True)[rank::world].sort().values

    @abstractmethod
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return the bounded sums; see :meth:`Trainer.sums`."""


def partition_by_key(job: TrainJob, rank: int, world: int) -> Int64[Tensor, " share"]:
    """Return the positions among the members that one of ``world`` processes trains, ascending.

    By a hash of silo and user, the same in all rounds: whose share a contribution is in never depends on who else takes
    part.
    """
    words = contribution_seeds(job.cohort.groups, job.members, job.randomness, ("processes",))
    return (words.remainder(world) == rank).nonzero().flatten()


def steps_per_member(local: LocalStep, cohort: Cohort, members: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """Return how many gradient steps each member takes: epochs times batches or the limit, 0 without records."""
    sgd = as_sgd(local)
    sizes = cohort.sizes(members)
    batches = sizes.clamp(max=1) if sgd.batch_size is None else -(-sizes // sgd.batch_size)
    taken = sgd.epochs * batches
    return taken if sgd.steps is None else taken.clamp(max=sgd.steps)
