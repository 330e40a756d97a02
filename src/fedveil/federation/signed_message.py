"""What travels between coordinator and silo: a signed letter with an address, a number, and one or more parts.

    magic "FVL" | version 3 | run (16) | session (16) | number (4) | sender (2) | recipient (2) | head (32) | count (2)
    | count times: kind (1), length (8), body | Ed25519 signature (64)

Everything that can travel together travels in one letter, because a carrier may take seconds for each. A silo answers
each letter with one letter of the same session and number. The signature is the sender's over all before it: neither
the carrier nor another party can make a letter, change one, or send one as somebody else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.crypto.keys import SIGNATURE_BYTES, IdentityKey, PublicIdentity
from fedveil.federation.ledger_heads import NONE
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.messages import SERVER
from fedveil.protocols.session_messages import NONCE_BYTES, PARTS, SessionMessage
from fedveil.protocols.wire import Reader, Writer

_MAGIC: Final = b"FVL"
_VERSION: Final = 3
_HEADER: Final = struct.Struct(f">3sB{RUN_BYTES}s{NONCE_BYTES}sIHH32sH")
_SIGNED_AS: Final = b"fedveil/1/letter"


@dataclass(frozen=True, kw_only=True)
class SignedMessage:
    """A letter, opened.

    Attributes:
        run: 16 bytes that no other run has.
        session: 16 bytes that name it (:mod:`~fedveil.federation.session_admission`); of a knock, the coordinator's
            nonce.
        number: of the exchange within the session, from 0.
        sender: a silo's number, or SERVER.
        recipient: a silo's number, or SERVER.
        parts: what it says.
        head: the end of the sender's ledger (:mod:`~fedveil.federation.ledger_heads`); zeros from the coordinator,
            whose ledger is the run's own.
    """

    run: bytes
    session: bytes
    number: int
    sender: int
    recipient: int
    parts: tuple[SessionMessage, ...]
    head: bytes = NONE

    def seal(self, key: IdentityKey) -> bytes:
        """Return the bytes to carry, signed by the sender."""
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
        """Return the letter that answers this one."""
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
        """Return the letter of received bytes.

        Args:
            data: what the carrier brought.
            sender: who sent it, as the carrier says.
            identity: the sender's public identity.
            recipient: who reads it.
            largest: bytes beyond which it is refused unread.

        Raises:
            ProtocolError: too long, no letter or one of another version, of somebody else, to somebody else, a
                signature that is not the sender's, or a part that is damaged or of an unknown kind.
        """
        silo = None if sender == SERVER else sender
        if len(data) > largest:
            raise ProtocolError(f"a letter of {len(data)} bytes is above the limit of {largest}", silo=silo)
        if len(data) < _HEADER.size + SIGNATURE_BYTES:
            raise ProtocolError(f"a letter has at least {_HEADER.size + SIGNATURE_BYTES} bytes", silo=silo)
        signed = b"".join((_SIGNED_AS, memoryview(data)[:-SIGNATURE_BYTES]))
        magic, version, run, session, number, said, to, head, count = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolError("not a letter", silo=silo)
        if version != _VERSION:
            raise ProtocolError(
                f"a letter of version {version}, where version {_VERSION} is read; all parties need the same release",
                silo=silo,
            )
        if said != sender or to != recipient:
            raise ProtocolError("a letter names another sender or recipient than its carrier", silo=silo)
        try:
            identity.verify(signed, data[-SIGNATURE_BYTES:])
        except CryptoError as error:
            raise ProtocolError(f"a letter is not signed by its sender: {error}", silo=silo) from None
        try:
            parts = _parts(Reader(signed, len(_SIGNED_AS) + _HEADER.size), count)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=silo) from None
        return cls(run=run, session=session, number=number, sender=said, recipient=to, parts=parts, head=head)


def session_in(header: bytes) -> tuple[bytes, bytes]:
    """Return the run and the session that a letter's beginning names; nothing of it is checked yet."""
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
