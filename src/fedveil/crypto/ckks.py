"""Encrypt integers and add them exactly by CKKS (Cheon, Kim, Kim, Song 2017), with SEAL.

A holder of the secret key encrypts N integers as N/2 complex slots of one polynomial modulo X^N + 1 and one prime q:

    c_0 = -a s + e + round(Delta embed(y)),   c_1 = a from a 64-byte seed,   e from SEAL's error distribution

SEAL generates keys and encryptions of zero (-a s + e and a), and it adds ciphertexts. This module implements the
encoding (:mod:`fedveil.crypto.ckks`) and the decryption, which is one product of polynomials.

A party without the key adds the ciphertexts. CKKS adds an error to every slot. Delta is so large that the error of a
sum stays below Delta / 2, so :meth:`CkksKey.decrypt` removes the error by rounding. Its result is the sum of the
plaintexts and depends on neither key nor error. A published decryption therefore discloses only the sum: the attack
of Li and Micciancio (2021) needs the error. See docs/theory/partial-encryption.md.

The scheme needs additions only, so it has one prime, no evaluation key and no rescaling. A residue is sent in as many
bytes as the prime has, under parameters that both sides know. SEAL's own format is never read from the network.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from jaxtyping import Complex128, Float64, Int64, Shaped, UInt64

from fedveil.crypto.rlwe import times_small
from fedveil.crypto.seal_format import (
    SEED_BYTES,
    MemoryFile,
    ciphertext_bytes,
    parse_ciphertext,
    parse_plaintext,
    parse_seeded_ciphertext,
    plaintext_bytes,
    seeded_ciphertext_bytes,
)
from fedveil.errors import CryptoError

# --- canonical embedding ------------------------------------------------------------------------------------
# Evaluate real polynomials modulo X^N + 1 at its roots by FFT: the canonical embedding of CKKS.
#
# Let zeta = exp(i pi / N). The values of a real polynomial p at zeta^(4m+1), m < N/2, determine p, because the other
# roots are the conjugates of these. As (zeta^(4m+1))^(N/2) = i,
#
#     p(zeta^(4m+1)) = sum_{k < N/2} (p_k + i p_{k+N/2}) zeta^k exp(2 pi i m k / (N/2)).
#
# This is one discrete Fourier transform of half the size. Products of values are the values of products of polynomials
# modulo X^N + 1.


def values(coefficients: Float64[np.ndarray, "*b n"]) -> Complex128[np.ndarray, "*b half"]:
    """Return the values of real polynomials at zeta^(4m+1), m = 0 .. N/2 - 1.

    Args:
        coefficients: (..., N) float64, coefficients of 1, X, ..., X^(N-1); N is even.

    Returns:
        (..., N/2) complex128.
    """
    half = coefficients.shape[-1] // 2
    folded = np.empty((*coefficients.shape[:-1], half), dtype=np.complex128)
    folded.real, folded.imag = coefficients[..., :half], coefficients[..., half:]
    folded *= _roots(half)
    return np.fft.ifft(folded, norm="forward")


def coefficients(values: Complex128[np.ndarray, "*b half"]) -> Float64[np.ndarray, "*b n"]:
    """Return the coefficients of the real polynomials with given values; inverse of :func:`values`."""
    folded = np.fft.fft(values, norm="forward")
    folded *= _roots(values.shape[-1]).conj()
    return np.concatenate([folded.real, folded.imag], axis=-1)


@lru_cache(maxsize=4)
def _roots(half: int) -> Complex128[np.ndarray, " half"]:
    """Return zeta^0 .. zeta^(N/2-1), each from its own exponential to avoid accumulated rounding."""
    roots: np.ndarray = np.exp(0.5j * np.pi * np.arange(half) / half)
    roots.flags.writeable = False
    return roots


# --- encryption ---------------------------------------------------------------------------------------------


LARGEST_MODULUS_BITS: Final = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""log2 q with 128 bits of security, by degree (HE standard 2018, Table 1: classical, ternary secret)."""

