"""Parties of a federation as processes of their own, as tests start, watch and end them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import ProtocolError
from fedveil.federation.enrollment.demonstration import Demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import END, SOCKET, address, receive_frame, send_frame
from fedveil.privacy.ledger import read_entries
from fedveil.run.folder.run_folder import RunFolder

FEDVEIL = [sys.executable, "-m", "fedveil"]
SECONDS = 600.0
"""For each step; a busy machine takes a minute for a round."""


class Processes(list[subprocess.Popen[Any]]):
    """Those that a test has started: they end with the block."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self:
            process.terminate()
        for process in self:
            process.wait()

    def start(
        self, *words: object, by: Sequence[str] = FEDVEIL, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[Any]:
        """Start a command of fedveil."""
        self.append(subprocess.Popen([*by, *map(str, words)], env=env))
        return self[-1]

    def serve(self, home: CoordinatorFolder) -> subprocess.Popen[Any]:
        """Start a coordinator, and return once it takes runs."""
        process = self.start("coordinator", "serve", home.path)
        wait_until(lambda: submittable(home), process)
        return process


def tree(root: int) -> dict[int, bytes]:
    """A process and all below it, with their command lines."""
    parents: dict[int, int] = {}
    lines: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            lines[int(entry.name)] = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        parents[int(entry.name)] = int(stat[stat.rindex(")") + 1 :].split()[1])

    def within(process: int) -> bool:
        while process != root and process in parents:
            process = parents[process]
        return process == root

    return {process: line for process, line in lines.items() if within(process)}


def submittable(home: CoordinatorFolder) -> bool:
    """Whether a coordinator takes runs; a socket that one left behind that was killed takes none."""
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            return tried.connect_ex(address(home / "run" / SOCKET)) == 0
        except OSError:
            return False


def rounds(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["round"] for line in lines]


def ask(path: Path, message: bytes) -> bytes:
    """Hand a message to a key process; return its answer, or raise its refusal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        send_frame(connection, message)
        refused = connection.recv(1) == b"\1"
        answer = receive_frame(connection)
    if refused:
        raise ProtocolError(answer.decode())
    return answer


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[Any], *, look: float = 0.2) -> None:
    """Wait for something that happens while a process lives."""
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(look)


def seeded(made: Demonstration) -> None:
    """Make the run repeatable, and the silos willing to play it."""
    with made.experiment.open("a", encoding="utf-8") as stream:
        stream.write('\n[privacy]\ninsecure_seed = 7\n\n[trainer]\nname = "loop"\n')
    for path in made.provisioned.silos:
        with (path / "policy.toml").open("a", encoding="utf-8") as stream:
            stream.write("without_guarantee = true\n")


def complete(
    run: RunFolder, made: Demonstration, tmp_path: Path, last: int, *, charged_again: int = 0
) -> None:
    """Hold a run that was disturbed against one that was not.

    Args:
        run: its folder.
        made: the federation.
        tmp_path: where the other is played.
        last: the number of rounds.
        charged_again: the most that a silo may have charged without having given anything for it.
    """
    every = list(range(1, last + 1))
    assert json.loads((run / END).read_bytes())["error"] is None
    assert rounds(run.path) == [0, *every]
    assert [entry.round for entry in read_entries(run / "ledger.jsonl")] == every
    for path in made.provisioned.silos:
        charged = [entry.round for entry in read_entries(path / "state" / "ledger.jsonl")]
        assert sorted(set(charged)) == every
        assert len(charged) <= last + charged_again
    here = tmp_path / "here"
    subprocess.run([*FEDVEIL, "run", str(made.experiment), "--runs", str(here)], check=True)
    undisturbed = here / "demonstration" / "model.safetensors"
    assert undisturbed.read_bytes() == (run / "model.safetensors").read_bytes()
