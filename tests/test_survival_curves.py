"""Kaplan-Meier curves: they fall, and their intervals are narrow where S is near 1 and hold at every S.

Coverage is counted over seeded simulations; what is allowed is 4.9 standard deviations of a binomial proportion, which
a right interval misses with a probability below 1e-6.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import KaplanMeierFitter

from fedveil.statistics.strategy import Strategy
from fedveil.statistics.survival import MOST_WIDTH, Curve, curve

SIZE = 10
GRID = tuple(np.linspace(0.0, 5.0, SIZE + 1).tolist())


def people(rng: np.random.Generator, n: int, hazard: float) -> tuple[np.ndarray, np.ndarray]:
    """Return times of a constant hazard until 5, half of the people being censored earlier, and who had the event."""
    time = rng.exponential(size=n) / hazard if hazard else np.full(n, np.inf)
    censored = np.where(rng.random(n) < 0.5, 5 * rng.random(n), 5.0)
    return np.minimum(time, censored), time < censored


def released(rng: np.random.Generator, time: np.ndarray, happened: np.ndarray, sd: float) -> Curve:
    """Return the curve of people under noise of ``sd`` in every number that is sent."""
    strategy = Strategy("prefix", SIZE + 1)
    place = np.clip(np.searchsorted(GRID, time, side="left") - 1, 0, None)
    place = np.where(time >= GRID[-1], SIZE, place)
    exits = np.bincount(place, minlength=SIZE + 1)[::-1].astype(float)
    events = np.bincount(place[happened], minlength=SIZE)[:SIZE].astype(float)
    noisy = strategy.decoder @ (strategy.matrix @ exits + sd * rng.normal(size=SIZE + 1))
    return curve(
        (noisy, sd**2 * strategy.covariance),
        (events + sd * rng.normal(size=SIZE), sd**2 * np.eye(SIZE)),
        GRID,
        1.0,
    )


@pytest.mark.parametrize(("n", "sd"), [(1000, 5.0), (1000, 0.5), (20_000, 5.0)])
def test_without_an_event_intervals_are_as_narrow_as_noise_and_people_allow(n: int, sd: float) -> None:
    """Where S = 1 their width is at most some standard deviations of the noise and z^2 people of those at risk."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(20):
        time, happened = people(rng, n, 0.0)
        found = released(rng, time, happened, sd)
        assert len(found.grid) == SIZE
        for k in range(SIZE):
            one = found.point(k)
            assert one is not None
            assert one.low is not None
            assert one.high is not None
            noise = math.sqrt(float(found.noise[k, k]))
            assert one.high - one.low < 8 * noise + 8 / (n / 2)
            held += one.high == 1.0
    assert held / (20 * SIZE) > 0.9


@pytest.mark.parametrize(
    ("n", "sd", "hazard"),
    [(400, 0.5, 0.01), (1500, 6.0, 0.0), (1500, 6.0, 0.01), (1500, 6.0, 0.6)],
)
def test_intervals_and_bands_hold_the_truth_at_every_survival(n: int, sd: float, hazard: float) -> None:
    """Every point of 160 curves, and the band of every fourth; a curve never rises, and its intervals hold it."""
    rng, reps, truth = np.random.default_rng(2), 160, np.exp(-hazard * np.array(GRID[1:]))
    held, inside = np.zeros(SIZE), 0
    for number in range(reps):
        found = released(rng, *people(rng, n, hazard), sd)
        k = len(found.grid)
        if number % 4 == 0:
            low, high = found.band()
            inside += bool(((low <= truth[:k]) & (truth[:k] <= high)).all())
        for place in range(SIZE):
            one = found.point(place) if place < k else None
            if one is None:
                held[place] += 1
                continue
            assert one.low is not None
            assert one.high is not None
            assert one.low <= one.estimate <= one.high
            held[place] += one.low <= truth[place] <= one.high
        assert (np.diff(found.falling) <= 1e-12).all()
    assert (held / reps).min() > 0.95 - 4.9 * math.sqrt(0.95 * 0.05 / reps)
    assert inside / (reps / 4) > 0.95 - 4.9 * math.sqrt(0.95 * 0.05 / (reps / 4))
    assert held.mean() / reps > 0.935


def test_without_noise_intervals_are_as_good_as_those_of_lifelines() -> None:
    """On the same people: the same coverage where S is in the middle, as narrow, and wider than a point at S = 1."""
    rng, ours, theirs, widths = np.random.default_rng(3), [], [], []
    times = np.array(GRID[1:]) - 1e-9
    truth = np.exp(-0.2 * np.array(GRID[1:]))
    for _ in range(40):
        time = rng.exponential(size=500) / 0.2
        found = released(rng, np.minimum(time, 5.0), time < 5.0, 1e-9)
        peer = KaplanMeierFitter().fit(np.minimum(time, 5.0), time < 5.0)
        table = peer.confidence_interval_survival_function_
        ends = table.iloc[np.searchsorted(table.index, times, side="right") - 1].to_numpy()
        points = [found.point(k) for k in range(SIZE)]
        own = np.array([(one.low, one.high) for one in points if one is not None])
        assert found.falling == pytest.approx(peer.survival_function_at_times(times).to_numpy(), abs=1e-6)
        ours.append((own[:, 0] <= truth) & (truth <= own[:, 1]))
        theirs.append((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
        widths.append((own[:, 1] - own[:, 0]) / (ends[:, 1] - ends[:, 0]))
    assert np.mean(ours) >= np.mean(theirs) - 0.005
    assert np.mean(widths) == pytest.approx(1.0, abs=0.1)
    nobody = released(rng, np.full(500, 5.0), np.zeros(500, dtype=bool), 1e-9).point(SIZE - 1)
    assert nobody is not None
    assert (nobody.low, nobody.high) == (pytest.approx(1 / (1 + 3.8415 / 500), abs=1e-4), 1.0)


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    """Noise as large as those at risk: an interval of .9 or more is replaced, as a figure without an interval is."""
    rng, hidden = np.random.default_rng(4), 0
    for _ in range(60):
        found = released(rng, *people(rng, 300, 0.3), 40.0)
        for k in range(len(found.grid)):
            one = found.point(k)
            hidden += one is None
            if one is not None:
                assert one.low is not None
                assert one.high is not None
                assert one.high - one.low <= MOST_WIDTH
    assert hidden


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-50, 400), min_size=SIZE, max_size=SIZE),
    st.lists(st.floats(-50, 60), min_size=SIZE, max_size=SIZE),
    st.sampled_from([0.0, 0.5, 10.0, 40.0]),
)
def test_whatever_is_released_curves_fall_between_their_ends(
    exits: list[float], events: list[float], sd: float
) -> None:
    left = np.array([500.0, *exits])
    found = curve((left, sd**2 * np.eye(SIZE + 1)), (np.array(events), sd**2 * np.eye(SIZE)), GRID, 3.0)
    low, high = found.band()
    shown = found.falling
    for ends in (shown, low, high):
        assert (np.diff(ends) <= 1e-9).all()
        assert ((ends >= 0) & (ends <= 1)).all()
    assert ((low <= shown) & (shown <= high)).all()
    for k in range(len(found.grid)):
        one = found.point(k)
        if one is None:
            continue
        assert None not in (one.low, one.high, one.low_here, one.high_here)
        assert 0 <= one.low <= one.estimate <= one.high <= 1  # type: ignore[operator]
        assert 0 <= one.low_here <= one.estimate <= one.high_here <= 1  # type: ignore[operator]
