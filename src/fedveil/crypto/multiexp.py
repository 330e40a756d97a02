"""Compute many products of powers of the same bases (Straus), and powers of one fixed base.

Costs are counted in modular multiplications, and the window is chosen by that count. One multiplication modulo a
6144-bit number takes about 8.5 microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from gmpy2 import invert, mpz, powmod
from jaxtyping import Int64, UInt32

from fedveil.crypto.errors import CryptoError

_LARGEST_WINDOW: Final = 14
_TABLE_BYTES: Final = 2**28  # memory limit of all tables of one set of bases
_BLOCK: Final = 1024  # products per batch of digit extraction, which bounds the memory of the digits


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a set of simultaneous exponentiations, in modular multiplications.

    Attributes:
        window: bits per table look-up.
        tables: multiplications that build the tables, once.
        product: multiplications per product of powers.
    """

    window: int
    tables: int
    product: int

    def total(self, products: int) -> int:
        """Return the cost of ``products`` products, tables included."""
        return self.tables + products * self.product


def straus_cost(*, bases: int, bits: int, products: int, modulus_bits: int) -> Cost:
    """Return the cost with the smallest window whose total is within 4 % of the cheapest window.

    A window of w bits needs 2^w - 2 multiplications per base for its table. A product then needs ``bits`` squarings
    and one multiplication per base and digit. Near the optimum the total hardly depends on the window. A window
    smaller by one bit halves the tables, which must be built before the first product.

    Args:
        bases: number of bases.
        bits: number of bits of an exponent.
        products: number of products of powers.
        modulus_bits: number of bits of the modulus.
    """
    entry = (modulus_bits + 7) // 8 + 32
    candidates = []
    for window in range(1, min(_LARGEST_WINDOW, max(1, bits)) + 1):
        if window > 1 and bases * entry * 2**window > _TABLE_BYTES:
            break
        digits = math.ceil(bits / window)
        product = (digits - 1) * window + bases * digits
        candidates.append(Cost(window=window, tables=bases * (2**window - 2), product=product))
    least = min(cost.total(products) for cost in candidates)
    return next(cost for cost in candidates if cost.total(products) <= 1.04 * least)


