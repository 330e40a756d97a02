"""Compute encrypted weighted sums by ring BFV (Brakerski 2012; Fan and Vercauteren 2012) with SEAL.

A weight is encrypted as a constant polynomial modulo a plaintext prime t. Its product with a polynomial of N small
numbers gives N products at once. The multiplication of a ciphertext by such a polynomial does not depend on t, so a
:class:`RingEngine` multiplies ciphertexts of several plaintext primes by the same transformed polynomial. Ciphertexts
are sent as (2, primes, N) residues, not in SEAL's format.

The first half of the module computes with NumPy vectors of residues modulo primes q < 2^60. Integers that do not fit
into int64 are lists of limbs: 30-bit digits, each a vector.

A product modulo q needs no wider integers than int64. Let k = round(a b / q), computed in float64. Then a b - k q is
small, so its low 64 bits determine it, and the two products may overflow. For a < q < 2^60 and 0 <= b < 2^30, k is
below 2^30 and float64 computes a b / q with an error far below 1, so the remainder lies in (-q, q).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64, UInt32, UInt64

from fedveil.crypto.seal_format import (
    MemoryFile,
    check_format,
    ciphertext_bytes,
    parse_ciphertext,
    parse_plaintext,
    plaintext_bytes,
)
from fedveil.errors import CryptoError
from fedveil.randomness import KeyedStream

# --- residues modulo primes ---

LIMB_BITS: Final = 30
"""Number of bits of a limb."""
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
    accepted: list[list[Residues]] = [[] for _ in range(len(range(0, bits, LIMB_BITS)))]
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
        for store, limb in zip(accepted, drawn, strict=True):
            store.append(limb[chosen])
        missing -= len(chosen)
    return [np.concatenate(parts) for parts in accepted]


def keyed_residues(stream: KeyedStream, modulus: int, count: int) -> Residues:
    """Sample numbers uniform on 0 .. q - 1 from a keyed stream; all holders of the key get the same numbers."""
    shift = np.uint64(64 - (modulus - 1).bit_length())
    parts: list[Residues] = []
    missing = count
    while missing > 0:
        words: UInt64[np.ndarray, " n"] = stream.uint64(missing + missing // 8 + 16) >> shift
        accepted = words[words < np.uint64(modulus)][:missing].astype(np.int64)
        parts.append(accepted)
        missing -= len(accepted)
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


# --- keys and ciphertexts ---

Ciphertext = UInt64[np.ndarray, "2 primes n"]

PRIME_BITS: Final = 60
_KEY_PRIME_BITS: Final = 20  # SEAL's extra prime for keys; ciphertexts do not use it


def _seal() -> Any:
    try:
        from tenseal import sealapi
    except ImportError as error:
        raise CryptoError(
            "ring-LWE needs the packages tenseal and zstandard: install fedveil[rlwe]"
        ) from error
    return sealapi


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Ring of polynomials modulo X^N + 1 and a product q of 60-bit primes, at 128-bit security.

    The security is that of the HE standard's table for ternary secrets.

    Attributes:
        degree: N.
        primes: number of 60-bit primes of q.

    Raises:
        CryptoError: SEAL refuses the parameters (N = 8192 allows q of 198 bits, 16384 of 418).
    """

    degree: int
    primes: int

    @cached_property
    def _coefficient_modulus(self) -> Any:
        sizes = [PRIME_BITS] * self.primes + [_KEY_PRIME_BITS]
        return _seal().CoeffModulus.Create(self.degree, sizes)

    @cached_property
    def moduli(self) -> tuple[int, ...]:
        """Primes of q."""
        return tuple(modulus.value() for modulus in self._coefficient_modulus[:-1])

    @property
    def bits(self) -> int:
        """Lower bound of log2 q."""
        return PRIME_BITS * self.primes - 1

    @property
    def ciphertext_bytes(self) -> int:
        """Bytes of a ciphertext in a message."""
        return 16 * self.primes * self.degree

    def plain_primes(self, bits: int, count: int) -> tuple[int, ...]:
        """Return ``count`` distinct primes of ``bits`` bits for plaintext moduli."""
        return tuple(m.value() for m in _seal().PlainModulus.Batching(self.degree, [bits] * count))

    def context(self, plain_modulus: int) -> Any:
        """Return the SEAL context for one plaintext modulus.

        Raises:
            CryptoError: the parameters have less than 128 bits of security or do not fit together.
        """
        seal = _seal()
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
        parameters.set_poly_modulus_degree(self.degree)
        parameters.set_coeff_modulus(self._coefficient_modulus)
        parameters.set_plain_modulus(plain_modulus)
        context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        if not context.parameters_set():
            raise CryptoError(f"SEAL refuses the ring: {context.parameters_error_message()}")
        return context

    def decode(self, data: bytes) -> Ciphertext:
        """Decode received bytes to a ciphertext of shape (2, primes, N).

        Raises:
            CryptoError: another length, or a residue that is not below its prime.
        """
        if len(data) != self.ciphertext_bytes:
            raise CryptoError(
                f"a ciphertext has {self.ciphertext_bytes} bytes here, this one has {len(data)}"
            )
        words = np.frombuffer(data, dtype="<u8").reshape(2, self.primes, self.degree)
        if (words >= np.array(self.moduli, dtype=np.uint64)[:, None]).any():
            raise CryptoError("a ciphertext has a residue that is not below its prime")
        return words

    def add(self, a: Ciphertext, b: Ciphertext) -> Ciphertext:
        """Return the sum of two ciphertexts."""
        moduli = np.array(self.moduli, dtype=np.uint64)[:, None]
        total = a + b
        return np.asarray(total - (total >= moduli) * moduli)

    def scale(self, ciphertext: Ciphertext, factor: int) -> Ciphertext:
        """Multiply a ciphertext by a signed integer constant; the noise grows by its absolute value."""
        scaled = [
            [
                times(row.astype(np.int64), factor, modulus)
                for row, modulus in zip(part, self.moduli, strict=True)
            ]
            for part in ciphertext
        ]
        return np.array(scaled).astype(np.uint64)

    def flood(self, ciphertext: Ciphertext, bits: int) -> Ciphertext:
        """Add the centred sum of three uniform numbers of 2^bits values to every coefficient of c_0.

        The sum lies in -3·2^(bits-1) + 1 .. 3·2^(bits-1) - 2.

        Guarantees:
            Let e be the vector of the ciphertexts' own noise in all coefficients. The statistical distance to noise
            that does not depend on the ciphertexts is at most 1.1 ||e||_2 / 2^bits, jointly over all ciphertexts of a
            message.

        Argument for bits >= 4: the probabilities p of the sum satisfy
        sum_x (sqrt p(x+1) - sqrt p(x))^2 < 1.21 / 4^bits.
        (For one uniform number this sum is 2 / 2^bits.) The square roots of p and of p shifted by e_j therefore
        differ by at most 1.1 |e_j| / 2^bits in l2. The squares of the Hellinger distances of independent coefficients
        add up, and the Hellinger distance bounds the statistical distance.
        """
        parts = [random_limbs(bits, self.degree) for _ in range(3)]
        limbs = [a + b + c for a, b, c in zip(*parts, strict=True)]
        centre = 3 * 2 ** (bits - 1) - 1
        first = [
            (row.astype(np.int64) + from_limbs(limbs, modulus) + (modulus - centre % modulus)) % modulus
            for row, modulus in zip(ciphertext[0], self.moduli, strict=True)
        ]
        return np.stack([np.array(first).astype(np.uint64), ciphertext[1]])


