"""Sample the discrete Laplace law (two-sided geometric) on a grid exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.errors import PrivacyError
from fedveil.privacy.noise.decisions import geometric
from fedveil.privacy.noise.law import scale_in_units
from fedveil.randomness import BitSource

_BLOCK: Final = 2**15


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplace:
    """Noise law g·X with P(X = k) proportional to exp(-|k| / b), b = scale / grid.

    Guarantee: for a query with values on the grid and l1 sensitivity D (same unit as ``scale``), adding
    independent noise to every coordinate is (D / scale)-differentially private, exactly as with continuous
    Laplace noise (Ghosh, Roughgarden and Sundararajan 2012): the ratio of two probabilities is at most
    exp(||shift||_1 / scale). The sampler is exact, so the guarantee is about the program.

    ==========================  =================================================
    input                       result
    ==========================  =================================================
    scale 0, negative, NaN, inf refused
    grid no power of two        refused
    scale / grid > 2^30         refused
    scale / grid < 2^-10        refused: the noise would be all but surely zero
    ==========================  =================================================

    Args:
        scale: b in the unit of the update.
        grid: spacing of the values, a power of two in the same unit.

    Raises:
        PrivacyError: a scale or a grid outside the domain above.
    """

    scale: float
    grid: float

    def __post_init__(self) -> None:
        """Refuse scales and grids outside the domain."""
        scale_in_units("the scale of the Laplace noise", self.scale, self.grid)

    @property
    def log_ratio_to_laplace(self) -> float:
        r"""Bound eta on \|ln(P(k) / R(k))\| for every k; R is rounded continuous Laplace noise.

        As for the Gaussian, replacing R by this law in N released values turns (eps, delta) into (eps + 2 N eta, e^(N
        eta) delta). With u = grid / (2 scale): P(0) / R(0) = tanh(u) / (1 - e^-u) <= 1 / (1 - u / 2), and P(k) / R(k)
        = 1 / cosh(u) elsewhere, so eta = -ln(1 - u / 2) for u <= 1; 4.7e-10 at scale / grid = 2^29. An accountant that
        uses only the pure bound e^(D / scale) needs no correction.

        Raises:
            PrivacyError: scale / grid is below 1, where the constant is not proved.

        >>> DiscreteLaplace(scale=1.0, grid=2.0**-29).log_ratio_to_laplace < 4.7e-10
        True
        """
        u = self.grid / (2.0 * self.scale)
        if u > 0.5:
            raise PrivacyError(
                f"scale / grid is {self.scale / self.grid:g}; the distance to the Laplace law is bounded for 1 and "
                "above"
            )
        return -math.log1p(-u / 2.0)

    def sample_units(self, shape: tuple[int, ...], source: BitSource) -> Int64[np.ndarray, " ..."]:
        """Return independent samples in grid units: a geometric magnitude and a sign, without negative zero."""
        scale = Fraction(self.scale / self.grid)
        count, filled = math.prod(shape), 0
        result = np.empty(count, dtype=np.int64)
        while filled < count:
            words = source.uint64(min(_BLOCK, count - filled + (count - filled) // 8 + 16))
            signed = geometric(words >> np.uint64(1), scale, source)
            negative = (words & np.uint64(1)).astype(np.bool_)
            # +0 and -0 are the same value: one of them is rejected, or zero would have twice its probability.
            kept = (signed != 0) | ~negative
            np.negative(signed, out=signed, where=negative)
            accepted = signed[kept][: count - filled]
            result[filled : filled + accepted.size] = accepted
            filled += accepted.size
        return result.reshape(shape)

    def sample(self, shape: tuple[int, ...], source: BitSource) -> Float64[np.ndarray, " ..."]:
        """Return independent samples in the unit of the update: exact multiples of the grid."""
        return np.asarray(self.sample_units(shape, source) * self.grid)
