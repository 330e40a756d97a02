"""Play all parties of a session in one process; messages to vanished clients are lost."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Generic

from fedveil.crypto.key_agreement import RUN_BYTES, RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ProtocolError, SiloVanished
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.protocol import ClientContext, Drawn, GivenT, ProtocolSpec, ResultT
from fedveil.randomness import PrivacyRandomness

# --- list of all messages ---

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """Entry of one message.

    Attributes:
        round: round number, 0 in the setup.
        attempt: attempt number, from 0.
        sender: ``"server"``, or for example ``"silo 3"``.
        recipient: as ``sender``.
        purpose: content of the message in words.
        bytes: size of the message in bytes, header included.
    """

    round: int
    attempt: int
    sender: str
    recipient: str
    purpose: str
    bytes: int

    def to_json(self) -> dict[str, str | int]:
        """Return the line as one JSON object of the transcript."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


class Transcript:
    """Collector of one line per message; it does not keep the contents of messages."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._n_taken = 0

    @property
    def lines(self) -> tuple[Line, ...]:
        """Lines of all messages so far, in their order."""
        return tuple(self._lines)

    def record(self, data: bytes) -> None:
        """Add the line of a message.

        Raises:
            ProtocolError: the bytes are not a message of this version.
        """
        envelope = Envelope.decode(data)
        self._lines.append(
            Line(
                round=envelope.round_id.round,
                attempt=envelope.round_id.attempt,
                sender=_name(envelope.sender),
                recipient=_name(envelope.recipient),
                purpose=envelope.message.purpose,
                bytes=len(data),
            )
        )

    def take(self) -> tuple[Line, ...]:
        """Return the lines since the last call."""
        lines = tuple(self._lines[self._n_taken :])
        self._n_taken = len(self._lines)
        return lines

    def bytes_up(self, round_number: int) -> int:
        """Return the number of bytes that all silos sent to the server in a round, over all its attempts."""
        return sum(
            line.bytes for line in self._lines if line.round == round_number and line.recipient == "server"
        )

    def write(self, path: Path) -> None:
        """Write one JSON object per line."""
        with path.open("w", encoding="utf-8") as file:
            for line in self._lines:
                file.write(json.dumps(line.to_json()) + "\n")


def _name(number: int) -> str:
    return "server" if number == SERVER else f"silo {number}"


# --- whole rounds ---


@dataclass(frozen=True, kw_only=True)
class Dropouts:
    """Simulated dropouts of one attempt: the clients that vanish, by the step before which they vanish.

    Attributes:
        before_input: clients that never send their vector.
        before_reveal: clients that send their vector and then do not help to open the sum.
    """

    before_input: frozenset[int] = frozenset()
    before_reveal: frozenset[int] = frozenset()


NOBODY: Final = Dropouts()


class LocalDriver(Generic[GivenT, ResultT]):
    """Server and clients of one protocol in one process.

    The constructor plays the setup at once, with fresh keys that no other driver uses. Messages are delivered first
    in, first out: an answer never overtakes an earlier message.

    Args:
        agreement: public specification of the protocol.
        transcript: list to which every message is added; None records nothing.
        kinds: kinds of message that the method lists for its privacy statement; None allows every kind.
        privacy: source of the clients' noise; None takes the system's randomness.
    """

    def __init__(
        self,
        agreement: ProtocolSpec[GivenT, ResultT],
        transcript: Transcript | None = None,
        kinds: Collection[type] | None = None,
        privacy: PrivacyRandomness | None = None,
    ) -> None:
        self.agreement, self.transcript, self._kinds = agreement, transcript, kinds
        self._run, self._dropped = os.urandom(RUN_BYTES), set[int]()
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
        sampled_users: Drawn | None,
        inputs: Callable[[int], GivenT],
        absent: Dropouts = NOBODY,
    ) -> tuple[ResultT, int]:
        """Play one attempt at a round; return its result and the number of clients in the sum.

        Args:
            round_id: round (from 1) and attempt (from 0); each pair can be played once.
            cohort: numbers of the clients that begin the attempt, ascending.
            sampled_users: (|U|,) bool, the users that the server samples; None for all.
            inputs: returns the input of one client. The driver calls it when that client contributes, so that the
                input of only one client is in memory at a time.
            absent: clients that vanish during the attempt.

        Raises:
            SiloVanished: clients did not answer, and the protocol cannot proceed without them.
            ProtocolError: a message of a kind that is not listed, an input that the specification does not allow, or
                clients that end with different results.
        """
        server, self._dropped = self._server, set()
        now = RoundId(run=self._run, round=round_id[0], attempt=round_id[1])
        for recipient, data in server.begin(now, cohort, sampled_users):
            self._carry(SERVER, recipient, data)
        for number in cohort:
            if number in absent.before_input:
                continue
            sent = self._clients[number].contribute(now, inputs(number))
            # Before delivery: the last client's message makes the server ask all clients to open the sum.
            self._dropped |= {number} & absent.before_reveal
            for data in sent:
                self._carry(number, SERVER, data)
        while missing := server.missing:
            # All messages in this process are delivered, so a missing client has vanished for good.
            self._dropped |= set(missing)
            if not server.has_quorum:
                raise SiloVanished(missing, may_have_released=server.may_have_released)
            for recipient, data in server.proceed():
                self._carry(SERVER, recipient, data)
        result = server.result() if self.agreement.result_at_server else self._common(cohort)
        return result, server.n_summed

    def _common(self, cohort: tuple[int, ...]) -> ResultT:
        """Return the result that all clients of a cohort have in common."""
        first = self._clients[cohort[0]].result()
        for number in cohort[1:]:
            if self._clients[number].result() != first:
                raise ProtocolError("ends with another sum than the first silo of its cohort", silo=number)
        return first

    def _carry(self, source: int, target: int, data: bytes) -> None:
        """Deliver a message and all messages that the parties send in reply."""
        # A queue, not recursion: depth-first delivery would let a reply overtake earlier messages.
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
                waiting += [
                    (SERVER, recipient, follow) for recipient, follow in self._server.receive(source, data)
                ]
            elif target not in self._dropped:
                waiting += [(target, SERVER, reply) for reply in self._clients[target].receive(data)]
