"""Sample discrete Gaussian and discrete Laplace noise exactly, on a grid of numbers.

Noise takes values on ``grid · Z`` with a grid that is a power of two. A value is then a whole number of grid units,
which int64 and float64 hold exactly. So no bit of a released sum depends on the rounding of a floating-point
sampler (Mironov 2012 recovers data from exactly those bits).

Both laws are drawn by rejection under their density (:class:`BoxSampler`). The only decision about real numbers is
whether U < c exp(-gamma) - l for a uniform real U. It is first made in float64 on the leading bits of U, with a
generous bound on the error. If U is closer to the boundary than that bound, the decision is made again with an
enclosure of exp by MPFR, and further bits of U are drawn until they settle it (lazy refinement: Knuth and Yao 1976).
So the result has exactly the probability of real-number arithmetic. docs/theory/discrete-gaussian.md has the argument.

Assumption about numpy: ``exp`` of float64 has an absolute error of at most 2^-45 for arguments at most 0; numpy's own
tests require 4 units in the last place.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
from gmpy2 import RoundDown, RoundUp, context, mpfr, mpz
from jaxtyping import Bool, Float64, Int64, UInt64

from fedveil.errors import PrivacyError
from fedveil.privacy.row_norms import UNITS_BITS
from fedveil.randomness import BitSource

_ONE: Final = Fraction(1)

# --- exact decisions about exp(-x) ---


class LazyUniform:
    """Uniform real number in [0, 1) whose bits are drawn only as far as decisions about it need them.

    Args:
        bits: the leading ``count`` bits, as a whole number below 2^count.
        count: number of known bits.
        source: source of further bits.
    """

    def __init__(self, bits: int, count: int, source: BitSource) -> None:
        self._bits, self._count, self._source = bits, count, source

    def below_exp(self, exponent: Fraction, factor: Fraction = _ONE, level: int = 0) -> bool:
        """Return whether U < factor · exp(-exponent) - level, exactly.

        Args:
            exponent: at least 0.
            factor: positive; a whole number if the exponent is 0.
            level: whole number, at least 0.
        """
        while True:
            # MPFR compares whole numbers with its own exactly.
            lower, upper = exp_enclosure(exponent, self._count, factor)
            shifted_bits = self._bits + (level << self._count)
            if shifted_bits + 1 <= lower:
                return True
            if shifted_bits >= upper:
                return False
            # U lies in [bits, bits + 1) 2^-count, and the enclosure cuts this interval: 64 further bits narrow both.
            self._bits = (self._bits << 64) | int(self._source.uint64(1)[0])
            self._count += 64


def exp_enclosure(exponent: Fraction, bits: int, factor: Fraction = _ONE) -> tuple[mpfr, mpfr]:
    """Return numbers that enclose 2^bits · factor · exp(-exponent), with a relative distance of about 2^-bits.

    MPFR rounds every result in the direction that its context asks for: the results of one context are below the
    true values, and those of the other above. A power of two is a factor without rounding. Rounding the quotient q to
    p bits changes exp(q) by a factor within exp(|q| 2^(1-p)), so p grows with the size of the exponent.
    """
    numerator, denominator = mpz(-exponent.numerator), mpz(exponent.denominator)
    times, over = mpz(factor.numerator), mpz(factor.denominator)
    precision = bits + int(-numerator // denominator).bit_length() + 5 + factor.numerator.bit_length()
    lower, upper = (
        arithmetic.div(arithmetic.mul(arithmetic.exp(arithmetic.div(numerator, denominator)), times), over)
        for arithmetic in _contexts(precision)
    )
    down, up = _contexts(precision)
    return down.mul_2exp(lower, bits), up.mul_2exp(upper, bits)


@cache
def _contexts(precision: int) -> tuple[Any, Any]:
    """Return contexts of MPFR that round down and up."""
    return context(precision=precision, round=RoundDown), context(precision=precision, round=RoundUp)


# --- boxes that cover a density ---

_BOX_BITS, _HEIGHT_BITS, _FINEST_CELL = 13, 25, 26
"""Bits of a word: the number of a box, the leading bits of the height in it, and at most so many of the position."""
_CELLS: Final = 4  # a scale has 2^4 to 2^5 columns
_DENSITY_ERROR: Final = 2.0**-44
_REACH: Final = 15.0
_BLOCK: Final = 2**15  # words that are read at a time: their arrays stay in a core's cache


class BoxSampler:
    """Exact sampler of whole numbers k with P(k) proportional to rho(k) = exp(-(|k| / s)^p / p).

    2^13 boxes of equal area cover the region under rho. A box spans W = 2^e consecutive whole numbers, and heights
    from l / L to (l + 1) / L. A box, a whole number k in it and a real height in it are drawn uniformly. If the
    height is below rho(k), k is the result, otherwise all three are drawn again. So each k has a probability
    proportional to the height rho(k) of the region above it.

    * Most boxes lie under rho and are accepted without computing it.
    * Boxes cover -X <= k < X. The last T boxes stand for all others. Such a box draws m >= 0 with probability
      2^-(m + 1), a uniform j in [2^m X, 2^(m + 1) X), and k = j or k = -1 - j. It accepts with probability
      rho(k) 4^(m + 1) L (X / W) / T, which gives k the probability that a box under rho would give it.

    Args:
        scale: s, from 2^-10 to 2^30.
        power: p, 2 for the Gaussian and 1 for the Laplace law.
        reach: least exponent (X / s)^p / p, at least 1.5; then rho(2^m X) <= 4^-m rho(X), so that no acceptance
            probability exceeds that of m = 0, and T makes that one at most 1.

    Attributes:
        cell: W.
        columns: X / W.
        end: X.
        levels: L.
        first: (2^13,) least whole number of each box; boxes under rho are first, then those on its edge, then the T.
        level: l of the boxes from ``sure`` on; infinite for the last T.
        sure: number of boxes that lie under rho.
        outside: T.
    """

    def __init__(self, scale: float, power: int, reach: float = _REACH) -> None:
        self.scale, self.power = scale, power
        self.cell: int = 1 << max(0, math.frexp(scale)[1] - 1 - _CELLS)
        self.columns: int = math.ceil(scale * (power * reach) ** (1.0 / power) / self.cell)
        self.end: int = self.columns * self.cell  # X
        start = np.arange(self.columns, dtype=np.int64) * self.cell
        # Columns of k >= 0, then of k < 0. The density falls with |k|, so it is largest at the near end of a column.
        highest = self._density(np.concatenate([start, start + 1])) + _DENSITY_ERROR
        lowest = self._density(np.concatenate([start + self.cell - 1, start + self.cell])) - _DENSITY_ERROR
        beyond = 4 * self.columns * (float(self._density(np.array([self.end]))[0]) + _DENSITY_ERROR)

        def needed(levels: int) -> int:
            count: int = math.ceil(levels * beyond) + int(np.ceil(levels * highest).sum())
            return count

        self.levels = bisect_right(range(1, 2**_BOX_BITS + 1), 2**_BOX_BITS, key=needed)
        height = np.ceil(self.levels * highest).astype(np.int64)
        inside = np.maximum(np.floor(self.levels * lowest), 0).astype(np.int64)
        columns = np.concatenate([start, -start - self.cell])
        under, edge = np.repeat(columns, inside), np.repeat(columns, height - inside)
        self.outside = 2**_BOX_BITS - len(under) - len(edge)  # T
        self.sure = len(under)
        self.first = np.concatenate([under, edge, np.zeros(self.outside, dtype=np.int64)])
        level = [np.arange(*ends, dtype=np.float64) for ends in zip(inside, height, strict=True)]
        self.level = np.concatenate([*level, np.full(self.outside, np.inf)])
        self._outside_chance = self.levels * beyond / self.outside

    def draw(self, count: int, source: BitSource) -> Int64[np.ndarray, " count"]:
        """Return independent samples."""
        result = np.empty(count, dtype=np.int64)
        pending = self._propose(result, source)
        while pending.size:
            again = np.empty(pending.size, dtype=np.int64)
            rejected = self._propose(again, source)
            result[pending] = again
            pending = pending[rejected]
        return result

    def _propose(self, values: Int64[np.ndarray, " n"], source: BitSource) -> Int64[np.ndarray, " rejected"]:
        """Fill ``values`` with one proposal each, and return the positions of the rejected ones."""
        rejected = [np.empty(0, dtype=np.int64)]
        for begin in range(0, len(values), _BLOCK):
            block = values[begin : begin + _BLOCK]
            words = source.uint64(len(block))
            boxes = (words >> np.uint64(64 - _BOX_BITS)).view(np.int64)
            np.take(self.first, boxes, out=block, mode="clip")  # "clip" spares a pass; no box is out of range
            block += (words & np.uint64(self.cell - 1)).view(np.int64)
            unsure = np.flatnonzero(boxes >= self.sure)
            heights = (words[unsure] >> np.uint64(_FINEST_CELL)) & np.uint64(2**_HEIGHT_BITS - 1)
            accepted = self._decide(block, unsure, boxes[unsure], heights, source)
            rejected.append(begin + unsure[~accepted])
        return np.concatenate(rejected)

    def _decide(
        self,
        values: Int64[np.ndarray, " n"],
        unsure: Int64[np.ndarray, " u"],
        boxes: Int64[np.ndarray, " u"],
        heights: UInt64[np.ndarray, " u"],
        source: BitSource,
    ) -> Bool[np.ndarray, " u"]:
        """Return which proposals of boxes that are not under rho are kept; write the ones beyond X to ``values``."""
        level = self.level[boxes - self.sure]
        # The height in the box is U in [u, u + 1) 2^-25: compare the middle with L rho(k) - l.
        distance = self._density(values[unsure])
        distance *= self.levels
        distance -= level
        distance -= (heights + 0.5) * 2.0**-_HEIGHT_BITS
        accepted: Bool[np.ndarray, " u"] = distance > 0.0
        near = 2.0 ** -(_HEIGHT_BITS + 1) + 2**_BOX_BITS * 2.0 * _DENSITY_ERROR
        for index in np.flatnonzero(np.abs(distance) <= near).tolist():
            uniform = LazyUniform(int(heights[index]), _HEIGHT_BITS, source)
            exponent = self._exponent(int(values[unsure[index]]))
            accepted[index] = uniform.below_exp(exponent, Fraction(self.levels), int(level[index]))
        possible = heights <= self._outside_chance * 2**_HEIGHT_BITS
        for index in np.flatnonzero(possible & np.isinf(level)).tolist():
            value = self._draw_outside(LazyUniform(int(heights[index]), _HEIGHT_BITS, source), source)
            if value is not None:
                values[unsure[index]], accepted[index] = value, True
        return accepted

    def _draw_outside(self, uniform: LazyUniform, source: BitSource) -> int | None:
        """Return a whole number outside [-X, X), or None if it is rejected."""
        piece = 0
        while int(source.uint64(1)[0]) & 1:
            piece += 1
        begin: int = self.end << piece
        position = begin
        while position >= begin:
            words = source.uint64(begin.bit_length() // 64 + 1)
            position = int.from_bytes(words.tobytes(), "little") & ((1 << begin.bit_length()) - 1)
        value = begin + position
        if int(source.uint64(1)[0]) & 1:
            value = -1 - value
        factor = Fraction(4 ** (piece + 1) * self.levels * self.columns, self.outside)
        return value if uniform.below_exp(self._exponent(value), factor) else None

    def _density(self, values: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Return rho in float64, with an absolute error of at most 2^-44."""
        # The exponent's relative error is below 2^-50, and x exp(-x) < 1/2: rounding it changes rho by at most 2^-51.
        exponents = np.abs(values) * (1.0 / self.scale)
        if self.power == 2:
            exponents *= 0.5 * exponents
        density: Float64[np.ndarray, " n"] = np.exp(-exponents)
        return density

    def _exponent(self, value: int) -> Fraction:
        return (abs(value) / Fraction(self.scale)) ** self.power / self.power