class RlweKey:
    """Secret key for one plaintext prime: encrypts constants and decrypts polynomials.

    Args:
        ring: ring of the ciphertexts.
        plain_modulus: t, the plaintext prime.
    """

    def __init__(self, ring: Ring, plain_modulus: int) -> None:
        seal = _seal()
        self._ring, self._context, self._file = ring, ring.context(plain_modulus), MemoryFile()
        generator = seal.KeyGenerator(self._context)
        secret = generator.secret_key()
        self._public = seal.PublicKey()
        generator.create_public_key(self._public)
        self._encryptor = seal.Encryptor(self._context, secret)
        self._decryptor = seal.Decryptor(self._context, secret)
        self._seal = seal
        fresh = seal.Ciphertext()
        self._encryptor.encrypt_zero_symmetric(fresh)
        # Check SEAL's file format before the first use, because another version of SEAL might write another one.
        check_format(self._context, fresh, seal.Ciphertext())

    @cached_property
    def public(self) -> bytes:
        """Public key as bytes of residues (2, primes + 1, N): an encryption of zero in transformed form."""
        return parse_ciphertext(self._file.save(self._public)).tobytes()

    def encrypt(self, value: int) -> Ciphertext:
        """Return a fresh ciphertext of a constant in 0 .. t - 1."""
        result = self._seal.Ciphertext()
        self._encryptor.encrypt_symmetric(self._seal.Plaintext(f"{value:x}"), result)
        return parse_ciphertext(self._file.save(result))

    def decrypt(self, ciphertext: Ciphertext) -> Int64[np.ndarray, " n"]:
        """Decrypt a ciphertext to its (N,) int64 coefficients in 0 .. t - 1."""
        loaded, plain = self._load(ciphertext), self._seal.Plaintext()
        self._decryptor.decrypt(loaded, plain)
        coefficients = np.zeros(self._ring.degree, dtype=np.int64)
        words = parse_plaintext(self._file.save(plain))
        coefficients[: len(words)] = words
        return coefficients

    def noise_budget(self, ciphertext: Ciphertext) -> int:
        """Return the number of bits by which the noise may still grow; 0 if decryption is no longer correct."""
        return int(self._decryptor.invariant_noise_budget(self._load(ciphertext)))

    def _load(self, ciphertext: Ciphertext) -> Any:
        loaded = self._seal.Ciphertext()
        data = ciphertext_bytes(tuple(self._context.first_parms_id()), ciphertext, ntt=False)
        self._file.load(loaded, self._context, data)
        return loaded


