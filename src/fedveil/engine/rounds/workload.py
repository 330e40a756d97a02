"""What the clients of a simulated round contribute: drawn and trained for all at once, given one by one.

The whole cohort is trained as one batch; each client's contribution is made when its turn in the protocol comes, so
that what is large (single contributions, clients' updates) is in memory for one client or one block of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedveil.engine.rounds.setting import Setting
from fedveil.engine.rounds.silo_side import WeightedTraining, members_of, trained_sums
from fedveil.engine.rounds.turn import Turn
from fedveil.local.trainer import Sums
from fedveil.methods.sending import MessageCost, Sending
from fedveil.protection.protocol import Drawn

_QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_BLOCK_ELEMENTS: Final = 1 << 24  # updates of a block of clients, in numbers: 128 MiB


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a simulation may show of local training; computed from private data and covered by no guarantee.

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
    def of(
        cls, setting: Setting, members: Int64[Tensor, " m"], lengths: Float64[Tensor, " k"], nonfinite: int
    ) -> Trained:
        """Return what may be shown of members whose updates had these l2 norms."""
        users = setting.cohort.groups.user[members.numpy()]
        norms = lengths[torch.isfinite(lengths)].cpu()
        clipped = setting.method.local_bound.clipped(norms)
        return cls(
            participants=len(np.unique(users)) if (users >= 0).all() else len(users),
            contributions=len(users),
            nonfinite=nonfinite,
            norms=tuple(np.quantile(norms.numpy(), _QUANTILES).tolist()) if len(norms) else None,
            clipped=float(clipped.double().mean()) if len(norms) else None,
        )


class Workload(ABC):
    """What the clients of one round contribute.

    Attributes:
        drawn: (|U|,) who takes part in the attempt; None for all.
        costs: of every message of a channel that counts them.

    Args:
        turn: what the round begins with.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.drawn: Drawn | None = None
        self.costs: list[MessageCost] = []

    @abstractmethod
    def begin(self, attempt: int) -> Drawn | None:
        """Draw who takes part in an attempt, and train what is trained at once; return who was drawn."""

    def senders(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """Return which clients of a cohort contribute; public."""
        return cohort

    @abstractmethod
    def give(self, sender: int) -> Any:
        """Return what a client contributes to the attempt, as its protocol takes it."""

    def total(self, result: Any) -> Float64[np.ndarray, " d"]:
        """Return the sum that a protocol's result stands for, in the unit of the update."""
        vector: np.ndarray = result
        return vector

    def payload(self, sending: Sending) -> Float64[np.ndarray, " d"] | bytes:
        """Return what travels of a message of the channel, and note what it costs where that is counted."""
        if sending.cost is not None:
            self.costs.append(sending.cost)
        return sending.payload

    @abstractmethod
    def trained(self) -> Trained:
        """Return what may be shown of the training, once an attempt has come to its end."""


class SiloSums(Workload):
    """Every silo's sum after its channel: numbers, or bytes whose compression error is the silo's share of the noise.

    An attempt that failed may have released its sum, so the next one has users of its own: two noisy sums over one
    sample would tell more of it than the two rounds they are charged as.

    Args:
        turn: what the round begins with.
        units: what the protocol takes of a silo's message; None: the message itself.
        vector: the inverse for sums.
    """

    def __init__(
        self,
        turn: Turn,
        units: Callable[[Float64[np.ndarray, " d"]], Any] | None = None,
        vector: Callable[[Any], Float64[np.ndarray, " d"]] | None = None,
    ) -> None:
        super().__init__(turn)
        self._units, self._vector = units, vector
        self._attempt = 0
        self._members: Int64[Tensor, " m"] = torch.zeros(0, dtype=torch.int64)
        self._sums: Sums | None = None
        self._past: list[Float64[Tensor, "silos d"]] = []

    def begin(self, attempt: int) -> Drawn | None:
        """Draw and train, at the first attempt and wherever users are drawn anew."""
        turn, self._attempt = self.turn, attempt
        if self._sums is None or turn.setting.method.sampler.samples:
            self.drawn = turn.draw(attempt)
            self._members = members_of(turn.setting, self.drawn, turn.round_number)
            weights, bound = turn.setting.weights[self._members], turn.setting.method.local_bound
            job = turn.job(self._members, bound, weights)
            self._sums = turn.trainer.sums(job, turn.progress).marked(job)
            self._past = turn.past.before(turn, trained_sums)
            turn.past.keep(turn, self._sums.total)
        return self.drawn

    def sum_of(self, silo: int) -> Float64[np.ndarray, " d"]:
        """Return a silo's bounded, weighted sum, which carries no noise; clients that are added up at once have one.

        With those of the rounds before, as the channel sends parts of them.
        """
        assert self._sums is not None
        place = silo if len(self._sums.total) > 1 else 0
        every = [sums[place].cpu().numpy() for sums in (self._sums.total, *self._past)]
        return self.turn.setting.method.channel.encoded(every)

    def give(self, sender: int) -> Any:
        """Return a silo's sum with its share of the noise."""
        channel, at = self.turn.setting.method.channel, self.turn.sender(sender, self._attempt)
        message = channel.send(self.sum_of(sender), at)
        return self.payload(message) if self._units is None else self._units(message.numbers)

    def total(self, result: Any) -> Float64[np.ndarray, " d"]:
        """Return the sum in the unit of the update."""
        return super().total(result) if self._vector is None else self._vector(result)

    def trained(self) -> Trained:
        """Return what may be shown of the training."""
        assert self._sums is not None
        return Trained.of(self.turn.setting, self._members, self._sums.norms, self._sums.nonfinite)


class OwnMessages(Workload):
    """Every drawn client's update as a message of its own; they are trained in blocks.

    A drawn client without records has no contribution, and sends an update of zeros: its message tells nothing.
    """

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn)
        groups = turn.setting.cohort.groups
        self._trainer = turn.trainer
        self._member_of = np.full(turn.setting.n_users, -1)
        self._member_of[groups.user] = np.arange(len(groups))
        self._order: Int64[np.ndarray, " k"] = np.zeros(0, dtype=np.int64)
        self._begin_again()

    def _begin_again(self) -> None:
        self._next = 0
        self._block: dict[int, Float64[np.ndarray, " d"]] = {}
        self._members: list[Int64[Tensor, " m"]] = []
        self._norms: list[Float64[Tensor, " m"]] = []

    def begin(self, attempt: int) -> Drawn | None:
        """Draw who sends; training waits until a client's turn."""
        self._begin_again()
        self.drawn = self.turn.draw(attempt)
        assert self.drawn is not None
        self._order = np.flatnonzero(self.drawn)
        return self.drawn

    def senders(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """Return the drawn clients."""
        return tuple(self._order.tolist())

    def give(self, sender: int) -> Any:
        """Return a client's message: its numbers, or its bytes with their key."""
        if sender not in self._block:
            self._train_block()
        channel, at = self.turn.setting.method.channel, self.turn.sender(sender, 0)
        return self.payload(channel.send(self._block.pop(sender), at))

    def trained(self) -> Trained:
        """Return what may be shown of the training."""
        none = torch.zeros(0)
        members = torch.cat([none.long(), *self._members])
        norms = torch.cat([none.double(), *self._norms])
        return Trained.of(self.turn.setting, members, norms, int(norms.isnan().sum()))

    def _train_block(self) -> None:
        """Train the next clients whose turn it will be."""
        turn, dimension = self.turn, len(self.turn.model)
        block = self._order[self._next : self._next + max(1, _BLOCK_ELEMENTS // dimension)]
        present = block[self._member_of[block] >= 0]
        members = torch.from_numpy(self._member_of[present])
        sums = self._trainer.sums(turn.job(members, turn.setting.method.bound).apart())
        self._members.append(members)
        self._norms.append(sums.norms.cpu())
        self._block = {client: np.zeros(dimension) for client in set(block.tolist()) - set(present.tolist())}
        self._block |= dict(zip(present.tolist(), sums.total.cpu().numpy(), strict=True))
        self._next += len(block)
        if turn.progress is not None:
            turn.progress(self._next, len(self._order))


class Contributions(Workload):
    """Every silo's contributions by themselves, with weight 1, and its share of the noise; one silo's at a time.

    Args:
        turn: what the round begins with.
        units: what the protocol takes of a silo's contributions, share of the noise and key of the remainders.
        vector: the sum that the protocol's result stands for.
    """

    def __init__(
        self,
        turn: Turn,
        units: Callable[[Float64[np.ndarray, "m d"], Float64[np.ndarray, " d"], bytes], Any],
        vector: Callable[[Any], Float64[np.ndarray, " d"]],
    ) -> None:
        super().__init__(turn)
        self._units, self._vector = units, vector
        self._training: WeightedTraining | None = None

    def begin(self, attempt: int) -> Drawn | None:
        """Draw users; every silo trains all of its own, when its turn comes, and anew in another attempt."""
        self._training = WeightedTraining(self.turn, attempt)
        self.drawn = self.turn.draw(attempt)
        return self.drawn

    def give(self, sender: int) -> Any:
        """Train a silo's users; return their contributions with the silo's share of the noise."""
        training = self._training
        assert training is not None
        return self._units(training.contributions(sender), training.share(sender), training.dither(sender))

    def total(self, result: Any) -> Float64[np.ndarray, " d"]:
        """Return the weighted sum, in the unit of the update."""
        return self._vector(result)

    def trained(self) -> Trained:
        """Return what may be shown of the training."""
        assert self._training is not None
        norms = self._training.norms
        everyone = torch.arange(len(self.turn.setting.cohort.groups))
        return Trained.of(self.turn.setting, everyone, norms, int(norms.isnan().sum()))
