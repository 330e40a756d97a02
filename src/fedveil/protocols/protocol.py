"""Define the interface of protocols: a public specification, a server's end and a client's end.

    setup:  client.announce -> server.receive -> ... until neither end has a message to send
    round:  server.begin -> client.receive -> client.contribute -> server.receive -> ... -> result

Both ends accept and return bytes, which the transport does not read. A client is a silo, or a user's device that
sends messages itself. The types of a client's input and of the result depend on the protocol: float64 vectors in the
clear, integers in grid units under masks.

Describe the kinds and the order of the messages between the server and one client.

A shape is the exact sequence of message kinds in one transmission. A :class:`ProtocolMessage` counts as the kind of
the message that it carries. A transmission is accepted only if it matches the expected shape completely, so a sender
cannot add a message that the recipient does not expect.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.errors import ProtocolError
from fedveil.protocols.messages import SERVER, Envelope, Message
from fedveil.protocols.session_messages import ProtocolMessage, SessionMessage
from fedveil.randomness import PrivacyRandomness

# --- kinds and order of messages ---

Kind = type[Message]
Shape = tuple[Kind, ...]
"""Kinds of the messages of one transmission, in their order."""


@dataclass(frozen=True)
class ExchangeStep:
    """One exchange with a client.

    Attributes:
        requests: kinds of the messages that the server sends.
        replies: kinds of the messages that the client answers.
    """

    requests: Shape
    replies: Shape


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Messages of a protocol between the server and one client in one session.

    Attributes:
        on_join: kinds that the client sends when it joins.
        setup: exchanges before the first round.
        session_start: kinds that the server sends ahead of the session's first round, in the same transmission.
        round_start: kinds that the server sends at the beginning of every round, ahead of the client's task.
        answers: maps the number of a round to the shape of the client's answer to its task, and the exchanges after
            it.
    """

    on_join: Shape = ()
    setup: tuple[ExchangeStep, ...] = ()
    session_start: Shape = ()
    round_start: Shape = ()
    answers: Callable[[int], tuple[Shape, tuple[ExchangeStep, ...]]]


def message_shape(parts: Sequence[SessionMessage]) -> Shape:
    """Return the kinds of the messages of one transmission.

    Raises:
        ProtocolError: a :class:`ProtocolMessage` that carries no message of this version, or a session message.
    """
    return tuple(
        _relayed(part.message) if isinstance(part, ProtocolMessage) else type(part) for part in parts
    )


def _relayed(data: bytes) -> Kind:
    kind = Envelope.kind_of(data)
    # A session message inside a ProtocolMessage would pass for a session message in the shape.
    if issubclass(kind, SessionMessage):
        raise ProtocolError(f"a message with {kind.purpose} is no message of a protocol")
    return kind


# --- protocols ---

Outgoing: TypeAlias = list[tuple[int, bytes]]
"""Messages of the server, as pairs of the recipient's number and bytes."""
Roster: TypeAlias = tuple[PublicIdentity, ...]
"""Public identities of all silos, in the order of their numbers; every silo knows them before a run."""
Drawn: TypeAlias = Bool[np.ndarray, " users"]

GivenT = TypeVar("GivenT")
GivenIn = TypeVar("GivenIn", contravariant=True)
ResultT = TypeVar("ResultT")
ResultOut = TypeVar("ResultOut", covariant=True)

SECRET_BYTES: Final = 32

MOST_REPEATS: Final = 1024
"""Most times that a client sends its input to a round that was charged once.

A simulation stops after ``MOST_ATTEMPTS`` attempts (``run/rounds/retries.py``), and charges again after a restart.
"""


def new_session_secret() -> bytes:
    """Return a fresh random secret of 32 bytes, for one session."""
    return os.urandom(SECRET_BYTES)


def persist_nothing(client_input: object) -> None:
    """Discard the input: a party that runs in a single process repeats no round."""


