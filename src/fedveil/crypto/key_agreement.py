"""Agree on secrets by X25519 (RFC 7748), derive keys by HKDF (RFC 5869), encrypt by ChaCha20-Poly1305 (RFC 8439)."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.errors import CryptoError

KEY_BYTES: Final = 32
RUN_BYTES: Final = 16
CONTEXT_BYTES: Final = 32
_LABEL: Final = b"fedveil/1"


@dataclass(frozen=True, kw_only=True)
class RoundId:
    """Attempt at a round for which keys are derived; no two attempts share a key.

    Attributes:
        run: 16 bytes, unique to the run.
        round: number of the round; 0 is the setup before the first round.
        attempt: number of earlier attempts at this round.
        context: 32-byte digest of the messages that the parties received about the attempt. Every key and signature
            is bound to the digest, and no message carries it.
    """

    run: bytes
    round: int
    attempt: int
    context: bytes = field(default=bytes(CONTEXT_BYTES), compare=False)

    def __post_init__(self) -> None:
        """Check that the values fit the encoding."""
        if len(self.run) != RUN_BYTES:
            raise CryptoError(f"a run's identifier has {RUN_BYTES} bytes, this one has {len(self.run)}")
        if len(self.context) != CONTEXT_BYTES:
            raise CryptoError(f"a context has {CONTEXT_BYTES} bytes, this one has {len(self.context)}")
        if not (0 <= self.round < 2**32 and 0 <= self.attempt < 2**16):
            raise CryptoError(
                f"round {self.round}, attempt {self.attempt}: at most 2^32 rounds of 2^16 attempts"
            )

    def encode(self) -> bytes:
        """Return the 54 bytes that identify this attempt in every key derivation and signature."""
        return self.run + struct.pack(">IH", self.round, self.attempt) + self.context


def derive(secret: bytes, purpose: str, round_id: RoundId, salt: bytes = b"") -> bytes:
    """Derive a 32-byte key from a secret, for one purpose and one attempt.

    HKDF-SHA-256 with info = label, length-prefixed purpose, run, round, attempt, context. No two uses share a key.

    Args:
        secret: input key material, at least 32 bytes with at least 128 bits of entropy.
        purpose: purpose of the key, such as ``"mask"``; each purpose has its own key.
        round_id: attempt in which the key is used.
        salt: public bytes to which the key is bound.
    """
    name = purpose.encode()
    info = _LABEL + struct.pack(">H", len(name)) + name + round_id.encode()
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


class PairwiseSecret:
    """Secret that two parties share after an agreement; only keys derived from it are used."""

    def __init__(self, shared: bytes, public_keys: bytes) -> None:
        self._shared, self._public_keys = shared, public_keys

    def derive(self, purpose: str, round_id: RoundId) -> bytes:
        """Return the 32-byte key for one purpose at one attempt, the same for both parties."""
        return derive(self._shared, purpose, round_id, salt=self._public_keys)


class AgreementKey:
    """X25519 key pair.

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
        """Return the key pair of the bytes from :meth:`private_bytes`; any 32 bytes are a valid key."""
        if len(raw) != KEY_BYTES:
            raise CryptoError(f"an X25519 private key has {KEY_BYTES} bytes, this one has {len(raw)}")
        return cls(X25519PrivateKey.from_private_bytes(raw))

    def private_bytes(self) -> bytes:
        """Return the 32 secret bytes, to be shared among peers for recovery; never store or log them."""
        return self._private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    @property
    def public(self) -> bytes:
        """Public key (32 bytes) for the other party."""
        return self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def agree(self, peer: bytes) -> PairwiseSecret:
        """Return the secret that is shared with the owner of a public key.

        Raises:
            CryptoError: not 32 bytes, or a point of small order, for which the shared secret would be zero.
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise CryptoError("an agreement key is not a usable X25519 public key") from error
        return PairwiseSecret(shared, b"".join(sorted((self.public, peer))))


@dataclass(frozen=True, kw_only=True)
class SignedKey:
    """Public agreement key with its owner's signature over key, owner, purpose and attempt.

    A relaying server can replace the key neither by its own key nor by an old key of the same owner.
    """

    public: bytes
    signature: bytes

    @classmethod
    def sign(
        cls, identity: IdentityKey, public: bytes, *, owner: int, purpose: str, round_id: RoundId
    ) -> SignedKey:
        """Sign a public agreement key with its owner's identity key."""
        return cls(public=public, signature=identity.sign(_signed_bytes(public, owner, purpose, round_id)))

    def verify(self, identity: PublicIdentity, *, owner: int, purpose: str, round_id: RoundId) -> None:
        """Check that the owner signed this key for this purpose and attempt.

        Raises:
            CryptoError: the signature is missing or invalid, or it covers another key, owner, purpose or attempt.
        """
        identity.verify(_signed_bytes(self.public, owner, purpose, round_id), self.signature)


def _signed_bytes(public: bytes, owner: int, purpose: str, round_id: RoundId) -> bytes:
    name = purpose.encode()
    label = _LABEL + b"/agreement-key"
    return label + struct.pack(">IH", owner, len(name)) + name + round_id.encode() + public


# --- authenticated encryption under an agreed key ---

_NONCE_BYTES: Final = 12
OVERHEAD_BYTES: Final = _NONCE_BYTES + 16
"""Bytes by which a sealed message is longer than its plaintext: nonce (12) and tag (16)."""


def seal(key: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """Encrypt and authenticate a message; return nonce and ciphertext.

    The nonce is random, so one key may seal up to 2^32 messages.

    Args:
        key: 32 bytes.
        plaintext: message to encrypt.
        associated: bytes that are authenticated but are not part of the result.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plaintext, associated)


def unseal(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Verify and decrypt a message of :func:`seal`; return the plaintext.

    Raises:
        CryptoError: the message is too short or altered, or key or associated data are wrong.
    """
    if len(sealed) < OVERHEAD_BYTES:
        raise CryptoError(f"a sealed message has at least {OVERHEAD_BYTES} bytes, this one has {len(sealed)}")
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], associated)
    except InvalidTag as error:
        raise CryptoError("a sealed message does not authenticate: wrong key or altered") from error
