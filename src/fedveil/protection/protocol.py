"""A protection as its parties play it: an agreement of public numbers, a server's end and a client's end of a session.

    setup:  client.announce -> server.receive -> ... until nobody has anything more to say
    round:  server.begin -> client.receive -> client.contribute -> server.receive -> ... -> result

Both ends take and give bytes; whoever carries them reads none. A client is a silo, or a client that sends messages of
its own. What a client gives and what comes of it are the protocol's own: vectors in the open, whole numbers of grid
steps under masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool

from fedveil.crypto.agreement import RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import SERVER
from fedveil.protection.peers import Roster

Outgoing: TypeAlias = list[tuple[int, bytes]]
"""Messages of the server: recipient and bytes."""
Drawn: TypeAlias = Bool[np.ndarray, " users"]

GivenT = TypeVar("GivenT")
GivenIn = TypeVar("GivenIn", contravariant=True)
ResultT = TypeVar("ResultT")
ResultOut = TypeVar("ResultOut", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A client in one session of a run, as a protocol needs to know it.

    Attributes:
        run: 16 bytes that name the session.
        number: the client's own.
        identity: its long-term key.
        roster: all clients' public identities.
    """

    run: bytes
    number: int
    identity: IdentityKey
    roster: Roster


class ServerProtocol(Protocol[ResultOut]):
    """The server's end of one session."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients whose message for the present step has not arrived."""
        ...

    @property
    def enough(self) -> bool:
        """Whether :meth:`proceed` goes on without those that are missing."""
        ...

    @property
    def may_have_released(self) -> bool:
        """Whether the attempt may have shown its sum: from then on its privacy event counts."""
        ...

    @property
    def summed(self) -> int:
        """How many clients the result is over."""
        ...

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt at a round; return the messages to its cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: the clients that begin it, ascending.
            drawn: (|U|,) which users take part; None for all. Most protocols leave it to what the clients give.

        Raises:
            ProtocolError: a moment that was played before, or too few clients.
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
            ProtocolError: not :attr:`enough` have answered.
        """
        ...

    def result(self) -> ResultOut:
        """Return what the clients' contributions came to.

        Raises:
            ProtocolError: messages are missing, or the result is the clients' alone.
        """
        ...


class ClientProtocol(Protocol[GivenIn, ResultOut]):
    """A client's end of one session."""

    def announce(self) -> bytes | None:
        """Return the first message of the setup, None if the server's comes first."""
        ...

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or what it relays; return the answers.

        Raises:
            ProtocolError: a message that must not be accepted.
        """
        ...

    def contribute(self, round_id: RoundId, given: GivenIn) -> list[bytes]:
        """Return the messages that bring what this client gives into the sum.

        Args:
            round_id: the round and attempt that has begun.
            given: what goes into the sum.

        Raises:
            ProtocolError: no round awaits it, or what is given is not what was agreed on.
        """
        ...

    def result(self) -> ResultOut:
        """Return what the contributions came to, where the clients learn it and the server does not.

        Raises:
            ProtocolError: the clients learn nothing, or the sum has not arrived.
        """
        ...


class Agreement(Protocol[GivenIn, ResultOut]):
    """What all parties agree on before a run: public numbers, and the ends that follow from them."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        ...

    @property
    def result_at_server(self) -> bool:
        """Whether the server learns the result; else every client does, and the server nothing."""
        ...

    def server(self, run: bytes) -> ServerProtocol[ResultOut]:
        """Return the server's end of a session, with new keys."""
        ...

    def client(self, place: Place) -> ClientProtocol[GivenIn, ResultOut]:
        """Return a client's end of a session, with new keys."""
        ...


def check_clients(clients: int) -> None:
    """Return if so many clients can be told apart: a message names its sender by two bytes.

    Raises:
        ProtocolError: none, or too many.
    """
    if not 1 <= clients < SERVER:
        raise ProtocolError(f"{clients} clients with messages of their own; 1 to {SERVER - 1} are possible")