class RlwePublicKey:
    """Public key that encrypts polynomials for the holder of the secret key.

    Args:
        ring: ring of the ciphertexts.
        plain_modulus: t, the plaintext prime.
        public: bytes from :attr:`RlweKey.public`.

    Raises:
        CryptoError: the bytes are not a public key of this ring.
    """

    def __init__(self, ring: Ring, plain_modulus: int, public: bytes) -> None:
        seal = _seal()
        self._context, self._file, self._seal = ring.context(plain_modulus), MemoryFile(), seal
        expected = 16 * (ring.primes + 1) * ring.degree
        if len(public) != expected:
            raise CryptoError(f"a public key of this ring has {expected} bytes, this one has {len(public)}")
        words = np.frombuffer(public, dtype="<u8").reshape(2, ring.primes + 1, ring.degree)
        key = seal.PublicKey()
        data = ciphertext_bytes(tuple(self._context.key_parms_id()), words, ntt=True)
        self._file.load(key, self._context, data)
        self._encryptor = seal.Encryptor(self._context, key)

    def encrypt(self, coefficients: Int64[np.ndarray, " n"]) -> Ciphertext:
        """Return a fresh ciphertext of a polynomial with (n,) coefficients in 0 .. t - 1, n <= N."""
        plain, result = self._seal.Plaintext(), self._seal.Ciphertext()
        self._file.load(plain, self._context, plaintext_bytes(coefficients.astype(np.uint64)))
        self._encryptor.encrypt(plain, result)
        return parse_ciphertext(self._file.save(result))


class RingEngine:
    """Engine for sums of products of fixed ciphertexts with polynomials of small signed coefficients.

    Args:
        ring: ring of the ciphertexts.
        plain_modulus: any plaintext prime above twice the largest coefficient; products do not depend on it.
    """

    def __init__(self, ring: Ring, plain_modulus: int) -> None:
        self._seal = _seal()
        self._ring, self._plain_modulus = ring, plain_modulus
        self._context, self._file = ring.context(plain_modulus), MemoryFile()
        self._evaluator = self._seal.Evaluator(self._context)
        self._identifier = tuple(self._context.first_parms_id())

    def prepare(self, ciphertext: Ciphertext) -> Any:
        """Transform a ciphertext of any plaintext prime for :meth:`weighted_sums`."""
        loaded = self._seal.Ciphertext()
        self._file.load(loaded, self._context, ciphertext_bytes(self._identifier, ciphertext, ntt=False))
        self._evaluator.transform_to_ntt_inplace(loaded)
        return loaded

    def weighted_sums(
        self, bases: Sequence[Sequence[Any]], polynomials: Int64[np.ndarray, "m n"]
    ) -> list[Ciphertext]:
        """Return sum_i base_i · polynomial_i for each of k series of m prepared ciphertexts.

        Args:
            bases: k series of m prepared ciphertexts; one transformed polynomial serves all k series.
            polynomials: (m, n) coefficients below t/2 in absolute value, n <= N.
        """
        sums: list[Any] = [None] * len(bases)
        transformed = self._seal.Plaintext()
        plain, product = self._seal.Plaintext(), self._seal.Ciphertext()
        for index, row in enumerate(polynomials):
            # SEAL refuses a product with a zero plaintext, because the result would be a transparent ciphertext.
            if not row.any():
                continue
            coefficients = np.zeros(self._ring.degree, dtype=np.uint64)
            coefficients[: len(row)] = to_signed(row, self._plain_modulus)
            self._file.load(plain, self._context, plaintext_bytes(coefficients))
            self._evaluator.transform_to_ntt(plain, self._context.first_parms_id(), transformed)
            for series, ciphertexts in enumerate(bases):
                if sums[series] is None:
                    sums[series] = self._seal.Ciphertext()
                    self._evaluator.multiply_plain(ciphertexts[index], transformed, sums[series])
                else:
                    self._evaluator.multiply_plain(ciphertexts[index], transformed, product)
                    self._evaluator.add_inplace(sums[series], product)
        return [self._finish(total) for total in sums]

    def _finish(self, total: Any) -> Ciphertext:
        if total is None:
            return np.zeros((2, self._ring.primes, self._ring.degree), dtype=np.uint64)
        self._evaluator.transform_from_ntt_inplace(total)
        return parse_ciphertext(self._file.save(total))