@lru_cache(maxsize=16)
def _box_sampler(scale: float, power: int) -> BoxSampler:
    return BoxSampler(scale, power)


def _scaled(units: Int64[np.ndarray, " ..."], grid: float) -> Float64[np.ndarray, " ..."]:
    """Return ``units`` times the grid, in the memory of ``units``: a second array would cost as much as the noise."""
    whole = units.reshape(-1)
    values: Float64[np.ndarray, " n"] = whole.view(np.float64)
    for begin in range(0, len(whole), _BLOCK):
        values[begin : begin + _BLOCK] = whole[begin : begin + _BLOCK] * grid
    return values.reshape(units.shape)


# --- laws on a grid ---

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


# --- discrete Laplace ---------------------------------------------------------------------------------------
# Sample the discrete Laplace law (two-sided geometric) on a grid exactly.


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
        """Return independent samples in grid units."""
        return _box_sampler(self.scale / self.grid, 1).draw(math.prod(shape), source).reshape(shape)

    def sample(self, shape: tuple[int, ...], source: BitSource) -> Float64[np.ndarray, " ..."]:
        """Return independent samples in the unit of the update: exact multiples of the grid."""
        return _scaled(self.sample_units(shape, source), self.grid)


# --- Gaussian noise of sums ---------------------------------------------------------------------------------
# Sample the Gaussian noise of sums on a grid; choose its law and the finest exact grid.


