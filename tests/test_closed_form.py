"""Theorems 1 and 2 and Lemmas 2 and 3 of DP-Fed-LS: golden values, side conditions, and that they are true bounds."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import BudgetError, PrivacyError
from fedveil.privacy.accounting import RdpAccountant, make_accountant, sampled_gaussian_rdp
from fedveil.privacy.events import (
    Adjacency,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
)
from fedveil.privacy.published_bounds import (
    remark_1_noise,
    round_rdp,
    theorem_epsilon,
    theorem_noise,
    theorem_rounds,
)
from fedveil.privacy.sampling import fixed_size_rdp

CLIENTS = {"uniform": 1000, "poisson": 500}
ADJACENCY = {"uniform": Adjacency.REPLACE_ONE, "poisson": Adjacency.ADD_OR_REMOVE_ONE}
samplings = pytest.mark.parametrize("sampling", ["uniform", "poisson"])


@pytest.mark.parametrize(
    ("sampling", "epsilon", "noise"),
    [
        ("uniform", 6.0, 0.8080),
        ("uniform", 7.0, 0.6637),
        ("uniform", 8.0, 0.5821),
        ("uniform", 9.0, 0.5257),
        ("poisson", 6.0, 0.3408),
        ("poisson", 7.0, 0.2915),
        ("poisson", 8.0, 0.2597),
        ("poisson", 9.0, 0.2365),
    ],
)
def test_noise_of_the_mnist_table(sampling: str, epsilon: float, noise: float) -> None:
    delta = CLIENTS[sampling] ** -1.1
    found = theorem_noise(sampling, rate=0.05, clip=0.3, rounds=30, epsilon=epsilon, delta=delta)
    assert found.noise_std == pytest.approx(noise, abs=1e-4)


@samplings
@settings(max_examples=60)
@given(
    rate=st.floats(0.005, 0.06),
    clip=st.floats(0.01, 10),
    rounds=st.integers(20, 300),
    epsilon=st.floats(3, 10),
    power=st.floats(2, 4),
)
def test_the_noise_meets_both_side_conditions_and_its_epsilon(
    sampling: str, rate: float, clip: float, rounds: int, epsilon: float, power: float
) -> None:
    delta = 10**-power
    try:
        found = theorem_noise(sampling, rate=rate, clip=clip, rounds=rounds, epsilon=epsilon, delta=delta)
    except BudgetError:
        return
    twice = 2 if sampling == "uniform" else 1
    x = (found.noise_std / (twice * clip)) ** 2
    assert x >= (2 / 3 if sampling == "uniform" else 5 / 9) * (1 - 1e-12)
    limit = 2 / 3 * x * math.log(1 / (found.order * rate * (1 + x)))
    assert found.order - 1 <= limit * (1 + 1e-9) + 1e-12
    spent = rounds * round_rdp(
        sampling, rate=rate, noise_multiplier=math.sqrt(x) * (1 + 1e-9), order=found.order
    ) + math.log(1 / delta) / (found.order - 1)
    assert spent <= epsilon * (1 + 1e-6)
    back = theorem_epsilon(
        sampling, rate=rate, clip=clip, rounds=rounds, noise_std=found.noise_std * (1 + 1e-9), delta=delta
    )
    assert back <= epsilon * (1 + 1e-3)


def test_no_admissible_lambda_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(BudgetError, match="sample fewer clients"):
        theorem_noise("uniform", rate=0.9, clip=1.0, rounds=10, epsilon=5.0, delta=1e-5)
    assert theorem_epsilon("uniform", rate=0.05, clip=1.0, rounds=9, noise_std=1.6, delta=1e-5) == math.inf


@samplings
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 6.0, 9.0])
@pytest.mark.parametrize("z", [0.7, 2.0, 2.7, 5.0])
def test_equation_6_is_the_theorem_solved_for_the_rounds(sampling: str, epsilon: float, z: float) -> None:
    """Against a plain search over lambda; the theorem asks for no more noise at these rounds."""
    given = {"rate": 0.05, "clip": 0.3, "delta": 1e-3}
    found = theorem_rounds(sampling, noise_std=z * 0.3, epsilon=epsilon, **given)
    factor, least, square = (14, 2 / 3, z**2 / 4) if sampling == "uniform" else (2, 5 / 9, z**2)
    most = 0.0
    for split in np.linspace(0, 1, 5_001)[1:-1]:
        order = math.log(1e3) / ((1 - split) * epsilon) + 1
        if square >= least and order - 1 <= 2 / 3 * square * math.log(1 / (0.05 * order * (1 + square))):
            share = math.log(1e3) / (1 - split)
            most = max(most, split * epsilon**2 * z**2 / (factor * 0.05**2 * (share + epsilon)))
    assert math.floor(most) <= found <= most * (1 + 1e-3)
    if found:
        enough = theorem_noise(sampling, rounds=found, epsilon=epsilon, **given).noise_std
        assert enough <= z * 0.3 * (1 + 1e-9)


@samplings
@settings(max_examples=60)
@given(rate=st.floats(0.001, 0.05), sigma=st.floats(0.82, 10), order=st.integers(2, 10))
def test_the_lemmas_bound_the_exact_divergences(sampling: str, rate: float, sigma: float, order: int) -> None:
    try:
        bound = round_rdp(sampling, rate=rate, noise_multiplier=sigma, order=float(order))
    except PrivacyError:
        return
    exact = (fixed_size_rdp if sampling == "uniform" else sampled_gaussian_rdp)(rate, sigma, (float(order),))
    assert exact[0] <= bound * (1 + 1e-9)


@samplings
@pytest.mark.parametrize("epsilon", [6.0, 7.0, 8.0, 9.0])
def test_the_theorems_are_never_tighter_than_the_accountants(sampling: str, epsilon: float) -> None:
    clients, delta = CLIENTS[sampling], CLIENTS[sampling] ** -1.1
    noise = theorem_noise(sampling, rate=0.05, clip=0.3, rounds=30, epsilon=epsilon, delta=delta).noise_std
    base = GaussianEvent(noise_multiplier=noise / 0.3)
    event: Event = PoissonSampledEvent(rate=0.05, event=base)
    if sampling == "uniform":
        event = SampledWithoutReplacementEvent(population=clients, sample=clients // 20, event=base)
    spent = SelfComposedEvent(event=event, count=30)
    for name in ("rdp-2017", "rdp", "pld"):
        assert make_accountant(name, ADJACENCY[sampling]).epsilon(spent, delta) < epsilon / 1.5


def test_remark_1_counts_rounds_that_an_observer_knows() -> None:
    """ParaAegis: the figures that docs/theory/partial-encryption.md gives beside Lemma 1."""
    rate, rounds, delta = 0.1, 50, 1e-5
    z = remark_1_noise(rounds=rounds, epsilon=1.0, delta=delta, rate=rate)
    rho = rate * rounds / (2 * z**2)
    assert 2 * math.sqrt(rho * math.log(1 / delta)) == pytest.approx(1.0)
    noise = GaussianEvent(noise_multiplier=z)
    known, every, secret = (
        make_accountant("pld").epsilon(SelfComposedEvent(event=event, count=count), delta)
        for event, count in (
            (noise, 5),
            (noise, rounds),
            (PoissonSampledEvent(rate=rate, event=noise), rounds),
        )
    )
    assert (z, known, every, secret) == pytest.approx((10.73, 0.759, 2.718, 0.2215), rel=1e-3)


@pytest.mark.parametrize(
    "change",
    [{"rate": 0.0}, {"rate": 1.5}, {"clip": 0.0}, {"rounds": 0}, {"delta": 0.0}, {"epsilon": -1.0}],
    ids=str,
)
def test_arguments_outside_their_domain_are_refused(change: dict[str, float]) -> None:
    arguments = {"rate": 0.05, "clip": 0.3, "rounds": 30, "epsilon": 6.0, "delta": 1e-3}
    with pytest.raises(PrivacyError, match=f"{next(iter(change))} ="):
        theorem_noise("uniform", **(arguments | change))


@pytest.mark.parametrize(("sigma", "order"), [(0.5, 2.0), (1.0, 60.0), (1.0, 1.0)])
def test_the_lemmas_are_refused_outside_their_domain(sigma: float, order: float) -> None:
    with pytest.raises(PrivacyError):
        round_rdp("uniform", rate=0.05, noise_multiplier=sigma, order=order)


def test_poisson_budgets_as_published() -> None:
    cases = [
        (2000, 0.05, 200, {1.5: 2.565, 1.3: 3.192, 1.1: 4.241, 1.0: 5.066}),
        (975, 0.2, 100, {1.6: 6.782, 1.4: 8.222, 1.2: 10.408, 1.0: 14.043}),
    ]
    for clients, rate, rounds, table in cases:
        for sigma, published in table.items():
            release = PoissonSampledEvent(rate=rate, event=GaussianEvent(noise_multiplier=sigma))
            spent = SelfComposedEvent(event=release, count=rounds)
            found = make_accountant("rdp-2017").epsilon(spent, clients**-1.1)
            assert found == pytest.approx(published, abs=1e-3)


def test_the_accountants_agree_on_the_orders_they_share() -> None:
    event = SampledWithoutReplacementEvent(
        population=100, sample=5, event=GaussianEvent(noise_multiplier=3.0)
    )
    accountant = RdpAccountant(adjacency=Adjacency.REPLACE_ONE, orders=(2.0, 3.5))
    np.testing.assert_allclose(accountant._rdp(Counter([event])), fixed_size_rdp(0.05, 1.5, (2.0, 3.5)))
