"""The contract of every server optimiser. A new one joins with one line in OPTIMIZER_CASES."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.errors import ConfigError
from fedveil.training.server.optimizers import FedAdam, FedYogi, Optimizer, ServerSgd, State, factor, matching
from tests.contract.plugin_members import plugin_members

OPTIMIZER_CASES: dict[str, Optimizer] = {
    "sgd": ServerSgd(0.3),
    "momentum": ServerSgd(0.3, momentum=0.8),
    "nesterov": ServerSgd(0.3, momentum=0.8, nesterov=True),
    "fedadam": FedAdam(learning_rate=0.05, beta2=0.9),
    "fedyogi": FedYogi(learning_rate=0.05, beta2=0.9, tau=0.01),
    "linear": ServerSgd(0.3, momentum=0.8, schedule="linear", rounds=12),
    "cosine": FedAdam(learning_rate=0.05, beta2=0.9, schedule="cosine", rounds=15),
    **plugin_members("optimizers"),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZER_CASES.values(), ids=OPTIMIZER_CASES.keys())
SIZE, ROUNDS = 7, 12


def means() -> list[torch.Tensor]:
    """Means of several lengths; the fifth is zero, and the eighth has a coordinate that is far out."""
    drawn = np.random.default_rng(0).normal(size=(ROUNDS, SIZE)) * np.geomspace(3, 0.01, ROUNDS)[:, None]
    drawn[4], drawn[7, 2] = 0.0, 1e6
    return list(torch.from_numpy(drawn))


def start() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=SIZE).astype(np.float32))


def played(optimizer: Optimizer, model: torch.Tensor | None = None) -> tuple[list[torch.Tensor], State]:
    """The models of all rounds, and the last state."""
    model = start() if model is None else model
    models, state = [], optimizer.init(model)
    for mean in means():
        model, state = optimizer.step(model, mean, state)
        models.append(model)
    return models, state


@optimizers
def test_a_step_keeps_shapes_and_types_and_what_it_was_given(optimizer: Optimizer) -> None:
    model, mean, state = start(), means()[0], optimizer.init(start())
    for _ in range(2):
        given = [value.clone() for value in (model, mean, *state.values())]
        after, following = optimizer.step(model, mean, state)
        assert all(
            torch.equal(old, new) for old, new in zip(given, (model, mean, *state.values()), strict=True)
        )
        assert (after.dtype, after.shape) == (torch.float32, model.shape)
        assert matching(optimizer.init(after), following)
        model, state = after, following


@optimizers
def test_the_same_bits_come_from_the_same_bits(optimizer: Optimizer) -> None:
    (once, one), (again, other) = played(optimizer), played(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@optimizers
def test_a_state_that_is_not_its_own_is_known(optimizer: Optimizer) -> None:
    model = start()
    state = optimizer.init(model)
    assert matching(optimizer.init(model), state)
    assert not matching(optimizer.init(model), {**state, "other": torch.zeros(SIZE)})
    if state:
        assert not matching(optimizer.init(model), {})
        assert not matching(optimizer.init(model[1:]), state)
        assert not matching(optimizer.init(model), {name: value.half() for name, value in state.items()})
        assert not matching(optimizer.init(model), {name: value * torch.nan for name, value in state.items()})


# --- the laws -----------------------------------------------------------------------------------------------------


def by_hand(optimizer: Any) -> list[torch.Tensor]:
    """The oracle: one coordinate after the other, in Python's own numbers, as the papers print it."""
    models = start()[None].repeat(ROUNDS + 1, 1)
    for place in range(SIZE):
        x, u, m = float(models[0, place]), 0.0, 0.0
        v = getattr(optimizer, "tau", 0.0) * getattr(optimizer, "tau", 0.0)
        for number, mean in enumerate(means(), start=1):
            delta, rate = float(mean[place]), optimizer.learning_rate
            if optimizer.schedule != "constant":
                rate *= factor(optimizer.schedule, number, optimizer.rounds)
            if isinstance(optimizer, ServerSgd):
                u = optimizer.momentum * u + delta
                x += rate * (delta + optimizer.momentum * u if optimizer.nesterov else u)
            else:
                m = optimizer.beta1 * m + (1 - optimizer.beta1) * delta
                square = delta * delta
                if isinstance(optimizer, FedAdam):
                    v = optimizer.beta2 * v + (1 - optimizer.beta2) * square
                elif square < v:
                    v -= (1 - optimizer.beta2) * square
                elif square > v:
                    v += (1 - optimizer.beta2) * square
                x += rate * m / (math.sqrt(v) + optimizer.tau)
            models[number, place] = x
            x = float(models[number, place])  # a model is kept in float32
    return list(models[1:])


