"""Compute the inputs of a round's clients: sample, train in batches, and return them one by one.

A simulation trains the whole cohort as one batch; a silo of a federation trains its own users. A client's message
is made at the client's turn in the protocol. Thus large objects (single contributions, clients' updates) are in
memory for one client or one block of clients at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.methods.capabilities import ClientSender, StatefulNoise
from fedveil.methods.channels import Channel
from fedveil.methods.message_encoding import EncodedMessage, MessageCost, Sender
from fedveil.protocols.protocol import Drawn, ProtocolSpec
from fedveil.protocols.weighting.plan import SEED_BYTES
from fedveil.run.rounds.diagnostics import TrainingDiagnostics
from fedveil.run.rounds.round_context import RoundContext
from fedveil.training.trainer import Sums

_BLOCK_ELEMENTS: Final = 1 << 24  # float64 numbers of single updates in memory at a time: 128 MiB


class ChannelInputs(ABC):
    """Inputs of all clients to one sum of updates or statistics.

    Implements :class:`~fedveil.protocols.protocol.ClientInputs`.

    Attributes:
        agreed: the protocol's public parameters.
        costs: cost of every message, if the channel counts costs.

    Args:
        agreed: the protocol's public parameters.
        channel: encodes each client's sum as a message.
        length: d, the length of a message.
    """

    def __init__(self, agreed: ProtocolSpec[Any, Any], channel: Channel, length: int) -> None:
        self.agreed, self._channel, self._length, self._attempt = agreed, channel, length, 0
        self.costs: list[MessageCost] = []

    def begin(self, attempt: int) -> Drawn | None:
        """Begin an attempt with fresh noise.

        Returns:
            (|U|,) flags of the sampled users; None if nobody is sampled and all take part.
        """
        self._attempt = attempt
        return None

    def client_input(self, client: int) -> Any:
        """Return the input of a client to the protocol in this attempt."""
        return self.agreed.client_input(self, client)

    @abstractmethod
    def unprotected_sum(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's bounded, weighted sum before its channel; it carries no noise."""

    @abstractmethod
    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return a client's contributions as separate rows, each with weight 1."""

    def message(self, client: int) -> Float64[np.ndarray, " d"] | bytes:
        """Return the channel's encoding of a client's sum, and record its cost if the channel counts costs."""
        sending = self._sent(self.unprotected_sum(client), client)
        if sending.cost is not None:
            self.costs.append(sending.cost)
        return sending.payload

    def noise_share(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's share of the noise."""
        # The channel adds a client's share to its sum, so the message of a zero sum is the share alone.
        return self._sent(np.zeros(self._length), client).numbers

    def dither_key(self, client: int) -> bytes:
        """Return the 32-byte key of a client's share of the remainders modulo C, fixed for one attempt."""
        at = self._sender(client)
        return at.privacy.stream("dither", at.round, client, at.attempt).uint64(SEED_BYTES // 8).tobytes()

    def model_displacement(self) -> Float64[np.ndarray, " d"]:
        """Return how far the model moved since the first round; zeros if the sum is not a step of a model."""
        return np.zeros(self._length)

    @abstractmethod
    def _sender(self, client: int) -> Sender:
        """Return the public facts about a client that the channel needs in this attempt."""

    def _sent(self, vector: Float64[np.ndarray, " d"], client: int) -> EncodedMessage:
        """Return the channel's encoding of a vector for a client."""
        return self._channel.send(vector, self._sender(client))


class RoundInputs(ChannelInputs):
    """Inputs of the clients of one round of training.

    Attributes:
        drawn: (|U|,) flags of the users sampled for the attempt; None if all take part.

    Args:
        context: the state at the start of the round.
        agreed: the protocol's public parameters.
        initial: (d,) the model before the first round; None: this round is the first.
    """

    def __init__(
        self,
        context: RoundContext,
        agreed: ProtocolSpec[Any, Any],
        initial: Float32[Tensor, " d"] | None = None,
    ) -> None:
        super().__init__(agreed, context.method.channel, context.length)
        self.context = context
        self._initial = context.model if initial is None else initial
        self.drawn: Drawn | None = None

    def senders(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sending clients of a cohort: all, or the sampled ones if each client has its own message."""
        if isinstance(self._channel, ClientSender) and self.drawn is not None:
            return tuple(np.flatnonzero(self.drawn).tolist())
        return cohort

    @abstractmethod
    def training_diagnostics(self) -> TrainingDiagnostics:
        """Return the diagnostics of the training, once an attempt is complete."""

    def model_displacement(self) -> Float64[np.ndarray, " d"]:
        """Return the difference between the global model and the model before the first round."""
        moved: np.ndarray = (self.context.model.cpu().double() - self._initial.cpu().double()).numpy()
        return moved

    def _sender(self, client: int) -> Sender:
        return self.context.sender(client, self._attempt)


class CohortInputs(RoundInputs):
    """Inputs of all silos: sums are trained as one batch, single contributions one silo at a time.

    A failed attempt may have released its sum, so the next attempt samples new users. Two noisy sums over one
    sample would reveal more about it than the two rounds that are charged.
    """

    def __init__(
        self,
        context: RoundContext,
        agreed: ProtocolSpec[Any, Any],
        initial: Float32[Tensor, " d"] | None = None,
    ) -> None:
        super().__init__(context, agreed, initial)
        self._begun = False
        self._members: Int64[Tensor, " m"] = torch.arange(len(context.setting.cohort.groups))
        self._sums: Sums | None = None
        self._past: list[Float64[Tensor, "silos d"]] = []
        self._norms = torch.full((len(self._members),), torch.nan, dtype=torch.float64)

    def begin(self, attempt: int) -> Drawn | None:
        """Sample users and train, at the first attempt and whenever users are sampled anew.

        If silos send single contributions (private weighting), training waits until a silo's turn.
        """
        super().begin(attempt)
        context, method = self.context, self.context.method
        # Without sampling a repeated attempt has the same sums; only its noise is fresh.
        if self._begun and not method.sampler.samples:
            return self.drawn
        self._begun, self.drawn = True, context.draw(attempt)
        if not method.protection.weighs:
            job = context.sum_job(self.drawn)
            self._sums = context.trainer.sums(job, context.progress).with_clip_marks(job)
            self._members, self._norms = job.members, self._sums.norms
            # Read the earlier sums before this round's replaces the oldest of them.
            self._past = context.past.earlier_sums(context)
            context.past.keep(context, self._sums.total)
        return self.drawn

    def unprotected_sum(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a silo's sum, combined with sums of earlier rounds if the channel has memory.

        If all clients' updates are added in one batch, every client index has the same sum.
        """
        assert self._sums is not None
        index = client if len(self._sums.total) > 1 else 0
        every = [sums[index].cpu().numpy() for sums in (self._sums.total, *self._past)]
        return self._channel.encode_sums(every) if isinstance(self._channel, StatefulNoise) else every[0]

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return the bounded updates of all users of a silo, ascending by user.

        The updates cover users that are not sampled: under private weighting a silo does not learn the sample.
        """
        context, cohort = self.context, self.context.setting.cohort
        members = torch.from_numpy(np.flatnonzero(cohort.groups.silo == client))
        rows = np.empty((len(members), context.length))
        # One user's update has `length` numbers: train blocks of users that fit the memory limit.
        size = max(1, _BLOCK_ELEMENTS // context.length)
        for first in range(0, len(members), size):
            chunk = members[first : first + size]
            job = context.job(chunk, context.method.bound).per_contribution()
            sums = context.trainer.sums(job).with_clip_marks(job)
            rows[first : first + size] = sums.total.cpu().numpy()
            self._norms[chunk] = sums.norms.cpu()
            if context.progress is not None:
                completed = round(1000 * (client + (first + len(chunk)) / len(members)))
                context.progress(completed, 1000 * cohort.n_silos)
        return rows

    def training_diagnostics(self) -> TrainingDiagnostics:
        """Return the diagnostics of the last training."""
        nonfinite = int(self._norms.isnan().sum()) if self._sums is None else self._sums.nonfinite
        return TrainingDiagnostics.from_norms(self.context, self._members, self._norms, nonfinite)


class PerClientInputs(RoundInputs):
    """Inputs of the sampled clients, each with its own message, trained in blocks in sending order.

    A sampled client without records has no contribution. It sends an update of zeros, so that the presence of its
    message reveals nothing about its records.

    Args:
        context: the state at the start of the round.
        agreed: the protocol.
        initial: the model before the first round, if the method needs it.
        block_elements: largest number of float64 values in the updates of one block.
    """

    def __init__(
        self,
        context: RoundContext,
        agreed: ProtocolSpec[Any, Any],
        initial: Float32[Tensor, " d"] | None = None,
        block_elements: int = _BLOCK_ELEMENTS,
    ) -> None:
        super().__init__(context, agreed, initial)
        self._block_elements = block_elements
        groups = context.setting.cohort.groups
        self._member_of = np.full(context.setting.n_users, -1)
        self._member_of[groups.user] = np.arange(len(groups))
        self._order, self._next = np.zeros(0, dtype=np.int64), 0
        self._block: dict[int, Float64[np.ndarray, " d"]] = {}
        self._members: list[Int64[Tensor, " m"]] = []
        self._norms: list[Float64[Tensor, " m"]] = []

    def begin(self, attempt: int) -> Drawn | None:
        """Sample the sending clients; training waits until a client's turn."""
        super().begin(attempt)
        self.drawn = self.context.draw(attempt)
        assert self.drawn is not None
        self._order, self._next = np.flatnonzero(self.drawn), 0
        self._block, self._members, self._norms = {}, [], []
        return self.drawn

    def unprotected_sum(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return the update of a client, training the next block if it is not trained yet."""
        if client not in self._block:
            self._train_block()
        return self._block.pop(client)

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return a client's update as its only contribution."""
        return self.unprotected_sum(client)[None]

    def training_diagnostics(self) -> TrainingDiagnostics:
        """Return the diagnostics of all trained blocks."""
        none = torch.zeros(0)
        members = torch.cat([none.long(), *self._members])
        norms = torch.cat([none.double(), *self._norms])
        return TrainingDiagnostics.from_norms(self.context, members, norms, int(norms.isnan().sum()))

    def _train_block(self) -> None:
        """Train the next clients in sending order and store their updates."""
        context, dimension = self.context, len(self.context.model)
        # Blocks follow the order in which clients send, so each client is trained once and dropped after its
        # message.
        block = self._order[self._next : self._next + max(1, self._block_elements // dimension)]
        present = block[self._member_of[block] >= 0]
        members = torch.from_numpy(self._member_of[present])
        sums = context.trainer.sums(context.job(members, context.method.bound).per_contribution())
        self._members.append(members)
        self._norms.append(sums.norms.cpu())
        self._block = {client: np.zeros(dimension) for client in set(block.tolist()) - set(present.tolist())}
        self._block |= dict(zip(present.tolist(), sums.total.cpu().numpy(), strict=True))
        self._next += len(block)
        if context.progress is not None:
            context.progress(self._next, len(self._order))


def make_round_inputs(
    context: RoundContext, agreed: ProtocolSpec[Any, Any], initial: Float32[Tensor, " d"]
) -> RoundInputs:
    """Return the inputs of a round's clients.

    Args:
        context: the state at the start of the round.
        agreed: the protocol's public parameters.
        initial: (d,) the model before the first round.
    """
    method = context.method
    alone = isinstance(method.channel, ClientSender) and not method.protection.agrees
    return (PerClientInputs if alone else CohortInputs)(context, agreed, initial)
