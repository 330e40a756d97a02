"""Many silos at one coordinator: rounds per minute, and what the coordinator's processes hold and spend.

The coordinator is the real one, as processes of their own under TLS with client certificates. A silo is a thread of
this process: it fetches messages as a silo's network process does, and hands them to a silo with a small table.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.curves import Place
from benchmarks.harness import Row
from benchmarks.silo_threads import connected
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import END, free_port
from fedveil.federation.hosts.submission import Submission, create_run, read_document
from fedveil.run.folder.run_folder import RunFolder

_ROUNDS = 5
_LONGEST_SECONDS = 1500.0


def rows(quick: bool) -> Iterator[Row]:
    """Measure; see the module's text."""
    for silos in (4,) if quick else (10, 25, 50, 100, 200):
        yield from _measured(silos)


def smallest() -> Iterator[Row]:
    """Measure two silos."""
    yield from _measured(2)


def _measured(silos: int) -> Iterator[Row]:
    """Measure so many silos."""
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(Path(folder), silos)
    place = Place(plot="silos", curve="coordinator's memory, MB", x=silos)
    yield Row(case=f"{silos} silos", unit="rounds/min", ours=found.rounds_per_minute)
    yield Row(case=f"{silos} silos, coordinator's memory", unit="MB", ours=found.megabytes, place=place)
    yield Row(case=f"{silos} silos, coordinator's CPU", unit="s/round", ours=found.cpu_seconds)
    yield Row(case=f"{silos} silos, their own CPU together", unit="s/round", ours=found.silos_seconds)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What was measured of a run."""

    rounds_per_minute: float
    megabytes: float
    cpu_seconds: float
    silos_seconds: float


def _measure(folder: Path, silos: int) -> _Found:
    names = {f"silo{number:02}": 40 for number in range(silos)}
    made = write_demonstration(folder / "demo", rounds=_ROUNDS, port=free_port(), hospitals=names)
    home = CoordinatorFolder(made.provisioned.coordinator)
    run = create_run(home, read_document(made.experiment, home))
    with connected(made, output=subprocess.DEVNULL) as coordinator, Submission(home, run.path):
        return _watch(run, coordinator.pid)


def _watch(run: RunFolder, coordinator: int) -> _Found:
    """Wait for the run's end; return the pace of the rounds after the first, which waits for the silos."""
    begin, most, spent = time.monotonic(), 0.0, dict[int, float]()
    own = time.process_time()
    while not (run / END).exists():
        if time.monotonic() - begin > _LONGEST_SECONDS:
            raise TimeoutError(f"{run.path}: the run does not end")
        tree = tree_of(coordinator)
        most = max(most, sum(megabytes_of(process) for process in tree))
        spent |= {process: cpu_seconds_of(process) for process in tree}
        time.sleep(0.5)
    end = json.loads((run / END).read_bytes())
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if end["error"] or end["stopped"] or rounds[-1]["round"] != _ROUNDS:
        raise RuntimeError(f"the run ended early: {end}")
    pace = float(np.median([row["seconds"] for row in rounds[2:]]))
    return _Found(
        rounds_per_minute=60 / pace,
        megabytes=most,
        cpu_seconds=sum(spent.values()) / _ROUNDS,
        silos_seconds=(time.process_time() - own) / _ROUNDS,
    )


def tree_of(root: int) -> list[int]:
    """Return a process and all below it."""
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        found.append(process)
        try:
            for thread in Path(f"/proc/{process}/task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:  # it has ended
            continue
    return found


def megabytes_of(process: int) -> float:
    """Return the memory that no other process shares, and its part of what is shared."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cpu_seconds_of(process: int) -> float:
    """Return the processor seconds that a process has spent."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0.0
    fields = stat[stat.rindex(")") + 1 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def queued_seconds_of(process: int) -> float:
    """Return the seconds for which the threads of a process were ready to run and had no processor."""
    spent = 0.0
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            spent += int((thread / "schedstat").read_text().split()[1]) / 1e9
    except OSError:  # it has ended, or the kernel does not count
        return spent
    return spent
