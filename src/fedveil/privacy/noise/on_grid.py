"""The Gaussian noise of sums on a grid: which law has it, a draw of it, and how far it reaches."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.law import grid_for
from fedveil.privacy.row_norms import UNITS_BITS
from fedveil.randomness import BitSource

_SUMS_BITS: Final = 52
NOISE_REACH: Final = 40.0  # in standard deviations: a share reaches farther with a probability below 1e-340


def grid_law(std: float, grid: float, finest: float = 0.0) -> DiscreteGaussian:
    """Return the noise law for sums on this grid: so fine that it is Gaussian for every accountant.

    Args:
        std: of the noise, in the unit of the update.
        grid: of the contributions.
        finest: the noise's grid is no finer, where a float64 sum would not hold it; a power of two, or 0.
    """
    return DiscreteGaussian(std=std, grid=max(grid_for(std, at_most=grid), min(finest, grid)))


def finest_grid(grid: float, longest: float) -> float:
    """Return the finest step of noise on which sums are exact in float64, whatever the contributions are.

    2^18 steps of their grid are the most that a contribution has. So ``longest`` of them added up have at most
    longest * 2^18 * grid / step steps, which is at most 2^52 for the step that is returned; noise has the other bit.

    Args:
        grid: of the contributions, a power of two.
        longest: bounds ||sum of contributions|| / (the bound of one): |U|, where users' weights sum to 1.

    >>> finest_grid(2.0**-18, 1000.0) == 2.0**-42
    True
    """
    return grid * math.ldexp(1.0, math.ceil(math.log2(longest)) - _SUMS_BITS + UNITS_BITS)


def is_finest(law: DiscreteGaussian, grid: float) -> bool:
    """Return whether noise for sums on this grid is as fine as it would be for sums of any length."""
    return law.grid <= grid_law(law.std, grid).grid


def grid_gaussian(dimension: int, std: float, grid: float, source: BitSource) -> Float64[np.ndarray, " d"]:
    """Return exact discrete Gaussian noise, one value a coordinate, on a grid that divides the contributions'."""
    return grid_law(std, grid).sample((dimension,), source)
