"""The Gaussian noise of sums on a grid: which law has it, a draw of it, and how far it reaches."""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.law import grid_for
from fedveil.randomness import BitSource

NOISE_REACH: Final = 40.0  # in standard deviations: a share reaches farther with a probability below 1e-340


def grid_law(std: float, grid: float) -> DiscreteGaussian:
    """Return the noise law for sums on this grid: so fine that it is Gaussian for every accountant."""
    return DiscreteGaussian(std=std, grid=grid_for(std, at_most=grid))


def grid_gaussian(dimension: int, std: float, grid: float, source: BitSource) -> Float64[np.ndarray, " d"]:
    """Return exact discrete Gaussian noise, one value a coordinate, on a grid that divides the contributions'."""
    return grid_law(std, grid).sample((dimension,), source)
