"""What SCAFFOLD's control variates cost under user-level noise, beside plain local steps and FedProx.

Option II of SCAFFOLD (Karimireddy et al. 2020) for pairs (silo, user) that all take part and take K steps at rate eta:

    direction g - c_i + c,    c_i <- c_i - c - Delta_i / (K eta),    c <- mean of c_i

Delta_i is the CLIPPED update. With c = mean of c_i, the new mean is -mean Delta_i / (K eta): the server computes c from
the released mean, and a pair sends its update alone. The bound of a user and the event are those of plain local steps,
and so is epsilon. What c costs is accuracy: it is the last released mean with all of its noise, and enters every step.

Digits, softmax regression from zero, one pair a user, 30 rounds, 10 full-batch steps by the rule of local rates, noise
of the multiplier that epsilon 5 needs, EMA(0.8) of the models. Without noise (the last rows) control variates do work.
The library has no algorithm with state between rounds, so the loop is written out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Row
from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.records import Population
from fedveil.methods.weights import Weights
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.training.metrics import accuracy

EPSILON: Final = 5.0
CLIP: Final = 0.1
RATE: Final = 1 / (0.09 * 65)
STEPS: Final = 10
CLASSES: Final = 10
ALGORITHMS: Final = ("plain", "FedProx(1)", "control variates")


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
        pairs = Pairs(people)
        for told, sigma in ((f"epsilon {EPSILON:g}", noise_multiplier(rounds)), ("no noise", 0.0)):
            for name in ALGORITHMS:
                found = [pairs.accuracy_of(name, sigma, seed, rounds) for seed in seeds]
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


class Pairs:
    """Softmax regression of every user's records in the silo of most of them.

    A model is a vector: (classes, p) coefficients row by row, then (classes,) intercepts.
    """

    def __init__(self, people: Population) -> None:
        groups = people.train.by_silo_user()
        weight = Weights.by_power("main").for_groups(groups, people.n_silos, people.n_users)
        own = [groups.members(int(member)) for member in np.flatnonzero(weight.numpy())]
        table = torch.from_numpy(people.scale.apply(people.train.features)).float().flatten(1)
        targets = torch.nn.functional.one_hot(torch.from_numpy(people.train.targets), CLASSES).float()
        padded = torch.nn.utils.rnn.pad_sequence
        self.features = padded([table[one] for one in own], batch_first=True)
        self.targets = padded([targets[one] for one in own], batch_first=True)
        # The share of a record in the mean of its pair; padding has none.
        self.share = padded([torch.full((len(one), 1), 1 / len(one)) for one in own], batch_first=True)
        self.people, self.width = people, table.shape[1]

    def gradients(self, at: Tensor) -> Tensor:
        """Return the (m, d) gradients of the pairs' mean cross-entropies at their (m, d) models."""
        cut = CLASSES * self.width
        logits = self.features @ at[:, :cut].view(-1, CLASSES, self.width).mT + at[:, None, cut:]
        wrong = (torch.softmax(logits, dim=2) - self.targets) * self.share
        return torch.cat([(wrong.mT @ self.features).flatten(1), wrong.sum(1)], dim=1)

    def accuracy_of(self, name: str, sigma: float, seed: int, rounds: int) -> float:
        """Return the test accuracy of the averaged model."""
        people, noise = self.people, np.random.default_rng(seed)
        start = torch.zeros(CLASSES * (self.width + 1))
        rate = server_rate(len(start), people.n_users, sigma, rounds)
        own, control, averaged, share = torch.zeros(len(self.features), len(start)), start, start, 0.0
        for _ in range(rounds):
            at = start.expand_as(own)
            for _ in range(STEPS):
                direction = self.gradients(at)
                if name == "FedProx(1)":
                    direction = direction + (at - start)
                elif name == "control variates":
                    direction = direction - own + control
                at = at - RATE * direction
            delta = at - start
            delta = delta * (CLIP / delta.norm(dim=1, keepdim=True)).clamp(max=1.0)
            total = delta.sum(0).double() + torch.from_numpy(noise.normal(0, sigma * CLIP, len(start)))
            mean = total / people.n_users
            # c_i <- c_i - c - Delta_i / (K eta), and c <- -mean Delta_i / (K eta) from the released mean alone.
            own, control = own - control - delta / (STEPS * RATE), (-mean / (STEPS * RATE)).float()
            start = start + (rate * mean).float()
            averaged, share = 0.8 * averaged + 0.2 * start, 0.8 * share + 0.2
        found, cut = averaged / share, CLASSES * self.width
        features = torch.from_numpy(people.scale.apply(people.test_features)).float().flatten(1)
        outputs = features @ found[:cut].view(CLASSES, self.width).T + found[cut:]
        return accuracy(outputs, torch.from_numpy(people.test_targets))


def server_rate(dimension: int, n_users: int, sigma: float, rounds: int) -> float:
    """Return min(3, 0.25 / rho), rho = sqrt(d) sigma / (|U| sqrt(T))."""
    rho = dimension**0.5 * sigma / (n_users * rounds**0.5)
    return min(3.0, 0.25 / rho) if rho else 3.0