_SUMS_BITS: Final = 52
NOISE_REACH: Final = 40.0  # in standard deviations; a noise share exceeds it with probability below 1e-340


def grid_law(std: float, grid: float, finest: float = 0.0) -> DiscreteGaussian:
    """Return the noise law for sums on a grid: fine enough to count as Gaussian for every accountant.

    Args:
        std: standard deviation of the noise, in the unit of the update.
        grid: grid step of the contributions.
        finest: lower limit of the noise's grid, where a float64 sum would not hold a finer one; a power of two, or 0.
    """
    return DiscreteGaussian(std=std, grid=max(grid_for(std, at_most=grid), min(finest, grid)))


def finest_grid(grid: float, longest: float) -> float:
    """Return the finest step of noise on which sums are exact in float64, for all contributions.

    A contribution has at most 2^18 steps of its grid. A sum of norm ``longest`` times that bound has at most
    longest * 2^18 * grid / step steps, which is at most 2^52 for the returned step. The noise uses the remaining bit.

    Args:
        grid: grid step of the contributions, a power of two.
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


# --- discrete Gaussian --------------------------------------------------------------------------------------
# Sample the discrete Gaussian on a grid exactly.


LEAST_STEPS: Final = 100.0
"""Least standard deviation, in steps of the grid, from which the distance to the Gaussian is bounded."""


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

        Args:
            shape: shape of the result.
            source: source of random words.

        Returns:
            int64 array of this shape.
        """
        return _box_sampler(self.std / self.grid, 2).draw(math.prod(shape), source).reshape(shape)

    def sample(self, shape: tuple[int, ...], source: BitSource) -> Float64[np.ndarray, " ..."]:
        """Return independent samples in the unit of the update: exact multiples of the grid."""
        return _scaled(self.sample_units(shape, source), self.grid)

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
    return NOISE_REACH**2 / (24.0 * steps**2) + 3.0 * math.exp(-2.0 * (math.pi * steps) ** 2)
