"""Regression: bounds of every family, its oracle statsmodels, its solver, and intervals that count the noise."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from benchmarks.inference import LEAST, MOST, MOST_ERROR, Cell, cells, mu_of, simulate
from benchmarks.regressions import SILOS, Made, asked, exact_sum, made, released, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson
from scipy.stats import t as student

from fedveil.data.columns import ColumnTable, Numbers, Places
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.statistics.inference.equation import Sums
from fedveil.statistics.inference.families import Linear, Logistic, PiecewiseExponential, Poisson
from fedveil.statistics.inference.newton import (
    LONGEST_STEP,
    bend,
    covariance,
    effect,
    estimate,
    has_converged,
    leap,
    shrunk_covariance,
    step,
)
from fedveil.statistics.inference.result import TOO_FAR, FittedRegression
from fedveil.statistics.local_vectors import silo_sums
from fedveil.statistics.result import NoisySum

GRID = 2.0**-29
FAMILIES: dict[str, dict[str, Any]] = {
    "logistic": {},
    "linear": {"cut": 2.0},
    "poisson": {"cap": 3},
    "survival": {"grid": (0.0, 1.5, 3.0, 5.0)},
}
LATE = "survival with late entry"
CELL = st.floats(-1e300, 1e300) | st.sampled_from([np.inf, -np.inf, 0.0, 3.0, -3.0]) | st.floats(-4, 4)
RECORD = st.tuples(
    st.integers(0, 2), st.integers(0, 4), st.lists(CELL, min_size=4, max_size=4), st.integers(0, 5)
)


def equation_of(family: str, theta: list[float], place: int = 2) -> Any:
    """Return the local step of a release at a given theta."""
    kind = "survival" if family == LATE else family
    fitted = asked(kind, 10, 2, bound=1.7, **FAMILIES[kind])
    width, found = len(fitted.names), fitted.equation(0)
    if family == LATE:
        found = replace(found, family=replace(fitted.family, entry="e"))
    return replace(found, theta=tuple((theta * width)[:width]), shares=fitted.parts[place].shares)


def people(family: str, records: list[Any]) -> ColumnTable:
    """Return arbitrary records: cells of any size, some of them missing or unreadable."""
    cells = np.array([cells for _, _, cells, _ in records], dtype=np.float64).reshape(-1, 4)
    state = np.array([1 if odd == 5 else 0 for *_, odd in records], dtype=np.int8)
    label = np.array([odd % 2 for *_, odd in records], dtype=np.int64)
    valid = np.zeros(len(records), dtype=np.int8)
    whole = family in ("logistic", "survival", LATE)
    return ColumnTable(
        columns={
            "x0": Numbers(values=cells[:, 0], state=state),
            "x1": Numbers(values=cells[:, 1], state=valid),
            "t": Numbers(values=cells[:, 2], state=valid),
            "e": Numbers(values=cells[:, 3], state=valid),
            "y": Places(values=label, state=valid) if whole else Numbers(values=cells[:, 3], state=valid),
        },
        silo=np.array([silo for _, silo, _, _ in records], dtype=np.int32),
        user=np.array([user for user, _, _, _ in records], dtype=np.int32),
        n_users=10,
        silo_names=SILOS,
    )


# --- what one person moves ----------------------------------------------------------------------------------


def test_a_person_of_many_records_is_summed_in_blocks_and_leaves_others_as_they_were() -> None:
    """One person's number of records took gigabytes, and had everybody else's vectors made one by one."""
    rng, n = np.random.default_rng(0), 250_000
    records = [(0, 0, rng.normal(size=4).tolist(), int(odd)) for odd in rng.integers(0, 2, n)]
    others = [(0, 1 + i % 4, rng.normal(size=4).tolist(), i % 2) for i in range(40)]
    equation = equation_of("linear", [0.1])
    table, few = people("linear", [*records, *others]), people("linear", others)
    _, _, mixed = equation.pairs(table)
    tracemalloc.start()
    found = [(some, one.clone()) for some, one in equation.vectors(table, mixed)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = torch.cat([one for _, one in found]).numpy()
    alone = torch.cat([one for _, one in equation.vectors(few, equation.pairs(few)[2])]).numpy()
    assert np.array_equal(whole[1:], alone)
    half = [people("linear", records[begin::2]) for begin in (0, 1)]
    halves = [
        torch.cat([one for _, one in equation.vectors(t, equation.pairs(t)[2])]).numpy()[0] for t in half
    ]
    sent = equation.width + equation.code.entries  # the spread is no mean over records
    assert np.allclose(whole[0, :sent], sum(halves)[:sent] / 2, rtol=1e-9, atol=1e-12)
    assert len(found) == 2
    assert most < 80e6


@pytest.mark.parametrize("family", [*FAMILIES, LATE])
def test_nobodys_vector_is_rounded_by_others(family: str) -> None:
    """Bit for bit, also beside somebody with so many records that others are computed in blocks of few."""
    rng, step = np.random.default_rng(3), equation_of(family, [0.37, -0.81, 0.29])
    own = [(n % 9, n % 3, rng.normal(size=4).tolist(), int(rng.integers(0, 5))) for n in range(300)]
    many = [(9, 2, rng.normal(size=4).tolist(), 1)] * 10_000

    def vectors(records: list[Any]) -> np.ndarray:
        numbered = [(place if user < 9 else 999, *rest) for place, (user, *rest) in enumerate(records)]
        table = replace(people(family, numbered), n_users=1000)
        table, groups, mixed = step.pairs(table)
        found = np.concatenate([part.numpy().copy() for _, part in step.vectors(table, mixed)])
        chosen: np.ndarray = found[groups.user < 300]
        return chosen

    assert np.array_equal(vectors(own), vectors([*own, *many]))


@pytest.mark.parametrize("family", [*FAMILIES, LATE])
@settings(max_examples=40, deadline=None)
@given(
    records=st.lists(RECORD, min_size=1, max_size=8),
    theta=st.lists(st.floats(-3, 3) | st.floats(-1e6, 1e6), min_size=1, max_size=3),
)
def test_one_person_moves_the_stored_integers_by_the_norm_at_most(
    family: str, records: list[Any], theta: list[float]
) -> None:
    """In rational arithmetic, whatever a user's cells, silos and weights; every block by no more than its share."""
    step_at, bound = equation_of(family, theta), FixedVector(norm=1.0, step=GRID)
    d = step_at.width
    triangle = d * (d + 1) // 2
    for weights in (Weights.BY_RECORDS, Weights.UNIFORM):
        sums = []
        for kept in (records, [one for one in records if one[0] != 0]):
            if not kept:
                sums.append(np.zeros(step_at.length))
                continue
            table = people(family, kept)
            of_pairs = weights.for_groups(table.pairs(), len(SILOS), table.n_users)
            sums.append(silo_sums(step_at, table, of_pairs, bound).sum(axis=0) / GRID)
        moved = [Fraction(int(a)) - Fraction(int(b)) for a, b in zip(*sums, strict=True)]
        assert sum(one**2 for one in moved) <= Fraction(1 / GRID) ** 2
        shares = step_at.shares
        blocks = (moved[:d], moved[d : d + triangle], moved[d + triangle :])
        for block, share in zip(blocks, (shares.gradient, shares.curvature, shares.spread), strict=True):
            assert sum(one**2 for one in block) <= Fraction(share * (1 + 1e-12)) * Fraction(1 / GRID) ** 2


