"""The limit that message sizes are measured against."""

import numpy as np
import pytest

from fedveil.quantization import (
    Codec,
    GaussianLaw,
    InsecureSimulationStreams,
    LaplaceLaw,
    LayeredQuantizer,
    StudentLaw,
    information_limit,
    lattice,
)


@pytest.mark.parametrize("ratio", [0.05, 0.2, 1.0, 3.0, 10.0])
def test_gaussian_limit_is_the_closed_form(ratio: float) -> None:
    x = np.random.default_rng(0).normal(size=200_000) * ratio * 0.3
    expected = 0.5 * np.log2(1 + ratio**2)
    assert information_limit(x, GaussianLaw(std=0.3)) == pytest.approx(expected, rel=0.03, abs=2e-4)


def test_two_values_far_apart_are_one_bit() -> None:
    x = np.resize([-50.0, 50.0], 1000)
    for law in (GaussianLaw(std=1.0), LaplaceLaw(b=1.0), StudentLaw(t_scale=1.0, degrees=5)):
        assert information_limit(x, law) == pytest.approx(1.0, abs=1e-3)


def test_constant_carries_nothing() -> None:
    assert information_limit(np.full(10, 3.0), LaplaceLaw(b=1.0)) == 0


def test_enormous_update_falls_back_to_the_gaussian_of_its_variance() -> None:
    x = np.random.default_rng(0).normal(size=1000) * 1e7
    assert information_limit(x, GaussianLaw(std=1.0)) == pytest.approx(0.5 * np.log2(1 + x.var()))


@pytest.mark.parametrize("ratio", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_message_is_shorter_than_the_limit(ratio: float, adaptive: bool) -> None:
    x = np.random.default_rng(1).normal(size=100_000) * ratio
    law = GaussianLaw(std=1.0)
    channel = Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice("E8")), adaptive=adaptive)
    bits = 8 * len(channel.encode(x, InsecureSimulationStreams(0))) / len(x)
    assert bits > information_limit(x, law)
