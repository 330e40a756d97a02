"""The folders of the parties: what is in them, and what their settings say."""

from __future__ import annotations

import fcntl
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from fedveil.crypto.keys import IdentityKey, Passphrase
from fedveil.data.schema import FileFormat, Schema, read_schema
from fedveil.errors import ConfigError, DataError, FedveilError, IntegrityError
from fedveil.federation.enrollment.certificates import (
    certificate_key_digest,
    check_client_certificate,
    days_left,
    node_key_digest,
)
from fedveil.federation.hosts.link_folder import LinkFolder, Settings, group_number
from fedveil.federation.hosts.sockets import KEY_PROCESS
from fedveil.federation.membership import CHARTER, MEMBERSHIP, Charter, Membership
from fedveil.federation.transport.https.mailbox import Members
from fedveil.files import read_content, replace_file, writing

if TYPE_CHECKING:  # they load PyTorch, which a coordinator at rest does not need
    from fedveil.federation.policy import Policy
    from fedveil.federation.silo_data import LocalPopulation

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CoordinatorSettings(Settings):
    """``coordinator.toml``.

    Attributes:
        link: the link's folder, relative to the coordinator's.
        start_link: whether the coordinator starts its link, as a process of its own user; else ``fedveil link`` serves
            it, as another user of this host.
        drop_after_seconds: seconds without a sign of life after which a round goes on without a silo, where the
            experiment recovers (``protection.on_dropout = "recover"``); at the latest when patience is out. A silo
            that is at work says so every 30 seconds.
        patience: seconds without a sign of life of a silo after which a run ends with the model it has.
        max_work_seconds: seconds after which a silo that says only that it is at work counts as silent.
        metrics: a loopback address and port where collectors find figures, beside the socket ``run/metrics``.
    """

    link: Path = Path("link")
    start_link: bool = True
    drop_after_seconds: _Seconds = 120.0
    patience: _Seconds = 900.0
    max_work_seconds: _Seconds = 7200.0
    metrics: str | None = None


class SiloSettings(Settings):
    """``silo.toml``; paths are relative to the silo's folder.

    Attributes:
        name: name of the silo.
        coordinator: host and port of the coordinator.
        table: the silo's own table, CSV, Parquet or Excel.
        format: how the table is written, in place of the schema's format; no other party learns it.
        users: the list of all users' ids, where the schema names one by its digest; none: ids are numbers from 0.
        main_silos: a file of each user's main silo, agreed among the silos, for runs that name it by its digest.
        metrics: a loopback address and port where collectors find figures, beside the socket ``run/metrics``.
        carrier: what brings messages: ``https``, a process of this silo's own; or ``bridge``, a process of Flower or
            NVFlare on this host that opens ``socket``.
        socket: the key process's socket; with ``group`` outside the silo's folder, which no other user may enter.
        group: name of the user group on this host whose members may open the socket, with ``carrier = "bridge"``; None:
            only the owner may.
    """

    name: str
    coordinator: str
    table: Path = Path("table.csv")
    format: FileFormat | None = None
    users: Path | None = None
    main_silos: Path | None = None
    metrics: str | None = None
    carrier: Literal["https", "bridge"] = "https"
    socket: Path = Path("run") / KEY_PROCESS
    group: str | None = None

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if self.group is not None and not (self.carrier == "bridge" and self.socket.is_absolute()):
            raise ValueError(
                'group: needs carrier = "bridge" and a whole path as socket, outside the silo\'s folder, such as '
                '"/srv/fedveil-sockets/north"'
            )
        return self


