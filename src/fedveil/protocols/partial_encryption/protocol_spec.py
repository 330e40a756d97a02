"""Partial encryption as a protocol: vectors in, the sum of both parts out, which the clients alone learn."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.key_agreement import RoundId
from fedveil.privacy.noise import DiscreteGaussian
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.exchanges import Exchanges, ExchangeStep, Shape
from fedveil.protocols.messages import Announcement, Directory, MaskedVector, RoundStart
from fedveil.protocols.partial_encryption.inputs import PartialInputs, PartialResult, SplitUpdate
from fedveil.protocols.partial_encryption.messages import (
    Ballot,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
)
from fedveil.protocols.partial_encryption.part_encoding import WHOLE_NUMBERS, PartEncoding
from fedveil.protocols.partial_encryption.plan import PartialPlan
from fedveil.protocols.partial_encryption.server import PartialServer
from fedveil.protocols.partial_encryption.silo import PartialSilo
from fedveil.protocols.partial_encryption.workers import worker_pool
from fedveil.protocols.protocol import ClientContext, ClientInputs, ClientProtocol, ServerProtocol
from fedveil.protocols.session_messages import ModelStored

Parts: TypeAlias = tuple[Int64[np.ndarray, " c"], Int64[np.ndarray, " h"]]

_FRAME_BYTES: Final = 1 << 13
"""More than a message has around what it carries, and than the key that it seals."""
_LEAST_VOTE_STD: Final = 4.0
"""From here on sums of whole-numbered noise have the Renyi divergences of Gaussian noise (to 1e-60): accountant rdp."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialEncryptionSpec:
    """What the parties of a run under partial encryption agree on.

    A message is divided once the partition is known. Each half is bounded and carries its noise by itself, and travels
    as whole numbers of its grid, so both sums are exact; only a half without a bound is rounded to its grid.

    Attributes:
        plan: the public numbers.
        clear: what is done to the half in clear.
        hidden: what is done to the encrypted half.
        vote_noise: noise on the counts of votes, over the square root of the votes of a ballot; 0 for none.
        released: whether the partition follows from the models that were released, where nobody votes.
        processes: in how many processes clients encrypt; 1: in this one.
    """

    plan: PartialPlan
    clear: PartEncoding = WHOLE_NUMBERS
    hidden: PartEncoding = WHOLE_NUMBERS
    vote_noise: float = 0.0
    released: bool = False
    processes: int = 1
    result_at_server: ClassVar[bool] = False
    repeatable: ClassVar[bool] = True

    @property
    def clients(self) -> int:
        """All silos."""
        return self.plan.silos

    @property
    def quorum(self) -> int:
        """All silos."""
        return self.plan.silos

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Numbers, ciphertexts, or the sealed keys for all others; the sums of them come back."""
        plan = self.plan
        ciphertexts = (-(-plan.length // plan.ckks.degree) + 1) * 8 * plan.ckks.degree
        size = 8 * plan.length + ciphertexts + (plan.silos + 8) * _FRAME_BYTES
        return size, size

    def exchanges(self, client: int) -> Exchanges:
        """Return the messages: client 0 seals the common keys, which the others are sent."""
        plan = self.plan
        ballot: Shape = (Ballot if plan.ballots == "plain" else MaskedVector,)
        learn = ExchangeStep((PartialSum,), (ModelStored,))

        def played(number: int) -> tuple[Shape, tuple[ExchangeStep, ...]]:
            if plan.votes(number):
                return ballot, (ExchangeStep((Partition,), (PartialUpdate,)), learn)
            return (PartialUpdate,), (learn,)

        return Exchanges(
            joined=(Announcement,),
            setup=(ExchangeStep((Directory,), () if client else (SealedKeys,) * (plan.silos - 1)),),
            first=(SealedKeys,) if client else (),
            begin=(RoundStart,),
            played=played,
        )

    def client_input(self, inputs: ClientInputs, client: int) -> PartialInputs:
        """Return a client's message, and what it proposes the partition by; where nobody votes, what all know."""
        message = inputs.unprotected_sum(client)
        if self.plan.ballots != "none":
            return PartialInputs(values=message, message=message)
        return PartialInputs(
            values=inputs.model_displacement() if self.released else np.zeros(len(message)), message=message
        )

    def decode_sum(self, result: PartialResult) -> Float64[np.ndarray, " d"]:
        """Return the vector of both sums, in the unit of the update."""
        total = np.empty(len(result.partition))
        total[~result.partition] = result.clear * self.clear.grid
        total[result.partition] = result.hidden * self.hidden.grid
        return total

    def divide(
        self,
        message: Float64[np.ndarray, " d"],
        partition: Bool[np.ndarray, " d"],
        round_number: int,
        place: ClientContext,
    ) -> Parts:
        """Return a client's message outside and inside the partition in grid units, each bounded and with its noise.

        Raises:
            ProtocolError: a number that is not finite, in either half.
        """
        silo, privacy = place.number, place.privacy
        if not np.isfinite(message).all():
            raise ProtocolError(f"its update is not {len(message)} finite numbers", silo=silo)
        clear = self.clear.units(message[~partition], privacy, "noise", round_number, silo)
        return clear, self.hidden.units(message[partition], privacy, "encrypted noise", round_number, silo)

    def noise_on_votes(self, round_number: int, place: ClientContext) -> Int64[np.ndarray, " d"] | None:
        """Return a client's share of the noise on the counts of votes of a round; None where they have none."""
        plan = self.plan
        if not plan.ballot_limit or not plan.votes(round_number):
            return None
        law = DiscreteGaussian(std=vote_std(self.vote_noise, plan.n_encrypted(round_number)), grid=1.0)
        source = place.privacy.stream("vote noise", round_number, place.number)
        noise: np.ndarray = np.rint(law.sample((plan.length,), source)).astype(np.int64)
        return noise

    @cached_property
    def workers(self) -> Executor | None:
        """The processes that clients encrypt in, which end with this value; None where it is this one alone."""
        return worker_pool(self.processes, self)

    def pack(self, given: PartialInputs) -> bytes:
        """Return what a client gives as bytes."""
        return given.encode()

    def unpack(self, data: bytes) -> PartialInputs:
        """Return what :meth:`pack` was given."""
        return PartialInputs.decode(data)

    def server(self, run: bytes) -> ServerProtocol[PartialResult]:
        """Return the server's end, which holds no key."""
        return PartialServer(self.plan, run)

    def client(self, context: ClientContext) -> ClientProtocol[PartialInputs, PartialResult]:
        """Return a client's end; client 0 keeps the secret of the ballots' orders for the run."""
        return PartialClient(self, context)


