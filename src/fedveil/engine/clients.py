"""One round of clients that send messages of their own: trained in blocks, sent one by one, added up.

Memory is that of one block of updates, whatever the number of clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.local.trainer import Cohort, Progress, Trainer
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.stages import MessageCost
from fedveil.privacy.bounds import Bound
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness

_BLOCK_ELEMENTS = 1 << 24  # updates of a block, in numbers: 128 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientRound:
    """What a round of messages came to.

    Attributes:
        aggregate: (d,) sum of the decoded messages.
        members: (m,) the contributions that were trained, indices into the cohort's groups.
        norms: (m,) of their updates before clipping, NaN where not finite.
        costs: of every message.
    """

    aggregate: Float64[np.ndarray, " d"]
    members: Int64[Tensor, " m"]
    norms: Float64[Tensor, " m"]
    costs: tuple[MessageCost, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientTraining:
    """How clients train in a round: all that does not depend on who was drawn."""

    trainer: Trainer
    cohort: Cohort
    bound: Bound
    model: Float32[Tensor, " d"]
    round_number: int
    experiment: ExperimentRandomness
    progress: Progress | None = None

    def updates(
        self, members: Int64[Tensor, " m"]
    ) -> tuple[Float64[np.ndarray, "m d"], Float64[Tensor, " m"]]:
        """Return the bounded update of each member, and its norm before clipping."""
        sums = self.trainer.sums(
            self.model,
            self.cohort.apart(members),
            members,
            torch.ones(len(members), dtype=torch.float64),
            self.bound,
            self.experiment,
            ("round", self.round_number),
        )
        return sums.total.cpu().numpy(), sums.norms.cpu()


def send_updates(
    channel: ClientMessages,
    training: ClientTraining,
    drawn: Bool[np.ndarray, " clients"],
    privacy: PrivacyRandomness,
) -> ClientRound:
    """Train the drawn clients, and send each one's update through the channel.

    A drawn client without records has no contribution, and sends an update of zeros: its message tells nothing.

    Args:
        channel: the form and noise of a message.
        training: the round's training.
        drawn: who takes part.
        privacy: of the clients: each draws its noise and key from a stream of its own.
    """
    groups, dimension = training.cohort.groups, len(training.model)
    member_of = np.full(len(drawn), -1)
    member_of[groups.user] = np.arange(len(groups))
    clients = np.flatnonzero(drawn)
    aggregate = np.zeros(dimension)
    members, norms, costs = [], [], []
    size = max(1, _BLOCK_ELEMENTS // dimension)
    for first in range(0, len(clients), size):
        block = clients[first : first + size]
        present = member_of[block]
        trained = torch.from_numpy(present[present >= 0])
        rows, of_rows = training.updates(trained)
        members.append(trained)
        norms.append(of_rows)
        row = 0
        for client, member in zip(block.tolist(), present.tolist(), strict=True):
            update = rows[row] if member >= 0 else np.zeros(dimension)
            row += member >= 0
            sent = channel.transmit(
                update,
                grid=training.bound.grid,
                client=client,
                round_number=training.round_number,
                source=privacy.stream("channel", training.round_number, client),
            )
            aggregate += sent.received
            costs.append(sent.cost)
        if training.progress is not None:
            training.progress(first + len(block), len(clients))
    return ClientRound(
        aggregate=aggregate, members=torch.cat(members), norms=torch.cat(norms), costs=tuple(costs)
    )
