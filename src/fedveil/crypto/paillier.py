"""Encrypt additively homomorphically modulo n by Paillier's cryptosystem (1999) with g = n + 1.

    Enc(m; r) = (1 + m n) r^n mod n²,   Enc(a) Enc(b) = Enc(a + b),   Enc(a)^k = Enc(k a)

Keys have primes p = q = 3 mod 4 for which (p - 1)/2 and (q - 1)/2 are products of two large primes, so the only small
subgroup has order two. A party can then hide its computation on the key holder's ciphertexts from the key holder with
powers of a single element (:class:`Rerandomizer`).

Compute many products of powers of the same bases (Straus), and powers of one fixed base.

Costs are counted in modular multiplications, and the window is chosen by that count. One multiplication modulo a
6144-bit number takes about 8.5 microseconds.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from gmpy2 import gcd, invert, is_prime, is_square, is_strong_prp, jacobi, mpz, next_prime, powmod
from jaxtyping import Int64, UInt32

from fedveil.crypto.keys import read_private_file, write_private_file
from fedveil.errors import CryptoError
from fedveil.files import parse_json, reading

# --- products of powers ---

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


# --- keys and ciphertexts ---

KEY_BITS: Final = (2048, 3072, 4096)
"""Supported sizes of n in bits: about 112, 128 and 150 bits of security."""

_SIEVED: Final = 2**16
_SIEVE: Final = 2**19
_PRIME_TESTS: Final = 40  # error below 4^-40
_SHORT_EXPONENT: Final = 512


@dataclass(frozen=True)
class PaillierPublicKey:
    """Public key: the modulus n, which suffices to encrypt and to compute on ciphertexts.

    Raises:
        CryptoError: n is even, below 2^64, or a square. Modulo a square no number has Jacobi symbol -1, so
            :class:`Rerandomizer` would search for ever.
    """

    n: mpz

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be the product of two distinct odd primes, and very small numbers."""
        if self.n < 2**64 or self.n % 2 == 0 or is_square(self.n):
            raise CryptoError("a Paillier modulus is a large odd number and no square")

    @property
    def bits(self) -> int:
        """Number of bits of n."""
        return int(self.n.bit_length())

    @cached_property
    def square(self) -> mpz:
        """n², the modulus of ciphertexts."""
        return self.n * self.n

    @property
    def ciphertext_bytes(self) -> int:
        """Bytes of a ciphertext in a message."""
        return (2 * self.bits + 7) // 8

    @property
    def plaintext_bytes(self) -> int:
        """Bytes of a number modulo n in a message."""
        return (self.bits + 7) // 8

    def encode(self, message: int) -> mpz:
        """Return 1 + m n mod n², a ciphertext of m without randomness, to multiply with another ciphertext."""
        return (1 + (mpz(message) % self.n) * self.n) % self.square

    def encrypt(self, message: int) -> mpz:
        """Return a fresh ciphertext of ``message`` modulo n."""
        return self.encode(message) * powmod(random_unit(self.n), self.n, self.square) % self.square

    def check(self, ciphertext: mpz) -> None:
        """Check that a number lies in the group of ciphertexts.

        Raises:
            CryptoError: the number is not in 1 .. n² - 1, or it shares a factor with n.
        """
        if not 0 < ciphertext < self.square or gcd(ciphertext, self.n) != 1:
            raise CryptoError("a ciphertext is no unit modulo n squared")


