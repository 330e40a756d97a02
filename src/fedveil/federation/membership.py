"""Members of a federation: its charter, the membership that its founder seals, and how served silos receive one.

The charter has constant facts that every party pins by their digest; the founder gives it to everybody who may join. A
membership has the public keys of silos and coordinator, and the digest of the shared schema. The coordinator delivers
a sealed membership to silos that are served, as a message before its own:

    delivery   magic (15) | signature of the founder (64) | membership without its signature, UTF-8 TOML
    answer     magic (15) | outcome (1)

Claim: a delivered text is parsed only if the founder of the silo's own charter signed it. A carrier that forges,
replays or withholds a delivery or its answer changes no membership: at worst a silo refuses the next run, as without
a delivery. Enforced by :func:`open_delivery` and
:meth:`~fedveil.federation.hosts.silo_service.ServedSilo.receive`; ``tests/test_membership_delivery.py`` tries each.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import tomlkit
from pydantic import AfterValidator, Field, PlainSerializer

from fedveil.crypto.keys import SIGNATURE_BYTES, IdentityKey, PublicIdentity, format_fingerprint
from fedveil.errors import ConfigError, CryptoError, IntegrityError
from fedveil.federation.transport.interface import LARGEST_OPENING, Received, Transport
from fedveil.files import as_text, parse_toml, read_text, read_toml
from fedveil.protocols.protocol import Roster
from fedveil.validation import DocumentTable, validate_document

CHARTER: Final = "charter.toml"

_DIGITS: Final = Field(pattern=r"^[0-9a-f]{64}$")
IN_DIGITS: Final = (AfterValidator(bytes.fromhex), PlainSerializer(bytes.hex))
"""Pydantic annotations: bytes appear in a document as hexadecimal digits."""

Digest = Annotated[str, _DIGITS, *IN_DIGITS]
"""32 bytes of a document."""


def _identity(digits: str) -> PublicIdentity:
    try:
        return PublicIdentity(bytes.fromhex(digits))
    except CryptoError as error:
        raise ValueError(str(error)) from None


Key = Annotated[
    str,
    _DIGITS,
    AfterValidator(_identity),
    PlainSerializer(lambda key: key.raw.hex()),
]
"""Public identity in a document."""


class FoundingDocument(DocumentTable):
    """Base of a founder's TOML documents: the fields of the described object, and a version."""

    @classmethod
    def facts_of(cls, document: object, place: object) -> dict[str, Any]:
        """Validate a document and return its fields without the version.

        Raises:
            ConfigError: the document is invalid; names the key.
        """
        facts = dict(validate_document(cls, document, place))
        del facts["schema_version"]
        return facts

    @classmethod
    def text_of(cls, version: int, facts: dict[str, Any]) -> str:
        """Return the TOML document with these fields; :meth:`facts_of` reads it back."""
        document = cls.model_construct(**facts | {"schema_version": version})
        return tomlkit.dumps(document.model_dump(mode="json", exclude_defaults=True))


class _CharterDocument(FoundingDocument):
    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", max_length=60)]
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$", max_length=253)]
    port: Annotated[int, Field(ge=1, le=65535)]
    founder: Key
    authority: Annotated[str, Field(max_length=10_000)]
    data_schema: Annotated[str, Field(max_length=1 << 20)]


