"""The contract of every noise law. A new law joins with one line in LAWS (or COARSE_LAWS).

Seeds are fixed. A right sampler fails a test with probability below 1e-7; the same statistic must refuse
a law whose scale is wrong by 2%.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import PrivacyError
from fedveil.privacy.noise import DiscreteGaussian, DiscreteLaplace, grid_for
from fedveil.randomness import PrivacyRandomness
from tests.discrete_laws import Law, continuous, pmf, variance

SAMPLES = 2_000_000
FALSE_ALARM = 1e-7


@dataclass(frozen=True)
class Case:
    law: Law
    wider: Law  # the same law with a scale 2% too large


LAWS = {
    "gaussian": Case(
        DiscreteGaussian(std=1.7, grid=2.0**-20), DiscreteGaussian(std=1.7 * 1.02, grid=2.0**-20)
    ),
    "laplace": Case(
        DiscreteLaplace(scale=0.3, grid=2.0**-24), DiscreteLaplace(scale=0.3 * 1.02, grid=2.0**-24)
    ),
}
COARSE_LAWS = {
    "gaussian 3": Case(DiscreteGaussian(std=3.0, grid=1.0), DiscreteGaussian(std=3.06, grid=1.0)),
    "gaussian 1/2": Case(DiscreteGaussian(std=0.5, grid=1.0), DiscreteGaussian(std=0.51, grid=1.0)),
    "gaussian 40.3": Case(DiscreteGaussian(std=10.075, grid=0.25), DiscreteGaussian(std=10.2765, grid=0.25)),
    "laplace 3": Case(DiscreteLaplace(scale=3.0, grid=1.0), DiscreteLaplace(scale=3.06, grid=1.0)),
    "laplace 1/2": Case(DiscreteLaplace(scale=1.0, grid=2.0), DiscreteLaplace(scale=1.02, grid=2.0)),
}
fine = pytest.mark.parametrize("case", LAWS.values(), ids=LAWS.keys())
coarse = pytest.mark.parametrize("case", COARSE_LAWS.values(), ids=COARSE_LAWS.keys())
every = pytest.mark.parametrize("case", (LAWS | COARSE_LAWS).values(), ids=(LAWS | COARSE_LAWS).keys())

_drawn: dict[Law, np.ndarray] = {}


def drawn(law: Law) -> np.ndarray:
    """Two million samples of a law, drawn once for all tests."""
    if law not in _drawn:
        _drawn[law] = law.sample_units((SAMPLES,), PrivacyRandomness.insecure(20_240).stream(repr(law)))
    return _drawn[law]


def kolmogorov_smirnov(values: np.ndarray, law: Law) -> float:
    """The p-value of the largest gap between two distribution functions (conservative for a discrete law)."""
    distinct, counts = np.unique(values, return_counts=True)
    gap = np.abs(np.cumsum(counts) / values.size - continuous(law).cdf(distinct + law.grid / 2)).max()
    return float(stats.kstwobign.sf(math.sqrt(values.size) * gap))


def chi_square(units: np.ndarray, law: Law) -> float:
    """The p-value of the counts of single values; both tails beyond 20 expected counts are pooled."""
    expected = pmf(law, np.arange(-400, 401)) * units.size
    kept = expected >= 20
    counts = np.bincount(np.clip(units, -400, 400) + 400, minlength=801)
    observed = np.append(counts[kept], units.size - counts[kept].sum())
    expected = np.append(expected[kept], units.size - expected[kept].sum())
    if expected[-1] < 20:
        observed, expected = (
            np.append(observed[:-2], observed[-2:].sum()),
            np.append(expected[:-2], expected[-2:].sum()),
        )
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, observed.size - 1))


def deviation(values: np.ndarray, expected: float) -> float:
    """How many standard errors the mean of the values is from what it should be."""
    return float(abs(values.mean() - expected) / (values.std() / math.sqrt(values.size)))


@every
def test_mean_and_variance(case: Case) -> None:
    limit = float(stats.norm.isf(FALSE_ALARM / 2))
    values = drawn(case.law) * case.law.grid
    assert deviation(values, 0.0) < limit
    assert deviation(values**2, variance(case.law)) < limit
    assert deviation(values**2, variance(case.wider)) > limit


@fine
def test_distribution_function(case: Case) -> None:
    values = drawn(case.law) * case.law.grid
    assert kolmogorov_smirnov(values, case.law) > FALSE_ALARM
    assert kolmogorov_smirnov(values, case.wider) < FALSE_ALARM


@coarse
def test_probability_of_every_value(case: Case) -> None:
    assert chi_square(drawn(case.law), case.law) > FALSE_ALARM
    assert chi_square(drawn(case.law), case.wider) < FALSE_ALARM


@every
def test_symmetric_about_zero(case: Case) -> None:
    units = drawn(case.law)
    signs = np.sign(units[units != 0])
    limit = float(stats.norm.isf(FALSE_ALARM / 2))
    assert deviation(signs, 0.0) < limit
    assert deviation(signs * np.abs(units[units != 0]), 0.0) < limit


@every
def test_neighbouring_samples_are_independent(case: Case) -> None:
    units = drawn(case.law).astype(np.float64)
    limit = float(stats.norm.isf(FALSE_ALARM / 2))
    for lag in (1, 2, 3):
        assert deviation(units[lag:] * units[:-lag], 0.0) < limit
        scale = (units**2).mean()
        assert deviation((units[lag:] ** 2 - scale) * (units[:-lag] ** 2 - scale), 0.0) < limit


@fine
def test_lowest_bits_are_uniform(case: Case) -> None:
    """At 2^20 units and more to a standard deviation, a value modulo 256 tells nothing."""
    counts = np.bincount(drawn(case.law) % 256, minlength=256)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


@every
def test_values_are_exact_multiples_of_the_grid(case: Case) -> None:
    units = case.law.sample_units((50, 4), PrivacyRandomness.insecure(1).stream("noise"))
    values = case.law.sample((50, 4), PrivacyRandomness.insecure(1).stream("noise"))
    assert units.dtype == np.int64
    assert values.dtype == np.float64
    assert np.array_equal(values / case.law.grid, units)


@every
def test_shapes(case: Case) -> None:
    source = PrivacyRandomness.insecure(1).stream("noise")
    for shape in ((), (0,), (3,), (2, 0, 5), (2, 3)):
        assert case.law.sample(shape, source).shape == shape


@every
def test_secret_randomness_differs_and_a_seed_repeats(case: Case) -> None:
    def draw(randomness: PrivacyRandomness) -> list[int]:
        return case.law.sample_units((200,), randomness.stream("noise", 3)).tolist()

    assert draw(PrivacyRandomness.system()) != draw(PrivacyRandomness.system())
    assert draw(PrivacyRandomness.insecure(5)) == draw(PrivacyRandomness.insecure(5))
    assert draw(PrivacyRandomness.insecure(5)) != draw(PrivacyRandomness.insecure(6))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_no_scale_is_refused(scale: float) -> None:
    with pytest.raises(PrivacyError, match="positive and finite"):
        DiscreteGaussian(std=scale, grid=1.0)
    with pytest.raises(PrivacyError, match="positive and finite"):
        DiscreteLaplace(scale=scale, grid=1.0)
    with pytest.raises(PrivacyError, match="positive and finite"):
        grid_for(scale)


@pytest.mark.parametrize("grid", [0.0, -1.0, 0.3, math.nan, math.inf])
def test_a_grid_that_is_no_power_of_two_is_refused(grid: float) -> None:
    with pytest.raises(PrivacyError, match="power of two"):
        DiscreteGaussian(std=1.0, grid=grid)
    with pytest.raises(PrivacyError, match="power of two"):
        DiscreteLaplace(scale=1.0, grid=grid)
    with pytest.raises(PrivacyError, match="power of two"):
        grid_for(1.0, at_most=grid)


@pytest.mark.parametrize("grid", [2.0**-31, 2.0**11])
def test_a_ratio_that_cannot_be_sampled_is_refused(grid: float) -> None:
    with pytest.raises(PrivacyError, match="times the grid"):
        DiscreteGaussian(std=1.0, grid=grid)
    with pytest.raises(PrivacyError, match="times the grid"):
        DiscreteLaplace(scale=1.0, grid=grid)


@pytest.mark.parametrize("std", [1.0, 0.1, 5.0, 3e-9, 7e12])
def test_grid_for_resolves_the_noise_and_the_contributions(std: float) -> None:
    assert 2**29 <= std / grid_for(std) < 2**30
    assert grid_for(std, at_most=2.0**-60) == min(2.0**-60, grid_for(std))
