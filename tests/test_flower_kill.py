"""A live coordinator, killed in the middle of a run: its link, or its own process; and the run that goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedveil.engine.run_folder.folder import RunFolder
from fedveil.flower.demonstration import Demonstration, write_demonstration
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.sockets import address, free_port
from fedveil.flower.submission import END, SOCKET
from fedveil.privacy.ledger import read_entries

FEDVEIL = [sys.executable, "-m", "fedveil"]
ROUNDS = 3
SECONDS = 600.0
"""For each step; a busy machine takes a minute for a round."""


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


def carried_by_supernodes(made: Demonstration, silos: Sequence[Path]) -> None:
    """Have silos carry letters by Flower's own SuperNode, and the link let them in."""
    link = CoordinatorFolder(made.provisioned.coordinator).link
    link.settings.model_copy(update={"supernodes": True}).write(link / "link.toml")
    for path in silos:
        SiloFolder(path).settings.model_copy(update={"carrier": "supernode"}).write(path / "silo.toml")


@pytest.mark.slow
def test_silos_with_supernodes_train_to_the_same_model(tmp_path: Path) -> None:
    """One beside one with the fleet carrier: the model of one process, and so of fleet carriers alone, bit for bit."""
    pytest.importorskip("flwr")
    hospitals = {"north": 60, "south": 50}
    made = write_demonstration(tmp_path / "demo", rounds=ROUNDS, port=free_port(), hospitals=hospitals)
    seeded(made)
    carried_by_supernodes(made, made.provisioned.silos[:1])
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = home / "runs" / "demonstration"
    processes = [subprocess.Popen([*FEDVEIL, "coordinator", "serve", str(home.path)])]
    try:
        wait_until((home / "run" / SOCKET).exists, processes[0])
        processes += [
            subprocess.Popen([*FEDVEIL, "silo", "serve", str(path)]) for path in made.provisioned.silos
        ]
        submitting = [*FEDVEIL, "federation", "run", str(made.experiment), "--home", str(home.path)]
        subprocess.run(submitting, check=True, timeout=SECONDS)
        lines = b"".join(tree(processes[1].pid).values())
        assert b"fedveil.flower.supernode" in lines
        assert len(tree(processes[1].pid)) == 2  # nothing is started for a message
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    complete(RunFolder(run), made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["link", "coordinator"])
def test_a_run_whose_coordinator_is_killed_goes_on_to_the_same_model(killed: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    hospitals = {"north": 60, "south": 50}
    made = write_demonstration(tmp_path / "demo", rounds=ROUNDS, port=free_port(), hospitals=hospitals)
    seeded(made)
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = home / "runs" / "demonstration"
    serve, submitting = [*FEDVEIL, "coordinator", "serve", str(home.path)], [*FEDVEIL, "federation", "run"]
    processes = [subprocess.Popen(serve)]
    try:
        wait_until((home / "run" / SOCKET).exists, processes[0])
        processes += [
            subprocess.Popen([*FEDVEIL, "silo", "serve", str(path)]) for path in made.provisioned.silos
        ]
        processes.append(subprocess.Popen([*submitting, str(made.experiment), "--home", str(home.path)]))
        wait_until(lambda: 1 in rounds(run), processes[0])
        children = set(tree(processes[0].pid)) - {processes[0].pid}
        assert len(children) == 1
        if killed == "link":
            os.kill(children.pop(), signal.SIGKILL)
        else:
            processes[0].kill()
        assert processes[0].wait(60) != 0
        assert processes[-1].wait(60) != 0  # who watches is told
        assert rounds(run)[-1] < ROUNDS
        until = time.monotonic() + 60
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < until  # the link ends with its party, and leaves the port
            time.sleep(0.1)
        processes.append(subprocess.Popen(serve))
        wait_until(lambda: submittable(home), processes[-1])
        again = [*submitting, "--resume", str(run), "--home", str(home.path)]
        subprocess.run(again, check=True, timeout=SECONDS)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    complete(RunFolder(run), made, tmp_path)


def told(path: Path) -> bytes:
    """What stands in a file that may not be there yet."""
    return path.read_bytes() if path.exists() else b""


STATES: dict[str, Callable[[Path, Path], bool]] = {
    "waiting": lambda run, silo: True,
    "joining": lambda run, silo: (run / "federation.json").exists(),
    "training": lambda run, silo: b'"charge"' in told(silo / "state" / "ledger.jsonl"),
    "exchanging": lambda run, silo: 1 in rounds(run),
    "ending": lambda run, silo: (run / "privacy.json").exists(),
}
"""What shows that a run has come to a state, by its folder and a silo's; waiting is before any."""


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("process", ["party", "child"])
@pytest.mark.parametrize("party", ["coordinator", "silo", "silo with a SuperNode"])
@pytest.mark.parametrize("state", STATES)
def test_nothing_is_left_15_seconds_after_a_signal(
    state: str, party: str, process: str, ended_by: signal.Signals, tmp_path: Path
) -> None:
    """No process, no socket and no temporary file, whichever process of a party is ended or killed, and when.

    A silo goes on without its carrier, which it starts again; it is ended afterwards. Of two processes that are killed
    at once a socket stays, which the next start replaces.
    """
    pytest.importorskip("flwr")
    if ended_by is signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip(
            "this was started where SIGINT is ignored, which a child inherits (a shell's background job)"
        )
    made = write_demonstration(
        tmp_path / "demo", rounds=2, port=free_port(), hospitals={"north": 60, "south": 50}
    )
    home, silos = CoordinatorFolder(made.provisioned.coordinator), made.provisioned.silos
    if party == "silo with a SuperNode":
        carried_by_supernodes(made, silos[:1])
        party = "silo"
    folder = home.path if party == "coordinator" else silos[0]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    processes: list[subprocess.Popen[Any]] = []

    def start(*words: str) -> subprocess.Popen[Any]:
        processes.append(subprocess.Popen([*FEDVEIL, *words], env=environment))
        return processes[-1]

    try:
        target = start(party, "serve", str(folder))
        wait_until((folder / "run" / (SOCKET if party == "coordinator" else "guard")).exists, target)
        if state != "waiting":
            served = target if party == "coordinator" else start("coordinator", "serve", str(home.path))
            wait_until(lambda: submittable(home), served)
            for silo in silos if party == "coordinator" else silos[1:]:
                start("silo", "serve", str(silo))
            start("federation", "run", str(made.experiment), "--home", str(home.path))
        run = home / "runs" / "demonstration"
        wait_until(lambda: STATES[state](run, silos[0]), target, look=0.02)
        wait_until(lambda: len(tree(target.pid)) == 2, target, look=0.02)  # its socket comes before its child
        children = set(tree(target.pid)) - {target.pid}
        ended = target.pid if process == "party" else min(children)
        os.kill(ended, ended_by)
        if process == "child":
            gone(children, [])
            if party == "silo":
                target.send_signal(signal.SIGTERM)
        target.wait(seconds_to_end())
        left = [folder / "run", *([folder / "link" / "run"] if party == "coordinator" else [])]
        gone(children, left)
        for other in processes:
            other.terminate()
        for other in processes:
            other.wait(seconds_to_end())
        gone(set(), [temporary])
    finally:
        for other in processes:
            other.kill()
            other.wait()


def seconds_to_end() -> float:
    """15 seconds where there is a core for everybody who asks for one, and as many times more as there is not."""
    return 15.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def gone(processes: Collection[int], folders: Sequence[Path]) -> None:
    """Return once processes have ended and folders are empty, in time."""
    until = time.monotonic() + seconds_to_end()
    while any(running(one) for one in processes) or any(list(one.iterdir()) for one in folders):
        assert time.monotonic() < until, [list(one.iterdir()) for one in folders]
        time.sleep(0.1)


def running(process: int) -> bool:
    """Whether a process is there and has not ended: one whose parent was killed may wait to be buried."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


POOL = """\
import os, signal, sys
from fedveil.protection.partial.workers import workers_of
if __name__ == "__main__":
    class Owner: pass
    owner = Owner()
    pool = workers_of(2, owner)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a silo encrypts in its own process there")
def test_the_processes_that_encrypt_end_with_a_silo_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    made = subprocess.run([sys.executable, str(tmp_path / "pool.py")], capture_output=True, check=False)
    assert made.returncode == -signal.SIGKILL
    gone({int(made.stdout)}, [])


def complete(
    run: RunFolder, made: Demonstration, tmp_path: Path, last: int = ROUNDS, *, charged_again: int = 0
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
