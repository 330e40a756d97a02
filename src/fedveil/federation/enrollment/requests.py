"""A request to join a federation: the public halves of keys made where they are used, signed by each of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from pydantic import Field

from fedveil.crypto.keys import IdentityKey, PublicIdentity, format_fingerprint
from fedveil.errors import ConfigError, CryptoError, IntegrityError
from fedveil.federation.charter import IN_DIGITS, Digest, FoundingDocument, Key
from fedveil.federation.enrollment.certificates import node_key_digest, public_key_digest, request_key
from fedveil.files import read_toml, reading, replace_file, writing

Role = Literal["silo", "coordinator"]
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$"
"""Pattern of a party's name, which is part of a file's name."""

_SIGNED_AS: Final = b"fedveil/2/request"
_Text = Annotated[str, Field(max_length=10_000)]
_Signature = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){0,200}$"), *IN_DIGITS]


class _Document(FoundingDocument):
    schema_version: Literal[1]
    role: Role
    name: Annotated[str, Field(pattern=NAME)]
    charter: Digest
    identity: Key
    transport: _Text
    signature: _Signature
    transport_signature: _Signature
    previous_signature: _Signature


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request of a party to join, for the founder; nothing in it is secret.

    Attributes:
        role: silo or coordinator.
        name: of the party.
        charter: SHA-256 of the charter that it read.
        identity: its public identity key.
        transport: of a silo its public node key (OpenSSH), of the coordinator a certificate request (PEM).
        signature: by the identity key.
        transport_signature: of a silo, by the node key; a certificate request is signed by itself.
        previous_signature: by the identity key that this one replaces; empty for the first.
    """

    role: Role
    name: str
    charter: bytes
    identity: PublicIdentity
    transport: str
    signature: bytes = b""
    transport_signature: bytes = b""
    previous_signature: bytes = b""

    @property
    def content(self) -> bytes:
        """Bytes that the signatures and the fingerprint cover."""
        facts = [self.role, self.name, self.charter.hex(), self.identity.raw.hex(), self.transport]
        return _SIGNED_AS + json.dumps(facts).encode()

    @property
    def fingerprint(self) -> str:
        """128 bits of the SHA-256 of all that is asked for, for people to read to one another."""
        return format_fingerprint("request", hashlib.sha256(self.content).digest())

    @property
    def transport_digest(self) -> str:
        """SHA-256 (hex) of the SubjectPublicKeyInfo of the TLS key that it asks for."""
        return (
            node_key_digest(self.transport)
            if self.role == "silo"
            else public_key_digest(request_key(self.transport))
        )

    def with_signatures(
        self,
        identity: IdentityKey,
        node: ec.EllipticCurvePrivateKey | None = None,
        previous: IdentityKey | None = None,
    ) -> Request:
        """Return the request signed by the keys in it, and by the identity key that it replaces."""
        return replace(
            self,
            signature=identity.sign(self.content),
            transport_signature=b"" if node is None else node.sign(self.content, ec.ECDSA(SHA256())),
            previous_signature=b"" if previous is None else previous.sign(self.content),
        )

    def check(self, charter: bytes) -> None:
        """Check that the request is for this charter and is signed by each of its keys.

        Raises:
            IntegrityError: it is for another federation, or somebody asks with a key that is not theirs.
        """
        if self.charter != charter:
            raise IntegrityError(f"the request of '{self.name}' is for another charter")
        try:
            self.identity.verify(self.content, self.signature)
            with reading(f"the transport key of '{self.name}'", IntegrityError):
                if self.role == "silo":
                    node = load_ssh_public_key(self.transport.encode())
                    if not isinstance(node, ec.EllipticCurvePublicKey):
                        raise IntegrityError(f"the node key of '{self.name}' is of another kind")
                    if node.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() != self.transport:
                        raise IntegrityError(f"the node key of '{self.name}' has more beside it than the key")
                    node.verify(self.transport_signature, self.content, ec.ECDSA(SHA256()))
                elif not x509.load_pem_x509_csr(self.transport.encode()).is_signature_valid:
                    raise IntegrityError(f"the certificate request of '{self.name}' is not signed by its key")
        except (CryptoError, InvalidSignature):
            raise IntegrityError(f"the request of '{self.name}' is not signed by the keys it names") from None

    def replaces(self, previous: PublicIdentity) -> None:
        """Check that the replaced key has signed the request.

        Raises:
            IntegrityError: it has not.
        """
        try:
            previous.verify(self.content, self.previous_signature)
        except CryptoError:
            raise IntegrityError(
                f"the request of '{self.name}' would replace a key that has not signed it; revoke a lost key first"
            ) from None

    def write(self, path: Path) -> None:
        """Write the request to a file atomically; :meth:`read` reads it back.

        Raises:
            ConfigError: the disk refuses it; names the file.
        """
        with writing(path, ConfigError):
            replace_file(path, _Document.text_of(1, vars(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read a request; :meth:`check` says whether it is one.

        Raises:
            ConfigError: missing, no TOML, or no request; names the file and the key.
        """
        return cls(**_Document.facts_of(read_toml(path), path))
