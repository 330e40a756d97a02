"""Private weighting between institutions: four hospitals of HeartDisease, 50 rounds of uldp-avg-w, Paillier.

Messages against what is in them, all parties in one process, after the setup: HeartDisease, and 10,001 parameters under
ring-LWE. Not with ``--quick``: a coordinator and four silos as processes under TLS on this host; the time of an
exchange, every byte between silos and coordinator, counted by relays, and the time of as many rounds under secure
aggregation.
"""

from __future__ import annotations

import csv
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from benchmarks.federation import World
from benchmarks.harness import Row, at_most
from benchmarks.silo_threads import wait_for
from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.records import Population, Records
from fedveil.federation.enrollment.demonstration import Provisioned, provision
from fedveil.federation.enrollment.joining import DraftedPolicy
from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
from fedveil.federation.hosts.sockets import END, SOCKET, free_port
from fedveil.federation.hosts.submission import Submission, read_document
from fedveil.federation.silo_data import LocalPopulation
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.folder.run_folder import RunFolder

_ROUNDS = 50
_EXCHANGES = 2  # of a round: the encrypted sums, and the own masks
_PAILLIER: dict[str, object] = {"name": "private-weighting", "n_max": 200}
_RING: dict[str, object] = {"name": "private-weighting", "n_max": 64, "cipher": "rlwe"}
_MASKS: dict[str, object] = {"name": "secure-aggregation"}
_BOUND = 16.0  # no standardised feature is beyond


def rows(quick: bool) -> Iterator[Row]:
    """Measure; see the module's text."""
    hospitals = load("heart_disease", allocation=Allocation(law="zipf"), n_users=50)
    yield _bytes("HeartDisease, d = 14, Paillier", _experiment(3, _PAILLIER), hospitals)
    yield _bytes("made up, d = 10001, ring-LWE", _experiment(3, _RING), _made_up(10_000))
    if not quick:
        yield from over_tls(hospitals, _ROUNDS)
        yield from large_over_tls(10_000, 3)


def smallest() -> Iterator[Row]:
    """Play two rounds of a small made-up model in one process."""
    yield _bytes("made up, d = 11, ring-LWE", _experiment(2, _RING), _made_up(10, silos=2, users=2))


def _experiment(rounds: int, protection: dict[str, object], **data: object) -> Experiment:
    document = {
        "name": str(protection["name"]),
        "rounds": rounds,
        "evaluate_every": rounds,
        "data": data or {"name": "digits", "n_users": 8, "n_silos": 4},
        "model": {"name": "linear", "loss": "binary_cross_entropy"},
        "local": {"learning_rate": 0.001, "epochs": 50, "batch_size": 4},
        "method": {
            "name": "uldp-avg" if protection == _MASKS else "uldp-avg-w",
            "clip": 0.1,
            "noise_multiplier": 5.0,
        },
        "server": {"learning_rate": 2.5},
        "protection": protection,
    }
    return parse(document, "benchmark")


def _made_up(features: int, silos: int = 4, users: int = 8) -> Population:
    rng, count = np.random.default_rng(1), silos * users
    return Population(
        name="made up",
        train=Records(
            features=rng.normal(size=(count, features)).astype(np.float32),
            targets=np.arange(count) % 2,
            silo=np.repeat(np.arange(silos), users).astype(np.int32),
            user=np.tile(np.arange(users), silos).astype(np.int32),
        ),
        test_features=rng.normal(size=(4, features)).astype(np.float32),
        test_targets=np.arange(4) % 2,
        n_users=users,
        silo_names=tuple(f"silo{number}" for number in range(silos)),
        task="classification",
        n_classes=2,
    )


def _shares(whole: Population) -> list[LocalPopulation]:
    kept = {one.name: getattr(whole, one.name) for one in fields(whole) if one.name != "train"}
    silos = range(len(whole.silo_names))
    return [
        LocalPopulation(train=whole.train.select(np.flatnonzero(whole.train.silo == silo)), **kept)
        for silo in silos
    ]


def _bytes(case: str, experiment: Experiment, whole: Population) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), experiment, _shares(whole))
        world.play()
    (first, inside), (last, within) = world.marks[0], world.marks[-1]
    return at_most(
        f"bytes of messages over their content, {case}", "ratio", (last - first) / (within - inside), 1.1
    )


class _Relay:
    """Passes bytes on from one port of this host to another, and counts them."""

    def __init__(self, target: int) -> None:
        self._target, self._socket = target, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self.bytes = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._socket.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.bytes += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()


