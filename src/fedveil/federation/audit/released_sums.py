"""Digests of released sums, which tie the files of a run to the signatures of its parties.

    one release       SHA-256 of the standard deviation of its noise and its numbers, all float64, little-endian
    several           SHA-256 of their digests in their order; zeros for none

A silo receives the numbers of a release with the next part of the run, and signs their digest with its round. No silo
sees the sum itself. The meaning of the numbers follows from the terms that silos sign
(:mod:`~fedveil.federation.audit.released_files`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import numpy as np
from jaxtyping import Float64

EVALUATING: Final = "checkpoint/evaluation.json"
"""File in the run folder: releases of an unfinished evaluation."""

Numbers = tuple[float, Float64[np.ndarray, " d"]]
"""Standard deviation of a release's noise, and the released (d,) float64 numbers."""


def digest_of_release(made: Numbers) -> bytes:
    """Return the 32-byte digest of one release."""
    std, vector = made
    return hashlib.sha256(np.array([std, *vector], dtype="<f8").tobytes()).digest()


def digest_of_all(releases: Iterable[bytes]) -> bytes:
    """Return the 32-byte digest of several releases, from their own digests."""
    content = b"".join(releases)
    return hashlib.sha256(content).digest() if content else bytes(32)
