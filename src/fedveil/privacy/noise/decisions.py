"""Decide exactly about exp(-x): in floating point if its error bound allows it, else by MPFR.

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

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, Final

import numpy as np
from gmpy2 import RoundDown, RoundUp, context, mpfr, mpz
from jaxtyping import Bool, Float64, Int64, UInt64

from fedveil.randomness import BitSource

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
