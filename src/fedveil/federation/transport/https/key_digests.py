"""A member is known by its public key: the SHA-256 of its SubjectPublicKeyInfo."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

_LARGEST_CACHE: Final = 4096


def public_key_digest(public: Any) -> str:
    """Return the digest (hex) of a public key."""
    return sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def key_digest(certificate: bytes) -> str:
    """Return the digest (hex) of the key of a certificate (DER)."""
    return public_key_digest(x509.load_der_x509_certificate(certificate).public_key())


class KeyDigests:
    """Digests of the keys of certificates, remembered: a member shows the same certificate again and again."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def __call__(self, certificate: bytes) -> str:
        """Return the digest; empty where a certificate cannot be read."""
        if certificate not in self._known:
            if len(self._known) >= _LARGEST_CACHE:
                self._known.clear()
            try:
                self._known[certificate] = key_digest(certificate)
            except (ValueError, UnsupportedAlgorithm):
                return ""
        return self._known[certificate]