@pytest.mark.parametrize(
    ("family", "reached"),
    [
        (Logistic("y"), 0.98),
        (Linear("y", 0.0, 2.0), 0.98),
        (Poisson("y", 3), 0.98),
        (PiecewiseExponential("t", "y", (0.0, 1.0, 2.0), 0.5), 0.98),
    ],
)
def test_bounds_are_reached_and_not_exceeded(family: Any, reached: float) -> None:
    """A search over covariates, targets and theta: claims two percent smaller would be false."""
    rng = np.random.default_rng(1)
    size = 4000
    longest = widest = 0.0
    for bound, scale in itertools.product((1.6, 2.5), (0.1, 1.0, 3.0, 8.0)):
        x = rng.normal(size=(size, 2)) * rng.choice([0.3, 1, 3], size=(size, 1))
        target = np.stack((rng.random(size) * 3, rng.integers(0, 2, size).astype(float)), axis=1)
        if family.name != "survival":
            target = target[:, 1:] * (1 if family.name == "logistic" else 4)
        weight = np.minimum(1, bound**2 / (1 + (x**2).sum(axis=1)))
        for _ in range(4):
            theta = rng.normal(size=len(family.leading) + 2) * scale
            score, curvature = family.terms(x, target, theta)
            lengths = np.linalg.norm(score, axis=1) * weight / family.score_norm(bound)
            widths = np.linalg.norm(curvature, axis=(1, 2)) * weight / family.curvature_norm(bound)
            longest, widest = max(longest, float(lengths.max())), max(widest, float(widths.max()))
    assert reached < longest <= 1 + 1e-12
    assert reached < widest <= 1 + 1e-12


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.lists(st.floats(-1, 1), min_size=3, max_size=3)), min_size=1, max_size=4
    )
)
def test_the_spread_covers_people_in_several_silos(silos: list[Any]) -> None:
    """(sum w psi)(sum w psi)' is at most sum w psi psi' for weights that sum to at most 1; not for larger weights."""
    total = max(1.0, sum(weight for weight, _ in silos))
    score = sum(np.array(psi) * weight / total for weight, psi in silos)
    released = sum(np.outer(psi, psi) * weight / total for weight, psi in silos)
    assert np.linalg.eigvalsh(released - np.outer(score, score)).min() >= -1e-12


