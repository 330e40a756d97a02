"""The interface of protocols: an agreement on public numbers, and the server's and a client's end of a session.

    setup:  client.announce -> server.receive -> ... until nobody has anything more to say
    round:  server.begin -> client.receive -> client.contribute -> server.receive -> ... -> result

Both ends accept and return bytes, which the transport does not read. A client is a silo, or a client that sends
messages of its own. The form of a contribution and of the result depends on the protocol: vectors in the open, whole
numbers of grid steps under masks.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.exchanges import Exchanges
from fedveil.protocols.messages import SERVER
from fedveil.randomness import PrivacyRandomness

Outgoing: TypeAlias = list[tuple[int, bytes]]
"""Messages of the server: recipient and bytes."""
Roster: TypeAlias = tuple[PublicIdentity, ...]
"""The public identities of all silos, in the order of their numbers; known to every silo before a run."""
Drawn: TypeAlias = Bool[np.ndarray, " users"]

GivenT = TypeVar("GivenT")
GivenIn = TypeVar("GivenIn", contravariant=True)
ResultT = TypeVar("ResultT")
ResultOut = TypeVar("ResultOut", covariant=True)

SECRET_BYTES: Final = 32

MOST_REPEATS: Final = 1024
"""How often a client gives to a round that was charged once; ten times in a simulation, where every process charges."""


def new_session_secret() -> bytes:
    """Return a secret that no other session has."""
    return os.urandom(SECRET_BYTES)


def persist_nothing(given: object) -> None:
    """Keep nothing: a party in one process repeats no round."""


@dataclass(frozen=True, kw_only=True)
class ClientContext:
    """A client in one session of a run, as a protocol needs to know it.

    Attributes:
        run: 16 bytes that name the session.
        number: the client's own.
        identity: its long-term key.
        roster: all clients' public identities.
        least: the fewest clients of a sum that it takes part in. Who gives the same whenever a round is asked for takes
            part in sums over all alone: two sums over different clients would show their difference.
        secret: returns 32 bytes of its own that stay the same for the run, where anything is to be repeated in another
            session.
        keep: told what it gives to a round, whenever that has become more and before anything of it leaves.
        privacy: where its noise comes from, where some is drawn in the middle of a round.
    """

    run: bytes
    number: int
    identity: IdentityKey
    roster: Roster
    least: int = 2
    secret: Callable[[], bytes] = new_session_secret
    persist: Callable[[Any], None] = persist_nothing
    privacy: PrivacyRandomness = field(default_factory=PrivacyRandomness.system)


class ServerProtocol(Protocol[ResultOut]):
    """The server's end of one session."""

    @property
    def ready(self) -> bool:
        """Whether the setup is complete, so that a round may begin."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients whose message for the present step has not arrived."""
        ...

    @property
    def has_quorum(self) -> bool:
        """Whether :meth:`proceed` goes on without those that are missing."""
        ...

    @property
    def may_have_released(self) -> bool:
        """Whether the attempt may have shown its sum: from then on its privacy event counts."""
        ...

    @property
    def n_summed(self) -> int:
        """How many clients the result is over."""
        ...

    def bind(self, context: bytes) -> None:
        """Bind the keys and signatures of what begins next to what the clients are told of it.

        Args:
            context: 32 bytes, a digest; first of the session, before anything is sent, then of every round. Parties of
                a simulation, who are told the same, bind nothing.
        """
        ...

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt at a round; return the messages to its cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: the clients that begin it, ascending.
            drawn: (|U|,) which users take part; None for all. Most protocols leave it to what the clients give.

        Raises:
            ProtocolError: an attempt that was played before, or too few clients.
        """
        ...

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; return those that follow.

        Raises:
            ProtocolError: a message that must not be accepted, naming the client.
        """
        ...

    def proceed(self) -> Outgoing:
        """Go on without the clients that are missing.

        Raises:
            ProtocolError: not :attr:`has_quorum` have answered.
        """
        ...

    def result(self) -> ResultOut:
        """Return what the clients' contributions came to.

        Raises:
            ProtocolError: messages are missing, or the result is the clients' alone.
        """
        ...


