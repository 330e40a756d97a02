"""Figures from noisy cells: decoding is least squares with exact covariances, and 95 % intervals cover 95 %.

Coverage is counted over seeded simulations; what is allowed is 4.9 standard deviations of a binomial proportion, which
a right interval misses with a probability below 1e-6. Each law also meets an interval that is wrong, and refuses it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedveil.report.statistics import row_cells
from fedveil.statistics.blocks import Block, Cells, Layout, OneHot, consistent, decode
from fedveil.statistics.cells import Bins, Categories, States
from fedveil.statistics.correlations import Sums, correlations, display_correlations, nearest_correlation
from fedveil.statistics.figures import (
    Group,
    Row,
    count,
    mean,
    part_of,
    quantile,
    suppress_small_count,
    variance,
)
from fedveil.statistics.intervals import NORMAL_95, Interval, normal, ratio
from fedveil.statistics.strategy import Strategy
from fedveil.statistics.survival import curve, largest_z
from tests.slow_cases import slow_only

Z = 4.9


def covers(found: list[Interval | None], truth: float) -> float:
    """Return the share of intervals that hold the truth; every one must be there."""
    held = []
    for one in found:
        assert one is not None
        low = -math.inf if one.low is None else one.low
        high = math.inf if one.high is None else one.high
        held.append(low <= truth <= high)
    return float(np.mean(held))


def around(share: float, reps: int) -> float:
    """Return how far a proportion of so many draws may be from its probability."""
    return Z * math.sqrt(share * (1 - share) / reps)


def blind(found: list[Interval | None]) -> list[Interval | None]:
    """Return the same intervals as if there were no noise: what somebody computes who forgets it."""
    wrong: list[Interval | None] = []
    for one in found:
        assert one is not None
        assert one.low is not None
        assert one.high is not None
        sd = (one.high - one.low) / (2 * NORMAL_95)
        wrong.append(normal(one.estimate, 0.0, sd**2 * (1 - one.privacy)))
    return wrong


# --- decoding -----------------------------------------------------------------------------------------------


def test_totals_that_agree_are_generalised_least_squares() -> None:
    """Against the explicit solution under the constraint that both blocks have one total."""
    rng = np.random.default_rng(0)
    roots = [rng.normal(size=(3, 3)), rng.normal(size=(2, 2))]
    blocks = [
        Cells(values=rng.normal(size=(1, len(root))) + 10, covariance=root @ root.T + np.eye(len(root)))
        for root in roots
    ]
    joint = np.zeros((5, 5))
    joint[:3, :3], joint[3:, 3:] = blocks[0].covariance, blocks[1].covariance
    values = np.concatenate([block.values[0] for block in blocks])
    constraint = np.array([1.0, 1.0, 1.0, -1.0, -1.0])
    gain = joint @ constraint / (constraint @ joint @ constraint)
    expected = values - gain * (constraint @ values)
    covariance = joint - np.outer(gain, joint @ constraint)
    found = consistent(blocks)
    assert np.concatenate([one.values[0] for one in found]) == pytest.approx(expected)
    assert found[0].covariance == pytest.approx(covariance[:3, :3])
    assert found[1].covariance == pytest.approx(covariance[3:, 3:])


def test_decoding_inverts_the_vector_and_its_covariance_is_that_of_the_noise() -> None:
    cells = OneHot(Bins("age", (50.0,)))
    blocks = (
        Block(release="one", part="cells", encoder=cells),
        Block(release="two", part="cells", encoder=cells, kind="stacked", weight=3.0),
    )
    layout, truth = Layout(blocks), np.array([70.0, 20.0, 10.0, 5.0])
    vector = np.concatenate([slot.scale * slot.block.strategy.matrix @ truth for slot in layout.slots])
    for found in decode(layout, vector, 1.0).values():
        assert found.values[0] == pytest.approx(truth)
    for found in decode(layout, vector / 4, 1.0, unit=0.25).values():
        assert found.values[0] == pytest.approx(truth)
    rng, reps = np.random.default_rng(1), 4000
    noisy = vector + 2.0 * rng.normal(size=(reps, len(vector)))
    draws = np.array([decode(layout, one, 2.0)["two", "cells"].values[0] for one in noisy])
    stated = decode(layout, vector, 2.0)["two", "cells"].covariance
    ratio_of = draws.var(axis=0) / np.diag(stated)
    assert ratio_of == pytest.approx(1.0, abs=Z * math.sqrt(2 / reps))
    total = decode(layout, vector, 2.0)
    assert total["one", "cells"].covariance.sum() == pytest.approx(total["two", "cells"].covariance.sum())


def test_groups_of_other_columns_are_not_made_to_agree() -> None:
    """Two columns with the same declared categories have other people in each: blocks of one column share totals."""
    first, second = (Categories(name, ("0", "1"), pooled=True) for name in ("left", "right"))
    blocks = tuple(
        Block(release=name, part="cells", encoder=OneHot(States("age")), groups=groups)
        for name, groups in (("one", first), ("two", second), ("three", second))
    )
    layout, rng = Layout(blocks), np.random.default_rng(0)
    vector = 5 + rng.normal(size=layout.length)
    found = decode(layout, vector, 1.0)
    totals = {name: found[name, "cells"].values.sum(axis=1) for name in ("one", "two", "three")}
    slot = layout.slots_of("one")[0]
    assert totals["one"] == pytest.approx(vector[slot.place].reshape(3, 3).sum(axis=1) / slot.scale)
    assert totals["two"] == pytest.approx(totals["three"])


# --- intervals ----------------------------------------------------------------------------------------------


def test_counts_and_shares_cover() -> None:
    rng, reps, n, sd = np.random.default_rng(2), 1500, 400, 12.0
    p = np.array([0.5, 0.3, 0.2])
    cells = rng.multinomial(n, p, size=reps) + sd * rng.normal(size=(reps, 3))
    first = np.array([1.0, 0.0, 0.0])
    groups = [
        Group(name="all", values=row, covariance=sd**2 * np.eye(3), everybody=row.sum()) for row in cells
    ]
    counts: list[Interval | None] = [count(group, first, 1.0) for group in groups]
    shares = [part_of(group, first, 1.0) for group in groups]
    for found, truth in ((counts, n * 0.5), (shares, 0.5)):
        assert covers(found, truth) == pytest.approx(0.95, abs=around(0.95, reps))
        assert covers(blind(found), truth) < 0.95 - around(0.95, reps)
    assert next(one.privacy for one in counts if one) == pytest.approx(sd**2 / (sd**2 + 100), rel=0.2)


def test_counts_of_a_group_cover_for_a_group_s_size_is_drawn_too() -> None:
    """Of 1,000 people three tenths come to be in the ward, six tenths of whom have the category."""
    rng, reps, n, sd = np.random.default_rng(8), 2000, 1000, 4.0
    ward = rng.binomial(n, 0.3, size=reps)
    having = rng.binomial(ward, 0.6)
    cells = np.stack([having, ward - having], axis=1) + sd * rng.normal(size=(reps, 2))
    for weights, truth in ((np.array([1.0, 1.0]), 300), (np.array([1.0, 0.0]), 180)):
        for everybody, covered in ((n, True), (None, False)):
            groups = [
                Group(name="A", values=row, covariance=sd**2 * np.eye(2), everybody=everybody or row.sum())
                for row in cells
            ]
            held = covers([count(group, weights, 1.0) for group in groups], truth)
            assert (held == pytest.approx(0.95, abs=around(0.95, reps))) == covered


def test_a_persons_pairs_are_not_taken_for_people() -> None:
    """Person-silo pairs: somebody in three silos is three units, and the interval has room for all of them."""
    rng, reps, n = np.random.default_rng(3), 800, 300
    pairs = 3.0 * rng.binomial(n, 0.4, size=reps)
    groups = [
        Group(name="all", values=np.array([value, 3 * n - value]), covariance=np.eye(2), everybody=3 * n)
        for value in pairs
    ]
    one = np.array([1.0, 0.0])
    assert covers([count(group, one, 3.0) for group in groups], 3 * n * 0.4) >= 0.95 - around(0.95, reps)
    assert covers([count(group, one, 1.0) for group in groups], 3 * n * 0.4) < 0.9


def test_fieller_covers_where_the_denominator_is_noisy_and_refuses_where_it_is_nothing() -> None:
    rng, reps = np.random.default_rng(4), 3000
    above, below = 30 + 5 * rng.normal(size=reps), 60 + 12 * rng.normal(size=reps)
    found = [ratio(a, b, (25.0, 144.0, 0.0), 0.0) for a, b in zip(above, below, strict=True)]
    there = [one for one in found if one is not None]
    assert 0.5 * reps < len(there) < reps
    # refusing the smallest denominators conditions on the rest: all runs together must cover
    held = sum(one is None or (one.low or 0) <= 0.5 <= (one.high or math.inf) for one in found) / reps
    assert held > 0.95 - around(0.95, reps)
    assert ratio(1.0, 3.9, (1.0, 1.0, 0.0), 0.0) is None
    assert ratio(1.0, -5.0, (1.0, 1.0, 0.0), 0.0) is None


@pytest.mark.parametrize("level", [0.1, 0.5])
def test_quantiles_cover_and_are_no_narrower_than_a_bin(level: float) -> None:
    rng, reps, n, bins, sd = np.random.default_rng(5), 600, 500, 20, 3.0
    edges = tuple(np.linspace(0, 1, bins + 1).tolist())
    strategy = Strategy("prefix", bins + 2)
    covariance = sd**2 * strategy.covariance
    found = []
    for _ in range(reps):
        cells = np.histogram(rng.random(n), bins=[-1, *edges, 2])[0]
        noisy = strategy.decoder @ (strategy.matrix @ cells + sd * rng.normal(size=bins + 2))
        found.append(quantile(noisy, covariance, edges, level, 1.0))
    assert covers(found, level + 1e-9) >= 0.95 - around(0.95, reps)
    errors = [one.estimate - level for one in found if one is not None]
    assert abs(float(np.mean(errors))) < Z * float(np.std(errors)) / math.sqrt(reps)
    # shifted by two bins it must fail: the interval is about the quantile and not merely wide
    assert covers(found, level + 3 / bins) < 0.5


def test_a_quantile_outside_the_bounds_has_an_open_end_and_is_told_as_such() -> None:
    cells, edges = np.array([80.0, 10.0, 10.0, 0.0]), (0.0, 1.0, 2.0)
    found, above = (quantile(one, np.eye(4), edges, 0.5, 1.0) for one in (cells, cells[::-1]))
    assert found is not None
    assert (found.estimate, found.low, found.high) == (0.0, None, 0.0)
    assert above is not None
    assert (above.estimate, above.low, above.high) == (2.0, 2.0, None)
    rows = [
        Row(release="age", figure="quantile", group="all", cell="0.5", interval=one) for one in (found, above)
    ]
    assert [row_cells(row)[2:4] for row in rows] == [["below 0", "open to 0"], ["above 2", "2 to open"]]
    assert [row.to_json()["beyond"] for row in rows] == ["below", "above"]
    within = quantile(np.array([0.0, 90.0, 10.0, 0.0]), np.eye(4), edges, 0.5, 1.0)
    assert within is not None
    assert within.beyond is None
    assert quantile(-cells, np.eye(4), edges, 0.5, 1.0) is None


def test_means_and_variances_cover() -> None:
    rng, reps, n, sd = np.random.default_rng(6), 1200, 500, 15.0
    x = rng.uniform(-0.8, 0.4, size=(reps, n))
    sums = np.stack([np.full(reps, n), x.sum(1), (x**2).sum(1)], axis=1) + sd * rng.normal(size=(reps, 3))
    covariance = sd**2 * np.eye(3)
    means = [mean(row, covariance, 1.0) for row in sums]
    assert covers(means, -0.2) == pytest.approx(0.95, abs=around(0.95, reps))
    assert covers(blind(means), -0.2) < 0.9
    variances = [variance(row, covariance, 1.0) for row in sums]
    assert covers(variances, 0.12) >= 0.95 - around(0.95, reps)
    assert covers(variances, 0.12 + 0.15) < 0.9


@pytest.mark.parametrize("heavy", [*slow_only([False]), True])
def test_correlations_cover_under_any_tails_within_the_bounds(heavy: bool) -> None:
    """With heavy tails the textbook's (1 - r^2)^2 / n is too small; the bound by the declared range is not."""
    rng, reps, n, sd = np.random.default_rng(7), 150, 2000, 2.0
    shared = rng.normal(size=(reps, n))
    x, y = (0.6 * shared + 0.8 * rng.normal(size=(reps, n)) for _ in range(2))
    if heavy:
        scale = np.where(rng.random(size=(reps, n)) < 0.1, 3.0, 0.3)
        x, y = x * scale, y * scale
    x, y = np.clip(x / 8, -1, 1), np.clip(y / 8, -1, 1)
    truth = float(np.corrcoef(x.ravel(), y.ravel())[0, 1])
    found = []
    for a, b in zip(x, y, strict=True):
        noise = sd * rng.normal(size=6)
        second = np.array([[a @ a + noise[3], a @ b + noise[4]], [a @ b + noise[4], b @ b + noise[5]]])
        first = np.array([a.sum() + noise[1], b.sum() + noise[2]])
        sums = Sums(n=n + noise[0], first=first, second=second, variances=(sd**2,) * 3, people_per_unit=1.0)
        found += correlations(sums)[0]
    assert covers(found, truth) >= 0.95 - around(0.95, reps)
    assert covers(found, truth - 0.6) < 0.9


