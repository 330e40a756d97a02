"""Secure aggregation as silo and coordinator of a federation use it: every silo is in every sum.

The noisy sum that a silo puts into a round is kept and given again under fresh masks whenever the round is asked for.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.crypto.agreement import RoundId
from fedveil.engine.aggregation import MaskedRange
from fedveil.federation.errors import RefusalError
from fedveil.federation.hidden_sums import HiddenShare, HiddenSum, Outgoing, Place
from fedveil.federation.shapes import Exchanges, Step
from fedveil.federation.store import Answered
from fedveil.protection.messages import (
    Announcement,
    Directory,
    Envelope,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protection.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo

MASKED = Exchanges(
    joined=(Announcement,),
    first=(Directory,),
    begin=(RoundStart,),
    played=lambda _: ((MaskedVector,), (Step((RevealRequest,), (OwnMask,)),)),
)
"""The letters of secure aggregation with every silo."""


class MaskedSum(HiddenSum):
    """Secure aggregation, the coordinator's side.

    Args:
        agreed: the range of the messages.
        run: 16 bytes that name the session.
    """

    def __init__(self, agreed: MaskedRange, run: bytes) -> None:
        self._plan = session_plan(agreed, run)
        self._agreed = agreed
        self._server = AggregationServer(self._plan)
        self._announced: set[int] = set()
        self.least = self._plan.silos

    @property
    def largest(self) -> int:
        """How long a silo's letter may be: its vector, or its keys."""
        return 8 * self._plan.length + (1 << 16)

    @property
    def ready(self) -> bool:
        """Whether every silo's key has arrived."""
        return len(self._announced) == self._plan.silos

    @property
    def summed(self) -> int:
        """All silos."""
        return self._plan.silos

    def begin(
        self, round_number: int, drawn: Bool[np.ndarray, " users"] | None, silos: tuple[int, ...]
    ) -> Outgoing:
        """Begin a round with all silos; who is drawn, the silos are told by the coordinator."""
        return self._server.begin(RoundId(run=self._plan.run, round=round_number, attempt=0), silos)

    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message; return those that follow."""
        follow = self._server.receive(silo, message)
        self._announced.add(silo)
        return follow

    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the sum of all silos' vectors, exact."""
        return self._agreed.vector(self._server.result())


class MaskedShare(HiddenShare):
    """Secure aggregation, a silo's side.

    Args:
        agreed: the range of the messages.
        place: the silo's in the session.
    """

    def __init__(self, agreed: MaskedRange, place: Place) -> None:
        self._plan = session_plan(agreed, place.run)
        self._agreed = agreed
        self._silo = AggregationSilo(
            self._plan, index=place.number, identity=place.identity, roster=place.roster
        )
        super().__init__(self._silo, place.run)

    def announce(self) -> bytes:
        """Return the first message: the silo's signed key."""
        return self._silo.announce()

    def receive(self, message: bytes) -> list[bytes]:
        """Read a message of the coordinator; return the answers.

        Raises:
            RefusalError: a round with fewer silos. The noisy sum of a round is the same in every attempt, so two sums
                over different silos would show their difference.
            ProtocolError: a message that must not be accepted.
        """
        content = Envelope.decode(message).message
        if isinstance(content, RoundStart) and len(content.cohort) != self._plan.silos:
            raise RefusalError(
                "request",
                f"a sum over {len(content.cohort)} of {self._plan.silos} silos is asked for; all must be in",
            )
        return self._silo.receive(message)

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""
        return self._silo.awaits_input

    def contribute(self, answered: Answered) -> list[bytes]:
        """Return the silo's noisy sum, multiples of the grid, under fresh masks."""
        return [self._silo.contribute(self._agreed.units(answered.vector))]


def session_plan(agreed: MaskedRange, run: bytes) -> AggregationPlan:
    """Return what the parties of one session agree on."""
    return AggregationPlan(run=run, silos=agreed.silos, length=agreed.length, limit=agreed.limit)
