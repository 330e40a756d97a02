"""Test metrics of several classes, numbers and survival under noise: how often their intervals hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.harness import Row
from fedveil.data.columns import ColumnTable
from fedveil.statistics.blocks import Layout
from fedveil.statistics.cells import Everybody
from fedveil.statistics.evaluation.amounts import Amounts
from fedveil.statistics.evaluation.counts import FINE
from fedveil.statistics.evaluation.evaluator import Evaluator, Group, ScoreBins, Sums
from fedveil.statistics.evaluation.lifetimes import Lifetimes
from fedveil.statistics.evaluation.result import Classes
from fedveil.statistics.intervals import Interval

_MULTIPLIERS: Final = {1.0: 3.73, 3.0: 1.39}
"""Noise multipliers of one Gaussian release at delta 1e-5, by epsilon."""


def of_people(columns: dict[str, Any], n: int) -> ColumnTable:
    """Return a table of one silo whose people have a record each."""
    return ColumnTable(
        columns=columns,
        silo=np.zeros(n, dtype=np.int32),
        user=np.arange(n, dtype=np.int32),
        n_users=n,
        silo_names=("a",),
    )


class Released:
    """What an evaluator's releases make of held-out people."""

    def __init__(self, evaluator: Evaluator, outputs: np.ndarray, targets: np.ndarray) -> None:
        self._evaluator = evaluator
        self._table = of_people(evaluator.columns(outputs, targets), len(outputs))
        self._layout = Layout(evaluator.blocks("all", Everybody(), self._placed()))
        self._exact = [
            np.asarray(slot.block.cells(self._table).sum(axis=0)).ravel() for slot in self._layout.slots
        ]

    def _placed(self) -> ScoreBins:
        if self._evaluator.first is None:
            return self._evaluator.placeholder_bins
        fine = np.bincount(
            np.searchsorted(FINE, self._table.numbers("the score").values, side="right"),
            minlength=len(FINE) + 3,
        )
        return self._evaluator.score_bins(fine.astype(np.float64))

    def noisy(self, sd: float, rng: np.random.Generator, stated: float = 1.0) -> dict[str, Interval | None]:
        """Return figures of all people under noise of a whole vector of norm 1, stated as so much of it."""
        parts = {
            slot.block.part: Sums(
                values=exact + sd / slot.scale * rng.normal(size=len(exact)),
                variance=(stated * sd / slot.scale) ** 2,
            )
            for slot, exact in zip(self._layout.slots, self._exact, strict=True)
        }
        group = Group(parts=parts, people_per_unit=1.0)
        found = {
            f"{name} {cell}".strip(): interval
            for name, cell, interval in self._evaluator.figures(group, self._placed())
        }
        for name, one in self._evaluator.estimates(group, self._placed()).items():
            assert found[name] == (None if one is None else one.interval)
        return found


def value(found: dict[str, Interval | None], name: str) -> float:
    """Return a figure that is there."""
    interval = found[name]
    assert interval is not None, name
    return interval.estimate


CLASSES = ("a", "b", "c")
HORIZONS = (1.0, 2.0, 3.0, 4.0)


def of_classes(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and classes, of which the second is rarer."""
    targets = rng.choice(3, size=n, p=[0.5, 0.2, 0.3])
    return 1.2 * np.eye(3)[targets] + rng.normal(size=(n, 3)), targets


def of_amounts(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions and numbers between 0 and 100."""
    targets = np.clip(50 + 15 * rng.normal(size=n), 0, 100)
    return (0.6 * (targets - 50) + 50 + 6 * rng.normal(size=n))[:, None], targets


def of_lifetimes(rng: np.random.Generator, n: int, censored: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return log-hazards and (event, time) under random censoring."""
    score = rng.normal(size=n)
    time = rng.exponential(np.exp(-score) * 5)
    end = np.minimum(rng.uniform(0.5, 8, n), 6) if censored else np.full(n, 1e9)
    return score[:, None], np.stack((time <= end, np.minimum(time, end)), axis=1).astype(np.float64)


def hundredfold(
    make: Callable[[np.random.Generator, int], Any], people: int = 200_000
) -> tuple[np.ndarray, np.ndarray]:
    """Return very many people, whose figures are those of the population."""
    return make(np.random.default_rng(99), people)


CASES: dict[str, tuple[Evaluator, Callable[[np.random.Generator, int], Any], Sequence[str]]] = {
    "classes": (Classes(CLASSES), of_classes, ("accuracy", "balanced accuracy", "recall b")),
    "amounts": (Amounts(0.0, 100.0, 40.0), of_amounts, ("mae", "rmse", "r2")),
    "lifetimes": (Lifetimes(HORIZONS, 8), of_lifetimes, ("c_index", "auc by 2", "auc by 4")),
}


def coverage(
    case: str, simulations: int, n: int, sd: float, stated: float = 1.0
) -> dict[str, tuple[float, float]]:
    """Return how often intervals hold these people's figure, and the population's."""
    evaluator, make, names = CASES[case]
    quiet, rng = np.random.default_rng(0), np.random.default_rng(n)
    population = Released(evaluator, *hundredfold(make)).noisy(1e-9, quiet)
    held = {name: [0, 0] for name in names}
    for _ in range(simulations):
        released = Released(evaluator, *make(rng, n))
        exact, found = released.noisy(1e-9, quiet), released.noisy(sd, rng, stated)
        for name in names:
            interval = found[name]
            assert interval is not None
            assert interval.low_here is not None
            assert interval.high_here is not None
            assert interval.low is not None
            assert interval.high is not None
            held[name][0] += interval.low_here <= value(exact, name) <= interval.high_here
            held[name][1] += interval.low <= value(population, name) <= interval.high
    return {name: (here / simulations, there / simulations) for name, (here, there) in held.items()}


def rows(quick: bool) -> Iterator[Row]:
    """Simulate every kind of target, a thousand times; quick takes thirty."""
    yield from simulated(30 if quick else 1000, 2000)


def smallest() -> Iterator[Row]:
    """Simulate every kind of target once."""
    yield from simulated(1, 1000)


def simulated(simulations: int, n: int) -> Iterator[Row]:
    """Simulate every kind of target on n people."""
    spread = 200 * math.sqrt(0.95 * 0.05 / simulations)
    for case in CASES:
        for epsilon, sd in _MULTIPLIERS.items():
            for name, (here, there) in coverage(case, simulations, n, sd).items():
                label = f"{case}, N = {n}, epsilon {epsilon:g}, {name}"
                for of, held in (("these people", 100 * here), ("the population", 100 * there)):
                    met = held >= 95 - 2 - spread
                    yield Row(case=f"{label}: coverage, {of}", unit="%", ours=held, met=met)
