"""Define the interface of all trainers: a cohort of contributions in, one bounded sum per silo out.

A method defines which records form a contribution, the local steps (:mod:`fedveil.training.steps`), the bound and the
weights. With Delta_i the update of member i, a trainer returns

    total[s] = sum over members i in silo s of weights[i] * clip(Delta_i)

and never a single update. All trainers compute the same sums, up to float32 rounding inside the training itself.
``LoopTrainer`` is the readable one, ``VmapTrainer`` trains thousands of contributions at once, and ``GramTrainer`` is
for linear models.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor
from torch.func import functional_call

from fedveil.data.records import Affine, Groups, Records
from fedveil.privacy.bounds import Bound
from fedveil.randomness import ExperimentRandomness
from fedveil.training.counters import contribution_seeds
from fedveil.training.steps import LocalStep, as_sgd
from fedveil.training.task import Task

Path: TypeAlias = tuple[str | int, ...]
Progress: TypeAlias = Callable[[int, int], None]
"""``progress(done, total)`` in local steps; trainers call it between chunks, and once a second within a chunk."""

_PROGRESS_SECONDS: Final = 1.0


class ProgressMonitor:
    """Reporter of training progress: after every chunk, and at most once a second within one.

    The observer may raise an exception to end the training.

    Args:
        progress: the observer; None if nobody observes.
        steps: number of gradient steps over all contributions.
    """

    def __init__(self, progress: Progress | None, steps: int) -> None:
        self._progress, self._done, self._steps = progress, 0, steps
        self._next = monotonic() + _PROGRESS_SECONDS

    def add_steps(self, steps: int) -> None:
        """Report the end of a chunk of this many steps."""
        self._done += steps
        if self._progress is not None:
            self._progress(self._done, self._steps)

    def check(self) -> None:
        """Report progress at most once a second.

        Trainers call this before every gradient step, so that the observer can stop a long chunk.
        """
        if self._progress is not None and monotonic() >= self._next:
            self._next = monotonic() + _PROGRESS_SECONDS
            self._progress(self._done, self._steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cohort:
    """The records of one round, as the trainers read them.

    Args:
        features: (n, ...) stored features (float32 or uint8), on any device; may be a memory-mapped table.
        targets: (n, ...) targets, on the device of the features.
        scale: the affine map that makes features float32, applied to one batch at a time.
        groups: the records of each contribution, with its silo and user.
        n_silos: |S|; the sums have one row per silo.
        device: the device that computes.
        rows: (m,) index of the row of the sums that each contribution is added to; None selects the row of its silo.
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
        """Wrap a table without copying it (a CUDA device receives one copy).

        An empty table gets one record of zeros that belongs to no contribution: shapes are read from the first
        record.
        """
        features, targets = records.features, records.targets
        if not len(records):
            # Shapes are read from the first record, so an empty table needs one. It is in no group and is never
            # trained on.
            features, targets = (
                np.zeros((1, *column.shape[1:]), column.dtype) for column in (features, targets)
            )
        return cls(
            features=_view_as_tensor(features).to(device),
            targets=_view_as_tensor(targets).to(device),
            scale=scale,
            groups=groups,
            n_silos=n_silos,
            device=device,
        )

    def sizes(self, members: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Return the number of records of each member, as a CPU tensor."""
        return torch.from_numpy(self.groups.size[members.cpu().numpy()])

    @property
    def sum_rows(self) -> Int64[np.ndarray, " m"]:
        """Index of the row of the sums that each contribution is added to."""
        return self.groups.silo.astype(np.int64) if self.rows is None else self.rows

    def silos(self, members: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        """Return the row of the sums of each member (by default its silo), on the device."""
        return torch.from_numpy(self.sum_rows[members.cpu().numpy()]).to(self.device)

    def per_contribution(self, members: Int64[Tensor, " m"]) -> Cohort:
        """Return this cohort with one row of the sums per member, so that each sum is a single contribution.

        Batches and dropout masks still depend on the silo of the contribution, as before.
        """
        rows = np.full(len(self.groups), -1)
        rows[members.cpu().numpy()] = np.arange(len(members))
        return replace(self, n_silos=len(members), rows=rows)

    def batch(self, rows: Int64[Tensor, "*batch"]) -> tuple[Tensor, Tensor]:
        """Return the float32 features and the targets of these rows, each (*batch, ...), on the device."""
        targets = self.targets.index_select(0, rows.reshape(-1).to(self.targets.device)).to(self.device)
        return self.features_of(rows), targets.view(*rows.shape, *targets.shape[1:])

    def features_of(self, rows: Int64[Tensor, "*batch"]) -> Tensor:
        """Return the float32 features of these rows, (*batch, ...), on the device."""
        flat = rows.reshape(-1).to(self.features.device)
        # The table keeps its stored dtype: only one batch at a time is expanded to float32.
        features = self.features.index_select(0, flat).to(self.device)
        if features.dtype != torch.float32:
            features = features.to(torch.float32).mul_(self.scale.factor).add_(self.scale.shift)
        elif self.scale != Affine():
            features = features.mul_(self.scale.factor).add_(self.scale.shift)
        return features.view(*rows.shape, *features.shape[1:])


def _view_as_tensor(array: np.ndarray) -> Tensor:
    """View an array as a tensor without copying it.

    A read-only table may be viewed too, because trainers never write to it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """The result of one round of local training.

    Args:
        total: (silos, d) float64, the weighted, bounded sum of each silo's updates.
        norms: (m,) l2 norm of each member's update before clipping; NaN if the update is not finite.
        nonfinite: number of members whose update had a NaN or an infinity; such an update counts as zero.
        steps: gradient steps taken, over all members.
    """

    total: Float64[Tensor, "silos d"]
    norms: Float64[Tensor, " m"]
    nonfinite: int
    steps: int

    def with_clip_marks(self, job: TrainJob) -> Sums:
        """Append the extra coordinates of the job's bound to the sums of each silo.

        A bound with an adaptive clip norm counts the clipped updates in them (Andrew et al. 2021). They are whole
        numbers of grid units, so the sums stay exact.
        """
        if not job.bound.extra:
            return self
        marks = job.bound.marks(self.norms.cpu(), job.weights.cpu())
        mark_sums = torch.zeros(len(self.total), job.bound.extra, dtype=torch.float64)
        mark_sums.index_add_(0, job.cohort.silos(job.members).cpu(), marks)
        return replace(self, total=torch.cat([self.total, mark_sums.to(self.total.device)], dim=1))


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Input of a trainer: the contributions, the initial model, the weights and the bound.

    Args:
        start: (d,) the model w_t.
        cohort: the records.
        members: (m,) indices into ``cohort.groups`` of the contributions that take part; each at most once.
        weights: (m,) the weight of each member.
        bound: the bound that is enforced on an update before it is weighted.
        randomness: randomness of the experiment; batches and dropout masks of a contribution depend only on it, on
            ``path`` and on the contribution's (silo, user). They do not change when other contributions join or leave.
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
        """One int64 seed per member, for its batches and dropout masks."""
        return contribution_seeds(self.cohort.groups, self.members, self.randomness, self.path)

    def on_device(self) -> TrainJob:
        """Return the job with its model and weights on the device of the cohort."""
        device = self.cohort.device
        return replace(
            self,
            start=self.start.to(device),
            weights=self.weights.to(device),
        )

    def subset(self, chosen: Int64[Tensor, " k"]) -> TrainJob:
        """Return the job for the members at these positions."""
        return replace(self, members=self.members[chosen], weights=self.weights[chosen])


@runtime_checkable
class Trainer(Protocol):
    """Computes the bounded sums of a cohort; the module docstring states the contract."""

    @property
    def name(self) -> str:
        """Value of ``trainer.name`` that selects this trainer in an experiment."""
        ...

    def at_round(self, number: int) -> Trainer:
        """Return the trainer of round 1, 2, ..., with the learning rate of that round."""
        ...

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Train every member from the start and return each silo's sum of bounded, weighted updates.

        Args:
            job: the contributions and the model that they start from.
            progress: called between chunks, and once a second within a chunk.

        Guarantees: a contribution without records, or with an update that is not finite, adds exactly zero.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PartitionedTrainer(ABC):
    """A trainer whose members train independently, so that processes can divide them.

    Args:
        task: model and loss.
        local: the local steps of each contribution.

    Attributes:
        name: value of ``trainer.name`` in an experiment.
        side_by_side: whether one kernel computes several contributions at once, so that its rounding could depend
            on the other contributions.
    """

    name: ClassVar[str]
    side_by_side: ClassVar[bool] = True

    task: Task
    local: LocalStep

    def at_round(self, number: int) -> PartitionedTrainer:
        """Return the trainer of round 1, 2, ..., with the learning rate of that round."""
        local = self.local.at_round(number)
        return self if local is self.local else replace(self, local=local)

    def configured(self, *, memory: int | None = None, compile: bool = False) -> PartitionedTrainer:
        """Return the trainer with these options; a trainer without an option ignores it.

        Args:
            memory: bytes that a chunk may take; None keeps the trainer's default.
            compile: whether gradients are compiled.
        """
        return self

    @property
    def has_generated_kernels(self) -> bool:
        """Return whether the trainer compiles kernels of its own."""
        return False

    def partition(self, job: TrainJob, rank: int, world: int) -> Int64[Tensor, " share"]:
        """Return the positions of the members that process ``rank`` of ``world`` trains.

        Positions are ascending.

        The processes round alike. Members are dealt by number of steps, largest first. Sums are exact, so the
        division does not change them. Processes on several machines may round differently; they use
        :func:`partition_by_key`, where the share of a contribution does not depend on the other contributions.
        """
        # Dealing from a list sorted by steps gives every process nearly the same number of steps.
        steps = steps_per_member(self.local, job.cohort, job.members)
        return steps.argsort(descending=True, stable=True)[rank::world].sort().values

    @abstractmethod
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return the bounded sums; see :meth:`Trainer.sums`."""


def partition_by_key(job: TrainJob, rank: int, world: int) -> Int64[Tensor, " share"]:
    """Return the positions of the members that process ``rank`` of ``world`` trains, by a hash.

    Positions are ascending.

    The hash covers silo and user and is the same in all rounds. The process that trains a contribution therefore
    never depends on the other contributions, even if processes round differently.
    """
    words = contribution_seeds(job.cohort.groups, job.members, job.randomness, ("processes",))
    return (words.remainder(world) == rank).nonzero().flatten()


def steps_per_member(local: LocalStep, cohort: Cohort, members: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """Return the number of gradient steps of each member; 0 without records.

    The number is epochs times batches, or the step limit tau if that is smaller.
    """
    sgd = as_sgd(local)
    sizes = cohort.sizes(members)
    batches = sizes.clamp(max=1) if sgd.batch_size is None else -(-sizes // sgd.batch_size)
    steps = sgd.epochs * batches
    return steps if sgd.steps is None else steps.clamp(max=sgd.steps)


# --- memory -------------------------------------------------------------------------------------------------
# Limit how many records and models are computed at once, from public facts alone.
#
# The facts are the shape of a record and the layers of the model. Limits that depend on private records would change
# the rounding of other users' updates.


LARGEST_BATCH: Final = 4 << 30
"""Default of the bytes that a separately trained batch may take; graphics cards have 8 GiB and more."""


def records_at_once(task: Task, cohort: Cohort, memory: int) -> int:
    """Return the number of records of one batch whose gradient fits into ``memory`` bytes, at least 1."""
    return max(1, memory // (4 * floats_per_record(task, cohort)))


def rows_in_memory(task: Task, cohort: Cohort, memory: int) -> int:
    """Return the number of one-record contributions, at least 1, that fit into ``memory`` bytes."""
    # 4 bytes per number; parameters, gradients and a temporary for each are 4 numbers per parameter.
    return max(1, memory // (4 * (4 * task.dimension + floats_per_record(task, cohort))))


def floats_per_record(task: Task, cohort: Cohort) -> int:
    """Return an estimate of the float32 numbers that one record takes while its gradient is computed.

    It counts the record's features and, twice, the outputs of the layers: once for the forward pass, once for the
    backward pass.
    """
    n_outputs = 0

    def count(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal n_outputs
        outputs = output if isinstance(output, tuple) else (output,)
        n_outputs += sum(tensor.numel() for tensor in outputs if isinstance(tensor, Tensor))

    hooks = [
        layer.register_forward_hook(count) for layer in task.model.modules() if not any(layer.children())
    ]
    device = task.initial().device
    record = torch.zeros(1, *cohort.features.shape[1:], dtype=torch.float32, device=device)
    try:
        with torch.no_grad():
            functional_call(task.model, task.constants(device), (record,))
    finally:
        for hook in hooks:
            hook.remove()
    return int(record.numel() + 2 * n_outputs)