# --- the equations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Logistic("y"), Linear("y", 0.0, 2.0), Poisson("y", 4)])
def test_the_curvature_is_the_slope_of_the_score(family: Any) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(50, 2)), rng.integers(0, 2, size=(50, 1)).astype(float)
    theta = np.array([0.2, -0.3, 0.4])
    _, curvature = family.terms(x, y, theta)
    for place in range(3):
        ahead, behind = theta.copy(), theta.copy()
        ahead[place] += 1e-6
        behind[place] -= 1e-6
        slope = (family.terms(x, y, behind)[0] - family.terms(x, y, ahead)[0]) / 2e-6
        assert np.allclose(slope, curvature[:, :, place], atol=1e-6)


def test_capped_counts_have_residuals_of_mean_zero() -> None:
    """Exactly, by the sum over all counts; with the plain mean in place of the capped one they have not."""
    family, predictor = Poisson("y", 3), np.log(np.array([0.8, 1.0, 2.5]))
    counts = np.arange(60)
    for place, eta in enumerate(predictor):
        mass = poisson.pmf(counts, np.exp(eta))
        r, _ = family.residual(counts.astype(float), np.full(60, eta))
        assert float(mass @ r) == pytest.approx(0, abs=1e-9), place
        assert abs(float(mass @ (np.minimum(counts, 3) - np.exp(eta)))) > 0.001


@pytest.mark.parametrize("cap", [1, 2, 3, 40, 1000])
def test_the_mean_of_capped_counts_is_its_sum_over_counts(cap: int) -> None:
    family, eta = Poisson("y", cap), np.linspace(-30, 30, 241)
    mu = np.exp(eta)
    r, v = family.residual(np.zeros(len(eta)), eta)
    assert np.allclose(-r, sum(poisson.sf(k, mu) for k in range(cap)), rtol=1e-12, atol=1e-12 * cap)
    assert np.allclose(v, np.minimum(mu * poisson.cdf(cap - 1, mu), family.largest), rtol=1e-12)
    assert ((-r >= 0) & (-r <= cap)).all()


def test_a_large_cap_costs_no_more_than_a_small_one() -> None:
    """Every count up to the cap had an array of its own: a block of records took gigabytes at a cap of 1,000."""
    family, eta = Poisson("y", 1000), np.linspace(-3, 7, 10_000)
    assert family.largest > 0
    tracemalloc.start()
    family.residual(np.zeros(len(eta)), eta)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 * eta.nbytes


def test_stopped_martingales_have_mean_zero_at_the_truth() -> None:
    """Within 5 standard errors at the true hazards, and not at hazards 5 % off."""
    rng = np.random.default_rng(3)
    n, beta = 200_000, np.array([0.6])
    x = rng.normal(size=(n, 1))
    time = rng.exponential(size=n) / (0.4 * np.exp(x @ beta))
    censored = 4 * rng.random(n)
    target = np.stack((np.minimum(time, censored), (time <= censored).astype(float)), axis=1)
    family = PiecewiseExponential("t", "y", (0.0, 1.0, 3.0), 0.4)
    truth = np.array([np.log(0.4), np.log(0.4), 0.6])

    def z(theta: np.ndarray) -> np.ndarray:
        score, _ = family.terms(x, target, theta)
        found: np.ndarray = score.mean(axis=0) / (score.std(axis=0) / np.sqrt(n))
        return found

    assert np.abs(z(truth)).max() < 5
    assert np.abs(z(truth + np.log(1.05))).max() > 8