@dataclass(frozen=True, kw_only=True)
class ClientContext:
    """Identity, keys and storage of a client in one session of a run.

    Attributes:
        run: 16 bytes that name the session.
        number: number of the client.
        identity: long-term signing key of the client.
        roster: public identities of all clients.
        least: fewest clients of a sum in which the client takes part. A client that repeats its input whenever a
            round is requested again takes part only in sums over all clients. Otherwise two sums over different
            cohorts would reveal the inputs of the clients in which they differ.
        secret: returns 32 secret bytes of the client. They stay the same for the run if a round can be repeated in
            another session.
        persist: stores the client's input to a round. The protocol calls it whenever the input grows, and before any
            part of the input is sent.
        privacy: source of the noise that the client draws in the middle of a round.
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
    """Server's end of one session."""

    @property
    def ready(self) -> bool:
        """Return whether the setup is complete, so that a round can begin."""
        ...

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients whose message for the current step has not arrived."""
        ...

    @property
    def has_quorum(self) -> bool:
        """Return whether :meth:`proceed` can continue without the missing clients."""
        ...

    @property
    def may_have_released(self) -> bool:
        """Return whether the attempt may have revealed its sum; from then on its privacy event must be charged."""
        ...

    @property
    def n_summed(self) -> int:
        """Number of clients whose inputs are in the result."""
        ...

    def bind(self, context: bytes) -> None:
        """Bind keys and signatures of the coming setup or round to a digest of the clients' messages.

        Args:
            context: 32-byte digest of the messages that the clients receive. The first call, before any message is
                sent, binds the session; each later call
                binds one round. The parties of a simulation all receive the same messages and bind nothing.
        """
        ...

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], sampled_users: Drawn | None) -> Outgoing:
        """Begin an attempt at a round; return the messages to its cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: numbers of the clients that begin the attempt, ascending.
            sampled_users: (|U|,) bool, the sampled users; None for all. Most protocols ignore it: the clients' inputs
                are over the sampled users already.

        Raises:
            ProtocolError: an attempt that was played before, or too few clients.
        """
        ...

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; return the messages to send next.

        Raises:
            ProtocolError: a message that must not be accepted; the error names the client.
        """
        ...

    def proceed(self) -> Outgoing:
        """Proceed without the missing clients; return the messages to send next.

        Raises:
            ProtocolError: :attr:`has_quorum` is False.
        """
        ...

    def result(self) -> ResultOut:
        """Return the result of the round.

        Raises:
            ProtocolError: messages are missing, or only the clients learn the result.
        """
        ...


class ClientProtocol(ABC, Generic[GivenIn, ResultOut]):
    """Client's end of one session; the defaults fit a protocol whose result only the server learns."""

    _place: ClientContext

    @property
    @abstractmethod
    def awaits_input(self) -> bool:
        """Return whether the protocol awaits :meth:`contribute` now."""

    @property
    def binding(self) -> bytes:
        """State, in addition to the request, to which a persisted input is bound.

        The client sends the input again only if the request and this value are the same.
        """
        return b""

    @property
    def has_result(self) -> bool:
        """Return whether the result of the round has arrived; always False if only the server learns it."""
        return False

    @property
    def survivors(self) -> tuple[int, ...]:
        """Clients whose inputs are in the sum, right after the server has named them; empty at other times."""
        return ()

    @abstractmethod
    def bind(self, context: bytes) -> None:
        """Bind keys and signatures of the coming setup or round to a digest of this client's messages.

        The digest is over the messages that the client received, and the server binds the same digest. Clients that
        received different messages cannot open a sum together.
        """

    @abstractmethod
    def check_round(self, round_id: RoundId) -> None:
        """Check that ``round_id`` is the round and attempt that the server has begun in this session.

        All clients of a sum then contribute their inputs of the same round. The check stops this attack: the server
        requests an old round of some clients and a new round of one client. The sum of their persisted inputs and of
        the new input, less the sum of the old round, would reveal the change of that one client's input with little
        noise.

        Raises:
            ProtocolError: another round or attempt has begun, or none.
        """

    @abstractmethod
    def announce(self) -> bytes | None:
        """Return the first message of the setup; None if the client has none."""

    @abstractmethod
    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server, or a message that the server relays; return the answers.

        Raises:
            ProtocolError: a message that must not be accepted.
        """

    def contribute(self, round_id: RoundId, client_input: GivenIn) -> list[bytes]:
        """Persist the client's input to a round and return the messages that carry it.

        Args:
            round_id: the round and attempt that has begun.
            client_input: input of the client.

        Raises:
            ProtocolError: no round awaits an input, or the specification does not allow this input.
        """
        self.check_round(round_id)
        # Before any message exists: after a crash the client must repeat the same input with the same noise.
        self._place.persist(client_input)
        return self._send(client_input, round_id)

    @abstractmethod
    def _send(self, client_input: GivenIn, round_id: RoundId) -> list[bytes]:
        """Return the messages that carry an input, which is persisted already."""

    def result(self) -> ResultOut:
        """Return the result of the round, if the clients learn it and the server does not.

        Raises:
            ProtocolError: the clients learn no result, or the sum has not arrived.
        """
        raise ProtocolError("clients learn no sum: it is the server's", silo=self._place.number)

    def tag(self, content: bytes) -> bytes:
        """Return a 32-byte tag, equal for equal content, that discloses nothing else to the server.

        Raises:
            ProtocolError: the clients learn no result that they could compare.
        """
        raise ProtocolError("clients have no result of their own to compare", silo=self._place.number)


class ClientInputs(Protocol):
    """Inputs of the clients of one round; each is computed only when a method requests it.

    Vectors have shape (d,) and are in the unit of the update. Bounded values lie on the grid of their bound.
    """

    def message(self, client: int) -> Float64[np.ndarray, " d"] | bytes:
        """Return a client's sum after its channel: numbers with its share of the noise, or a codec's bytes."""
        ...

    def unprotected_sum(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's bounded, weighted sum before its channel; it carries no noise."""
        ...

    def contributions(self, client: int) -> Float64[np.ndarray, "m d"]:
        """Return the bounded contributions of a client's users, ascending by user, each with weight 1."""
        ...

    def noise_share(self, client: int) -> Float64[np.ndarray, " d"]:
        """Return a client's share of the noise, without its sum."""
        ...

    def dither_key(self, client: int) -> bytes:
        """Return a secret 32-byte key of a client for its random remainders; the same for the same attempt."""
        ...

    def model_displacement(self) -> Float64[np.ndarray, " d"]:
        """Return the last released model minus the first one; all clients know it."""
        ...


