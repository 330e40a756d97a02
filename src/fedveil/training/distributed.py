"""Train one round in several processes: divide the members among the processes and add up their sums.

Process 0 calls :class:`DistributedTrainer` like any trainer. The other processes run :func:`serve`. For every call
they receive the model, the members and the weights, train their share, and take part in the sum. The processes do not
differ otherwise; only process 0 draws noise or writes files.

With a clip bound, the loop and the vectorised trainer truncate each contribution separately and add exactly
(:mod:`fedveil.privacy.bounds`). Their sums do not depend on how members are divided among processes that round alike,
so these divide members by number of steps. Machines may round differently. They divide members by a hash of silo and
user, because removing one contribution must not move others to another machine.

The Gram trainer rounds the total of each silo. Here each process rounds the total of its share, so the Gram
trainer always divides members by the hash. Removing one contribution changes the share of one process, whose rounding
is covered by its margin, and leaves the other shares unchanged (docs/theory/gram-trainer.md).

Compared with one process, results may differ by float32 rounding inside a contribution's training and, for the Gram
trainer, by up to half a grid unit per process.

Processes exchange tensors, and a few numbers as JSON. They never exchange pickled objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from fedveil.errors import HostError
from fedveil.privacy.bounds import Bound, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.trainer import Cohort, PartitionedTrainer, Progress, Sums, TrainJob, partition_by_key


@dataclass(frozen=True, kw_only=True)
class DistributedTrainer:
    """Divides a trainer's members among the processes of the default group; used by process 0.

    Implements :class:`~fedveil.training.trainer.Trainer`. ``torch.distributed`` must be initialised (gloo or nccl),
    and every other process must run :func:`serve` with the same cohort.

    Args:
        inner: the trainer that each process runs, with the learning rate of round 1.
        round: the round that is trained.
        rounds_alike: whether all processes run this program on this machine with the same number of threads, so that
            they round alike.
    """

    inner: PartitionedTrainer
    round: int = 1
    rounds_alike: bool = False

    @property
    def name(self) -> str:
        """Name of the inner trainer."""
        return self.inner.name

    def at_round(self, number: int) -> DistributedTrainer:
        """Return the trainer of round 1, 2, ...; the other processes receive the number."""
        return replace(self, round=number)

    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return the bounded sums; see :meth:`fedveil.training.trainer.Trainer.sums`.

        A cohort with its own ``rows`` must be ``cohort.per_contribution(members)``, because the other processes
        rebuild it from the members.
        """
        device, is_per_contribution = job.cohort.device, job.cohort.rows is not None
        sizes = {
            "members": len(job.members),
            "dimension": len(job.start),
            "apart": is_per_contribution,
            "bounded": job.bound.bounded,
            "alike": self.rounds_alike,
            "unit": job.bound.unit,
        }
        # All processes call the same collectives in the same order: the header first, since it gives the sizes to
        # receive.
        broadcast_json({"path": list(job.path), "round": self.round, **sizes}, device)
        with _named_failure():
            for tensor in (job.start, job.members, job.weights):
                distributed.broadcast(tensor.to(device), src=0)
        job_on_device = replace(job, start=job.start.to(device))
        return _train_share(self.inner.at_round(self.round), job_on_device, self.rounds_alike, progress)

    def stop(self, cohort: Cohort) -> None:
        """Make the other processes return from :func:`serve`."""
        broadcast_json({}, cohort.device)


def serve(
    trainer: PartitionedTrainer, cohort: Cohort, bound: Bound, randomness: ExperimentRandomness
) -> None:
    """Train shares for process 0 until it stops; called by all other processes.

    A process enforces a bound if and only if process 0 does. The share of an update may depend on the other
    contributions, so its treatment must not depend on the share.

    Args:
        trainer: the trainer, with the learning rate of round 1.
        cohort: the records; the same in every process.
        bound: the bound, in the unit that process 0 sends.
        randomness: randomness of the experiment.
    """
    device = cohort.device
    while header := receive_json(device):
        start = torch.empty(header["dimension"], dtype=torch.float32, device=device)
        members = torch.empty(header["members"], dtype=torch.int64, device=device)
        weights = torch.empty(header["members"], dtype=torch.float64, device=device)
        with _named_failure():
            for tensor in (start, members, weights):
                distributed.broadcast(tensor, src=0)
        path = tuple(header["path"])
        job_bound = bound.measured_in(header["unit"]) if header["bounded"] else Unbounded()
        job = TrainJob(start, cohort, members.cpu(), weights.cpu(), job_bound, randomness, path)
        shared_job = job.per_contribution() if header["apart"] else job
        _train_share(trainer.at_round(header["round"]), shared_job, header["alike"])


def _train_share(
    trainer: PartitionedTrainer, job: TrainJob, rounds_alike: bool, progress: Progress | None = None
) -> Sums:
    """Train this process's share of the members and add up the shares of all processes."""
    divide = trainer.partition if rounds_alike else partition_by_key
    share = divide(job, distributed.get_rank(), distributed.get_world_size())
    sums = trainer.sums(job.subset(share), progress)
    device = job.cohort.device
    norms = torch.zeros(len(job.members), dtype=torch.float64, device=device)
    norms[share.to(device)] = sums.norms.to(device)
    total, counts = sums.total.contiguous(), torch.tensor([sums.nonfinite, sums.steps], device=device)
    # Each entry of norms is nonzero in one process only, so the sum gathers them.
    with _named_failure():
        for tensor in (total, norms, counts):
            distributed.all_reduce(tensor)
    return Sums(total=total, norms=norms, nonfinite=int(counts[0]), steps=int(counts[1]))


def broadcast_json(message: dict[str, Any], device: torch.device) -> None:
    """Send a message to all other processes; called by process 0."""
    text = _as_bytes(message).to(device)
    with _named_failure():
        distributed.broadcast(torch.tensor([len(text)], device=device), src=0)
        distributed.broadcast(text, src=0)


def receive_json(device: torch.device) -> dict[str, Any]:
    """Return the next message of process 0; called by all other processes."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    with _named_failure():
        distributed.broadcast(length, src=0)
        text = torch.empty(int(length), dtype=torch.uint8, device=device)
        distributed.broadcast(text, src=0)
    return _from_bytes(text)


def gather_json(message: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the messages of all processes, in their order; called by every process."""
    text, world = _as_bytes(message).to(device), distributed.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    with _named_failure():
        distributed.all_gather(lengths, torch.tensor([len(text)], device=device))
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
        distributed.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [_from_bytes(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]


def _as_bytes(message: dict[str, Any]) -> Tensor:
    return torch.from_numpy(np.frombuffer(json.dumps(message).encode(), dtype=np.uint8).copy())


def _from_bytes(text: Tensor) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(text.cpu().numpy().tobytes())
    return message


@contextmanager
def _named_failure() -> Iterator[None]:
    """Turn the failure of a collective into an error for the user.

    Raises:
        HostError: another process ended, or is silent for longer than the timeout of the group.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error).lower()
        reason = (
            "is silent for longer than the timeout"
            if "timed out" in message or "timeout" in message
            else "ended"
        )
        raise HostError(f"process {distributed.get_rank()}: another process of this run {reason}") from error
