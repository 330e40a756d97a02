"""Files for an operator's service manager, containers and proxy, from the templates that this package carries.

Placeholders are ``@NAME@``; every one is filled, with a value that is checked, or nothing is written.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Final

from fedveil import __version__
from fedveil.errors import ConfigError

TEMPLATES: Final = (
    "Dockerfile",
    "compose.yaml",
    "fedveil-coordinator.service",
    "fedveil-silo@.service",
    "nginx.conf",
)
_PLACEHOLDER: Final = re.compile(r"@([A-Z]+)@")
_VALUES: Final = {
    "HOST": r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}",
    "PORT": r"[0-9]{1,5}",
    "SILO": r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}",
    "MEMORY": r"[0-9]{1,6}[MG]",
    "PROGRAM": r"/[A-Za-z0-9._/-]+",
    "VERSION": r"[0-9][A-Za-z0-9.]*",
}


def write_deployment(
    folder: Path, *, host: str, port: int, silo: str, memory: str, program: str
) -> tuple[Path, ...]:
    """Write all files with their placeholders filled.

    Args:
        folder: made if it is missing; files in it are not overwritten.
        host: the coordinator's, behind the proxy.
        port: its one port.
        silo: name of the silo's folder.
        memory: the most that a party takes, such as ``8G``.
        program: path of the program ``fedveil`` on the host.

    Raises:
        ConfigError: a value that does not fit where it stands, or a file that exists.
    """
    values = {
        "HOST": host,
        "PORT": str(port),
        "SILO": silo,
        "MEMORY": memory,
        "PROGRAM": program,
        "VERSION": __version__,
    }
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
