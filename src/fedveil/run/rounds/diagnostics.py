"""Compute a simulation's diagnostics of a round from private data; no guarantee covers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedveil.methods.message_encoding import MessageCost
from fedveil.methods.method import training_bound
from fedveil.protocols.driver import Transcript
from fedveil.run.folder.run_folder import Row
from fedveil.run.rounds.round_context import RoundContext

_QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def communication_cost(costs: Sequence[MessageCost]) -> Row | None:
    """Return the total cost of all messages of a round; None if no message has a cost.

    The keys are those of :class:`~fedveil.run.folder.documents.CommunicationCost`. ``limit`` and ``acceptance`` are
    means over the messages that have one. ``ratio`` is bits_per_parameter / limit, and None if the limit is 0 or
    None.
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
    """Diagnostics of local training in a simulation.

    Attributes:
        participants: number of users that took part (of silos, if a contribution is a silo).
        contributions: number of trained contributions.
        nonfinite: number of contributions whose update was not finite and counted as zero.
        norms: quantiles 0, .1, .25, .5, .75, .9, 1 of the finite updates' l2 norms before clipping; None without
            one.
        clipped: fraction of the finite updates that the bound shortened; None without one.
    """

    participants: int
    contributions: int
    nonfinite: int
    norms: tuple[float, ...] | None
    clipped: float | None

    @classmethod
    def from_norms(
        cls,
        context: RoundContext,
        members: Int64[Tensor, " m"],
        lengths: Float64[Tensor, " k"],
        nonfinite: int,
    ) -> TrainingDiagnostics:
        """Return the diagnostics of contributions with these l2 norms.

        Args:
            context: the state at the start of the round.
            members: (m,) indices of the trained contributions.
            lengths: (k,) float64 l2 norms before clipping; NaN for an update that was not finite.
            nonfinite: number of updates that were not finite.
        """
        users = context.setting.cohort.groups.user[members.numpy()]
        norms = lengths[torch.isfinite(lengths)].cpu()
        clipped = training_bound(context.method).is_clipped(norms)
        return cls(
            # A contribution of a whole silo has the user id -1.
            participants=len(np.unique(users)) if (users >= 0).all() else len(users),
            contributions=len(users),
            nonfinite=nonfinite,
            norms=tuple(np.quantile(norms.numpy(), _QUANTILES).tolist()) if len(norms) else None,
            clipped=float(clipped.double().mean()) if len(norms) else None,
        )


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics(TrainingDiagnostics):
    """Diagnostics of a round in a simulation.

    Attributes:
        bytes_up: bytes that all silos or clients sent to the server, in all attempts since the run began or was
            resumed; None if nobody counts them.
        communication_cost: cost of a channel's messages against float32; None if the channel counts none.
        attempts: number of attempts at the round, under a protection.
        summed: number of silos in the sum, under a protection.
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
        """Return the diagnostics of a complete round.

        Args:
            number: the round.
            trained: diagnostics of its training.
            sent: the transcript of the run under a protection; else the costs of the round's messages, if counted.
            attempts: number of attempts at the round.
            summed: number of silos in the sum.
        """
        if isinstance(sent, Transcript):
            return cls(**vars(trained), bytes_up=sent.bytes_up(number), attempts=attempts, summed=summed)
        return cls(
            **vars(trained),
            bytes_up=sum(cost.bytes for cost in sent) if sent else None,
            communication_cost=communication_cost(sent),
        )
