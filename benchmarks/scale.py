"""Large models, many users, and noise: CPU seconds of one thread, and memory.

A round of a network of three linear layers (20 contributions of 2 records, 2 epochs, bounds, sums and noise included)
is compared with the plain PyTorch loop, which draws torch's normal noise; each is played in a process of its own, since
the loop takes half as long where it reuses the memory that our rounds freed. Memory is the rise of a fresh process's
peak above its peak with the libraries and the data loaded. Noise is the exact discrete Gaussian; its peer takes every
random word from the operating system. A population has 5 records of 16 features a user, in 5 silos.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch import nn

import fedveil as fv
from benchmarks.harness import (
    Row,
    at_most,
    compared,
    cpu_seconds,
    extra_peak_megabytes,
    fresh_cpu_seconds,
)
from benchmarks.peers import plain_loop
from fedveil.data.column_files import FOLDER_VARIABLE
from fedveil.data.records import Affine, Records
from fedveil.methods.dp_fed_ls import dp_fed_ls
from fedveil.privacy.noise import DiscreteGaussian
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.rounds.round_context import RoundContext, TrainingSetup
from fedveil.run.simulation import play_round
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort
from fedveil.training.trainer_choice import choose_trainer

FEATURES, PER_USER, SILOS = 64, 2, 5
LOCAL = LocalSgd(learning_rate=0.1, epochs=2)
LAW = DiscreteGaussian(std=5.0, grid=2.0**-27)
MODELS = {3100: (20, 1200.0), 7000: (4, 5700.0)}
"""Users, and the memory that a round may take in MB, by the width of the network's layers."""


