"""Private weighting as a protocol: contributions of weight 1 in, the server's weighted sum out, in grid units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.crypto.agreement import RoundId
from fedveil.protection.errors import ProtocolError
from fedveil.protection.private_weighting import Contributions, Evaluator, KeyHolder
from fedveil.protection.protocol import ClientProtocol, Drawn, Outgoing, Place, ServerProtocol
from fedveil.protection.weighting_plan import WeightingPlan
from fedveil.protection.weighting_server import WeightingServer
from fedveil.protection.weighting_silo import WeightingSilo

Units = Float64[np.ndarray, " d"]


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedGiven:
    """What a client puts into a round.

    Attributes:
        contributions: (m, d) clipped contributions of weight 1 of the users it has records of, ascending; grid units.
        noise: (d,) its exact integer share of the noise, in grid units.
        dither: 32-byte key of its share of the remainders modulo C; None: a new one.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedSums:
    """What the parties of a run under private weighting agree on, and what each client alone knows: its counts.

    Attributes:
        plan: the public numbers; every session gives it a run of its own.
        counts: (|S|, |U|) n_{s,u}; row s is given to client s alone.
        holder: makes the cipher's key holder, for the server.
        evaluator: makes the cipher's evaluator of the server's public key, for a client.
    """

    plan: WeightingPlan
    counts: Int64[np.ndarray, "silos users"] = field(repr=False)
    holder: Callable[[WeightingPlan], KeyHolder]
    evaluator: Callable[[WeightingPlan, bytes], Evaluator]
    result_at_server: bool = True

    @property
    def clients(self) -> int:
        """All silos."""
        return self.plan.silos

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end, with a new key of the cipher."""
        plan = replace(self.plan, run=run)
        return WeightedServer(plan, WeightingServer(plan, self.holder(plan)))

    def client(self, place: Place) -> ClientProtocol[WeightedGiven, Units]:
        """Return a client's end.

        Raises:
            ProtocolError: counts that the plan does not allow, naming the silo.
        """
        return WeightedClient(
            WeightingSilo(
                replace(self.plan, run=place.run),
                index=place.number,
                identity=place.identity,
                roster=place.roster,
                counts=self.counts[place.number],
                evaluator=self.evaluator,
            )
        )


class WeightedServer:
    """The server's end: learns the weighted noisy sum of all clients.

    Args:
        plan: what all parties agree on.
        server: the state machine.
    """

    enough = False

    def __init__(self, plan: WeightingPlan, server: WeightingServer) -> None:
        self._plan, self._server = plan, server

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients whose message for the present step has not arrived."""
        return self._server.missing

    @property
    def may_have_released(self) -> bool:
        """Whether own masks of the attempt were asked for."""
        return self._server.may_have_released

    @property
    def summed(self) -> int:
        """All clients."""
        return self._plan.silos

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt with all clients: with encrypted weights of the drawn users, or an offer to draw them."""
        by_server = self._plan.renewed and not self._plan.places
        return self._server.begin(round_id, drawn if by_server else None)

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; return those that follow."""
        return self._server.receive(sender, data)

    def proceed(self) -> Outgoing:
        """Refuse: the weights of the others depend on the records of who is missing."""
        return self._server.proceed()

    def result(self) -> Units:
        """Return the weighted noisy sum, in grid units."""
        return self._server.result()


class WeightedClient:
    """A client's end.

    Args:
        silo: the state machine.
    """

    def __init__(self, silo: WeightingSilo) -> None:
        self._silo = silo

    def announce(self) -> bytes | None:
        """Return the first message: the client's signed key."""
        return self._silo.announce()

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or what it relays of client 0; return the answers."""
        return self._silo.receive(data)

    def contribute(self, round_id: RoundId, given: WeightedGiven) -> list[bytes]:
        """Return the encrypted weighted sum; the server's message has begun the round."""
        self._silo.check_round(round_id)
        return [self._silo.contribute(given.contributions, given.noise, given.dither)]

    def result(self) -> Units:
        """Refuse: the sum is the server's."""
        raise ProtocolError("under private weighting clients learn no sum", silo=self._silo.index)
