"""Deployments of Flower and NVFlare on loopback, in which a bridge carries messages, for slow tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fedveil.federation.hosts.deployment import write_flower_app, write_nvflare_job
from fedveil.federation.hosts.sockets import free_port


def program(name: str, extra: str) -> str:
    """Path of an installed program, of PATH before this Python's own; skips the test if there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'fedveil[{extra}]', or put it on PATH")
    return found


@contextlib.contextmanager
def started(
    command: Sequence[str | Path], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program; end it and all processes that it has started."""
    changed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    with log.open("ab") as stream:
        process = subprocess.Popen(
            list(map(str, command)), stdout=stream, stderr=stream, env=changed, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(log: Path, text: str, seconds: float = 120.0) -> None:
    """Wait until a log has a text."""
    until = time.monotonic() + seconds
    while not (log.exists() and text in log.read_text(errors="replace")):
        assert time.monotonic() < until, f"{log}: {text!r} did not come"
        time.sleep(0.2)


@contextlib.contextmanager
def nvflare_simulator(folder: Path, bridge: Path, sockets: Path, silos: Sequence[str]) -> Iterator[Path]:
    """Run a job in NVFlare's simulator; yield its log.

    Args:
        folder: made here.
        bridge: the link's socket.
        sockets: folder of the key processes' sockets, by the silos' names.
        silos: their names, which are those of the sites.
    """
    nvflare = program("nvflare", "nvflare")
    write_nvflare_job(folder / "job", bridge, {}, installed=False)
    environment = {
        "FEDVEIL_KEY_PROCESS": str(sockets / "{site}"),
        "PATH": f"{Path(nvflare).parent}:{os.environ['PATH']}",
    }
    for attempt in range(3):
        command = [
            nvflare,
            "simulator",
            folder / "job",
            "-w",
            folder / f"work-{attempt}",
            "-c",
            ",".join(silos),
        ]
        log = folder / f"log-{attempt}"
        with started([*command, "-t", str(len(silos))], log, environment):
            try:
                for silo in silos:
                    wait_for(log, f"Initialize ClientRunner for client: {silo}")
            except AssertionError:
                # The simulator draws a port for each site, which another process may take before the site does.
                if attempt < 2 and "Address already in use" in log.read_text(errors="replace"):
                    continue
                raise
            yield log
            return


@contextlib.contextmanager
def flower_deployment(folder: Path, bridge: Path, sockets: Path, silos: Sequence[str]) -> Iterator[Path]:
    """Run an app over a SuperLink and a SuperNode for each silo; yield the SuperLink's log.

    Args:
        folder: made here.
        bridge: the link's socket.
        sockets: folder of the key processes' sockets, by the silos' names.
        silos: their names.
    """
    superlink = program("flower-superlink", "flower")
    programs = Path(superlink).parent
    write_flower_app(folder / "app", bridge)
    port = free_port()
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    log = folder / "superlink.log"
    with contextlib.ExitStack() as ending:
        link = [superlink, "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        link += ["--disable-runtime-dependency-installation"]
        ending.enter_context(started(link, log, environment))
        for silo in silos:
            node = [programs / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            node += ["--node-config", f'silo="{silo}" socket="{sockets / silo}"']
            node += ["--host", "127.0.0.1", "--port", str(free_port())]
            ending.enter_context(started(node, folder / f"supernode-{silo}.log", environment))
        run = [programs / "flwr", "run", folder / "app", "here"]
        until = time.monotonic() + 120
        while subprocess.run(
            list(map(str, run)), env=os.environ | environment, capture_output=True, check=False
        ).returncode:
            assert time.monotonic() < until, "flwr run: the SuperLink does not take the app"
            time.sleep(2.0)
        yield log
