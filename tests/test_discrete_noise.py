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
from fedveil.privacy.noise import BoxSampler, DiscreteGaussian, DiscreteLaplace, LazyUniform, exp_enclosure
from fedveil.randomness import PrivacyRandomness
from tests.contract.test_noise_laws import FALSE_ALARM, chi_square
from tests.discrete_laws import pmf

PRECISE = Context(prec=90)


def enclosure(exponent: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Return the enclosure of exp(-exponent) as rational numbers."""
    lower, upper = (Fraction(*map(int, one.as_integer_ratio())) for one in exp_enclosure(exponent, bits))
    return lower / 2**bits, upper / 2**bits


BITS = 63
leading_bits = st.one_of(
    st.integers(0, 2**BITS - 1), st.integers(0, 9), st.integers(0, 9).map(lambda k: 2**63 - 1 - k)
)
SAMPLERS = (
    *(BoxSampler(scale, 2) for scale in (0.125, 3.0, 40.3, 1.7 * 2**20, 2.0**30)),
    *(BoxSampler(scale, 1) for scale in (0.5, 2.0**29)),
)
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda one: f"{one.scale:g}, {one.power}")


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


class Script:
    """Gives the listed words first, then zeros: the first box, its first number, and height 0."""

    def __init__(self, words: np.ndarray) -> None:
        self._words: np.ndarray | None = words

    def uint64(self, count: int) -> np.ndarray:
        words, self._words = self._words, None
        return np.zeros(count, dtype=np.uint64) if words is None else words


def minus_log(bits: int) -> Fraction:
    """-ln(bits / 2^63) to about 88 digits."""
    return Fraction(-PRECISE.ln(PRECISE.divide(Decimal(bits), Decimal(2**BITS))))


@given(bits=leading_bits, exponent=st.fractions(0, 60, max_denominator=2**30))
def test_below_exp_is_the_real_comparison(bits: int, exponent: Fraction) -> None:
    result = LazyUniform(bits, BITS, Zeros()).below_exp(exponent)
    assert result == (bits == 0 or minus_log(bits) > exponent)


@given(
    exponent=st.fractions(Fraction(1, 2**20), 40, max_denominator=2**30),
    offset=st.integers(-2, 2),
    factor=st.fractions(Fraction(1, 9), 9000, max_denominator=99),
    level=st.integers(0, 3),
)
def test_below_exp_next_to_the_boundary(
    exponent: Fraction, offset: int, factor: Fraction, level: int
) -> None:
    lower, upper = enclosure(exponent, 200)
    bits = min(max(0, math.floor((lower * factor - level) * 2**BITS) + offset), 2**BITS - 1)
    result = LazyUniform(bits, BITS, Zeros()).below_exp(exponent, factor, level)
    below, above = (Fraction(bits, 2**BITS) + level < factor * end for end in (lower, upper))
    assert result == below == above


def test_further_bits_settle_what_63_bits_leave_open() -> None:
    half = Fraction(1, 2)
    bits = math.floor(enclosure(half, 120)[0] * 2**BITS)
    assert LazyUniform(bits, BITS, Words(0)).below_exp(half)
    assert not LazyUniform(bits, BITS, Words(2**64 - 1)).below_exp(half)
    assert LazyUniform(2**BITS - 1, BITS, Words()).below_exp(Fraction(0))


# --- boxes ---


def density(sampler: BoxSampler, value: int) -> tuple[Fraction, Fraction]:
    """An enclosure of rho(k)."""
    exponent = (abs(value) / Fraction(sampler.scale)) ** sampler.power / sampler.power
    return enclosure(exponent, 90) if exponent < 1000 else (Fraction(0), Fraction(1, 2**1000))


@every_sampler
def test_boxes_cover_the_density_once_and_sure_ones_lie_under_it(sampler: BoxSampler) -> None:
    """At both ends of a column; between its ends the density is monotone."""
    sure, edge = sampler.sure, 2**13 - sampler.outside
    assert len(sampler.first) == 2**13
    assert np.all(np.isinf(sampler.level) == (np.arange(sure, 2**13) >= edge))
    starts, heights = np.unique(sampler.first[:edge], return_counts=True)
    assert starts.tolist() == list(range(-sampler.end, sampler.end, sampler.cell))
    for start, height in list(zip(starts.tolist(), heights.tolist(), strict=True))[::7]:
        under = int((sampler.first[:sure] == start).sum())
        # The levels of a column are 0, 1, ...: those of sure boxes, then the others.
        levels = sampler.level[: edge - sure][sampler.first[sure:edge] == start]
        assert levels.tolist() == list(range(under, height))
        ends = density(sampler, start), density(sampler, start + sampler.cell - 1)
        assert under <= sampler.levels * min(ends)[0]
        assert height >= sampler.levels * max(ends)[1]


@every_sampler
def test_no_number_outside_the_boxes_needs_a_probability_above_1(sampler: BoxSampler) -> None:
    for piece in range(4):
        factor = Fraction(4 ** (piece + 1) * sampler.levels * sampler.columns, sampler.outside)
        assert factor * density(sampler, sampler.end << piece)[1] <= 1


@every_sampler
def test_a_proposal_is_kept_as_real_arithmetic_decides(sampler: BoxSampler) -> None:
    """Random words, and words whose height lies within a few 2^-25 of the density."""
    random = np.random.default_rng(1)
    edge = len(sampler.first) - sampler.outside
    boxes = random.integers(0, edge, 300, dtype=np.uint64)
    boxes[100:] = random.integers(sampler.sure, edge, 200, dtype=np.uint64)
    words = (boxes << np.uint64(51)) | random.integers(0, 2**51, 300, dtype=np.uint64)
    expected = []
    for index, (box, word) in enumerate(zip(boxes.tolist(), words.tolist(), strict=True)):
        value = int(sampler.first[box]) + word % sampler.cell
        if box < sampler.sure:
            expected.append(value)
            continue
        level, wanted = int(sampler.level[box - sampler.sure]), density(sampler, value)[0] * sampler.levels
        height = word >> 26 & (2**25 - 1)
        if index >= 200:
            height = min(max(0, math.floor((wanted - level) * 2**25) + index % 4 - 1), 2**25 - 1)
            words[index] = box << 51 | height << 26 | word & (2**26 - 1)
        if level + Fraction(height, 2**25) < wanted:
            expected.append(value)
    # What is rejected is drawn again: from boxes under the density, with values of 0 offset.
    drawn = sampler.draw(300, Script(words))
    again = int(sampler.first[0])
    assert [one for one in drawn.tolist() if one != again] == [one for one in expected if one != again]
    assert 0 < len(expected) < 300


@pytest.mark.parametrize(
    ("sampler", "law"),
    [
        (BoxSampler(3.0, 2, reach=1.5), DiscreteGaussian(std=3.0, grid=1.0)),
        (BoxSampler(2.0, 1, reach=1.5), DiscreteLaplace(scale=2.0, grid=1.0)),
    ],
)
def test_numbers_outside_the_boxes_have_their_probability(
    sampler: BoxSampler, law: DiscreteGaussian | DiscreteLaplace
) -> None:
    """With boxes that end near the middle, a tenth of all numbers lie outside."""
    units = sampler.draw(20_000, PrivacyRandomness.insecure(3).stream("outside"))
    assert np.mean(np.abs(units) >= sampler.end) > 0.05
    assert chi_square(units, law) > FALSE_ALARM
    outside = units[np.abs(units) >= sampler.end]
    assert chi_square(np.concatenate([units, outside[: len(outside) // 4]]), law) < FALSE_ALARM


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
