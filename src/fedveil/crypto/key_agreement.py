"""X25519 agreement (RFC 7748) and keys derived by HKDF (RFC 5869), one per purpose and attempt at a round."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.keys import IdentityKey, PublicIdentity

KEY_BYTES: Final = 32
RUN_BYTES: Final = 16
CONTEXT_BYTES: Final = 32
_LABEL: Final = b"fedveil/1"


@dataclass(frozen=True, kw_only=True)
class RoundId:
    """Where in a run a key is used. Keys of different attempts are independent, so a retry never reuses one.

    Attributes:
        run: 16 bytes that no other run has.
        round: the round's number; 0 is the setup before the first round.
        attempt: how often this round was begun before.
        context: 32 bytes of what the parties were told of it; every key and signature is bound to them, and no message
            carries them.
    """

    run: bytes
    round: int
    attempt: int
    context: bytes = field(default=bytes(CONTEXT_BYTES), compare=False)

    def __post_init__(self) -> None:
        """Refuse what does not fit the encoding."""
        if len(self.run) != RUN_BYTES:
            raise CryptoError(f"a run's identifier has {RUN_BYTES} bytes, this one has {len(self.run)}")
        if len(self.context) != CONTEXT_BYTES:
            raise CryptoError(f"a context has {CONTEXT_BYTES} bytes, this one has {len(self.context)}")
        if not (0 <= self.round < 2**32 and 0 <= self.attempt < 2**16):
            raise CryptoError(
                f"round {self.round}, attempt {self.attempt}: at most 2^32 rounds of 2^16 attempts"
            )

    def encode(self) -> bytes:
        """Return the 54 bytes that stand for this attempt in every derivation and signature."""
        return self.run + struct.pack(">IH", self.round, self.attempt) + self.context


def derive(secret: bytes, purpose: str, round_id: RoundId, salt: bytes = b"") -> bytes:
    """Return the 32-byte key of a secret for one purpose at one attempt.

    HKDF-SHA-256 with info = label, length-prefixed purpose, run, round, attempt, context; so no two uses share a key.

    Args:
        secret: input key material, at least 32 bytes with 128 bits of entropy or more.
        purpose: what the key is for, such as ``"mask"``; each purpose gets its own key.
        round_id: when it is used.
        salt: public bytes that the key is bound to.
    """
    name = purpose.encode()
    info = _LABEL + struct.pack(">H", len(name)) + name + round_id.encode()
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


class PairwiseSecret:
    """What two parties share after an agreement; it is never used itself, only keys derived from it."""

    def __init__(self, shared: bytes, publics: bytes) -> None:
        self._shared, self._publics = shared, publics

    def derive(self, purpose: str, round_id: RoundId) -> bytes:
        """Return the 32-byte key for one purpose at one attempt, the same for both parties."""
        return derive(self._shared, purpose, round_id, salt=self._publics)


class AgreementKey:
    """An X25519 key pair.

    >>> a, b = AgreementKey.generate(), AgreementKey.generate()
    >>> attempt = RoundId(run=bytes(16), round=1, attempt=0)
    >>> a.agree(b.public).derive("mask", attempt) == b.agree(a.public).derive("mask", attempt)
    True
    """

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> AgreementKey:
        """Return a new key from the operating system's randomness."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, raw: bytes) -> AgreementKey:
        """Return the key that :meth:`private_bytes` gave; any 32 bytes are a key."""
        if len(raw) != KEY_BYTES:
            raise CryptoError(f"an X25519 private key has {KEY_BYTES} bytes, this one has {len(raw)}")
        return cls(X25519PrivateKey.from_private_bytes(raw))

    def private_bytes(self) -> bytes:
        """Return the 32 secret bytes (to share among peers for recovery; never to store or to log)."""
        return self._private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    @property
    def public(self) -> bytes:
        """The 32 bytes to give to the other party."""
        return self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def agree(self, peer: bytes) -> PairwiseSecret:
        """Return the secret shared with the holder of a public key.

        Raises:
            CryptoError: not 32 bytes, or a point of small order (the shared secret would be zero).
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise CryptoError("an agreement key is not a usable X25519 public key") from error
        return PairwiseSecret(shared, b"".join(sorted((self.public, peer))))


@dataclass(frozen=True, kw_only=True)
class SignedKey:
    """An agreement key with its owner's signature over key, owner, purpose and attempt.

    The relay in the middle cannot put its own key in place, nor an old key of the same owner.
    """

    public: bytes
    signature: bytes

    @classmethod
    def sign(
        cls, identity: IdentityKey, public: bytes, *, owner: int, purpose: str, round_id: RoundId
    ) -> SignedKey:
        """Return the key signed by its owner's identity."""
        return cls(public=public, signature=identity.sign(_statement(public, owner, purpose, round_id)))

    def verify(self, identity: PublicIdentity, *, owner: int, purpose: str, round_id: RoundId) -> None:
        """Return if the owner signed this key for this purpose and attempt.

        Raises:
            CryptoError: the signature is missing, wrong, or for something else.
        """
        identity.verify(_statement(self.public, owner, purpose, round_id), self.signature)


def _statement(public: bytes, owner: int, purpose: str, round_id: RoundId) -> bytes:
    name = purpose.encode()
    label = _LABEL + b"/agreement-key"
    return label + struct.pack(">IH", owner, len(name)) + name + round_id.encode() + public