def test_events_at_a_point_of_the_grid_are_of_the_interval_before_it() -> None:
    family = PiecewiseExponential("t", "y", (0.0, 1.0, 2.0), 0.01)
    theta = np.log(np.array([0.01, 0.01]))
    times = np.array([[1.0, 1], [2.0, 1], [2.5, 1], [0.0, 1], [np.inf, 1]])
    score, _ = family.terms(np.empty((5, 0)), times, theta)
    events = score + np.array([[0.01, 0], [0.01, 0.01], [0.01, 0.01], [0, 0], [0.01, 0.01]])
    assert events.round(12).tolist() == [[1, 0], [0, 1], [0, 0], [0, 0], [0, 0]]


# --- the oracle: statsmodels on the same weighted equation --------------------------------------------------


def solved(one: Made, theta: np.ndarray | None = None) -> tuple[FittedRegression, Sums]:
    """Return the solution without noise, by many steps from the start or from a theta, and the sums there."""
    sums = None
    for _ in range(12):
        at = one.fitted.equation(2)
        at = at if theta is None else replace(at, theta=tuple(theta.tolist()))
        weights = Weights.BY_RECORDS.for_groups(one.table.pairs(), 5, one.table.n_users).numpy()
        records, _, mixed = at.pairs(one.table)
        exact = sum(weights[some] @ vectors.numpy() for some, vectors in at.vectors(records, mixed))
        sums = at.sums(exact, 1e-9)
        theta = sums.theta + np.linalg.solve(sums.curvature, sums.gradient)
    assert sums is not None
    assert np.abs(sums.gradient).max() < 1e-6
    return one.fitted, sums


def weights_of(one: Made) -> tuple[np.ndarray, np.ndarray]:
    """Return the design with its intercept, and every record's weight a / N_u."""
    x, _ = one.fitted.design.covariates(one.table)
    bound = one.fitted.equation(0).bound
    count = np.bincount(one.table.user)
    return sm.add_constant(x), np.minimum(1, bound**2 / (1 + (x**2).sum(axis=1))) / count[one.table.user]


@pytest.mark.filterwarnings("ignore:cov_type not fully supported with var_weights")
@pytest.mark.parametrize(
    ("family", "keys", "model"),
    [
        ("logistic", {}, sm.families.Binomial()),
        ("poisson", {"cap": 40}, sm.families.Poisson()),
        ("linear", {"cut": 1e6}, sm.families.Gaussian()),
    ],
)
def test_the_solution_is_that_of_statsmodels_with_clustered_covariance(
    family: str, keys: dict[str, Any], model: Any
) -> None:
    """Nobody in two silos, no noise: coefficients and the sandwich over people agree to seven digits."""
    one = made(family, 300, 0.0, np.random.default_rng(4), **keys)
    _, sums = solved(one)
    x, weight = weights_of(one)
    column = one.table.columns["y"]
    oracle = sm.GLM(column.values.astype(float), x, family=model, var_weights=weight).fit(
        tol=1e-12,
        maxiter=100,
        cov_type="cluster",
        cov_kwds={"groups": one.table.user, "use_correction": False, "df_correction": False},
    )
    scale = one.fitted.family.unit
    assert np.allclose(sums.theta * scale, oracle.params, atol=1e-6)
    curvature = np.linalg.inv(sums.curvature)
    assert sums.spread is not None
    assert np.allclose(
        curvature @ sums.spread @ curvature * scale**2, oracle.cov_params(), rtol=1e-4, atol=1e-9
    )


def test_piecewise_hazards_are_those_of_a_poisson_regression_of_split_records() -> None:
    """Where nobody is followed to the end of c: one row an interval, offset log exposure."""
    rng = np.random.default_rng(5)
    n, grid = 400, (0.0, 1.0, 3.0)
    x = rng.normal(size=(n, 2))
    time, censored = rng.exponential(size=n) / (0.02 * np.exp(0.3 * x[:, 0])), 3.5 * rng.random(n)
    target = {"t": np.minimum(time, censored), "y": (time <= censored).astype(np.int64)}
    table = table_of(np.arange(n), np.zeros(n), x, target)
    one = Made(asked("survival", n, 2, grid=grid, rate=0.02, hazard=1.0), table, np.zeros(4))
    _, sums = solved(one)
    covariates, _ = one.fitted.design.covariates(table)
    weight = np.minimum(1, one.fitted.equation(0).bound ** 2 / (1 + (covariates**2).sum(axis=1)))
    rows = []
    for low, high in itertools.pairwise(grid):
        exposure = np.clip(target["t"] - low, 0, high - low)
        happened = (target["y"] == 1) & (target["t"] > low) & (target["t"] <= high)
        place = np.tile([float(low == 0), float(low == 1)], (n, 1))
        rows.append(np.column_stack((happened, exposure, weight, place, covariates))[exposure > 0])
    split = np.concatenate(rows)
    oracle = sm.GLM(
        split[:, 0],
        split[:, 3:],
        family=sm.families.Poisson(),
        offset=np.log(split[:, 1]),
        freq_weights=split[:, 2],
    ).fit(tol=1e-12)
    assert np.allclose(sums.theta, oracle.params, atol=1e-6)


