"""The protections' protocols as silo and coordinator of a federation use them: one session each, noisy sums in and out.

The protocols count in whole numbers of grid steps and name their runs by 16 bytes; here are the vectors in the unit of
the update, and a session of a run. No key outlives its session, so a party that was restarted uses none twice.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.crypto.agreement import RUN_BYTES, Moment
from fedveil.crypto.keys import IdentityKey
from fedveil.engine.aggregation import MaskedRange
from fedveil.engine.federation.errors import RefusalError
from fedveil.protection.messages import Envelope, RoundStart
from fedveil.protection.peers import Roster
from fedveil.protection.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo

Outgoing = list[tuple[int, bytes]]
"""Messages of the coordinator: recipient and bytes."""


class HiddenSum(Protocol):
    """The coordinator's side of a protection, for one session."""

    @property
    def ready(self) -> bool:
        """Whether the setup is complete, so that a round may begin."""
        ...

    @property
    def largest(self) -> int:
        """How long a silo's letter may be."""
        ...

    @property
    def repeats(self) -> bool:
        """Whether a round that is asked for in another session has the same sum, and so costs nothing."""
        ...

    def begin(self, round_number: int, drawn: Bool[np.ndarray, " users"] | None) -> Outgoing:
        """Begin a round; each round of a session once."""
        ...

    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message."""
        ...

    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the sum of the round, once no message is awaited any longer."""
        ...


class MaskedSum:
    """Secure aggregation, the coordinator's side.

    Args:
        agreed: the range of the messages.
        run: 16 bytes, the federation's run.
        session: the session of the run.
    """

    def __init__(self, agreed: MaskedRange, *, run: bytes, session: int) -> None:
        self._plan = _plan(agreed, run, session)
        self._grid = agreed.grid
        self._server = AggregationServer(self._plan)
        self._announced: set[int] = set()

    @property
    def largest(self) -> int:
        """How long a silo's letter may be: its vector, or its keys."""
        return 8 * self._plan.length + (1 << 16)

    @property
    def repeats(self) -> bool:
        """A silo's vector of a round is always the same."""
        return True

    @property
    def ready(self) -> bool:
        """Whether every silo's key has arrived."""
        return len(self._announced) == self._plan.silos

    def begin(self, round_number: int, drawn: Bool[np.ndarray, " users"] | None) -> Outgoing:
        """Begin a round with all silos; who is drawn, the silos are told by the coordinator."""
        moment = Moment(run=self._plan.run, round=round_number, attempt=0)
        return self._server.begin(moment, tuple(range(self._plan.silos)))

    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message; return those that follow."""
        follow = self._server.receive(silo, message)
        self._announced.add(silo)
        return follow

    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the sum of all silos' vectors, exact."""
        return np.asarray(self._server.result() * self._grid)


class MaskedShare:
    """Secure aggregation, a silo's side.

    Args:
        agreed: the range of the messages.
        run: 16 bytes, the federation's run.
        session: the session of the run.
        number: the silo's own.
        identity: its long-term key.
        roster: all silos' public identities.
    """

    def __init__(
        self,
        agreed: MaskedRange,
        *,
        run: bytes,
        session: int,
        number: int,
        identity: IdentityKey,
        roster: Roster,
    ) -> None:
        self._plan = _plan(agreed, run, session)
        self._grid = agreed.grid
        self._silo = AggregationSilo(self._plan, index=number, identity=identity, roster=roster)

    def announce(self) -> bytes:
        """Return the first message."""
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
    def begun(self) -> bool:
        """Whether a round has begun, so that its task can be read."""
        return self._silo.awaits_input

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""
        return self._silo.awaits_input

    def contribute(self, vector: Float64[np.ndarray, " d"]) -> bytes:
        """Return the silo's noisy sum under fresh masks.

        Args:
            vector: (d,) multiples of the grid.
        """
        return self._silo.contribute((vector / self._grid).astype(np.int64))


def _plan(agreed: MaskedRange, run: bytes, session: int) -> AggregationPlan:
    return AggregationPlan(
        run=session_run(run, session), silos=agreed.silos, length=agreed.length, limit=agreed.limit
    )


def session_run(run: bytes, session: int) -> bytes:
    """Return the 16 bytes that name one session of a run in a protocol."""
    return hashlib.sha256(b"fedveil/1/session" + run + session.to_bytes(4, "big")).digest()[:RUN_BYTES]
