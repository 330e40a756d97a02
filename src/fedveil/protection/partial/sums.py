"""Partial encryption as a protocol: vectors in, the sum of both parts out, which the clients alone learn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.agreement import RoundId
from fedveil.protection.ends import ClientEnd
from fedveil.protection.errors import ProtocolError
from fedveil.protection.exchanges import Exchanges, Shape, Step
from fedveil.protection.messages import Announcement, Directory, MaskedVector, RoundStart
from fedveil.protection.partial.encryption import PartialSilo
from fedveil.protection.partial.messages import Ballot, PartialSum, PartialUpdate, Partition, SealedKeys
from fedveil.protection.partial.plan import PartialPlan
from fedveil.protection.partial.server import PartialServer
from fedveil.protection.parts import Learned
from fedveil.protection.protocol import ClientProtocol, Place, ServerProtocol
from fedveil.protection.wire import Reader, Writer

Parts: TypeAlias = tuple[Int64[np.ndarray, " c"], Int64[np.ndarray, " h"]]

_FRAME_BYTES: Final = 1 << 13
"""More than a message has around what it carries, and than the key that it seals."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """A message once it is divided.

    Attributes:
        partition: (d,) which coordinates are encrypted.
        clear: (d - k,) the others with their noise, ascending, in grid units.
        hidden: (k,) those, with theirs.
    """

    partition: Bool[np.ndarray, " d"]
    clear: Int64[np.ndarray, " c"]
    hidden: Int64[np.ndarray, " h"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialGiven:
    """What a client puts into a round.

    Attributes:
        values: (d,) what it votes by, or, where nobody votes, values that are the same for all.
        message: (d,) its message, to be divided once the partition is known; in the unit of the update, no noise yet.
        votes: (d,) its share of the noise on the counts of votes; None where they have none.
        divided: its parts, where it was divided in an earlier session; None until then.
    """

    values: Float64[np.ndarray, " d"]
    message: Float64[np.ndarray, " d"]
    votes: Int64[np.ndarray, " d"] | None = None
    divided: Divided | None = None

    def encode(self) -> bytes:
        """Return the bytes to keep."""
        writer = Writer().block(self.message.astype("<f8").tobytes())
        writer.block(b"" if self.values is self.message else self.values.astype("<f8").tobytes())
        writer.block(b"" if self.votes is None else self.votes.astype("<i8").tobytes())
        if self.divided is not None:
            writer.block(np.packbits(self.divided.partition).tobytes())
            for part in (self.divided.clear, self.divided.hidden):
                writer.block(part.astype("<i8").tobytes())
        return writer.bytes()

    @classmethod
    def decode(cls, data: bytes) -> PartialGiven:
        """Return what :meth:`encode` kept.

        Raises:
            ProtocolError: the bytes are none that it made.
        """
        reader = Reader(data)
        message = _numbers(reader, "<f8")
        values, votes = _numbers(reader, "<f8"), _numbers(reader, "<i8")
        divided = None
        if reader.left:
            bits = np.frombuffer(reader.block(), dtype=np.uint8)
            if len(bits) != -(-len(message) // 8):
                raise ProtocolError(f"a kept partition of {len(message)} coordinates has {len(bits)} bytes")
            partition = np.unpackbits(bits, count=len(message)).astype(np.bool_)
            divided = Divided(
                partition=partition, clear=_numbers(reader, "<i8"), hidden=_numbers(reader, "<i8")
            )
        reader.finish()
        return cls(
            values=values if len(values) else message,
            message=message,
            votes=votes if len(votes) else None,
            divided=divided,
        )


def _numbers(reader: Reader, kept: str) -> np.ndarray:
    content = reader.block()
    if len(content) % 8:
        raise ProtocolError(f"kept numbers of 8 bytes have {len(content)} bytes")
    return np.frombuffer(content, dtype=kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResult:
    """What every client of a cohort has after a round.

    Attributes:
        partition: (d,) which coordinates were encrypted.
        clear: (d - k,) the sum of the others, ascending, in grid units.
        hidden: (k,) the sum of those, ascending, in grid units.
    """

    partition: Bool[np.ndarray, " d"]
    clear: Int64[np.ndarray, " c"]
    hidden: Int64[np.ndarray, " h"]

    def __eq__(self, other: object) -> bool:
        """Return whether partition and both sums are the same."""
        return isinstance(other, PartialResult) and all(
            np.array_equal(mine, its)
            for mine, its in (
                (self.partition, other.partition),
                (self.clear, other.clear),
                (self.hidden, other.hidden),
            )
        )

    __hash__ = None  # type: ignore[assignment]


Divide: TypeAlias = Callable[[Float64[np.ndarray, " d"], Bool[np.ndarray, " d"], int, int], Parts]
"""Returns a message outside and inside a partition, ascending, in grid units, each bounded and with its noise; for the
number of a round and of a client."""


class PartialSums:
    """What the parties of a run under partial encryption agree on.

    Attributes:
        plan: the public numbers; every session gives it a run of its own.

    Args:
        plan: as above.
        divide: divides a client's message.
        workers: makes the processes in which clients encrypt, which end with their owner; None: in this one.
    """

    result_at_server = False
    repeats = True

    def __init__(
        self, plan: PartialPlan, divide: Divide, workers: Callable[[object], Executor | None] | None = None
    ) -> None:
        self.plan, self.divide = plan, divide
        self._workers = None if workers is None else workers(self)

    @property
    def clients(self) -> int:
        """All silos."""
        return self.plan.silos

    @property
    def least(self) -> int:
        """All silos."""
        return self.plan.silos

    @property
    def largest(self) -> tuple[int, int]:
        """Numbers, ciphertexts, or the sealed keys for all others; the sums of them come back."""
        plan = self.plan
        ciphertexts = (-(-plan.length // plan.ckks.degree) + 1) * 8 * plan.ckks.degree
        size = 8 * plan.length + ciphertexts + (plan.silos + 8) * _FRAME_BYTES
        return size, size

    def exchanges(self, client: int) -> Exchanges:
        """Return the messages: client 0 seals the common keys, which the others are sent."""
        plan = self.plan
        ballot: Shape = (Ballot if plan.ballots == "plain" else MaskedVector,)
        learn = Step((PartialSum,), (Learned,))

        def played(number: int) -> tuple[Shape, tuple[Step, ...]]:
            if plan.votes(number):
                return ballot, (Step((Partition,), (PartialUpdate,)), learn)
            return (PartialUpdate,), (learn,)

        return Exchanges(
            joined=(Announcement,),
            setup=(Step((Directory,), () if client else (SealedKeys,) * (plan.silos - 1)),),
            first=(SealedKeys,) if client else (),
            begin=(RoundStart,),
            played=played,
        )

    def pack(self, given: PartialGiven) -> bytes:
        """Return what a client gives as bytes."""
        return given.encode()

    def unpack(self, data: bytes) -> PartialGiven:
        """Return what :meth:`pack` was given."""
        return PartialGiven.decode(data)

    def server(self, run: bytes) -> ServerProtocol[PartialResult]:
        """Return the server's end, which holds no key."""
        return PartialServer(replace(self.plan, run=run))

    def client(self, place: Place) -> ClientProtocol[PartialGiven, PartialResult]:
        """Return a client's end; client 0 keeps the secret of the ballots' orders for the run."""
        silo = PartialSilo(
            replace(self.plan, run=place.run, least=place.least),
            index=place.number,
            identity=place.identity,
            roster=place.roster,
            order_secret=None if place.number else place.secret(),
            workers=self._workers,
        )
        return PartialSumsClient(place, silo, self.divide)