# --- the solver ---------------------------------------------------------------------------------------------


def sums_at(theta: np.ndarray, solution: np.ndarray, slope: np.ndarray, sd: float) -> Sums:
    """Return the sums of a linear equation without noise, said to have some."""
    return Sums(
        theta=theta,
        gradient=slope @ (solution - theta),
        curvature=slope,
        spread=np.eye(len(theta)),
        gradient_sd=sd,
        curvature_sd=sd / 50,
    )


def test_a_linear_equation_is_solved_exactly_by_any_number_of_releases() -> None:
    rng = np.random.default_rng(6)
    slope, solution = np.diag([4.0, 5.0, 6.0]) + 0.5, np.array([0.3, -0.2, 0.5])
    found = [sums_at(rng.normal(size=3), solution, slope, sd) for sd in (3.0, 1.0, 2.0)]
    for many in (1, 2, 3):
        assert np.allclose(estimate(found[:many]).theta, solution)
    assert np.linalg.norm(step([sums_at(np.zeros(3), 100 * solution, slope, 1.0)])) == pytest.approx(
        LONGEST_STEP
    )


def test_releases_near_the_solution_count_by_their_noise() -> None:
    """Inverse variances: of two equations at the solution with sd 3 and 1, nine tenths are the second's."""
    solution, slope = np.zeros(2), np.eye(2) * 1e4
    off = sums_at(np.array([1e-9, 0.0]), solution, slope, 3.0)
    near = sums_at(solution, solution, slope, 1.0)
    noise = estimate([off, near]).noise
    assert np.allclose(noise, np.eye(2) * (0.1**2 * 9 + 0.9**2), rtol=1e-6)


def test_the_noise_of_a_curvature_counts_with_the_distance_that_it_multiplies() -> None:
    """The covariance of E d for symmetric E, against 200,000 draws; a tenth less is refused by the draws."""
    rng = np.random.default_rng(7)
    far = sums_at(np.array([1.0, 2.0]), np.zeros(2), np.eye(2) * 1e3, 1e-3)
    claimed = estimate([far]).noise - np.eye(2) * 1e-6
    draws = rng.normal(size=(200_000, 3)) * far.curvature_sd / np.sqrt([1, 2, 1])
    moved = np.stack((draws[:, 0] + 2 * draws[:, 1], draws[:, 1] + 2 * draws[:, 2]), axis=1)
    seen = moved.T @ moved / len(moved)
    assert np.allclose(seen, claimed, rtol=0.03, atol=0)
    assert not np.allclose(seen, 0.9 * claimed, rtol=0.03, atol=0)


def test_the_bend_of_survival_is_the_third_moment_of_its_records() -> None:
    """Of 1,000,000 covariates that are normal in two intervals, by the loop over them; a tenth less is refused."""
    rng = np.random.default_rng(8)
    place, mean = rng.random(1_000_000) < 0.4, np.array([[0.5, -0.2], [-0.3, 0.4]])
    x = mean[place.astype(int)] + rng.normal(size=(len(place), 2)) @ np.array([[1.0, 0.5], [0.0, 0.7]])
    z = np.column_stack((~place, place, x)).astype(np.float64)
    one = replace(sums_at(np.zeros(4), np.zeros(4), z.T @ z, 1.0), leading=2, stopped=True)
    distance = np.array([0.3, -0.2, 0.1, 0.4])
    seen, told = (z * (z @ distance)[:, None]).T @ z, bend(one, distance)
    assert np.allclose(told, seen, atol=0.01 * len(place))
    assert not np.allclose(0.9 * told, seen, atol=0.01 * len(place))


