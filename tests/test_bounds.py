"""Clipping: the bound holds for every float32 input, in the numbers that are stored, and sums are exact."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedveil.errors import PrivacyError
from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.privacy.row_norms import EXACT_FLOAT32_ROWS, contribution_norms, l1_norms, truncate_
from fedveil.training.record_sums import SiloSums

both_clips = pytest.mark.parametrize("kind", [Clip, ClipL1])
HARD_VALUES = [0.0, -0.0, 1e-45, -1.2e-38, 3.0e38, -3.4028235e38, 1.9e19, 1.0, math.nan, math.inf, -math.inf]
coordinates = st.one_of(st.floats(width=32), st.sampled_from(HARD_VALUES))
clip_norms = st.one_of(
    st.floats(2.0**-100, 2.0**100),
    st.sampled_from([1.0, 0.5, 2.0**-100, 2.0**100, math.nextafter(1.0, 2.0), 0.1]),
)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(0, 12))
    values = draw(st.lists(coordinates, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).reshape(rows, columns)


def quantized(clip: Clip | ClipL1 | Unbounded, deltas: Tensor, weights: Tensor) -> Tensor:
    return clip.quantize_(deltas.clone(), clip.norms(deltas), weights)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_numbers_are_truncated_in_place_bit_for_bit_as_pytorch_does(kind):
    spread = torch.randn(1000, dtype=kind) * 2.0 ** torch.randint(-20, 40, (1000,))
    numbers = torch.cat(
        [spread, torch.tensor([*HARD_VALUES, 0.5, -0.5, 1.5, 2.0**24, -(2.0**24) - 2], dtype=kind)]
    )
    for given_ in (numbers.clone(), numbers.repeat(3, 2)[:, ::2], numbers[:0].clone()):
        expected = torch.trunc(given_)
        assert truncate_(given_) is given_
        assert torch.equal(given_.nan_to_num(7.25), expected.nan_to_num(7.25))
        assert torch.equal(given_.signbit(), expected.signbit())


def length(units: Tensor, clip: Clip | ClipL1) -> Fraction:
    """The length of a stored contribution in the bound's norm, with no rounding anywhere; squared for l2."""
    if isinstance(clip, ClipL1):
        return Fraction(sum(abs(int(value)) for value in units.tolist())) * Fraction(clip.grid)
    return squared_length(units, clip.grid)


def allowed(clip: Clip | ClipL1, weight: float = 1.0) -> Fraction:
    """What :func:`length` may be at most."""
    bound = Fraction(weight) * Fraction(clip.norm)
    return bound if isinstance(clip, ClipL1) else bound**2


def squared_length(units: Tensor, grid: float) -> Fraction:
    """The squared l2 norm of a stored contribution, with no rounding anywhere."""
    return Fraction(sum(int(value) ** 2 for value in units.tolist())) * Fraction(grid) ** 2


@both_clips
@given(deltas=matrices(), norm=clip_norms, data=st.data())
def test_stored_contribution_is_within_its_share_of_the_bound(
    kind: type[Clip | ClipL1], deltas: Tensor, norm: float, data: st.DataObject
) -> None:
    shares = st.one_of(st.floats(0.0, 1.0), st.sampled_from([1.0, 1e-30, 1 / 3]))
    weights = torch.tensor(
        data.draw(st.lists(shares, min_size=len(deltas), max_size=len(deltas))), dtype=torch.float64
    )
    clip = kind(norm=norm)
    units = quantized(clip, deltas, weights)
    assert torch.equal(units, units.round())
    for row, weight in zip(units, weights.tolist(), strict=True):
        assert length(row, clip) <= allowed(clip, weight)


@both_clips
@given(
    directions=st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=64),
    near=st.floats(0.9999, 1.0001),
    norm=st.floats(1e-3, 1e3),
)
def test_lengths_next_to_the_bound_do_not_exceed_it(
    kind: type[Clip | ClipL1], directions: list[float], near: float, norm: float
) -> None:
    row = torch.tensor([directions], dtype=torch.float64)
    row *= near * norm / max(float(row.norm(p=1 if kind is ClipL1 else 2)), 1e-30)
    clip = kind(norm=norm)
    units = quantized(clip, row.float(), torch.ones(1, dtype=torch.float64))
    assert length(units[0], clip) <= allowed(clip)


