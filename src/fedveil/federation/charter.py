"""Charter of a federation: constant facts that every party pins by their digest.

The founder gives the charter to everybody who may join.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomlkit
from pydantic import AfterValidator, Field, PlainSerializer

from fedveil.crypto.keys import PublicIdentity, format_fingerprint
from fedveil.errors import CryptoError
from fedveil.files import read_toml
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
        made = cls.model_construct(**facts | {"schema_version": version})
        return tomlkit.dumps(made.model_dump(mode="json", exclude_defaults=True))


class _Document(FoundingDocument):
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
        return _Document.text_of(1, vars(self))

    def check(self) -> None:
        """Check that every field is valid.

        Raises:
            ConfigError: a field is invalid; names the key.
        """
        validate_document(_Document, tomlkit.parse(self.to_toml()).unwrap(), CHARTER)

    @classmethod
    def read(cls, path: Path) -> Charter:
        """Read a charter file.

        Raises:
            ConfigError: the file is missing, not TOML, or not a charter; names the file and the key.
        """
        return cls(**_Document.facts_of(read_toml(path), path))
