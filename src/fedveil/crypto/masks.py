"""Derive equal masks for two parties from a common key: vectors modulo 2^k, and integers modulo n.

A key serves one mask. A keystream of ChaCha20 is computationally indistinguishable from uniform words. A vector plus
a mask is therefore indistinguishable from uniform words to a reader that does not have the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from gmpy2 import mpz
from jaxtyping import UInt16, UInt32, UInt64

from fedveil.errors import CryptoError
from fedveil.randomness import KeyedStream

Words = UInt16[np.ndarray, " n"] | UInt32[np.ndarray, " n"] | UInt64[np.ndarray, " n"]

_CHUNK_BYTES: Final = 2**17  # 128 KiB stay in a core's cache between the cipher and the addition
_ZEROS: Final = bytes(_CHUNK_BYTES)


def apply_masks_(words: Words, masks: Iterable[tuple[bytes, bool]]) -> None:
    """Add masks to a vector, or subtract them, modulo 2^16, 2^32 or 2^64, in place.

    Words of 24 bits are the low bits of uint32 words: 2^24 divides 2^32, so sums modulo 2^24 follow from them.

    Args:
        words: (n,) contiguous uint16, uint32 or uint64.
        masks: pairs of a 32-byte key that serves no other mask, and True to add or False to subtract the mask.

    Raises:
        CryptoError: another dtype, or a key of another length.
    """
    if words.dtype not in (np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")):
        raise CryptoError(f"a masked vector holds uint16, uint32 or uint64 words, not {words.dtype}")
    streams = [(_keystream(key), np.add if adds else np.subtract) for key, adds in masks]
    buffer = bytearray(_CHUNK_BYTES)
    mask = np.frombuffer(buffer, dtype=words.dtype)
    zeros = memoryview(_ZEROS)
    # Chunk by chunk over all masks, so that each chunk is loaded into the core's cache once.
    for first in range(0, len(words), len(mask)):
        part = words[first : first + len(mask)]
        for stream, operation in streams:
            stream.update_into(zeros[: part.nbytes], buffer)
            operation(part, mask[: len(part)], out=part)


def _keystream(key: bytes) -> CipherContext:
    if len(key) != 32:
        raise CryptoError(f"a mask's key has 32 bytes, this one has {len(key)}")
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()


class UniformIntegers:
    """Stream of integers, uniform on 0 .. modulus - 1, from a key, by rejection sampling.

    Both holders of the key draw the same sequence. A draw has as many bits as modulus - 1, so on average at most one
    of two draws is rejected. The accepted integers are exactly uniform if the keystream is uniform.
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
        # Rejection, not reduction modulo n: a remainder would not be uniform.
        excess = 8 * self._bytes - self._bits
        while True:
            value = mpz.from_bytes(self._stream.bytes(self._bytes), "little") >> excess
            if value < self._modulus:
                return value

    def take(self, count: int) -> list[mpz]:
        """Return the next ``count`` integers."""
        return [self.draw() for _ in range(count)]