@pytest.mark.parametrize("r", [0.0, 0.8])
@pytest.mark.parametrize("spread", [0.0, 0.3, *slow_only([0.1, 0.18])])
def test_correlations_cover_however_little_spread_there_is(r: float, spread: float) -> None:
    """Every run counts: none is left out because its spreads are lost in their noise. Noise that is stated at 2/5 of
    what it is must not cover where intervals say something.
    """
    rng, reps, n, sd = np.random.default_rng(13), 120, 1000.0, (3.7, 5.0, 6.5)
    centre = np.array([0.3, -0.2])
    second = n * (spread**2 * np.array([[1, r], [r, 1]]) + np.outer(centre, centre))

    def play(stated: float) -> list[Interval | None]:
        found = []
        for _ in range(reps):
            noise = rng.normal(size=6) * np.repeat(sd, (1, 2, 3))
            own = second + np.array([[noise[3], noise[4]], [noise[4], noise[5]]])
            variances = (sd[0] ** 2 * stated, sd[1] ** 2 * stated, sd[2] ** 2 * stated)
            first = n * centre + noise[1:3]
            found += correlations(
                Sums(n=n + noise[0], first=first, second=own, variances=variances, people_per_unit=0.0)
            )[0]
        return found

    found = play(1.0)
    assert covers(found, r) >= 0.95 - around(0.95, reps)
    wide = np.mean([(one.low, one.high) == (-1.0, 1.0) for one in found if one is not None])
    assert wide > 0.9 if spread <= 0.1 else wide < 0.6
    if spread > 0.1:
        assert covers(play(0.16), r) < 0.85


