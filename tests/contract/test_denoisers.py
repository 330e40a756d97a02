"""The contract of every denoiser. A new one joins with one line in DENOISER_CASES."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError, ModelError
from fedveil.registry import find, names
from fedveil.training.server.denoise import (
    ByRule,
    Denoiser,
    JamesStein,
    Laplacian,
    NoDenoiser,
    SoftThreshold,
    effective_dimensions,
    smooth,
)
from tests.contract.plugin_members import plugin_members

ORDERS = ("BCHW", "BCWH", "BHWC", "BWHC")
DENOISER_CASES: dict[str, Denoiser] = (
    {
        "none": NoDenoiser(),
        "laplacian 0": Laplacian(smoothing=0.0),
        "james-stein": JamesStein(),
        "soft-threshold": SoftThreshold(),
    }
    | {
        f"laplacian {scope} {order}": Laplacian(smoothing=1.5, scope=scope, order=order)
        for scope in ("tensor", "vector")
        for order in ORDERS
    }
    | plugin_members("denoisers")
)
denoisers = pytest.mark.parametrize("denoiser", DENOISER_CASES.values(), ids=DENOISER_CASES.keys())
SHAPES = [(4, 3, 2, 5), (4,), (1,), (2,), (3, 7)]
SIZE = sum(math.prod(shape) for shape in SHAPES)


def noisy(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=SIZE)).to(dtype)


def circulant(size: int, smoothing: float) -> np.ndarray:
    """A_sigma as the sum over the edges of a cycle, the readable oracle (for one node: the identity)."""
    laplacian = np.zeros((size, size))
    for i in range(size):
        for j in ((i + 1) % size, (i - 1) % size):
            laplacian[i, i] += 1
            laplacian[i, j] -= 1
    return np.eye(size) + smoothing * laplacian


@denoisers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_estimate_keeps_shape_type_and_input(denoiser: Denoiser, dtype: torch.dtype) -> None:
    aggregate = noisy(dtype=dtype)
    before = aggregate.clone()
    estimate = denoiser.estimate(aggregate, 0.3, SHAPES)
    assert (estimate.shape, estimate.dtype) == (before.shape, dtype)
    assert torch.equal(aggregate, before)
    assert torch.isfinite(estimate).all()


@denoisers
def test_denoisers_are_frozen_values_with_a_description(denoiser: Denoiser) -> None:
    assert isinstance(denoiser, Denoiser)
    assert hash(denoiser) == hash(dataclasses.replace(denoiser))  # type: ignore[type-var]
    assert denoiser.description


@denoisers
def test_nothing_to_denoise_stays_nothing(denoiser: Denoiser) -> None:
    zero = torch.zeros(SIZE, dtype=torch.float64)
    assert torch.equal(denoiser.estimate(zero, 0.3, SHAPES), zero)
    empty = torch.zeros(0, dtype=torch.float64)
    assert len(denoiser.estimate(empty, 0.3, [])) == 0


@denoisers
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_an_aggregate_that_is_not_finite_is_refused(denoiser: Denoiser, poison: float) -> None:
    aggregate = noisy()
    aggregate[7] = poison
    with pytest.raises(ModelError, match="clip bound"):
        denoiser.estimate(aggregate, 0.3, SHAPES)


@denoisers
def test_estimates_never_lengthen_a_vector_well_above_its_noise(denoiser: Denoiser) -> None:
    aggregate = noisy()
    assert denoiser.estimate(aggregate, 0.1, SHAPES).norm() <= aggregate.norm() * (1 + 1e-12)


@denoisers
def test_the_estimate_scales_with_its_unit(denoiser: Denoiser) -> None:
    one, thousand = (denoiser.estimate(noisy() * unit, 0.2 * unit, SHAPES) for unit in (1.0, 1000.0))
    torch.testing.assert_close(1000 * one, thousand)


@settings(max_examples=60)
@given(size=st.integers(1, 40), smoothing=st.floats(0, 100), seed=st.integers(0, 100))
def test_smoothing_solves_the_circulant_system(size: int, smoothing: float, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=size)
    expected = np.linalg.solve(circulant(size, smoothing), values)
    found = smooth(torch.from_numpy(values), smoothing)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)
    single = smooth(torch.from_numpy(values.astype(np.float32)), smoothing)
    np.testing.assert_allclose(single.numpy(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 97, 1000, 2**18 + 1, 600_001])
def test_smoothing_keeps_the_mean(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(1).normal(3.0, 1.0, size=size))
    assert float(smooth(values, 3.0).mean()) == pytest.approx(float(values.mean()), rel=1e-13)


def test_cycles_of_one_and_two() -> None:
    assert smooth(torch.tensor([-2.0]), 5.0).tolist() == [-2.0]
    pair = smooth(torch.tensor([-2.0, 4.0], dtype=torch.float64), 0.5)
    assert pair.tolist() == pytest.approx(
        [0.0, 2.0]
    )  # mean 1 kept, half difference -3 divided by 1 + 4 sigma


@pytest.mark.parametrize("order", ORDERS)
def test_orders_unfold_convolution_kernels_only(order: str) -> None:
    aggregate = noisy()
    kernel = aggregate[:120].view(SHAPES[0])
    estimate = Laplacian(smoothing=2.0, order=order).estimate(aggregate, 0.0, SHAPES)
    axes = ["BCHW".index(axis) for axis in order]
    unfolded = smooth(kernel.permute(axes).reshape(-1), 2.0).view([SHAPES[0][axis] for axis in axes])
    expected = unfolded.permute([axes.index(axis) for axis in range(4)])
    torch.testing.assert_close(estimate[:120].view(SHAPES[0]), expected)
    torch.testing.assert_close(estimate[120:124], smooth(aggregate[120:124], 2.0))
    torch.testing.assert_close(estimate[-21:], smooth(aggregate[-21:], 2.0))


def test_the_whole_vector_is_one_cycle() -> None:
    aggregate = noisy()
    estimate = Laplacian(smoothing=2.0, scope="vector").estimate(aggregate, 0.0, SHAPES)
    torch.testing.assert_close(estimate, smooth(aggregate, 2.0))


@given(size=st.integers(1, 60), smoothing=st.floats(0, 50))
def test_effective_dimensions_are_traces(size: int, smoothing: float) -> None:
    inverse = np.linalg.inv(circulant(size, smoothing))
    once, twice = effective_dimensions(size, smoothing)
    assert once == pytest.approx(np.trace(inverse))
    assert twice == pytest.approx(np.trace(inverse @ inverse))


def test_smoothing_leaves_the_share_of_noise_that_the_effective_dimension_says() -> None:
    size, smoothing = 200_000, 1.0
    noise = torch.from_numpy(np.random.default_rng(5).normal(size=size))
    left = float(smooth(noise, smoothing).square().sum())
    _, expected = effective_dimensions(size, smoothing)
    assert abs(left / expected - 1) < 5.5 * math.sqrt(2 / size) * 2


def test_james_stein_and_soft_threshold_are_their_formulas() -> None:
    values = torch.tensor([3.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    shrunk = JamesStein().estimate(values, 0.5, [(4,)])
    torch.testing.assert_close(shrunk, values * (1 - 2 * 0.25 / 10.25))
    threshold = 0.5 * math.sqrt(2 * math.log(4))
    cut = SoftThreshold().estimate(values, 0.5, [(4,)])
    torch.testing.assert_close(cut, torch.tensor([3 - threshold, threshold - 1, 0, 0], dtype=torch.float64))
    for short in ([2.0], [2.0, -1.0]):
        pair = torch.tensor(short)
        assert JamesStein().estimate(pair, 9.0, [(len(short),)]).tolist() == short


@pytest.mark.parametrize("smoothing", [-0.1, math.nan, math.inf])
def test_a_smoothing_that_is_none_is_refused(smoothing: float) -> None:
    with pytest.raises(ConfigError, match="smoothing"):
        Laplacian(smoothing=smoothing)


def test_denoisers_by_name() -> None:
    made = [find("denoisers", name).load()() for name in names("denoisers")]
    assert made[1] == ByRule()  # which is resolved to one of the others: tests/test_noise_ratio.py
    assert [one.description.split()[0] for one in made] == [
        "none",
        "by",
        "Laplacian",
        "James-Stein",
        "soft",
    ]
    with pytest.raises(ConfigError, match="james-stein"):
        find("denoisers", "median")