class ClientProtocol(ABC, Generic[GivenIn, ResultOut]):
    """A client's end of one session; unless it says otherwise, of a protocol whose result is the server's."""

    _place: ClientContext

    @property
    @abstractmethod
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""

    @property
    def binding(self) -> bytes:
        """What else a kept contribution belongs to, besides what was asked: it is given again for the same alone."""
        return b""

    @property
    def has_result(self) -> bool:
        """Whether the result of the round is here: never where the server learns it."""
        return False

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients over whose contributions the sum is, when the server has just named them; else nobody."""
        return ()

    @abstractmethod
    def bind(self, context: bytes) -> None:
        """Bind the keys and signatures of what begins next to what this client was told of it, as the server does.

        Clients that were told different things open no sum together.
        """

    @abstractmethod
    def check_round(self, round_id: RoundId) -> None:
        """Return if this is the round and attempt that the server has begun, once in the session.

        All clients of a sum then put the same round into it. If each could be told another one, the kept contributions
        of some beside a new one of another would show, against the round before, that one's own with little noise.

        Raises:
            ProtocolError: it is another one.
        """

    @abstractmethod
    def announce(self) -> bytes | None:
        """Return the first message of the setup, None if the server's comes first."""

    @abstractmethod
    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or what it relays; return the answers.

        Raises:
            ProtocolError: a message that must not be accepted.
        """

    def contribute(self, round_id: RoundId, given: GivenIn) -> list[bytes]:
        """Return the messages that bring what this client gives into the sum; its place keeps that first.

        Args:
            round_id: the round and attempt that has begun.
            given: what goes into the sum.

        Raises:
            ProtocolError: no round awaits it, or what is given is not what was agreed on.
        """
        self.check_round(round_id)
        self._place.persist(given)
        return self._send(given, round_id)

    @abstractmethod
    def _send(self, given: GivenIn, round_id: RoundId) -> list[bytes]:
        """Return the messages of what is given, which is kept."""

    def result(self) -> ResultOut:
        """Return what the contributions came to, where the clients learn it and the server does not.

        Raises:
            ProtocolError: the clients learn nothing, or the sum has not arrived.
        """
        raise ProtocolError("clients learn no sum: it is the server's", silo=self._place.number)

    def tag(self, content: bytes) -> bytes:
        """Return 32 bytes that clients with the same content have in common, and that tell the server nothing of it.

        Raises:
            ProtocolError: the clients have nothing to compare.
        """
        raise ProtocolError("clients have no result of their own to compare", silo=self._place.number)


class ClientInputs(Protocol):
    """What the clients of a round have to give; nothing is computed before it is asked for.

    Vectors are (d,), in the unit of the update; whatever is bounded lies on the grid of its bound.
    """

    def message(self, client: int) -> Float64[np.ndarray, " d"] | bytes:
        """Return what the channel makes of a client's sum: numbers with its share of the noise, or a codec's bytes."""
        ...

    def unprotected_sum(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's bounded, weighted sum before its channel; it carries no noise."""
        ...

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return the bounded contributions of a client's users, ascending, each with weight 1."""
        ...

    def noise_share(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's share of the noise alone."""
        ...

    def dither_key(self, client: int) -> bytes:
        """Return 32 bytes of a client's own that are the same for the same attempt, to draw remainders from."""
        ...

    def model_displacement(self) -> Float64[np.ndarray, " d"]:
        """Return how far the models that were released have moved from the first one, as all clients know it."""
        ...


@runtime_checkable
class ProtocolSpec(Protocol[GivenT, ResultT]):
    """What all parties agree on before a run: public numbers, the ends that follow from them, and what passes there."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        ...

    @property
    def quorum(self) -> int:
        """The fewest clients of a sum; where it is below all of them, a round goes on without some that vanish."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether a round that is asked for in another session is the same sum, if clients give the same to it.

        Else another attempt is another release, for users drawn anew, and costs another charge.
        """
        ...

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """How many bytes the messages of one exchange take at most: a client's, and those to a client."""
        ...

    def exchanges(self, client: int) -> Exchanges:
        """Return which messages pass between server and client, and when."""
        ...

    def client_input(self, inputs: ClientInputs, client: int) -> GivenT:
        """Return what a client gives to a round, of what it has to give."""
        ...

    def decode_sum(self, result: ResultT) -> Float64[np.ndarray, " d"]:
        """Return the sum that a result of the protocol stands for, in the unit of the update."""
        ...

    def pack(self, given: GivenT) -> bytes:
        """Return what a client gives as bytes, for its own disk."""
        ...

    def unpack(self, data: bytes) -> GivenT:
        """Return what :meth:`pack` was given.

        Raises:
            ProtocolError: the bytes are none that it made.
        """
        ...

    @property
    def result_at_server(self) -> bool:
        """Whether the server learns the result; else every client does, and the server nothing."""
        ...

    def server(self, run: bytes) -> ServerProtocol[ResultT]:
        """Return the server's end of a session, with new keys."""
        ...

    def client(self, context: ClientContext) -> ClientProtocol[GivenT, ResultT]:
        """Return a client's end of a session, with new keys."""
        ...


def check_clients(clients: int) -> None:
    """Return if so many clients can be told apart: a message names its sender by two bytes.

    Raises:
        ProtocolError: none, or too many.
    """
    if not 1 <= clients < SERVER:
        raise ProtocolError(f"{clients} clients with messages of their own; 1 to {SERVER - 1} are possible")
