"""Derive the randomness that both ends of a channel share for one update.

It consists of latents, dithers and candidates. A stream belongs to ONE update: a reader of two updates quantised with
one stream learns their difference. So the key is derived from everything that distinguishes updates, and an encoder
refuses to use a stream twice.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol, runtime_checkable

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import UInt64

from fedveil.errors import StreamReuseError
from fedveil.randomness import BitSource, KeyedStream

FINGERPRINT_BYTES = 4
TAG_BYTES = 8


def _path(parts: tuple[str | int, ...]) -> bytes:
    """Encode a path injectively: distinct paths give distinct bytes."""
    # Type and length are part of the encoding, so that (1, "2") and ("1", 2), or ("ab", "c") and ("a", "bc"), differ.
    encoded = (f"{type(part).__name__}:{part}".encode() for part in parts)
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def update_key(secret: bytes, *, run: str, client: int, round_number: int, attempt: int = 0) -> bytes:
    """Derive the 32-byte key of one update from the two parties' agreed secret (HKDF-SHA256, RFC 5869).

    Args:
        secret: at least 16 bytes, the result of a key agreement.
        run: identity of the run.
        client: identity of the sender within the run.
        round_number: the round of the update.
        attempt: 0, or the number of restarts of this round. A repeated round has another update, so it must have
            another key.

    Raises:
        ValueError: the secret is shorter than 16 bytes.
    """
    if len(secret) < 16:
        raise ValueError(f"a shared secret has at least 16 bytes, got {len(secret)}")
    info = b"fedveil channel" + _path((run, client, round_number, attempt))
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


@runtime_checkable
class SharedStreams(Protocol):
    """Named streams that sender and receiver draw identically, and the authentication of messages."""

    @property
    def secure(self) -> bool:
        """Return whether the streams are unpredictable without the key."""
        ...

    def source(self, *path: str | int) -> BitSource:
        """Return the stream of one purpose from its beginning."""
        ...

    def fingerprint(self) -> bytes:
        """Return 4 bytes that distinguish this update's streams from another's."""
        ...

    def tag(self, message: bytes | memoryview) -> bytes:
        """Return 8 bytes that only a holder of the key can compute for this message."""
        ...

    def claim(self) -> None:
        """Mark the streams as used by an encoder.

        Raises:
            StreamReuseError: they were used before.
        """
        ...


class _Streams:
    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a stream key has 32 bytes, got {len(key)}")
        self._key = key
        self._claimed = False

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose, hashlib.sha256)

    def fingerprint(self) -> bytes:
        """Return 4 bytes that distinguish this update's streams from another's."""
        return self._derive(b"fingerprint")[:FINGERPRINT_BYTES]

    def tag(self, message: bytes | memoryview) -> bytes:
        """Return 8 bytes that only a holder of the key can compute for this message."""
        return hmac.digest(self._derive(b"authentication"), message, hashlib.sha256)[:TAG_BYTES]

    def claim(self) -> None:
        """Mark the streams as used by an encoder.

        Raises:
            StreamReuseError: they were used before.
        """
        if self._claimed:
            raise StreamReuseError(
                "this shared stream has already carried an update; derive a key for each update"
            )
        self._claimed = True


class KeyedStreams(_Streams):
    """ChaCha20 streams under one update's key (see :func:`update_key`)."""

    secure = True

    def source(self, *path: str | int) -> BitSource:
        """Return the stream of one purpose from its beginning."""
        return KeyedStream(self._derive(b"stream" + _path(path)))


class _PhiloxSource:
    def __init__(self, key: bytes) -> None:
        self._generator = np.random.Philox(key=int.from_bytes(key[:16], "big"))

    def uint64(self, count: int) -> UInt64[np.ndarray, " count"]:
        return self._generator.random_raw(count)


class InsecureSimulationStreams(_Streams):
    """Numpy's Philox under a seed, for simulation alone.

    Not claimed: any privacy. A reader with the seed can subtract the noise.
    """

    secure = False

    def __init__(self, seed: int, *path: str | int) -> None:
        super().__init__(hashlib.sha256(b"insecure simulation" + _path((seed, *path))).digest())

    def source(self, *path: str | int) -> BitSource:
        """Return the stream of one purpose from its beginning."""
        return _PhiloxSource(self._derive(b"stream" + _path(path)))
