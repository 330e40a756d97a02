"""A member is known by its public key: the SHA-256 of its SubjectPublicKeyInfo."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

_LARGEST_CACHE: Final = 4096


def public_key_digest(public: Any) -> str:
    """Return the digest (hex) of a public key."""
    return sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def has_expired(certificate: x509.Certificate) -> bool:
    """Return whether a certificate's last moment has passed."""
    return datetime.now(UTC) > certificate.not_valid_after_utc


class KeyDigests:
    """Digests of the keys of certificates, remembered: a member shows the same certificate again and again."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, x509.Certificate]] = {}

    def __call__(self, certificate: bytes) -> str:
        """Return the digest; empty where a certificate cannot be read."""
        known = self._read(certificate)
        return "" if known is None else known[0]

    def has_expired(self, certificate: bytes) -> bool:
        """Return whether a certificate has expired; one that cannot be read has not."""
        known = self._read(certificate)
        return known is not None and has_expired(known[1])

    def _read(self, certificate: bytes) -> tuple[str, x509.Certificate] | None:
        if certificate not in self._known:
            if len(self._known) >= _LARGEST_CACHE:
                self._known.clear()
            try:
                parsed = x509.load_der_x509_certificate(certificate)
                self._known[certificate] = public_key_digest(parsed.public_key()), parsed
            except (ValueError, UnsupportedAlgorithm):
                return None
        return self._known[certificate]