@optimizers
def test_steps_are_those_of_the_plain_loop_bit_for_bit(optimizer: Optimizer) -> None:
    """Every operation is one that IEEE 754 rounds correctly: machines cannot differ."""
    for step, expected in zip(played(optimizer)[0], by_hand(optimizer), strict=True):
        assert step.tolist() == expected.tolist()


def by_torch(optimizer: Any) -> torch.Tensor:
    """The last model of ``torch.optim``; Adam's bias correction is taken back by its learning rate and epsilon."""
    x = torch.nn.Parameter(start().double())
    peer: torch.optim.Optimizer
    if isinstance(optimizer, ServerSgd):
        peer = torch.optim.SGD(
            [x], lr=optimizer.learning_rate, momentum=optimizer.momentum, nesterov=optimizer.nesterov
        )
    else:
        peer = torch.optim.Adam([x], betas=(optimizer.beta1, optimizer.beta2))
        peer.state[x] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(x),
            "exp_avg_sq": torch.full_like(x, optimizer.tau**2),
        }
    for number, mean in enumerate(means(), start=1):
        if isinstance(optimizer, FedAdam):
            first, second = 1 - optimizer.beta1**number, math.sqrt(1 - optimizer.beta2**number)
            group = peer.param_groups[0]
            group["lr"], group["eps"] = optimizer.learning_rate * first / second, optimizer.tau / second
        x.grad = -mean
        peer.step()
    return x.detach()


CLOSED = {name: OPTIMIZER_CASES[name] for name in ("sgd", "momentum", "nesterov", "fedadam")}


@pytest.mark.parametrize("optimizer", CLOSED.values(), ids=CLOSED.keys())
def test_steps_are_those_of_torch_optim(optimizer: Optimizer) -> None:
    model = played(optimizer)[0][-1]
    np.testing.assert_allclose(model.double(), by_torch(optimizer), rtol=2e-6)


def test_yogi_forgets_a_large_mean_slower_than_adam() -> None:
    """After one mean of 1 and 20 of 0.01: v falls by a hundredth of itself a round, or by 0.01^2 / 100."""
    model, large, small = torch.zeros(1), torch.ones(1).double(), torch.full((1,), 0.01).double()
    squares: dict[type, float] = {}
    for optimizer in (FedAdam(learning_rate=1.0), FedYogi(learning_rate=1.0)):
        state = optimizer.step(model, large, optimizer.init(model))[1]
        for _ in range(20):
            state = optimizer.step(model, small, state)[1]
        squares[type(optimizer).__name__] = float(state["square"])
    assert squares["FedAdam"] == pytest.approx(0.01 * 0.99**20 + 1e-4 * (1 - 0.99**20), rel=1e-3)
    assert squares["FedYogi"] == pytest.approx(0.01 - 20 * 1e-6, rel=1e-3)


WRONG: list[tuple[str, Callable[[Any], Optimizer]]] = [
    ("sgd", lambda right: replace(right, learning_rate=right.learning_rate * 1.02)),
    ("momentum", lambda right: replace(right, momentum=right.momentum * 0.98)),
    ("nesterov", lambda right: replace(right, nesterov=False)),
    ("fedadam", lambda right: replace(right, beta1=right.beta1 * 0.98)),
    ("fedadam", lambda right: replace(right, beta2=right.beta2 * 0.98)),
    ("fedadam", lambda right: replace(right, tau=right.tau * 1.02)),
    ("fedyogi", lambda right: replace(right, beta2=right.beta2 * 0.98)),
    ("linear", lambda right: replace(right, rounds=13)),
    ("cosine", lambda right: replace(right, schedule="linear")),
    ("fedyogi", lambda right: FedAdam(learning_rate=right.learning_rate, beta2=right.beta2, tau=right.tau)),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_a_law_that_is_two_percent_off_is_rejected(name: str, wrong: Callable[[Any], Optimizer]) -> None:
    right = OPTIMIZER_CASES[name]
    steps, expected = played(wrong(right))[0], by_hand(right)
    assert any(not torch.allclose(a, b, rtol=2e-6) for a, b in zip(steps, expected, strict=True))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ServerSgd(0.0), "learning_rate"),
        (lambda: ServerSgd(math.inf), "learning_rate"),
        (lambda: ServerSgd(1.0, momentum=1.0), "momentum"),
        (lambda: ServerSgd(1.0, momentum=-0.1), "momentum"),
        (lambda: ServerSgd(1.0, nesterov=True), "nesterov"),
        (lambda: FedAdam(learning_rate=-1.0), "learning_rate"),
        (lambda: FedAdam(learning_rate=1.0, beta1=1.0), "beta1"),
        (lambda: FedAdam(learning_rate=1.0, beta2=math.nan), "beta2"),
        (lambda: FedYogi(learning_rate=1.0, tau=0.0), "tau"),
    ],
)
def test_an_impossible_value_is_refused_by_name(make: Callable[[], Optimizer], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        make()