class PartialClient(PartialSilo):
    """A client's end: it divides its message once the partition is known, and keeps both halves before they leave.

    Args:
        agreed: what the parties agree on.
        place: the client's in the session.
    """

    def __init__(self, agreed: PartialEncryptionSpec, place: ClientContext) -> None:
        super().__init__(agreed.plan, place, workers=agreed.workers)
        self._agreed = agreed
        self._given: PartialInputs | None = None

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or what it relays of client 0; return the answers."""
        return super().receive(data) + self._halves()

    def contribute(self, round_id: RoundId, given: PartialInputs) -> list[bytes]:
        """Return a ballot or both halves, once what is given is kept, with its noise on votes."""
        if given.votes is None:
            given = replace(given, votes=self._agreed.noise_on_votes(round_id.round, self._place))
        return super().contribute(round_id, given)

    def _send(self, given: PartialInputs, round_id: RoundId) -> list[bytes]:
        self._given = given
        return self.propose(given.values, given.votes) + self._halves()

    def _halves(self) -> list[bytes]:
        """Return both halves, once the partition is known and they are kept.

        Raises:
            ProtocolError: they were given for another partition before, which hid what this one would show.
        """
        if not self.awaits_encryption or self._given is None:
            return []
        given, self._given = self._given, None
        partition, number = self.partition, self.round_id.round
        if given.divided is None:
            clear, hidden = self._agreed.divide(given.message, partition, number, self._place)
            given = replace(given, divided=SplitUpdate(partition=partition, clear=clear, hidden=hidden))
            self._place.persist(given)
        assert given.divided is not None
        if not np.array_equal(given.divided.partition, partition):
            raise ProtocolError(f"round {number} was answered for another partition", silo=self.index)
        return [self.encrypt_update(given.divided.clear, given.divided.hidden)]


def vote_std(vote_noise: float, votes: int) -> float:
    """Return the standard deviation of one client's noise on a count, for ballots of so many votes."""
    return max(_LEAST_VOTE_STD, vote_noise * math.sqrt(votes))
