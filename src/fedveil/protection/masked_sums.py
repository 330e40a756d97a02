"""Secure aggregation as a protocol of whole numbers, with recovery of vanished clients or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.agreement import RUN_BYTES, RoundId
from fedveil.protection.errors import ProtocolError
from fedveil.protection.protocol import (
    ClientProtocol,
    Drawn,
    Outgoing,
    Place,
    ServerProtocol,
)
from fedveil.protection.recoverable_aggregation import RecoverableServer, RecoverableSilo, check_threshold
from fedveil.protection.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo

Units: TypeAlias = Int64[np.ndarray, " d"]


@dataclass(frozen=True, kw_only=True)
class MaskedSums:
    """What all parties of a run under secure aggregation agree on.

    Attributes:
        clients: how many clients there are.
        length: d, coordinates of a vector.
        limit: largest absolute value of a client's coordinate, noise included, in grid units.
        threshold: how many clients must survive a round with recovery; None: every client must.

    Raises:
        ProtocolError: fewer than two clients, sums that would not fit, or a threshold not above half of the clients.
    """

    clients: int
    length: int
    limit: int
    threshold: int | None = None
    result_at_server: bool = True

    def __post_init__(self) -> None:
        self.plan(bytes(RUN_BYTES))
        if self.threshold is not None:
            check_threshold(self.threshold, self.clients)

    def plan(self, run: bytes) -> AggregationPlan:
        """Return what the parties of one session agree on."""
        return AggregationPlan(run=run, silos=self.clients, length=self.length, limit=self.limit)

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end."""
        plan = self.plan(run)
        if self.threshold is None:
            return MaskedServer(AggregationServer(plan))
        return MaskedServer(RecoverableServer(plan, threshold=self.threshold))

    def client(self, place: Place) -> ClientProtocol[Units, Units]:
        """Return a client's end."""
        plan = self.plan(place.run)
        if self.threshold is None:
            return MaskedClient(
                AggregationSilo(plan, index=place.number, identity=place.identity, roster=place.roster)
            )
        return MaskedClient(
            RecoverableSilo(
                plan,
                threshold=self.threshold,
                index=place.number,
                identity=place.identity,
                roster=place.roster,
            )
        )


class MaskedServer:
    """The server's end: learns the sum of the cohort, or with recovery of those that are left.

    Args:
        server: the state machine.
    """

    def __init__(self, server: AggregationServer | RecoverableServer) -> None:
        self._server = server

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients whose message for the present step has not arrived."""
        return self._server.missing

    @property
    def enough(self) -> bool:
        """Whether the attempt can go on without the missing: never without recovery."""
        return self._server.enough

    @property
    def may_have_released(self) -> bool:
        """Whether own masks, or shares of them, were asked for."""
        return self._server.may_have_released

    @property
    def summed(self) -> int:
        """How many clients' vectors the sum is over."""
        return len(self._server.survivors)

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt with a cohort; who is drawn, its vectors say."""
        return self._server.begin(round_id, cohort)

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; return those that follow."""
        return self._server.receive(sender, data)

    def proceed(self) -> Outgoing:
        """Go on with the clients that have answered."""
        return self._server.proceed()

    def result(self) -> Units:
        """Return the sum, in grid units."""
        return self._server.result()


class MaskedClient:
    """A client's end.

    Args:
        silo: the state machine.
    """

    def __init__(self, silo: AggregationSilo | RecoverableSilo) -> None:
        self._silo = silo

    def announce(self) -> bytes | None:
        """Return the first message: with recovery the server's comes first."""
        return self._silo.announce()

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server; return the answers."""
        return self._silo.receive(data)

    def contribute(self, round_id: RoundId, given: Units) -> list[bytes]:
        """Return the vector under its masks; the server's message has begun the round."""
        self._silo.check_round(round_id)
        return [self._silo.contribute(given)]

    def result(self) -> Units:
        """Refuse: the sum is the server's."""
        raise ProtocolError("under secure aggregation clients learn no sum", silo=self._silo.index)