@dataclass(frozen=True, kw_only=True)
class Charter:
    """Constant facts of a federation; no field changes during its lifetime.

    Attributes:
        name: name of the federation.
        host: host name of the coordinator, as the silos reach it.
        port: the single port of the coordinator.
        founder: public identity of the founder, which signs every membership.
        authority: certificate of the one authority that the parties trust, PEM.
        data_schema: text of the public schema file of all silos' tables.
    """

    name: str
    host: str
    port: int
    founder: PublicIdentity
    authority: str
    data_schema: str

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the charter's document."""
        return hashlib.sha256(self.to_toml().encode()).digest()

    @property
    def fingerprint(self) -> str:
        """128 bits of the digest, for people to compare."""
        return format_fingerprint("charter", self.digest)

    @property
    def schema_digest(self) -> bytes:
        """SHA-256 of the schema file."""
        return hashlib.sha256(self.data_schema.encode()).digest()

    def to_toml(self) -> str:
        """Return the document; :meth:`read` reads it back."""
        return _CharterDocument.text_of(1, vars(self))

    def check(self) -> None:
        """Check that every field is valid.

        Raises:
            ConfigError: a field is invalid; names the key.
        """
        validate_document(_CharterDocument, tomlkit.parse(self.to_toml()).unwrap(), CHARTER)

    @classmethod
    def read(cls, path: Path) -> Charter:
        """Read a charter file.

        Raises:
            ConfigError: the file is missing, not TOML, or not a charter; names the file and the key.
        """
        return cls(**_CharterDocument.facts_of(read_toml(path), path))


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
        for kind, values in (("name", self.silos), ("identity key", identities), ("node key", self.nodes)):
            owners: dict[object, str] = {}
            # Not strict: nodes may be empty, and have no entry for the coordinator.
            for member, value in zip(members, values, strict=False):
                if value and value in owners:
                    raise ConfigError(
                        f"{owners[value]} and {member} have the same {kind}; each member has its own"
                    )
                owners[value] = member
        revoked = (
            {revoked_key.identity for revoked_key in self.revoked},
            {revoked_key.transport for revoked_key in self.revoked if revoked_key.transport},
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
            prefix = "another " if self.serial == present.serial else ""
            raise IntegrityError(
                f"{place}: serial {self.serial}, but {prefix}{present.serial} was accepted here before"
            )
        if {revoked_key.identity for revoked_key in present.revoked} - {
            revoked_key.identity for revoked_key in self.revoked
        }:
            raise IntegrityError(
                f"{place}: a key that was revoked before is not revoked in it: the founder must revoke it again"
            )

    def extends(self, present: Membership) -> bool:
        """Return whether this one only adds silos behind those of another one, or is valid for longer.

        A run of the other one's silos can then go on to its end: no key that it uses was replaced or revoked, and no
        silo has another number. Every field that is not named here must be equal.
        """
        n = len(present.silos)
        restricted = replace(
            self,
            silos=self.silos[:n],
            roster=self.roster[:n],
            nodes=self.nodes[:n],
            serial=present.serial,
            valid_until=present.valid_until,
            seal=present.seal,
        )
        return restricted == present and self.valid_until >= present.valid_until

    def to_toml(self) -> str:
        """Return the document; :meth:`read` reads it back."""
        nodes = self.nodes or ("",) * len(self.silos)
        members = tuple(
            _Member.model_construct(name=name, identity=cast(str, public), node=node)
            for name, public, node in zip(self.silos, self.roster, nodes, strict=True)
        )
        revoked = tuple(_Revoked.model_construct(**vars(revoked_key)) for revoked_key in self.revoked)
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
        revoked = tuple(Revoked(**dict(entry)) for entry in facts.pop("revoked"))
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


# --- delivery to served silos ---


_MAGIC: Final = b"FVL-MEMBERSHIP\1"
_TEXT_STARTS: Final = len(_MAGIC) + SIGNATURE_BYTES
_PLACE: Final = "the delivered membership"
_log = logging.getLogger("fedveil.coordinator")


class Outcome(IntEnum):
    """Outcome of a delivered membership at a silo."""

    ACCEPTED = 0
    PRESENT = 1
    BY_HAND = 2
    REFUSED = 3


def pack_delivery(membership: Membership) -> bytes:
    """Return the message that delivers a sealed membership."""
    return _MAGIC + membership.seal + replace(membership, seal=b"").to_toml().encode()


def is_delivery(message: bytes) -> bool:
    """Return whether a message, or its beginning, delivers a membership or answers a delivery."""
    return message.startswith(_MAGIC)


def open_delivery(message: bytes, charter: Charter) -> Membership:
    """Return the membership of a delivery; its text is not parsed before the founder's signature is verified.

    Args:
        message: the delivery.
        charter: charter of the reader's federation.

    Raises:
        IntegrityError: it is too long, or not sealed by the charter's founder, or of another charter.
        ConfigError: its text is not a membership, or is not valid today.
    """
    if len(message) > LARGEST_OPENING:
        raise IntegrityError(f"{_PLACE}: {len(message)} bytes are above the limit of {LARGEST_OPENING}")
    seal, content = message[len(_MAGIC) : _TEXT_STARTS], message[_TEXT_STARTS:]
    Membership.check_signature(content, seal, charter)
    membership = replace(Membership.parse(as_text(content, _PLACE, IntegrityError), _PLACE), seal=seal)
    membership.check(charter)
    return membership


def pack_answer(outcome: Outcome) -> bytes:
    """Return the answer to a delivery."""
    return _MAGIC + bytes([outcome])


def _outcome_of(answer: bytes) -> Outcome:
    code = answer[len(_MAGIC) :]
    is_valid = len(code) == 1 and code[0] in set(Outcome)
    return Outcome(code[0]) if is_valid else Outcome.REFUSED


class MembershipDelivery:
    """A transport that delivers the coordinator's membership to each silo before the silo's first message.

    Args:
        transport: carries the messages.
        membership: sealed by the founder.
        delivered: numbers of the silos that have the membership already; silos that turn out to have it are added.
    """

    def __init__(self, transport: Transport, membership: Membership, delivered: set[int]) -> None:
        self._transport, self._membership, self._delivered = transport, membership, delivered
        self._message, self._answered = pack_delivery(membership), set(delivered)
        self._held: dict[int, bytes] = {}
        if len(self._message) > LARGEST_OPENING:  # operators accept so long a membership by hand
            self._answered |= set(range(len(membership.silos)))

    def offer(self, messages: Mapping[int, bytes], withdrawn: Collection[int] = ()) -> None:
        """Set the current messages; those of silos without an answer to the delivery are held back until then."""
        for silo in withdrawn:
            self._held.pop(silo, None)
        withheld = {silo: message for silo, message in messages.items() if silo not in self._answered}
        self._held |= withheld
        self._transport.offer({**messages, **dict.fromkeys(withheld, self._message)}, withdrawn)

    def collect(self, seconds: float) -> list[Received]:
        """Return the answers that have arrived, without those to the delivery."""
        received = self._transport.collect(seconds)
        for answer in received:
            if is_delivery(answer.message):
                self._note(answer.silo, _outcome_of(answer.message))
        return [answer for answer in received if not is_delivery(answer.message)]

    def close(self) -> None:
        """Release the transport's connections."""
        self._transport.close()

    def _note(self, silo: int, outcome: Outcome) -> None:
        """Offer a silo's own message once it has answered the delivery, whatever the answer is."""
        if silo in self._answered or silo >= len(self._membership.silos):
            return
        self._answered.add(silo)
        if outcome in (Outcome.ACCEPTED, Outcome.PRESENT):
            self._delivered.add(silo)
        name, serial = self._membership.silos[silo], self._membership.serial
        match outcome:
            case Outcome.ACCEPTED:
                _log.info("silo %s has accepted membership %d, which was delivered to it", name, serial)
            case Outcome.BY_HAND:
                _log.warning("silo %s has not accepted membership %d: its operator accepts it", name, serial)
            case Outcome.REFUSED:
                _log.warning("silo %s refuses membership %d; its log gives the reason", name, serial)
        if (message := self._held.pop(silo, None)) is not None:
            self._transport.offer({silo: message})
