"""Settings files of the parties, and the folder of the link: the coordinator's process that listens to the network.

The link (:mod:`~fedveil.federation.hosts.link`) ends the silos' TLS connections and passes messages on to the
coordinator over a local socket. Its folder has the TLS key and certificate, and no other key. The link reads no other
file of the coordinator, so an intruder into this process gets neither the identity key nor the run folders.
"""

from __future__ import annotations

import grp
import logging
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.certificates import days_left
from fedveil.files import read_toml, replace_file, writing
from fedveil.validation import DocumentTable, validate_document

# --- settings files of the parties: TOML, no key that is not known, and errors that name file and key ---


class Settings(DocumentTable):
    """The keys of one file."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a settings file; what is wrong is named by file and key."""
        return validate_document(cls, read_toml(path), path)

    def write(self, path: Path) -> None:
        """Write a settings file, whole or not at all; what the disk refuses is a :class:`ConfigError` that names it."""
        import tomlkit  # a served link reads settings and writes none

        with writing(path, ConfigError):
            replace_file(path, tomlkit.dumps(self.model_dump(mode="json", exclude_none=True)).encode())


def group_number(name: str | None, path: Path) -> int | None:
    """Return the number of a group of this host; None if a settings file names none.

    Raises:
        ConfigError: this host has no such group.
    """
    try:
        return None if name is None else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"{path}: group: this host has no group '{name}'") from None


# --- the link's folder ---


_WARNING_DAYS: Final = 30.0
"""A certificate that is valid for fewer days is reported in the log."""
_log = logging.getLogger("fedveil.link")


class LinkSettings(Settings):
    """Settings of the link, in its file ``link.toml``.

    Attributes:
        host: the address to listen on.
        port: the one port that silos must be able to reach; 0 opens no port, because a proxy or a bridge receives the
            silos' requests and passes them to the link.
        group: name of the user group on this host whose members may open the link's sockets; None: only the owner may.
        proxy: whether a proxy that ends TLS forwards requests to the socket ``run/proxy``.
        bridge: whether a bridge to another transport takes messages at the socket ``run/bridge``.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9443
    group: str | None = None
    proxy: bool = False
    bridge: bool = False

    @property
    def address(self) -> str:
        """Address at which the link listens."""
        return f"{self.host}:{self.port}"


class LinkFolder:
    """The link's folder: settings, TLS key and certificate, and no other key.

    Args:
        path: path of the folder.

    Raises:
        ConfigError: the folder has no ``link.toml``, or it holds an identity key, which an intruder into the link would
            then have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if not (self.path / "link.toml").is_file():
            raise ConfigError(f"{path}: not the folder of a link: it has no link.toml")
        if (self.path / "identity.key").exists():
            raise ConfigError(
                f"{path}: holds identity.key; a link has the TLS key and no other: move it away"
            )

    def __truediv__(self, name: str) -> Path:
        """Return the path of a file in the folder."""
        return self.path / name

    @property
    def settings(self) -> LinkSettings:
        """The settings in ``link.toml``."""
        return LinkSettings.read(self / "link.toml")

    def check_certificate(self) -> None:
        """Check that the link's certificate is valid; log a warning if fewer than 30 days are left.

        Raises:
            ConfigError: the certificate is missing, another authority than the federation's issued it, or it is not
                valid at the time of this host's clock.
        """
        days = days_left(self / "server.crt", self / "ca.crt")
        if days < _WARNING_DAYS:
            _log.warning("the certificate server.crt is valid for %.0f days; renew it", days)

    @property
    def group(self) -> int | None:
        """Numeric id of the user group that may open the sockets; None if only the owner may.

        Raises:
            ConfigError: this host has no such group.
        """
        return group_number(self.settings.group, self / "link.toml")
