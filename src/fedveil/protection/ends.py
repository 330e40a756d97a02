"""A client's end of a session, as a carrier holds it: what the ends of all protocols have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from fedveil.crypto.agreement import RoundId
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import SERVER, Envelope, Message
from fedveil.protection.protocol import GivenIn, Place, ResultOut


class ClientEnd(ABC, Generic[GivenIn, ResultOut]):
    """A client's end; unless it says otherwise, of a protocol whose result is the server's."""

    _place: Place

    @property
    def learned(self) -> bool:
        """False: the result is the server's."""
        return False

    @property
    def binding(self) -> bytes:
        """Nothing: what is given depends on what was asked alone."""
        return b""

    @abstractmethod
    def check_round(self, round_id: RoundId) -> None:
        """Return if this is the round that has begun here; else raise a ProtocolError."""

    def contribute(self, round_id: RoundId, given: GivenIn) -> list[bytes]:
        """Return the messages that bring what is given into the sum, once it is kept."""
        self.check_round(round_id)
        self._place.keep(given)
        return self._send(given, round_id)

    def result(self) -> ResultOut:
        """Refuse: the sum is the server's."""
        raise ProtocolError("clients learn no sum: it is the server's", silo=self._place.number)

    def tag(self, content: bytes) -> bytes:
        """Refuse: the clients have no result to compare."""
        raise ProtocolError("clients have no result of their own to compare", silo=self._place.number)

    @abstractmethod
    def _send(self, given: GivenIn, round_id: RoundId) -> list[bytes]:
        """Return the messages of what is given, which is kept."""


class MessageEnd(ClientEnd[GivenIn, ResultOut]):
    """The end of a client whose contribution is one message to the server; no message of the server begins its round.

    Args:
        place: the client's in the session.
    """

    def __init__(self, place: Place) -> None:
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
