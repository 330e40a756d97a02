"""Partial encryption as a protocol: vectors in, the sum of both parts out, which the clients alone learn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.agreement import RoundId
from fedveil.protection.errors import ProtocolError
from fedveil.protection.partial_encryption import PartialSilo
from fedveil.protection.partial_plan import PartialPlan
from fedveil.protection.partial_server import PartialServer
from fedveil.protection.protocol import ClientProtocol, Drawn, Outgoing, Place, ServerProtocol

Parts: TypeAlias = tuple[Int64[np.ndarray, " c"], Int64[np.ndarray, " h"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialGiven:
    """What a client puts into a round.

    Attributes:
        values: (d,) what it votes by, or, where nobody votes, values that are the same for all.
        split: its coordinates outside and inside the partition, ascending, in grid units, with their noise; called
            once the partition is known.
        votes: (d,) its share of the noise on the counts of votes; None where they have none.
    """

    values: Float64[np.ndarray, " d"]
    split: Callable[[Bool[np.ndarray, " d"]], Parts]
    votes: Int64[np.ndarray, " d"] | None = None


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


class PartialSums:
    """What the parties of a run under partial encryption agree on.

    Attributes:
        plan: the public numbers; every session gives it a run of its own.

    Args:
        plan: as above.
        workers: makes the processes in which clients encrypt, which end with their owner; None: in this one.
    """

    result_at_server = False

    def __init__(self, plan: PartialPlan, workers: Callable[[object], Executor | None] | None = None) -> None:
        self.plan = plan
        self._workers = None if workers is None else workers(self)

    @property
    def clients(self) -> int:
        """All silos."""
        return self.plan.silos

    def server(self, run: bytes) -> ServerProtocol[PartialResult]:
        """Return the server's end, which holds no key."""
        return PartialSumsServer(PartialServer(replace(self.plan, run=run)))

    def client(self, place: Place) -> ClientProtocol[PartialGiven, PartialResult]:
        """Return a client's end."""
        return PartialSumsClient(
            PartialSilo(
                replace(self.plan, run=place.run),
                index=place.number,
                identity=place.identity,
                roster=place.roster,
                workers=self._workers,
            )
        )


class PartialSumsServer:
    """The server's end: adds up what it cannot read.

    Args:
        server: the state machine.
    """

    enough = False
    may_have_released = True

    def __init__(self, server: PartialServer) -> None:
        self._server = server
        self._cohort: tuple[int, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients whose message for the present step has not arrived."""
        return self._server.missing

    @property
    def summed(self) -> int:
        """All of the cohort."""
        return len(self._cohort)

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt with a cohort; who is drawn, its vectors say."""
        self._cohort = cohort
        return self._server.begin(round_id, cohort)

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; return those that follow."""
        return self._server.receive(sender, data)

    def proceed(self) -> Outgoing:
        """Refuse: every message of the cohort is awaited."""
        return self._server.proceed()

    def result(self) -> PartialResult:
        """Refuse: the sum is the clients' alone."""
        raise ProtocolError("under partial encryption the server learns no sum")


class PartialSumsClient:
    """A client's end.

    Args:
        silo: the state machine.
    """

    def __init__(self, silo: PartialSilo) -> None:
        self._silo = silo
        self._given: PartialGiven | None = None
        self._partition: Bool[np.ndarray, " d"] = np.zeros(0, dtype=np.bool_)

    def announce(self) -> bytes | None:
        """Return the first message: the client's signed key."""
        return self._silo.announce()

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or what it relays of client 0; return the answers."""
        return self._silo.receive(data) + self._divide()

    def contribute(self, round_id: RoundId, given: PartialGiven) -> list[bytes]:
        """Return the votes, or where nobody votes both parts; the server's message has begun the round."""
        self._silo.check_round(round_id)
        self._given = given
        return self._silo.propose(given.values, given.votes) + self._divide()

    def result(self) -> PartialResult:
        """Return the sums of both parts, once they have arrived."""
        clear, hidden = self._silo.result()
        return PartialResult(partition=self._partition, clear=clear, hidden=hidden)

    def _divide(self) -> list[bytes]:
        """Return both parts, once the partition is known."""
        if not self._silo.divided or self._given is None:
            return []
        given, self._given = self._given, None
        self._partition = self._silo.partition
        return [self._silo.contribute(*given.split(self._partition))]
