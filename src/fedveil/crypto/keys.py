"""Define long-term identity keys (Ed25519, RFC 8032) and files that only their owner can read.

A file may protect its private key by a passphrase. It then has these fields, with their lengths in bytes:

    FVK1 | salt (16) | nonce (12) | public (32) | ChaCha20-Poly1305 of the key

The key of the cipher is Argon2id (RFC 9106) of the passphrase and the salt, with 256 MiB, 3 passes and 4 lanes, so
that one guess costs an attacker about a second. The associated data are all bytes before the ciphertext, and the kind
of key, so a file of one kind is not valid as another kind.

Claim: without the passphrase a file discloses the public half and nothing about the private half, and a changed file
is refused. Condition: the passphrase cannot be guessed; each guess costs the work of Argon2id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from fedveil.errors import ConfigError, CryptoError
from fedveil.files import CLOSED_IN_CHILDREN, append, read_content, sync_folder, writing

# --- keys under a passphrase ---

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
    # A fresh salt gives every file its own cipher key, so a guess tests one file only.
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


# --- keys and their files ---

SIGNATURE_BYTES: Final = 64
"""Bytes of a signature."""


Passphrase = Callable[[], bytes]
"""Callback that returns the passphrase of a key file; called only if the file is protected by a passphrase."""

_KIND: Final = b"identity"
_FIELD: Final = 2**255 - 19  # prime of the field of edwards25519
FingerprintKind = Literal["request", "identity", "membership", "charter"]
"""First word of a fingerprint: the kind of object, so that fingerprints of different objects are not confused."""

_FINGERPRINT: Final = re.compile(r"(?P<kind>[a-z]*)(?P<digits>[0-9a-f]{32})")


def format_fingerprint(kind: FingerprintKind, digest: bytes) -> str:
    """Return the kind and the first 128 bits of a digest, as 8 groups of 4 hexadecimal digits."""
    digits = digest[:16].hex()
    return " ".join((kind, *(digits[start : start + 4] for start in range(0, len(digits), 4))))


def same_fingerprint(typed: str, expected: str) -> bool:
    """Return whether a typed fingerprint equals a known one, apart from spaces and case.

    The typed text may omit the first word, the kind.

    Raises:
        ConfigError: the typed text is not a fingerprint, or is a fingerprint of another kind.
    """
    kind, _, digits = expected.partition(" ")
    typed = "".join(typed.lower().split())
    match = _FINGERPRINT.fullmatch(typed)
    if match is None:
        raise ConfigError(
            f"fingerprint: '{kind}' and 8 groups of 4 hexadecimal digits are needed, as they are read out"
        )
    if match["kind"] not in ("", kind):
        raise ConfigError(f"fingerprint: a fingerprint of the {kind} is needed; what was typed is not one")
    return match["digits"] == digits.replace(" ", "")


@dataclass(frozen=True)
class PublicIdentity:
    """Public half of an identity key: 32 bytes that every party knows before a run begins.

    Points of small order are refused. A signature (R, S) is valid under the public point A if S B = R + h A, where B is
    the base point and h a hash. If A has small order, then h A = O for every message or for one message in eight.
    Anybody can then choose S and set R = S B, so a signature would not identify its signer.

    Raises:
        CryptoError: not 32 bytes, or a point whose order divides 8.
    """

    raw: bytes

    def __post_init__(self) -> None:
        """Check the length and the order of the point."""
        if len(self.raw) != 32:
            raise CryptoError(f"a public identity has 32 bytes, this one has {len(self.raw)}")
        if _small_order(self.raw):
            raise CryptoError(
                f"the public identity {self.raw.hex()} has small order: "
                "any party can forge its signatures; generate a new key"
            )

    @property
    def fingerprint(self) -> str:
        """First 128 bits of the SHA-256 hash as groups of digits, for people to compare."""
        return format_fingerprint("identity", sha256(self.raw).digest())

    def verify(self, message: bytes, signature: bytes) -> None:
        """Check that a signature over a message is valid under this identity.

        Raises:
            CryptoError: the signature is not valid.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError) as error:
            raise CryptoError(f"signature is not valid under the identity {self.fingerprint}") from error


class IdentityKey:
    """Ed25519 signing key that identifies a party (silo, coordinator or founder) over its whole lifetime.

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
            path: path of the file.
            passphrase: returns the passphrase; called only if the file is protected.

        Raises:
            CryptoError: the file is missing, readable by others, contains no Ed25519 key, or has another passphrase.
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
                raise CryptoError(f"{path}: its public half is not that of its private key")
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
            path: path of the file.
            passphrase: passphrase that protects the file, in the format at the top of this module. None writes PKCS #8
                PEM, which only the file mode protects.

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
        """Public half of the key."""
        return PublicIdentity(self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature over a message."""
        return self._private.sign(message)


def _small_order(raw: bytes) -> bool:
    """Return whether 8 A = O on edwards25519, for the point A that 32 bytes encode (RFC 8032).

    The curve is -x^2 + y^2 = 1 + d x^2 y^2 with d = -121665 / 121666. The points with y = 1, -1 and 0 have the orders
    1, 2 and 4. The double of a point of order 8 has y = 0, so x^2 = -y^2, and the curve equation becomes
    d y^4 + 2 y^2 - 1 = 0. The highest bit of ``raw`` is the sign of x and does not affect the order.
    """
    y = int.from_bytes(raw, "little") % 2**255 % _FIELD
    square = y * y % _FIELD
    eighth = -121665 * square * square + 121666 * (2 * square - 1)
    return square < 2 or eighth % _FIELD == 0


def write_private_file(path: Path, data: bytes) -> None:
    """Create a durable file that has mode 0600 from the start; remove it if writing fails.

    Raises:
        CryptoError: the file exists (keys are never overwritten) or cannot be written.
    """
    with writing(path, CryptoError):
        try:
            # O_EXCL: an existing key is never replaced. The mode is set at creation: others can never read the file.
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
    """Read a file that only its owner may read.

    Raises:
        CryptoError: the file is missing, unreadable, or open to the group or to others.
    """
    return read_content(path, CryptoError, private=True)
