"""The three kinds of randomness, as three types that cannot be mistaken for one another.

===========  ======================  ==========================================================================
kind         type                    used for
===========  ======================  ==========================================================================
experiment   ExperimentRandomness    initial model, batches, allocation, dropout: seeded, repeatable, not secret
privacy      PrivacyRandomness       noise, samples, DP-SGD's batches and masks: the system's cryptographic source
shared       KeyedStream             what two parties must draw alike from one secret key
===========  ======================  ==========================================================================

A guarantee of differential privacy holds only if the noise and the sample of participants are unpredictable. A seed is
therefore possible for privacy randomness only under the name :meth:`PrivacyRandomness.insecure`, and every privacy
statement repeats that name.
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol, runtime_checkable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedveil.config_keys import whole

_WORD = np.dtype("<u8")


def _digest(*path: str | int) -> bytes:
    """Hash a path of names and numbers to 32 bytes; distinct paths never collide by concatenation."""
    state = hashlib.sha256()
    for part in path:
        encoded = f"{type(part).__name__}:{part}".encode()
        state.update(len(encoded).to_bytes(8, "big") + encoded)
    return state.digest()


def key_of(name: str) -> int:
    """Return 63 bits that depend on a name alone, and that no two names share but by chance."""
    return int.from_bytes(_digest("name", name)[:8], "big") >> 1


class ExperimentRandomness:
    """Seeded randomness for everything that is not secret; sub-streams are named, so their order does not matter.

    >>> a = ExperimentRandomness(0)
    >>> bool(a.numpy("batches", 3).random() == ExperimentRandomness(0).numpy("batches", 3).random())
    True
    """

    def __init__(self, seed: int) -> None:
        self.seed: int = whole(seed)  # streams are named by the seed and its type

    def integer(self, *path: str | int) -> int:
        """Return a 63-bit integer that depends on the seed and the path alone (a seed for another library)."""
        return int.from_bytes(_digest("experiment", self.seed, *path)[:8], "big") >> 1

    def numpy(self, *path: str | int) -> np.random.Generator:
        """Return numpy's Philox generator for this path."""
        key = int.from_bytes(_digest("experiment", self.seed, *path)[:16], "big")
        return np.random.Generator(np.random.Philox(key=key))


@runtime_checkable
class BitSource(Protocol):
    """What an exact sampler needs: independent uniform 64-bit words."""

    def uint64(self, count: int) -> np.ndarray:
        """Return ``count`` independent words, uniform on 0 .. 2^64 - 1."""
        ...


class KeyedStream:
    """ChaCha20 keystream under a 32-byte key: both holders of the key draw the same words.

    A stream must never be used for two different purposes: derive one key per purpose.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a stream key has 32 bytes, got {len(key)}")
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the keystream."""
        return self._encryptor.update(bytes(count))

    def uint64(self, count: int) -> np.ndarray:
        """Return the next ``count`` words, uniform on 0 .. 2^64 - 1."""
        return np.frombuffer(self.bytes(8 * count), dtype=_WORD)


class _SystemSource:
    def uint64(self, count: int) -> np.ndarray:
        return np.frombuffer(os.urandom(8 * count), dtype=_WORD)


class PrivacyRandomness:
    """The secret randomness a guarantee rests on: noise, and who takes part.

    ``PrivacyRandomness.system()`` draws every word from the operating system. ``PrivacyRandomness.insecure(seed)``
    derives it from a seed, for tests and exact repetition: whoever knows the seed can subtract the noise, so a
    statement made under it says so.
    """

    def __init__(self, insecure_seed: int | None) -> None:
        self._seed = insecure_seed

    @classmethod
    def system(cls) -> PrivacyRandomness:
        """Randomness of the operating system's cryptographic generator."""
        return cls(None)

    @classmethod
    def insecure(cls, seed: int) -> PrivacyRandomness:
        """Repeatable randomness that protects nobody."""
        return cls(seed)

    @property
    def secure(self) -> bool:
        """Whether the randomness is unpredictable."""
        return self._seed is None

    def stream(self, *path: str | int) -> BitSource:
        """Return the source for one purpose; under a seed it depends on the path, so a resumed run repeats it."""
        if self._seed is None:
            return _SystemSource()
        return KeyedStream(_digest("insecure privacy randomness", self._seed, *path))
