"""Who belongs to a federation: the silos and the coordinator by their public keys, and the schema they share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.crypto.keys import PublicIdentity
from fedveil.engine.experiment import read_toml
from fedveil.errors import ConfigError
from fedveil.protection.peers import Roster
from fedveil.validation import problems

_Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]


class _Member(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    identity: _Key


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    coordinator: _Key
    schema_digest: _Key
    silos: Annotated[tuple[_Member, ...], Field(min_length=1, max_length=1000)]


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The public facts that every party has before any run, the same for all.

    Attributes:
        silos: names, in the order of the silos' numbers.
        roster: the silos' public identities, in the same order.
        coordinator: the coordinator's public identity.
        schema_digest: SHA-256 of the schema's file.
    """

    silos: tuple[str, ...]
    roster: Roster
    coordinator: PublicIdentity
    schema_digest: bytes

    def __post_init__(self) -> None:
        """Refuse two members of one name or one key."""
        keys = {public.raw for public in (*self.roster, self.coordinator)}
        if len(set(self.silos)) != len(self.silos) or len(keys) != len(self.silos) + 1:
            raise ConfigError("two members of the federation have the same name or the same identity key")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of everything the members agree on."""
        return hashlib.sha256(self.to_toml().encode()).digest()

    def number(self, silo: str) -> int:
        """Return a silo's number.

        Raises:
            ConfigError: no silo of this name.
        """
        if silo not in self.silos:
            raise ConfigError(f"no silo '{silo}' in the federation; there are: {', '.join(self.silos)}")
        return self.silos.index(silo)

    def to_toml(self) -> str:
        """Return the document; :meth:`read` reads it back."""
        members = [
            {"name": name, "identity": public.raw.hex()}
            for name, public in zip(self.silos, self.roster, strict=True)
        ]
        return tomlkit.dumps(
            {
                "coordinator": self.coordinator.raw.hex(),
                "schema_digest": self.schema_digest.hex(),
                "silos": members,
            }
        )

    @classmethod
    def read(cls, path: Path) -> Membership:
        """Read a membership file.

        Raises:
            ConfigError: missing, no TOML, or not a membership; names the file and the key.
        """
        try:
            document = _Document.model_validate(read_toml(path))
        except ValidationError as error:
            raise ConfigError(f"{path}: {problems(error, list(_Document.model_fields))}") from None
        return cls(
            silos=tuple(member.name for member in document.silos),
            roster=tuple(PublicIdentity(bytes.fromhex(member.identity)) for member in document.silos),
            coordinator=PublicIdentity(bytes.fromhex(document.coordinator)),
            schema_digest=bytes.fromhex(document.schema_digest),
        )
