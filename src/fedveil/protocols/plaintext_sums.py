"""Sums in the open: every client sends its vector as it is, and the server adds them up in the order of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.key_agreement import RoundId
from fedveil.privacy.claims import Reveals
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.exchanges import Exchanges
from fedveil.protocols.field_codecs import custom_field
from fedveil.protocols.messages import SERVER, Envelope, Inbox, Message, message
from fedveil.protocols.protocol import (
    ClientContext,
    ClientInputs,
    ClientProtocol,
    Drawn,
    GivenIn,
    Outgoing,
    ResultOut,
    ServerProtocol,
    check_clients,
)

Vector = Float64[np.ndarray, " d"]


@message(50, "a vector in the open", eq=False)
class PlaintextVector(Message):
    """A client's vector as it is."""

    values: Vector = custom_field(Reveals.CONTENT)

    def encode(self) -> bytes:
        return self.values.astype("<f8", copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> PlaintextVector:
        if len(data) % 8:
            raise ProtocolError(f"a vector in the open has numbers of 8 bytes, this one {len(data)} bytes")
        return cls(values=np.frombuffer(data, dtype="<f8"))


@dataclass(frozen=True, kw_only=True)
class FullCohortSpec:
    """A sum that the server has of every client's vector.

    Attributes:
        clients: how many clients there are.
        length: d, coordinates of a vector.

    Raises:
        ProtocolError: too many clients.
    """

    clients: int
    length: int
    result_at_server: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clients(self.clients)

    @property
    def quorum(self) -> int:
        """All clients."""
        return self.clients

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """The numbers of a vector; nothing that is longer comes back."""
        return 8 * self.length, 0

    def decode_sum(self, result: Vector) -> Vector:
        """Return the sum as it is."""
        return result


@dataclass(frozen=True, kw_only=True)
class PlaintextSums(FullCohortSpec):
    """Everybody's vector in the open."""

    def exchanges(self, client: int) -> Exchanges:
        """Return the one message of a round."""
        return Exchanges(played=lambda _: ((PlaintextVector,), ()))

    def client_input(self, inputs: ClientInputs, client: int) -> Vector:
        """Return the client's message as it is."""
        return cast(Vector, inputs.message(client))

    def pack(self, given: Vector) -> bytes:
        """Return the numbers of a vector."""
        return PlaintextVector(values=given).encode()

    def unpack(self, data: bytes) -> Vector:
        """Return the vector of :meth:`pack`."""
        return PlaintextVector.decode(data).values

    def server(self, run: bytes) -> ServerProtocol[Vector]:
        """Return a server that adds up."""
        return PlaintextServer(self.length)

    def client(self, context: ClientContext) -> ClientProtocol[Vector, Vector]:
        """Return a client that sends its vector."""
        return PlaintextClient(context)


class PlaintextServer:
    """Waits for a message of each client of the cohort; adds what arrives in the order of the clients.

    Args:
        length: d.
    """

    has_quorum = False
    may_have_released = True

    @property
    def ready(self) -> bool:
        """True: there is no setup."""
        return True

    def __init__(self, length: int) -> None:
        self._length = length
        self._inbox = Inbox(SERVER)
        self._round_id: RoundId | None = None
        self._cohort: tuple[int, ...] = ()
        self._members: frozenset[int] = frozenset()
        self._early: dict[int, Vector] = {}
        self._added = 0
        self._sum = np.zeros(length)

    @property
    def missing(self) -> tuple[int, ...]:
        """Clients that have sent nothing."""
        return tuple(number for number in self._cohort[self._added :] if number not in self._early)

    @property
    def n_summed(self) -> int:
        """All of the cohort."""
        return len(self._cohort)

    def bind(self, context: bytes) -> None:
        """Bind nothing: every client's vector is read by itself."""

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt: nobody needs to be told."""
        self._inbox.open(round_id)
        self._round_id, self._cohort, self._members = round_id, cohort, frozenset(cohort)
        self._early, self._added, self._sum = {}, 0, np.zeros(self._length)
        return []

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; what is next in order is added and forgotten.

        Raises:
            ProtocolError: as somebody else, of another attempt, twice, or not ``length`` finite numbers; names the
                client.
        """
        envelope = Envelope.from_silo(data, sender, self._members)
        try:
            vector = self._read(sender, envelope)
            if vector.shape != (self._length,) or not np.isfinite(vector).all():
                raise ProtocolError(f"did not send {self._length} finite numbers")
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        self._early[sender] = vector
        while self._added < len(self._cohort) and self._cohort[self._added] in self._early:
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # no step of the server takes a sum that is not finite
                self._sum += self._early.pop(self._cohort[self._added])
            self._added += 1
        return []

    def proceed(self) -> Outgoing:
        """Refuse: nobody may be missing."""
        raise ProtocolError(f"a sum in the open is over everybody; {list(self.missing)} are missing")

    def result(self) -> Vector:
        """Return the sum.

        Raises:
            ProtocolError: messages are missing.
        """
        if self.missing:
            raise ProtocolError(f"the sum is not complete; clients {list(self.missing)} are missing")
        return self._sum

    def _read(self, sender: int, envelope: Envelope) -> Vector:
        """Return the vector of a message."""
        return self._inbox.accept(envelope, PlaintextVector).values


class SingleMessageClient(ClientProtocol[GivenIn, ResultOut]):
    """The end of a client whose contribution is one message to the server; no message of the server begins its round.

    Args:
        place: the client's in the session.
    """

    def __init__(self, place: ClientContext) -> None:
        self._place = place

    @property
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is possible."""
        return True

    def bind(self, context: bytes) -> None:
        """Bind nothing: the signature of its letter says what was asked, and no other client's keys depend on it."""

    def check_round(self, round_id: RoundId) -> None:
        """Return: what this client sends is read by itself, so nothing depends on what others were told."""

    def announce(self) -> bytes | None:
        """Nothing is to be set up."""
        return None

    def receive(self, data: bytes) -> list[bytes]:
        """Refuse: no message is awaited."""
        raise ProtocolError("a client in the open awaits no message", silo=self._place.number)

    def _message(self, round_id: RoundId, content: Message) -> bytes:
        number = self._place.number
        return Envelope(round_id=round_id, sender=number, recipient=SERVER, message=content).encode()


class PlaintextClient(SingleMessageClient[Vector, Vector]):
    """Sends its vector as it is."""

    def _send(self, given: Vector, round_id: RoundId) -> list[bytes]:
        return [self._message(round_id, PlaintextVector(values=given))]
