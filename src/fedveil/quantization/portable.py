"""Compute elementary functions with the same bits on every processor.

Two parties must draw the same latents and dithers from the same words, bit for bit. The logarithm and cosine
of a vector library may differ by a unit in the last place between processors. IEEE 754 fixes the result of
``+ - * /``, ``sqrt`` and the splitting of a float into mantissa and exponent. This module uses only these
operations, one array operation at a time, so no compiler can fuse or reorder them. The relative error of each
function is below 2e-15. No test of a law can detect this error, and it does not grow with the number of draws.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float64, UInt64

from fedveil.randomness import BitSource

_LN2 = 0.6931471805599453
_ATANH_SERIES = tuple(2.0 / (2 * k + 1) for k in range(8, -1, -1))
_SINE_SERIES = tuple(
    (-1) ** k * (math.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(9, -1, -1)
)

CHUNK = 16384
"""Number of elements per pass: the temporaries of one pass stay in the second-level cache.

It is part of the wire format, because it fixes the order in which words are drawn.
"""


def _polynomial(coefficients: tuple[float, ...], x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        np.multiply(value, x, out=value)
        np.add(value, coefficient, out=value)
    return value


def _log(x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
    # ln x = exponent ln 2 + 2 artanh((m - 1) / (m + 1)) with m in [sqrt(1/2), sqrt(2)).
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa *= 1.0 + small
    shifted = (exponent - small).astype(np.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(_ATANH_SERIES, ratio * ratio)
    np.multiply(series, ratio, out=series)
    np.multiply(shifted, _LN2, out=shifted)
    series += shifted
    return series


def sine_quarter(v: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
    """Return sin(pi v / 2) for v in [-1, 1]."""
    sine = _polynomial(_SINE_SERIES, v * v)
    sine *= v
    return sine


def log(x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
    """Return the natural logarithm of positive normal numbers.

    >>> bool(abs(log(np.array([0.25]))[0] + 2 * math.log(2)) < 1e-15)
    True
    """
    return np.concatenate([_log(x[at : at + CHUNK]) for at in range(0, len(x), CHUNK)] or [x])


def unit(words: UInt64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
    """Turn words into uniforms on the centres of 2^52 equal parts of (0, 1): never 0, never 1, symmetric.

    The upper 52 bits become the mantissa of a number in [1, 2). Subtracting 1 - 2^-53 is exact.
    """
    bits = words >> np.uint64(12)
    bits |= np.uint64(0x3FF0000000000000)
    uniform: Float64[np.ndarray, " m"] = bits.view(np.float64)
    uniform -= 1.0 - 2.0**-53
    return uniform


def uniforms(source: BitSource, count: int) -> Float64[np.ndarray, " m"]:
    """Draw ``count`` uniforms on (0, 1)."""
    return unit(source.uint64(count))


def chi_square(source: BitSource, count: int, degrees: int) -> Float64[np.ndarray, " m"]:
    """Draw ``count`` chi-square variables with ``degrees`` >= 1 degrees of freedom.

    Each pair of degrees is -2 ln of a uniform. An odd degree is the square of a normal. The squares of the two
    normals of one Box-Muller step, -2 ln(u) c and -2 ln(u) (1 - c) with c of the arcsine law, serve two variables.
    """
    out = np.empty(count)
    for at in range(0, count, CHUNK):
        out[at : at + CHUNK] = _chi_square(source, min(CHUNK, count - at), degrees)
    return out


def _chi_square(source: BitSource, count: int, degrees: int) -> Float64[np.ndarray, " m"]:
    total = np.zeros(count)
    # A product of at most 8 uniforms stays above 2^-424, a normal number, and saves 7 logarithms.
    for first in range(0, degrees // 2, 8):
        product = uniforms(source, count)
        for _ in range(first + 1, min(first + 8, degrees // 2)):
            product *= uniforms(source, count)
        total -= _log(product)
    if degrees % 2:
        half = (count + 1) // 2
        exponential = _log(uniforms(source, half))
        share = sine_quarter(2.0 * uniforms(source, half) - 1.0)
        share *= 0.5
        share += 0.5
        share *= exponential
        total[:half] -= share
        exponential -= share
        total[half:] -= exponential[: count - half]
    total *= 2.0
    return total


def normals(words: UInt64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
    """Turn an even number of independent words into as many independent standard normals (Box-Muller).

    Words at even positions give the radius, words at odd positions the angle: its sine, and the sign of its cosine
    (the lowest bit, which :func:`unit` does not use).
    """
    out = np.empty(len(words))
    for at in range(0, len(words), 2 * CHUNK):
        pairs = words[at : at + 2 * CHUNK].reshape(-1, 2)
        radius = np.sqrt(-2.0 * _log(unit(pairs[:, 0])))
        v = 2.0 * unit(pairs[:, 1]) - 1.0
        cosine = sine_quarter(1.0 - np.abs(v))
        negative: Bool[np.ndarray, " k"] = (pairs[:, 1] & np.uint64(1)).astype(np.bool_)
        np.negative(cosine, out=cosine, where=negative)
        both = out[at : at + 2 * CHUNK].reshape(-1, 2)
        np.multiply(radius, sine_quarter(v), out=both[:, 0])
        np.multiply(radius, cosine, out=both[:, 1])
    return out
