"""Calibrated values meet their target, and barely."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from fedveil.errors import BudgetError, PrivacyError
from fedveil.privacy.accountant import cached_epsilon, gaussian_delta
from fedveil.privacy.accounting import ACCOUNTANTS, PldAccountant, RdpAccountant, make_accountant
from fedveil.privacy.calibration import calibrate_noise, calibrate_rounds, epsilon_of, least_noise
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    Event,
    GaussianEvent,
    GridEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SelfComposedEvent,
)
from fedveil.privacy.ledger import Budget
from tests.dp_events import gaussian_rounds
from tests.slow_cases import slow_only

DELTA = 1e-5


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize(
    ("target", "rounds", "rate"), [(0.5, 10, 1.0), (2.0, 50, 0.2), *slow_only([(8.0, 3, 0.5)])]
)
def test_noise_meets_the_target_and_less_does_not(name: str, target: float, rounds: int, rate: float) -> None:
    accountant = make_accountant(name)

    def event(sigma: float) -> Event:
        return gaussian_rounds(rounds, sigma, rate=rate)

    sigma = calibrate_noise(event, Budget(epsilon=target, delta=DELTA, accountant=accountant))
    assert accountant.epsilon(event(sigma), DELTA) <= target
    assert accountant.epsilon(event(sigma * (1 - 2e-4)), DELTA) > target


def halved(fits: Callable[[float], bool]) -> float:
    """The oracle: a bracket from 1 on by factors of 2, halved on a logarithmic scale."""
    high = 1.0
    while not fits(high):
        high *= 2
    low = high / 2
    while fits(low):
        high, low = low, low / 2
    while low < high * (1 - 1e-4):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_noise_is_that_of_halving_to_the_last_bit_in_half_the_steps(name: str) -> None:
    rng, accountant = np.random.default_rng(3), make_accountant(name)
    asked = []

    def event(sigma: float) -> Event:
        asked.append(sigma)
        return gaussian_rounds(rounds, sigma)

    for epsilon in 10 ** rng.uniform(-0.5, 1.5, 20):
        rounds, budget = (
            int(rng.integers(1, 500)),
            Budget(epsilon=epsilon, delta=DELTA, accountant=accountant),
        )
        found, steps = calibrate_noise(event, budget), len(asked)
        assert found == halved(lambda sigma, most=epsilon: accountant.epsilon(event(sigma), DELTA) <= most)
        assert steps < 0.6 * (len(asked) - steps)
        asked.clear()


@pytest.mark.parametrize(
    ("target", "rounds", "published"), [(1.0, 50, 28.605), (1.0, 20, 18.09), (5.0, 200, 13.47)]
)
def test_noise_of_the_paraaegis_program(target: float, rounds: int, published: float) -> None:
    def event(sigma: float) -> Event:
        return gaussian_rounds(rounds, sigma)

    published_way = Budget(epsilon=target, delta=DELTA, accountant=RdpAccountant())
    assert calibrate_noise(event, published_way) == pytest.approx(published, rel=1e-3)
    tighter = Budget(epsilon=target, delta=DELTA)
    assert calibrate_noise(event, tighter) < published


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_rounds_meet_the_budget_and_one_more_does_not(name: str) -> None:
    accountant = make_accountant(name)
    event = PoissonSampledEvent(rate=0.1, event=GaussianEvent(noise_multiplier=5.0))
    rounds = calibrate_rounds(event, Budget(epsilon=1.0, delta=DELTA, accountant=accountant))
    assert accountant.epsilon(SelfComposedEvent(event=event, count=rounds), DELTA) <= 1.0
    assert accountant.epsilon(SelfComposedEvent(event=event, count=rounds + 1), DELTA) > 1.0


def test_any_event_can_be_calibrated() -> None:
    budget = Budget(epsilon=3.0, delta=1e-9)
    scale = calibrate_noise(lambda b: LaplaceEvent(noise_multiplier=b), budget)
    assert scale == pytest.approx(1 / 3, rel=5e-3)


def test_impossible_targets_are_refused() -> None:
    nothing = Budget(epsilon=0.0, delta=1e-9, accountant=RdpAccountant())
    small = Budget(epsilon=0.5, delta=DELTA, accountant=RdpAccountant())
    with pytest.raises(
        BudgetError, match=r"met by no noise multiplier: at .* epsilon is 0\.26 .*larger epsilon or delta"
    ):
        calibrate_noise(lambda s: gaussian_rounds(10, s), nothing)

    def drawn(sigma: float) -> Event:
        if sigma > 100:
            raise PrivacyError("off the grid")
        return gaussian_rounds(10, sigma)

    with pytest.raises(
        BudgetError, match=r"epsilon 0\.001 .* needs a noise .* than the 100 that .*fewer rounds"
    ):
        calibrate_noise(drawn, Budget(epsilon=1e-3, delta=DELTA))
    with pytest.raises(BudgetError, match="one round costs epsilon inf"):
        calibrate_rounds(NoGuarantee(reason="no noise"), nothing)
    with pytest.raises(BudgetError, match=r"one round costs epsilon 0\.80 "):
        calibrate_rounds(GaussianEvent(noise_multiplier=5.0), small)


def test_a_budget_that_binds_nothing_is_refused() -> None:
    huge = Budget(epsilon=1e9, delta=DELTA)
    with pytest.raises(BudgetError, match="gives no privacy"):
        calibrate_noise(lambda s: gaussian_rounds(1, s), huge)
    with pytest.raises(BudgetError, match="does not bind"):
        calibrate_rounds(GaussianEvent(noise_multiplier=5.0), huge)


def test_an_accountant_is_asked_only_what_it_supports() -> None:
    mixture = MixtureOfGaussiansEvent(noise_multiplier=1.0, sensitivities=(1.0,), probabilities=(1.0,))
    assert PldAccountant().supports(mixture)
    with pytest.raises(PrivacyError, match="does not support"):
        calibrate_rounds(mixture, Budget(epsilon=1.0, delta=DELTA, accountant=RdpAccountant()))


def with_grid(event: Event, loss: float) -> Event:
    return ComposedEvent(events=(event, GridEvent(loss=loss))) if loss else event


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.4])
@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_noise_on_a_grid_costs_what_the_grid_changes(name: str, loss: float) -> None:
    """(e, d) of continuous noise is (e + loss, exp(loss) d) on the grid: delta is met after the factor, not before."""
    accountant, event = make_accountant(name), gaussian_rounds(3, 2.0)
    epsilon = accountant.epsilon(with_grid(event, loss), DELTA)
    exact = math.exp(loss) * gaussian_delta(math.sqrt(3) / 2.0, epsilon - loss)
    assert exact <= DELTA * (1 + 1e-6)
    assert epsilon - loss > accountant.epsilon(event, DELTA) or loss == 0
    if name == "pld":
        assert exact == pytest.approx(DELTA, rel=2e-2)


def test_an_answer_is_kept_for_its_own_question_alone() -> None:
    """Whatever part of the question differs asks anew; the same question, put by somebody else, does not."""
    asked: list[tuple[RdpAccountant, Event, float]] = []

    class Counting(RdpAccountant):
        def epsilon(self, event: Event, delta: float) -> float:
            asked.append((self, event, delta))
            return float(len(asked))

    for adjacency in Adjacency:
        for rounds in (71, 72):
            for delta in (1e-5, 1e-6):
                first, again = (
                    cached_epsilon(Counting(adjacency=adjacency), gaussian_rounds(rounds, 2.0), delta)
                    for _ in range(2)
                )
                assert first == again == len(asked)
    assert len(asked) == len(Adjacency) * 4
    cached_epsilon.cache_clear()


def test_calibration_counts_the_grid() -> None:
    budget = Budget(epsilon=1.0, delta=DELTA)
    continuous, on_grid = (
        least_noise(lambda sigma, x=x: epsilon_of(with_grid(gaussian_rounds(3, sigma), x), budget), budget)
        for x in (0.0, 0.2)
    )
    spent = PldAccountant().epsilon(gaussian_rounds(3, on_grid), DELTA * math.exp(-0.2))
    assert spent == pytest.approx(0.8, rel=1e-3)
    assert on_grid > 1.2 * continuous


GRID = [
    (rounds, epsilon, delta, rate)
    for rounds in (1, 300, 1000, 5000, 100_000)
    for epsilon in (0.05, 0.1, 0.5, 1.0, 8.0)
    for delta in (1e-4, 1e-5, 1e-9)
    for rate in ((1.0, 0.1) if rounds * delta == 0.01 else (1.0,))
]


@pytest.mark.parametrize("drawn", [1.0 + 1e-3, 1.3, 50.0], ids=["barely", "more", "much-more"])
def test_whatever_is_feasible_is_found_whatever_lies_beyond_what_can_be_computed(drawn: float) -> None:
    """A noise that cannot be drawn says nothing of smaller noise: 1,000 rounds at epsilon 0.1 need about 972."""
    for rounds, target, delta, rate in GRID:
        least = halved(lambda z: gaussian_delta(math.sqrt(rounds) / z, target) <= delta)  # noqa: B023
        if rate < 1 and drawn != 1.3:
            continue
        limit, floor = least * drawn, least * (0.9 if drawn > 2 else 1e-3)

        def epsilon(z: float) -> float:
            if not floor <= z <= limit:  # noqa: B023
                raise PrivacyError("cannot be computed")
            return budget.accountant.epsilon(gaussian_rounds(rounds, z, rate=rate), budget.delta)  # noqa: B023

        budget = Budget(epsilon=target, delta=delta)
        noise = least_noise(epsilon, budget)
        assert epsilon(noise) <= target < epsilon(noise * 0.99)
        assert rate < 1 or noise == pytest.approx(least, rel=3e-4)


@pytest.mark.parametrize(
    ("rounds", "target", "name"), [(1000, 0.1, "pld"), (300, 0.05, "pld"), (1000, 0.5, "rdp")]
)
def test_a_refused_budget_states_the_noise_that_it_needs(rounds: int, target: float, name: str) -> None:
    budget = Budget(epsilon=target, delta=DELTA, accountant=make_accountant(name))

    def drawn(z: float) -> float:
        if z > 100.0:
            raise PrivacyError("cannot be drawn")
        return budget.accountant.epsilon(gaussian_rounds(rounds, z), DELTA)

    needed = calibrate_noise(lambda z: gaussian_rounds(rounds, z), budget)
    with pytest.raises(BudgetError, match=r"more than the 100 that can be drawn exactly") as refused:
        least_noise(drawn, budget)
    (said,) = re.findall(r"multiplier of about (\S+) ", str(refused.value))
    assert float(said) == pytest.approx(needed, rel=0.01)


def test_a_number_that_no_noise_has_is_refused_as_it_was() -> None:
    def never(z: float) -> float:
        raise PrivacyError(f"no number at {z:g}")

    with pytest.raises(PrivacyError, match=r"no number at 1$"):
        least_noise(never, Budget(epsilon=1.0, delta=DELTA))
    with pytest.raises(BudgetError, match="give a finite epsilon"):
        least_noise(lambda z: 1 / z, Budget(epsilon=math.inf, delta=DELTA))


def test_an_epsilon_of_zero_does_not_slow_the_search() -> None:
    """Noise 0.31 meets epsilon 1, noise 0.5 spends nothing: the logarithm of epsilon has no slope to follow."""
    asked = []

    def epsilon(z: float) -> float:
        asked.append(z)
        return max(0.0, 50.0 * (0.33 - z))

    found = least_noise(epsilon, Budget(epsilon=1.0, delta=0.9))
    assert found == pytest.approx(0.31, rel=2e-4)
    assert len(asked) < 35


def test_rounds_that_cannot_be_counted_do_not_refuse_those_that_can() -> None:
    """At delta 3e-12 the accountant counts just below 2,000 sampled rounds; a search by doubling passes that number."""
    event = PoissonSampledEvent(rate=0.01, event=GaussianEvent(noise_multiplier=100.0))
    budget = Budget(epsilon=1.0, delta=3e-12)

    def epsilon(rounds: int) -> float:
        return budget.accountant.epsilon(SelfComposedEvent(event=event, count=rounds), budget.delta)

    rounds = calibrate_rounds(event, budget)
    assert rounds > 1900
    assert epsilon(rounds) <= 1.0 < epsilon(rounds + 1)
    with pytest.raises(PrivacyError, match="numerical error"):
        epsilon(2048)
