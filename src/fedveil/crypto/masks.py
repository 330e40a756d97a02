"""Masks that two parties draw alike from one key: vectors modulo 2^k at memory speed, and integers modulo n.

A key serves one mask. A keystream of ChaCha20 is indistinguishable from uniform words, so a vector plus a mask under
a key that the reader lacks is indistinguishable from noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from gmpy2 import mpz
from jaxtyping import UInt32, UInt64

from fedveil.crypto.errors import CryptoError
from fedveil.randomness import KeyedStream

Words = UInt32[np.ndarray, " n"] | UInt64[np.ndarray, " n"]

_CHUNK_BYTES: Final = 2**17  # stays in a core's cache between the cipher and the addition
_ZEROS: Final = bytes(_CHUNK_BYTES)


def apply_masks_(words: Words, masks: Iterable[tuple[bytes, bool]]) -> None:
    """Add or subtract the masks of keys to or from a vector modulo 2^32 or 2^64, in place.

    Part of the vector after part takes all masks while it is in a core's cache.

    Args:
        words: (n,) contiguous uint32 or uint64.
        masks: pairs of 32 bytes that serve no other mask, and whether the mask is added (or subtracted).
    """
    if words.dtype not in (np.dtype("<u4"), np.dtype("<u8")):
        raise CryptoError(f"a masked vector holds uint32 or uint64 words, not {words.dtype}")
    streams = [(_keystream(key), np.add if adds else np.subtract) for key, adds in masks]
    buffer = bytearray(_CHUNK_BYTES)
    mask = np.frombuffer(buffer, dtype=words.dtype)
    zeros = memoryview(_ZEROS)
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
