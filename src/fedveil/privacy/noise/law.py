"""Choose and check the grids of noise laws.

Noise takes values on ``grid · Z`` with a grid that is a power of two. A value is then a whole number of grid units,
which int64 and float64 hold exactly. So no bit of a released sum depends on the rounding of a floating-point
sampler (Mironov 2012 recovers data from exactly those bits).
"""

from __future__ import annotations

import math
from typing import Final

from fedveil.errors import PrivacyError

_FINEST_BITS: Final = 29
_SMALLEST_RATIO, _LARGEST_RATIO = 2.0**-10, 2.0**30


def grid_for(std: float, at_most: float | None = None) -> float:
    """Return the grid for noise of standard deviation ``std``: a power of two with std / grid >= 2^29.

    So fine a grid makes the difference from continuous noise negligible
    (:attr:`~fedveil.privacy.noise.DiscreteGaussian.log_ratio_to_gaussian`). Exact float64 sums still hold values up
    to 2^23 standard deviations.

    Args:
        std: standard deviation (or scale) of the noise, in the unit of the update.
        at_most: the grid of the contributions that the noise is added to. Both are powers of two, so a finer
            noise grid divides it, and noisy sums stay on the noise grid.

    Raises:
        PrivacyError: std is not positive and finite, or ``at_most`` is no power of two.

    >>> grid_for(1.0) == 2.0**-29, grid_for(5.0, at_most=2.0**-40) == 2.0**-40
    (True, True)
    """
    if not (math.isfinite(std) and std > 0.0):
        raise PrivacyError(f"standard deviation of the noise is {std}; it must be positive and finite")
    grid = math.ldexp(1.0, math.frexp(std)[1] - 1 - _FINEST_BITS)
    if at_most is None:
        return grid
    _check_grid(at_most)
    return min(grid, at_most)


def scale_in_units(name: str, scale: float, grid: float) -> float:
    """Return scale / grid, which is exact, after checking that an exact sampler can use it.

    Args:
        name: name of the scale in the error message.
        scale: standard deviation or scale of a law, in the unit of the update.
        grid: spacing of its values, same unit.

    Raises:
        PrivacyError: a scale that is not positive and finite, a grid that is no power of two, or a ratio outside
            2^-10 .. 2^30.
    """
    if not (math.isfinite(scale) and scale > 0.0):
        raise PrivacyError(f"{name} is {scale}; it must be positive and finite")
    _check_grid(grid)
    ratio = scale / grid
    if not _SMALLEST_RATIO <= ratio <= _LARGEST_RATIO:
        raise PrivacyError(
            f"{name} is {ratio:g} times the grid that it lies on; it must be between 2^-10 (below, the noise is all "
            "but surely zero) and 2^30: at this noise multiplier, or at this epsilon, nothing would be learnt"
        )
    return ratio


def _check_grid(grid: float) -> None:
    if not (math.isfinite(grid) and grid > 0.0 and math.frexp(grid)[0] == 0.5):
        raise PrivacyError(
            f"the grid is {grid}; it must be a power of two, so that multiples of it are exact"
        )
