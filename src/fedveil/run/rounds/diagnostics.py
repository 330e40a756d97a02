"""What a simulation may show of a round: computed from private data, and covered by no guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedveil.methods.message_encoding import MessageCost
from fedveil.protocols.transcript import Transcript
from fedveil.run.folder.run_folder import Row
from fedveil.run.rounds.round_context import RoundContext

_QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def communication_cost(costs: Sequence[MessageCost]) -> Row | None:
    """Return what the messages of all silos or clients cost in a round, added up; None where there are none.

    It is what a :class:`~fedveil.run.folder.documents.CommunicationCost` reads, a mean over messages where one
    has a number of its own, and ``ratio``: bits_per_parameter over limit, None where that is 0 or None.
    """
    if not costs:
        return None
    parameters = sum(cost.parameters for cost in costs)
    limits = [cost.limit for cost in costs if cost.limit is not None]
    accepted = [cost.acceptance for cost in costs if cost.acceptance is not None]
    limit = float(np.mean(limits)) if limits else None
    bits = 8 * sum(cost.bytes for cost in costs) / parameters
    return {
        "float32_bytes": 4 * parameters,
        "bits_per_parameter": bits,
        "limit": limit,
        "ratio": bits / limit if limit else None,
        "acceptance": float(np.mean(accepted)) if accepted else None,
    }


@dataclass(frozen=True, kw_only=True)
class TrainingDiagnostics:
    """What a simulation may show of local training.

    Attributes:
        participants: users who took part (silos where a contribution is a silo).
        contributions: contributions that were trained.
        nonfinite: contributions whose update was not finite and counted as zero.
        norms: quantiles 0, .1, .25, .5, .75, .9, 1 of the finite updates' l2 norms before clipping.
        clipped: the fraction of finite updates that the bound shortened.
    """

    participants: int
    contributions: int
    nonfinite: int
    norms: tuple[float, ...] | None
    clipped: float | None

    @classmethod
    def from_norms(
        cls, turn: RoundContext, members: Int64[Tensor, " m"], lengths: Float64[Tensor, " k"], nonfinite: int
    ) -> TrainingDiagnostics:
        """Return what may be shown of members whose updates had these l2 norms."""
        users = turn.setting.cohort.groups.user[members.numpy()]
        norms = lengths[torch.isfinite(lengths)].cpu()
        clipped = turn.method.local_bound.is_clipped(norms)
        return cls(
            participants=len(np.unique(users)) if (users >= 0).all() else len(users),
            contributions=len(users),
            nonfinite=nonfinite,
            norms=tuple(np.quantile(norms.numpy(), _QUANTILES).tolist()) if len(norms) else None,
            clipped=float(clipped.double().mean()) if len(norms) else None,
        )


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics(TrainingDiagnostics):
    """What a simulation may show of a round.

    Attributes:
        bytes_up: what all silos or clients sent to the server, in all attempts since the run was begun or resumed;
            None where nobody counts.
        communication_cost: what the messages of a channel cost beside the same in float32; None where there are none.
        attempts: how often the round was begun, under a protection.
        summed: how many silos the sum is over, under a protection.
    """

    bytes_up: int | None = None
    communication_cost: Row | None = None
    attempts: int | None = None
    summed: int | None = None

    @classmethod
    def of_round(
        cls,
        number: int,
        trained: TrainingDiagnostics,
        sent: Sequence[MessageCost] | Transcript,
        *,
        attempts: int,
        summed: int,
    ) -> RoundDiagnostics:
        """Return what may be shown of a round that has come to its end.

        Args:
            number: of the round.
            trained: what may be shown of its training.
            sent: every message of the run under a protection; else what those of the round cost, where that is counted.
            attempts: how often the round was begun.
            summed: how many silos the sum is over.
        """
        if isinstance(sent, Transcript):
            return cls(**vars(trained), bytes_up=sent.bytes_up(number), attempts=attempts, summed=summed)
        return cls(
            **vars(trained),
            bytes_up=sum(cost.bytes for cost in sent) if sent else None,
            communication_cost=communication_cost(sent),
        )
