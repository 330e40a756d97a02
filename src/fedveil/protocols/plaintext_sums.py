"""Sum vectors in the clear: the server adds the clients' vectors in the order of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.key_agreement import RoundId
from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Reveals
from fedveil.protocols.field_codecs import custom_field
from fedveil.protocols.messages import SERVER, Envelope, Inbox, Message, message
from fedveil.protocols.protocol import (
    ClientContext,
    ClientInputs,
    ClientProtocol,
    Drawn,
    Exchanges,
    GivenIn,
    Outgoing,
    ResultOut,
    ServerProtocol,
    check_clients,
)

Vector = Float64[np.ndarray, " d"]


@message(50, "a vector in the open", eq=False)
class PlaintextVector(Message):
    """Vector of a client in the clear, as (d,) float64."""

    values: Vector = custom_field(Reveals.CONTENT)

    def encode(self) -> bytes:
        return self.values.astype("<f8", copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> PlaintextVector:
        if len(data) % 8:
            raise ProtocolError(f"a plaintext vector has numbers of 8 bytes, this one {len(data)} bytes")
        return cls(values=np.frombuffer(data, dtype="<f8"))


@dataclass(frozen=True, kw_only=True)
class FullCohortSpec:
    """Base of a :class:`ProtocolSpec` whose server learns a sum over all clients.

    Attributes:
        clients: number of clients.
        length: d, number of coordinates of a vector.

    Raises:
        ProtocolError: no clients, or too many.
    """

    clients: int
    length: int
    result_at_server: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clients(self.clients)

    @property
    def quorum(self) -> int:
        """Number of all clients: every client must answer."""
        return self.clients

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Most bytes of one exchange from a client (a float64 vector) and to a client (no payload)."""
        return 8 * self.length, 0

    def decode_sum(self, result: Vector) -> Vector:
        """Return the sum unchanged; it is in the unit of the update already."""
        return result


@dataclass(frozen=True, kw_only=True)
class PlaintextSums(FullCohortSpec):
    """Specification of a sum in the clear: the server reads the vector of every client."""

    def exchanges(self, client: int) -> Exchanges:
        """Return the exchanges of a session: one message per round."""
        return Exchanges(answers=lambda _: ((PlaintextVector,), ()))

    def client_input(self, inputs: ClientInputs, client: int) -> Vector:
        """Return the vector that the client's channel made."""
        return cast(Vector, inputs.message(client))

    def pack(self, vector: Vector) -> bytes:
        """Return a vector as bytes (float64, little-endian)."""
        return PlaintextVector(values=vector).encode()

    def unpack(self, data: bytes) -> Vector:
        """Return the vector of :meth:`pack`."""
        return PlaintextVector.decode(data).values

    def server(self, run: bytes) -> ServerProtocol[Vector]:
        """Return the server's end."""
        return PlaintextServer(self.length)

    def client(self, context: ClientContext) -> ClientProtocol[Vector, Vector]:
        """Return a client's end."""
        return PlaintextClient(context)


class PlaintextServer:
    """Server's end of a sum in the clear: awaits one vector of each client of the cohort.

    Float64 addition is not associative. The server therefore adds the vectors in the order of the clients, whatever
    the order of their arrival, so that the sum is reproducible bit for bit.

    Args:
        length: d, number of coordinates of a vector.
    """

    has_quorum = False
    may_have_released = True  # the server reads the first vector as soon as it arrives

    @property
    def ready(self) -> bool:
        """Always True: the protocol has no setup."""
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
        """Clients of the cohort whose vector has not arrived."""
        return tuple(number for number in self._cohort[self._added :] if number not in self._early)

    @property
    def n_summed(self) -> int:
        """Number of clients in the sum: the whole cohort."""
        return len(self._cohort)

    def bind(self, context: bytes) -> None:
        """Bind nothing: the server reads every vector by itself, without keys that clients share."""

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], sampled_users: Drawn | None) -> Outgoing:
        """Begin an attempt; return no messages, because no message of the server begins a round."""
        self._inbox.open(round_id)
        self._round_id, self._cohort, self._members = round_id, cohort, frozenset(cohort)
        self._early, self._added, self._sum = {}, 0, np.zeros(self._length)
        return []

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's vector; add and discard all vectors that are next in the order of the clients.

        Raises:
            ProtocolError: a message under another client's number, of another attempt or sent twice, or a vector of
                other than ``length`` finite numbers; the error names the client.
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
            # A sum may overflow without a warning here: the server refuses a sum that is not finite in its next step.
            with np.errstate(over="ignore", invalid="ignore"):
                self._sum += self._early.pop(self._cohort[self._added])
            self._added += 1
        return []

    def proceed(self) -> Outgoing:
        """Refuse to proceed without the missing clients: the sum is over the whole cohort."""
        raise ProtocolError(f"a plaintext sum needs every client; {list(self.missing)} are missing")

    def result(self) -> Vector:
        """Return the (d,) sum over the cohort.

        Raises:
            ProtocolError: messages are missing.
        """
        if self.missing:
            raise ProtocolError(f"the sum is not complete; clients {list(self.missing)} are missing")
        return self._sum

    def _read(self, sender: int, envelope: Envelope) -> Vector:
        """Return the vector that a message carries."""
        return self._inbox.accept(envelope, PlaintextVector).values


class SingleMessageClient(ClientProtocol[GivenIn, ResultOut]):
    """Client's end that contributes by one message; no message of the server begins its round.

    Args:
        place: context of the client in the session.
    """

    def __init__(self, place: ClientContext) -> None:
        self._place = place

    @property
    def awaits_input(self) -> bool:
        """Always True: :meth:`contribute` needs no message of the server."""
        return True

    def bind(self, context: bytes) -> None:
        """Bind nothing.

        The signature of the client's message covers the request, and no key of another client depends on the context.
        """

    def check_round(self, round_id: RoundId) -> None:
        """Accept every round: the server reads each message by itself, whatever other clients received."""

    def announce(self) -> bytes | None:
        """Return None: the protocol has no setup."""
        return None

    def receive(self, data: bytes) -> list[bytes]:
        """Refuse every message: this client awaits none."""
        raise ProtocolError("a client of plaintext sums awaits no message", silo=self._place.number)

    def _message(self, round_id: RoundId, content: Message) -> bytes:
        number = self._place.number
        return Envelope(round_id=round_id, sender=number, recipient=SERVER, message=content).encode()


class PlaintextClient(SingleMessageClient[Vector, Vector]):
    """Client's end of a sum in the clear: sends its vector."""

    def _send(self, vector: Vector, round_id: RoundId) -> list[bytes]:
        return [self._message(round_id, PlaintextVector(values=vector))]