def test_stopped_records_are_solved_with_their_bend() -> None:
    """From both sides of the truth, so that what is left is even, beside five standard errors of people."""
    rng = np.random.default_rng(8)
    n, truth, away = 300_000, np.array([np.log(0.5), 0.6]), np.array([0.15, -0.15])
    x = rng.normal(size=(n, 1))
    time = rng.exponential(size=n) / np.exp(truth[0] + x[:, 0] * truth[1])
    family = PiecewiseExponential("t", "y", (0.0, 5.0), 0.4)
    target = np.stack((time, np.ones(n)), axis=1)
    off = {True: np.zeros(2), False: np.zeros(2)}
    for side, stopped in itertools.product((-1, 1), off):
        score, curvature = family.terms(x, target, truth + side * away)
        one = sums_at(truth + side * away, truth, curvature.sum(axis=0), 1e-3)
        one = replace(one, gradient=score.sum(axis=0), stopped=stopped)
        off[stopped] += (estimate([one]).theta - truth) / 2
    error = np.sqrt(np.diag(np.linalg.inv(curvature.sum(axis=0))))
    assert (np.abs(off[True]) < 5 * error).all()
    assert (np.abs(off[False]) > 5 * error).all()


def spread_drawn(truth: np.ndarray, sd: float, slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return errors of 400 noisy spreads, and of what they are drawn to."""
    rng, size = np.random.default_rng(8), len(truth)
    before, after = [], []
    for _ in range(400):
        noise = rng.normal(size=(size, size)) * sd
        noise = np.triu(noise, 1) / np.sqrt(2) + np.diag(np.diag(noise))
        noisy = truth + noise + np.triu(noise, 1).T
        found, _, _ = shrunk_covariance(noisy, sd, slope, 1)
        assert np.linalg.eigvalsh(found).min() > -1e-9
        before.append(noisy - truth)
        after.append(found - truth)
    return np.array(before), np.array(after)


def test_a_spread_is_drawn_to_what_it_is_like_and_left_alone_where_it_is_known() -> None:
    """Squared errors of any spread are no larger than before; a tenth where the model holds; the same without noise."""
    slope = np.diag([5.0, 4.0, 4.0, 3.0, 3.0, 2.0]) + 0.3
    like = 2 * slope + 0.5 * np.outer(slope[0], slope[0])
    other = like + np.diag([0, 30.0, -4, 0, 10, 0])
    before, after = spread_drawn(like, 2.0, slope)
    assert (after**2).sum() < 0.25 * (before**2).sum()
    for sd in (0.01, 2.0, 20.0):
        before, after = spread_drawn(other, sd, slope)
        assert (after**2).sum() < 1.02 * (before**2).sum(), sd
    before, after = spread_drawn(other, 0.01, slope)
    assert np.allclose(after, before, atol=1e-3)


def test_intervals_are_wider_where_the_spread_is_not_known() -> None:
    """Degrees of freedom 2 V^2 / t^2 with nothing to be drawn to: t is that of a' E a in 100,000 draws."""
    slope, sd = np.diag([40.0, 30.0]) + 2.0, 50.0
    last = replace(
        sums_at(np.zeros(2), np.zeros(2), slope, 1.0), spread=np.diag([300.0, 250.0]), spread_sd=sd
    )
    told = covariance(estimate([last]), last)
    rng, inverse = np.random.default_rng(8), np.linalg.inv(slope)
    draws = rng.normal(size=(100_000, 3)) * sd / np.sqrt([1, 2, 1])
    square = inverse[0, 0] ** 2, 2 * inverse[0, 0] * inverse[0, 1], inverse[0, 1] ** 2
    unsure = float((draws @ np.array(square)).std())
    assert told.freedom[0] == pytest.approx(2 * (told.whole[0, 0] / unsure) ** 2, rel=0.02)
    assert told.reach[0] == pytest.approx(
        student.ppf(0.975, told.freedom[0]) * np.sqrt(told.whole[0, 0]), rel=1e-9
    )
    sure = replace(last, spread_sd=1e-9)
    assert covariance(estimate([sure]), sure).reach[0] == pytest.approx(
        1.959964 * np.sqrt(told.whole[0, 0]), rel=1e-6
    )


def test_a_coefficient_is_told_in_units_of_its_column() -> None:
    one = effect("age", (0.5, 0.04, 0.01, 1e9), 0.1, multiplies=True)
    assert (one.estimate, one.low, one.high) == pytest.approx((0.05, 0.0108, 0.0892), abs=1e-4)
    assert one.z == pytest.approx(2.5)
    assert one.p == pytest.approx(0.012419, abs=1e-6)
    assert one.privacy == pytest.approx(0.25)
    assert one.ratio == pytest.approx((np.exp(0.05), np.exp(one.low), np.exp(one.high)))


# --- intervals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["logistic", "linear"])
def test_a_thousand_people_at_epsilon_1_are_enough(family: str) -> None:
    """Twelve runs of eight coefficients: errors as small as promised; intervals hold, and not without the noise."""
    found = simulate(Cell(family, 1000, 1.0, 0.5, FAMILIES[family]), range(12))
    assert found.rmse < MOST_ERROR[family]
    assert found.all > 90
    assert 100 * found.naive.mean() < 88


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell.label)
def test_intervals_of_a_hundred_simulations_hold(cell: Cell) -> None:
    """All runs, those that are shown, and every coefficient; `fedveil bench inference` plays a thousand of each cell.

    Three standard errors are allowed, and four of one coefficient, which is 2.2 each.
    """
    found = simulate(cell, range(100))
    assert LEAST - found.spread <= found.all <= MOST + found.spread
    assert LEAST - found.spread <= found.given_shown <= MOST + found.spread
    assert found.shown.mean() >= (0.7 if cell.keys.get("covariates") == 5 and cell.epsilon == 1.0 else 0.9)
    assert found.by_coefficient.min() >= LEAST - 4 * 2.2
    if cell.family in MOST_ERROR and (cell.n_users, cell.epsilon) == (1000, 1.0):
        assert found.rmse <= MOST_ERROR[cell.family]


