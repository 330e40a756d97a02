"""Flower's own processes, started with the flags a federation needs: TLS, registered node keys, no code installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import tomlkit

from fedveil.errors import ConfigError, FedveilError
from fedveil.flower.app_process import write_programs
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.submission import write_app

CONNECTION: Final = "federation"
_POLL: Final = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", "FLWR_TELEMETRY_ENABLED": "0"}


class FlowerError(FedveilError):
    """A process of Flower's did not do what was asked."""


def start_superlink(home: CoordinatorFolder, *, output: int | None = None) -> subprocess.Popen[bytes]:
    """Start the SuperLink: one port, TLS, registered nodes only; what it prints goes to ``output``.

    It keeps its state in memory: letters of silos are no file of the coordinator's, and a run goes on from its run
    folder, which needs nothing of Flower's.
    """
    settings = home.settings
    return subprocess.Popen(
        [
            _program("flower-superlink"),
            *("--host", settings.host, "--port", str(settings.port)),
            *("--ssl-certfile", str(home / "server.crt")),
            *("--ssl-keyfile", str(home / "server.key")),
            *("--ssl-ca-certfile", str(home / "ca.crt")),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        ],
        env=_environment(home.path),
        stdout=output,
    )


def start_supernode(silo: SiloFolder, guard: Path) -> subprocess.Popen[bytes]:
    """Start the SuperNode of a silo, whose app talks to the guard's socket; other apps are not run."""
    settings = silo.settings
    return subprocess.Popen(
        [
            _program("flower-supernode"),
            *("--superlink", settings.coordinator),
            *("--root-certificates", str(silo / "ca.crt")),
            *("--auth-supernode-private-key", str(silo / "node.key")),
            *("--host", "127.0.0.1", "--port", str(settings.runtime_port)),
            *("--ssl-certfile", str(silo / "silo.crt")),
            *("--ssl-keyfile", str(silo / "silo.key")),
            *("--ssl-ca-certfile", str(silo / "ca.crt")),
            *("--node-config", f'guard="{guard}"'),
        ],
        env=_environment(silo.path, write_programs(silo / "flower" / "programs")),
    )


def register_nodes(home: CoordinatorFolder, *, seconds: float = 60.0) -> None:
    """Tell the SuperLink the silos' node keys, once it listens; a key that it knows is left as it is.

    Raises:
        FlowerError: it did not accept a key in time.
    """
    _write_connection(home)
    until = time.monotonic() + seconds
    for name in home.membership.silos:
        while True:
            done = _flwr(home, "supernode", "register", str(home / "nodes" / f"{name}.pub"), CONNECTION)
            said = done.stdout + done.stderr
            if done.returncode == 0 or "already" in said:
                break
            if time.monotonic() > until:
                raise FlowerError(f"silo {name}: its node key was not registered: {said.strip()[-300:]}")
            time.sleep(0.5)


def submit(home: CoordinatorFolder, run: Path, *, app: Path | None = None) -> str:
    """Submit a run folder; return Flower's number of the run.

    Args:
        home: the coordinator's folder.
        run: the run folder, which the app is told.
        app: a Flower app; None: fedveil's own.

    Raises:
        FlowerError: the SuperLink did not start it.
    """
    _write_connection(home)
    if app is None:
        app = write_app(home / "flower" / "app")
    config = f'coordinator="{home.path}" run="{run.absolute()}"'
    done = _flwr(home, "run", str(app), CONNECTION, "--run-config", config, "--format", "json")
    try:
        document = json.loads(done.stdout[done.stdout.index("{") :])
        return str(document["run-id"])
    except (ValueError, KeyError):
        said = (done.stdout + done.stderr).strip()[-300:]
        raise FlowerError(f"the run was not started; is `fedveil coordinator` running? {said}") from None


def run_is_alive(home: CoordinatorFolder, number: str) -> bool:
    """Return whether Flower still plays a run."""
    done = _flwr(home, "list", CONNECTION, "--run-id", number, "--format", "json")
    try:
        (run,) = json.loads(done.stdout[done.stdout.index("{") :])["runs"]
    except (ValueError, KeyError):
        return True  # Flower does not say; it may be busy
    return not str(run["status"]).startswith("finished")


def _flwr(home: CoordinatorFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_program("flwr"), *arguments],
        env=_environment(home.path),
        capture_output=True,
        text=True,
        check=False,
    )


def _write_connection(home: CoordinatorFolder) -> None:
    settings = home.settings
    folder = home / "flower"
    folder.mkdir(exist_ok=True)
    connection = {
        "address": f"{settings.host}:{settings.port}",
        "root-certificates": str(home / "ca.crt"),
        "insecure": False,
    }
    document = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (folder / "config.toml").write_text(tomlkit.dumps(document), encoding="utf-8")


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed: pip install 'fedveil[federation]'")
    return found


def _environment(folder: Path, *programs: Path) -> dict[str, str]:
    """Return the environment of a party's processes: its own state folder, and programs beside this Python.

    Args:
        folder: the party's.
        programs: folders of programs that are found before all others.
    """
    places = (*programs, Path(sys.executable).parent, os.environ.get("PATH", ""))
    return {
        **os.environ,
        **_POLL,
        "FLWR_HOME": str(folder / "flower"),
        "PATH": os.pathsep.join(str(place) for place in places),
    }
