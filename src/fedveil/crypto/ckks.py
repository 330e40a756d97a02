"""CKKS (Cheon, Kim, Kim, Song 2017) for sums alone, by SEAL: whole numbers in, their exact sum out.

Who holds the secret key encrypts N whole numbers as N/2 complex slots of one polynomial modulo X^N + 1 and one prime q:

    c_0 = -a s + e + round(Delta embed(y)),   c_1 = a from a 64-byte seed,   e from SEAL's error law

SEAL makes keys and encryptions of zero, -a s + e and a, and adds ciphertexts up. Encoding is ours
(:mod:`fedveil.crypto.canonical_embedding`), and so is decryption, which is one product of polynomials.

Ciphertexts are added by whoever lacks the key. CKKS adds an error to every slot; Delta is so large that the error of a
sum stays below Delta / 2, so :meth:`CkksKey.decrypt` rounds it away. What it returns is the sum of the plaintexts and
depends on neither key nor error, so a decryption that is published tells nothing that the sum does not: the attack of
Li and Micciancio (2021) needs the error. docs/theory/partial-encryption.md.

Only additions are made, so there is one prime, no evaluation key and no rescaling. Residues travel with the bytes their
prime has, under parameters that both sides know; nothing of SEAL's own format is read from the network.
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
from jaxtyping import Float64, Int64, Shaped, UInt64

from fedveil.crypto.canonical_embedding import coefficients, values
from fedveil.crypto.errors import CryptoError
from fedveil.crypto.residues import times_small
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

LARGEST_MODULUS_BITS: Final = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""log2 q with 128 bits of security, by degree (HE standard 2018, Table 1: classical, ternary secret)."""

FINGERPRINT_BYTES: Final = 8
_ERROR_VARIANCE: Final = (
    10.5 + 1 / 4
)  # SEAL's centred binomial law of 2 x 21 bits; and rounding in the encoder, at random
_REACH: Final = 12.0  # in standard deviations: a slot's error reaches farther with a probability below 1e-30
_PART: Final = 16  # ciphertexts that are computed with, or given to a worker process, at once
_LIMB_BITS: Final = 28


