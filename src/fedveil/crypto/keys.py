"""Long-term identity keys (Ed25519, RFC 8032) and private files that only their owner can read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_files import is_protected, protect, unprotect
from fedveil.errors import ConfigError
from fedveil.files import CLOSED_IN_CHILDREN, append, read_content, sync_folder, writing

SIGNATURE_BYTES: Final = 64
"""Length of a signature."""


Passphrase = Callable[[], bytes]
"""Gives the passphrase of a key's file; it is asked where the file takes one, and not before."""

_KIND: Final = b"identity"
_FIELD: Final = 2**255 - 19
_GROUPS: Final = re.compile(r"[0-9a-f]{32}")


def in_groups(digest: bytes) -> str:
    """Return the first 128 bits of a digest as 8 groups of 4 hexadecimal digits, for people to read to one another."""
    digits = digest[:16].hex()
    return " ".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def same_groups(typed: str, known: str) -> bool:
    """Return whether a fingerprint that was typed in is this one, however it is spaced.

    Raises:
        ConfigError: what was typed in is no fingerprint.
    """
    digits = "".join(typed.lower().split())
    if not _GROUPS.fullmatch(digits):
        raise ConfigError("fingerprint: 8 groups of 4 hexadecimal digits are needed, as it is read out")
    return digits == "".join(known.split())


@dataclass(frozen=True)
class PublicIdentity:
    """The public half of an identity key: 32 bytes that every party knows before a run begins.

    Points of small order are refused: of the equation S B = R + h A, with A = O for every message or for one in eight,
    anybody has a solution, so a signature would show nothing of who made it.

    Raises:
        CryptoError: not 32 bytes, or a point whose order divides 8.
    """

    raw: bytes

    def __post_init__(self) -> None:
        """Refuse anything that cannot be an Ed25519 public key."""
        if len(self.raw) != 32:
            raise CryptoError(f"a public identity has 32 bytes, this one has {len(self.raw)}")
        if _small_order(self.raw):
            raise CryptoError(
                f"the public identity {self.raw.hex()} has small order: anybody can sign under it; its party needs a "
                "key that was generated"
            )

    @property
    def fingerprint(self) -> str:
        """128 bits of the SHA-256 hash, for people to compare."""
        return in_groups(sha256(self.raw).digest())

    def verify(self, message: bytes, signature: bytes) -> None:
        """Return if the signature is this identity's over the message.

        Raises:
            CryptoError: the signature is not valid.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError) as error:
            raise CryptoError(f"signature is not valid under the identity {self.fingerprint}") from error


class IdentityKey:
    """An Ed25519 signing key that names a silo for as long as it exists.

    >>> key = IdentityKey.generate()
    >>> key.public.verify(b"message", key.sign(b"message"))
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> IdentityKey:
        """Return a new key from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path, passphrase: Passphrase | None = None) -> IdentityKey:
        """Read a key that :meth:`save` wrote.

        Args:
            path: the file.
            passphrase: asked for if the file takes one.

        Raises:
            CryptoError: the file is missing, readable by others, holds no Ed25519 key, or takes another passphrase.
        """
        data = read_private_file(path)
        if is_protected(data):
            if passphrase is None:
                raise CryptoError(f"{path} takes a passphrase")
            try:
                raw, public = unprotect(data, passphrase(), kind=_KIND)
            except CryptoError as error:
                raise CryptoError(f"{path}: {error}") from None
            key = cls(Ed25519PrivateKey.from_private_bytes(raw))
            if key.public.raw != public:
                raise CryptoError(f"{path}: its halves do not belong together")
            return key
        try:
            private = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CryptoError(f"{path} holds no unencrypted private key in PEM form") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise CryptoError(f"{path} holds a private key, but not an Ed25519 one")
        return cls(private)

    def save(self, path: Path, passphrase: bytes | None = None) -> None:
        """Write the key with mode 0600; an existing file is never overwritten.

        Args:
            path: the file.
            passphrase: opens the file (:mod:`~fedveil.crypto.key_files`); None: PKCS #8 PEM, which mode alone protects.

        Raises:
            CryptoError: the file exists or cannot be written.
        """
        if passphrase is not None:
            raw = self._private.private_bytes_raw()
            write_private_file(path, protect(raw, passphrase, kind=_KIND, public=self.public.raw))
            return
        write_private_file(
            path, self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )

    @cached_property
    def public(self) -> PublicIdentity:
        """The half to give to everybody."""
        return PublicIdentity(self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature over a message."""
        return self._private.sign(message)


def _small_order(raw: bytes) -> bool:
    """Return whether 8 A = O on edwards25519, -x^2 + y^2 = 1 + d x^2 y^2 with d = -121665 / 121666 (RFC 8032).

    y = 1, -1 and 0 have the orders 1, 2 and 4. A point of order 8 doubles to y = 0, so x^2 = -y^2, and the curve says
    d y^4 + 2 y^2 - 1 = 0. The highest bit is the sign of x, and tells nothing of the order.
    """
    y = int.from_bytes(raw, "little") % 2**255 % _FIELD
    square = y * y % _FIELD
    eighth = -121665 * square * square + 121666 * (2 * square - 1)
    return square < 2 or eighth % _FIELD == 0


def write_private_file(path: Path, data: bytes) -> None:
    """Create a file with mode 0600 from its first byte on, durably; there is none where that fails.

    Raises:
        CryptoError: the file exists (keys are never overwritten) or cannot be written.
    """
    with writing(path, CryptoError):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED_IN_CHILDREN, 0o600)
        except FileExistsError:
            raise CryptoError(
                f"{path} exists; a key is never overwritten, move the old one away first"
            ) from None
        with os.fdopen(descriptor, "wb", buffering=0) as stream:
            try:
                append(stream.fileno(), data)
                sync_folder(path.parent)
            except OSError:
                path.unlink()
                raise


def read_private_file(path: Path) -> bytes:
    """Read a file that nobody but its owner may read.

    Raises:
        CryptoError: the file is missing, unreadable, or open to the group or to others.
    """
    return read_content(path, CryptoError, private=True)