FINGERPRINT_BYTES: Final = 8
# 10.5: SEAL's centred binomial distribution of 2 x 21 bits; 1/4: largest variance of the encoder's random rounding.
_ERROR_VARIANCE: Final = 10.5 + 1 / 4
_REACH: Final = 12.0  # standard deviations; the error of a slot exceeds this with a probability below 1e-30
_PART: Final = 16  # ciphertexts per batch, in this process or per task of a worker process
_LIMB_BITS: Final = 28


@dataclass(frozen=True, kw_only=True)
class CkksParameters:
    """Public parameters of the encryption, on which all parties agree.

    Attributes:
        silos: most ciphertexts in a sum.
        degree: N, degree of the ring, a power of two.
        prime_bits: number of bits of q, a multiple of 8.

    Raises:
        CryptoError: less than 128 bits of security, or so many silos that no useful sum fits.
    """

    silos: int
    degree: int = 4096
    prime_bits: int = 56

    def __post_init__(self) -> None:
        """Check security and the size of sums before any key is generated."""
        largest = LARGEST_MODULUS_BITS.get(self.degree, 0)
        if self.prime_bits > largest:
            raise CryptoError(
                f"degree {self.degree} with a modulus of {self.prime_bits} bits has less than 128 bits of security; "
                f"the table allows {largest or 'no such degree'}"
            )
        if self.prime_bits % 8 or not 24 <= self.prime_bits <= 56:
            raise CryptoError(f"a prime of {self.prime_bits} bits: 24, 32, 40, 48 or 56 are possible")
        if self.silos < 1 or self.limit < 2**16:
            raise CryptoError(
                f"sums over {self.silos} silos do not fit a prime of {self.prime_bits} bits at degree {self.degree}"
            )

    @property
    def scale(self) -> int:
        """Delta, value of one unit in a slot: a power of two, at least 24 standard deviations of the error."""
        # Error of a slot of the sum: |S| N / 2 independent terms. Delta / 2 >= 12 standard deviations: rounding is
        # exact.
        error = math.sqrt(self.silos * self.degree / 2 * _ERROR_VARIANCE)
        return 1 << math.ceil(math.log2(2 * _REACH * error))

    @property
    def limit(self) -> int:
        """Largest absolute value of one silo's number, in units.

        The encoding of a sum over ``silos`` such numbers stays below q / 2. A coefficient of the encoding is at most
        the largest absolute value of a slot, sqrt(2) limit Delta.
        """
        # The factor 0.99 leaves room for the error. 2^(bits-2) <= q / 2, because q has its top bit set.
        return math.floor(2.0 ** (self.prime_bits - 2) * 0.99 / (self.silos * math.sqrt(2) * self.scale))

    @property
    def word_bytes(self) -> int:
        """Bytes of a residue on the wire."""
        return self.prime_bits // 8

    @property
    def fresh_bytes(self) -> int:
        """Bytes of a fresh ciphertext of N numbers: a seed and one polynomial."""
        return SEED_BYTES + self.degree * self.word_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum of N numbers: two polynomials."""
        return 2 * self.degree * self.word_bytes

    @cached_property
    def prime(self) -> int:
        """Prime modulus q, chosen by SEAL from degree and size."""
        return int(self.context.first_context_data().parms().coeff_modulus()[0].value())

    @cached_property
    def fingerprint(self) -> bytes:
        """Hash of the parameters (8 bytes), different for other parameters."""
        text = f"ckks coefficients {self.degree} {self.prime} {self.scale}"
        return hashlib.sha256(text.encode()).digest()[:FINGERPRINT_BYTES]

    def blocks(self, length: int) -> int:
        """Return the number of ciphertexts that hold ``length`` numbers: ceil(length / N)."""
        return -(-length // self.degree)

    @property
    def context(self) -> Any:
        """SEAL context of the parameters; SEAL checks their security itself.

        Raises:
            CryptoError: SEAL refuses the parameters.
        """
        return _context(self.degree, self.prime_bits)

    def __getstate__(self) -> dict[str, int]:
        """Return only the fields, because SEAL's objects cannot be pickled for worker processes."""
        return {"silos": self.silos, "degree": self.degree, "prime_bits": self.prime_bits}

    def pack(self, words: UInt64[np.ndarray, "..."]) -> bytes:
        """Return residues as little-endian bytes, ``word_bytes`` per residue."""
        return self.drop_high_bytes(words).tobytes()

    def drop_high_bytes(self, words: UInt64[np.ndarray, "*b n"]) -> Shaped[np.ndarray, "*b n"]:
        """Return a view of residues without their high bytes, which are zero."""
        low = np.dtype({"names": ["low"], "formats": [f"V{self.word_bytes}"], "itemsize": 8})
        return np.asarray(np.ascontiguousarray(words, dtype="<u8").view(low)["low"])

    def unpack(self, data: bytes) -> UInt64[np.ndarray, " n"]:
        """Return the residues of received bytes.

        Raises:
            CryptoError: a residue that is not below the prime.
        """
        count, padding = len(data) // self.word_bytes, 8 - self.word_bytes
        overlapping = np.ndarray((count,), "<u8", data + bytes(padding), strides=(self.word_bytes,))
        words = overlapping & np.uint64(2**self.prime_bits - 1)
        if (words >= self.prime).any():
            raise CryptoError("a ciphertext or key has a residue that is not below its prime")
        return words