def rows(quick: bool) -> Iterator[Row]:
    """Yield noise, rounds of 10M and 50M parameters, and populations; ``quick`` takes smaller ones."""
    torch.set_num_threads(1)
    yield from _noise(10**5 if quick else 10**6, 9)
    for width, (users, most) in {1000: (20, 300.0)}.items() if quick else MODELS.items():
        yield from _rounds(width, users, most)
    yield from _population(100_000 if quick else 1_000_000)
    most = 300_000 if quick else 3_000_000
    few, many = (_table_megabytes(count) for count in (most // 3, most))
    # The difference of two sizes leaves out what does not grow with the table.
    grown = 1e6 * (many - few) / (most - most // 3)
    case = f"a table of {most:,} records in Parquet, columns in files, 3 rounds of newton: memory of a record"
    yield at_most(case, "bytes", grown, 100.0)


def smallest() -> Iterator[Row]:
    """Yield noise and a round of a few parameters, and a population of a few users."""
    yield from _noise(100, 1)
    task, setting = _setting(8, 3)
    ours, peer = cpu_seconds(_round(task, setting), _plain(task, setting), repeats=1)
    yield compared("a small network: a round", "rounds/s", 1 / ours, 1 / peer, None)
    yield from _population(20)
    with TemporaryDirectory() as folder:
        _write_tables(Path(folder), 200, 20)
        (seconds,) = cpu_seconds(_table_run(folder), repeats=1)
    yield Row(case="a table in Parquet, 3 rounds", unit="CPU s", ours=seconds)


def _noise(count: int, repeats: int) -> Iterator[Row]:
    keyed = PrivacyRandomness.system()
    ours, peer, continuous = cpu_seconds(
        lambda: LAW.sample_units((count,), keyed.stream("noise", 1)),
        lambda: LAW.sample_units((count,), _OperatingSystem()),
        lambda: np.random.default_rng(1).normal(size=count),
        repeats=repeats,
    )
    yield compared(f"noise of {count:,} values", "M values/s", count / ours / 1e6, count / peer / 1e6, None)
    case = f"{count:,} values; peer: numpy's normal, neither exact nor secret"
    yield compared(case, "M values/s", count / ours / 1e6, count / continuous / 1e6, None)


class _OperatingSystem:
    """Words of the system's generator, one by one."""

    def uint64(self, count: int) -> np.ndarray:
        return np.frombuffer(os.urandom(8 * count), dtype="<u8")


def _rounds(width: int, users: int, most: float) -> Iterator[Row]:
    task, _ = _setting(width, users)
    ours = fresh_cpu_seconds(_round_of, width, users, repeats=3)
    peer = fresh_cpu_seconds(_loop_of, width, users, repeats=3)
    case = f"{task.dimension:,} parameters, {users} users: a round"
    yield compared(f"{case}; peer: plain loop", "rounds/s", 1 / ours, 1 / peer, 1 / 1.5)
    megabytes = extra_peak_megabytes(_prepared_round, width, users)
    yield at_most(f"{case}, extra peak memory, preparation included", "MB", megabytes, most)


def _population(users: int) -> Iterator[Row]:
    random, count = np.random.default_rng(0), 5 * users
    features = random.normal(size=(count, 16)).astype(np.float32)
    targets, silo = random.integers(0, 10, count), random.integers(0, SILOS, count)
    build = partial(
        fv.population,
        features=features,
        targets=targets,
        user=np.repeat(np.arange(users), 5),
        silo=silo,
        n_users=users,
        silos=list(range(SILOS)),
        classes=list(range(10)),
        task="classification",
    )
    (seconds,) = cpu_seconds(build, repeats=1)
    yield at_most(f"a population of {users:,} users, {count:,} records", "CPU s", seconds, 12.0)


def _table_megabytes(records: int) -> float:
    """Return the extra peak memory of a run over tables that another process has written."""
    with TemporaryDirectory() as folder:
        _write_tables(Path(folder), records, 20_000)
        return extra_peak_megabytes(_table_run, folder)


def _write_tables(place: Path, records: int, users: int) -> None:
    """Write tables of two silos with 8 numbers a record, and their schema."""
    features = [f"x{number}" for number in range(8)]
    for silo in ("north", "south"):
        random = np.random.default_rng(len(silo))
        columns = {name: random.normal(size=records // 2).astype(np.float32) for name in features}
        labels = {"who": random.integers(0, users, records // 2), "sick": random.integers(0, 2, records // 2)}
        parquet.write_table(
            pyarrow.table(labels | columns), place / f"{silo}.parquet", row_group_size=1 << 16
        )
    target = '[target]\nkind = "label"\ncolumn = "sick"\nclasses = ["0", "1"]\n'
    kinds = "".join(f'[features.{name}]\nkind = "number"\nlower = -5.0\nupper = 5.0\n' for name in features)
    (place / "schema.toml").write_text(f'n_users = {users}\nuser = "who"\n{target}{kinds}')


def _table_run(folder: str) -> Callable[[], object]:
    """Return a call that reads the tables of a folder, with columns in files, and trains on them."""
    place = Path(folder)

    def call() -> object:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            people = fv.tables(place / "schema.toml", [place / "north.parquet", place / "south.parquet"])
            return fv.train(
                "whitened-linear",
                people,
                loss="binary_cross_entropy",
                method=fv.newton(),
                epsilon=2.0,
                rounds=3,
                folder=place / "runs",
            )
        finally:
            del os.environ[FOLDER_VARIABLE]

    return call


def _setting(width: int, users: int) -> tuple[Task, TrainingSetup]:
    """Return a network of three linear layers, and clients with made-up records."""
    random = np.random.default_rng(0)
    user = np.repeat(np.arange(users, dtype=np.int32), PER_USER)
    records = Records(
        features=random.normal(size=(len(user), FEATURES)).astype(np.float32),
        targets=random.integers(0, 10, len(user)),
        silo=np.zeros_like(user),
        user=user,
    )
    groups = records.by_silo_user()
    cohort = Cohort.from_records(
        records, groups=groups, n_silos=1, scale=Affine(), device=torch.device("cpu")
    )
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    task = Task(model=nn.Sequential(*layers), loss=load_loss("cross_entropy"))
    method = dp_fed_ls(
        local=LOCAL,
        n_users=users,
        clip=0.3,
        noise_multiplier=1.0,
        smoothing=0.0,
        client_sampling="uniform",
        client_sampling_rate=1.0,
    )
    trainer = choose_trainer(task, LOCAL, cohort=cohort, bound=method.bound)
    return task, TrainingSetup(
        method=method,
        trainer=trainer,
        cohort=cohort,
        weights=method.weights.for_groups(groups, 1, users),
        n_users=users,
        shapes=tuple(tuple(shape) for shape in task.layout.shapes),
    )


def _round(task: Task, setting: TrainingSetup) -> Callable[[], object]:
    turn = RoundContext(
        setting=setting,
        model=task.initial(),
        round_number=1,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.system(),
    )
    return partial(play_round, turn)


def _plain(task: Task, setting: TrainingSetup) -> Callable[[], object]:
    loop = plain_loop(task, LOCAL, setting.cohort, torch.arange(len(setting.cohort.groups)))
    return lambda: loop().add_(torch.randn(1, task.dimension))  # type: ignore[attr-defined]


def _round_of(width: int, users: int) -> Callable[[], object]:
    """Return a call that plays a round."""
    return _round(*_setting(width, users))


def _loop_of(width: int, users: int) -> Callable[[], object]:
    """Return a call that plays the plain loop."""
    return _plain(*_setting(width, users))


def _prepared_round(width: int, users: int) -> Callable[[], object]:
    """Return a call that prepares a round and plays it."""
    return lambda: _round_of(width, users)()
