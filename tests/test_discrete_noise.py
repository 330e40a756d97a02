"""The exact decisions behind the discrete laws, and the discrete Gaussian beside the continuous one."""

import math
from collections.abc import Iterator
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedveil.errors import PrivacyError
from fedveil.privacy.noise import (
    UNIFORM_BITS,
    DiscreteGaussian,
    LazyUniform,
    below_exp,
    exp_enclosure,
    geometric,
)
from tests.discrete_laws import pmf

PRECISE = Context(prec=90)


def enclosure(exponent: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Return the enclosure of exp(-exponent) as rational numbers."""
    lower, upper = (Fraction(*map(int, one.as_integer_ratio())) for one in exp_enclosure(exponent, bits))
    return lower / 2**bits, upper / 2**bits


scales = st.fractions(Fraction(1, 1000), 2**31, max_denominator=2**20)
leading_bits = st.one_of(
    st.integers(0, 2**UNIFORM_BITS - 1), st.integers(0, 9), st.integers(0, 9).map(lambda k: 2**63 - 1 - k)
)


class Zeros:
    """All further bits are 0: U is then the rational number of its leading bits."""

    def uint64(self, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.uint64)


class Words:
    """A source that gives the listed words, then fails."""

    def __init__(self, *words: int) -> None:
        self._words: Iterator[int] = iter(words)

    def uint64(self, count: int) -> np.ndarray:
        return np.array([next(self._words) for _ in range(count)], dtype=np.uint64)


def minus_log(bits: int) -> Fraction:
    """-ln(bits / 2^63) to about 88 digits."""
    return Fraction(-PRECISE.ln(PRECISE.divide(Decimal(bits), Decimal(2**UNIFORM_BITS))))


@given(bits=leading_bits.filter(bool), scale=scales)
def test_geometric_is_the_floor_of_the_real_logarithm(bits: int, scale: Fraction) -> None:
    value = geometric(np.array([bits], dtype=np.uint64), scale, Zeros())
    assert value.tolist() == [math.floor(scale * minus_log(bits))]


@given(k=st.integers(1, 2**24), scale=st.integers(1, 2**30), offset=st.integers(-3, 3))
def test_geometric_next_to_a_boundary(k: int, scale: int, offset: int) -> None:
    """U within a few 2^-63 of exp(-k / b), where float64 cannot tell k from k - 1."""
    if k > 30 * scale:
        k = k % (30 * scale) + 1
    lower, _ = enclosure(Fraction(k, scale), 120)
    bits = min(max(1, math.floor(lower * 2**UNIFORM_BITS) + offset), 2**UNIFORM_BITS - 1)
    value = geometric(np.array([bits], dtype=np.uint64), Fraction(scale), Zeros())
    assert value.tolist() == [math.floor(scale * minus_log(bits))]


@given(bits=leading_bits, exponent=st.fractions(0, 60, max_denominator=2**30))
def test_below_exp_is_the_real_comparison(bits: int, exponent: Fraction) -> None:
    uniforms = np.array([bits], dtype=np.uint64)
    result = below_exp(uniforms, np.array([float(exponent)]), lambda index: exponent, Zeros())
    assert result.tolist() == [bits == 0 or minus_log(bits) > exponent]


@given(exponent=st.fractions(Fraction(1, 2**20), 40, max_denominator=2**30), offset=st.integers(-2, 2))
def test_below_exp_next_to_the_boundary(exponent: Fraction, offset: int) -> None:
    lower, _ = enclosure(exponent, 120)
    bits = min(max(0, math.floor(lower * 2**UNIFORM_BITS) + offset), 2**UNIFORM_BITS - 1)
    result = below_exp(
        np.array([bits], dtype=np.uint64), np.array([float(exponent)]), lambda index: exponent, Zeros()
    )
    assert result.tolist() == [bits == 0 or minus_log(bits) > exponent]


def test_further_bits_settle_what_63_bits_leave_open() -> None:
    half = Fraction(1, 2)
    bits = math.floor(enclosure(half, 120)[0] * 2**UNIFORM_BITS)
    assert LazyUniform(bits, UNIFORM_BITS, Words(0)).below_exp(half)
    assert not LazyUniform(bits, UNIFORM_BITS, Words(2**64 - 1)).below_exp(half)
    assert LazyUniform(2**UNIFORM_BITS - 1, UNIFORM_BITS, Words()).below_exp(Fraction(0))


def test_no_bit_set_is_no_error() -> None:
    """Probability 2^-63 and still right: the first word decides the magnitude."""
    value = geometric(np.zeros(1, dtype=np.uint64), Fraction(2**20), Words(2**63, 2**63, 2**63))
    assert value.tolist() == [math.floor(2**20 * 64 * Fraction(math.log(2)))]


@given(exponent=st.fractions(Fraction(1, 2**40), 1000, max_denominator=2**40), bits=st.integers(20, 300))
def test_enclosure_holds_the_exponential(exponent: Fraction, bits: int) -> None:
    lower, upper = enclosure(exponent, bits)
    wide_lower, wide_upper = enclosure(exponent, bits + 200)
    assert lower <= wide_lower < wide_upper <= upper
    assert (upper - lower) / lower < Fraction(1, 2**bits)
    assert float(lower) == pytest.approx(math.exp(-exponent), rel=1e-6 if bits < 40 else 1e-9, abs=1e-300)


def rounded_gaussian(units: np.ndarray, ratio: float) -> np.ndarray:
    above = np.abs(units)
    return stats.norm.sf((above - 0.5) / ratio) - stats.norm.sf((above + 0.5) / ratio)


@pytest.mark.parametrize("ratio", [100.0, 300.0, 1000.0])
def test_log_ratio_to_the_rounded_gaussian_is_bounded(ratio: float) -> None:
    """Summed out: the bound holds everywhere within reach, and a bound half as large would not."""
    law = DiscreteGaussian(std=ratio, grid=1.0)
    units = np.arange(0, math.ceil(30 * ratio))
    rounded = rounded_gaussian(units, ratio)
    log_ratio = np.abs(np.log(pmf(law, units) / rounded))
    bound = law.log_ratio_to_gaussian * (30 / 40) ** 2
    assert log_ratio.max() <= bound * (1 + 1e-6) + 1e-11
    assert log_ratio.max() > bound / 2


def test_log_ratio_is_refused_where_it_is_not_proved() -> None:
    with pytest.raises(PrivacyError, match="100"):
        _ = DiscreteGaussian(std=99.0, grid=1.0).log_ratio_to_gaussian


def sum_divergence(ratio: float, shares: int) -> float:
    """The bound of docs/theory/discrete-gaussian.md on |ln ratio| of the sum of shares and one discrete Gaussian."""
    return 5.0 * math.fsum(math.exp(-2.0 * (math.pi * ratio) ** 2 * k / (k + 1)) for k in range(1, shares))


@pytest.mark.parametrize("ratio", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("shares", [2, 3, 8])
def test_sum_of_shares_is_within_its_divergence_of_one_gaussian(ratio: float, shares: int) -> None:
    units = np.arange(-60, 61)
    share = DiscreteGaussian(std=ratio, grid=1.0)
    total = np.ones(1)
    for _ in range(shares):
        total = np.convolve(total, pmf(share, units))
    half = total.size // 2
    whole = DiscreteGaussian(std=ratio * math.sqrt(shares), grid=1.0)
    centre = np.arange(-12, 13)
    ratios = np.log(total[centre + half] / pmf(whole, centre))
    assert np.abs(ratios).max() <= sum_divergence(ratio, shares)
    if shares == 2:
        assert np.abs(ratios).max() >= sum_divergence(ratio, shares) / 5  # no idle bound


@given(shift=st.integers(0, 12), order=st.floats(1.01, 40.0), ratio=st.floats(0.5, 6.0))
def test_renyi_divergence_is_at_most_the_gaussian_one(shift: int, order: float, ratio: float) -> None:
    law = DiscreteGaussian(std=ratio, grid=1.0)
    units = np.arange(-3000, 3001).astype(np.float64)
    peak = -0.5 * (order * (units - shift) ** 2 + (1.0 - order) * units**2) / ratio**2
    log_sum = float(peak.max() + np.log(np.exp(peak - peak.max()).sum()))
    log_total = -math.log(float(pmf(law, np.zeros(1, dtype=np.int64))[0]))
    divergence = (log_sum - log_total) / (order - 1.0)
    bound = order * shift**2 / (2.0 * ratio**2)
    assert divergence <= bound + 1e-9 * (1.0 + bound / (order - 1.0))
