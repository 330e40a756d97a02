"""Released sums, as their digests: what ties the files of a run to what its parties signed.

    one release       SHA-256 of the standard deviation of its noise and its numbers, all float64, little-endian
    several           SHA-256 of their digests in their order; zeros for none

A silo is told the numbers of a release with the part of the run that follows it, and signs their digest with its round;
the sum itself no silo sees. What the numbers are of follows from the terms that silos sign
(:mod:`~fedveil.federation.audit.released_files`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import numpy as np
from jaxtyping import Float64

EVALUATING: Final = "checkpoint/evaluation.json"
"""In the run folder: releases of an evaluation that is not whole yet."""

Numbers = tuple[float, Float64[np.ndarray, " d"]]
"""The standard deviation of a release's noise, and what was released."""


def digest_of_release(made: Numbers) -> bytes:
    """Return the digest of one release: 32 bytes."""
    std, vector = made
    return hashlib.sha256(np.array([std, *vector], dtype="<f8").tobytes()).digest()


def digest_of_all(releases: Iterable[bytes]) -> bytes:
    """Return the digest of releases, of their own digests: 32 bytes."""
    content = b"".join(releases)
    return hashlib.sha256(content).digest() if content else bytes(32)