def test_correlations_are_shown_as_one_matrix_with_the_ends_of_what_was_released() -> None:
    """r = .9, .9, -.9 is no correlation matrix; the nearest is known: off-diagonals of 1/2 by symmetry."""
    rows = [[normal(0.9, 0.01, 0.0), normal(0.9, 0.01, 0.0)], [normal(-0.9, 0.01, 0.0)], []]
    found = display_correlations(rows)
    estimates = [one.estimate for row in found for one in row]
    assert estimates == pytest.approx([0.5, 0.5, -0.5], abs=1e-6)
    assert [(one.low, one.high) for one in found[0]] == [(one.low, one.high) for one in rows[0]]


def test_the_nearest_correlation_matrix_is_one_and_none_is_nearer() -> None:
    rng = np.random.default_rng(12)
    for _ in range(20):
        noisy = np.tanh(rng.normal(size=(4, 4)))
        noisy = (noisy + noisy.T) / 2
        np.fill_diagonal(noisy, 1.0)
        found = nearest_correlation(noisy)
        assert np.linalg.eigvalsh(found).min() > -1e-9
        assert np.diag(found) == pytest.approx(1.0)
        distance = np.linalg.norm(found - noisy)
        for _ in range(50):
            root = rng.normal(size=(4, 4)) * 0.1 + np.linalg.cholesky(found + 1e-9 * np.eye(4))
            root /= np.linalg.norm(root, axis=1, keepdims=True)
            assert np.linalg.norm(root @ root.T - noisy) > distance - 1e-6
        assert nearest_correlation(found) == pytest.approx(found, abs=1e-6)


