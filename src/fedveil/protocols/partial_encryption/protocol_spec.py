"""Specify partial encryption as a protocol: the clients put in vectors and alone learn the sum."""

from __future__ import annotations

import math
import multiprocessing
import os
import weakref
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Thread
from typing import ClassVar, Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.key_agreement import RoundId
from fedveil.errors import ProtocolError
from fedveil.privacy.noise import DiscreteGaussian
from fedveil.protocols.messages import Announcement, Directory, MaskedVector, RoundStart
from fedveil.protocols.partial_encryption.plan import (
    WHOLE_NUMBERS,
    Ballot,
    PartEncoding,
    PartialInputs,
    PartialPlan,
    PartialResult,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
    SplitUpdate,
)
from fedveil.protocols.partial_encryption.server import PartialServer
from fedveil.protocols.partial_encryption.silo import PartialSilo
from fedveil.protocols.protocol import (
    ClientContext,
    ClientInputs,
    ClientProtocol,
    Exchanges,
    ExchangeStep,
    ServerProtocol,
    Shape,
)
from fedveil.protocols.session_messages import ModelStored

# --- workers ------------------------------------------------------------------------------------------------
# Start the worker processes in which the clients of one process encrypt.


def worker_pool(processes: int, owner: object) -> Executor | None:
    """Return a pool of processes that ends with its owner; None if one process suffices.

    Args:
        processes: wanted number of processes; the pool has at most one per CPU core.
        owner: object whose garbage collection shuts the pool down.
    """
    # The coordinator chooses `processes`, but a silo's machine may have fewer cores than the coordinator's.
    count = min(processes, os.cpu_count() or 1)
    if count == 1:
        return None
    spawned = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(count, mp_context=spawned, initializer=end_with_parent)
    weakref.finalize(owner, workers.shutdown)
    return workers


def end_with_parent() -> None:
    """End this process when its parent process ends; otherwise the worker would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end only this thread

    Thread(target=watch, daemon=True).start()


# --- protocol specification ---------------------------------------------------------------------------------


Parts: TypeAlias = tuple[Int64[np.ndarray, " c"], Int64[np.ndarray, " h"]]

_FRAME_BYTES: Final = 1 << 13
"""Upper bound, in bytes, of the overhead of a message around its payload, and of a sealed key."""
_LEAST_VOTE_STD: Final = 4.0
"""Least standard deviation of noise on votes, in votes.

