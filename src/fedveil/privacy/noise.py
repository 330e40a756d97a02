"""Sample discrete Gaussian and discrete Laplace noise exactly, on a grid of numbers.

Noise takes values on ``grid · Z`` with a grid that is a power of two. A value is then a whole number of grid units,
which int64 and float64 hold exactly. So no bit of a released sum depends on the rounding of a floating-point
sampler (Mironov 2012 recovers data from exactly those bits).

Decide exactly about exp(-x): in floating point if its error bound allows it, else by MPFR.

The samplers need two decisions about a uniform real U: is U < exp(-gamma)? and what is floor(-b ln U)? Both are first
made on the first 63 bits of U in float64, with a generous bound on the error. If U is closer to a boundary than that
bound, the same decision is made again from the same bits with an enclosure of exp by MPFR, and further bits of U are
drawn until they settle it. So the result has exactly the probability of real-number arithmetic. The slow path is
taken for about one geometric number in 400,000 at b = 2^20, and one in 4,000 at b = 2^29. (Lazy refinement of a
uniform is due to Knuth and Yao 1976; the decisions are those of Canonne, Kamath and Steinke 2020, Algorithms 1 and
2.)

Assumption about numpy: ``log`` and ``exp`` of float64 have an absolute error of at most 2^-43.5 on the ranges used;
numpy's own tests require 4 units in the last place, at most 2^-45 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final

import numpy as np
from gmpy2 import RoundDown, RoundUp, context, mpfr, mpz
from jaxtyping import Bool, Float64, Int64, UInt64

from fedveil.errors import PrivacyError
from fedveil.privacy.row_norms import UNITS_BITS
from fedveil.randomness import BitSource

# --- exact decisions about exp(-x) ---

UNIFORM_BITS: Final = 63
"""Number of bits of U that a vectorised decision starts from; the word's last bit is left for a sign."""

_LOG_ERROR: Final = 2.0**-42
_LOG_NEEDS: Final = np.uint64(2**44)  # below, further bits of U would move ln U by more than 2^-44
_EXP_ERROR: Final = 2.0**-44


class LazyUniform:
    """Uniform real number in [0, 1) whose bits are drawn only as far as decisions about it need them.

    Args:
        bits: the leading ``count`` bits, as a whole number below 2^count.
        count: number of known bits.
        source: source of further bits.
    """

    def __init__(self, bits: int, count: int, source: BitSource) -> None:
        self._bits, self._count, self._source = bits, count, source

    def below_exp(self, exponent: Fraction) -> bool:
        """Return whether U < exp(-exponent), exactly, for an exponent >= 0."""
        if exponent == 0:
            return True
        while True:
            # MPFR compares whole numbers with its own exactly.
            lower, upper = exp_enclosure(exponent, self._count)
            if self._bits + 1 <= lower:
                return True
            if self._bits >= upper:
                return False
            # U lies in [bits, bits + 1) 2^-count, and the enclosure cuts this interval: 64 further bits narrow both.
            self._bits = (self._bits << 64) | int(self._source.uint64(1)[0])
            self._count += 64


