"""All parties of a session in one process: messages between them are bytes, and are lost if their recipient is."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Generic

from fedveil.crypto.key_agreement import RUN_BYTES, RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.protocols.errors import ProtocolError, SiloVanished
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.protocol import ClientContext, Drawn, GivenT, ProtocolSpec, ResultT
from fedveil.protocols.transcript import Transcript
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True)
class Dropouts:
    """Which clients vanish in an attempt, and when.

    Attributes:
        before_input: they never send their vector.
        before_reveal: they send it, and then do not help to open the sum.
    """

    before_input: frozenset[int] = frozenset()
    before_reveal: frozenset[int] = frozenset()


NOBODY: Final = Dropouts()


class LocalDriver(Generic[GivenT, ResultT]):
    """Plays the ends of a protocol; the setup is played at once, under keys that serve no other driver.

    Messages are delivered first in, first out: answers never overtake what was sent before them.

    Args:
        agreement: of the protocol.
        transcript: where every message is listed; None lists none.
        kinds: what may be sent, as the method lists it for its statement; None: anything.
        privacy: where the clients' noise comes from; None: the system.
    """

    def __init__(
        self,
        agreement: ProtocolSpec[GivenT, ResultT],
        transcript: Transcript | None = None,
        kinds: Collection[type] | None = None,
        privacy: PrivacyRandomness | None = None,
    ) -> None:
        self.agreement, self.transcript, self._kinds = agreement, transcript, kinds
        self._run, self._gone = os.urandom(RUN_BYTES), set[int]()
        identities = [IdentityKey.generate() for _ in range(agreement.clients)]
        roster = tuple(identity.public for identity in identities)
        self._server = agreement.server(self._run)
        privacy = PrivacyRandomness.system() if privacy is None else privacy
        self._clients = [
            agreement.client(
                ClientContext(run=self._run, number=number, identity=identity, roster=roster, privacy=privacy)
            )
            for number, identity in enumerate(identities)
        ]
        for number, client in enumerate(self._clients):
            first = client.announce()
            if first is not None:
                self._carry(number, SERVER, first)

    def play(
        self,
        round_id: tuple[int, int],
        cohort: tuple[int, ...],
        drawn: Drawn | None,
        inputs: Callable[[int], GivenT],
        absent: Dropouts = NOBODY,
    ) -> tuple[ResultT, int]:
        """Play an attempt at a round; return what it came to, and how many clients that is over.

        Args:
            round_id: round (from 1) and attempt (from 0); each pair can be played once.
            cohort: the clients that begin, ascending.
            drawn: (|U|,) the users that the server draws; None for all.
            give: what a client contributes; called when it is its turn, so that one client's is in memory at a time.
            absent: who vanishes on the way.

        Raises:
            SiloVanished: clients did not answer, and the protocol cannot go on without them.
            ProtocolError: a message that is not listed, what is given is not what was agreed on, or the clients end
                with different results.
        """
        server, self._gone = self._server, set()
        now = RoundId(run=self._run, round=round_id[0], attempt=round_id[1])
        for to, data in server.begin(now, cohort, drawn):
            self._carry(SERVER, to, data)
        for number in cohort:
            if number in absent.before_input:
                continue
            sent = self._clients[number].contribute(now, inputs(number))
            self._gone |= {number} & absent.before_reveal
            for data in sent:
                self._carry(number, SERVER, data)
        while missing := server.missing:
            self._gone |= set(missing)
            if not server.has_quorum:
                raise SiloVanished(missing, may_have_released=server.may_have_released)
            for to, data in server.proceed():
                self._carry(SERVER, to, data)
        result = server.result() if self.agreement.result_at_server else self._common(cohort)
        return result, server.n_summed

    def _common(self, cohort: tuple[int, ...]) -> ResultT:
        """Return the result that every client of a cohort has."""
        first = self._clients[cohort[0]].result()
        for number in cohort[1:]:
            if self._clients[number].result() != first:
                raise ProtocolError("ends with another sum than the first silo of its cohort", silo=number)
        return first

    def _carry(self, source: int, target: int, data: bytes) -> None:
        """Deliver a message, and whatever follows from it."""
        waiting = deque([(source, target, data)])
        while waiting:
            source, target, data = waiting.popleft()
            if self._kinds is not None and (kind := Envelope.kind_of(data)) not in self._kinds:
                raise ProtocolError(
                    f"{kind.__name__} is none of the messages that the method lists; sends() of its protection lists "
                    "every message and who reads it"
                )
            if self.transcript is not None:
                self.transcript.record(data)
            if target == SERVER:
                waiting += [(SERVER, to, follow) for to, follow in self._server.receive(source, data)]
            elif target not in self._gone:
                waiting += [(target, SERVER, reply) for reply in self._clients[target].receive(data)]
