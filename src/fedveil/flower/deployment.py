"""Files for an operator's service manager, containers and proxy, from the templates that this package carries.

Placeholders are ``@NAME@``; every one is filled, with a value that is checked, or nothing is written.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from fedveil import __version__
from fedveil.errors import ConfigError

TEMPLATES: Final = (
    "Dockerfile",
    "compose.yaml",
    "fedveil-coordinator.service",
    "fedveil-link.service",
    "fedveil-silo@.service",
    "nginx.conf",
)
_HERE: Final = ("127.0.0.1", "localhost", "::1")
_PLACEHOLDER: Final = re.compile(r"@([A-Z]+)@")
_VALUES: Final = {
    "HOST": r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}",
    "PORT": r"[0-9]{1,5}",
    "LINK": r"[0-9]{1,5}",
    "SILO": r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}",
    "MEMORY": r"[0-9]{1,6}[MG]",
    "PROGRAM": r"/[A-Za-z0-9._/-]+",
    "VERSION": r"[0-9][A-Za-z0-9.]*",
}


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """What is filled into the files.

    Attributes:
        host: the coordinator's, behind the proxy.
        port: the one port that silos reach.
        link: the port of the coordinator's link, which differs from it where the proxy is on the same host.
        silo: name of the silo's folder.
        memory: the most that a party takes, such as ``8G``.
        program: path of the program ``fedveil`` on the host.
    """

    host: str = "127.0.0.1"
    port: int = 9443
    link: int = 9444
    silo: str = "silo"
    memory: str = "8G"
    program: str = "/opt/fedveil/bin/fedveil"


def write_deployment(folder: Path, hosting: Hosting) -> tuple[Path, ...]:
    """Write all files with their placeholders filled.

    Args:
        folder: made if it is missing; files in it are not overwritten.
        hosting: what is filled in.

    Raises:
        ConfigError: a value that does not fit where it stands, one port for two processes of one host, or a file that
            exists.
    """
    values = {name.upper(): str(value) for name, value in asdict(hosting).items()} | {"VERSION": __version__}
    if hosting.port == hosting.link and hosting.host in _HERE:
        raise ConfigError(
            f"port = link = {hosting.port}: proxy and link would listen at one port of this host; give the link another"
        )
    for name, value in values.items():
        if not re.fullmatch(_VALUES[name], value):
            raise ConfigError(f"{name.lower()} = {value!r}: does not fit into a service's file")
    made = {folder / name: _filled(name, values) for name in TEMPLATES}
    for path in made:
        if path.exists():
            raise ConfigError(f"{path}: exists already; it is yours to change, and is not overwritten")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return tuple(made)


def _filled(name: str, values: dict[str, str]) -> str:
    template = files("fedveil").joinpath("deploy", name).read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)
