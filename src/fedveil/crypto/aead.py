"""Encrypt with authentication (ChaCha20-Poly1305, RFC 8439) under single-purpose keys."""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedveil.crypto.errors import CryptoError

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
