"""Files for an operator's service manager, containers and proxy, and apps that bridge messages over Flower or NVFlare.

Placeholders of templates are ``@NAME@``; every one is filled, with a value that is checked, or nothing is written.

Claim: a container is built of the wheels that lie beside its Dockerfile when it is written, and of a base image by its
digest: no package is asked of an index by its name, which anybody could register there. ``requirements.txt`` has every
wheel's SHA-256, and pip installs no other (``--no-index --require-hashes``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

import tomlkit

from fedveil import __version__
from fedveil.data.catalogue.data_set import digest_of
from fedveil.errors import ConfigError
from fedveil.files import reading, writing
from fedveil.sanitize import sanitize

SERVICES: Final = (
    "fedveil-coordinator.service",
    "fedveil-link.service",
    "fedveil-silo@.service",
    "nginx.conf",
    "nginx-tls.conf",
)
CONTAINERS: Final = ("Dockerfile", "compose.yaml")
REQUIREMENTS: Final = "requirements.txt"
PACKAGES: Final = "packages"
BRIDGE_PACKAGE: Final = "fedveil_bridge"
"""Package of a bridge's modules in an app or a job."""

_TRANSPORT: Final = "fedveil.federation.transport"
_BRIDGE: Final = "/srv/fedveil/coordinator/link/run/bridge"
_IDLE_SECONDS: Final = 3600.0
_HERE: Final = ("127.0.0.1", "localhost", "::1")
_PLACEHOLDER: Final = re.compile(r"@([A-Z]+)@")
_VALUES: Final = {
    "HOST": r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}",
    "PORT": r"[0-9]{1,5}",
    "LINK": r"[0-9]{1,5}",
    "MEMORY": r"[0-9]{1,6}[MG]",
    "PROGRAM": r"/[A-Za-z0-9._/-]+",
    "IMAGE": r"[a-z0-9][a-z0-9._:/-]{0,252}@sha256:[0-9a-f]{64}",
}
_RIGHT: Final = {
    "MEMORY": "a whole number with M or G, such as 8G",
    "PROGRAM": "the whole path, such as /opt/fedveil/bin/fedveil",
    "IMAGE": "NAME@sha256: and 64 hexadecimal digits, which `docker buildx imagetools inspect NAME` prints",
}
_WHEEL: Final = re.compile(r"([A-Za-z0-9._]+)-([A-Za-z0-9._!+]+)(-[A-Za-z0-9._]+){3,4}\.whl")


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """Values that are filled into the deployment files.

    Attributes:
        host: the coordinator's, behind the proxy.
        port: the one port that silos reach.
        link: the port of the coordinator's link, which differs from it where the proxy is on the same host.
        memory: the most that a party takes, such as ``8G``.
        program: path of the program ``fedveil`` on the host.
        image: the base image of containers, by its digest; None: no containers.
    """

    host: str = "127.0.0.1"
    port: int = 9443
    link: int = 9444
    memory: str = "8G"
    program: str = "/opt/fedveil/bin/fedveil"
    image: str | None = None


def write_deployment(folder: Path, hosting: Hosting) -> tuple[Path, ...]:
    """Write all files with their placeholders filled.

    Args:
        folder: made if it is missing; files in it are not overwritten. For containers it has the wheels of fedveil and
            all it needs, in ``packages``.
        hosting: what is filled in.

    Raises:
        ConfigError: a value that does not fit where it stands, one port for two processes of one host, a file that
            exists, or, for containers, packages that are no wheels or lack this version of fedveil.
    """
    values = {name.upper(): str(value) for name, value in asdict(hosting).items() if value is not None}
    if hosting.port == hosting.link and hosting.host in _HERE:
        raise ConfigError(
            f"port = link = {hosting.port}: proxy and link would listen at one port of this host; give the link another"
        )
    for name, value in values.items():
        if not re.fullmatch(_VALUES[name], value):
            right = _RIGHT.get(name, f"must match {_VALUES[name]}")
            raise ConfigError(f"{name.lower()} = {value!r}: does not fit into a service's file: {right}")
    containers = CONTAINERS if hosting.image is not None else ()
    texts = {folder / name: _filled(name, values) for name in (*SERVICES, *containers)}
    if containers:
        texts[folder / REQUIREMENTS] = _locked(folder / PACKAGES)
    return _write_new(texts)


