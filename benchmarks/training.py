"""Local training, CPU time of one thread, bounds and sums included, against the plain PyTorch loop in the same run.

First 2,000 (silo, user) pairs of 1 + Poisson(5) records and 2 local epochs under the vectorised trainer, either side in
a process of its own, then linear models in the span of their records, then the published rounds of the MNIST network.
Memory is the rise of a fresh process's peak above its peak with the data loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from benchmarks import training_linear
from benchmarks.harness import (
    Row,
    at_most,
    compared,
    cpu_seconds,
    extra_peak_megabytes,
    fresh_cpu_seconds,
)
from benchmarks.peers import CLIP, plain_loop, synthetic
from fedveil.data.catalogue import Allocation, catalogue, load
from fedveil.randomness import ExperimentRandomness
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trainer_choice import choose_trainer
from fedveil.training.vectorized import VmapTrainer

PAIRS = 2_000
LOCAL = LocalSgd(learning_rate=0.1, epochs=2)
MODELS = {
    "linear": ("logistic regression, 7,850 parameters", 5.5),
    "mlp": ("MLP, 25,450 parameters", 4.0),
    "cnn": ("CNN, 21,840 parameters", 2.4),
}
COMPILED = {"linear": 9.0, "mlp": 7.0}
LARGEST_MEMORY = 300.0


def rows(quick: bool) -> Iterator[Row]:
    """Yield speed, compiled speed, memory and published rounds; ``quick`` takes fewer pairs and leaves out the long."""
    torch.set_num_threads(1)
    pairs, repeats = (200, 3) if quick else (PAIRS, 5)
    yield from side_by_side(pairs, repeats)
    if not quick:
        yield from compiled(pairs, repeats)
    for model, (named, _) in MODELS.items():
        for count in (pairs,) if quick else (pairs, 4 * pairs):
            megabytes = extra_peak_megabytes(vectorised, model, count)
            yield at_most(f"extra peak memory, {count:,} pairs: {named}", "MB", megabytes, LARGEST_MEMORY)
    yield from training_linear.rows(quick)
    if not quick and any(entry.name == "mnist" and entry.present for entry in catalogue()):
        yield from _published_rounds()


def smallest() -> Iterator[Row]:
    """Yield the speed of few pairs."""
    yield from side_by_side(4, 1, fresh=False)
    yield from training_linear.smallest()


def side_by_side(pairs: int, repeats: int, *, fresh: bool = True) -> Iterator[Row]:
    """Yield the speed of every model, its pairs trained side by side.

    Args:
        pairs: number of (silo, user) pairs.
        repeats: number of timed calls.
        fresh: whether each side has a process of its own; in one process the loop reuses memory that ours freed.
    """
    for model, (named, target) in MODELS.items():
        if fresh:
            ours, peer = (fresh_cpu_seconds(of, model, pairs, repeats=repeats) for of in (vectorised, plain))
        else:
            ours, peer = cpu_seconds(vectorised(model, pairs), plain(model, pairs), repeats=repeats)
        yield compared(f"vectorised: {named}", "pairs/s", pairs / ours, pairs / peer, target)


def compiled(pairs: int, repeats: int) -> Iterator[Row]:
    """Yield the speed of compiled models."""
    for model, target in COMPILED.items():
        ours, peer = cpu_seconds(vectorised(model, pairs, True), plain(model, pairs), repeats=repeats)
        yield compared(f"compiled: {MODELS[model][0]}", "pairs/s", pairs / ours, pairs / peer, target)


def _published_rounds() -> Iterator[Row]:
    """Yield one round of the MNIST network, zipf, Q = 50: by records at fewer epochs, and the full settings."""
    once = LocalSgd(learning_rate=0.01, epochs=1, batch_size=64)
    for users in (1_000, 3_000, 10_000):
        seconds, steps, _ = _mnist_round(users, once)
        yield Row(case=f"MNIST CNN, {users:,} users, Q = 1: a round", unit="CPU-s", ours=seconds)
        yield Row(
            case=f"MNIST CNN, {users:,} users, Q = 1: a step", unit="CPU-ms", ours=1e3 * seconds / steps
        )
    full = LocalSgd(learning_rate=0.01, epochs=50, batch_size=64)
    seconds, _, _ = _mnist_round(100, full)
    yield at_most("MNIST CNN, 100 users, Q = 50: a round", "CPU-s", seconds, 348.0)
    cores = os.cpu_count() or 1
    wall, seconds = _mnist_wall(10_000, full, cores)
    named = f"MNIST CNN, 10,000 users, Q = 50: a round in {cores} processes"
    yield at_most(named, "s", wall, 480.0)
    yield Row(case=f"{named}, the slowest", unit="CPU-s", ours=seconds)


def _mnist_wall(n_users: int, local: LocalSgd, processes: int) -> tuple[float, float]:
    """Return wall and CPU seconds of the slowest of some processes to which a round's contributions are dealt out."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_mnist_round, n_users, local, index, processes) for index in range(processes)]
        done = [share.result() for share in shares]
    return max(wall for _, _, wall in done), max(cpu for cpu, _, _ in done)


def _mnist_round(
    n_users: int, local: LocalSgd, index: int = 0, processes: int = 1
) -> tuple[float, int, float]:
    """Return CPU seconds, local steps and wall seconds of one round, or of one process's share of it."""
    torch.set_num_threads(1)
    population = load("mnist", n_users=n_users, allocation=Allocation(law="zipf"))
    records = population.train
    groups = records.by_silo_user()
    cohort = Cohort.from_records(
        records,
        groups=groups,
        n_silos=population.n_silos,
        scale=population.scale,
        device=torch.device("cpu"),
    )
    model = build_model(
        "cnn", input_shape=population.feature_shape, n_outputs=10, randomness=ExperimentRandomness(0)
    )
    task = Task(model=model, loss=load_loss("cross_entropy"))
    trainer = choose_trainer(task, local, cohort=cohort)
    members = torch.arange(len(groups))[index::processes]
    weights = torch.ones(len(members), dtype=torch.float64)
    cpu, wall = time.process_time(), time.perf_counter()
    sums = trainer.sums(
        TrainJob(task.initial(), cohort, members, weights, CLIP, ExperimentRandomness(0), ("round", 1))
    )
    return time.process_time() - cpu, sums.steps, time.perf_counter() - wall


def _task(model: str) -> Task:
    built = build_model(model, input_shape=(28, 28), n_outputs=10, randomness=ExperimentRandomness(0))
    return Task(model=built, loss=load_loss("cross_entropy"))


def vectorised(model: str, pairs: int, compile: bool = False) -> Callable[[], object]:
    """Return a round of the vectorised trainer."""
    task, cohort = _task(model), synthetic(pairs)
    everybody, ones = torch.arange(pairs), torch.ones(pairs, dtype=torch.float64)
    job = TrainJob(task.initial(), cohort, everybody, ones, CLIP, ExperimentRandomness(0), ("round", 1))
    return partial(VmapTrainer(task=task, local=LOCAL, compile=compile).sums, job)


def plain(model: str, pairs: int) -> Callable[[], object]:
    """Return the same round as plain PyTorch code."""
    return plain_loop(_task(model), LOCAL, synthetic(pairs), torch.arange(pairs))
