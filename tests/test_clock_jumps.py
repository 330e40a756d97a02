"""Clocks that jump in the middle of a run, of one party or of all: the run ends, with the same model and charges."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import free_port
from fedveil.run.folder.run_folder import RunFolder
from tests.processes import Processes, complete, rounds, seeded, submittable, wait_until

HOUR = 3600
JUMPS = (HOUR, -2 * 24 * HOUR, 200)
"""Seconds; each is undone after a while, which is a jump the other way."""
SECONDS_WRONG = 12.0
ROUNDS = 2 * len(JUMPS) + 2


class Clock:
    """A clock of some processes, which jumps."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.ahead"
        self._path.write_bytes(bytes(8))

    def environment(self, library: Path) -> dict[str, str]:
        """What the processes are started with."""
        return {**os.environ, "LD_PRELOAD": str(library), "CLOCK_AHEAD": str(self._path)}

    def jump(self, seconds: int) -> None:
        """Put it ahead of the true time by so many seconds."""
        with self._path.open("r+b", buffering=0) as stream:
            stream.write(struct.pack("q", seconds))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What answers a process that asks for the time."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the library that a process asks for the time is made by a C compiler, for Linux")
    made = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


def test_the_clock_of_a_process_jumps(library: Path, tmp_path: Path) -> None:
    """The library is believed: what does not jump shows nothing."""
    clock = Clock(tmp_path, "one")
    clock.jump(-HOUR)
    code = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    before, steady = time.time(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=clock.environment(library), capture_output=True, check=True
    )
    told = [float(word) for word in done.stdout.split()]
    assert abs(told[0] - before + HOUR) < 60
    assert abs(told[1] - before + HOUR) < 60
    assert 0 <= told[2] - steady < 60


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["coordinator", "silo", "everybody"])
def test_a_clock_that_jumps_changes_nothing(whose: str, library: Path, tmp_path: Path) -> None:
    hospitals = {"north": 60, "south": 50}
    made = write_demonstration(tmp_path / "demo", rounds=ROUNDS, port=free_port(), hospitals=hospitals)
    seeded(made)
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = home / "runs" / "demonstration"
    clocks = {name: Clock(tmp_path, name) for name in ("coordinator", *hospitals)}
    chosen = {"coordinator": ["coordinator"], "silo": ["north"], "everybody": list(clocks)}[whose]
    environments = {name: clock.environment(library) for name, clock in clocks.items()}

    def wrong(seconds: int) -> None:
        for name in chosen:
            clocks[name].jump(seconds)

    with Processes() as processes:
        served = processes.start("coordinator", "serve", home.path, env=environments["coordinator"])
        wait_until(lambda: submittable(home), served)
        for path in made.provisioned.silos:
            processes.start("silo", "serve", path, env=environments[path.name])
        words = ("federation", "run", made.experiment, "--home", home.path)
        asked = processes.start(*words, env=environments["coordinator"])
        for number, jump in enumerate(JUMPS):
            wait_until(lambda number=number: max(rounds(run), default=-1) > 2 * number, asked)
            wrong(jump)
            until = time.monotonic() + SECONDS_WRONG
            while time.monotonic() < until and asked.poll() is None:
                time.sleep(0.1)
            wrong(0)
        assert asked.wait(900) == 0
        assert all(one.poll() is None for one in processes[:-1])  # nothing was started again
    complete(RunFolder(run), made, tmp_path, ROUNDS)
