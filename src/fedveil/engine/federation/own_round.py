"""What a silo of a federation computes of a round by itself: its training, its bound, its noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64

from fedveil.engine.federation.parts import Task
from fedveil.engine.setup import Prepared, privacy_randomness
from fedveil.engine.silo_side import SiloMessage, client_message, local_sums, members_of, silo_message
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.stages import ClientContribution
from fedveil.randomness import ExperimentRandomness


@dataclass(frozen=True, kw_only=True)
class OwnRound:
    """One silo's part of a round, before any protocol.

    Attributes:
        prepared: the experiment as the silo holds it.
        silo: its number.
        attempt: how often the round was charged before; every attempt has noise of its own.
    """

    prepared: Prepared
    silo: int
    attempt: int = 0

    def total(self, task: Task) -> Float64[np.ndarray, " d"]:
        """Train, and return the silo's bounded, weighted sum; it carries no noise."""
        seat = self.prepared.seat
        groups, clients = seat.cohort.groups, isinstance(seat.method.contribution, ClientContribution)
        together = clients and seat.cohort.n_silos == 1  # in one process their updates are summed at once
        own = (groups.user if together else groups.silo) == self.silo
        members = members_of(groups, task.drawn)
        members = members[torch.from_numpy(own)[members]]
        experiment = ExperimentRandomness(self.prepared.experiment.seed)
        sums = local_sums(seat, torch.from_numpy(task.model), members, task.round, experiment)
        total: np.ndarray = sums.total[0 if together else self.silo].cpu().numpy()
        return total

    def message(self, task: Task) -> SiloMessage:
        """Train, and return what the method's channel makes of the sum, or of the client's update."""
        seat, privacy = self.prepared.seat, privacy_randomness(self.prepared.experiment)
        seat = replace(seat, method=seat.method.at_round(task.round))
        if isinstance(seat.method.channel, ClientMessages):
            return client_message(
                seat,
                torch.from_numpy(task.model),
                client=self.silo,
                round_number=task.round,
                experiment=ExperimentRandomness(self.prepared.experiment.seed),
                privacy=privacy,
            )
        return silo_message(
            seat.method,
            self.total(task),
            n_silos=seat.cohort.n_silos,
            silo=self.silo,
            round_number=task.round,
            privacy=privacy,
            attempt=self.attempt,
        )