@both_clips
@given(deltas=matrices(), norm=clip_norms, silos=st.integers(1, 60))
def test_a_user_of_many_silos_moves_the_sum_by_at_most_the_bound(
    kind: type[Clip | ClipL1], deltas: Tensor, norm: float, silos: int
) -> None:
    """One row per silo, weights that add up to 1 as float64 adds them."""
    pieces = deltas.repeat(math.ceil(silos / len(deltas)), 1)[:silos]
    weights = torch.full((silos,), 1.0 / silos, dtype=torch.float64)
    clip = kind(norm=norm)
    moved = quantized(clip, pieces, weights).double().sum(0)
    assert length(moved, clip) <= allowed(clip)


@given(deltas=matrices(), norm=clip_norms, data=st.data())
def test_removing_a_row_changes_the_sum_by_exactly_that_row(
    deltas: Tensor, norm: float, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, len(deltas) - 1))
    order = data.draw(st.permutations(range(len(deltas))))
    clip = Clip(norm=norm)
    ones = torch.ones(len(deltas), dtype=torch.float64)
    units = quantized(clip, deltas, ones)
    total = units.sum(0)
    rest = quantized(clip, deltas[[i for i in order if i != gone]], ones[1:])
    assert torch.equal(total - rest.sum(0), units[gone])
    assert torch.equal(total.double(), units[list(order)].double().cumsum(0)[-1])


def test_sums_of_64_longest_rows_are_exact_in_float32_in_any_order_and_chunks() -> None:
    generator = torch.Generator().manual_seed(7)
    deltas = torch.randn(EXACT_FLOAT32_ROWS, 33, generator=generator)
    deltas[:, 0] = 1e9  # one coordinate of full length, the same sign in all rows: the largest sum there is
    clip = Clip(norm=1.0)
    units = quantized(clip, deltas, torch.ones(EXACT_FLOAT32_ROWS, dtype=torch.float64))
    exact = np.array([[int(v) for v in row] for row in units.tolist()], dtype=object).sum(axis=0)
    assert [int(v) for v in units.sum(0).tolist()] == exact.tolist()
    for chunk in (1, 7, 64):
        order = torch.randperm(EXACT_FLOAT32_ROWS, generator=generator)
        total = torch.zeros(33)
        for part in units[order].split(chunk):
            total += part.sum(0)
        assert [int(v) for v in total.tolist()] == exact.tolist()


