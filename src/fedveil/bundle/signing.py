"""Signatures of a bundle: Ed25519 over the digests of all its files, one signature per key.

A signer states that it made or checked this bundle. The silos and the coordinator of a federation sign with their
identity keys. The weight of a signature depends on the owner of the key, so :mod:`fedveil.bundle.verification` takes
a list of trusted keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.bundle.archive import SUMS, BundleError, add_file, read_files
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.errors import CryptoError
from fedveil.files import parse_json, reading

# Domain separation: the same identity key also signs messages of a federation.
_PURPOSE: Final = b"fedveil bundle, version 1\n"


@dataclass(frozen=True)
class Signature:
    """A signer's public identity and its Ed25519 signature."""

    public: PublicIdentity
    raw: bytes

    def to_bytes(self) -> bytes:
        """Return the content of the signature file.

        The encoding is unique, so that a reader can compare bytes.
        """
        document = {"schema_version": 1, "public": self.public.raw.hex(), "signature": self.raw.hex()}
        return (json.dumps(document, indent=2) + "\n").encode()


def sign(path: Path, key: IdentityKey) -> Path:
    """Sign an intact bundle; return the name of the signature file.

    Raises:
        BundleError: the bundle is damaged, or this key has already signed it.
    """
    files = read_files(path)
    made = Signature(key.public, key.sign(_PURPOSE + files[SUMS]))
    name = _name(key.public)
    add_file(path, name, made.to_bytes())
    return Path(name)


def signatures(files: Mapping[str, bytes]) -> tuple[PublicIdentity, ...]:
    """Return the identities that signed a bundle, after verification of every signature.

    Raises:
        BundleError: a signature is damaged, or is not over these files; the error names it.
    """
    found = []
    for name in sorted(files):
        if not name.startswith("signatures/"):
            continue
        with reading(name, BundleError):
            document = parse_json(files[name], name, BundleError)
            try:
                public = PublicIdentity(bytes.fromhex(document["public"]))
                made = Signature(public, bytes.fromhex(document["signature"]))
                public.verify(_PURPOSE + files[SUMS], made.raw)
            except CryptoError as error:
                raise BundleError(
                    f"{name}: {error}: the bundle was changed after it was signed, or the signature was"
                ) from None
            if made.to_bytes() != files[name] or name != _name(public):
                raise BundleError(f"{name} is not as it was written")
        found.append(public)
    return tuple(found)


def _name(public: PublicIdentity) -> str:
    return f"signatures/{hashlib.sha256(public.raw).hexdigest()[:16]}.json"
