"""The contract of every average of models. A new one joins with one line in AVERAGE_CASES."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.errors import CompositionError
from fedveil.training.server.averages import Average, Ema, Last, Tail
from fedveil.training.server.optimizers import Schedule, State, factor, matching
from tests.contract.plugin_members import plugin_members

SIZE, ROUNDS = 5, 12
AVERAGE_CASES: dict[str, Average] = {
    "last": Last(),
    "ema": Ema(beta=0.8),
    "late ema": Ema(beta=0.8, skip=3),
    "tail": Tail(share=0.5, rounds=ROUNDS),
    "short tail": Tail(share=0.01, rounds=ROUNDS),
    **plugin_members("averages"),
}
averages = pytest.mark.parametrize("average", AVERAGE_CASES.values(), ids=AVERAGE_CASES.keys())
MODELS = list(torch.from_numpy(np.random.default_rng(0).normal(size=(ROUNDS, SIZE)).astype(np.float32)))
START = torch.full((SIZE,), 3.0)


def played(average: Average) -> tuple[list[torch.Tensor], State]:
    """What the run would release after every round, and the last state."""
    state, shown = average.init(START), []
    for model in MODELS:
        state = average.update(model, state)
        shown.append(average.released_model(model, state))
    return shown, state


def by_hand(average: Any) -> list[list[float]]:
    """The oracle, in exact fractions: weights of all models so far, straight from the definitions."""
    shown = []
    for last in range(1, ROUNDS + 1):
        if isinstance(average, Ema):
            weights = [Fraction(0)] * last
            weights[-1] = Fraction(last <= average.skip)
            for t in range(average.skip + 1, last + 1):
                w = max(Fraction(1, t - average.skip), 1 - Fraction(average.beta))
                weights = [one * (1 - w) for one in weights]
                weights[t - 1] = w
        else:
            first = ROUNDS - math.ceil(average.share * ROUNDS) + 1 if isinstance(average, Tail) else last
            counted = [t for t in range(1, last + 1) if t >= first] or [last]
            weights = [Fraction(t in counted, len(counted)) for t in range(1, last + 1)]
        shown.append(
            [
                float(sum(w * Fraction(float(m[k])) for w, m in zip(weights, MODELS[:last], strict=True)))
                for k in range(SIZE)
            ]
        )
    return shown


@averages
def test_what_is_released_is_the_average_of_its_definition(average: Average) -> None:
    for one, expected in zip(played(average)[0], by_hand(average), strict=True):
        assert one.dtype == torch.float32
        np.testing.assert_allclose(one.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ema", lambda right: replace(right, beta=right.beta * 0.98)),
        ("late ema", lambda right: replace(right, skip=right.skip - 1)),
        ("tail", lambda right: replace(right, share=right.share + 1 / ROUNDS)),
        ("short tail", lambda right: replace(right, share=0.2)),
    ],
)
def test_an_average_that_is_off_is_rejected(name: str, wrong: Callable[[Any], Average]) -> None:
    shown, expected = played(wrong(AVERAGE_CASES[name]))[0], by_hand(AVERAGE_CASES[name])
    assert any(not np.allclose(a.double(), b, rtol=1e-6) for a, b in zip(shown, expected, strict=True))


@averages
def test_before_the_first_round_the_model_is_released_as_it_is(average: Average) -> None:
    assert torch.equal(average.released_model(START, average.init(START)), START)


@averages
def test_a_round_keeps_names_shapes_types_and_what_it_was_given(average: Average) -> None:
    state = average.init(START)
    for model in MODELS[:8]:
        given = {name: value.clone() for name, value in state.items()}
        following = average.update(model, state)
        assert all(torch.equal(given[name], state[name]) for name in given)
        assert matching(average.init(model), following)
        state = following


@averages
def test_a_state_that_is_not_its_own_is_known(average: Average) -> None:
    state = average.init(START)
    assert not matching(average.init(START), {**state, "other": torch.zeros(SIZE)})
    if state:
        assert not matching(average.init(START), {})
        assert not matching(average.init(START[1:]), state)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Ema(beta=1.0), "beta"),
        (lambda: Ema(beta=math.nan), "beta"),
        (lambda: Ema(skip=-1), "skip"),
        (lambda: Tail(share=0.0), "share"),
        (lambda: Tail(share=1.5), "share"),
    ],
)
def test_an_impossible_value_is_refused_by_name(make: Callable[[], Average], key: str) -> None:
    with pytest.raises(CompositionError, match=f"^{key}"):
        make()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("rounds", [1, 2, 7, 30, 1000])
def test_a_schedule_travels_as_far_as_the_constant_rate(schedule: Schedule, rounds: int) -> None:
    factors = [factor(schedule, number, rounds) for number in range(1, rounds + 1)]
    assert sum(factors) == pytest.approx(rounds, rel=1e-13)
    assert factors == sorted(factors, reverse=True)
    assert min(factors) > 0
    assert factor(schedule, rounds + 1, rounds) == (schedule == "constant")


def test_factors_are_those_of_their_formulas() -> None:
    for number in range(5, 31):
        place = (number - 0.5) / 30
        assert factor("linear", number, 30) == pytest.approx(2 * (1 - place), rel=1e-14)
        assert factor("cosine", number, 30) == pytest.approx(1 + math.cos(math.pi * place), rel=1e-12)
        assert factor("cosine", number, 30) != pytest.approx(1 + math.cos(math.pi * place * 1.02), rel=1e-4)
