"""Authenticated encryption (ChaCha20-Poly1305, RFC 8439) under keys derived for one purpose and attempt."""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedveil.crypto.errors import CryptoError

_NONCE_BYTES: Final = 12
OVERHEAD_BYTES: Final = _NONCE_BYTES + 16
"""How much longer a sealed message is than its plaintext."""


def seal(key: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """Return nonce and ciphertext; ``associated`` is authenticated but not sent.

    The nonce is random, so one key may seal up to 2^32 messages.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plaintext, associated)


def unseal(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Return the plaintext.

    Raises:
        CryptoError: too short, wrong key, wrong associated data, or altered on the way.
    """
    if len(sealed) < OVERHEAD_BYTES:
        raise CryptoError(f"a sealed message has at least {OVERHEAD_BYTES} bytes, this one has {len(sealed)}")
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], associated)
    except InvalidTag as error:
        raise CryptoError("a sealed message does not authenticate: wrong key or altered") from error