def test_nothing_is_known_of_correlations_of_numbers_without_spread() -> None:
    first, second = np.array([5.0, 5.0]), np.array([[2.0, 0.0], [0.0, 2.0]])
    ((one,), _) = correlations(
        Sums(n=100.0, first=first, second=second, variances=(1.0, 1.0, 1.0), people_per_unit=1.0)
    )
    assert (one.low, one.high, one.low_here, one.high_here) == (-1.0, 1.0, -1.0, 1.0)


# --- survival -----------------------------------------------------------------------------------------------

_GRID = tuple(np.linspace(0, 5, 9).tolist())
_TRUE = np.exp(-((np.array(_GRID[1:]) / 6.5) ** 1.2))


def simulated(rng: np.random.Generator, n: int, sd: float) -> tuple[np.ndarray, np.ndarray, Strategy]:
    """Return noisy exits, last first, and events of Weibull times under uniform censoring."""
    size, strategy = len(_GRID) - 1, Strategy("prefix", len(_GRID))
    time, censored = 6.5 * rng.weibull(1.2, n), np.minimum(5.0, 1 + 4.8 * rng.random(n))
    left, happened = np.minimum(time, censored), time <= censored
    place = np.clip(np.searchsorted(_GRID, left, side="left") - 1, 0, None)
    place = np.where(left >= 5.0, size, place)
    exits = np.bincount(place, minlength=size + 1)[::-1]
    events = np.bincount(place[happened & (place < size)], minlength=size)
    noisy = strategy.decoder @ (strategy.matrix @ exits + sd * rng.normal(size=size + 1))
    return noisy, events + sd * rng.normal(size=size), strategy


