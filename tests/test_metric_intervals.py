"""Intervals of test metrics where figures are hard to tell: variances of a few sd, equal classes, shares near 1.

A law of coverage accepts 95 % and more of all repetitions, and rejects noise that is stated at 0.7 of what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
from jaxtyping import Float64

from fedveil.statistics.evaluation.amounts import Amounts
from fedveil.statistics.evaluation.counts import accuracy, against_majority
from fedveil.statistics.evaluation.evaluator import Group, ScoreBins, Sums
from fedveil.statistics.evaluation.result import Confusion
from fedveil.statistics.intervals import Bounded, Estimate, Interval, normal, positive_ratio

TIMES: Final = 600
LEAST: Final = 0.95 - 4.9 * math.sqrt(0.95 * 0.05 / TIMES)
LARGEST, HALF = 3.0, 5.0
REGRESSION: Final = Amounts(0.0, 2 * HALF, LARGEST)
UNPLACED: Final = ScoreBins(cells=np.zeros(0))


def covered(interval: Interval, population: float, here: float) -> tuple[bool, bool]:
    """Whether the interval holds the population's figure, and these people's."""
    ends = [
        sign * math.inf if end is None else end
        for sign, end in (
            (-1, interval.low),
            (1, interval.high),
            (-1, interval.low_here),
            (1, interval.high_here),
        )
    ]
    return ends[0] <= population <= ends[1], ends[2] <= here <= ends[3]


# --- numbers ------------------------------------------------------------------------------------------------------


def around(middle: float) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """Return a world of predictions and of targets about a place between 0 and 10."""

    def drawn(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        targets = np.clip(rng.normal(middle, 0.45, n), 0, 2 * HALF)
        return targets + rng.normal(0, 0.3, n), targets

    return drawn


def rare_errors(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a world whose errors are large for one in a hundred."""
    targets = rng.exponential(0.5, n).clip(0, 2 * HALF)
    return targets + np.where(rng.random(n) < 0.01, LARGEST, 0.05), targets


def powers(drawn: tuple[np.ndarray, np.ndarray]) -> Float64[np.ndarray, "n 4"]:
    """Return (a, a^2, y, y^2) of every record."""
    predicted, targets = drawn
    a, y = np.minimum(np.abs(predicted - targets) / LARGEST, 1), targets / HALF - 1
    return np.stack((a, a**2, y, y**2), axis=1)


def exact(means: Float64[np.ndarray, " 4"]) -> dict[str, float]:
    """Return the figures of means that are known."""
    return {
        "mae": LARGEST * means[0],
        "rmse": LARGEST * math.sqrt(means[1]),
        "r2": 1 - (LARGEST / HALF) ** 2 * means[1] / (means[3] - means[2] ** 2),
    }


def held(
    world: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]],
    n: int,
    sd: float,
    stated: float = 1.0,
) -> dict[str, tuple[float, float]]:
    """Return how often all three figures, each of which is shown every time, are held: of the population, and here."""
    rng = np.random.default_rng(7)
    population, found = exact(powers(world(rng, 300_000)).mean(axis=0)), dict[str, list[tuple[bool, bool]]]()
    for _ in range(TIMES):
        sums = powers(world(rng, n)).sum(axis=0)
        parts = {"states": np.array([n, 0.0, 0.0, 0.0]), "powers": sums}
        noisy = {
            name: Sums(values=values + rng.normal(0, sd, 4), variance=(stated * sd) ** 2)
            for name, values in parts.items()
        }
        for name, one in REGRESSION.estimates(Group(parts=noisy, people_per_unit=1.0), UNPLACED).items():
            assert one is not None
            found.setdefault(name, []).append(covered(one.interval, population[name], exact(sums / n)[name]))
    return {name: (float(np.mean(some, 0)[0]), float(np.mean(some, 0)[1])) for name, some in found.items()}


@pytest.mark.parametrize(
    ("world", "n", "sd"),
    [
        (around(5.0), 1500, 3.0),  # the variance of targets is 4 sd of the noise of their squares
        (around(0.8), 1500, 3.0),  # and beside a bound, where the noise of their mean counts more
        (around(0.8), 1500, 12.0),  # 1 sd
        (rare_errors, 1000, 3.0),
    ],
)
def test_figures_of_numbers_are_always_shown_and_hold(
    world: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]], n: int, sd: float
) -> None:
    for name, (population, here) in held(world, n, sd).items():
        assert min(population, here) > LEAST, name


