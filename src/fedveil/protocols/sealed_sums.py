"""Sum coded messages that clients seal for the server, which decrypts, decodes and adds them.

A reader that has the key of a codec's message learns more than the decoded value (docs/theory/lrsuq.md). Key and
message are therefore sent together under authenticated encryption. Client and server agree on a secret in every
session, by X25519 keys. The seal of a message is bound to its attempt and sender.

    setup:  client's key -> server's key
    round:  sealed message -> sum

Not claimed: protection of a client's vector against the server, which decrypts every message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.key_agreement import KEY_BYTES, AgreementKey, PairwiseSecret, RoundId, seal, unseal
from fedveil.errors import CryptoError, ProtocolError
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.field_codecs import REST, fixed_bytes, wire_field
from fedveil.protocols.messages import SERVER, Envelope, Inbox, Message, message
from fedveil.protocols.plaintext_sums import FullCohortSpec, PlaintextServer, SingleMessageClient
from fedveil.protocols.protocol import (
    ClientContext,
    ClientInputs,
    ClientProtocol,
    Exchanges,
    Outgoing,
    ServerProtocol,
)

Vector = Float64[np.ndarray, " d"]

SEAL_PURPOSE = "sealed sums: message"


@message(51, "a key to seal with")
class SealingKey(Message):
    """X25519 public key of one end, for one session."""

    public: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.NOTHING)


@message(52, "a sealed message of a codec")
class SealedMessage(Message):
    """Coded vector of a client together with the codec's key, sealed for the server."""

    sealed: bytes = wire_field(REST, Reveals.CONTENT, Key.SERVER, besides=Reveals.LENGTH)


@dataclass(frozen=True, kw_only=True)
class SealedSums(FullCohortSpec):
    """Specification of a sum of coded vectors; a codec's message is shorter than the float64 numbers.

    Attributes:
        decode: maps a client's coded bytes and the number of the round to the (d,) vector, or raises a ProtocolError.
    """

    decode: Callable[[bytes, int], Vector]

    def exchanges(self, client: int) -> Exchanges:
        """Return the exchanges of a session: two keys in the setup, and one message per round."""
        key = (SealingKey,)
        # The client sends its key when it joins, and the server its key ahead of the first round.
        return Exchanges(on_join=key, session_start=key, answers=lambda _: ((SealedMessage,), ()))

    def client_input(self, inputs: ClientInputs, client: int) -> bytes:
        """Return the bytes that the client's codec made."""
        return cast(bytes, inputs.message(client))

    def pack(self, coded: bytes) -> bytes:
        """Return the coded bytes unchanged: a repeated round sends the same bytes under another seal."""
        return coded

    def unpack(self, data: bytes) -> bytes:
        """Return the coded bytes unchanged."""
        return data

    def server(self, run: bytes) -> ServerProtocol[Vector]:
        """Return the server's end, with a fresh key."""
        return SealedServer(self, run)

    def client(self, context: ClientContext) -> ClientProtocol[bytes, Vector]:
        return SealedClient(context)


class SealedServer(PlaintextServer):
    """Server's end of a sum of sealed messages.

    Args:
        spec: public specification of the protocol.
        run: 16 bytes that name the session.
    """

    def __init__(self, spec: SealedSums, run: bytes) -> None:
        super().__init__(spec.length)
        self._spec, self._key_pair = spec, AgreementKey.generate()
        self._setup = RoundId(run=run, round=0, attempt=0)
        self._round_id = self._setup
        self._inbox.open(self._setup)
        self._shared: dict[int, PairwiseSecret] = {}

    @property
    def ready(self) -> bool:
        """Return whether every client's key is known."""
        return len(self._shared) == self._spec.clients

    def receive(self, sender: int, data: bytes) -> Outgoing:
        """Read a client's key or its sealed message; answer a key with the server's key.

        Raises:
            ProtocolError: as :meth:`PlaintextServer.receive`, an unusable key, or a message that cannot be decrypted
                or decoded; the error names the client.
        """
        # Until the first round begins, clients send keys; from then on, sealed messages.
        if self._round_id != self._setup:
            return super().receive(sender, data)
        try:
            envelope = Envelope.decode(data)
            if envelope.sender != sender or not 0 <= sender < self._spec.clients:
                raise ProtocolError("sent a message under another party's name")
            self._shared[sender] = self._key_pair.agree(self._inbox.accept(envelope, SealingKey).public)
        except (ProtocolError, CryptoError) as error:
            raise ProtocolError(getattr(error, "reason", str(error)), silo=sender) from error
        key = SealingKey(public=self._key_pair.public)
        return [
            (sender, Envelope(round_id=self._setup, sender=SERVER, recipient=sender, message=key).encode())
        ]

    def _read(self, sender: int, envelope: Envelope) -> Vector:
        self._inbox.accept(envelope, SealedMessage)
        return self._spec.decode(self.open_sealed(sender, envelope), envelope.round_id.round)

    def open_sealed(self, sender: int, envelope: Envelope) -> bytes:
        """Decrypt a client's sealed message; return the coded bytes.

        Raises:
            ProtocolError: the message was sealed by another client, in another session or for another attempt, or it
                was altered.
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
    """Client's end of a sum of sealed messages.

    Args:
        context: context of the client in the session.
    """

    def __init__(self, context: ClientContext) -> None:
        super().__init__(context)
        self._key_pair = AgreementKey.generate()
        self._setup = RoundId(run=context.run, round=0, attempt=0)
        self._inbox = Inbox(context.number)
        self._inbox.open(self._setup)
        self._shared: PairwiseSecret | None = None

    @property
    def awaits_input(self) -> bool:
        """Return whether the server's key has arrived."""
        return self._shared is not None

    def announce(self) -> bytes | None:
        """Return the message that carries this client's public key."""
        return self._message(self._setup, SealingKey(public=self._key_pair.public))

    def receive(self, data: bytes) -> list[bytes]:
        """Read the server's key.

        Raises:
            ProtocolError: another kind of message, or an unusable key.
        """
        envelope = Envelope.from_server(data)
        key = self._inbox.accept(envelope, SealingKey)
        try:
            self._shared = self._key_pair.agree(key.public)
        except CryptoError as error:
            raise ProtocolError(f"the server's key was refused: {error}") from error
        return []

    def check_round(self, round_id: RoundId) -> None:
        """Check that the server's key has arrived; raise a ProtocolError if not."""
        if self._shared is None:
            raise ProtocolError("a message is due before the server's key is known", silo=self._place.number)

    def _send(self, coded: bytes, round_id: RoundId) -> list[bytes]:
        assert self._shared is not None
        key = self._shared.derive(SEAL_PURPOSE, round_id)
        sealed = seal(key, coded, _associated(round_id, self._place.number))
        return [self._message(round_id, SealedMessage(sealed=sealed))]


def _associated(round_id: RoundId, sender: int) -> bytes:
    # Round, attempt and sender are authenticated, so a sealed message is not valid for another attempt or client.
    return round_id.encode() + sender.to_bytes(2, "big")