def test_the_kaplan_meier_band_covers_simultaneously() -> None:
    rng, reps, n, sd = np.random.default_rng(8), 300, 1500, 5.0
    inside, points, blind_points = 0, [], []
    for _ in range(reps):
        exits, events, strategy = simulated(rng, n, sd)
        found = curve((exits, sd**2 * strategy.covariance), (events, sd**2 * np.eye(8)), _GRID, 1.0)
        assert len(found.grid) == 8
        low, high = found.band()
        inside += bool(((low <= _TRUE) & (high >= _TRUE)).all())
        at = found.point(4)
        points.append(at)
        blind_points.append(abs(at.estimate - _TRUE[4]) < NORMAL_95 * math.sqrt(at.estimate * 0.5 / n) * 0.6)
    assert inside / reps == pytest.approx(0.95, abs=around(0.95, reps))
    assert covers(list(points), _TRUE[4]) == pytest.approx(0.95, abs=around(0.95, reps))
    assert np.mean(blind_points) < 0.85


def test_the_band_covers_where_hardly_an_event_was_seen_and_noise_is_small() -> None:
    rng, reps, n, sd, hazard = np.random.default_rng(9), 400, 200, 0.5, 0.01
    grid, inside, blind_inside = (0.0, 1.0, 2.0, 3.0, 4.0), 0, 0
    true = np.exp(-hazard * np.array(grid[1:]))
    for _ in range(reps):
        time, censored = rng.exponential(1 / hazard, n), rng.uniform(0, 8, n)
        place = np.minimum(np.ceil(np.minimum(time, censored)), 5).astype(int) - 1
        exits = np.bincount(place, minlength=5)[::-1] + sd * rng.normal(size=5)
        happened = (time <= censored) & (place < 4)
        events = np.bincount(place[happened], minlength=4) + sd * rng.normal(size=4)
        found = curve((exits, sd**2 * np.eye(5)), (events, sd**2 * np.eye(4)), grid, 1.0)
        for band in (found, replace(found, few=0 * found.few)):
            low, high = band.band()
            held = bool(((low <= true) & (high >= true)).all())
            inside += held and band is found
            blind_inside += held and band is not found
    assert inside / reps == pytest.approx(0.95, abs=around(0.95, reps))
    assert blind_inside / reps < 0.95 - around(0.95, reps)


def test_the_band_holds_where_noise_is_not_small_beside_those_at_risk() -> None:
    """Thirty of 1,000 are left at the end, under noise of 15 in every count: noise must not choose what is shown."""
    rng, reps, n, sd, hazard, size = np.random.default_rng(11), 300, 1000, 15.0, 0.5, 8
    grid, inside, lengths = tuple(map(float, range(size + 1))), 0, []
    true = np.exp(-hazard * np.array(grid[1:]))
    for _ in range(reps):
        place = np.minimum(np.ceil(rng.exponential(1 / hazard, n)), size + 1).astype(int) - 1
        counts = np.bincount(place, minlength=size + 1)
        exits = counts[::-1] + sd * rng.normal(size=size + 1)
        events = counts[:size] + sd * rng.normal(size=size)
        found = curve((exits, sd**2 * np.eye(size + 1)), (events, sd**2 * np.eye(size)), grid, 1.0)
        low, high = found.band()
        k = len(found.grid)
        inside += bool(((low <= true[:k]) & (high >= true[:k])).all())
        lengths.append(k)
    assert inside / reps > 0.95 - around(0.95, reps)
    assert 5 < np.mean(lengths) < 7.5


