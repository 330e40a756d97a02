"""A federation: bytes of its messages against the protocols' own count, many silos, and a run of processes.

The first two play all parties in one process. The third (not with ``--quick``) plays 50 rounds with a coordinator and
four silos as processes under TLS on one host, five times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.federation_nodes import cpu_seconds_of, queued_seconds_of, tree_of
from benchmarks.harness import Row, at_most, extra_peak_megabytes
from benchmarks.silo_threads import served, wait_for
from fedveil.crypto.keys import IdentityKey
from fedveil.data.records import Records
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.sockets import END, KEY_PROCESS, free_port
from fedveil.federation.hosts.submission import Submission, create_run, open_session, read_document
from fedveil.federation.ledger_heads import HEADS, SeenHeads
from fedveil.federation.membership import Membership
from fedveil.federation.policy import Policy
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo import SiloParty, Standing
from fedveil.federation.silo_data import LocalPopulation
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.messages import SERVER
from fedveil.protocols.session_messages import GlobalModel, ProtocolMessage, RoundTask
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import NullObserver
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from fedveil.run.steps.experiment import ExperimentParts

POLICY = Policy(
    epsilon=1e6,
    clip=1.0,
    protections=("none", "secure-aggregation", "private-weighting"),
    without_guarantee=True,
)
_ROUNDS = 3
_RUNS = 5


def rows(quick: bool) -> Iterator[Row]:
    """Measure; see the module's text."""
    for protection in ("none", "secure-aggregation"):
        yield _bytes(protection)
    for silos in (10, 50):
        yield from _many(silos)
    if not quick:
        yield from _as_processes()


def smallest() -> Iterator[Row]:
    """Play short runs of small models in one process."""
    for protection in ("none", "secure-aggregation"):
        yield _bytes(protection, features=100)
    begin = time.perf_counter()
    _play(4)()
    yield Row(case="4 silos in one process", unit="s", ours=time.perf_counter() - begin)


class World(NullObserver):
    """All parties in one process; counts what passes between them.

    Args:
        folder: of their files.
        experiment: what runs.
        shares: what each silo holds; the first one's test table is the coordinator's.
    """

    def __init__(self, folder: Path, experiment: Experiment, shares: Sequence[LocalPopulation]) -> None:
        keys = [IdentityKey.generate() for _ in shares]
        self.key = IdentityKey.generate()
        names = shares[0].silo_names
        self.membership = Membership(
            silos=names,
            roster=tuple(key.public for key in keys),
            coordinator=self.key.public,
            schema_digest=bytes(32),
        )
        self.silos = []
        for number, key in enumerate(keys):
            state = folder / str(number)
            state.mkdir()
            self.silos.append(
                SiloParty(
                    standing=lambda: Standing(membership=self.membership, policy=POLICY),
                    number=number,
                    identity=key,
                    share=shares[number],
                    state=state,
                )
            )
        prepared = prepare(experiment, FixedPopulation(shares[0]))
        self.agreed = prepared.protocol_spec
        there = RunFolder.create(folder, experiment)
        record = RunRecord(there, self.membership, self.key)
        heads = SeenHeads(folder / HEADS, self.membership.charter)
        run = ExperimentParts(prepared, there, self, prepare=prepare, witness=record)
        self.coordinator = open_session(run, run.training(), record, heads)
        self.sent = self.content = 0
        self.marks: list[tuple[int, int]] = []

    def on_round_end(self, row: dict[str, Any]) -> None:
        """Note what has passed up to the end of a round."""
        self.marks.append((self.sent, self.content))

    def play(self) -> None:
        """Carry every letter until the run ends; count it, and in it the model and the protocol's messages."""
        while not self.coordinator.is_finished:
            for silo, letter in self.coordinator.messages():
                reply = self.silos[silo].receive(letter)
                self._count(letter, SERVER, silo)
                self._count(reply, silo, SERVER)
                self.coordinator.receive(silo, reply)
        for party in self.silos:
            party.close()

    def _count(self, data: bytes, sender: int, recipient: int) -> None:
        key = self.membership.coordinator if sender == SERVER else self.membership.roster[sender]
        letter = SignedMessage.open(
            data, sender=sender, identity=key, recipient=recipient, largest=LARGEST_MESSAGE
        )
        self.sent += len(data)
        self.content += sum(
            len(part.encode())
            for part in letter.parts
            if isinstance(part, GlobalModel | RoundTask | ProtocolMessage)
        )


def _share(names: tuple[str, ...], number: int, features: int) -> LocalPopulation:
    rng = np.random.default_rng(number)
    values = rng.normal(size=(8, features)).astype(np.float32)
    targets = np.arange(8) % 2
    return LocalPopulation(
        name="made up",
        train=Records(
            features=values,
            targets=targets,
            silo=np.full(8, number, dtype=np.int32),
            user=np.arange(8, dtype=np.int32),
        ),
        test_features=values,
        test_targets=targets,
        n_users=8,
        silo_names=names,
        task="classification",
        n_classes=2,
    )


