"""Contributions that are no update of the model: bounded means of a vector that each record adds.

Methods such as ``newton`` and ``boosted-trees`` sum statistics of records instead of updates. Such a local stage names
the length of its messages, which is not the number of the model's parameters, and computes the vectors of records.
Bounds, weights, channels, protections and ledgers treat the sums like any others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor

from fedveil.privacy.bounds import Bound
from fedveil.stage import Source
from fedveil.training.shapes import single_threaded
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, Progress, ProgressMonitor, Sums, TrainJob

# --- sums of contributions ----------------------------------------------------------------------------------
# Accumulate the bounded sum of each silo's contributions; every trainer adds its updates here.


_BLOCK: Final = 1 << 17  # numbers that are added at a time: they stay in a core's cache


class SiloSums:
    """Bounded sums of updates per silo, in O(silos · d) memory.

    The bound converts rows to whole numbers of grid units. Up to ``bound.exact_rows`` rows of one silo are added in
    float32, which is exact, and these sums in float64, which is exact too. With a
    :class:`~fedveil.privacy.bounds.Clip` or ``ClipL1``, the totals therefore do not depend on the order or the chunks
    in which updates arrive. Rows are added, never multiplied by a matrix: a product may run in TensorFloat-32 or
    bfloat16 (``torch.set_float32_matmul_precision``, or a flag of a backend), whose significands do not hold these
    whole numbers.

    Args:
        n_silos: number of rows of the sums.
        dimension: d.
        bound: the bound that is enforced on each update.
        device: device of the sums.
    """

    def __init__(self, n_silos: int, dimension: int, bound: Bound, device: torch.device) -> None:
        self._bound = bound
        self._units = torch.zeros(n_silos, dimension, dtype=torch.float64, device=device)
        self._block = torch.empty(min(dimension, _BLOCK), dtype=torch.float64, device=device)

    def add_(
        self,
        deltas: Float32[Tensor, "b d"],
        weights: Float64[Tensor, " b"],
        silos: Int64[Tensor, " b"],
    ) -> Float64[Tensor, " b"]:
        """Bound the updates in place, add them to their silos, and return their norms before the bound.

        Args:
            deltas: (b, d) updates; overwritten.
            weights: (b,) weight of each update.
            silos: (b,) row of the sums of each update.
        """
        with single_threaded():  # threads would divide a single long row, and its norm would round by the cut
            norms = self._bound.norms(deltas)
        units = self._bound.quantize_(deltas, norms, weights)
        together = self._bound.exact_rows
        # Under a clip, a row holds at most 2^units_bits grid units per coordinate. So exact_rows of them sum to at
        # most 2^24, the limit up to which float32 holds every whole number.
        for rows, owners in zip(torch.split(units, together), torch.split(silos, together), strict=True):
            present, local = torch.unique(owners, return_inverse=True)
            if len(present) == 1:
                # In place and in blocks: an index by a tensor, and a sum of two types, would each copy d numbers. The
                # float64 copies of all blocks use the same memory.
                row = rows[0] if len(rows) == 1 else rows.sum(0)
                for block, part in zip(
                    torch.split(self._units[int(present)], _BLOCK), torch.split(row, _BLOCK), strict=True
                ):
                    block.add_(self._block[: len(part)].copy_(part))
            else:
                sums = torch.zeros(len(present), rows.shape[1], dtype=torch.float32, device=rows.device)
                self._units[present] += sums.index_add_(0, local, rows)
        return norms

    def total(self) -> Float64[Tensor, "silos d"]:
        """Return the sums in the unit of the updates, in the memory of the sums: nothing can be added after it."""
        return self._units.mul_(self._bound.grid)


# --- sums of records ----------------------------------------------------------------------------------------


_ELEMENTS: Final = 1 << 21
"""Numbers of the records' vectors that are in memory at a time: 16 MiB."""

SourceT = TypeVar("SourceT", bound="RecordSums")


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordBatch:
    """Records of some contributions, contribution by contribution.

    Attributes:
        records: (n,) row of each record in the table of the cohort.
        features: (n, p) float64 features.
        targets: (n, ...) targets.
        first: (m,) position of the first record of each contribution; each has at least one.
    """

    records: Int64[np.ndarray, " n"]
    features: Float64[np.ndarray, "n p"]
    targets: Shaped[np.ndarray, "n *target"]
    first: Int64[np.ndarray, " m"]

    @property
    def owners(self) -> Int64[np.ndarray, " n"]:
        """Number of the contribution of each record, from 0."""
        sizes = np.diff(self.first, append=len(self.records))
        return np.repeat(np.arange(len(self.first)), sizes)


class RecordVectors(ABC):
    """The vectors of records in one round, in float64.

    Guarantee: what a contribution adds is computed from its own records and public numbers alone, bit for bit: every
    operation acts on one record, or on the records of one contribution in their order.

    Attributes:
        width: number of leading coordinates of a contribution that may differ from 0.
        length: length of a contribution.
    """

    width: int
    length: int

    @abstractmethod
    def sums(self, start: Float64[np.ndarray, " d"], batch: RecordBatch) -> Float64[np.ndarray, "m width"]:
        """Return each contribution's sum of vectors at the model ``start``; every vector's norm is within the bound."""


