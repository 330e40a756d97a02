"""Founder of a federation: creates the charter, admits parties by fingerprint, and seals memberships.

Claim: a membership that the parties accept has only keys whose fingerprint the founder typed in, and no key that was
revoked. Conditions: the founder hears the fingerprint from a person it knows, and keeps ``founder.key`` and ``ca.key``
offline. No private half of any other party's key ever reaches the founder. ``tests/test_ceremony.py`` tries foreign
requests, wrong fingerprints, revoked keys and older memberships.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from pydantic import Field

from fedveil.crypto.keys import IdentityKey, Passphrase, PublicIdentity, format_fingerprint, same_fingerprint
from fedveil.data.schema import read_schema
from fedveil.errors import ConfigError, CryptoError, IntegrityError
from fedveil.federation.enrollment.certificates import (
    CERTIFICATE_DAYS,
    Authority,
    node_key_digest,
    public_key_digest,
    request_key,
)
from fedveil.federation.membership import (
    CHARTER,
    IN_DIGITS,
    LONGEST_REASON,
    MEMBERSHIP,
    Charter,
    Digest,
    FoundingDocument,
    Key,
    Membership,
    Revoked,
)
from fedveil.files import parse_json, read_content, read_text, read_toml, reading, replace_file, writing

# --- requests to join: the public halves of keys made where they are used, signed by each of them ---


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
        name: name of the party.
        charter: SHA-256 of the charter that it read.
        identity: its public identity key.
        transport: a silo's public node key (OpenSSH), or the coordinator's certificate request (PEM).
        signature: signature of the request by the identity key.
        transport_signature: a silo's signature by the node key; a certificate request contains its own signature.
        previous_signature: signature by the identity key that this one replaces; empty for the first key.
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


# --- the founder ---


COORDINATOR: Final = "coordinator"
"""The name of the coordinator, which no silo has."""
_KEY: Final = "founder.key"
_ADMITTED: Final = "admitted"
_REVOKED: Final = "revoked.json"
_REPLACED: Final = "replaced by its owner"


def client_certificate(silo: str) -> str:
    """Return the name of a silo's certificate among the sealed files."""
    return f"silo-{silo}.crt"


def create_federation(
    folder: Path, *, name: str, schema: Path, host: str, port: int, passphrase: bytes | None
) -> Charter:
    """Create a founder's folder with a certificate authority, the founder's key and the charter.

    Args:
        folder: made here; must not exist.
        name: name of the federation.
        schema: the public schema of all silos' tables.
        host: the coordinator's host name or address, as the silos reach it.
        port: its port.
        passphrase: passphrase of both keys' files; None: mode 0600 alone protects them.

    Raises:
        ConfigError: the folder exists, or a name, host or port that cannot be, and nothing was made; or the folder
            cannot be written.
        DataError: the schema is none.
    """
    read_schema(schema)
    with writing(folder, ConfigError):
        if folder.exists():
            raise ConfigError(f"{folder}: exists already; a federation is never overwritten")
    founder, text = IdentityKey.generate(), read_text(schema, ConfigError)
    named = Charter(name=name, host=host, port=port, founder=founder.public, authority="", data_schema=text)
    named.check()
    with writing(folder, ConfigError):
        (folder / _ADMITTED).mkdir(parents=True)
        folder.chmod(0o700)
        authority = Authority.create(f"fedveil federation {name}")
        authority.save(folder, passphrase)
        founder.save(folder / _KEY, passphrase)
        charter = replace(named, authority=(folder / "ca.crt").read_text(encoding="ascii"))
        (folder / CHARTER).write_text(charter.to_toml(), encoding="utf-8")
    return Charter.read(folder / CHARTER)


def admit(folder: Path, request: Path, fingerprint: str) -> Request:
    """Admit a party to the next membership.

    If a coordinator replaces its key, the former one counts as revoked: silos still have to recognise the terms that it
    signed, to continue the runs that they charged under them.

    Args:
        folder: the founder's.
        request: the party's file.
        fingerprint: as the party's operator read it out, ``request`` and 8 groups of 4.

    Raises:
        ConfigError: what was typed in is no fingerprint.
        IntegrityError: another fingerprint, a foreign request, or a key that was revoked, was admitted under another
            name, or is not replaced by its owner.
    """
    party = Request.read(request)
    party.check(Charter.read(folder / CHARTER).digest)
    if not same_fingerprint(fingerprint, party.fingerprint):
        raise IntegrityError(
            f"{request}: its fingerprint is another than the one that was typed in: another request, or a changed one"
        )
    if party.role == "silo" and party.name == COORDINATOR:
        raise ConfigError(f"{request}: a silo cannot be named '{COORDINATOR}'")
    revoked = _revoked(folder)
    if party.identity in {revoked_key.identity for revoked_key in revoked} or party.transport_digest in {
        revoked_key.transport for revoked_key in revoked
    }:
        raise IntegrityError(f"{request}: its key was revoked; a revoked key does not come back")
    target = folder / _ADMITTED / f"{_slot(party)}.request"
    for other in sorted((folder / _ADMITTED).glob("*.request")):
        admitted = Request.read(other)
        # Both under one key could not be sealed, and revoking either would revoke the key of both.
        if other != target and (
            admitted.identity == party.identity or admitted.transport_digest == party.transport_digest
        ):
            raise IntegrityError(
                f"{request}: its key was admitted as '{admitted.name}'; each party has its own keys and one name"
            )
    if target.exists():
        before = Request.read(target)
        if before.identity != party.identity:
            party.replaces(before.identity)
            if party.role == "coordinator":
                _keep_revoked(folder, Revoked(identity=before.identity, since=_day(0), reason=_REPLACED))
    party.write(target)
    return party