From this value on, sums of integer noise have the Renyi divergences of Gaussian noise up to 1e-60, as the accountant
``rdp`` assumes.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialEncryptionSpec:
    """Public specification of partial encryption for all parties of a run.

    A client splits its message once the partition is known. Each part is bounded separately and carries its own
    noise. Each part is sent as integers in units of its grid, so both sums are exact. Only a part without a bound is
    rounded to its grid.

    Attributes:
        plan: public sizes, limits and partition rule.
        clear: bound, noise and grid of the part in the clear.
        hidden: bound, noise and grid of the encrypted part.
        vote_noise: standard deviation of one client's noise on a count of votes, divided by the square root of the
            votes of a ballot (see :func:`vote_std`); 0 for no noise.
        released: whether the partition follows from the released models, if no silo votes.
        processes: number of processes in which clients encrypt; 1 encrypts in the current process.
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
        """Number of silos."""
        return self.plan.silos

    @property
    def quorum(self) -> int:
        """Number of all silos: every silo must answer."""
        return self.plan.silos

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Most bytes of one exchange, the same in both directions: numbers and ciphertexts, or sealed keys."""
        plan = self.plan
        ciphertexts = (-(-plan.length // plan.ckks.degree) + 1) * 8 * plan.ckks.degree
        size = 8 * plan.length + ciphertexts + (plan.silos + 8) * _FRAME_BYTES
        return size, size

    def exchanges(self, client: int) -> Exchanges:
        """Return the exchanges of a session; client 0 seals the common keys, the other clients receive them."""
        plan = self.plan
        ballot: Shape = (Ballot if plan.ballots == "plain" else MaskedVector,)
        learn = ExchangeStep((PartialSum,), (ModelStored,))

        def played(number: int) -> tuple[Shape, tuple[ExchangeStep, ...]]:
            if plan.votes(number):
                return ballot, (ExchangeStep((Partition,), (PartialUpdate,)), learn)
            return (PartialUpdate,), (learn,)

        return Exchanges(
            on_join=(Announcement,),
            setup=(ExchangeStep((Directory,), () if client else (SealedKeys,) * (plan.silos - 1)),),
            session_start=(SealedKeys,) if client else (),
            round_start=(RoundStart,),
            answers=played,
        )

    def client_input(self, inputs: ClientInputs, client: int) -> PartialInputs:
        """Return a client's message, and the values by which it votes or computes the partition."""
        message = inputs.unprotected_sum(client)
        if self.plan.ballots != "none":
            return PartialInputs(values=message, message=message)
        return PartialInputs(
            values=inputs.model_displacement() if self.released else np.zeros(len(message)), message=message
        )

    def decode_sum(self, result: PartialResult) -> Float64[np.ndarray, " d"]:
        """Join both sums to one (d,) vector in the unit of the update."""
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
        """Split a client's message by the partition; bound each part, add its noise, and round it to its grid.

        Args:
            message: (d,) in the unit of the update, without noise.
            partition: (d,) bool, True for encrypted coordinates.
            round_number: number of the round, for the noise stream.
            place: context of the client, with its source of noise.

        Returns:
            The part in the clear (d - k,) and the encrypted part (k,), int64 in units of their grids.

        Raises:
            ProtocolError: a number of the message is not finite.
        """
        silo, privacy = place.number, place.privacy
        # Before the split: np.clip in PartEncoding.units would turn an infinite number into a valid one.
        if not np.isfinite(message).all():
            raise ProtocolError(f"its update is not {len(message)} finite numbers", silo=silo)
        clear = self.clear.units(message[~partition], privacy, "noise", round_number, silo)
        return clear, self.hidden.units(message[partition], privacy, "encrypted noise", round_number, silo)

    def noise_on_votes(self, round_number: int, place: ClientContext) -> Int64[np.ndarray, " d"] | None:
        """Return a client's (d,) share of the noise on the counts of votes; None if votes have no noise."""
        plan = self.plan
        if not plan.ballot_limit or not plan.votes(round_number):
            return None
        law = DiscreteGaussian(std=vote_std(self.vote_noise, plan.n_encrypted(round_number)), grid=1.0)
        source = place.privacy.stream("vote noise", round_number, place.number)
        noise: np.ndarray = np.rint(law.sample((plan.length,), source)).astype(np.int64)
        return noise

    @cached_property
    def workers(self) -> Executor | None:
        """Pool of processes in which clients encrypt, ended with this object; None for the current process."""
        return worker_pool(self.processes, self)

    def pack(self, client_input: PartialInputs) -> bytes:
        """Return a client's input as bytes."""
        return client_input.encode()

    def unpack(self, data: bytes) -> PartialInputs:
        """Return the input that :meth:`pack` encoded."""
        return PartialInputs.decode(data)

    def server(self, run: bytes) -> ServerProtocol[PartialResult]:
        """Return the server's end of a session; it holds no key of the encryption."""
        return PartialServer(self.plan, run)

    def client(self, context: ClientContext) -> ClientProtocol[PartialInputs, PartialResult]:
        """Return a client's end of a session; client 0 stores the secret of the ballots' orders for the run."""
        return PartialClient(self, context)


class PartialClient(PartialSilo):
    """Client's end: splits its message once the partition is known, and persists both parts first.

    Args:
        spec: public specification of the protocol.
        context: context of the client in the session.
    """

    def __init__(self, spec: PartialEncryptionSpec, context: ClientContext) -> None:
        super().__init__(spec.plan, context, workers=spec.workers)
        self._spec = spec
        self._client_input: PartialInputs | None = None

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or a message of client 0 that it relays; return the answers."""
        return super().receive(data) + self._halves()

    def contribute(self, round_id: RoundId, client_input: PartialInputs) -> list[bytes]:
        """Draw the noise on votes, persist the input with it, and return a ballot or both parts."""
        # The noise is part of the persisted input: a repeated ballot with fresh noise would be a second release.
        if client_input.votes is None:
            client_input = replace(client_input, votes=self._spec.noise_on_votes(round_id.round, self._place))
        return super().contribute(round_id, client_input)

    def _send(self, client_input: PartialInputs, round_id: RoundId) -> list[bytes]:
        self._client_input = client_input
        return self.propose(client_input.values, client_input.votes) + self._halves()

    def _halves(self) -> list[bytes]:
        """Return both parts once the partition is known; persist them before they are sent.

        Raises:
            ProtocolError: the parts were sent for another partition before. Coordinates that were encrypted then
                would now be sent in the clear.
        """
        if not self.awaits_encryption or self._client_input is None:
            return []
        client_input, self._client_input = self._client_input, None
        partition, number = self.partition, self.round_id.round
        if client_input.divided is None:
            clear, hidden = self._spec.divide(client_input.message, partition, number, self._place)
            client_input = replace(
                client_input, divided=SplitUpdate(partition=partition, clear=clear, hidden=hidden)
            )
            # Before the parts leave: after a crash the same parts must go out, not the message with fresh noise.
            self._place.persist(client_input)
        assert client_input.divided is not None
        if not np.array_equal(client_input.divided.partition, partition):
            raise ProtocolError(f"round {number} was answered for another partition", silo=self.index)
        return [self.encrypt_update(client_input.divided.clear, client_input.divided.hidden)]


def vote_std(vote_noise: float, votes: int) -> float:
    """Return the standard deviation of one client's noise on a count, for ballots of ``votes`` votes."""
    return max(_LEAST_VOTE_STD, vote_noise * math.sqrt(votes))
