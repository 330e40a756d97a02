"""Membership of a federation: public keys of silos and coordinator, and digest of the shared schema."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, cast

from pydantic import Field

from fedveil.crypto.keys import IdentityKey, PublicIdentity, format_fingerprint
from fedveil.errors import ConfigError, CryptoError, IntegrityError
from fedveil.federation.charter import IN_DIGITS, Charter, Digest, FoundingDocument, Key
from fedveil.files import parse_toml, read_text
from fedveil.protocols.protocol import Roster
from fedveil.validation import DocumentTable

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]


_KeyDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""SHA-256 of the SubjectPublicKeyInfo of a TLS key; empty: none."""

_Date = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
MEMBERSHIP: Final = "membership.toml"
"""The file of a membership."""

LONGEST_REASON: Final = 200
"""Largest reason of a revocation, in characters."""
_SEALED_AS: Final = b"fedveil/2/membership"


class _Member(DocumentTable):
    name: _Name
    identity: Key
    node: Annotated[str, Field(max_length=1000)]


class _Revoked(DocumentTable):
    identity: Key
    since: _Date
    reason: Annotated[str, Field(max_length=LONGEST_REASON)]
    transport: _KeyDigest = ""


class _Document(FoundingDocument):
    schema_version: Literal[2]
    serial: Annotated[int, Field(ge=0, lt=1 << 31)]
    valid_until: _Date
    charter: Digest
    coordinator: Key
    schema_digest: Digest
    seal: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$"), *IN_DIGITS]
    silos: Annotated[tuple[_Member, ...], Field(min_length=1, max_length=1000)]
    revoked: Annotated[tuple[_Revoked, ...], Field(max_length=10_000)] = ()
    server: _KeyDigest = ""


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """A revoked public key.

    Attributes:
        identity: the public key.
        since: the day of the revocation, in UTC.
        reason: text of the founder.
        transport: SHA-256 (hex) of the SubjectPublicKeyInfo of the member's TLS key; empty if it was not recorded.
    """

    identity: PublicIdentity
    since: str
    reason: str
    transport: str = ""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Public facts that every party has before any run; the same for all parties.

    Attributes:
        silos: names, in the order of the silos' numbers.
        roster: public identities of the silos, in the same order.
        coordinator: public identity of the coordinator.
        schema_digest: SHA-256 of the schema file.
        nodes: public node keys of the silos (OpenSSH), in the same order; empty if no transport needs them.
        serial: increases with every membership that the founder signs; 0: unsigned.
        valid_until: the last day of validity, in UTC.
        charter: SHA-256 of the charter.
        revoked: keys that were removed.
        server: SHA-256 (hex) of the SubjectPublicKeyInfo of the coordinator's TLS key, the only one that silos accept;
            empty if no transport needs it.
        seal: signature of the founder over :attr:`digest`; empty if unsigned.
    """

    silos: tuple[str, ...]
    roster: Roster
    coordinator: PublicIdentity
    schema_digest: bytes
    nodes: tuple[str, ...] = ()
    serial: int = 0
    valid_until: str = "9999-12-31"
    charter: bytes = bytes(32)
    revoked: tuple[Revoked, ...] = ()
    server: str = ""
    seal: bytes = b""

    def __post_init__(self) -> None:
        """Refuse duplicate names, identity keys and node keys, and members with a revoked key."""
        members, identities = (*self.silos, "the coordinator"), (*self.roster, self.coordinator)
        for what, theirs in (("name", self.silos), ("identity key", identities), ("node key", self.nodes)):
            owners: dict[object, str] = {}
            # Not strict: nodes may be empty, and have no entry for the coordinator.
            for member, one in zip(members, theirs, strict=False):
                if one and one in owners:
                    raise ConfigError(
                        f"{owners[one]} and {member} have the same {what}; each member has its own"
                    )
                owners[one] = member
        revoked = (
            {one.identity for one in self.revoked},
            {one.transport for one in self.revoked if one.transport},
        )
        if set(identities) & revoked[0] or self.server in revoked[1]:
            raise ConfigError("a member of the federation has a key that was revoked")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the document without the founder's signature."""
        return hashlib.sha256(replace(self, seal=b"").to_toml().encode()).digest()

    @property
    def fingerprint(self) -> str:
        """128 bits of the digest, for people to compare."""
        return format_fingerprint("membership", self.digest)

    def number(self, silo: str) -> int:
        """Return the number of a silo.

        Raises:
            ConfigError: no silo has this name.
        """
        if silo not in self.silos:
            raise ConfigError(f"no silo '{silo}' in the federation; there are: {', '.join(self.silos)}")
        return self.silos.index(silo)

    def with_signature(self, founder: IdentityKey) -> Membership:
        """Return a copy that the founder has signed."""
        return replace(self, seal=founder.sign(_SEALED_AS + self.digest))

    def check(self, charter: Charter) -> None:
        """Check the founder's signature and the date.

        Raises:
            IntegrityError: the membership belongs to another charter, or the founder did not sign it.
            ConfigError: the last day of validity is past.
        """
        self.check_seal(charter)
        # ISO dates compare as text in the order of time.
        if self.valid_until < datetime.now(UTC).strftime("%Y-%m-%d"):
            raise ConfigError(
                f"the membership (serial {self.serial}) was valid until {self.valid_until}; the founder seals a new one"
            )

    def check_seal(self, charter: Charter) -> None:
        """Check the founder's signature, regardless of the date.

        Raises:
            IntegrityError: the membership belongs to another charter, or the founder did not sign it.
        """
        if self.charter != charter.digest or self.schema_digest != charter.schema_digest:
            raise IntegrityError("the membership is of another charter")
        _verify(self.digest, self.seal, charter)

    @staticmethod
    def check_signature(content: bytes, seal: bytes, charter: Charter) -> None:
        """Check the founder's signature over the bytes of a membership document, before they are parsed.

        Args:
            content: the document without its signature.
            seal: the signature.
            charter: names the founder.

        Raises:
            IntegrityError: the founder did not sign these bytes.
        """
        _verify(hashlib.sha256(content).digest(), seal, charter)

    def check_follows(self, present: Membership, place: object) -> None:
        """Check that a party that has accepted another membership may go on under this one.

        Args:
            present: the one that was accepted.
            place: name of this one in errors.

        Raises:
            IntegrityError: this one is older, another one of the same serial number, or has lost a revocation.
        """
        if self.digest == present.digest:
            return
        if self.serial <= present.serial:
            another = "another " if self.serial == present.serial else ""
            raise IntegrityError(
                f"{place}: serial {self.serial}, but {another}{present.serial} was accepted here before"
            )
        if {one.identity for one in present.revoked} - {one.identity for one in self.revoked}:
            raise IntegrityError(
                f"{place}: a key that was revoked before is not revoked in it: the founder must revoke it again"
            )

    def extends(self, present: Membership) -> bool:
        """Return whether this one only adds silos behind those of another one, or is valid for longer.

        A run of the other one's silos can then go on to its end: no key that it uses was replaced or revoked, and no
        silo has another number. Every field that is not named here must be equal.
        """
        n = len(present.silos)
        kept = replace(
            self,
            silos=self.silos[:n],
            roster=self.roster[:n],
            nodes=self.nodes[:n],
            serial=present.serial,
            valid_until=present.valid_until,
            seal=present.seal,
        )
        return kept == present and self.valid_until >= present.valid_until

    def to_toml(self) -> str:
        """Return the document; :meth:`read` reads it back."""
        nodes = self.nodes or ("",) * len(self.silos)
        members = tuple(
            _Member.model_construct(name=name, identity=cast(str, public), node=node)
            for name, public, node in zip(self.silos, self.roster, nodes, strict=True)
        )
        revoked = tuple(_Revoked.model_construct(**vars(one)) for one in self.revoked)
        return _Document.text_of(2, vars(self) | {"silos": members, "revoked": revoked})

    @classmethod
    def read(cls, path: Path) -> Membership:
        """Read a membership file without checking its signature; :meth:`check` does that.

        Raises:
            ConfigError: the file is missing, not TOML, or not a membership; names the file and the key.
        """
        return cls.parse(read_text(path, ConfigError), path)

    @classmethod
    def parse(cls, text: str, place: object) -> Membership:
        """Return the membership in a document; ``place`` is the document's name in errors.

        Raises:
            ConfigError: the text is not TOML, or not a membership; names the key.
        """
        facts = _Document.facts_of(parse_toml(text, place, ConfigError), place)
        members = facts.pop("silos")
        nodes = tuple(member.node for member in members)
        revoked = tuple(Revoked(**dict(one)) for one in facts.pop("revoked"))
        return cls(
            silos=tuple(member.name for member in members),
            roster=tuple(member.identity for member in members),
            nodes=nodes if any(nodes) else (),
            revoked=revoked,
            **facts,
        )


def _verify(digest: bytes, seal: bytes, charter: Charter) -> None:
    """Check the founder's signature over the digest of a membership."""
    try:
        charter.founder.verify(_SEALED_AS + digest, seal)
    except CryptoError:
        raise IntegrityError("the membership is not sealed by the founder whom the charter names") from None