class _Folder(ABC):
    """A party's folder: keys, certificates, charter, membership and schema.

    Args:
        path: the folder.
        passphrase: passphrase of its identity key, asked for when the key is used first.
    """

    def __init__(self, path: Path, passphrase: Passphrase | None = None) -> None:
        self.path = path.absolute()
        self._passphrase = passphrase
        self._fixed: Membership | None = None
        if not (self.path / "membership.toml").is_file():
            raise ConfigError(
                f"{path}: not a folder of a party that accepted a membership: it has no membership.toml; "
                "`fedveil silo accept` and `fedveil coordinator accept` put it there"
            )

    def __truediv__(self, name: str) -> Path:
        """Return the path of one of its files."""
        return self.path / name

    def again(self) -> Self:
        """Return the folder as if it were opened now: its keys are read again."""
        return type(self)(self.path, self._passphrase)

    def under(self, membership: Membership) -> Self:
        """Return the folder with a membership that stays the same, whatever its file becomes, until it is over."""
        folder = copy(self)
        folder._fixed = membership
        return folder

    @property
    def membership(self) -> Membership:
        """The federation, as its founder sealed it."""
        membership = self._fixed or Membership.read(self / MEMBERSHIP)
        membership.check(Charter.read(self / CHARTER))
        return membership

    @property
    def server_key(self) -> str:
        """SHA-256 (hex) of the SubjectPublicKeyInfo of the one TLS key that silos accept.

        Raises:
            ConfigError: the membership names none.
        """
        membership = self.membership
        if not membership.server:
            raise ConfigError(
                f"{self / 'membership.toml'}: serial {membership.serial} names no server key; the founder seals again "
                "with this release, and all parties accept"
            )
        return membership.server

    @cached_property
    def identity(self) -> IdentityKey:
        """The party's long-term key."""
        return IdentityKey.load(self / "identity.key", self._passphrase)

    @property
    def first_expiry(self) -> tuple[str, float]:
        """The file of the membership and certificates that runs out first, and the days that are left to it.

        Raises:
            ConfigError: a certificate is missing, of another authority or key, or not valid at this clock.
        """
        last_day = datetime.strptime(self.membership.valid_until, "%Y-%m-%d").replace(tzinfo=UTC)
        ends = last_day + timedelta(days=1)
        expiries = {
            "membership.toml": (ends - datetime.now(UTC)) / timedelta(days=1),
            "ca.crt": days_left(self / "ca.crt", self / "ca.crt"),
            **self._own_expiry(),
        }
        return min(expiries.items(), key=itemgetter(1))

    @abstractmethod
    def _own_expiry(self) -> dict[str, float]:
        """Return the days that are left to the party's own certificate, by its file."""

    @property
    def schema(self) -> Schema:
        """The public schema, which must be the one that the members agreed on."""
        path = self / "schema.toml"
        schema = read_schema(path)
        if schema_digest(path) != self.membership.schema_digest:
            raise ConfigError(f"{path}: not the schema that membership.toml names; fetch the agreed one")
        return schema


