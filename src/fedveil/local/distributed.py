"""One round of local training over several processes: the members are dealt out, the sums are added up.

Process 0 calls :class:`DistributedTrainer` like any trainer. The others are in :func:`serve`: for every call they
receive the model, the members and the weights, train their share and take part in the sum. Nothing else differs
between the processes, and only process 0 draws noise or writes files.

With a clip bound the loop and the vectorised trainer truncate each contribution by itself and add exactly
(:mod:`fedveil.privacy.bounds`): their sums do not depend on how members are dealt out, so these are dealt out by their
work. The span trainer rounds the total of each silo, and here each process rounds its share of it. Its members are
therefore dealt out by a hash of silo and user: removing one contribution changes the share of one process, whose
rounding her margin pays for, and leaves every other share as it was (docs/theory/span-training.md).

What may differ from one process is float32 rounding inside a contribution's training, and in the span up to half a
grid unit a process.

What travels: tensors, and a few numbers as JSON; never pickled objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.local.counters import contribution_seeds
from fedveil.local.loop import LoopTrainer, steps_per_member
from fedveil.local.span import SpanTrainer
from fedveil.local.steps import LocalSgd
from fedveil.local.trainer import Cohort, Path, Progress, Sums
from fedveil.local.vectorized import VmapTrainer
from fedveil.privacy.bounds import Bound
from fedveil.randomness import ExperimentRandomness

SplitTrainer = LoopTrainer | VmapTrainer | SpanTrainer
"""The trainers whose members can be dealt out: each contribution is trained by itself."""


@dataclass(frozen=True, kw_only=True)
class DistributedTrainer:
    """Spreads a trainer's members over the processes of the default group; for process 0.

    Implements :class:`~fedveil.local.trainer.Trainer`. Needs ``torch.distributed`` to be initialised (gloo or nccl),
    and every other process to be in :func:`serve` with the same cohort.
    """

    inner: SplitTrainer

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
        """Return the bounded sums; see :meth:`fedveil.local.trainer.Trainer.sums`.

        A cohort with rows of its own must be ``cohort.apart(members)``.
        """
        local = self.inner.local
        rate = local.learning_rate if isinstance(local, LocalSgd) else None
        apart = cohort.rows is not None
        sizes = {"members": len(members), "dimension": len(start), "apart": apart}
        _broadcast_json({"path": list(path), "learning_rate": rate, **sizes}, cohort.device)
        for tensor in (start, members, weights):
            distributed.broadcast(tensor.to(cohort.device), src=0)
        return _share(
            self.inner, start.to(cohort.device), cohort, members, weights, bound, randomness, path, progress
        )

    def stop(self, cohort: Cohort) -> None:
        """Let the other processes return from :func:`serve`."""
        _broadcast_json({}, cohort.device)


def serve(trainer: SplitTrainer, cohort: Cohort, bound: Bound, randomness: ExperimentRandomness) -> None:
    """Train shares for process 0 until it stops; for all other processes."""
    device = cohort.device
    while header := _receive_json(device):
        start = torch.empty(header["dimension"], dtype=torch.float32, device=device)
        members = torch.empty(header["members"], dtype=torch.int64, device=device)
        weights = torch.empty(header["members"], dtype=torch.float64, device=device)
        for tensor in (start, members, weights):
            distributed.broadcast(tensor, src=0)
        local = trainer.local
        if isinstance(local, LocalSgd):
            local = replace(local, learning_rate=header["learning_rate"], decay=1.0)
        mine = replace(trainer, local=local)
        members, path = members.cpu(), tuple(header["path"])
        seen = cohort.apart(members) if header["apart"] else cohort
        _share(mine, start, seen, members, weights.cpu(), bound, randomness, path, None)


def _share(
    trainer: SplitTrainer,
    start: Float32[Tensor, " d"],
    cohort: Cohort,
    members: Int64[Tensor, " m"],
    weights: Float64[Tensor, " m"],
    bound: Bound,
    randomness: ExperimentRandomness,
    path: Path,
    progress: Progress | None,
) -> Sums:
    """Train this process's share of the members and add the shares of all processes up."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    share = _dealt(trainer, cohort, members, randomness, rank, world)
    sums = trainer.sums(start, cohort, members[share], weights[share], bound, randomness, path, progress)
    norms = torch.zeros(len(members), dtype=torch.float64, device=cohort.device)
    norms[share.to(cohort.device)] = sums.norms.to(cohort.device)
    total, counts = sums.total.contiguous(), torch.tensor([sums.nonfinite, sums.steps], device=cohort.device)
    for tensor in (total, norms, counts):
        distributed.all_reduce(tensor)
    return Sums(total=total, norms=norms, nonfinite=int(counts[0]), steps=int(counts[1]))


def _dealt(
    trainer: SplitTrainer,
    cohort: Cohort,
    members: Int64[Tensor, " m"],
    randomness: ExperimentRandomness,
    rank: int,
    world: int,
) -> Int64[Tensor, " share"]:
    """Return the positions in ``members`` that a process trains, ascending.

    By steps, largest first, where the sums are exact. For the span trainer by a hash of silo and user, the same in all
    rounds: whose share a contribution is in never depends on who else takes part.
    """
    if isinstance(trainer, SpanTrainer):
        words = contribution_seeds(cohort.groups, members, randomness, ("processes",))
        return (words.remainder(world) == rank).nonzero().flatten()
    steps = steps_per_member(trainer.local, cohort, members)
    return steps.argsort(descending=True, stable=True)[rank::world].sort().values


def _broadcast_json(message: dict[str, Any], device: torch.device) -> None:
    text = torch.from_numpy(np.frombuffer(json.dumps(message).encode(), dtype=np.uint8).copy()).to(device)
    distributed.broadcast(torch.tensor([len(text)], device=device), src=0)
    distributed.broadcast(text, src=0)


def _receive_json(device: torch.device) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    distributed.broadcast(length, src=0)
    text = torch.empty(int(length), dtype=torch.uint8, device=device)
    distributed.broadcast(text, src=0)
    message: dict[str, Any] = json.loads(text.cpu().numpy().tobytes())
    return message