def revoke(folder: Path, name: str, reason: str) -> Revoked:
    """Leave a party out of the next membership, and revoke its key in all later ones.

    In the place of a coordinator whose key was lost another one joins, with keys of its own; the silos that accept the
    next membership go on with their ledgers, and answer the lost key no more.

    Args:
        folder: the founder's.
        name: name of the silo, or ``coordinator``.
        reason: for all members to read.

    Raises:
        ConfigError: no party of this name was admitted, or a reason that no membership has room for.
    """
    if len(reason) > LONGEST_REASON:
        raise ConfigError(f"--reason has {len(reason)} characters; a membership takes {LONGEST_REASON}")
    path = folder / _ADMITTED / f"{COORDINATOR if name == COORDINATOR else f'silo-{name}'}.request"
    if not path.is_file():
        raise ConfigError(f"{folder}: no silo '{name}' was admitted")
    party = Request.read(path)
    revoked = Revoked(identity=party.identity, since=_day(0), reason=reason, transport=party.transport_digest)
    _keep_revoked(folder, revoked)
    path.unlink()
    return revoked


def seal(
    folder: Path, passphrase: Passphrase | None, days: int = CERTIFICATE_DAYS, above: int = 0
) -> Membership:
    """Seal the admitted parties as the next membership, and issue new certificates for all of them.

    Writes ``sealed/membership.toml``, ``sealed/server.crt`` and for each silo ``sealed/silo-NAME.crt``. Hand them to
    all parties; nothing in them is secret.

    Args:
        folder: the founder's.
        passphrase: passphrase of the founder's keys.
        days: for how long it is valid.
        above: a serial number that parties have seen before the folder was restored; this one is larger.

    Raises:
        ConfigError: nobody, or no coordinator, was admitted; or a number or text that no membership has, by its key.
    """
    charter = Charter.read(folder / CHARTER)
    admitted = [Request.read(path) for path in sorted((folder / _ADMITTED).glob("*.request"))]
    target = folder / "sealed" / MEMBERSHIP
    before = Membership.read(target) if target.exists() else None
    earlier = () if before is None else before.silos
    # Silos that were sealed before keep their order: who is added changes nobody's number.
    silos = sorted(
        (party for party in admitted if party.role == "silo"),
        key=lambda party: (earlier.index(party.name) if party.name in earlier else len(earlier), party.name),
    )
    coordinators = [party for party in admitted if party.role == "coordinator"]
    if not silos or len(coordinators) != 1:
        raise ConfigError(f"{folder}: admit the coordinator and at least one silo before you seal")
    serial = max(above, 0 if before is None else before.serial) + 1
    membership = Membership(
        silos=tuple(silo.name for silo in silos),
        roster=tuple(silo.identity for silo in silos),
        coordinator=coordinators[0].identity,
        schema_digest=charter.schema_digest,
        nodes=tuple(silo.transport for silo in silos),
        serial=serial,
        valid_until=_day(days),
        charter=charter.digest,
        revoked=_revoked(folder),
        server=coordinators[0].transport_digest,
    ).with_signature(IdentityKey.load(folder / _KEY, passphrase))
    Membership.parse(membership.to_toml(), target)  # what no party reads is not handed out
    target.parent.mkdir(exist_ok=True)
    authority = Authority.load(folder, passphrase)
    hosts = tuple(dict.fromkeys((charter.host, "127.0.0.1", "localhost")))
    replace_file(target.parent / "server.crt", authority.certify(coordinators[0].transport, hosts, days))
    for silo in silos:
        replace_file(
            target.parent / client_certificate(silo.name),
            authority.certify_silo(silo.transport, silo.name, days),
        )
    replace_file(target, membership.to_toml().encode())
    membership.check(charter)
    return membership


def _slot(request: Request) -> str:
    return "coordinator" if request.role == "coordinator" else f"silo-{request.name}"


def _revoked(folder: Path) -> tuple[Revoked, ...]:
    path = folder / _REVOKED
    if not path.exists():
        return ()
    with reading(path, ConfigError):
        document = parse_json(read_content(path, ConfigError), path, ConfigError)
        return tuple(
            Revoked(
                identity=PublicIdentity(bytes.fromhex(entry["identity"])),
                since=entry["since"],
                reason=entry["reason"],
                transport=entry.get("transport", ""),
            )
            for entry in document
        )


def _keep_revoked(folder: Path, revoked: Revoked) -> None:
    """Add a key to those that every later membership lists as revoked."""
    document = [
        {
            "identity": revoked_key.identity.raw.hex(),
            "since": revoked_key.since,
            "reason": revoked_key.reason,
            "transport": revoked_key.transport,
        }
        for revoked_key in (
            *(revoked_key for revoked_key in _revoked(folder) if revoked_key.identity != revoked.identity),
            revoked,
        )
    ]
    replace_file(folder / _REVOKED, json.dumps(document, indent=1).encode())


def _day(days: int) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).strftime("%Y-%m-%d")
