"""The folders of the parties: what is in them, and what their settings say."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.crypto.keys import IdentityKey, Passphrase
from fedveil.engine.experiment import read_toml
from fedveil.errors import ConfigError
from fedveil.federation.charter import CHARTER, Charter
from fedveil.federation.membership import Membership
from fedveil.federation.policy import Policy
from fedveil.files import read_content
from fedveil.population.schema import Schema, read_schema
from fedveil.validation import problems

_Port = Annotated[int, Field(ge=1, le=65535)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a settings file; what is wrong is named by file and key."""
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ConfigError(f"{path}: {problems(error, list(cls.model_fields))}") from None

    def write(self, path: Path) -> None:
        """Write a settings file."""
        path.write_text(tomlkit.dumps(self.model_dump(mode="json", exclude_none=True)), encoding="utf-8")


class CoordinatorSettings(_Settings):
    """``coordinator.toml``.

    Attributes:
        host: the address to listen on.
        port: the one port that silos must be able to reach.
        resend_after: seconds without an answer after which a letter is sent again.
        go_on_after: seconds without any answer after which a round goes on without the silos that are silent, where
            the experiment recovers (``protection.on_missing = "recover"``); at the latest when patience is out.
        patience: seconds without any answer after which a run ends with the model it has.
    """

    host: str = "127.0.0.1"
    port: _Port = 9443
    resend_after: _Seconds = 120.0
    go_on_after: _Seconds = 900.0
    patience: _Seconds = 86400.0


class SiloSettings(_Settings):
    """``silo.toml``; paths are relative to the silo's folder.

    Attributes:
        name: of the silo.
        coordinator: host and port of the coordinator.
        table: the silo's own table, CSV, Parquet or Excel.
        users: a file of all users' ids, one a line, agreed among the silos; none: ids are numbers from 0.
    """

    name: str
    coordinator: str
    table: Path = Path("table.csv")
    users: Path | None = None


class _Folder:
    """A party's folder: keys, certificates, charter, membership and schema.

    Args:
        path: the folder.
        passphrase: of its identity key, asked for when the key is used first.
    """

    def __init__(self, path: Path, passphrase: Passphrase | None = None) -> None:
        self.path = path.absolute()
        self._passphrase = passphrase
        if not (self.path / "membership.toml").is_file():
            raise ConfigError(
                f"{path}: not a folder of a party that accepted a membership: it has no membership.toml"
            )

    def __truediv__(self, name: str) -> Path:
        """Return the path of one of its files."""
        return self.path / name

    @property
    def membership(self) -> Membership:
        """The federation, as its founder sealed it."""
        membership = Membership.read(self / "membership.toml")
        membership.check(Charter.read(self / CHARTER))
        return membership

    @cached_property
    def identity(self) -> IdentityKey:
        """The party's long-term key."""
        return IdentityKey.load(self / "identity.key", self._passphrase)

    @property
    def schema(self) -> Schema:
        """The public schema, which must be the one that the members agreed on."""
        path = self / "schema.toml"
        schema = read_schema(path)
        if schema_digest(path) != self.membership.schema_digest:
            raise ConfigError(f"{path}: not the schema that membership.toml names; fetch the agreed one")
        return schema


class CoordinatorFolder(_Folder):
    """The coordinator's folder."""

    @property
    def settings(self) -> CoordinatorSettings:
        """What ``coordinator.toml`` says."""
        return CoordinatorSettings.read(self / "coordinator.toml")


class SiloFolder(_Folder):
    """A silo's folder."""

    @property
    def settings(self) -> SiloSettings:
        """What ``silo.toml`` says."""
        return SiloSettings.read(self / "silo.toml")

    @property
    def policy(self) -> Policy:
        """The silo's own limits."""
        return Policy.read(self / "policy.toml")


def schema_digest(path: Path) -> bytes:
    """Return the SHA-256 by which members recognise the schema."""
    import hashlib

    return hashlib.sha256(read_content(path, ConfigError)).digest()