class PartialSumsClient(ClientEnd[PartialGiven, PartialResult]):
    """A client's end.

    Args:
        place: the client's in the session.
        silo: the state machine.
        divide: divides its message.
    """

    def __init__(self, place: Place, silo: PartialSilo, divide: Divide) -> None:
        super().__init__(place, silo)
        self._divided_by = divide
        self._given: PartialGiven | None = None
        self._partition: Bool[np.ndarray, " d"] = np.zeros(0, dtype=np.bool_)

    @property
    def awaits_input(self) -> bool:
        """Whether a round has begun."""
        proposes: bool = self._silo.proposes
        return proposes

    @property
    def binding(self) -> bytes:
        """What the orders of ballots are drawn from: another order of the same ballot would show more of it."""
        return sha256(self._silo.order_secret).digest()

    @property
    def learned(self) -> bool:
        """Whether the sum has arrived."""
        summed: bool = self._silo.summed
        return summed

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or what it relays of client 0; return the answers."""
        return super().receive(data) + self._divide()

    def result(self) -> PartialResult:
        """Return the sums of both parts, once they have arrived."""
        clear, hidden = self._silo.result()
        return PartialResult(partition=self._partition, clear=clear, hidden=hidden)

    def tag(self, content: bytes) -> bytes:
        """Return a digest under the clients' common key."""
        tag: bytes = self._silo.tag(content)
        return tag

    def _send(self, given: PartialGiven, round_id: RoundId) -> list[bytes]:
        self._given = given
        sent: list[bytes] = self._silo.propose(given.values, given.votes)
        return sent + self._divide()

    def _divide(self) -> list[bytes]:
        """Return both parts, once the partition is known and they are kept.

        Raises:
            ProtocolError: they were given for another partition before, which hid what this one would show.
        """
        if not self._silo.divided or self._given is None:
            return []
        given, self._given = self._given, None
        partition, number = self._silo.partition, self._silo.round_id.round
        if given.divided is None:
            clear, hidden = self._divided_by(given.message, partition, number, self._place.number)
            given = replace(given, divided=Divided(partition=partition, clear=clear, hidden=hidden))
            self._place.keep(given)
        assert given.divided is not None
        if not np.array_equal(given.divided.partition, partition):
            raise ProtocolError(f"round {number} was answered for another partition", silo=self._place.number)
        self._partition = partition
        return [self._silo.contribute(given.divided.clear, given.divided.hidden)]
