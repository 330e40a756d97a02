"""The error of every channel has exactly its law, wherever the update is: accept the right scale, reject a wrong one.

Everything goes through real bytes. Seeds are fixed, so a test passes or fails for ever; had they been drawn at random,
each threshold would be crossed with a probability below 1e-8, the whole file below 1e-6.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from fedveil.quantization import (
    BallLaw,
    CellLaw,
    ChannelError,
    Codec,
    GaussianLaw,
    InsecureSimulationStreams,
    LaplaceLaw,
    LayeredQuantizer,
    NoiseLaw,
    StudentLaw,
    UnsupportedPairError,
    lattice,
)
from fedveil.quantization.orbits import TARGET_ENERGY, Block, choose_order, select
from fedveil.quantization.portable import normals, uniforms
from tests.slow_cases import fast_every

FALSE_ALARM = 1e-9
NORMAL_LIMIT = float(stats.norm.isf(FALSE_ALARM / 2))


@dataclass(frozen=True, kw_only=True)
class Case:
    law: NoiseLaw
    lattice: str

    def __str__(self) -> str:
        return f"{self.law.name}-{self.lattice}"

    @property
    def channel(self) -> Codec:
        return Codec(quantizer=LayeredQuantizer(law=self.law, lattice=lattice(self.lattice)))


CASES = [
    *(
        Case(law=GaussianLaw(std=0.3), lattice=name)
        for name in ("Z1", "Z2", "Z3", "Z4", "A2", "D3", "D4", "E8")
    ),
    Case(law=LaplaceLaw(b=0.3), lattice="Z1"),
    *(Case(law=StudentLaw(t_scale=0.3, degrees=5), lattice=name) for name in ("Z1", "Z3", "A2", "E8")),
    Case(law=StudentLaw(t_scale=0.3, degrees=2), lattice="Z2"),
]


def send(channel: Codec, x: np.ndarray, seed: int) -> np.ndarray:
    message = channel.encode(x, InsecureSimulationStreams(seed))
    return channel.decode(message, InsecureSimulationStreams(seed), length=len(x))


def places(law: NoiseLaw, m: int) -> np.ndarray:
    """Updates at zero, tiny, huge, and at halves and wholes of the scale, where cell borders like to be."""
    spots = np.array([0.0, 1e-12, -1e-7, 0.5, 1.0, -1.5, 1e6, -1e6, 37.77, -0.123, 2.0, 1e3, 0.25])
    return np.resize(np.repeat(spots, 8), m) * law.scale


def kolmogorov(u: np.ndarray) -> float:
    """Kolmogorov's distance from uniform over its critical value (the Dvoretzky-Kiefer-Wolfowitz-Massart bound)."""
    u = np.sort(u)
    rank = np.arange(len(u) + 1) / len(u)
    distance = max((rank[1:] - u).max(), (u - rank[:-1]).max())
    return float(distance / math.sqrt(math.log(2 / FALSE_ALARM) / (2 * len(u))))


def chi_square(u: np.ndarray, bins: int = 20) -> float:
    """Pearson's statistic against uniform over its critical value."""
    counts = np.bincount(np.minimum((u * bins).astype(int), bins - 1), minlength=bins)
    statistic = ((counts - len(u) / bins) ** 2).sum() / (len(u) / bins)
    return float(statistic / stats.chi2.isf(FALSE_ALARM, bins - 1))