@runtime_checkable
class ProtocolSpec(Protocol[GivenT, ResultT]):
    """Public specification of a protocol: its numbers, its messages, and both ends."""

    @property
    def clients(self) -> int:
        """Number of clients."""
        ...

    @property
    def quorum(self) -> int:
        """Fewest clients of a sum; below :attr:`clients`, a round can proceed without clients that vanish."""
        ...

    @property
    def repeatable(self) -> bool:
        """Return whether a round repeated in another session gives the same sum, for the same inputs.

        If False, another attempt is another release, for freshly sampled users, and costs another charge.
        """
        ...

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Most bytes of the messages of one exchange: from a client, and to a client."""
        ...

    def exchanges(self, client: int) -> Exchanges:
        """Return the exchanges of messages between the server and one client."""
        ...

    def client_input(self, inputs: ClientInputs, client: int) -> GivenT:
        """Select the client's input to the protocol from its available inputs."""
        ...

    def decode_sum(self, result: ResultT) -> Float64[np.ndarray, " d"]:
        """Convert a result of the protocol to the sum as a (d,) vector in the unit of the update."""
        ...

    def pack(self, client_input: GivenT) -> bytes:
        """Return a client's input as bytes, for the client's own disk."""
        ...

    def unpack(self, data: bytes) -> GivenT:
        """Return the input that :meth:`pack` encoded.

        Raises:
            ProtocolError: :meth:`pack` cannot have made these bytes.
        """
        ...

    @property
    def result_at_server(self) -> bool:
        """Return whether the server learns the result; if False, every client learns it and the server does not."""
        ...

    def server(self, run: bytes) -> ServerProtocol[ResultT]:
        """Return the server's end of a session, with fresh keys."""
        ...

    def client(self, context: ClientContext) -> ClientProtocol[GivenT, ResultT]:
        """Return a client's end of a session, with fresh keys."""
        ...


def check_clients(clients: int) -> None:
    """Check that the number of clients is possible: a message names its sender in two bytes.

    Raises:
        ProtocolError: no clients, or ``SERVER`` (65535) or more.
    """
    if not 1 <= clients < SERVER:
        raise ProtocolError(f"{clients} clients with messages of their own; 1 to {SERVER - 1} are possible")
