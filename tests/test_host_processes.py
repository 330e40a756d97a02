"""A live coordinator, killed in the middle of a run: its link, or its own process; and the run that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import SOCKET, free_port
from fedveil.run.folder.run_folder import RunFolder
from tests.processes import (
    FEDVEIL,
    SECONDS,
    Processes,
    complete,
    rounds,
    seeded,
    submittable,
    tree,
    wait_until,
)

ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Playing:
    """A run between two hospitals whose first round is done.

    Attributes:
        home: the coordinator's folder.
        run: the run's folder.
        processes: of all parties.
        served: the coordinator's process.
        asking: the process that asked for the run and waits for its end.
    """

    home: CoordinatorFolder
    run: Path
    processes: Processes
    served: subprocess.Popen[bytes]
    asking: subprocess.Popen[bytes]


@pytest.fixture
def playing(tmp_path: Path) -> Iterator[Playing]:
    """Play until the first round is done; when the test is over, the run must be complete."""
    hospitals = {"north": 60, "south": 50}
    made = write_demonstration(tmp_path / "demo", rounds=ROUNDS, port=free_port(), hospitals=hospitals)
    seeded(made)
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = home / "runs" / "demonstration"
    with Processes() as processes:
        served = processes.serve(home)
        for path in made.provisioned.silos:
            processes.start("silo", "serve", path)
        asking = processes.start("federation", "run", made.experiment, "--home", home.path)
        wait_until(lambda: 1 in rounds(run), served, look=0.02)
        yield Playing(home=home, run=run, processes=processes, served=served, asking=asking)
    complete(RunFolder(run), made, tmp_path, ROUNDS)


@pytest.mark.slow
def test_a_run_whose_link_is_killed_goes_on(playing: Playing) -> None:
    """Nobody is told, and nothing is resumed: the coordinator starts another link, and silos come back to it."""
    served = playing.served
    (link,) = set(tree(served.pid)) - {served.pid}
    os.kill(link, signal.SIGKILL)
    assert playing.asking.wait(SECONDS) == 0
    assert served.poll() is None
    assert set(tree(served.pid)) - {served.pid, link}


@pytest.mark.slow
def test_a_run_whose_coordinator_is_killed_goes_on_to_the_same_model(playing: Playing) -> None:
    served, home = playing.served, playing.home
    children = set(tree(served.pid)) - {served.pid}
    assert len(children) == 1
    served.kill()
    assert served.wait(60) != 0
    assert playing.asking.wait(60) != 0  # who watches is told
    assert rounds(playing.run)[-1] < ROUNDS
    until = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < until  # the link ends with its party, and leaves the port
        time.sleep(0.1)
    playing.processes.serve(home)
    again = [*FEDVEIL, "federation", "run", "--resume", str(playing.run), "--home", str(home.path)]
    subprocess.run(again, check=True, timeout=SECONDS)


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
@pytest.mark.parametrize("party", ["coordinator", "silo"])
@pytest.mark.parametrize("state", STATES)
def test_nothing_is_left_15_seconds_after_a_signal(
    state: str, party: str, process: str, ended_by: signal.Signals, tmp_path: Path
) -> None:
    """No process, no socket and no temporary file, whichever process of a party is ended or killed, and when.

    A party goes on without its child, which it starts again; it is ended afterwards. Of two processes that are killed
    at once a socket stays, which the next start replaces.
    """
    if ended_by is signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip(
            "this was started where SIGINT is ignored, which a child inherits (a shell's background job)"
        )
    made = write_demonstration(
        tmp_path / "demo", rounds=2, port=free_port(), hospitals={"north": 60, "south": 50}
    )
    home, silos = CoordinatorFolder(made.provisioned.coordinator), made.provisioned.silos
    folder = home.path if party == "coordinator" else silos[0]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    processes = Processes()
    start = partial(processes.start, env={**os.environ, "TMPDIR": str(temporary)})
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
from fedveil.protocols.partial_encryption.protocol_spec import worker_pool
if __name__ == "__main__":
    class Owner: pass
    owner = Owner()
    pool = worker_pool(2, owner)
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