@dataclass(frozen=True)
class PaillierPrivateKey:
    """Private key: the primes p and q.

    Encryption and decryption compute modulo p² and q², and combine the results by the Chinese remainder theorem.

    >>> key = PaillierPrivateKey.generate_insecure(256)
    >>> a, b = key.encrypt(3), key.public.encrypt(5)
    >>> int(key.decrypt(a * b % key.public.square))
    8
    """

    p: mpz
    q: mpz

    def __post_init__(self) -> None:
        """Check that p and q are distinct primes and that gcd(n, (p - 1)(q - 1)) = 1."""
        if self.p == self.q or not (is_prime(self.p, 25) and is_prime(self.q, 25)):
            raise CryptoError("a Paillier key needs two distinct primes")
        if gcd(self.p * self.q, (self.p - 1) * (self.q - 1)) != 1:
            raise CryptoError("the two primes of a Paillier key must have the same size")

    @classmethod
    def generate(cls, bits: int) -> PaillierPrivateKey:
        """Generate a key with n of exactly ``bits`` bits.

        Raises:
            CryptoError: ``bits`` is not in :data:`KEY_BITS`.
        """
        if bits not in KEY_BITS:
            raise CryptoError(
                f"Paillier keys have {', '.join(map(str, KEY_BITS))} bits; {bits} were asked for"
            )
        return cls.generate_insecure(bits)

    @classmethod
    def generate_insecure(cls, bits: int) -> PaillierPrivateKey:
        """Generate a key of any even size; sizes below 2048 bits are insecure and serve tests only."""
        p = _prime(bits // 2)
        q = _prime(bits // 2)
        while p == q:
            q = _prime(bits // 2)
        return cls(p, q)

    @classmethod
    def load(cls, path: Path) -> PaillierPrivateKey:
        """Read a key that :meth:`save` wrote.

        Raises:
            CryptoError: the file is missing, readable by others, or contains no Paillier key.
        """
        prefix = f"{path} holds no Paillier key: it"
        document = parse_json(read_private_file(path), prefix, CryptoError)
        with reading(prefix, CryptoError):
            if document["kind"] != "paillier" or document["schema_version"] != 1:
                raise CryptoError(f"{path} holds no Paillier key of version 1")
            return cls(mpz(document["p"], 16), mpz(document["q"], 16))

    def save(self, path: Path) -> None:
        """Write the key as JSON with mode 0600; an existing file is never overwritten.

        Raises:
            CryptoError: the file exists or cannot be written.
        """
        document = {"schema_version": 1, "kind": "paillier", "p": self.p.digits(16), "q": self.q.digits(16)}
        write_private_file(path, json.dumps(document).encode())

    @cached_property
    def public(self) -> PaillierPublicKey:
        """Public key with the modulus n = p q."""
        return PaillierPublicKey(self.p * self.q)

    @cached_property
    def _halves(self) -> tuple[tuple[mpz, mpz, mpz], ...]:
        """For each prime r: r, r², and the inverse of L(g^(r-1)) modulo r, with L(x) = (x - 1) / r."""
        n = self.public.n
        return tuple(
            (prime, prime**2, invert((powmod(1 + n, prime - 1, prime**2) - 1) // prime, prime))
            for prime in (self.p, self.q)
        )

    def encrypt(self, message: int) -> mpz:
        """Return a fresh ciphertext of ``message`` mod n, at a quarter of the cost of public encryption.

        The n-th powers modulo p² are the p-th powers of the p - 1 units modulo p, and each of them is equally likely.
        """
        p, q = self.p, self.q
        powers = tuple(powmod(1 + secrets.randbelow(int(r - 1)), r, r * r) for r in (p, q))
        return self.public.encode(message) * _combine(powers, (p * p, q * q)) % self.public.square

    def decrypt(self, ciphertext: mpz) -> mpz:
        """Decrypt a ciphertext to a plaintext in 0 .. n - 1.

        Raises:
            CryptoError: the number is not a ciphertext.
        """
        self.public.check(ciphertext)
        # m mod r = L(c^(r-1) mod r²) L(g^(r-1) mod r²)^-1 mod r for both primes r
        remainders = tuple(
            (powmod(ciphertext, prime - 1, square) - 1) // prime * factor % prime
            for prime, square, factor in self._halves
        )
        return _combine(remainders, (self.p, self.q))

    def randomness(self, ciphertext: mpz) -> mpz:
        """Return r mod n of a ciphertext (1 + m n) r^n: its randomness, which only the key holder can compute."""
        n = self.public.n
        return powmod(ciphertext % n, invert(n, (self.p - 1) * (self.q - 1)), n)


class Rerandomizer:
    """Source of factors rho^n that make the randomness of a ciphertext independent of its computation.

    rho = ± h^x, with h a random element of Jacobi symbol -1 and x fresh and uniform on 512 bits. -1 and h generate
    the whole group except with probability 2^-240, because (p-1)/2 and (q-1)/2 have no prime factor below 2^254.

    Assumption: the short x is as good as a long x. Towards the key holder this is the assumption of short discrete
    logarithms modulo p and q (Damgard, Jurik and Nielsen 2010 use the same factors). Towards all other parties it
    follows from the assumption of Paillier's scheme. docs/theory/private-weighting.md gives the security in bits.

    Args:
        key: public key.
        uses: expected number of re-randomised ciphertexts, for the size of the table.
    """

    def __init__(self, key: PaillierPublicKey, *, uses: int) -> None:
        unit = random_unit(key.n)
        while jacobi(unit, key.n) != -1:
            unit = random_unit(key.n)
        base = powmod(unit, key.n, key.square)
        self._square = key.square
        window = fixed_window(bits=_SHORT_EXPONENT, powers=uses)
        self._powers = FixedPowers(base, key.square, bits=_SHORT_EXPONENT, window=window)

    def factor(self) -> mpz:
        """Return a fresh encryption of zero, to be multiplied with one ciphertext."""
        power = self._powers.raise_to(secrets.randbits(_SHORT_EXPONENT))
        return power if secrets.randbits(1) else self._square - power


def random_unit(n: mpz) -> mpz:
    """Sample a uniform element of 1 .. n - 1 that is coprime to n."""
    while True:
        value = mpz(secrets.randbelow(int(n)))
        if gcd(value, n) == 1:
            return value


def _combine(remainders: tuple[mpz, ...], moduli: tuple[mpz, mpz]) -> mpz:
    """Return the number below the product of two moduli with given remainders (Chinese remainders)."""
    difference = (remainders[1] - remainders[0]) * invert(moduli[0], moduli[1]) % moduli[1]
    return remainders[0] + moduli[0] * difference


def _odd_primes(limit: int) -> list[int]:
    flags = np.ones(limit, dtype=np.bool_)
    for number in range(3, math.isqrt(limit) + 1, 2):
        if flags[number]:
            flags[number * number :: number] = False
    return [int(prime) for prime in np.flatnonzero(flags[3::2]) * 2 + 3]


def _prime(bits: int) -> mpz:
    """Generate a prime p = 2 a b + 1 with primes a and b, and with the two top bits of p set.

    b has a quarter of the bits of p, at least 8. The function samples a, and then sieves candidates b: neither b nor
    p may have a prime factor below 2^16 (below 2^(bits/16) for insecure test keys). p = 3 mod 4, because a and b are
    odd.
    """
    few = max(8, bits // 4)
    primes = _odd_primes(min(_SIEVED, 2 ** max(2, few // 4)))
    while True:
        a = next_prime(mpz(secrets.randbits(bits - few)) | (mpz(1) << (bits - few - 1)))
        least, most = (0b11 << (bits - 2)) // (2 * a) + 1, ((mpz(1) << bits) - 1) // (2 * a)
        first = least + secrets.randbelow(int(most - least)) | 1
        room = min(_SIEVE, int(most - first) // 2)
        sieve = np.ones(max(0, room), dtype=np.bool_)
        for small in primes:
            half = pow(2, -1, small)
            sieve[int(-first * half % small) :: small] = False
            if a % small:
                step = pow(int(4 * a % small), -1, small)
                sieve[int(-(2 * a * first + 1) * step % small) :: small] = False
        for index in np.flatnonzero(sieve).tolist():
            b = first + 2 * index
            candidate = 2 * a * b + 1
            if all(is_strong_prp(number, 2) and is_prime(number, _PRIME_TESTS) for number in (b, candidate)):
                return candidate
