"""Sample the Gaussian noise of sums on a grid; choose its law and the finest exact grid."""

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
NOISE_REACH: Final = 40.0  # in standard deviations; a noise share exceeds it with probability below 1e-340


def grid_law(std: float, grid: float, finest: float = 0.0) -> DiscreteGaussian:
    """Return the noise law for sums on a grid: fine enough to count as Gaussian for every accountant.

    Args:
        std: of the noise, in the unit of the update.
        grid: of the contributions.
        finest: lower limit of the noise's grid, where a float64 sum would not hold a finer one; a power of two, or 0.
    """
    return DiscreteGaussian(std=std, grid=max(grid_for(std, at_most=grid), min(finest, grid)))


def finest_grid(grid: float, longest: float) -> float:
    """Return the finest step of noise on which sums are exact in float64, for all contributions.

    A contribution has at most 2^18 steps of its grid. A sum of norm ``longest`` times that bound has at most
    longest * 2^18 * grid / step steps, which is at most 2^52 for the returned step. The noise uses the remaining bit.

    Args:
        grid: of the contributions, a power of two.
        longest: bounds ||sum of contributions|| / (the bound of one): |U| if users' weights sum to 1.

    >>> finest_grid(2.0**-18, 1000.0) == 2.0**-42
    True
    """
    return grid * math.ldexp(1.0, math.ceil(math.log2(longest)) - _SUMS_BITS + UNITS_BITS)


def is_finest(law: DiscreteGaussian, grid: float) -> bool:
    """Return whether the noise is as fine as it would be without a limit on the length of sums."""
    return law.grid <= grid_law(law.std, grid).grid


def grid_gaussian(dimension: int, std: float, grid: float, source: BitSource) -> Float64[np.ndarray, " d"]:
    """Return (d,) exact discrete Gaussian noise on a grid that divides the contributions' grid."""
    return grid_law(std, grid).sample((dimension,), source)
