"""Encrypt additively homomorphically modulo n by Paillier's cryptosystem (1999) with g = n + 1.

    Enc(m; r) = (1 + m n) r^n mod n²,   Enc(a) Enc(b) = Enc(a + b),   Enc(a)^k = Enc(k a)

Keys have primes p = q = 3 mod 4 for which (p - 1)/2 and (q - 1)/2 are products of two large primes, so the only small
subgroup has order two. A party can then hide its computation on the key holder's ciphertexts from the key holder with
powers of a single element (:class:`Rerandomizer`).
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from gmpy2 import gcd, invert, is_prime, is_square, is_strong_prp, jacobi, mpz, next_prime, powmod

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.keys import read_private_file, write_private_file
from fedveil.crypto.multiexp import FixedPowers, fixed_window
from fedveil.files import parse_json, reading

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
        place = f"{path} holds no Paillier key: it"
        document = parse_json(read_private_file(path), place, CryptoError)
        with reading(place, CryptoError):
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
        kept = np.ones(max(0, room), dtype=np.bool_)
        for small in primes:
            half = pow(2, -1, small)
            kept[int(-first * half % small) :: small] = False
            if a % small:
                step = pow(int(4 * a % small), -1, small)
                kept[int(-(2 * a * first + 1) * step % small) :: small] = False
        for index in np.flatnonzero(kept).tolist():
            b = first + 2 * index
            candidate = 2 * a * b + 1
            if all(is_strong_prp(one, 2) and is_prime(one, _PRIME_TESTS) for one in (b, candidate)):
                return candidate
