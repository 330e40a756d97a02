"""Processes of a served federation, killed at random moments and started again: the same model, every charge kept."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fedveil.federation.enrollment.demonstration import Demonstration, write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import END, free_port
from fedveil.privacy.ledger import read_entries
from tests.processes import FEDVEIL, Processes, rounds, seeded, submittable, tree

KILLS = 20
ROUNDS = KILLS + 5
LONGEST_PAUSE = 10.0
"""Seconds from when all are there again to the next kill, or less where a round has passed since."""
SECONDS = 3600.0
HOSPITALS = {"north": 60, "south": 50}
PROTECTIONS = {
    "secure-aggregation": ("uldp-avg", ""),
    "private-weighting": ("uldp-avg-w", 'n_max = 16\ncipher = "rlwe"\n'),
}


class Served:
    """A federation's parties as processes that are started again when they end, and the run that they play.

    Attributes:
        run: its folder.
        kills: what was killed, in order.
    """

    def __init__(self, made: Demonstration) -> None:
        self._made, self._home = made, CoordinatorFolder(made.provisioned.coordinator)
        self.run = self._home / "runs" / "demonstration"
        self._commands = {"coordinator": ["coordinator", "serve", str(self._home.path)]} | {
            path.name: ["silo", "serve", str(path)] for path in made.provisioned.silos
        }
        self._processes = Processes()
        self._parties = {name: self._processes.start(*words) for name, words in self._commands.items()}
        self._asking: subprocess.Popen[bytes] | None = None
        self.kills: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether the run is complete; one whose coordinator or link was killed may have ended with an error."""
        return (self.run / END).exists() and json.loads((self.run / END).read_bytes())["error"] is None

    @property
    def begun(self) -> bool:
        """Whether the coordinator has taken the run: before, it would be another that is submitted again."""
        return (self.run / "federation.json").exists()

    @property
    def complete(self) -> bool:
        """Whether every process is there, and the run has begun and is waited for."""
        asking = self._asking is not None and self._asking.poll() is None
        return asking and self.begun and all(len(tree(party.pid)) == 2 for party in self._parties.values())

    def look(self) -> None:
        """Start what has ended, as a supervisor does, and submit the run again where nobody waits for it."""
        for name, party in self._parties.items():
            if party.poll() is not None:
                self._parties[name] = self._processes.start(*self._commands[name])
        if (self._asking is None or self._asking.poll() is not None) and submittable(self._home):
            what = ["--resume", str(self.run)] if self.begun else [str(self._made.experiment)]
            self._asking = self._processes.start("federation", "run", *what, "--home", self._home.path)

    def kill(self, source: random.Random) -> None:
        """Kill a process of a party: the coordinator, its link, a silo's guard or its carrier."""
        name = source.choice(list(self._parties))
        party = self._parties[name].pid
        killed = source.choice(sorted(tree(party)))
        os.kill(killed, signal.SIGKILL)
        self.kills.append(f"{name}'s {'own process' if killed == party else 'child'}")

    def close(self) -> None:
        """End all processes."""
        self._processes.__exit__()


def demonstration(folder: Path, protection: str) -> Demonstration:
    """A federation of two silos whose run is repeatable, under a protection."""
    made = write_demonstration(folder, rounds=ROUNDS, port=free_port(), hospitals=HOSPITALS)
    method, keys = PROTECTIONS[protection]
    text = made.experiment.read_text().replace('"uldp-avg"', f'"{method}"')
    made.experiment.write_text(text.replace('"secure-aggregation"\n', f'"{protection}"\n{keys}'))
    for path in made.provisioned.silos:
        policy = path / "policy.toml"
        policy.write_text(policy.read_text().replace('"secure-aggregation"', f'"{protection}"'))
    seeded(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_twenty_kills_of_processes_lose_nothing(protection: str, tmp_path: Path) -> None:
    """The model is that of one process that nobody disturbs, and no round is without its charge.

    A silo that is killed between its charge and its answer charges the round again; the coordinator charges it once.
    """
    pytest.importorskip("tenseal")
    made, source = demonstration(tmp_path / "demo", protection), random.Random(protection)
    served, until = Served(made), time.monotonic() + SECONDS
    try:
        while not served.ended:
            assert time.monotonic() < until, served.kills
            served.look()
            time.sleep(0.1)
            if len(served.kills) == KILLS or not served.complete:
                continue
            moment = time.monotonic() + source.uniform(0.0, LONGEST_PAUSE)
            while time.monotonic() < moment and max(rounds(served.run), default=0) <= len(served.kills):
                time.sleep(0.05)
            served.kill(source)
    finally:
        served.close()
    assert len(served.kills) == KILLS
    assert rounds(served.run) == list(range(ROUNDS + 1))
    assert [entry.round for entry in read_entries(served.run / "ledger.jsonl")] == list(range(1, ROUNDS + 1))
    for path in made.provisioned.silos:
        charged = [entry.round for entry in read_entries(path / "state" / "ledger.jsonl")]
        again = served.kills.count(f"{path.name}'s own process")
        assert charged == sorted(charged)
        assert set(charged) == set(range(1, ROUNDS + 1))
        assert len(charged) <= ROUNDS + again
    subprocess.run([*FEDVEIL, "run", str(made.experiment), "--runs", str(tmp_path / "here")], check=True)
    undisturbed = tmp_path / "here" / "demonstration" / "model.safetensors"
    assert undisturbed.read_bytes() == (served.run / "model.safetensors").read_bytes()
