"""The link's folder: TLS key and certificate, and no other key. The link reads no other file of the coordinator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.federation.enrollment.certificates import days_left
from fedveil.federation.hosts.settings import Settings, group_number

_SOON: Final = 30.0
_log = logging.getLogger("fedveil.link")


class LinkSettings(Settings):
    """``link.toml``.

    Attributes:
        host: the address to listen on.
        port: the one port that silos must be able to reach; 0: none, where a proxy or a bridge stands before the link.
        group: of the users of this host who may open the link's sockets; none: its owner alone.
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
    """The link's folder: TLS key and certificate, and no other key.

    Args:
        path: of the folder.

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
        """Return the path of one of its files."""
        return self.path / name

    @property
    def settings(self) -> LinkSettings:
        """The settings in ``link.toml``."""
        return LinkSettings.read(self / "link.toml")

    def check_certificate(self) -> None:
        """Return if the link may listen under its certificate; warn in its last days.

        Raises:
            ConfigError: missing, of another authority, or not valid at this clock.
        """
        days = days_left(self / "server.crt", self / "ca.crt")
        if days < _SOON:
            _log.warning("the certificate server.crt is valid for %.0f days; renew it", days)

    @property
    def group(self) -> int | None:
        """The number of the group that shares the socket.

        Raises:
            ConfigError: this host has no such group.
        """
        return group_number(self.settings.group, self / "link.toml")