def test_a_short_row_is_kept_up_to_the_grid_and_a_long_one_keeps_its_direction() -> None:
    generator = torch.Generator().manual_seed(3)
    deltas = torch.randn(4, 1000, generator=generator) * torch.tensor([[1e-4], [1e-2], [1.0], [1e20]])
    clip = Clip(norm=1.0)
    stored = quantized(clip, deltas, torch.ones(4, dtype=torch.float64)).double() * clip.grid
    norms = deltas.double().norm(dim=1, keepdim=True)
    expected = deltas.double() * torch.clamp(1.0 / norms, max=1.0)
    assert (stored - expected).abs().max() <= clip.grid * 1.5
    assert torch.all(stored[2:].norm(dim=1) > 0.9995)
    assert clip.is_clipped(contribution_norms(deltas)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("bound", [Clip(norm=1.0), ClipL1(norm=1.0), Unbounded()])
def test_rows_with_nan_or_infinity_become_zero_and_are_reported(bound: Clip | ClipL1 | Unbounded) -> None:
    deltas = torch.ones(4, 3)
    deltas[0, 1], deltas[1, 2], deltas[2, 0] = math.nan, math.inf, -math.inf
    norms = contribution_norms(deltas)
    assert norms.isnan().tolist() == [True, True, True, False]
    assert bound.coefficients(norms)[:3].tolist() == [0.0, 0.0, 0.0]
    stored = quantized(bound, deltas, torch.full((4,), 0.5, dtype=torch.float64))
    assert stored[:3].abs().sum() == 0.0
    assert bool((stored[3] > 0).all())
    assert not bound.is_clipped(norms)[:3].any()


def test_norms_neither_overflow_nor_underflow() -> None:
    deltas = torch.tensor([[3e38, 3e38], [1e-45, 0.0], [0.0, 0.0]])
    expected = [float(v) for v in deltas.double().norm(dim=1)]
    assert contribution_norms(deltas).tolist() == pytest.approx(expected, rel=1e-15)
    assert expected[1] > 0.0
    assert contribution_norms(torch.zeros(0, 5)).shape == (0,)


def test_norms_of_many_blocks_agree_with_one_pass() -> None:
    deltas = torch.randn(37, 9001, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(contribution_norms(deltas), deltas.double().norm(dim=1), rtol=1e-14)


def test_unbounded_only_weights() -> None:
    deltas = torch.tensor([[3.0, -400.0]])
    assert quantized(Unbounded(), deltas, torch.tensor([0.25], dtype=torch.float64)).tolist() == [
        [0.75, -100.0]
    ]
    assert Unbounded().grid == 1.0


@given(norm=clip_norms)
def test_grid_is_a_power_of_two_that_resolves_the_bound(norm: float) -> None:
    clip = Clip(norm=norm)
    assert math.frexp(clip.grid)[0] == 0.5
    assert 2**17 < norm / clip.grid <= 2**18


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_norm_that_bounds_nothing_is_refused(norm: float) -> None:
    with pytest.raises(PrivacyError, match="must be a positive finite number"):
        Clip(norm=norm)


@pytest.mark.parametrize("norm", [1e-40, 1e38])
def test_a_norm_beyond_float32_is_refused(norm: float) -> None:
    with pytest.raises(PrivacyError, match="between"):
        Clip(norm=norm)


@pytest.mark.parametrize("weight", [-0.1, 1.0000001, math.nan, math.inf])
def test_a_weight_that_is_no_share_is_refused_with_its_row(weight: float) -> None:
    deltas = torch.ones(2, 2)
    weights = torch.tensor([1.0, weight], dtype=torch.float64)
    for bound in (Clip(norm=1.0), ClipL1(norm=1.0), Unbounded()):
        with pytest.raises(PrivacyError, match="contribution 1"):
            bound.quantize_(deltas, contribution_norms(deltas), weights)


# --- l1 -------------------------------------------------------------------------------------------------------


def test_l1_norms_neither_overflow_nor_underflow() -> None:
    deltas = torch.tensor([[3e38, -3e38], [1e-45, 0.0], [0.0, 0.0]])
    expected = [float(v) for v in deltas.double().abs().sum(1)]
    assert l1_norms(deltas).tolist() == pytest.approx(expected, rel=1e-15)
    assert expected[1] > 0.0


@given(norm=clip_norms)
def test_the_l1_grid_is_finer(norm: float) -> None:
    clip = ClipL1(norm=norm)
    assert math.frexp(clip.grid)[0] == 0.5
    assert 2**21 < norm / clip.grid <= 2**22


def test_an_l1_bound_leaves_the_small_shares_of_a_long_update_their_size() -> None:
    """25,818 alike coordinates of an l1 ball are C / 25,818 each; the grid of the l2 clip would cost a tenth."""
    deltas = torch.full((1, 25_818), -3.0)
    clip = ClipL1(norm=1.0)
    stored = quantized(clip, deltas, torch.ones(1, dtype=torch.float64)).double() * clip.grid
    assert torch.allclose(stored, torch.full_like(stored, -1 / 25_818), rtol=0.013)


def test_l1_sums_are_exact_whatever_the_chunks() -> None:
    deltas = torch.randn(100, 9, generator=torch.Generator().manual_seed(3))
    deltas[:, 0] = 1e9  # a coordinate of almost full length, the same sign in all rows
    silos, ones = torch.zeros(100, dtype=torch.int64), torch.ones(100, dtype=torch.float64)
    clip = ClipL1(norm=0.3)
    whole, pieces = (SiloSums(1, 9, clip, torch.device("cpu")) for _ in range(2))
    whole.add_(deltas.clone(), ones, silos)
    for rows in torch.split(torch.arange(100).flip(0), 7):
        pieces.add_(deltas[rows], ones[rows], silos[rows])
    total = whole.total()
    assert torch.equal(total, pieces.total())
    exact = quantized(clip, deltas, ones).double().sum(0) * clip.grid
    assert torch.equal(total[0], exact)