class SimultaneousPowers:
    """Products b_1^e_1 ... b_k^e_k mod m of the same bases for many exponent vectors (Straus 1964).

    For signed exponents, 2^bits is added to each exponent of a product. One multiplication of the result by
    (b_1 ... b_k)^(-2^bits) corrects this, so the tables need no inverses.

    Args:
        bases: k units modulo m; for k = 0 every product is 1.
        modulus: m.
        bits: every exponent satisfies -2^bits <= e < 2^bits.
        products: expected number of products, for the choice of the window.
        signed: if False, every exponent satisfies 0 <= e < 2^bits.

    Raises:
        CryptoError: a base has no inverse, and exponents are signed.
    """

    def __init__(
        self, bases: Sequence[mpz], modulus: mpz, *, bits: int, products: int, signed: bool = True
    ) -> None:
        self._modulus, self._bits = mpz(modulus), bits + signed
        self._lowest, self._end = -(mpz(1) << bits) if signed else mpz(0), mpz(1) << bits
        self.cost = straus_cost(
            bases=len(bases), bits=self._bits, products=products, modulus_bits=modulus.bit_length()
        )
        self._tables = [self._table(mpz(base)) for base in bases]
        self._correction = mpz(1)
        if not signed:
            return
        product = mpz(1)
        for base in bases:
            product = product * base % modulus
        try:
            self._correction = invert(powmod(product, self._end, modulus), modulus)
        except ZeroDivisionError as error:
            raise CryptoError("a base shares a factor with the modulus, so it is no unit") from error

    def _table(self, base: mpz) -> list[mpz]:
        table = [mpz(1), base]
        for digit in range(2, 2**self.cost.window):
            half = table[digit // 2]  # squares are cheaper than products
            table.append((table[-1] * base if digit % 2 else half * half) % self._modulus)
        return table

    def products(self, exponents: Int64[np.ndarray, "k d"]) -> Iterator[mpz]:
        """Yield the product of powers for every column of int64 exponents.

        Args:
            exponents: (k, d), one row per base.

        Raises:
            CryptoError: an exponent outside the range, or one of more than 63 bits with its sign.
        """
        if self._bits > 63:
            raise CryptoError(f"int64 exponents have at most 63 bits, these bases expect {self._bits}")
        if exponents.size:
            self._check(int(exponents.min()), int(exponents.max()))
        window = self.cost.window
        shifts = np.arange(math.ceil(self._bits / window), dtype=np.uint64)[::-1] * np.uint64(window)
        for first in range(0, exponents.shape[1], _BLOCK):
            shifted = (exponents[:, first : first + _BLOCK] - int(self._lowest)).astype(np.uint64)
            digits = (shifted[:, :, None] >> shifts) & np.uint64(2**window - 1)
            yield from map(self._product, digits.transpose(1, 2, 0).tolist())

    def product(self, exponents: Sequence[int]) -> mpz:
        """Return one product of powers with exponents of any size.

        Raises:
            CryptoError: an exponent outside the range.
        """
        self._check(min(exponents, default=0), max(exponents, default=0))
        shifted = [int(exponent - self._lowest) for exponent in exponents]
        return self._product(_digits(shifted, self._bits, self.cost.window).T.tolist())

    def _check(self, smallest: int, largest: int) -> None:
        if not self._lowest <= smallest <= largest < self._end:
            bits = self._end.bit_length() - 1
            raise CryptoError(
                f"an exponent lies outside {f'-2^{bits}' if self._lowest else 0} .. 2^{bits} - 1"
            )

    def _product(self, digits: list[list[int]]) -> mpz:
        """Compute one product from its digits: one row per window, the highest first, with one digit per base."""
        modulus, tables = self._modulus, self._tables
        if not tables:
            return mpz(1)
        result = mpz(1)
        for position, row in enumerate(digits):
            if position:
                # Plain squarings: powmod would convert the number to another representation and back each time.
                for _ in range(self.cost.window):
                    result = result * result % modulus
            for table, digit in zip(tables, row, strict=True):
                if digit:
                    result = result * table[digit] % modulus
        return result * self._correction % modulus


def _digits(values: Sequence[int], bits: int, window: int) -> UInt32[np.ndarray, "k digits"]:
    """Return the digits of each value in base 2^window, the highest first."""
    count = math.ceil(bits / window)
    width = math.ceil(count * window / 8)
    raw = b"".join(value.to_bytes(width, "little") for value in values)
    binary = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), bitorder="little").reshape(
        len(values), width * 8
    )
    grouped = binary[:, : count * window].reshape(len(values), count, window).astype(np.uint32)
    return np.asarray(grouped @ (np.uint32(1) << np.arange(window, dtype=np.uint32)))[:, ::-1]


class FixedPowers:
    """Powers b^x mod m of one base, from tables of b^(digit · 2^(window · position)), without squarings.

    Args:
        base: b.
        modulus: m.
        bits: every exponent satisfies 0 <= x < 2^bits.
        window: bits per table look-up; :func:`fixed_window` chooses by cost.
    """

    def __init__(self, base: mpz, modulus: mpz, *, bits: int, window: int) -> None:
        self._modulus, self._window = mpz(modulus), window
        self._tables: list[list[mpz]] = []
        step = mpz(base)
        for _ in range(math.ceil(bits / window)):
            table = [mpz(1), step]
            for _ in range(2**window - 2):
                table.append(table[-1] * step % modulus)
            self._tables.append(table)
            step = table[-1] * step % modulus

    def raise_to(self, exponent: int) -> mpz:
        """Return b^exponent.

        Raises:
            CryptoError: the exponent is below 0 or longer than the tables allow.
        """
        if not 0 <= exponent < 2 ** (self._window * len(self._tables)):
            raise CryptoError(f"the tables serve exponents of {self._window * len(self._tables)} bits")
        result, mask = mpz(1), 2**self._window - 1
        for table in self._tables:
            digit = exponent & mask
            if digit:
                result = result * table[digit] % self._modulus
            exponent >>= self._window
        return result


def fixed_window(*, bits: int, powers: int) -> int:
    """Return the window of 1 to 8 bits with the fewest multiplications for tables and powers."""
    return min(range(1, 9), key=lambda window: math.ceil(bits / window) * (2**window - 2 + powers))