@contextmanager
def lock_membership(party: Path) -> Iterator[None]:
    """Keep other processes from replacing a party's membership during a ``with`` block."""
    with writing(party, ConfigError):
        descriptor = os.open(party, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class MembershipFile:
    """A party's ``membership.toml``, which its operator may replace while the party is served.

    Args:
        folder: the party's.
    """

    def __init__(self, folder: CoordinatorFolder | SiloFolder) -> None:
        self._folder = folder
        self._stamp = self._current_stamp()
        self._refused: tuple[object, FedveilError] | None = None

    def read_if_changed(self, present: Membership) -> Membership | None:
        """Return the membership of a file that was written since the last call; None if none was.

        A file that is refused is refused again in the next call.

        Args:
            present: the one that the party goes on under.

        Raises:
            ConfigError: it cannot be read, or is not valid at this clock.
            IntegrityError: the charter's founder has not sealed it, it does not follow the present one, or it does
                not have the party's own keys.
        """
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return None
        if self._refused is not None and self._refused[0] == stamp:
            raise self._refused[1]
        try:
            membership = self._folder.membership
            membership.check_follows(present, self._folder / MEMBERSHIP)
            self._folder.again().check_own_keys()
        except FedveilError as error:
            self._refused = stamp, error
            raise
        self._stamp = stamp
        return membership

    def accept_added(self, offered: Membership, newest: Membership) -> None:
        """Replace the file by a membership that only adds silos, or is valid for longer, and has its signature.

        The file is read again under a lock, so that one which the operator accepts at this moment is not lost.

        Args:
            offered: the membership.
            newest: the one that the file had when it was read last.

        Raises:
            ConfigError: the file has another one by now; or the offered one changes anything else, so that the operator
                must accept it; or the file cannot be written.
            IntegrityError: the founder has not sealed it, or it is older than the present one, or another of the same
                serial number.
        """
        path = self._folder / MEMBERSHIP
        with lock_membership(self._folder.path):
            present = Membership.read(path)
            if present.digest != newest.digest:
                raise ConfigError(f"{path}: replaced at this moment; the delivery is not needed any more")
            offered.check(Charter.read(self._folder / CHARTER))
            offered.check_follows(present, "the delivered membership")
            if not offered.extends(present):
                raise ConfigError(
                    f"the delivered membership: serial {offered.serial} does more than add silos to serial "
                    f"{present.serial}, or be valid for longer; the operator accepts it: fedveil silo accept"
                )
            with writing(path, ConfigError):
                replace_file(path, offered.to_toml().encode())

    def _current_stamp(self) -> tuple[int, ...] | None:
        try:
            now = (self._folder / MEMBERSHIP).stat()
        except OSError:
            return None
        return now.st_ino, now.st_size, now.st_mtime_ns


class CoordinatorFolder(_Folder):
    """The coordinator's folder."""

    @property
    def settings(self) -> CoordinatorSettings:
        """The settings in ``coordinator.toml``."""
        return CoordinatorSettings.read(self / "coordinator.toml")

    @property
    def link(self) -> LinkFolder:
        """The folder of its link."""
        return LinkFolder(self.path / self.settings.link)

    def check_own_keys(self) -> None:
        """Check that the membership has this coordinator's keys.

        Raises:
            IntegrityError: it has another identity key.
            ConfigError: the link's certificate is of another key than it names: silos accept no other.
        """
        if self.identity.public != self.membership.coordinator:
            raise IntegrityError(f"{self / 'identity.key'}: not the key that membership.toml has")
        path = self.link / "server.crt"
        if certificate_key_digest(path) != self.server_key:
            raise ConfigError(
                f"{path}: not of the key that membership.toml names; accept the membership again, with server.crt "
                "beside it"
            )

    def _own_expiry(self) -> dict[str, float]:
        return {"server.crt": days_left(self.link / "server.crt", self / "ca.crt")}


class SiloFolder(_Folder):
    """A silo's folder."""

    @property
    def settings(self) -> SiloSettings:
        """The settings in ``silo.toml``."""
        return SiloSettings.read(self / "silo.toml")

    @property
    def group(self) -> int | None:
        """The number of the group that may open the key process's socket.

        Raises:
            ConfigError: this host has no such group, or the socket is in the silo's folder.
        """
        settings = self.settings
        if settings.group is not None and settings.socket.is_relative_to(self.path):
            raise ConfigError(
                f"{self / 'silo.toml'}: socket: in the silo's folder, which the group {settings.group} must not enter; "
                "name a path outside it"
            )
        return group_number(self.settings.group, self / "silo.toml")

    def check_own_keys(self) -> None:
        """Check that the membership has this silo's identity key.

        Raises:
            IntegrityError: it has another.
        """
        name, membership = self.settings.name, self.membership
        if self.identity.public != membership.roster[membership.number(name)]:
            raise IntegrityError(
                f"{self / 'identity.key'}: not the key that membership.toml has for '{name}'; accept the membership "
                "again, with the keys that it names in place"
            )

    def _own_expiry(self) -> dict[str, float]:
        return {"client.crt": check_client_certificate(self.path)}

    def share(self) -> LocalPopulation:
        """The silo's own population: its table, read by the schema.

        Raises:
            FedveilError: whatever is wrong with schema or table.
        """
        settings, membership = self.settings, self.membership
        users, main_silos = (
            None if name is None else self.path / name for name in (settings.users, settings.main_silos)
        )
        number, table = membership.number(settings.name), self.path / settings.table
        if not table.exists():
            raise DataError(
                f"{table}: no such table; put it there, or name it in {self / 'silo.toml'} (table)"
            )
        data = import_module("fedveil.federation.silo_data")
        files = data.SiloFiles(table, users, main_silos, settings.format)
        population: LocalPopulation = data.load_silo_population(self.schema, files, membership, number)
        return population

    @property
    def policy(self) -> Policy:
        """The silo's own limits."""
        policy: Policy = import_module("fedveil.federation.policy").Policy.read(self / "policy.toml")
        return policy


def members_of(membership: Membership) -> Members:
    """Return who may fetch messages, as the mailbox knows them."""
    return Members(
        keys=tuple(node_key_digest(node) for node in membership.nodes),
        names=membership.silos,
        revoked=tuple(revoked_key.transport for revoked_key in membership.revoked if revoked_key.transport),
    )


def schema_digest(path: Path) -> bytes:
    """Return the SHA-256 by which members recognise the schema."""
    return hashlib.sha256(read_content(path, ConfigError)).digest()