def _made_up(folder: Path, *, silos: int, features: int, protection: str) -> World:
    names = tuple(f"silo{number}" for number in range(silos))
    return World(
        folder, _experiment(protection), [_share(names, number, features) for number in range(silos)]
    )


def _experiment(protection: str) -> Experiment:
    document = {
        "name": "benchmark",
        "rounds": _ROUNDS,
        "evaluate_every": _ROUNDS,
        "data": {"name": "digits", "n_users": 8, "n_silos": 4},
        "model": {"name": "linear", "loss": "binary_cross_entropy"},
        "local": {"learning_rate": 0.1},
        "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 5.0},
        "protection": {"name": protection},
    }
    return parse(document, "benchmark")


def _bytes(protection: str, features: int = 10_000) -> Row:
    """Compare the messages with what must pass: the model down, and a sum (or masked sum, and a seed) up."""
    silos = 4
    with tempfile.TemporaryDirectory() as folder:
        world = _made_up(Path(folder), silos=silos, features=features, protection=protection)
        world.play()
        length = features + 1
        needed = 4 * length + 8 * length
        if isinstance(world.agreed, MaskedSumSpec):
            needed = 4 * length + world.agreed.word_bytes * length + 32
        ratio = world.sent / (_ROUNDS * silos * needed)
    return at_most(f"bytes of messages over the protocol's, {protection}, d = {length}", "ratio", ratio, 1.1)


def _many(silos: int) -> Iterator[Row]:
    begin = time.perf_counter()
    _play(silos)()
    seconds = time.perf_counter() - begin
    yield Row(case=f"{silos} silos in one process", unit="rounds/min", ours=60 * _ROUNDS / seconds)
    yield Row(
        case=f"{silos} silos in one process, all parties",
        unit="MB",
        ours=extra_peak_megabytes(_play, silos),
    )


def _play(silos: int) -> Callable[[], object]:
    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _made_up(Path(folder), silos=silos, features=100, protection="secure-aggregation").play()

    return work


def _as_processes(rounds: int = 50) -> Iterator[Row]:
    """Time runs of four silos, all parties as processes; yield medians over the runs."""
    played = [_run_of_processes(rounds) for _ in range(_RUNS)]
    a_round, seconds, spent = (float(np.median(found)) for found in zip(*played, strict=True))
    yield Row(case="4 silos over TLS, secure aggregation: a round, median", unit="s", ours=a_round)
    case = f"{rounds} rounds of it, from submission to the signed end, median of {_RUNS} runs"
    yield at_most(case, "s", seconds, 10.0)
    yield Row(case="the same, all ten processes", unit="CPU s", ours=spent)


def _run_of_processes(rounds: int) -> tuple[float, float, float]:
    """Return the median time of a round, the time of the run, and the processor time of all processes (s)."""
    with tempfile.TemporaryDirectory() as name:
        made = write_demonstration(Path(name) / "demo", rounds=rounds, port=free_port())
        home = CoordinatorFolder(made.provisioned.coordinator)
        with served(made) as coordinator:
            silos = [
                subprocess.Popen(
                    [sys.executable, "-m", "fedveil", "silo", "serve", str(SiloFolder(path).path)],
                    stdout=sys.stderr,
                )
                for path in made.provisioned.silos
            ]
            try:
                for path in made.provisioned.silos:
                    wait_for(path / "run" / KEY_PROCESS)
                run = create_run(home, read_document(made.experiment, home))
                roots = [coordinator.pid, *(process.pid for process in silos)]
                spent, began = _cpu_seconds(roots), time.perf_counter()
                queued = sum(map(queued_seconds_of, tree_of(coordinator.pid)))
                with Submission(home, run.path):
                    wait_for(run / END)
                seconds = time.perf_counter() - began
                spent = _cpu_seconds(roots) - spent
                queued = sum(map(queued_seconds_of, tree_of(coordinator.pid))) - queued
                lines = (run / "metrics.jsonl").read_text().splitlines()
            finally:
                coordinator.terminate()
                for process in silos:
                    process.terminate()
                for process in silos:
                    process.wait()
    taken = [float(json.loads(line)["seconds"]) for line in lines[2:]]
    # A slow run on a busy machine shows in the wait for a processor, and one of a slow network in its longest round.
    print(
        f"{rounds} rounds: {seconds:.2f} s, {spent:.2f} CPU s; the coordinator waited {queued:.2f} s for a processor; "
        f"longest round after the first {max(taken):.2f} s; load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )
    return float(np.median(taken)), seconds, spent


def _cpu_seconds(roots: Sequence[int]) -> float:
    """Return the processor time of some processes and of all that they have started."""
    return sum(cpu_seconds_of(process) for root in roots for process in tree_of(root))