def test_intervals_of_rare_events_hold_although_noise_makes_counts_negative() -> None:
    """Hazards cut off at 0 would pull S down with every interval: S = 0.98 over 40 intervals came out as 0.94."""
    rng, reps, n, size, sd = np.random.default_rng(10), 200, 2000, 40, 4.0
    hazard = 0.02 / size
    truth = (1 - hazard) ** size
    points = []
    for _ in range(reps):
        when = rng.geometric(hazard, n)
        events = np.bincount(when[when <= size] - 1, minlength=size).astype(float)
        exits = np.concatenate(([float((when > size).sum())], events[::-1]))
        noisy = exits + sd * rng.normal(size=size + 1), sd**2 * np.eye(size + 1)
        happened = events + sd * rng.normal(size=size), sd**2 * np.eye(size)
        points.append(curve(noisy, happened, tuple(map(float, range(size + 1))), 1.0).point(size - 1))
    error = np.mean([one.estimate for one in points]) - truth
    assert abs(error) < 6 * np.std([one.estimate for one in points]) / math.sqrt(reps) + 0.004
    assert covers(points, truth) > 0.95 - around(0.95, reps)


def test_without_noise_the_curve_is_that_of_lifelines_up_to_the_grid() -> None:
    """No censoring: the actuarial estimate is the product-limit estimate at the grid's points."""
    from lifelines import KaplanMeierFitter

    time = 6.5 * np.random.default_rng(9).weibull(1.2, 2000)
    left, size = np.minimum(time, 5.0), len(_GRID) - 1
    place = np.where(left >= 5.0, size, np.clip(np.searchsorted(_GRID, left, side="left") - 1, 0, None))
    exits = np.bincount(place, minlength=size + 1)
    zero = np.zeros((size + 1, size + 1))
    found = curve((exits[::-1], zero), (exits[:size].astype(float), zero[:size, :size]), _GRID, 1.0)
    peer = KaplanMeierFitter().fit(left, time < 5.0).survival_function_at_times(np.array(_GRID[1:]) - 1e-9)
    assert found.survival == pytest.approx(peer.to_numpy(), abs=1e-9)
    greenwood = (1 - found.survival) / (found.survival * 2000)
    assert np.diag(found.covariance) == pytest.approx(greenwood, rel=1e-6)


def test_a_curve_ends_where_too_few_are_at_risk() -> None:
    exits, events = np.array([3.0, 2.0, 95.0]), np.array([50.0, 1.0])
    found = curve((exits, np.eye(3)), (events, np.eye(2)), (0.0, 1.0, 2.0), 1.0)
    assert found.grid.tolist() == [1.0]


def test_the_largest_z_is_between_one_and_many_independent_ones() -> None:
    assert largest_z(np.eye(1)) == pytest.approx(NORMAL_95, abs=0.15)
    assert largest_z(np.ones((5, 5))) == pytest.approx(NORMAL_95, abs=0.15)
    assert largest_z(np.eye(5)) == pytest.approx(2.569, abs=0.15)


def test_intervals_hold_of_cells_that_are_asked_for_and_not_of_those_that_are_shown() -> None:
    """As the handbook says: of empty cells under noise of 25 people about .9 % are shown, and none of these holds."""
    found = [normal(noise, 625.0, 0.0) for noise in np.random.default_rng(0).normal(scale=25.0, size=20_000)]
    seen = [one for one in found if suppress_small_count(one, 10.0) is not None]
    assert len(seen) / len(found) == pytest.approx(0.0091, rel=0.15)
    assert not any((one.low or 0) <= 0 for one in seen)
    assert np.mean([(one.low or 0) <= 0 <= (one.high or 0) for one in found]) == pytest.approx(
        0.95, abs=0.005
    )
