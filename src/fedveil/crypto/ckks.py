"""CKKS (Cheon, Kim, Kim, Song 2017) for sums alone, by SEAL: whole numbers in, their exact sum out.

Who holds the secret key encrypts N whole numbers as N/2 complex slots of one polynomial modulo X^N + 1 and one prime q:

    c_0 = -a s + e + round(Delta embed(y)),   c_1 = a from a 64-byte seed,   e from SEAL's error law

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
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from jaxtyping import Int64, UInt64

from fedveil.crypto.errors import CryptoError
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
    10.5 + 1 / 12
)  # SEAL's centred binomial law of 2 x 21 bits; and rounding in the encoder
_REACH: Final = 12.0  # in standard deviations: a slot's error reaches farther with a probability below 1e-30
_PART: Final = 64  # ciphertexts that a worker process is given at once


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
        text = f"ckks {self.degree} {self.prime} {self.scale}"
        return hashlib.sha256(text.encode()).digest()[:FINGERPRINT_BYTES]

    def blocks(self, length: int) -> int:
        """Return how many ciphertexts hold so many numbers."""
        return -(-length // self.degree)

    @cached_property
    def context(self) -> Any:
        """SEAL's context, with its own check of the parameters' security.

        Raises:
            CryptoError: SEAL refuses the parameters.
        """
        seal = _seal()
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        parameters.set_poly_modulus_degree(self.degree)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(self.degree, [self.prime_bits]))
        context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        if not context.parameters_set():
            raise CryptoError(f"SEAL refuses the parameters: {context.parameters_error_message()}")
        return context

    def __getstate__(self) -> dict[str, int]:
        """Return the fields alone: SEAL's objects do not travel to worker processes."""
        return {"silos": self.silos, "degree": self.degree, "prime_bits": self.prime_bits}

    def pack(self, words: UInt64[np.ndarray, "..."]) -> bytes:
        """Return residues as little-endian bytes, as many per residue as the prime has."""
        split = np.ascontiguousarray(words, dtype="<u8").reshape(-1, 1).view(np.uint8)
        return bytes(split[:, : self.word_bytes].tobytes())

    def unpack(self, data: bytes) -> UInt64[np.ndarray, " n"]:
        """Return the residues of received bytes.

        Raises:
            CryptoError: a residue that is not below the prime.
        """
        split = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.word_bytes)
        padded = np.empty((len(split), 8), dtype=np.uint8)
        padded[:, : self.word_bytes], padded[:, self.word_bytes :] = split, 0
        words = padded.view("<u8")[:, 0]
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
            self._secret = seal.KeyGenerator(context).secret_key()
        else:
            expected = parameters.degree * parameters.word_bytes
            if len(secret) != expected:
                raise CryptoError(f"a CKKS key has {expected} bytes here, this one has {len(secret)}")
            self._secret = seal.SecretKey()
            words = parameters.unpack(secret)
            identifier = tuple(context.key_parms_id())
            self._file.load(self._secret, context, plaintext_bytes(words, identifier))
        self._encoder = seal.CKKSEncoder(context)
        self._encryptor = seal.Encryptor(context, self._secret)
        self._decryptor = seal.Decryptor(context, self._secret)
        self._identifier = tuple(context.first_parms_id())

    def private_bytes(self) -> bytes:
        """Return the secret key (to give to other holders under encryption; never to store or to log)."""
        return self._parameters.pack(parse_plaintext(self._file.save(self._secret)))

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
        if workers is None:
            return b"".join(self._encrypted(units))
        size = _PART * self._parameters.degree
        parts = [units[first : first + size] for first in range(0, len(units), size)]
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
        parameters, seal = self._parameters, _seal()
        ciphertext, plain = seal.Ciphertext(), seal.Plaintext()
        half = parameters.degree // 2
        units = np.empty((parameters.blocks(length), parameters.degree), dtype=np.int64)
        for row, words in zip(units, _sums(parameters, data, length), strict=True):
            form = ciphertext_bytes(self._identifier, words, ntt=True, scale=float(parameters.scale))
            self._file.load(ciphertext, parameters.context, form)
            self._decryptor.decrypt(ciphertext, plain)
            slots = np.fromiter(self._encoder.decode_complex(plain), dtype=np.complex128, count=half)
            row[:half], row[half:] = np.rint(slots.real), np.rint(slots.imag)
        sums = units.reshape(-1)
        largest = parameters.silos * parameters.limit
        if np.abs(sums).max(initial=0) > largest or sums[length:].any():
            raise CryptoError("a decrypted sum is out of range: it was encrypted under another key")
        return sums[:length]

    def _encrypted(self, units: Int64[np.ndarray, " n"]) -> Iterator[bytes]:
        parameters, plain = self._parameters, _seal().Plaintext()
        half, scale = parameters.degree // 2, float(parameters.scale)
        padded = np.zeros((parameters.blocks(len(units)), 2, half))
        padded.reshape(-1)[: len(units)] = units
        for real, imaginary in padded:
            self._encoder.encode((real + 1j * imaginary).tolist(), scale, plain)
            words, seed = parse_seeded_ciphertext(self._file.save(self._encryptor.encrypt_symmetric(plain)))
            yield seed
            yield parameters.pack(words)


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
            seed, scale = bytes(block[:SEED_BYTES]), float(parameters.scale)
            form = seeded_ciphertext_bytes(self._identifier, residues, seed, scale=scale)
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


def _sums(parameters: CkksParameters, data: bytes, length: int) -> Iterator[UInt64[np.ndarray, "2 1 n"]]:
    """Yield the ciphertexts of a sum."""
    size = parameters.sum_bytes
    expected = parameters.blocks(length) * size
    if len(data) != expected:
        raise CryptoError(f"a sum of {length} numbers has {expected} bytes here, this one has {len(data)}")
    view = memoryview(data)
    for first in range(0, expected, size):
        yield parameters.unpack(bytes(view[first : first + size])).reshape(2, 1, parameters.degree)


@lru_cache(maxsize=1)
def _worker_key(parameters: CkksParameters, secret: bytes) -> CkksKey:
    return CkksKey(parameters, secret)


def _encrypt_part(parameters: CkksParameters, secret: bytes, units: Int64[np.ndarray, " n"]) -> bytes:
    """Encrypt in a worker process, which keeps the key between parts."""
    return _worker_key(parameters, secret).encrypt(units)


def _seal() -> Any:
    try:
        from tenseal import sealapi
    except ImportError as error:
        raise CryptoError("CKKS needs the packages tenseal and zstandard: install fedveil[rlwe]") from error
    return sealapi
