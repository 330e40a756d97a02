"""Masks that two parties draw alike from one key: vectors modulo 2^k at memory speed, and integers modulo n.

A key serves one mask. A keystream of ChaCha20 is indistinguishable from uniform words, so a vector plus a mask under
a key that the reader lacks is indistinguishable from noise.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from gmpy2 import mpz
from jaxtyping import UInt32, UInt64

from fedveil.crypto.errors import CryptoError
from fedveil.randomness import KeyedStream

Words = UInt32[np.ndarray, " n"] | UInt64[np.ndarray, " n"]

_CHUNK_BYTES: Final = 2**18  # stays in a core's cache between the cipher and the addition
_ZEROS: Final = bytes(_CHUNK_BYTES)


def add_mask_(words: Words, key: bytes) -> None:
    """Add the key's mask to a vector modulo 2^32 or 2^64, in place.

    Args:
        words: (n,) contiguous uint32 or uint64.
        key: 32 bytes that serve no other mask.
    """
    _accumulate(words, key, np.add)


def subtract_mask_(words: Words, key: bytes) -> None:
    """Subtract the key's mask from a vector modulo 2^32 or 2^64, in place; undoes :func:`add_mask_`."""
    _accumulate(words, key, np.subtract)


def _accumulate(words: Words, key: bytes, operation: np.ufunc) -> None:
    if words.dtype not in (np.dtype("<u4"), np.dtype("<u8")):
        raise CryptoError(f"a masked vector holds uint32 or uint64 words, not {words.dtype}")
    if len(key) != 32:
        raise CryptoError(f"a mask's key has 32 bytes, this one has {len(key)}")
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    buffer = bytearray(_CHUNK_BYTES)
    mask = np.frombuffer(buffer, dtype=words.dtype)
    zeros = memoryview(_ZEROS)
    for first in range(0, len(words), len(mask)):
        part = words[first : first + len(mask)]
        stream.update_into(zeros[: part.nbytes], buffer)
        operation(part, mask[: len(part)], out=part)


class UniformIntegers:
    """Integers uniform on 0 .. modulus - 1 from a key's stream, by rejection of whole draws.

    Both holders of the key draw the same sequence. A draw has as many bits as the modulus, so at most one in two is
    rejected, and what is kept is exactly uniform if the stream is.
    """

    def __init__(self, key: bytes, modulus: int) -> None:
        if modulus < 1:
            raise CryptoError(f"a modulus is at least 1, this one is {modulus}")
        self._stream = KeyedStream(key)
        self._modulus = mpz(modulus)
        self._bits = (modulus - 1).bit_length()
        self._bytes = (self._bits + 7) // 8

    def draw(self) -> mpz:
        """Return the next integer."""
        excess = 8 * self._bytes - self._bits
        while True:
            value = mpz.from_bytes(self._stream.bytes(self._bytes), "little") >> excess
            if value < self._modulus:
                return value

    def take(self, count: int) -> list[mpz]:
        """Return the next ``count`` integers."""
        return [self.draw() for _ in range(count)]
