"""Contributions that are no update of the model: bounded means of a vector that each record adds.

Methods such as ``newton`` sum statistics of records instead of updates. Such a local stage names the length of its
messages, which differs from the number of the model's parameters, and makes the trainer that computes them. Bounds,
weights, channels, protections and ledgers treat the sums like any others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
from jaxtyping import Float64, Int64

from fedveil.stage import Source
from fedveil.training.silo_sums import SiloSums
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, Progress, ProgressMonitor, Sums, TrainJob

_ELEMENTS: Final = 1 << 21
"""Numbers of the records' vectors that are in memory at a time: 16 MiB."""

SourceT = TypeVar("SourceT", bound="RecordSums")


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
    def vectors(self, task: Task, cohort: Cohort) -> RecordVectors:
        """Return the vectors of records in this stage's round, after checking that the model has this stage's form.

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


class RecordVectors:
    """The vectors of records in one round, in float64.

    Guarantee: the vector of a record is computed from this record and public numbers alone, bit for bit: every
    operation acts on one row, whatever other rows there are.

    Attributes:
        width: number of leading coordinates of a contribution that may differ from 0.
        length: length of a contribution.
    """

    width: int
    length: int

    def rows(
        self, start: Float64[np.ndarray, " d"], features: Float64[np.ndarray, "n p"], targets: np.ndarray
    ) -> Float64[np.ndarray, "n width"]:
        """Return the vectors of n records at the model ``start``; every row's l2 norm is within the bound."""
        raise NotImplementedError


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

    def at_round(self, number: int) -> RecordSumsTrainer:
        """Return the trainer of round 1, 2, ...."""
        return replace(self, local=self.local.at_round(number))

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return each silo's sum of bounded, weighted means; see :meth:`fedveil.training.trainer.Trainer.sums`."""
        cohort, members = job.cohort, job.members.cpu()
        vectors = self.local.vectors(self.task, cohort)
        start = job.start.cpu().double().numpy()
        sums = SiloSums(cohort.n_silos, vectors.width, job.bound, torch.device("cpu"))
        norms = torch.zeros(len(members), dtype=torch.float64)
        silos, weights = cohort.silos(members).cpu(), job.weights.cpu()
        watch = ProgressMonitor(progress, len(members))

        def rows(records: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, "n width"]:
            features = cohort.features_of(torch.from_numpy(records)).flatten(1).cpu().double().numpy()
            targets = cohort.targets[torch.from_numpy(records).to(cohort.targets.device)].cpu().numpy()
            return vectors.rows(start, features, targets)

        for some, means in contribution_means(cohort, members.numpy(), vectors.width, rows):
            chosen = torch.from_numpy(some)
            norms[chosen] = sums.add_(torch.from_numpy(means).float(), weights[chosen], silos[chosen])
            watch.add_steps(len(some))
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
    rows: Callable[[Int64[np.ndarray, " n"]], Float64[np.ndarray, "n width"]],
) -> Iterator[tuple[Int64[np.ndarray, " k"], Float64[np.ndarray, "k width"]]]:
    """Yield the mean over records of a vector, for some contributions at a time.

    The order of summation within a contribution depends on its own number of records alone.

    Args:
        cohort: the records.
        members: (m,) indices of the contributions.
        width: length of a record's vector.
        rows: returns the vectors of these records.

    Yields:
        Positions in ``members`` of contributions with records, and their means.
    """
    groups, block = cohort.groups, max(1, _ELEMENTS // width)
    sizes = groups.size[members]
    large = np.flatnonzero(sizes > block)
    for place in large:
        held = groups.members(int(members[place]))
        total = np.zeros(width)
        for first in range(0, len(held), block):
            total += rows(held[first : first + block]).sum(axis=0)
        yield np.array([place]), total[None] / len(held)
    small = np.flatnonzero((sizes > 0) & (sizes <= block))
    ends = np.cumsum(sizes[small])
    while len(small):
        taken = max(1, int(np.searchsorted(ends, block, side="right")))
        some, small, ends = small[:taken], small[taken:], ends[taken:] - ends[taken - 1]
        size, begin = sizes[some], groups.start[members[some]]
        first = np.cumsum(size) - size
        within = np.arange(int(size.sum())) - np.repeat(first, size)
        held = groups.order[np.repeat(begin, size) + within]
        yield some, np.add.reduceat(rows(held), first, axis=0) / size[:, None]
