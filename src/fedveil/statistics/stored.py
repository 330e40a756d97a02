"""A released sum, and how it is read back from its file: one version, and numbers that fit what was asked for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64
from pydantic import ValidationError

from fedveil.errors import ConfigError, DataError, RunFolderError
from fedveil.files import check_schema_version, reading

SCHEMA_VERSION: Final = 1
_MOST: Final = 2.0**53
"""Largest number in a stored sum: sums are exact up to 2^52 steps of a grid of at most 1."""


@dataclass(frozen=True, eq=False)
class NoisySum:
    """Noisy sum that ends a release.

    Attributes:
        vector: (d,) the sum of the silos' messages.
        std: of the noise on every number.
    """

    vector: Float64[np.ndarray, " d"]
    std: float

    def fits(self, length: int) -> bool:
        """Return whether this may be a sum of so many numbers: none is beyond what exact sums on the grid reach."""
        return self.vector.shape == (length,) and bool((np.abs(self.vector) <= _MOST).all())

    def to_json(self) -> dict[str, Any]:
        """Return the sum as JSON."""
        return {"noise_std": self.std, "vector": self.vector.tolist()}

    @classmethod
    def from_json(cls, data: Any, length: int, origin: object) -> NoisySum:
        """Return the sum that a document has.

        Args:
            data: the table with its numbers.
            length: what was asked for.
            origin: as in :func:`restoring`.

        Raises:
            RunFolderError: numbers that no sum has, or not as many as were asked for, or no noise.
        """
        found = cls(np.array(data["vector"], dtype=np.float64), float(data["noise_std"]))
        if not found.fits(length):
            raise RunFolderError(f"{origin} is damaged: its numbers do not fit what was asked for")
        if not (math.isfinite(found.std) and found.std > 0):
            raise RunFolderError(f"{origin} is damaged: its noise has no standard deviation")
        return found


NoisySums = tuple[NoisySum, ...]
"""Sums released so far, in order."""


Numbers = tuple[float, Float64[np.ndarray, " d"]]
"""Standard deviation of a release's noise, and the released (d,) float64 numbers, as the parties exchange them."""


def digest_of_release(made: Numbers) -> bytes:
    """Return the 32-byte digest of a release, which ties its file to the signatures of the parties.

    It is SHA-256 of the standard deviation and the numbers, all float64, little-endian.
    """
    std, vector = made
    return hashlib.sha256(np.array([std, *vector], dtype="<f8").tobytes()).digest()


def digest_of_all(releases: Iterable[bytes]) -> bytes:
    """Return the 32-byte digest of several releases: SHA-256 of their digests in order; zeros for none."""
    content = b"".join(releases)
    return hashlib.sha256(content).digest() if content else bytes(32)


@contextmanager
def restoring(data: Any, origin: object) -> Iterator[None]:
    """Have all that fails for what a document holds fail with one error that names it.

    Args:
        data: the document.
        origin: what to call it: its path, mostly.

    Raises:
        RunFolderError: another version, something that is missing, or a request that none could be.
    """
    check_schema_version(data, origin, SCHEMA_VERSION)
    with reading(origin, RunFolderError):
        try:
            yield
        except (ValidationError, ConfigError, DataError) as error:
            raise RunFolderError(f"{origin} is damaged: what it is of cannot be released") from error
