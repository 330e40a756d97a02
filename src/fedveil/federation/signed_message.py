"""Signed messages between coordinator and silo: address, exchange number, and one or more parts.

    magic "FVL" | version 4 | run (16) | session (16) | number (4) | sender (2) | recipient (2) | head (32)
    | count (2) | count times: kind (1), length (8), body | Ed25519 signature (64)

Numbers in parentheses are bytes. One message carries everything that can travel together, because a transport may
need seconds for each message. A silo answers each message with one message of the same session and number. The sender
signs all bytes before the signature. Neither the carrier nor another party can forge a message, change it, or send it
under another party's name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.crypto.keys import SIGNATURE_BYTES, IdentityKey, PublicIdentity
from fedveil.errors import CryptoError, ProtocolError
from fedveil.federation.ledger_heads import NONE
from fedveil.protocols.field_codecs import Reader, Writer
from fedveil.protocols.messages import SERVER
from fedveil.protocols.session_messages import NONCE_BYTES, PARTS, SessionMessage

_MAGIC: Final = b"FVL"
_VERSION: Final = 4
_HEADER: Final = struct.Struct(f">3sB{RUN_BYTES}s{NONCE_BYTES}sIHH32sH")
_SIGNED_AS: Final = b"fedveil/1/letter"


@dataclass(frozen=True, kw_only=True)
class SignedMessage:
    """A signed message, decoded.

    Attributes:
        run: 16 bytes, unique to the run.
        session: 16 bytes, the session name (:mod:`~fedveil.federation.session_plan`); in a `Hello`, the nonce of
            the coordinator.
        number: number of the exchange within the session, from 0.
        sender: a silo's number, or SERVER.
        recipient: a silo's number, or SERVER.
        parts: the session messages that it carries.
        head: ledger head of the sender (:mod:`~fedveil.federation.ledger_heads`); zeros from the coordinator, whose
            ledger belongs to the run.
    """

    run: bytes
    session: bytes
    number: int
    sender: int
    recipient: int
    parts: tuple[SessionMessage, ...]
    head: bytes = NONE

    def seal(self, key: IdentityKey) -> bytes:
        """Encode the message and sign it with the sender's key."""
        head = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.run,
            self.session,
            self.number,
            self.sender,
            self.recipient,
            self.head,
            len(self.parts),
        )
        writer = Writer()
        for part in self.parts:
            writer.number(part.kind, 1).block(part.encode())
        content = head + writer.bytes()
        return content + key.sign(_SIGNED_AS + content)

    def answer(self, *parts: SessionMessage) -> SignedMessage:
        """Return the reply to this message: same session and number, sender and recipient exchanged."""
        return SignedMessage(
            run=self.run,
            session=self.session,
            number=self.number,
            sender=self.recipient,
            recipient=self.sender,
            parts=parts,
        )

    @classmethod
    def open(
        cls, data: bytes, *, sender: int, identity: PublicIdentity, recipient: int, largest: int
    ) -> SignedMessage:
        """Verify received bytes and decode the message.

        Args:
            data: the received bytes.
            sender: number of the sender, as reported by the carrier.
            identity: public identity of the sender.
            recipient: number of the reader.
            largest: limit in bytes; a longer message is refused unread.

        Raises:
            ProtocolError: the data are too long, not a message, of another version, from or to another party, not
                signed by the sender, or contain a part that is damaged or of an unknown kind.
        """
        silo = None if sender == SERVER else sender
        if len(data) > largest:
            raise ProtocolError(f"a message of {len(data)} bytes is above the limit of {largest}", silo=silo)
        if len(data) < _HEADER.size + SIGNATURE_BYTES:
            raise ProtocolError(f"a message has at least {_HEADER.size + SIGNATURE_BYTES} bytes", silo=silo)
        # The signature covers a domain string, which is not sent: a signature from another context never verifies
        # here.
        signed = b"".join((_SIGNED_AS, memoryview(data)[:-SIGNATURE_BYTES]))
        magic, version, run, session, number, sender_number, addressee, head, count = _HEADER.unpack_from(
            data
        )
        if magic != _MAGIC:
            raise ProtocolError("not a message", silo=silo)
        if version != _VERSION:
            raise ProtocolError(
                f"a message of version {version}, where version {_VERSION} is read; all parties need the same release",
                silo=silo,
            )
        if sender_number != sender or addressee != recipient:
            raise ProtocolError("a message names another sender or recipient than its carrier", silo=silo)
        try:
            identity.verify(signed, data[-SIGNATURE_BYTES:])
        except CryptoError as error:
            raise ProtocolError(f"a message is not signed by its sender: {error}", silo=silo) from None
        try:
            # Parts are parsed only after the signature holds: bytes of an unknown party never reach a decoder.
            parts = _parts(Reader(signed, len(_SIGNED_AS) + _HEADER.size), count)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=silo) from None
        return cls(
            run=run,
            session=session,
            number=number,
            sender=sender_number,
            recipient=addressee,
            parts=parts,
            head=head,
        )


def session_in(header: bytes) -> tuple[bytes, bytes]:
    """Return the run and the session in a message's header, unverified; empty bytes if it is too short."""
    if len(header) < _HEADER.size:
        return b"", b""
    _, _, run, session, *_ = _HEADER.unpack_from(header)
    return run, session


def _parts(reader: Reader, count: int) -> tuple[SessionMessage, ...]:
    parts = []
    for _ in range(count):
        kind = reader.number(1)
        if kind not in PARTS:
            raise ProtocolError(f"parts of kind {kind} do not exist in version {_VERSION}")
        parts.append(PARTS[kind].decode(reader.block()))
    reader.finish()
    return tuple(parts)
