"""Compute with numpy vectors of residues modulo primes below 2^60.

The functions compute products and wide random numbers, and convert residues to integers.

A product modulo q is the difference of two 64-bit products that wrap around. Let k = round(a b / q) in floating
point. Then a b - k q is small, so its low 64 bits determine it. For a < q < 2^60 and 0 <= b < 2^30 the quotient is
below 2^30. Float64 computes it with an error far below 1, so the remainder lies in (-q, q).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64, UInt32, UInt64

from fedveil.randomness import KeyedStream

LIMB_BITS: Final = 30
_LIMB: Final = 2**LIMB_BITS

Residues = Int64[np.ndarray, "..."]


def times_small(values: Residues, factor: Residues | int, modulus: int) -> Residues:
    """Return values · factor mod q, for values between -q and q and factors in 0 .. 2^30 - 1."""
    quotient = np.rint(values.astype(np.float64) * (np.asarray(factor) / modulus)).astype(np.int64)
    result = values * np.asarray(factor, dtype=np.int64) - quotient * np.int64(modulus)
    return np.asarray(result + (result < 0) * np.int64(modulus))


def times(values: Residues, factor: int, modulus: int) -> Residues:
    """Return values · factor mod q, for values in 0 .. q - 1 and any integer factor."""
    return from_limbs([times_small(values, limb, modulus) for limb in _limbs(factor % modulus)], modulus)


def from_limbs(limbs: Sequence[Residues], modulus: int) -> Residues:
    """Return the sum of limb_i · 2^(30 i) mod q by Horner's rule; limbs are in 0 .. max(q, 2^30) - 1."""
    # times_small allows factors up to 2^30 - 1: result · 2^30 = result · (2^30 - 1) + result.
    result = limbs[-1] % modulus
    for limb in reversed(limbs[:-1]):
        result = (times_small(result, _LIMB - 1, modulus) + result + limb) % modulus
    return result


def to_signed(values: Int64[np.ndarray, " n"], modulus: int) -> Residues:
    """Return the residues in 0 .. q - 1 of signed numbers between -q and q."""
    return np.asarray(values + (values < 0) * np.int64(modulus))


def random_limbs(bits: int, count: int, draw: Callable[[int], bytes] = os.urandom) -> list[Residues]:
    """Sample independent numbers, uniform on 0 .. 2^bits - 1, as 30-bit limbs, the lowest first.

    Args:
        bits: number of bits of each number.
        count: number of numbers.
        draw: returns the given number of uniform bytes.
    """
    limbs = []
    for first in range(0, bits, LIMB_BITS):
        words: UInt32[np.ndarray, " n"] = np.frombuffer(draw(4 * count), dtype="<u4")
        limbs.append((words >> np.uint32(32 - min(LIMB_BITS, bits - first))).astype(np.int64))
    return limbs


def random_below(bound: int, count: int, draw: Callable[[int], bytes] = os.urandom) -> list[Residues]:
    """Sample independent numbers, uniform on 0 .. bound - 1, as 30-bit limbs, by rejection of whole draws.

    Args:
        bound: exclusive upper bound.
        count: number of numbers.
        draw: returns the given number of uniform bytes, from the operating system or a keyed stream.
    """
    bits = max(1, (bound - 1).bit_length())
    top = _limbs(bound, minimum=len(range(0, bits, LIMB_BITS)))
    kept: list[list[Residues]] = [[] for _ in range(len(range(0, bits, LIMB_BITS)))]
    missing = count
    while missing > 0:
        drawn = random_limbs(bits, 2 * missing + 16, draw)
        # Comparison with the bound from the lowest limb to the highest: a higher limb overrides the lower ones.
        below = np.zeros(len(drawn[0]), dtype=np.bool_)
        for limb, limit in zip(drawn, top, strict=False):
            below = (limb < limit) | ((limb == limit) & below)
        if len(top) > len(drawn):  # the bound is a power of two: every draw lies below it
            below[:] = True
        chosen = np.flatnonzero(below)[:missing]
        for store, limb in zip(kept, drawn, strict=True):
            store.append(limb[chosen])
        missing -= len(chosen)
    return [np.concatenate(parts) for parts in kept]


def keyed_residues(stream: KeyedStream, modulus: int, count: int) -> Residues:
    """Sample numbers uniform on 0 .. q - 1 from a keyed stream, equal for all holders of the key."""
    shift = np.uint64(64 - (modulus - 1).bit_length())
    parts: list[Residues] = []
    missing = count
    while missing > 0:
        words: UInt64[np.ndarray, " n"] = stream.uint64(missing + missing // 8 + 16) >> shift
        kept = words[words < np.uint64(modulus)][:missing].astype(np.int64)
        parts.append(kept)
        missing -= len(kept)
    return np.concatenate(parts)


def mixed_radix(residues: Sequence[Residues], moduli: Sequence[int]) -> list[Residues]:
    """Return digits d_i with x = d_0 + d_1 q_0 + d_2 q_0 q_1 + ..., 0 <= d_i < q_i (Garner's algorithm)."""
    digits: list[Residues] = []
    for index, modulus in enumerate(moduli):
        value = residues[index] % modulus
        radix = 1
        for digit, earlier in zip(digits, moduli, strict=False):
            value = (value - times(digit % modulus, radix, modulus)) % modulus
            radix = radix * earlier % modulus
        digits.append(times(value, pow(radix, -1, modulus), modulus))
    return digits


def quotients(digits: Sequence[Residues], moduli: Sequence[int], divisor: int) -> Float64[np.ndarray, " n"]:
    """Return x / divisor in float64, for numbers x given by their mixed-radix digits."""
    total = np.zeros(len(digits[0]))
    radix = 1
    for digit, modulus in zip(digits, moduli, strict=True):
        total += digit * (radix / divisor)
        radix *= modulus
    return total


def _limbs(value: int, minimum: int = 1) -> list[int]:
    limbs: list[int] = []
    while value or len(limbs) < minimum:
        limbs.append(value % _LIMB)
        value //= _LIMB
    return limbs
