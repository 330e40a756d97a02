"""The data sets on which the recommended settings are tried: shipped, public and made by stated rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sklearn import datasets

from fedveil.data.allocation import Allocation
from fedveil.data.arrays import population
from fedveil.data.catalogue import load
from fedveil.data.records import Population

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class DefaultsCase:
    """One data set.

    Attributes:
        name: of its rows.
        make: returns the population.
        loss: of the linear model.
        metric: what is compared.
        seen: whether the constants of the rule were chosen on it, or the specification of the rule tried it.
    """

    name: str
    make: Callable[[], Population]
    loss: str
    metric: str
    seen: bool = True

    @property
    def has_newton(self) -> bool:
        """Whether Newton steps are played: for classes, but not on 201 parameters, where a run takes ten seconds."""
        return self.metric in ("auc", "accuracy") and not self.name.startswith("sparse")


def _catalogue(name: str, users: int, silos: int | None) -> Callable[[], Population]:
    law = Allocation(law="zipf")
    return lambda: load(name, allocation=law, n_users=users, n_silos=silos, seed=0)


def _allocated(random: np.random.Generator, n: int, users: int, silos: int) -> tuple[Array, Array]:
    """Return users with a heavy tail of records, each with seven records of ten in one silo."""
    weights = 1 / (1 + np.arange(users)) ** 0.7
    user = random.choice(users, n, p=weights / weights.sum())
    home = random.integers(0, silos, users)
    return user, np.where(random.random(n) < 0.7, home[user], random.integers(0, silos, n))


def _held(
    features: Array, targets: Array, task: str, sizes: tuple[int, int, int], random: np.random.Generator
) -> Population:
    """Return a population of the first records, tested on the others.

    Args:
        features: (n, p) in [-1, 1].
        targets: (n,) or (n, 2).
        task: kind of the targets.
        sizes: records to train on, users, silos.
        random: allots records.
    """
    n, users, silos = sizes
    user, silo = _allocated(random, n, users, silos)
    classes = np.unique(targets).tolist() if task == "classification" else None
    return population(
        features[:n].astype(np.float32),
        targets[:n],
        user=user,
        silo=silo,
        n_users=users,
        silos=list(range(silos)),
        task=task,  # type: ignore[arg-type]
        classes=classes,
        test=(features[n:].astype(np.float32), targets[n:]),
    )


def _scaled(features: Array) -> Array:
    """Return columns scaled to [-1, 1] by bounds that are a fifth wider than the values."""
    low, high = features.min(0), features.max(0)
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)
    return 2 * (features - low) / (high - low) - 1


def _shipped(name: str, users: int, silos: int) -> Callable[[], Population]:
    """Return a data set that scikit-learn ships, seven records of ten to train on."""

    def make() -> Population:
        features, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
        random = np.random.default_rng(9)
        order = random.permutation(len(features))
        sizes = (int(0.7 * len(features)), users, silos)
        return _held(_scaled(features)[order], targets[order], "classification", sizes, random)

    return make


def _diabetes() -> Population:
    features, targets = datasets.load_diabetes(return_X_y=True, scaled=False)
    low = np.array([18, 1, 15, 60, 90, 30, 20, 1.5, 3, 50])
    high = np.array([90, 2, 50, 140, 320, 260, 110, 10, 6.5, 140])
    random = np.random.default_rng(5)
    order = random.permutation(len(features))
    x = np.clip(2 * (features - low) / (high - low) - 1, -1, 1)[order]
    y = (2 * targets / 400 - 1).astype(np.float32)[order]
    return _held(x, y, "regression", (342, 200, 3), random)


def _made(kind: str) -> Callable[[], Population]:
    """Return a made-up table.

    clinic: 12 features of unlike spread, a curved risk. sparse: 200 binary features, each present with probability .05,
    20 of which matter. mixture: five classes of unequal size, 20 features. numbers: a number from 15 correlated
    features. lifetimes: survival from 10 features, censored.
    """

    def make() -> Population:
        random = np.random.default_rng(sum(map(ord, kind)))
        if kind == "clinic":
            z = random.normal(size=(9000, 12))
            spread = np.array([0.5, 0.4, 0.3, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.05])
            risk = (
                1.2 * z[:, 0] - 0.9 * z[:, 1] + 0.8 * z[:, 4] + 0.7 * z[:, 8] + 0.9 * z[:, 2] * z[:, 3] - 0.8
            )
            y = (random.random(9000) < 1 / (1 + np.exp(-risk))).astype(int)
            return _held(np.clip(z * spread, -1, 1), y, "classification", (6500, 1500, 4), random)
        if kind == "sparse":
            x = (random.random((11000, 200)) < 0.05).astype(float)
            slopes = np.r_[random.normal(size=20) * 1.5, np.zeros(180)]
            y = (random.random(11000) < 1 / (1 + np.exp(0.5 - x @ slopes))).astype(int)
            return _held(x, y, "classification", (8000, 2000, 10), random)
        if kind == "mixture":
            y = random.choice(5, 6000, p=[0.4, 0.25, 0.2, 0.1, 0.05])
            means = random.normal(size=(5, 20)) * 0.6
            x = np.clip((means[y] + random.normal(size=(6000, 20))) / 3, -1, 1)
            return _held(x, y, "classification", (4000, 400, 4), random)
        if kind == "numbers":
            mixed = random.normal(size=(15, 15)) * 0.3 + np.eye(15)
            x = np.clip(random.normal(size=(5000, 15)) @ mixed / 3, -1, 1)
            noise = 0.3 * random.normal(size=5000)
            y = np.clip((x @ random.normal(size=15) * 0.6 + noise) / 2, -1, 1)
            return _held(x, y.astype(np.float32), "regression", (3500, 300, 3), random)
        x = np.clip(random.normal(size=(3000, 10)) / 2.5, -1, 1)
        time = random.exponential(np.exp(-1.5 * (x @ random.normal(size=10))))
        censored = random.exponential(2.0, 3000)
        y = np.stack([time <= censored, np.minimum(time, censored)], axis=1).astype(np.float32)
        return _held(x, y, "survival", (2000, 250, 5), random)

    return make


TWO: Final = "binary_cross_entropy"
CASES: Final = (
    DefaultsCase(
        name="HeartDisease, 50 users", make=_catalogue("heart_disease", 50, None), loss=TWO, metric="auc"
    ),
    DefaultsCase(
        name="TcgaBrca, 50 users", make=_catalogue("tcga_brca", 50, None), loss="cox", metric="c_index"
    ),
    DefaultsCase(
        name="digits, 100 users", make=_catalogue("digits", 100, 5), loss="cross_entropy", metric="accuracy"
    ),
    DefaultsCase(name="diabetes, 200 users", make=_diabetes, loss="squared_error", metric="r2"),
    DefaultsCase(
        name="breast cancer, 120 users",
        make=_shipped("breast_cancer", 120, 3),
        loss=TWO,
        metric="auc",
        seen=False,
    ),
    DefaultsCase(
        name="wine, 60 users",
        make=_shipped("wine", 60, 3),
        loss="cross_entropy",
        metric="accuracy",
        seen=False,
    ),
    DefaultsCase(
        name="iris, 50 users",
        make=_shipped("iris", 50, 3),
        loss="cross_entropy",
        metric="accuracy",
        seen=False,
    ),
    DefaultsCase(
        name="numbers, 300 users", make=_made("numbers"), loss="squared_error", metric="r2", seen=False
    ),
    DefaultsCase(
        name="lifetimes, 250 users", make=_made("lifetimes"), loss="cox", metric="c_index", seen=False
    ),
    DefaultsCase(
        name="mixture, 400 users", make=_made("mixture"), loss="cross_entropy", metric="accuracy", seen=False
    ),
    DefaultsCase(name="clinic, 1,500 users", make=_made("clinic"), loss=TWO, metric="auc"),
    DefaultsCase(
        name="digits, 1,000 users",
        make=_catalogue("digits", 1000, 5),
        loss="cross_entropy",
        metric="accuracy",
    ),
    DefaultsCase(name="sparse, 2,000 users", make=_made("sparse"), loss=TWO, metric="auc", seen=False),
    DefaultsCase(
        name="Creditcard, 1,000 users", make=_catalogue("creditcard", 1000, 5), loss=TWO, metric="auc"
    ),
)
