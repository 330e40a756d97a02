"""Hosts with too little of a processor, and a silo that thinks for longer than a sign of life takes: the run ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import free_port
from fedveil.run.folder.run_folder import RunFolder
from tests.processes import FEDVEIL, Processes, complete, seeded, tree, wait_until

ROUNDS = 3
LOOPS = 8
GUARD_SECONDS = 45
SLOWLY = f"""\
import time
from fedveil.cli.app import main
from fedveil.federation.silo import SiloParty
receive = SiloParty.receive
def slowly(silo, data):
    time.sleep({GUARD_SECONDS})
    return receive(silo, data)
SiloParty.receive = slowly
main()
"""


@pytest.fixture
def busy() -> Iterator[None]:
    """Loops that compete for the processors with everything else, nicely."""
    loops = [subprocess.Popen(["nice", sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    yield
    for one in loops:
        one.kill()
        one.wait()


def play(folder: Path, slow: str = "") -> float:
    """Play a run of four silos as processes, one of them slow if it is named; return its seconds.

    Nothing is started again: the processes of every party are the same at the end.
    """
    hospitals = dict.fromkeys(("cleveland", "hungary", "switzerland", "va"), 40)
    made = write_demonstration(folder / "demo", rounds=ROUNDS, port=free_port(), hospitals=hospitals)
    seeded(made)
    home = CoordinatorFolder(made.provisioned.coordinator)
    with Processes() as processes:
        processes.serve(home)
        for path in made.provisioned.silos:
            program = [sys.executable, "-c", SLOWLY] if path.name == slow else FEDVEIL
            processes.start("silo", "serve", path, by=program)
        served = list(processes)
        wait_until(lambda: all(len(tree(one.pid)) == 2 for one in served), processes[0])
        before, began = [set(tree(one.pid)) for one in served], time.monotonic()
        assert processes.start("federation", "run", made.experiment, "--home", home.path).wait(1800) == 0
        seconds = time.monotonic() - began
        assert [set(tree(one.pid)) for one in served] == before
    complete(RunFolder(home / "runs" / "demonstration"), made, folder, ROUNDS)
    return seconds


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_a_run_beside_eight_loops_ends_and_nothing_is_started_again(tmp_path: Path) -> None:
    print(f"{ROUNDS} rounds beside {LOOPS} loops: {play(tmp_path):.0f} s")


@pytest.mark.slow
def test_a_guard_that_takes_45_seconds_for_an_answer_is_waited_for(tmp_path: Path) -> None:
    """It is not dead: it says that it is at work after 30 seconds, and what it answers is taken."""
    seconds = play(tmp_path, slow="va")
    print(f"{ROUNDS} rounds with a guard of {GUARD_SECONDS} s an answer: {seconds:.0f} s")
    assert seconds > (2 + ROUNDS) * GUARD_SECONDS