def test_a_smaller_noise_than_there_is_does_not_hold() -> None:
    assert max(here for _, here in held(around(0.8), 1500, 3.0, stated=0.7).values()) < LEAST


def test_a_ratio_with_a_clear_denominator_is_fiellers_and_else_has_one_end() -> None:
    low, high = positive_ratio(30.0, 60.0, (4.0, 9.0, 1.0))
    assert high is not None
    for t in (low, high):
        assert (30 - 60 * t) ** 2 == pytest.approx(1.959963984540054**2 * (4 - 2 * t + 9 * t**2))
    low, high = positive_ratio(30.0, 4.0, (4.0, 9.0, 0.0))
    assert high is None
    assert (30 - 4 * low) ** 2 == pytest.approx(1.959963984540054**2 * (4 + 9 * low**2))
    assert positive_ratio(1.0, -50.0, (4.0, 9.0, 0.0)) == (0.0, None)


def test_differences_are_those_of_variances_where_figures_are_normal_and_else_have_the_ends_that_both_have() -> (
    None
):
    one, other = Estimate(value=0.7, noise=0.04, people=0.01), Estimate(value=0.2, noise=0.02, people=0.03)
    found, expected = one.minus(other), normal(0.5, 0.06, 0.04)
    for name, end in vars(expected).items():
        assert getattr(found, name) == pytest.approx(end), name
    ends = Interval(estimate=0.2, low=None, high=0.5, low_here=-1.0, high_here=0.3, privacy=1.0)
    apart = one.minus(Bounded(value=0.2, noise=0.1, people=0.0, ends=ends))
    assert apart.high is None
    assert apart.low == pytest.approx(0.5 - math.hypot(1.959963984540054 * math.sqrt(0.05), 0.3))


# --- classes ------------------------------------------------------------------------------------------------------


def majorities(cells: Float64[np.ndarray, "K K"], sd: float) -> dict[str, Interval]:
    """Return the majority baseline and what accuracy is above it."""
    counts = Confusion(cells=cells, variance=sd**2, people_per_unit=1.0)
    found = {name: interval for name, _, interval in against_majority(counts)}
    assert None not in found.values()
    return found  # type: ignore[return-value]


def test_the_gain_over_the_majority_holds_where_classes_are_equal() -> None:
    """Ten classes, guessed: the largest of noisy counts is larger than the largest class."""
    rng, k, n, sd = np.random.default_rng(3), 10, 3000, 20.0
    found = dict[str, list[tuple[bool, bool]]]()
    for _ in range(TIMES):
        cells = rng.multinomial(n, np.full(k * k, 1 / k**2)).reshape(k, k)
        largest = cells.sum(axis=1).max() / n
        here = {
            "majority baseline": largest,
            "accuracy minus majority baseline": np.trace(cells) / n - largest,
        }
        for name, interval in majorities(cells + rng.normal(0, sd, (k, k)), sd).items():
            found.setdefault(name, []).append(
                covered(interval, 1 / k if name == "majority baseline" else 0.0, here[name])
            )
    for name, some in found.items():
        assert np.mean(some, axis=0).min() > LEAST, name


def test_the_gain_over_a_clear_majority_is_that_over_its_class() -> None:
    cells = np.array([[700.0, 50, 50], [60, 300, 40], [70, 30, 250]])
    counts = Confusion(cells=cells, variance=9.0, people_per_unit=1.0)
    own = np.zeros_like(cells)
    own[0] = 1.0
    assert majorities(cells, 3.0)["accuracy minus majority baseline"] == counts.quotient(
        counts.correct - own, np.ones_like(cells)
    )


@pytest.mark.parametrize(("people", "share"), [(100, 0.99), (300, 0.99)])
def test_shares_near_one_hold(people: int, share: float) -> None:
    """The estimated spread of a recall is 0 where all are predicted, which one time in three they are."""
    rng, sd, found, accuracies = np.random.default_rng(4), 0.3, 0, 0
    for _ in range(TIMES):
        predicted = rng.binomial(people, share)
        cells = np.array([[predicted, people - predicted], [0.0, 0.0]]) + rng.normal(0, sd, (2, 2))
        counts = Confusion(cells=cells, variance=sd**2, people_per_unit=1.0)
        own = np.array([[1.0, 1.0], [0.0, 0.0]])
        recall, right = counts.quotient(own * counts.correct, own), accuracy(counts)
        assert recall is not None
        assert right is not None
        found += covered(recall, share, 0.0)[0]
        accuracies += covered(right.interval, share, 0.0)[0]
    assert min(found, accuracies) / TIMES > LEAST