@dataclass(frozen=True, kw_only=True)
class CkksParameters:
    """What all parties agree on; public.

    Attributes:
        silos: how many ciphertexts may be added up.
        degree: N, a power of two.
        prime_bits: size of q, a whole number of bytes.

    Raises:
        CryptoError: less than 128 bits of security, or so many silos that no useful sum fits.
    """

    silos: int
    degree: int = 4096
    prime_bits: int = 56

    def __post_init__(self) -> None:
        """Check security and room before any key is made."""
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
        """Delta, what stands for one whole unit in a slot: a power of two at least 24 times the error of a sum."""
        error = math.sqrt(self.silos * self.degree / 2 * _ERROR_VARIANCE)
        return 1 << math.ceil(math.log2(2 * _REACH * error))

    @property
    def limit(self) -> int:
        """Largest absolute value of one silo's number: sums of ``silos`` of them stay below q / 2.

        A coefficient of the encoding is at most the largest absolute value of a slot, sqrt(2) limit Delta.
        """
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
        """Prime modulus q."""
        return int(self.context.first_context_data().parms().coeff_modulus()[0].value())

    @cached_property
    def fingerprint(self) -> bytes:
        """Return 8 bytes that other parameters do not have."""
        text = f"ckks coefficients {self.degree} {self.prime} {self.scale}"
        return hashlib.sha256(text.encode()).digest()[:FINGERPRINT_BYTES]

    def blocks(self, length: int) -> int:
        """Return how many ciphertexts hold so many numbers."""
        return -(-length // self.degree)

    @property
    def context(self) -> Any:
        """SEAL's context, with its own check of the parameters' security.

        Raises:
            CryptoError: SEAL refuses the parameters.
        """
        return _context(self.degree, self.prime_bits)

    def __getstate__(self) -> dict[str, int]:
        """Return the fields alone: SEAL's objects do not travel to worker processes."""
        return {"silos": self.silos, "degree": self.degree, "prime_bits": self.prime_bits}

    def pack(self, words: UInt64[np.ndarray, "..."]) -> bytes:
        """Return residues as little-endian bytes, as many per residue as the prime has."""
        return self.drop_high_bytes(words).tobytes()

    def drop_high_bytes(self, words: UInt64[np.ndarray, "*b n"]) -> Shaped[np.ndarray, "*b n"]:
        """Return a view of residues without their highest bytes, which are zero."""
        low = np.dtype({"names": ["low"], "formats": [f"V{self.word_bytes}"], "itemsize": 8})
        return np.asarray(np.ascontiguousarray(words, dtype="<u8").view(low)["low"])

    def unpack(self, data: bytes) -> UInt64[np.ndarray, " n"]:
        """Return the residues of received bytes.

        Raises:
            CryptoError: a residue that is not below the prime.
        """
        count, rest = len(data) // self.word_bytes, 8 - self.word_bytes
        overlapping = np.ndarray((count,), "<u8", data + bytes(rest), strides=(self.word_bytes,))
        words = overlapping & np.uint64(2**self.prime_bits - 1)
        if (words >= self.prime).any():
            raise CryptoError("a ciphertext or key has a residue that is not below its prime")
        return words


class CkksKey:
    """A secret key: encrypts and decrypts. Every holder can decrypt every other's ciphertext.

    Args:
        parameters: what all parties agreed on.
        secret: what :meth:`private_bytes` gave; None makes a new key.

    Raises:
        CryptoError: bytes that are no key under these parameters.
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
        """Return the secret key (to give to other holders under encryption; never to store or to log)."""
        return self._parameters.pack(self._transformed)

    def encrypt(self, units: Int64[np.ndarray, " n"], workers: Executor | None = None) -> bytes:
        """Return fresh ciphertexts of whole numbers, N in each, one after another.

        Args:
            units: (n,) numbers of at most :attr:`CkksParameters.limit`.
            workers: worker processes to share the work; they are given the key.

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
        """Return the sum of the encrypted numbers, exactly.

        Args:
            data: what :meth:`CkksSum.encode` gave.
            length: how many numbers there are.

        Raises:
            CryptoError: other parameters, a truncated sum, or values that no sum within the limits has, as under
                another key.
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
        """Return encryptions of zero by SEAL, to whose first polynomials the encoded numbers are added."""
        parameters = self._parameters
        blocks, degree, prime = parameters.blocks(len(units)), parameters.degree, np.uint64(parameters.prime)
        padded = np.zeros((blocks, degree))
        np.multiply(units, float(parameters.scale), out=padded.reshape(-1)[: len(units)])
        # Rounded at random: errors of equal plaintexts, of many silos, would be equal and add up.
        drawn = np.frombuffer(os.urandom(4 * padded.size), dtype=np.uint32).reshape(padded.shape) * 2.0**-32
        sums = np.floor(coefficients(padded.view(np.complex128)) + drawn).astype(np.int64).view(np.uint64)
        sent = np.empty(
            blocks, dtype=[("seed", f"V{SEED_BYTES}"), ("words", f"V{parameters.word_bytes}", degree)]
        )
        for index, encoded in enumerate(sums):
            words, seed = parse_seeded_ciphertext(self._file.save(self._encryptor.encrypt_zero_symmetric()))
            sent["seed"][index] = np.void(seed)
            encoded += words
        np.minimum(sums, sums + prime, out=sums)  # below zero is above 2^63 here
        np.minimum(sums, sums - prime, out=sums)
        sent["words"] = parameters.drop_high_bytes(sums)
        return sent.tobytes()

    def _opened(self, words: UInt64[np.ndarray, "b 2 n"]) -> Float64[np.ndarray, "b n"]:
        """Return c_0 + c_1 s modulo q, between -q/2 and q/2: what is encoded, and its error.

        c_1 is cut into two numbers of 28 bits. A coefficient of their products with s is a sum of N of them, below
        2^40 for N = 4096; the FFT is right to far less than 1/2, so rounding gives it exactly.
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
        """Return the key as a polynomial; SEAL keeps its number-theoretic transform."""
        parameters, seal = self._parameters, _seal()
        words = np.ones(
            (2, 1, parameters.degree), dtype=np.uint64
        )  # SEAL refuses a second polynomial of zeros
        words[0] = self._transformed
        ciphertext = seal.Ciphertext()
        form = ciphertext_bytes(tuple(parameters.context.first_parms_id()), words, ntt=True)
        self._file.load(ciphertext, parameters.context, form)
        seal.Evaluator(parameters.context).transform_from_ntt_inplace(ciphertext)
        found = parse_ciphertext(self._file.save(ciphertext))[0, 0].astype(np.int64)
        found -= (found > parameters.prime // 2) * np.int64(parameters.prime)
        if np.abs(found).max() != 1:
            raise CryptoError("a CKKS key's coefficients are -1, 0 and 1; these bytes are no key")
        return np.asarray(found, dtype=np.float64)


class CkksSum:
    """Adds ciphertexts up without a key.

    Args:
        parameters: what all parties agreed on.
        length: how many numbers each silo encrypts.
    """

    def __init__(self, parameters: CkksParameters, length: int) -> None:
        seal = _seal()
        self._parameters, self._length, self._added = parameters, length, 0
        self._evaluator, self._file = seal.Evaluator(parameters.context), MemoryFile()
        self._identifier = tuple(parameters.context.first_parms_id())
        self._totals: list[Any] = []

    def add(self, data: bytes) -> None:
        """Add what a silo encrypted; a refused one leaves the sum as it was.

        Raises:
            CryptoError: truncated, under other parameters, or more silos than the parameters allow.
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
        """Return the sum's ciphertexts, one after another."""
        pack = self._parameters.pack
        return b"".join(pack(parse_ciphertext(self._file.save(total))) for total in self._totals)


@lru_cache(maxsize=1)
def _worker_key(parameters: CkksParameters, secret: bytes) -> CkksKey:
    return CkksKey(parameters, secret)


def _encrypt_part(parameters: CkksParameters, secret: bytes, units: Int64[np.ndarray, " n"]) -> bytes:
    """Encrypt in a worker process, which keeps the key between parts."""
    return _worker_key(parameters, secret).encrypt(units)


@lru_cache(maxsize=8)
def _context(degree: int, prime_bits: int) -> Any:
    """Return a context of SEAL, which nothing changes: one for all parties of a process."""
    seal = _seal()
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)  # which keeps coefficient form
    parameters.set_poly_modulus_degree(degree)
    parameters.set_coeff_modulus(seal.CoeffModulus.Create(degree, [prime_bits]))
    parameters.set_plain_modulus(2)  # SEAL asks for one; nothing is encrypted but zero
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