def exp_enclosure(exponent: Fraction, bits: int) -> tuple[mpfr, mpfr]:
    """Return numbers that enclose 2^bits exp(-exponent), with a relative distance of about 2^-bits.

    MPFR rounds every result in the direction that its context asks for: quotient and exponential of one context are
    below the true values, and those of the other above. A power of two is a factor
    without rounding. Rounding the quotient q to p bits changes exp(q) by a factor within exp(|q| 2^(1-p)), so p grows
    with the size of the exponent.
    """
    numerator, denominator = mpz(-exponent.numerator), mpz(exponent.denominator)
    down, up = _contexts(bits + int(-numerator // denominator).bit_length() + 5)
    lower, upper = down.exp(down.div(numerator, denominator)), up.exp(up.div(numerator, denominator))
    return down.mul_2exp(lower, bits), up.mul_2exp(upper, bits)


@cache
def _contexts(precision: int) -> tuple[Any, Any]:
    """Return contexts of MPFR that round down and up."""
    return context(precision=precision, round=RoundDown), context(precision=precision, round=RoundUp)


def below_exp(
    uniforms: UInt64[np.ndarray, " n"],
    exponents: Float64[np.ndarray, " n"],
    exact_exponent: Callable[[int], Fraction],
    source: BitSource,
) -> Bool[np.ndarray, " n"]:
    """Decide U_i < exp(-gamma_i) exactly: n independent Bernoulli(exp(-gamma_i)).

    Args:
        uniforms: (n,) leading 63 bits of every U_i.
        exponents: (n,) gamma_i >= 0 in float64, such that exp(-gamma_i) has an error of at most 2^-45.
        exact_exponent: returns gamma_i as a rational; called only if floating point cannot decide.
        source: source of further bits.
    """
    distance = np.negative(exponents)
    np.exp(distance, out=distance)
    distance -= uniforms * 2.0**-UNIFORM_BITS
    result: Bool[np.ndarray, " n"] = distance > 0.0
    np.abs(distance, out=distance)
    for index in np.flatnonzero(distance <= _EXP_ERROR).tolist():
        uniform = LazyUniform(int(uniforms[index]), UNIFORM_BITS, source)
        result[index] = uniform.below_exp(exact_exponent(index))
    return result


def geometric(
    uniforms: UInt64[np.ndarray, " n"], scale: Fraction, source: BitSource
) -> Int64[np.ndarray, " n"]:
    """Return G_i = floor(-b ln U_i), which has P(G >= k) = exp(-k / b) for every k >= 0.

    Args:
        uniforms: (n,) leading 63 bits of every U_i.
        scale: b, at most 2^31 (the error bound is then at most 2^-11 units).
        source: source of further bits.
    """
    factor = float(scale)
    values = uniforms * 2.0**-UNIFORM_BITS
    with np.errstate(divide="ignore"):
        np.log(values, out=values)
    values *= -factor
    # Rare, so the passes that it needs are spared if there is none.
    tiny = bool(uniforms.min(initial=_LOG_NEEDS) < _LOG_NEEDS)
    if tiny:
        np.minimum(values, factor * UNIFORM_BITS, out=values)  # if all 63 bits are 0: any finite guess
    # Only a whole number near -b ln U can change the floor: elsewhere the float64 value decides.
    nearest = np.rint(values)
    distance = np.subtract(values, nearest)
    np.abs(distance, out=distance)
    unsure = distance <= factor * _LOG_ERROR
    if tiny:
        unsure |= uniforms < _LOG_NEEDS
    result = values.astype(np.int64)  # the values are not negative, so this is floor
    for index in np.flatnonzero(unsure).tolist():
        uniform, whole = LazyUniform(int(uniforms[index]), UNIFORM_BITS, source), int(nearest[index])
        if uniforms[index] < _LOG_NEEDS:
            result[index] = _geometric_exact(uniform, scale, guess=int(result[index]))
        else:  # -b ln U is within twice the error bound of that whole number
            result[index] = (
                whole
                if uniform.below_exp(Fraction(whole * scale.denominator, scale.numerator))
                else whole - 1
            )
    return result


def _geometric_exact(uniform: LazyUniform, scale: Fraction, guess: int) -> int:
    """Return floor(-b ln U), the largest k with U < exp(-k / b), by a search outwards from a guess."""
    lower, upper, step = max(0, guess - 1), guess + 2, 1
    while not uniform.below_exp(lower / scale):
        lower, upper, step = max(0, lower - step), lower, 2 * step
    while uniform.below_exp(upper / scale):
        lower, upper, step = upper, upper + step, 2 * step
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if uniform.below_exp(middle / scale):
            lower = middle
        else:
            upper = middle
    return lower


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


# --- Gaussian noise of sums ---------------------------------------------------------------------------------
# Sample the Gaussian noise of sums on a grid; choose its law and the finest exact grid.


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


# --- discrete Gaussian --------------------------------------------------------------------------------------
# Sample the discrete Gaussian on a grid exactly (Canonne, Kamath and Steinke 2020).


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
        four are accepted. Every decision is exact (:mod:`fedveil.privacy.noise`).

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
