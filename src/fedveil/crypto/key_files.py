"""Protect private keys in files by a passphrase; an attacker can test about one guess per second.

    FVK1 | salt (16) | nonce (12) | public (32) | ChaCha20-Poly1305 of the key

The key of the cipher is Argon2id (RFC 9106) of the passphrase, with 256 MiB, 3 passes and 4 lanes. The associated
data are all bytes before the ciphertext, and the kind of key, so a file of one kind is not valid as another kind.

Claim: without the passphrase a file discloses the public half and nothing about the private half, and a changed file
is refused. Condition: the passphrase cannot be guessed; each guess costs the work of Argon2id.
"""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from fedveil.crypto.errors import CryptoError

_MAGIC: Final = b"FVK1"
_SALT: Final = 16
_NONCE: Final = 12
_PUBLIC: Final = 32
_HEADER: Final = len(_MAGIC) + _SALT + _NONCE + _PUBLIC
_KIBIBYTES: Final = 256 * 1024
_PASSES: Final = 3
_LANES: Final = 4


def is_protected(content: bytes) -> bool:
    """Return whether the content of a key file is protected by a passphrase."""
    return content.startswith(_MAGIC)


def protect(private: bytes, passphrase: bytes, *, kind: bytes, public: bytes) -> bytes:
    """Return the content of a protected key file.

    Args:
        private: private key.
        passphrase: passphrase that opens the file; not empty.
        kind: kind of key; authenticated, and not part of the file.
        public: public half of the key, 32 bytes, stored in the clear.

    Raises:
        CryptoError: an empty passphrase.
    """
    if not passphrase:
        raise CryptoError("an empty passphrase protects nothing")
    # A fresh salt gives every file its own cipher key: guesses for one file do not serve another.
    salt, nonce = os.urandom(_SALT), os.urandom(_NONCE)
    head = _MAGIC + salt + nonce + public
    return head + _cipher(passphrase, salt).encrypt(nonce, private, head + kind)


def unprotect(content: bytes, passphrase: bytes, *, kind: bytes) -> tuple[bytes, bytes]:
    """Decrypt a protected key file; return the private key and its public half.

    Raises:
        CryptoError: another passphrase, another kind of key, or a damaged file.
    """
    head, sealed = content[:_HEADER], content[_HEADER:]
    salt, nonce = head[4 : 4 + _SALT], head[4 + _SALT : 4 + _SALT + _NONCE]
    if not is_protected(content) or len(content) <= _HEADER or not passphrase:
        raise CryptoError("no protected key, or no passphrase")
    try:
        private = _cipher(passphrase, salt).decrypt(nonce, sealed, head + kind)
    except InvalidTag:
        raise CryptoError("another passphrase, another kind of key, or a damaged file") from None
    return private, head[-_PUBLIC:]


def _cipher(passphrase: bytes, salt: bytes) -> ChaCha20Poly1305:
    derived = Argon2id(salt=salt, length=32, iterations=_PASSES, lanes=_LANES, memory_cost=_KIBIBYTES)
    return ChaCha20Poly1305(derived.derive(passphrase))