def normal_scores(u: np.ndarray) -> float:
    """Mean of normal scores, which a wrong scale moves, over its critical value."""
    scores = stats.norm.ppf(np.clip(u, 1e-15, 1 - 1e-15))
    return abs(float(scores.mean())) * math.sqrt(len(u)) / NORMAL_LIMIT


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of independent samples over its critical value; ``a`` has bounded tails."""
    return abs(float(np.corrcoef(a, b)[0, 1])) * math.sqrt(len(a)) / NORMAL_LIMIT


def square_lengths(error: np.ndarray, law: NoiseLaw, n: int, scale: float = 1.0) -> np.ndarray:
    whole = error[: len(error) // n * n].reshape(-1, n)
    squares = (whole**2).sum(axis=1) / (scale * law.scale) ** 2
    match law:
        case GaussianLaw():
            found = stats.chi2.cdf(squares, n)
        case StudentLaw():
            found = stats.f.cdf(squares / n, n, law.degrees)
        case _:  # Laplace on the line
            found = -np.expm1(-np.sqrt(squares))
    return np.asarray(found)


def variance(law: NoiseLaw) -> float:
    """Of one coordinate of the noise."""
    factor = {GaussianLaw: 1.0, LaplaceLaw: 2.0}.get(type(law))
    if isinstance(law, StudentLaw):
        factor = law.degrees / (law.degrees - 2) if law.degrees > 2 else math.inf
    return factor * law.scale**2


def check_law(case: Case, size: int, wrong: float) -> None:
    n = lattice(case.lattice).dimension
    x = places(case.law, size)
    error = send(case.channel, x, 7) - x
    u = case.law.cdf(error)
    for i in range(n):
        assert kolmogorov(u[i::n]) < 1, f"coordinate {i}"
    for spot in np.unique(x):
        assert kolmogorov(u[x == spot][:: n if n > 1 else 1]) < 1, f"at {spot}"
    lengths = square_lengths(error, case.law, n)
    assert kolmogorov(lengths) < 1
    assert chi_square(lengths) < 1
    assert normal_scores(lengths) < 1
    for factor in (1 - wrong, 1 + wrong):
        off = square_lengths(error, case.law, n, factor)
        assert max(chi_square(off), normal_scores(off)) > 1, (
            f"a scale wrong by the factor {factor} is not noticed"
        )


def check_independence(case: Case, size: int) -> None:
    x = np.random.default_rng(11).normal(size=size) * 10 * case.law.scale
    received = send(case.channel, x, 12)
    scores = stats.norm.ppf(case.law.cdf(received - x))
    for feature in (x, np.abs(x), np.sign(x), np.cos(x / case.law.scale), np.roll(x, 1)):
        assert correlation(scores, feature) < 1
        assert correlation(np.abs(scores), feature) < 1
    for lag in (1, 2, 3):
        assert correlation(np.sign(scores), np.sign(np.roll(scores, lag))) < 1, "noise is not white"
    if math.isfinite(variance(case.law)):
        slope = float(np.dot(x, received) / np.dot(x, x))
        spread = math.sqrt(variance(case.law)) / (10 * case.law.scale * math.sqrt(size))
        assert abs(slope - 1) < NORMAL_LIMIT * spread


@pytest.mark.parametrize("case", fast_every(([one] for one in CASES), 2), ids=str)
def test_error_has_the_law_and_a_wrong_scale_is_noticed(case: Case) -> None:
    check_law(case, 104_000, 0.04)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_independent_of_the_update(case: Case) -> None:
    check_independence(case, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_million_errors_have_the_law_within_one_percent(case: Case) -> None:
    check_law(case, 1_040_000, 0.01)
    check_independence(case, 1_000_000)


def low_rate_updates(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    spiky = np.zeros(size)
    spiky[::640] = 3.0
    return {
        "noise 0.02": rng.normal(size=size) * 0.02,
        "noise 0.1": rng.normal(size=size) * 0.1,
        "noise 0.2": rng.normal(size=size) * 0.2,
        "noise 0.4": rng.normal(size=size) * 0.4,
        "constant": np.full(size, 0.2),
        "spikes": spiky,
        "uneven": rng.normal(size=size) * np.repeat(np.exp(rng.normal(size=size // 50)), 50) * 0.1,
        "zero": np.zeros(size),
    }


def check_low_rate(name: str, size: int, wrong: float) -> None:
    x = low_rate_updates(size)[name] * 0.3
    law = GaussianLaw(std=0.3)
    channel = Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice("E8")), adaptive=True)
    error = send(channel, x, 21) - x
    u = law.cdf(error)
    assert kolmogorov(u) < 1
    squares = square_lengths(error, law, 1)
    assert chi_square(squares) < 1
    assert normal_scores(squares) < 1
    for factor in (1 - wrong, 1 + wrong):
        off = square_lengths(error, law, 1, factor)
        assert max(chi_square(off), normal_scores(off)) > 1
    for row in (32, 256, 1600):  # the selection looks at projections on the update itself
        assert kolmogorov(square_lengths(error, law, row)) < 1
        rows, updates = error[: size // row * row].reshape(-1, row), x[: size // row * row].reshape(-1, row)
        norms = np.linalg.norm(updates, axis=1)
        for direction in (updates, np.roll(updates, 1, axis=1), np.sign(updates)):
            along = np.einsum("ij,ij->i", rows, direction)[norms > 0]
            if len(along):
                assert kolmogorov(law.cdf(along / np.linalg.norm(direction[norms > 0], axis=1))) < 1
    if x.any():
        slope = float(np.dot(x, x + error) / np.dot(x, x))
        assert abs(slope - 1) < NORMAL_LIMIT * law.std / float(np.linalg.norm(x))
    for lag in (1, 2, 64, 128):
        assert correlation(error, np.roll(error, lag)) < 1


@pytest.mark.parametrize("name", fast_every(low_rate_updates(50), 3))
def test_selection_among_shared_noise_has_the_gaussian_law(name: str) -> None:
    check_low_rate(name, 160_000, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(low_rate_updates(50)))
def test_a_million_selected_errors_have_the_law_within_one_percent(name: str) -> None:
    check_low_rate(name, 1_000_000, 0.01)


LENGTHS_IN_ONE_ROW = (40, 99, 1000)
"""Lengths that fill no row: a block of one padded row often sends its trial, then without a selection."""


def error_along_short_update(length: int, seed: int) -> float:
    """Return the error of a short low-rate update along the update, which is N(0, 1)."""
    x = np.full(length, math.sqrt(TARGET_ENERGY / 2 ** math.ceil(math.log2(length))))
    channel = Codec(
        quantizer=LayeredQuantizer(law=GaussianLaw(std=1.0), lattice=lattice("E8")), adaptive=True
    )
    return float((send(channel, x, seed) - x) @ x / np.linalg.norm(x))


def trial_decides_to_send(
    x: np.ndarray, trial: np.ndarray, order: int, search: int, streams: InsecureSimulationStreams
) -> bool:
    """Return step 1 of `orbits` by a plain loop, for one row and noise of scale 1: u W(trial) > M."""
    size = 1 << order
    words = streams.source("sign", 0).uint64(-(-size // 64))
    bits = [int(words[n // 64]) >> (n % 64 // 8 * 8 + 7 - n % 8) & 1 for n in range(size)]
    signs = 2.0 * np.array(bits) - 1.0
    lacking = size - len(x)
    noise = normals(streams.source("padding", 0).uint64(lacking + lacking % 2))[:lacking]
    update, y = np.append(x, np.zeros(lacking)) * signs, np.append(trial, noise) * signs
    half = update @ update / 2
    mean = np.mean([math.exp(update @ np.roll(y, shift) - half) for shift in range(size)])
    return bool(uniforms(streams.source("choice", 0), 1)[0] * mean > 2.0**search)


@pytest.mark.parametrize("length", LENGTHS_IN_ONE_ROW)
def test_a_block_without_selection_sends_the_trial_that_decided_it(length: int) -> None:
    x = np.full(length, math.sqrt(TARGET_ENERGY / 2 ** math.ceil(math.log2(length))))
    scalar = LayeredQuantizer(law=GaussianLaw(std=1.0), lattice=lattice("Z1"))
    channel = Codec(quantizer=LayeredQuantizer(law=scalar.law, lattice=lattice("E8")), adaptive=True)
    sent_whole = 0
    for seed in range(24):
        streams = InsecureSimulationStreams(seed, "one row")
        order = choose_order(math.sqrt(float(np.mean(x**2))), length)
        assert order is not None
        selection = select(x, Block(number=0, quantizer=scalar, streams=streams), order, channel.search)
        trial = selection.trial
        received = channel.decode(channel.encode(x, streams), streams, length=length)
        expected = scalar.reconstruct(trial.points, trial.dithers, trial.scales).ravel()
        assert selection.sent.tolist() == [trial_decides_to_send(x, expected, order, channel.search, streams)]
        assert np.array_equal(received, expected) == (not selection.worthwhile)
        sent_whole += not selection.worthwhile
    assert 0 < sent_whole < 24


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS_IN_ONE_ROW)
def test_short_updates_have_the_gaussian_law_along_the_update(length: int) -> None:
    """A second trial in place of the first had a variance of .88 for 100 parameters, and .93 for 40 and 1,000."""
    along = np.array([error_along_short_update(length, seed) for seed in range(20_000)])
    assert kolmogorov(GaussianLaw(std=1.0).cdf(along)) < 1
    for moment in (along, (along**2 - 1) / math.sqrt(2)):
        assert abs(moment.mean()) < NORMAL_LIMIT / math.sqrt(len(moment))


def test_tests_notice_a_selection_that_forgets_its_trial() -> None:
    """Noise that leans a twentieth of its length towards the update is caught by the projections."""
    rng = np.random.default_rng(6)
    x, law = rng.normal(size=(5000, 32)), GaussianLaw(std=1.0)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    error = rng.normal(size=x.shape)
    assert kolmogorov(law.cdf(np.einsum("ij,ij->i", error, unit))) < 1
    assert kolmogorov(law.cdf(np.einsum("ij,ij->i", error + 0.2 * unit, unit))) > 1


@pytest.mark.parametrize("name", ["Z1", "Z3", "A2", "E8"])
def test_subtractive_dither_is_uniform_on_the_cell_and_rejection_on_the_ball(name: str) -> None:
    grid = lattice(name)
    n, size = grid.dimension, 80_000 // grid.dimension * grid.dimension
    x = places(GaussianLaw(std=1.0), size)
    ball = send(Codec(quantizer=LayeredQuantizer(law=BallLaw(ball_radius=0.5), lattice=grid)), x, 3) - x
    radius = np.linalg.norm(ball.reshape(-1, n), axis=1)
    assert kolmogorov((radius / 0.5) ** n) < 1
    assert kolmogorov((radius / 0.505) ** n) > 1 or n < 3
    step = 0.5 / grid.packing_radius
    cell = send(Codec(quantizer=LayeredQuantizer(law=CellLaw(inner_radius=0.5), lattice=grid)), x, 4) - x
    folded = cell.reshape(-1, n) / step
    assert not grid.nearest(folded * (1 - 1e-9)).any()
    share = (np.linalg.norm(folded, axis=1) <= grid.packing_radius).mean()
    assert abs(share - grid.acceptance) < 6 * math.sqrt(0.25 / len(folded))


@pytest.mark.parametrize("name", ["Z2", "A2", "E8"])
def test_laplace_is_refused_off_the_line(name: str) -> None:
    with pytest.raises(UnsupportedPairError, match="cross-polytopes"):
        LayeredQuantizer(law=LaplaceLaw(b=1.0), lattice=lattice(name))


def test_lattice_that_would_reject_almost_every_dither_is_refused() -> None:
    with pytest.raises(UnsupportedPairError, match="almost every dither"):
        LayeredQuantizer(law=GaussianLaw(std=1.0), lattice=lattice("Z12"))
    LayeredQuantizer(law=CellLaw(inner_radius=1.0), lattice=lattice("Z12"))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scale_must_be_finite_and_positive(scale: float) -> None:
    with pytest.raises(ChannelError, match="finite number above 0"):
        GaussianLaw(std=scale)
    with pytest.raises(ChannelError, match="finite number above 0"):
        LaplaceLaw(b=scale)
    with pytest.raises(ChannelError, match="finite number above 0"):
        StudentLaw(t_scale=scale, degrees=3)
