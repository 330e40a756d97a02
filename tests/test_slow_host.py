"""Hosts with too little of a processor, and a silo that thinks for longer than a sign of life takes: the run ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.engine.run_folder.folder import RunFolder
from fedveil.flower.demonstration import write_demonstration
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.sockets import free_port
from tests.test_flower_kill import FEDVEIL, ROUNDS, complete, seeded, submittable, tree, wait_until

LOOPS = 8
GUARD_SECONDS = 45
SLOWLY = f"""\
import time
from fedveil.cli import main
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
    processes: list[subprocess.Popen[Any]] = []
    try:
        processes.append(subprocess.Popen([*FEDVEIL, "coordinator", "serve", str(home.path)]))
        wait_until(lambda: submittable(home), processes[0])
        for path in made.provisioned.silos:
            command = [sys.executable, "-c", SLOWLY] if path.name == slow else FEDVEIL
            processes.append(subprocess.Popen([*command, "silo", "serve", str(path)]))
        served = list(processes)
        wait_until(lambda: all(len(tree(one.pid)) == 2 for one in served), processes[0])
        before, began = [set(tree(one.pid)) for one in served], time.monotonic()
        asked = [*FEDVEIL, "federation", "run", str(made.experiment), "--home", str(home.path)]
        processes.append(subprocess.Popen(asked))
        assert processes[-1].wait(1800) == 0
        seconds = time.monotonic() - began
        assert [set(tree(one.pid)) for one in served] == before
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    complete(RunFolder(home / "runs" / "demonstration"), made, folder)
    return seconds


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_a_run_beside_eight_loops_ends_and_nothing_is_started_again(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    print(f"{ROUNDS} rounds beside {LOOPS} loops: {play(tmp_path):.0f} s")


@pytest.mark.slow
def test_a_guard_that_takes_45_seconds_for_an_answer_is_waited_for(tmp_path: Path) -> None:
    """It is not dead: it says that it is at work after 30 seconds, and what it answers is taken."""
    pytest.importorskip("flwr")
    seconds = play(tmp_path, slow="va")
    print(f"{ROUNDS} rounds with a guard of {GUARD_SECONDS} s an answer: {seconds:.0f} s")
    assert seconds > (2 + ROUNDS) * GUARD_SECONDS
