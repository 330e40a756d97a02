"""A disk that fills up under served parties, a little one of its own: the run stops, and goes on when there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import free_port
from fedveil.run.folder.run_folder import RunFolder
from tests.processes import FEDVEIL, Processes, complete, rounds, seeded, wait_until

ROUNDS = 6
_CHUNK = 4096


@pytest.fixture
def little_disk() -> Iterator[Callable[[Path], None]]:
    """Mounts a disk of 4 MiB on a folder."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a disk of its own needs root and mount")
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", folder], check=False
        )
        if made.returncode != 0:
            pytest.skip("file systems may not be mounted here")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte of a disk; return the file that has them."""
    ballast = folder / "ballast"
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(_CHUNK))
    except OSError:
        return ballast
    finally:
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["coordinator", "silo"])
def test_a_disk_that_fills_up_under_served_parties_stops_the_run_and_loses_nothing(
    whose: str, little_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    """No party is started again: who waits is told that there is no room, and resumes when there is."""
    hospitals = {"north": 60, "south": 50}
    made = write_demonstration(tmp_path / "demo", rounds=ROUNDS, port=free_port(), hospitals=hospitals)
    seeded(made)
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = home / "runs" / "demonstration"
    disk = home / "runs" if whose == "coordinator" else made.provisioned.silos[0] / "state"
    little_disk(disk)
    ask = [*FEDVEIL, "federation", "run", "--home", str(home.path)]
    with Processes() as processes:
        processes.serve(home)
        for path in made.provisioned.silos:
            processes.start("silo", "serve", path)
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        asked = subprocess.Popen([*ask, str(made.experiment)], **piped)
        wait_until(lambda: 2 in rounds(run), asked, look=0.02)
        ballast = fill(disk)
        said = " ".join(asked.communicate(timeout=600)[0].split())
        assert (
            asked.returncode == {"coordinator": 2, "silo": 0}[whose]
        )  # the coordinator has the model so far
        assert {"coordinator": "No space left", "silo": "cannot read or write its state"}[whose] in said
        ballast.unlink()
        subprocess.run([*ask, "--resume", str(run)], check=True, timeout=600)
        assert all(one.poll() is None for one in processes)
    complete(RunFolder(run), made, tmp_path, ROUNDS, charged_again=1)