class _Federation:
    """A coordinator and silos as processes over a population's records, each silo behind a relay that counts.

    Args:
        folder: of all files.
        population: whose records become the silos' tables.
    """

    def __init__(self, folder: Path, population: Population) -> None:
        self._folder, self._population = folder, population
        self._founded, self._relays = _found(folder, population)
        self._home = CoordinatorFolder(self._founded.coordinator)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Federation:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "fedveil", "coordinator", "serve", str(self._home.path)],
                stdout=sys.stderr,
            )
        ]
        wait_for(self._home / "run" / SOCKET)
        self._processes += [
            subprocess.Popen([sys.executable, "-m", "fedveil", "silo", "serve", str(path)], stdout=sys.stderr)
            for path in self._founded.silos
        ]
        for path in self._founded.silos:
            wait_for(path / "run" / "guard")
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()

    @property
    def bytes(self) -> int:
        """All bytes that have passed so far, both ways."""
        return sum(relay.bytes for relay in self._relays)

    def play(self, rounds: int, protection: dict[str, object]) -> list[tuple[float, int]]:
        """Play a run; return the moment at which each round was complete, and the bytes that had passed."""
        names = self._population.silo_names
        files = {"files": [f"{name}.csv" for name in names], "test_file": "test.csv"}
        experiment = _experiment(rounds, protection, table={"schema_file": "schema.toml", **files})
        (self._folder / "experiment.toml").write_text(experiment.to_toml(), encoding="utf-8")
        read = read_document(self._folder / "experiment.toml", self._home)
        run = RunFolder.create(self._home / "runs", read)
        moments: list[tuple[float, int]] = []
        path = run / "metrics.jsonl"
        with Submission(self._home, run.path) as submission:
            while submission.lasts(0.05):
                done = max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0
                while len(moments) < done:
                    moments.append((time.monotonic(), self.bytes))
        error = json.loads((run / END).read_bytes())["error"]
        if error is not None or len(moments) < 2:
            raise RuntimeError(f"the run of {rounds} rounds ended after {len(moments)}: {error}")
        return moments


def over_tls(hospitals: Population, rounds: int) -> Iterator[Row]:
    """Time and count the exchanges of a run.

    Args:
        hospitals: whose records become the silos' tables.
        rounds: of the run; from the end of the first on.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _Federation(folder, hospitals) as federation:
            passed = federation.bytes
            time.sleep(20)
            idle = (federation.bytes - passed) / 20
            moments = federation.play(rounds, _PAILLIER)
            began = time.monotonic()
            masked = federation.play(rounds, _MASKS)[-1][0] - began
    (begin, before), (end, after) = moments[0], moments[-1]
    seconds = (end - begin) / (len(moments) - 1) / _EXCHANGES
    yield Row(case=f"an exchange of {len(moments) - 1} rounds over TLS", unit="s", ours=seconds)
    yield from _wire("HeartDisease, d = 14", (after - before) / (len(moments) - 1), hospitals, _PAILLIER)
    yield at_most(
        f"{rounds} rounds of uldp-avg under secure aggregation, from submission on", "s", masked, 60.0
    )
    yield Row(case="bytes a second on the wire without a run, four silos", unit="B/s", ours=idle)


def large_over_tls(features: int, rounds: int) -> Iterator[Row]:
    """Count the bytes of a larger model under ring-LWE.

    Args:
        features: d - 1.
        rounds: of the run; from the end of the first on.
    """
    population = _made_up(features)
    with tempfile.TemporaryDirectory() as name, _Federation(Path(name), population) as federation:
        moments = federation.play(rounds, _RING)
    wire = (moments[-1][1] - moments[0][1]) / (len(moments) - 1)
    yield from _wire(f"made up, d = {features + 1}, ring-LWE", wire, population, _RING)


def _wire(case: str, wire: float, population: Population, protection: dict[str, object]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name), _experiment(2, protection), _shares(population))
        world.play()
    content = world.marks[1][1] - world.marks[0][1]
    yield Row(case=f"bytes a round of model and protocol, four silos, {case}", unit="B", ours=content)
    yield Row(case=f"bytes a round on the wire, four silos, {case}", unit="B", ours=wire)
    yield at_most(f"bytes on the wire over model and protocol, {case}", "ratio", wire / content, 1.1)


def _found(folder: Path, hospitals: Population) -> tuple[Provisioned, list[_Relay]]:
    """Write tables, create a federation over them, and put a relay before the coordinator for each silo."""
    names = hospitals.silo_names
    (folder / "schema.toml").write_text(_schema(hospitals), encoding="utf-8")
    for number, name in enumerate(names):
        own = hospitals.train.select(np.flatnonzero(hospitals.train.silo == number))
        _write(folder / f"{name}.csv", own.features, own.targets, own.user)
    test = hospitals.test_features, hospitals.test_targets
    _write(folder / "test.csv", *test, np.zeros(len(test[1]), dtype=np.int32))
    port = free_port()
    founded = provision(
        folder / "federation",
        names,
        schema=folder / "schema.toml",
        port=port,
        policy=DraftedPolicy(epsilon=50.0),
    )
    relays = []
    for path in founded.silos:
        relays.append(_Relay(port))
        settings = SiloFolder(path).settings
        settings.model_copy(
            update={
                "table": folder / f"{settings.name}.csv",
                "coordinator": f"127.0.0.1:{relays[-1].port}",
            }
        ).write(path / "silo.toml")
        policy = path / "policy.toml"
        policy.write_text(
            policy.read_text().replace('"secure-aggregation"]', '"secure-aggregation", "private-weighting"]')
        )
    return founded, relays


def _schema(hospitals: Population) -> str:
    lines = [f"n_users = {hospitals.n_users}", 'user = "user"', "", "[target]", 'kind = "label"']
    lines += ['column = "sick"', 'classes = ["no", "yes"]', "", "[features]"]
    columns = range(hospitals.train.features.shape[1])
    lines += [f'x{j} = {{ kind = "number", lower = {-_BOUND}, upper = {_BOUND} }}' for j in columns]
    return "\n".join(lines) + "\n"


def _write(path: Path, features: np.ndarray, targets: np.ndarray, users: np.ndarray) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["user", *(f"x{j}" for j in range(features.shape[1])), "sick"])
        for row, target, user in zip(features.tolist(), targets.tolist(), users.tolist(), strict=True):
            table.writerow([user, *row, ("no", "yes")[target]])