class CkksKey:
    """Secret key that encrypts and decrypts.

    Not claimed: secrecy between holders of the key. Every holder can decrypt the ciphertexts of every other holder.

    Args:
        parameters: public parameters.
        secret: bytes from :meth:`private_bytes`; None generates a new key.

    Raises:
        CryptoError: the bytes are not a key under these parameters.
    """

    def __init__(self, parameters: CkksParameters, secret: bytes | None = None) -> None:
        seal = _seal()
        self._parameters, self._file = parameters, MemoryFile()
        context = parameters.context
        if secret is None:
            key = seal.KeyGenerator(context).secret_key()
            self._transformed = parse_plaintext(self._file.save(key))
        else:
            expected = parameters.degree * parameters.word_bytes
            if len(secret) != expected:
                raise CryptoError(f"a CKKS key has {expected} bytes here, this one has {len(secret)}")
            key = seal.SecretKey()
            self._transformed = parameters.unpack(secret)
            self._file.load(key, context, plaintext_bytes(self._transformed, tuple(context.key_parms_id())))
        self._encryptor = seal.Encryptor(context, key)
        self._values = values(self._coefficients())

    def private_bytes(self) -> bytes:
        """Return the secret key as bytes, to be sent to other holders under encryption; never store or log it."""
        return self._parameters.pack(self._transformed)

    def encrypt(self, units: Int64[np.ndarray, " n"], workers: Executor | None = None) -> bytes:
        """Return fresh ciphertexts of integers, N in each, concatenated.

        Args:
            units: (n,) int64, at most :attr:`CkksParameters.limit` in absolute value.
            workers: worker processes that share the work and receive the key; None encrypts in this process.

        Raises:
            CryptoError: a number above the limit.
        """
        limit = self._parameters.limit
        if units.size and (units.max() > limit or units.min() < -limit):
            raise CryptoError(f"a number to encrypt is above the limit of {limit} units")
        size = _PART * self._parameters.degree
        parts = [units[first : first + size] for first in range(0, len(units), size)]
        if workers is None:
            return b"".join(map(self._encrypted, parts))
        secret = self.private_bytes()
        count = len(parts)
        return b"".join(workers.map(_encrypt_part, [self._parameters] * count, [secret] * count, parts))

    def decrypt(self, data: bytes, length: int) -> Int64[np.ndarray, " n"]:
        """Decrypt the exact (n,) int64 sum of the encrypted numbers.

        Args:
            data: bytes from :meth:`CkksSum.encode`.
            length: n, number of integers in the sum.

        Raises:
            CryptoError: other parameters, a truncated sum, or values that no sum within the limits has, for example
                because of another key.
        """
        parameters = self._parameters
        blocks, size = parameters.blocks(length), parameters.sum_bytes
        if len(data) != blocks * size:
            raise CryptoError(
                f"a sum of {length} numbers has {blocks * size} bytes here, this one has {len(data)}"
            )
        units, largest = np.empty((blocks, parameters.degree), dtype=np.int64), 0.0
        for first in range(0, blocks, _PART):
            words = parameters.unpack(data[first * size : (first + _PART) * size])
            slots = values(self._opened(words.reshape(-1, 2, parameters.degree)))
            whole = np.rint(slots.view(np.float64) / parameters.scale)
            largest = max(largest, np.abs(whole).max())
            units[first : first + _PART] = whole
        sums = units.reshape(-1)
        if largest > parameters.silos * parameters.limit or sums[length:].any():
            raise CryptoError("a decrypted sum is out of range: it was encrypted under another key")
        return sums[:length]

    def _encrypted(self, units: Int64[np.ndarray, " n"]) -> bytes:
        """Encrypt one batch: SEAL encrypts zero, and the encoded numbers are added to the first polynomials."""
        parameters = self._parameters
        blocks, degree, prime = parameters.blocks(len(units)), parameters.degree, np.uint64(parameters.prime)
        padded = np.zeros((blocks, degree))
        np.multiply(units, float(parameters.scale), out=padded.reshape(-1)[: len(units)])
        # Random rounding: with deterministic rounding, equal plaintexts of many silos would have equal errors, which
        # add up.
        drawn = np.frombuffer(os.urandom(4 * padded.size), dtype=np.uint32).reshape(padded.shape) * 2.0**-32
        sums = np.floor(coefficients(padded.view(np.complex128)) + drawn).astype(np.int64).view(np.uint64)
        sent = np.empty(
            blocks, dtype=[("seed", f"V{SEED_BYTES}"), ("words", f"V{parameters.word_bytes}", degree)]
        )
        for index, encoded in enumerate(sums):
            words, seed = parse_seeded_ciphertext(self._file.save(self._encryptor.encrypt_zero_symmetric()))
            sent["seed"][index] = np.void(seed)
            encoded += words
        # Reduction to 0 .. q - 1: in uint64 a negative number is above 2^63, so the smaller candidate is the right
        # one.
        np.minimum(sums, sums + prime, out=sums)
        np.minimum(sums, sums - prime, out=sums)
        sent["words"] = parameters.drop_high_bytes(sums)
        return sent.tobytes()

    def _opened(self, words: UInt64[np.ndarray, "b 2 n"]) -> Float64[np.ndarray, "b n"]:
        """Return c_0 + c_1 s modulo q, between -q/2 and q/2: the encoded sum with its error.

        c_1 is split into two limbs of 28 bits. A coefficient of the product of a limb with s is a sum of N limbs,
        below 2^40 for N = 4096. The error of the FFT is far below 1/2, so rounding gives the exact coefficient.
        """
        prime = self._parameters.prime
        limbs = np.stack([words[:, 1] >> _LIMB_BITS, words[:, 1] & (2**_LIMB_BITS - 1)], axis=1)
        products = np.rint(coefficients(values(limbs.astype(np.float64)) * self._values)).astype(np.int64)
        total = times_small(products[:, 0], 2**_LIMB_BITS, prime)
        total += products[:, 1]
        total += words[:, 0].view(np.int64)
        total -= np.rint(total / prime).astype(np.int64) * prime
        return total.astype(np.float64)

    def _coefficients(self) -> Float64[np.ndarray, " n"]:
        """Return the (N,) coefficients of the key; SEAL stores only its number-theoretic transform."""
        parameters, seal = self._parameters, _seal()
        words = np.ones(
            (2, 1, parameters.degree), dtype=np.uint64
        )  # SEAL refuses a second polynomial of zeros
        words[0] = self._transformed
        ciphertext = seal.Ciphertext()
        form = ciphertext_bytes(tuple(parameters.context.first_parms_id()), words, ntt=True)
        self._file.load(ciphertext, parameters.context, form)
        seal.Evaluator(parameters.context).transform_from_ntt_inplace(ciphertext)
        polynomial = parse_ciphertext(self._file.save(ciphertext))[0, 0].astype(np.int64)
        polynomial -= (polynomial > parameters.prime // 2) * np.int64(parameters.prime)
        if np.abs(polynomial).max() != 1:
            raise CryptoError("a CKKS key's coefficients are -1, 0 and 1; these bytes are no key")
        return np.asarray(polynomial, dtype=np.float64)


class CkksSum:
    """Sum of ciphertexts, computed without a key.

    Args:
        parameters: public parameters.
        length: number of integers that each silo encrypts.
    """

    def __init__(self, parameters: CkksParameters, length: int) -> None:
        seal = _seal()
        self._parameters, self._length, self._added = parameters, length, 0
        self._evaluator, self._file = seal.Evaluator(parameters.context), MemoryFile()
        self._identifier = tuple(parameters.context.first_parms_id())
        self._totals: list[Any] = []

    def add(self, data: bytes) -> None:
        """Add the ciphertexts of one silo; a refused message leaves the sum unchanged.

        Args:
            data: bytes from :meth:`CkksKey.encrypt`.

        Raises:
            CryptoError: truncated bytes, other parameters, or more silos than the parameters allow.
        """
        parameters, seal = self._parameters, _seal()
        if self._added == parameters.silos:
            raise CryptoError(f"at most {parameters.silos} silos' ciphertexts can be added up")
        size = parameters.fresh_bytes
        expected = parameters.blocks(self._length) * size
        if len(data) != expected:
            raise CryptoError(
                f"{self._length} numbers have {expected} encrypted bytes here, this has {len(data)}"
            )
        view = memoryview(data)
        blocks = [view[first : first + size] for first in range(0, expected, size)]
        # All residues are checked before the first addition, so that a refusal leaves the sum unchanged.
        words = [parameters.unpack(bytes(block[SEED_BYTES:])) for block in blocks]
        for index, (block, residues) in enumerate(zip(blocks, words, strict=True)):
            fresh = seal.Ciphertext()
            form = seeded_ciphertext_bytes(self._identifier, residues, bytes(block[:SEED_BYTES]))
            self._file.load(fresh, parameters.context, form)
            if self._added:
                self._evaluator.add_inplace(self._totals[index], fresh)
            else:
                self._totals.append(fresh)
        self._added += 1

    def encode(self) -> bytes:
        """Return the ciphertexts of the sum, concatenated."""
        pack = self._parameters.pack
        return b"".join(pack(parse_ciphertext(self._file.save(total))) for total in self._totals)


@lru_cache(maxsize=1)
def _worker_key(parameters: CkksParameters, secret: bytes) -> CkksKey:
    return CkksKey(parameters, secret)


def _encrypt_part(parameters: CkksParameters, secret: bytes, units: Int64[np.ndarray, " n"]) -> bytes:
    """Encrypt one batch in a worker process, which caches the key between batches."""
    return _worker_key(parameters, secret).encrypt(units)


@lru_cache(maxsize=8)
def _context(degree: int, prime_bits: int) -> Any:
    """Return SEAL's context, which is immutable, so that all parties of a process share it."""
    seal = _seal()
    # BFV keeps ciphertexts in coefficient form; SEAL's CKKS would transform them.
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
    parameters.set_poly_modulus_degree(degree)
    parameters.set_coeff_modulus(seal.CoeffModulus.Create(degree, [prime_bits]))
    parameters.set_plain_modulus(2)  # required by SEAL; SEAL encrypts only zero here
    context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
    if not context.parameters_set():
        raise CryptoError(f"SEAL refuses the parameters: {context.parameters_error_message()}")
    return context


def _seal() -> Any:
    try:
        from tenseal import sealapi
    except ImportError as error:
        raise CryptoError("CKKS needs the packages tenseal and zstandard: install fedveil[rlwe]") from error
    return sealapi
