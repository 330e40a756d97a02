"""Sample the discrete Gaussian on a grid exactly (Canonne, Kamath and Steinke 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.errors import PrivacyError
from fedveil.privacy.noise.decisions import below_exp, geometric
from fedveil.privacy.noise.law import scale_in_units
from fedveil.randomness import BitSource

_BLOCK: Final = 2**15
_PART: Final = 2**15  # proposals that are decided at a time: their arrays stay in a core's cache
LEAST_STEPS: Final = 100.0
"""Least standard deviation, in steps of the grid, from which the distance to the Gaussian is bounded."""

_REACH: Final = 40.0  # the table's half-width in standard deviations; the rest is below the smallest float64


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian:
    """Noise law g·X with P(X = k) proportional to exp(-k² / (2 s²)), s = std / grid.

    Guarantee: let a query take values on the grid, with l2 sensitivity D (same unit as ``std``). Independent noise on
    every coordinate gives Rényi divergence at most alpha · D² / (2 std²) at every order alpha > 1, and so D² / (2
    std²)-zCDP. Continuous Gaussian noise of the same ``std`` gives the same (Canonne, Kamath and Steinke 2020,
    Theorem 4 and Proposition 5; docs/theory/discrete-gaussian.md has the argument for vectors). For accountants that
    use more of the Gaussian than its Rényi divergence, :attr:`log_ratio_to_gaussian` bounds the cost of replacing it.
    The sampler is exact, so the guarantee is about the program, not about real numbers.

    ==========================  =================================================================
    input                       result
    ==========================  =================================================================
    std 0, negative, NaN, inf   refused (no noise is the absence of a law, and of a guarantee)
    grid no power of two        refused
    std / grid > 2^30           refused
    std / grid < 2^-10          refused: the noise would be all but surely zero
    std / grid below about 1    allowed; the variance is then visibly below std²
    ==========================  =================================================================

    Args:
        std: sigma, the parameter of the law; the standard deviation up to about 4 pi² s² exp(-2 pi² s²).
        grid: spacing of the values, a power of two in the same unit.

    Raises:
        PrivacyError: a std or a grid outside the domain above.

    >>> from fedveil.randomness import PrivacyRandomness
    >>> law = DiscreteGaussian(std=1.0, grid=2.0**-20)
    >>> units = law.sample_units((2, 3), PrivacyRandomness.system().stream("noise"))
    >>> units.shape, units.dtype.name
    ((2, 3), 'int64')
    """

    std: float
    grid: float

    def __post_init__(self) -> None:
        """Refuse standard deviations and grids outside the domain."""
        scale_in_units("the standard deviation of the Gaussian noise", self.std, self.grid)

    def sample_units(self, shape: tuple[int, ...], source: BitSource) -> Int64[np.ndarray, " ..."]:
        """Return independent samples in grid units.

        Algorithm 3 of the paper: propose a discrete Laplace magnitude Y of scale t = floor(s) + 1 with a sign, and
        accept it with probability exp(-(Y - s²/t)² / (2 s²)). A negative zero is rejected. About three proposals of
        four are accepted. Every decision is exact (:mod:`fedveil.privacy.noise.decisions`).

        Args:
            shape: of the result.
            source: source of random words.

        Returns:
            int64 array of this shape.
        """
        ratio = Fraction(self.std / self.grid)
        scale = math.floor(ratio) + 1
        variance = ratio**2
        peak = variance / scale
        count, filled = math.prod(shape), 0
        result = np.empty(count, dtype=np.int64)
        while filled < count:
            # 7/5 of the missing samples, because about three proposals of four are accepted.
            proposals = min(_BLOCK, (count - filled) * 7 // 5 + 16)
            words = source.uint64(2 * proposals)
            for first in range(0, proposals, _PART):
                part = slice(first, min(first + _PART, proposals))
                magnitudes = geometric(words[:proposals][part] >> np.uint64(1), Fraction(scale), source)
                exponents = magnitudes - float(peak)
                exponents *= 1.0 / float(ratio)
                np.square(exponents, out=exponents)
                exponents *= 0.5

                def exact_exponent(index: int, magnitudes: Int64[np.ndarray, " n"] = magnitudes) -> Fraction:
                    return (int(magnitudes[index]) - peak) ** 2 / (2 * variance)

                second = words[proposals:][part]
                kept = below_exp(second >> np.uint64(1), exponents, exact_exponent, source)
                # -1 for a negative sign, and 0: two's complement without a branch, which random signs would stall.
                signs = -(second & np.uint64(1)).view(np.int64)
                if not magnitudes.all():
                    # +0 and -0 are the same value: one of them is rejected, or zero would have twice its probability.
                    kept &= (magnitudes != 0) | (signs == 0)
                magnitudes ^= signs
                magnitudes -= signs
                accepted = magnitudes.take(np.flatnonzero(kept)[: count - filled])
                result[filled : filled + accepted.size] = accepted
                filled += accepted.size
        return result.reshape(shape)

    def sample(self, shape: tuple[int, ...], source: BitSource) -> Float64[np.ndarray, " ..."]:
        """Return independent samples in the unit of the update: exact multiples of the grid."""
        return np.asarray(self.sample_units(shape, source) * self.grid)

    @property
    def log_ratio_to_gaussian(self) -> float:
        r"""Bound eta on \|ln(P(k) / R(k))\| within 40 standard deviations; R is rounded continuous noise.

        Rounding continuous Gaussian noise after adding it to a value on the grid is post-processing, so R has every
        guarantee of the continuous mechanism. Replacing R by this law in N released values changes any log-likelihood
        ratio by at most 2 N eta, outside an event of probability below 1e-340. So if the continuous mechanism is
        (eps, delta)-DP, this one is (eps + 2 N eta, e^(N eta) delta)-DP, for every eps, sampled or not. With s = std /
        grid, eta = 40^2 / (24 s^2) + 3 exp(-2 pi^2 s^2) (docs/theory/discrete-gaussian.md); at s = 2^29 it is 2.4e-16.

        Raises:
            PrivacyError: std / grid is below 100, where the constants are not proved.

        >>> DiscreteGaussian(std=1.0, grid=2.0**-29).log_ratio_to_gaussian < 2.4e-16
        True
        """
        return log_ratio_to_gaussian(self.std / self.grid)


def log_ratio_to_gaussian(steps: float) -> float:
    """Return :attr:`DiscreteGaussian.log_ratio_to_gaussian` for std = ``steps`` steps of the grid.

    Raises:
        PrivacyError: fewer than :data:`LEAST_STEPS` steps; the constants are not proved for them.
    """
    if steps < LEAST_STEPS:
        raise PrivacyError(
            f"std / grid is {steps:g}; the distance to the Gaussian is bounded for {LEAST_STEPS:g} and above"
        )
    # eta = 40^2 / (24 s^2) + 3 exp(-2 pi^2 s^2), docs/theory/discrete-gaussian.md.
    return _REACH**2 / (24.0 * steps**2) + 3.0 * math.exp(-2.0 * (math.pi * steps) ** 2)
