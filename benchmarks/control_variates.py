"""What SCAFFOLD's control variates cost under user-level noise, beside plain local steps and FedProx.

Option II of SCAFFOLD (Karimireddy et al. 2020) for pairs (silo, user) that all take part and take K steps at rate eta:

    direction g - c_i + c,    c_i <- c_i - c - Delta_i / (K eta),    c <- mean of c_i

Delta_i is the CLIPPED update. With c = mean of c_i, the new mean is -mean Delta_i / (K eta): the server computes c from
the released mean, and a pair sends its update alone. The bound of a user and the event are those of plain local steps,
and so is epsilon. What c costs is accuracy: it is the last released mean with all of its noise, and enters every step.

Digits, softmax regression from zero, one pair a user, 30 rounds, 10 full-batch steps by the rule of local rates, noise
of the multiplier that epsilon 5 needs, EMA(0.8) of the models. Without noise (the last rows) control variates do work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Row
from fedveil.config_keys import Positive
from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.records import Population
from fedveil.methods.weights import Weights
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness
from fedveil.training.local_algorithms import FedProx, LocalAlgorithm, LocalState, PlainSgd, Tensors
from fedveil.training.losses import load_loss
from fedveil.training.metrics import accuracy
from fedveil.training.models import STARTS, build_model
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.vectorized import VmapTrainer

EPSILON: Final = 5.0
CLIP: Final = 0.1
RATE: Final = 1 / (0.09 * 65)
STEPS: Final = 10


@dataclass(frozen=True, kw_only=True)
class ControlVariates(LocalAlgorithm):
    """SCAFFOLD, option II, from the clipped update.

    Attributes:
        scale: factor of the correction; 1 is the paper's.
    """

    keeps: ClassVar[bool] = True

    scale: Positive = 1.0

    def slope(self, gradient: Tensor, at: Tensor, state: LocalState) -> Tensor:
        """Return g - c_i + c."""
        return gradient + self.scale * (state.broadcast["control"] - state.kept["control"])

    def begin(self, dimension: int) -> Tensors:
        """Return c_i = 0."""
        return {"control": torch.zeros(dimension)}

    def finish(self, sent: Tensor, state: LocalState) -> Tensors:
        """Return c_i - c - Delta_i / (K eta)."""
        return {"control": state.kept["control"] - state.broadcast["control"] - sent / state.rate_sum}

    def begin_server(self, dimension: int) -> Tensors:
        """Return c = 0."""
        return {"control": torch.zeros(dimension)}

    def step_server(self, mean: Tensor, state: LocalState) -> Tensors:
        """Return -mean Delta_i / (K eta), a function of the released mean alone."""
        return {"control": (-mean / state.rate_sum).float()}


ALGORITHMS: Final[dict[str, LocalAlgorithm]] = {
    "plain": PlainSgd(),
    "FedProx(1)": FedProx(mu=1.0),
    "control variates": ControlVariates(),
}


def rows(quick: bool) -> Iterator[Row]:
    """Train 100 and 1,000 users on five seeds (two with ``quick``)."""
    yield from compared((100, 1000), range(20, 22 if quick else 25), 30)


def smallest() -> Iterator[Row]:
    """Train 20 users for two rounds on two seeds."""
    yield from compared((20,), range(20, 22), 2)


def compared(users: Sequence[int], seeds: Sequence[int], rounds: int) -> Iterator[Row]:
    """Train every algorithm with noise and without."""
    for n_users in users:
        people = load("digits", allocation=Allocation(), n_users=n_users, n_silos=5, seed=0)
        for told, sigma in ((f"epsilon {EPSILON:g}", noise_multiplier(rounds)), ("no noise", 0.0)):
            for name, algorithm in ALGORITHMS.items():
                found = [accuracy_of(people, algorithm, sigma, seed, rounds) for seed in seeds]
                case = f"digits, {n_users} users, {told}, {name} ({len(found)} seeds, sd {np.std(found, ddof=1):.3f})"
                yield Row(case=case, unit="accuracy", ours=float(np.mean(found)))


def noise_multiplier(rounds: int) -> float:
    """Return sigma for which ``rounds`` Gaussian releases cost epsilon 5 at delta 1e-5."""
    low, high = 0.1, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if gaussian_epsilon(rounds**0.5 / middle, 1e-5) <= EPSILON else (middle, high)
        )
    return high


def accuracy_of(people: Population, algorithm: LocalAlgorithm, sigma: float, seed: int, rounds: int) -> float:
    """Return the test accuracy of the averaged model; every user is a pair in the silo of most of the records."""
    model = build_model(
        "linear", input_shape=people.feature_shape, n_outputs=10, randomness=ExperimentRandomness(0)
    )
    STARTS["zeros"](model)
    task = Task(model=model, loss=load_loss("cross_entropy"))
    groups = people.train.by_silo_user()
    cohort = Cohort.from_records(
        people.train, groups=groups, n_silos=people.n_silos, scale=people.scale, device=torch.device("cpu")
    )
    local = LocalSgd(learning_rate=RATE, epochs=STEPS, algorithm=algorithm)
    trainer, noise = VmapTrainer(task=task, local=local), np.random.default_rng(seed)
    weight = Weights.by_power("main").for_groups(groups, people.n_silos, people.n_users)
    members = torch.from_numpy(np.flatnonzero(weight.numpy()))
    at = task.initial()
    kept = {name: one.expand(len(members), -1).clone() for name, one in algorithm.begin(len(at)).items()}
    broadcast, averaged, share = algorithm.begin_server(len(at)), torch.zeros_like(at), 0.0
    for number in range(rounds):
        job = TrainJob(
            at, cohort, members, torch.ones(len(members), dtype=torch.float64), Clip(norm=CLIP),
            ExperimentRandomness(seed), ("round", number), kept, broadcast,
        )  # fmt: skip
        sums = trainer.sums(job)
        total = sums.total.sum(0).double() + torch.from_numpy(noise.normal(0, sigma * CLIP, len(at)))
        mean, kept = total / people.n_users, dict(sums.kept)
        broadcast = algorithm.step_server(mean, job.local_state(local))
        at = at + (server_rate(len(at), people.n_users, sigma, rounds) * mean).float()
        averaged, share = 0.8 * averaged + 0.2 * at, 0.8 * share + 0.2
    features = torch.from_numpy(people.scale.apply(people.test_features))
    return accuracy(task.predict(averaged / share, features), torch.from_numpy(people.test_targets))


def server_rate(dimension: int, n_users: int, sigma: float, rounds: int) -> float:
    """Return min(3, 0.25 / rho), rho = sqrt(d) sigma / (|U| sqrt(T))."""
    rho = dimension**0.5 * sigma / (n_users * rounds**0.5)
    return min(3.0, 0.25 / rho) if rho else 3.0
