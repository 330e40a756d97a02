"""Local training: 2,000 (silo, user) pairs of 1 + Poisson(5) records, 2 local epochs, CPU time of one thread.

Ours is the vectorised trainer, bounds and sums included; the peer is the plain PyTorch loop that most
frameworks run: ``load_state_dict``, ``torch.optim.SGD``, clip, add. Memory is the rise of a fresh process's
peak above its peak with the data loaded, at 2,000 and at 8,000 pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.harness import Row, at_most, compared, cpu_seconds, extra_peak_megabytes
from fedveil.local.losses import load_loss
from fedveil.local.models import build_model
from fedveil.local.steps import LocalSgd
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort
from fedveil.local.vectorized import VmapTrainer
from fedveil.population.records import Affine, Records
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness

PAIRS = 2_000
SILOS = 5
CLIP = Clip(norm=0.1)
LOCAL = LocalSgd(learning_rate=0.1, epochs=2)
MODELS = {
    "linear": ("logistic regression, 7,850 parameters", 5.5),
    "mlp": ("MLP, 25,450 parameters", 4.0),
    "cnn": ("CNN, 21,840 parameters", 2.4),
}
COMPILED = {"linear": 9.0, "mlp": 7.0}
LARGEST_MEMORY = 300.0


def rows(quick: bool) -> Iterator[Row]:
    """Yield speed, compiled speed and memory; ``quick`` takes fewer pairs and leaves compilation out."""
    torch.set_num_threads(1)
    pairs, repeats = (200, 3) if quick else (PAIRS, 5)
    for model, (named, target) in MODELS.items():
        ours, peer = cpu_seconds(vectorised(model, pairs), plain_loop(model, pairs), repeats=repeats)
        yield compared(f"vectorised: {named}", "pairs/s", pairs / ours, pairs / peer, target)
    for model, target in {} if quick else COMPILED.items():
        ours, peer = cpu_seconds(vectorised(model, pairs, True), plain_loop(model, pairs), repeats=repeats)
        yield compared(f"compiled: {MODELS[model][0]}", "pairs/s", pairs / ours, pairs / peer, target)
    for model, (named, _) in MODELS.items():
        for count in (pairs,) if quick else (pairs, 4 * pairs):
            megabytes = extra_peak_megabytes(vectorised, model, count)
            yield at_most(f"extra peak memory, {count:,} pairs: {named}", "MB", megabytes, LARGEST_MEMORY)


def cohort_of(pairs: int) -> Cohort:
    """Make image-shaped records for this many (silo, user) pairs."""
    rng = np.random.default_rng(0)
    sizes = 1 + rng.poisson(5, pairs)
    user = np.repeat(np.arange(pairs, dtype=np.int32), sizes)
    records = Records(
        features=rng.normal(size=(len(user), 28, 28)).astype(np.float32),
        targets=rng.integers(0, 10, len(user)),
        silo=user % np.int32(SILOS),
        user=user,
    )
    return Cohort.of(
        records,
        groups=records.by_silo_user(),
        n_silos=SILOS,
        scale=Affine(),
        device=torch.device("cpu"),
    )


def _task_of(model: str) -> Task:
    built = build_model(model, input_shape=(28, 28), n_outputs=10, randomness=ExperimentRandomness(0))
    return Task(model=built, loss=load_loss("cross_entropy"))


def vectorised(model: str, pairs: int, compile: bool = False) -> Callable[[], object]:
    """Return a round of the vectorised trainer."""
    task, cohort = _task_of(model), cohort_of(pairs)
    trainer = VmapTrainer(task=task, local=LOCAL, compile=compile)
    weights = torch.ones(pairs, dtype=torch.float64)
    return partial(
        trainer.sums,
        task.initial(),
        cohort,
        torch.arange(pairs),
        weights,
        CLIP,
        ExperimentRandomness(0),
        ("round", 1),
    )


def plain_loop(model: str, pairs: int) -> Callable[[], object]:
    """Return the same round as plain PyTorch code: one module, one optimiser per pair, the sums of the silos."""
    network = build_model(model, input_shape=(28, 28), n_outputs=10, randomness=ExperimentRandomness(0))
    cohort = cohort_of(pairs)
    loss = torch.nn.CrossEntropyLoss()
    start = copy.deepcopy(network.state_dict())
    first = torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()

    def one_round() -> object:
        totals = torch.zeros(SILOS, len(first))
        for pair in range(pairs):
            held = torch.from_numpy(cohort.groups.members(pair))
            features, targets = cohort.features[held], cohort.targets[held]
            network.load_state_dict(start)
            optimizer = torch.optim.SGD(network.parameters(), lr=LOCAL.learning_rate)
            for _ in range(LOCAL.epochs):
                optimizer.zero_grad()
                loss(network(features), targets).backward()
                optimizer.step()
            with torch.no_grad():
                delta = torch.nn.utils.parameters_to_vector(network.parameters()) - first
                totals[cohort.groups.silo[pair]] += delta * min(1.0, CLIP.norm / float(delta.norm()))
        return totals

    return one_round
