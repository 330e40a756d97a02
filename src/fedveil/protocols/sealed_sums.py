"""Sums of messages that a codec made: each is sealed for the server, which opens, decodes and adds them up.

Who has the key of a codec's message learns more than its decoded value (docs/theory/lrsuq.md), so key and message
travel together under authenticated encryption. Client and server agree on a secret in every session, by X25519 keys;
the seal of a message is of its attempt and sender.

    setup:  client's key -> server's key
    round:  sealed message -> sum
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.aead import seal, unseal
from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_agreement import KEY_BYTES, AgreementKey, PairwiseSecret, RoundId
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.exchanges import Exchanges
from fedveil.protocols.field_codecs import REST, fixed_bytes, wire_field
from fedveil.protocols.messages import SERVER, Envelope, Inbox, Message, message
from fedveil.protocols.plaintext_sums import FullCohortSpec, PlaintextServer, SingleMessageClient
from fedveil.protocols.protocol import ClientContext, ClientInputs, ClientProtocol, Outgoing, ServerProtocol

Vector = Float64[np.ndarray, " d"]

SEAL_PURPOSE = "sealed sums: message"


@message(51, "a key to seal with")
class SealingKey(Message):
    """One end's public key of the session."""

    public: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.NOTHING)


@message(52, "a sealed message of a codec")
class SealedMessage(Message):
    """What a codec made of a client's vector, with its key; sealed for the server."""

    sealed: bytes = wire_field(REST, Reveals.CONTENT, Key.SERVER, besides=Reveals.LENGTH)


@dataclass(frozen=True, kw_only=True)
class SealedSums(FullCohortSpec):
    """Everybody's message of a codec, which is shorter than the numbers.

    Attributes:
        decode: returns the (d,) vector of the bytes that a client gives to the round of a number, or raises a
            ProtocolError.
    """

    decode: Callable[[bytes, int], Vector]

    def exchanges(self, client: int) -> Exchanges:
        """Return the keys of a session, and the one message of a round."""
        key = (SealingKey,)
        return Exchanges(joined=key, first=key, played=lambda _: ((SealedMessage,), ()))

    def client_input(self, inputs: ClientInputs, client: int) -> bytes:
        """Return the client's message as it is."""
        return cast(bytes, inputs.message(client))

    def pack(self, given: bytes) -> bytes:
        """Return what a codec made: a round that is asked for again is the same bytes under another seal."""
        return given

    def unpack(self, data: bytes) -> bytes:
        """Return the same."""
        return data

    def server(self, run: bytes) -> ServerProtocol[Vector]:
        """Return a server that opens, decodes and adds up."""
        return SealedServer(self, run)

    def client(self, context: ClientContext) -> ClientProtocol[bytes, Vector]:
        return SealedClient(context)


class SealedServer(PlaintextServer):
    """The server's end.

    Args:
        agreed: what the parties agree on.
        run: 16 bytes that name the session.
    """

    def __init__(self, agreed: SealedSums, run: bytes) -> None:
        super().__init__(agreed.length)
        self._agreed, self._own = agreed, AgreementKey.generate()
        self._setup = RoundId(run=run, round=0, attempt=0)
        self._round_id = self._setup
        self._inbox.open(self._setup)
        self._shared: dict[int, PairwiseSecret] = {}

    @property
    def ready(self) -> bool:
        """Whether every client's key is known."""
        return len(self._shared) == self._agreed.clients

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's key, or its message; return the server's key where it is due.

        Raises:
            ProtocolError: as for a message in the open, or one that does not open or decode; names the client.
        """
        if self._round_id != self._setup:
            return super().receive(sender, data)
        try:
            envelope = Envelope.decode(data)
            if envelope.sender != sender or not 0 <= sender < self._agreed.clients:
                raise ProtocolError("sent a message as somebody else")
            self._shared[sender] = self._own.agree(self._inbox.accept(envelope, SealingKey).public)
        except (ProtocolError, CryptoError) as error:
            raise ProtocolError(getattr(error, "reason", str(error)), silo=sender) from error
        key = SealingKey(public=self._own.public)
        return [
            (sender, Envelope(round_id=self._setup, sender=SERVER, recipient=sender, message=key).encode())
        ]

    def _read(self, sender: int, envelope: Envelope) -> Vector:
        self._inbox.accept(envelope, SealedMessage)
        return self._agreed.decode(self.open_sealed(sender, envelope), envelope.round_id.round)

    def open_sealed(self, sender: int, envelope: Envelope) -> bytes:
        """Return what a client gave, of its sealed message.

        Raises:
            ProtocolError: sealed by somebody else, in another session, for another round, or altered.
        """
        content = envelope.message
        assert isinstance(content, SealedMessage)
        if sender not in self._shared:
            raise ProtocolError("seals a message before the keys are known")
        try:
            key = self._shared[sender].derive(SEAL_PURPOSE, envelope.round_id)
            return unseal(key, content.sealed, _associated(envelope.round_id, sender))
        except CryptoError as error:
            raise ProtocolError(f"its message was refused: {error}") from error


class SealedClient(SingleMessageClient[bytes, Vector]):
    """A client's end.

    Args:
        place: the client's in the session.
    """

    def __init__(self, place: ClientContext) -> None:
        super().__init__(place)
        self._own = AgreementKey.generate()
        self._setup = RoundId(run=place.run, round=0, attempt=0)
        self._inbox = Inbox(place.number)
        self._inbox.open(self._setup)
        self._shared: PairwiseSecret | None = None

    @property
    def awaits_input(self) -> bool:
        """Whether the server's key is known."""
        return self._shared is not None

    def announce(self) -> bytes | None:
        """Return the message with this client's key."""
        return self._message(self._setup, SealingKey(public=self._own.public))

    def receive(self, data: bytes) -> list[bytes]:
        """Read the server's key.

        Raises:
            ProtocolError: another message, or no usable key.
        """
        envelope = Envelope.decode(data)
        key = self._inbox.accept(envelope, SealingKey)
        try:
            self._shared = self._own.agree(key.public)
        except CryptoError as error:
            raise ProtocolError(f"the server's key was refused: {error}") from error
        return []

    def check_round(self, round_id: RoundId) -> None:
        """Return if the server's key is known; else raise a ProtocolError."""
        if self._shared is None:
            raise ProtocolError("a message is due before the server's key is known", silo=self._place.number)

    def _send(self, given: bytes, round_id: RoundId) -> list[bytes]:
        assert self._shared is not None
        key = self._shared.derive(SEAL_PURPOSE, round_id)
        sealed = seal(key, given, _associated(round_id, self._place.number))
        return [self._message(round_id, SealedMessage(sealed=sealed))]


def _associated(round_id: RoundId, sender: int) -> bytes:
    return round_id.encode() + sender.to_bytes(2, "big")
