"""Provide the three kinds of randomness as three types that cannot be confused.

===========  ======================  ==========================================================================
kind         type                    used for
===========  ======================  ==========================================================================
experiment   ExperimentRandomness    initial model, batches, allocation, dropout: seeded, repeatable, not secret
privacy      PrivacyRandomness       noise, samples, DP-SGD's batches and masks: the system's cryptographic source
shared       KeyedStream             numbers that two parties derive alike from one secret key
===========  ======================  ==========================================================================

A guarantee of differential privacy holds only if the noise and the sample of participants are unpredictable. Privacy
randomness therefore accepts a seed only under the name :meth:`PrivacyRandomness.insecure`, and every privacy
statement repeats that name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedveil.config_keys import whole

_WORD = np.dtype("<u8")
_ZEROS = memoryview(bytes(2**18))  # encrypted to give a keystream; fits a core's cache
RENEWED_AFTER = 2**30
"""Bytes of a :class:`SecretStream` under one key, a multiple of 8; ChaCha20 repeats itself after 2^38."""


def _digest(*path: str | int) -> bytes:
    """Hash a path of names and numbers to 32 bytes; distinct paths never collide by concatenation."""
    return hashlib.sha256(b"".join(map(_encoded, path))).digest()


def _encoded(part: str | int) -> bytes:
    # The length prefix and the type name make the encoding injective: ("ab", "c") differs from ("a", "bc"), 1 from
    # "1".
    encoded = f"{type(part).__name__}:{part}".encode()
    return len(encoded).to_bytes(8, "big") + encoded


_NAMED = hashlib.sha256(_encoded("name"))


def key_of(name: str) -> int:
    """Return 63 bits that depend on a name alone; two names share them only by chance."""
    state = _NAMED.copy()  # the digest of the path ("name", name)
    state.update(_encoded(name))
    return int.from_bytes(state.digest()[:8], "big") >> 1


class ExperimentRandomness:
    """Seeded randomness for everything that is not secret.

    Sub-streams are named by paths, so the order in which they are used does not matter.

    >>> a = ExperimentRandomness(0)
    >>> bool(a.numpy("batches", 3).random() == ExperimentRandomness(0).numpy("batches", 3).random())
    True
    """

    def __init__(self, seed: int) -> None:
        # Paths hash the type with the value: a numpy integer would give other streams than the same Python int.
        self.seed: int = whole(seed)  # streams are named by the seed and its type

    def integer(self, *path: str | int) -> int:
        """Return a 63-bit integer that depends on the seed and the path alone, as a seed for another library."""
        return int.from_bytes(_digest("experiment", self.seed, *path)[:8], "big") >> 1

    def numpy(self, *path: str | int) -> np.random.Generator:
        """Return numpy's Philox generator for this path."""
        key = int.from_bytes(_digest("experiment", self.seed, *path)[:16], "big")
        return np.random.Generator(np.random.Philox(key=key))


@runtime_checkable
class BitSource(Protocol):
    """Source of independent uniform 64-bit words, the input of exact samplers."""

    def uint64(self, count: int) -> np.ndarray:
        """Return ``count`` independent words, uniform on 0 .. 2^64 - 1, as (count,) uint64."""
        ...


class KeyedStream:
    """ChaCha20 keystream under a 32-byte key: both holders of the key generate the same words.

    A key must never serve two purposes: derive one key per purpose.
    """

    def __init__(self, key: bytes | bytearray) -> None:
        if len(key) != 32:
            raise ValueError(f"a stream key has 32 bytes, got {len(key)}")
        # A zero nonce is safe because a key is used for one stream only.
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the keystream."""
        return self._encryptor.update(bytes(count))

    def uint64(self, count: int) -> np.ndarray:
        """Return the next ``count`` words, uniform on 0 .. 2^64 - 1, as (count,) uint64."""
        words = np.empty(count, dtype=_WORD)
        written = memoryview(words.view(np.uint8).data)
        for first in range(0, len(written), len(_ZEROS)):
            part = written[first : first + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(part)], part)
        return words


class SecretStream:
    """Words that nobody can predict or repeat: a ChaCha20 keystream under a key of the system's generator.

    The key is drawn for this object alone. It is drawn again after :data:`RENEWED_AFTER` bytes, and in a process that
    was forked from the one that drew it, which would generate the same words. The object cannot be copied, pickled or
    read, so no checkpoint holds it. docs/theory/discrete-gaussian.md has the argument.

    Args:
        draw: returns so many bytes that nobody can predict; tests replace it.
        renewed_after: bytes under one key, a multiple of 8.
    """

    def __init__(self, draw: Callable[[int], bytes] = os.urandom, renewed_after: int = RENEWED_AFTER) -> None:
        self._draw, self._renewed_after = draw, renewed_after
        self._process, self._left = -1, 0

    def uint64(self, count: int) -> np.ndarray:
        """Return the next ``count`` words, uniform on 0 .. 2^64 - 1, as (count,) uint64."""
        words, filled = np.empty(count, dtype=_WORD), 0
        while filled < count:
            if self._left == 0 or self._process != os.getpid():
                self._draw_key()
            n_words = min(count - filled, self._left // 8)
            words[filled : filled + n_words] = self._stream.uint64(n_words)
            self._left -= 8 * n_words
            filled += n_words
        return words

    def _draw_key(self) -> None:
        key = bytearray(self._draw(32))
        self._stream, self._process, self._left = KeyedStream(key), os.getpid(), self._renewed_after
        key[:] = bytes(32)  # OpenSSL has its own copy, which it erases when the stream is deleted

    def __reduce__(self) -> NoReturn:
        """Refuse copies: two copies would generate the same noise.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a secret stream cannot be copied or stored: its copies would generate the same noise"
        )


class PrivacyRandomness:
    """Secret randomness on which a guarantee rests: noise, and the sample of participants.

    ``PrivacyRandomness.system()`` keys each stream from the operating system's generator
    (:class:`SecretStream`). ``PrivacyRandomness.insecure(seed)`` derives the words from a seed, for tests and exact
    repetition. Anyone with the seed can subtract the noise, so a statement made with it says so.
    """

    def __init__(self, insecure_seed: int | None) -> None:
        self._seed = insecure_seed

    @classmethod
    def system(cls) -> PrivacyRandomness:
        """Return randomness of the operating system's cryptographic generator."""
        return cls(None)

    @classmethod
    def insecure(cls, seed: int) -> PrivacyRandomness:
        """Return repeatable randomness that protects nobody."""
        return cls(seed)

    @property
    def secure(self) -> bool:
        """Return whether the randomness is unpredictable."""
        return self._seed is None

    def stream(self, *path: str | int) -> BitSource:
        """Return the source for one purpose; under a seed it depends on the path, so a resumed run repeats it."""
        if self._seed is None:
            return SecretStream()
        return KeyedStream(_digest("insecure privacy randomness", self._seed, *path))