@dataclass(frozen=True, kw_only=True)
class RecordSums(Source):
    """Local stage whose contribution is the mean over records of a vector v(r), instead of an update.

    The bound of the method is enforced on every contribution. If each |v(r)| is within the bound, it changes nothing:
    a mean of vectors in a ball lies in the ball.

    Attributes:
        sends: kind of sums, which the server's step must read.
        round_number: the round whose sums are computed.
    """

    sums_records: ClassVar[bool] = True
    own_noise: ClassVar[bool] = False
    one_gradient: ClassVar[bool] = False

    round_number: int = 1

    def at_round(self: SourceT, number: int) -> SourceT:
        """Return the stage of round 1, 2, ...."""
        return replace(self, round_number=number)

    @abstractmethod
    def vectors(self, task: Task, cache: dict[str, Any] | None = None) -> RecordVectors:
        """Return the vectors of records in this stage's round, after checking that the model has this stage's form.

        Args:
            task: model and loss.
            cache: what a trainer keeps from round to round for one table of records; None: nothing.

        Raises:
            ModelError: a model or a loss of another form.
        """

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse stages that need an update of the model."""
        if method.denoiser.changes:
            yield "a denoiser estimates a mean update, and this method sums statistics of records"
        if method.protection.divides:
            yield "partial encryption divides an update by its parameters, and this method sums statistics of records"
        if method.contribution.per != "pair":
            yield "statistics of records are summed by (silo, user) pair"


@dataclass(frozen=True, kw_only=True)
class RecordSumsTrainer:
    """Trainer that sums bounded means of record vectors; implements :class:`~fedveil.training.trainer.Trainer`.

    Args:
        task: model and loss.
        local: the vectors of records.
    """

    name: ClassVar[str] = "record-sums"
    side_by_side: ClassVar[bool] = False
    has_generated_kernels: ClassVar[bool] = False

    task: Task
    local: RecordSums
    # Shared by the trainers of all rounds: the table of the last sums, and what its vectors keep from round to round.
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def at_round(self, number: int) -> RecordSumsTrainer:
        """Return the trainer of round 1, 2, ...."""
        return replace(self, local=self.local.at_round(number))

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return each silo's sum of bounded, weighted means; see :meth:`fedveil.training.trainer.Trainer.sums`."""
        cohort, members = job.cohort, job.members.cpu()
        if self._kept.get("table") is not cohort.features:
            self._kept.update(table=cohort.features, values={})
        vectors = self.local.vectors(self.task, self._kept["values"])
        start = job.start.cpu().double().numpy()
        sums = SiloSums(cohort.n_silos, vectors.width, job.bound, torch.device("cpu"))
        norms = torch.zeros(len(members), dtype=torch.float64)
        silos, weights = cohort.silos(members).cpu(), job.weights.cpu()
        watch = ProgressMonitor(progress, len(members))

        def summed(
            records: Int64[np.ndarray, " n"], first: Int64[np.ndarray, " m"]
        ) -> Float64[np.ndarray, "m width"]:
            features = cohort.features_of(torch.from_numpy(records)).flatten(1).cpu().double().numpy()
            targets = cohort.targets[torch.from_numpy(records).to(cohort.targets.device)].cpu().numpy()
            batch = RecordBatch(records=records, features=features, targets=targets, first=first)
            return vectors.sums(start, batch)

        with single_threaded():  # the blocks are too small for threads
            for positions, means in contribution_means(cohort, members.numpy(), vectors.width, summed):
                chosen = torch.from_numpy(positions)
                norms[chosen] = sums.add_(torch.from_numpy(means).float(), weights[chosen], silos[chosen])
                watch.add_steps(len(positions))
        total = torch.zeros(cohort.n_silos, vectors.length, dtype=torch.float64)
        total[:, : vectors.width] = sums.total()
        return Sums(
            total=total.to(cohort.device),
            norms=norms,
            nonfinite=int(norms.isnan().sum()),
            steps=len(members),
        )


def contribution_means(
    cohort: Cohort,
    members: Int64[np.ndarray, " m"],
    width: int,
    summed: Callable[[Int64[np.ndarray, " n"], Int64[np.ndarray, " k"]], Float64[np.ndarray, "k width"]],
) -> Iterator[tuple[Int64[np.ndarray, " k"], Float64[np.ndarray, "k width"]]]:
    """Yield the mean over records of a vector, for some contributions at a time.

    The order of summation within a contribution depends on its own number of records alone.

    Args:
        cohort: the records.
        members: (m,) indices of the contributions.
        width: length of a record's vector.
        summed: returns the sums of the vectors of these records, over runs of records with these first positions.

    Yields:
        Positions in ``members`` of contributions with records, and their means.
    """
    groups, block = cohort.groups, max(1, _ELEMENTS // width)
    sizes = groups.size[members]
    for position in np.flatnonzero(sizes > block):
        records = groups.members(int(members[position]))
        total = np.zeros((1, width))
        for begin in range(0, len(records), block):
            total += summed(records[begin : begin + block], np.zeros(1, dtype=np.int64))
        yield np.array([position]), total / len(records)
    small = np.flatnonzero((sizes > 0) & (sizes <= block))
    ends = np.cumsum(sizes[small])
    while len(small):
        count = max(1, int(np.searchsorted(ends, block, side="right")))
        positions, small, ends = small[:count], small[count:], ends[count:] - ends[count - 1]
        size, begins = sizes[positions], groups.start[members[positions]]
        first = np.cumsum(size) - size
        within = np.arange(int(size.sum())) - np.repeat(first, size)
        records = groups.order[np.repeat(begins, size) + within]
        yield positions, summed(records, first) / size[:, None]