def write_flower_app(folder: Path, bridge: Path) -> tuple[Path, ...]:
    """Write a Flower app that carries messages: ``flwr run`` sends it to a SuperLink.

    Args:
        folder: made if it is missing; files in it are not overwritten.
        bridge: the link's socket ``run/bridge`` on the SuperLink's host.

    Raises:
        ConfigError: the socket's path is not whole, or a file exists.
    """
    project = {
        "project": {
            "name": BRIDGE_PACKAGE.replace("_", "-"),
            "version": __version__,
            "license": "Apache-2.0",
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedveil",
                    "components": {
                        "serverapp": f"{BRIDGE_PACKAGE}.bridge_flower:server",
                        "clientapp": f"{BRIDGE_PACKAGE}.bridge_flower:client",
                    },
                    "config": {"bridge": _whole(bridge), "idle-seconds": _IDLE_SECONDS},
                }
            }
        },
    }
    texts = {folder / "pyproject.toml": tomlkit.dumps(project)}
    return _write_new(texts | _bridge_modules(folder / BRIDGE_PACKAGE, "flower"))


def write_nvflare_job(
    folder: Path, bridge: Path, silos: Mapping[str, str], *, installed: bool
) -> tuple[Path, ...]:
    """Write an NVFlare job that carries messages: ``nvflare job submit`` sends it to a server.

    Args:
        folder: made if it is missing; files in it are not overwritten.
        bridge: the link's socket ``run/bridge`` on the server's host.
        silos: names of silos by NVFlare's names of their sites; the job goes to these. None: to all sites, each with
            the silo of its own name.
        installed: whether fedveil is installed where NVFlare runs; else the job has the bridge's code, which sites
            accept from those who may send custom code.

    Raises:
        ConfigError: the socket's path is not whole, or a file exists.
    """
    package = _TRANSPORT if installed else BRIDGE_PACKAGE
    arguments = {"bridge": _whole(bridge), "silos": dict(silos), "idle_seconds": _IDLE_SECONDS}
    sites = ["server", *silos] if silos else ["@ALL"]
    site = {"tasks": ["none"], "executor": {"path": f"{package}.bridge_nvflare.SiteBridge", "args": {}}}
    server = {"id": "bridge", "path": f"{package}.bridge_nvflare.ServerBridge", "args": arguments}
    documents = {
        "meta.json": {
            "name": "fedveil-bridge",
            "resource_spec": {},
            "min_clients": 1,
            "deploy_map": {"app": sites},
        },
        "app/config/config_fed_server.json": {"format_version": 2, "workflows": [server], "components": []},
        "app/config/config_fed_client.json": {"format_version": 2, "executors": [site], "components": []},
    }
    texts = {folder / name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
    custom = {} if installed else _bridge_modules(folder / "app" / "custom" / BRIDGE_PACKAGE, "nvflare")
    return _write_new(texts | custom)


def _whole(path: Path) -> str:
    if not path.is_absolute():
        raise ConfigError(
            f"--bridge {path}: the whole path of the link's socket is needed, such as {_BRIDGE}"
        )
    return str(path)


def _bridge_modules(folder: Path, system: str) -> dict[Path, str]:
    """Return the modules of a bridge, which import no other of this package, by their paths in an app."""
    names = ("bridge.py", f"bridge_{system}.py")
    modules = {folder / name: files(_TRANSPORT).joinpath(name).read_text(encoding="utf-8") for name in names}
    return {folder / "__init__.py": ""} | modules


def _write_new(texts: Mapping[Path, str]) -> tuple[Path, ...]:
    """Write files, none of which may exist."""
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path}: exists already; it is yours to change, and is not overwritten")
    for path, text in texts.items():
        with writing(path, ConfigError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return tuple(texts)


def _locked(packages: Path) -> str:
    """Return the requirements that a folder's wheels meet, each by its SHA-256."""
    with reading(packages, ConfigError):
        wheels = sorted(packages.iterdir())
    lines = []
    for wheel in wheels:
        match = _WHEEL.fullmatch(wheel.name)
        if match is None:
            raise ConfigError(
                f"{packages}: {sanitize(wheel.name)} is no wheel; containers are built of wheels alone"
            )
        name = match[1].lower().replace("_", "-")
        extra = "[federation]" if name == "fedveil" else ""
        lines.append(f"{name}{extra}=={match[2]} --hash=sha256:{digest_of(wheel)}\n")
    if sum(line.startswith(f"fedveil[federation]=={__version__} ") for line in lines) != 1:
        raise ConfigError(f"{packages}: one wheel of fedveil {__version__} is needed, as .ci/wheel builds it")
    return "".join(lines)


def _filled(name: str, values: dict[str, str]) -> str:
    template = files("fedveil").joinpath("deploy", name).read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)
