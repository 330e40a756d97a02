"""Secure aggregation that goes on without silos that vanish, as silo and coordinator of a federation use it.

    round:  start, task -> fresh signed keys -> directory -> sealed shares -> relayed shares -> masked vectors ->
            survivors -> signatures -> all signatures -> shares

Claim: of every attempt at a round the coordinator learns one sum, over at least ``threshold`` silos, whose shares of
the noise alone give what the statement says. Conditions and where they are enforced:

- A vector is in one sum alone. A silo draws noise anew whenever a round is asked for, and charges its users again
  (:attr:`RecoveredShare.repeats`, ``SiloParty._sum``); it reveals shares once an attempt (``RecoverableSilo``).
- Two attempts have each their own users where users are sampled: the coordinator draws them anew.
- Whatever the coordinator says to whom, an attempt opens the sum over one list of survivors or nothing: silos sign the
  list, and the threshold is above half (``fedveil.protection.recoverable_aggregation``, ``check_threshold``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.crypto.agreement import RoundId
from fedveil.engine.aggregation import MaskedRange
from fedveil.federation.errors import RefusalError
from fedveil.federation.hidden_sums import HiddenShare, HiddenSum, Outgoing, Place
from fedveil.federation.masked_sums import session_plan
from fedveil.federation.shapes import Exchanges, Step
from fedveil.federation.store import Answered
from fedveil.protection.messages import MaskedVector, RoundStart
from fedveil.protection.recoverable_aggregation import RecoverableServer, RecoverableSilo
from fedveil.protection.recovery_messages import (
    AgreedSurvivors,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
)

_FOLLOWING = (
    Step((RecoveryDirectory,), (ShareBundle,)),
    Step((RelayedShares,), (MaskedVector,)),
    Step((Survivors,), (SignedSurvivors,)),
    Step((AgreedSurvivors,), (RevealedShares,)),
)
RECOVERED = Exchanges(begin=(RoundStart,), played=lambda _: ((RecoveryKeys,), _FOLLOWING))
"""The letters of secure aggregation that recovers, with every silo that is there."""

_BUNDLE_BYTES = 512
"""More than one silo's sealed shares for another take in a message."""


class RecoveredSum(HiddenSum):
    """The coordinator's side, for one session.

    Args:
        agreed: the range of the messages, with a threshold.
        run: 16 bytes that name the session.
    """

    def __init__(self, agreed: MaskedRange, run: bytes) -> None:
        assert agreed.threshold is not None
        self._agreed, self._plan, self.least = agreed, session_plan(agreed, run), agreed.threshold
        self._server = RecoverableServer(self._plan, threshold=agreed.threshold)

    @property
    def largest(self) -> int:
        """How long a silo's letter may be: its vector, or its shares for all others."""
        return 8 * self._plan.length + _BUNDLE_BYTES * self._plan.silos + (1 << 16)

    @property
    def repeats(self) -> bool:
        """Another attempt has other noise, perhaps other silos, and costs another charge."""
        return False

    @property
    def summed(self) -> int:
        """The silos whose vectors arrived."""
        return len(self._server.survivors)

    def begin(
        self, round_number: int, drawn: Bool[np.ndarray, " users"] | None, silos: tuple[int, ...]
    ) -> Outgoing:
        """Begin a round with the silos that are there; who is drawn, they are told by the coordinator."""
        return self._server.begin(RoundId(run=self._plan.run, round=round_number, attempt=0), silos)

    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message; return those that follow once the last of the step is in."""
        return self._server.receive(silo, message)

    def read(self, messages: Mapping[int, Sequence[bytes]]) -> Outgoing:
        """Read the messages of one step; silos without one have vanished, and the others go on.

        Raises:
            ProtocolError: too few are left, or a message that must not be accepted.
        """
        vanished = {silo for silo in self._server.missing if not messages.get(silo)}
        outgoing = super().read(messages)
        return self._server.proceed() if vanished else outgoing

    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the sum of the surviving silos' vectors, exact."""
        return self._agreed.vector(self._server.result())


class RecoveredShare(HiddenShare):
    """A silo's side, for one session.

    Args:
        agreed: the range of the messages, with a threshold.
        place: the silo's in the session.
    """

    def __init__(self, agreed: MaskedRange, place: Place) -> None:
        assert agreed.threshold is not None
        self._agreed = agreed
        plan = session_plan(agreed, place.run)
        self._silo = RecoverableSilo(
            plan, threshold=agreed.threshold, index=place.number, identity=place.identity, roster=place.roster
        )
        super().__init__(self._silo, place.run)

    @property
    def repeats(self) -> bool:
        """Another attempt may be a sum over other silos, so it has other noise and is charged again."""
        return False

    def follow(self, last: Answered | None, round_number: int) -> None:
        """Return if a round may follow the last one that was answered; those in between were played without the silo.

        Raises:
            RefusalError: an earlier round.
        """
        if last is not None and round_number < last.round:
            raise RefusalError("replay", f"round {round_number} is over, the last answered is {last.round}")

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""
        return self._silo.awaits_input

    def receive(self, message: bytes) -> list[bytes]:
        """Read a message of the coordinator; return the answers."""
        return self._silo.receive(message)

    def contribute(self, answered: Answered) -> list[bytes]:
        """Return the silo's noisy sum, multiples of the grid, under the masks of this attempt."""
        return [self._silo.contribute(self._agreed.units(answered.vector))]
