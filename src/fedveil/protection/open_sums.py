"""Sums in the open: every client sends its vector as it is, and the server adds them up in the order of the clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.agreement import RoundId
from fedveil.privacy.claims import Tells
from fedveil.protection.errors import ProtocolError
from fedveil.protection.fields import told
from fedveil.protection.messages import SERVER, Envelope, Inbox, Message, message
from fedveil.protection.protocol import (
    ClientProtocol,
    Drawn,
    Outgoing,
    Place,
    ServerProtocol,
    check_clients,
)

Vector = Float64[np.ndarray, " d"]


@message(50, "a vector in the open", eq=False)
class OpenVector(Message):
    """A client's vector as it is."""

    values: Vector = told(Tells.CONTENT)

    def encode(self) -> bytes:
        """Return the numbers (float64, little-endian)."""
        return self.values.astype("<f8", copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> OpenVector:
        """Return the vector of a body (read-only, without a copy)."""
        if len(data) % 8:
            raise ProtocolError(f"a vector in the open has numbers of 8 bytes, this one {len(data)} bytes")
        return cls(values=np.frombuffer(data, dtype="<f8"))


@dataclass(frozen=True, kw_only=True)
class OpenSums:
    """Everybody's vector in the open.

    Attributes:
        clients: how many clients there are.
        length: d, coordinates of a vector.

    Raises:
        ProtocolError: too many clients.
    """

    clients: int
    length: int
    result_at_server: bool = True

    def __post_init__(self) -> None:
        check_clients(self.clients)

    def server(self, run: bytes) -> ServerProtocol[Vector]:
        """Return a server that adds up."""
        return OpenServer(self.length)

    def client(self, place: Place) -> ClientProtocol[Vector, Vector]:
        """Return a client that sends its vector."""
        return OpenClient(place.number)


class OpenServer:
    """Waits for a message of each client of the cohort; adds what arrives in the order of the clients.

    Args:
        length: d.
    """

    enough = False
    may_have_released = True

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
    def summed(self) -> int:
        """All of the cohort."""
        return len(self._cohort)

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None) -> Outgoing:
        """Begin an attempt: nobody needs to be told."""
        self._inbox.open(round_id)
        self._round_id, self._cohort, self._members = round_id, cohort, frozenset(cohort)
        self._early, self._added, self._sum = {}, 0, np.zeros(self._length)
        return []

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's message; what is next in order is added and forgotten.

        Raises:
            ProtocolError: as somebody else, of another moment, twice, or not ``length`` finite numbers; names the
                client.
        """
        try:
            envelope = Envelope.decode(data)
            if envelope.sender != sender or sender not in self._members:
                raise ProtocolError("sent a message as somebody else or outside its cohort")
            vector = self._read(sender, envelope)
            if vector.shape != (self._length,) or not np.isfinite(vector).all():
                raise ProtocolError(f"did not send {self._length} finite numbers")
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        self._early[sender] = vector
        while self._added < len(self._cohort) and self._cohort[self._added] in self._early:
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
        self._inbox.accept(envelope, OpenVector)
        content = envelope.message
        assert isinstance(content, OpenVector)
        return content.values


class OpenClient:
    """Sends its vector as it is.

    Args:
        number: the client's own.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def announce(self) -> bytes | None:
        """Nothing is to be set up."""
        return None

    def receive(self, data: bytes) -> list[bytes]:
        """Refuse: no message is awaited."""
        raise ProtocolError("a client in the open awaits no message")

    def contribute(self, round_id: RoundId, given: Vector) -> list[bytes]:
        """Return the vector's message."""
        content = OpenVector(values=given)
        return [Envelope(round_id=round_id, sender=self._number, recipient=SERVER, message=content).encode()]

    def result(self) -> Vector:
        """Refuse: the sum is the server's."""
        raise ProtocolError("clients in the open learn no sum", silo=self._number)