def test_too_few_people_have_no_intervals() -> None:
    """Three intervals and five covariates of 1000 people at epsilon 1: refused after the release, run by run."""
    rng = np.random.default_rng(9)
    one = made("survival", 1000, 0.0, rng, covariates=5, grid=(0.0, 1.5, 3.0, 5.0))
    fitted = released(one, mu_of(1.0), rng)
    assert not fitted.has_intervals
    assert fitted.effects == ()
    assert np.isfinite(fitted.estimate.theta).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_alone_has_no_intervals_and_ends_no_run(family: str) -> None:
    """Where no interval of follow-up stood out of its noise, a charged regression ended by an error."""
    rng = np.random.default_rng(3)
    for sd in (0.5, 5.0, 100.0):
        for _ in range(6):
            fitted = asked(family, 1000, 2, bound=1.7, **FAMILIES[family])
            for place in range(len(fitted.parts)):
                equation = fitted.equation(place)
                assert np.isfinite(equation.theta).all()
                fitted = fitted.with_release(NoisySum(sd * rng.normal(size=equation.length), sd))
            assert fitted.hidden_reason is not None
            assert fitted.effects == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_that_no_records_have_end_no_run(family: str) -> None:
    """Sums that are large beside their noise, as a lying silo sends: matrices that no solver inverted."""
    rng = np.random.default_rng(3)
    for size, sd in ((1.0, 1e-10), (1e5, 1.0), (1e5, 1e-15), (1e15, 1.0), (2.0**53, 2.0**-53)):
        fitted = asked(family, 1000, 2, bound=1.7, **FAMILIES[family])
        for place in range(len(fitted.parts)):
            equation = fitted.equation(place)
            assert np.isfinite(equation.theta).all()
            fitted = fitted.with_release(NoisySum(size * rng.normal(size=equation.length), sd))
        assert all(np.isfinite(one.estimate) for one in fitted.effects)


def one_record_each(family: str, start: float, **keys: Any) -> Made:
    """Return 1,500 people with one record, two covariates, and an intercept of ``start``."""
    rng, beta = np.random.default_rng(12), np.array([0.6, -0.4])
    user = np.arange(1500)
    x = np.clip(rng.normal(size=(1500, 2)), -2.5, 2.5)
    predictor = start + x @ beta
    if family == "survival":
        time, last = rng.exponential(size=1500) / np.exp(predictor), keys["grid"][-1]
        target = {"t": np.minimum(time, last), "y": (time <= last).astype(np.int64)}
        truth = np.concatenate((np.full(len(keys["grid"]) - 1, start), beta))
    else:
        target = {
            "logistic": lambda: {"y": (rng.random(1500) < 1 / (1 + np.exp(-predictor))).astype(np.int64)},
            "linear": lambda: {"y": predictor + rng.normal(size=1500)},
            "poisson": lambda: {"y": rng.poisson(np.exp(predictor)).astype(np.float64)},
        }[family]()
        truth = np.concatenate(([start], beta))
    return Made(asked(family, 1500, 2, **keys), table_of(user, user % 5, x, target), truth)


