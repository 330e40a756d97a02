"""Flower as it comes, as a peer: empty exchanges of its own ``send_and_receive`` through its own processes.

SuperLink and SuperNodes are started with the flags of Flower's first steps, without TLS and without registered keys:
the least that it takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fedveil.flower.sockets import free_port

_CLIENT = """\
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)
"""
_SERVER = """\
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < {nodes}:
        time.sleep(1)
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes])
        seconds.append(time.perf_counter() - begin)
    Path({target!r}).write_text(json.dumps(seconds))
"""
_PROJECT = """\
[project]
name = "empty"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "empty.server:app"
clientapp = "empty.client:app"
"""


def empty_exchanges(folder: Path, nodes: int) -> list[float]:
    """Return the seconds of empty exchanges with so many nodes, but for the first.

    Args:
        folder: made here.
        nodes: SuperNodes that are started.
    """
    app, target, link = folder / "app", folder / "seconds.json", free_port()
    (app / "empty").mkdir(parents=True)
    (app / "pyproject.toml").write_text(_PROJECT)
    (app / "empty" / "__init__.py").write_text("")
    (app / "empty" / "client.py").write_text(_CLIENT)
    (app / "empty" / "server.py").write_text(_SERVER.format(nodes=nodes, target=str(target)))
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    processes = [_start(folder, "flower-superlink", "--insecure", "--port", str(link))]
    try:
        for _ in range(nodes):
            there = ("--superlink", f"127.0.0.1:{link}", "--port", str(free_port()))
            processes.append(_start(folder, "flower-supernode", "--insecure", *there))
        until = time.monotonic() + 120
        while _start(folder, "flwr", "run", str(app), "here").wait():
            if time.monotonic() > until:
                raise TimeoutError("Flower does not take the empty app")
            time.sleep(1)
        wait_for(target)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    return [float(seconds) for seconds in json.loads(target.read_text())[1:]]


def wait_for(path: Path, seconds: float = 600.0) -> None:
    """Return when a file is there."""
    begin = time.monotonic()
    while not path.exists():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{path} was not written")
        time.sleep(0.5)
    time.sleep(0.5)


def _start(home: Path, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return subprocess.Popen([str(programs / program), *arguments], env=environment, stdout=sys.stderr)