@pytest.mark.parametrize(
    ("family", "start", "keys"),
    [
        ("logistic", -3.5, {}),
        ("logistic", 2.5, {}),
        ("poisson", -2.5, {"cap": 5}),
        ("poisson", 1.2, {"cap": 10}),
        ("survival", -4.0, {"grid": (0.0, 2.0, 5.0)}),
        ("survival", -17.8, {"grid": (0.0, 2e6, 5e6)}),  # times in seconds
        ("linear", 2.5, {"cut": 2.0}),
    ],
)
def test_rare_and_frequent_outcomes_are_reached_in_three_releases(
    family: str, start: float, keys: dict[str, Any]
) -> None:
    """Hardly any noise: the estimate is the solution to a fifth of a standard error, from a start at no effects."""
    one = one_record_each(family, start, **keys)
    fitted = released(one, 300.0, np.random.default_rng(13))
    error = np.sqrt(np.diag(covariance(fitted.estimate, fitted.sums[-1]).whole))
    assert fitted.has_intervals
    assert np.abs((fitted.estimate.theta - solved(one, fitted.estimate.theta)[1].theta) / error).max() < 0.2


def test_a_start_that_is_too_far_has_no_intervals() -> None:
    """Residuals that end at two cannot say that the mean is six away; a nearer centre can."""
    far = one_record_each("linear", 6.0, cut=2.0)
    found = released(far, 10.0, np.random.default_rng(14))
    assert (found.hidden_reason, found.effects) == (TOO_FAR, ())
    near = one_record_each("linear", 6.0, cut=2.0, centre=5.0)
    assert released(near, 10.0, np.random.default_rng(14)).has_intervals


def test_a_bend_that_an_interval_does_not_have_is_refused() -> None:
    """Half a predictor away from an outcome of one in twenty the line misses a standard error."""
    one = one_record_each("logistic", -3.0)
    fitted = released(one, 10.0, np.random.default_rng(15))
    assert has_converged(fitted.family, fitted.sums, fitted.estimate)
    last = replace(fitted.sums[-1], theta=fitted.estimate.theta + np.array([0.5, 0.0, 0.0]))
    assert not has_converged(fitted.family, [*fitted.sums[:-1], last], fitted.estimate)


def test_the_leap_undoes_the_mean_and_leaves_room_for_noise() -> None:
    family = Logistic("y")
    sums = Sums(
        theta=np.zeros(1),
        gradient=np.array([1000 * (0.03 - 0.5)]),
        curvature=np.array([[250.0]]),
        spread=None,
        gradient_sd=1e-9,
        curvature_sd=1e-9,
    )
    found = leap(family, sums)
    assert found is not None
    assert float(found[0]) == pytest.approx(np.log(0.03 / 0.97))
    noisy = leap(family, replace(sums, gradient_sd=25.0))  # a share with noise of .025: no lower than .05
    assert noisy is not None
    assert float(noisy[0]) == pytest.approx(np.log(0.05 / 0.95), rel=1e-4)
    assert leap(family, replace(sums, gradient=np.array([-200.0]))) is None


def test_sums_are_read_back_from_their_vector() -> None:
    """Curvature and spread are symmetric, and what they are by the loop over people."""
    one = made("logistic", 40, 0.5, np.random.default_rng(10))
    at = one.fitted.equation(2)
    sums = at.sums(exact_sum(one.fitted, one.table, 2), 1.0)
    x, weight = weights_of(one)
    y = one.table.columns["y"].values
    score = x * ((y - 0.5) * weight)[:, None]
    pairs = one.table.pairs()
    count = np.bincount(one.table.user)
    spread = np.zeros((8, 8))
    for start, size, user in zip(pairs.start, pairs.size, pairs.user, strict=True):
        own = score[pairs.order[start : start + size]].sum(axis=0) * count[user] / size
        spread += np.outer(own, own) * size / count[user]
    assert np.allclose(sums.gradient, score.sum(axis=0))
    assert np.allclose(sums.curvature, (x * (0.25 * weight)[:, None]).T @ x)
    assert sums.spread is not None
    assert np.allclose(sums.spread, spread)
