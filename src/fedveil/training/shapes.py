"""Shapes that leave a contribution's float32 training alone, whatever is trained beside it.

Kernels round by shape: a product of 31 rows may be computed by another kernel than one of 32, the last numbers of an
array by scalar code and the others by vectors, and an array cut between threads wherever the cut falls. Training at a
high rate over many epochs turns a last bit into any difference, so nothing of this may depend on other contributions.
Two rules keep it so, and docs/theory/alone-in-a-batch.md has the argument:

* every tensor dimension but the number of contributions (slots) is a function of the contribution's own number of
  records and of public facts (:func:`padded_sizes`);
* the number of slots is a multiple of :func:`slot_multiple`: no array of a batch leaves a remainder that is not a
  whole number of vectors, a matrix product never changes its kernel, and one thread computes it
  (:func:`single_threaded`).

What the rules cannot prove of a machine's kernels, :mod:`fedveil.training.batch_independence` tries before training.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

LANES: Final = 32
"""Numbers that the widest loops of a CPU kernel take at once: two vectors of 16 float32 numbers."""

_TRAINING = threading.RLock()


def padded_sizes(records: Int64[np.ndarray, " m"], finest: int, an_octave: int) -> Int64[np.ndarray, " m"]:
    """Return how many records each contribution is padded to: a function of its own number alone.

    Args:
        records: (m,) at least 1 each.
        finest: a power of two of which every padded number is a multiple (1 stays 1, if ``finest`` is at most 2).
        an_octave: 1 or 4 numbers an octave: half or a quarter of a large one is padding, at most.

    >>> padded_sizes(np.array([1, 2, 3, 5, 9, 13, 33]), 2, 4).tolist()
    [1, 2, 4, 6, 10, 14, 40]
    >>> padded_sizes(np.array([1, 5, 9, 13, 33]), 4, 1).tolist()
    [4, 8, 16, 16, 64]
    """
    octave = np.floor(np.log2(np.maximum(records - 0.5, 1))).astype(np.int64)
    step = np.maximum(finest, 2**octave // an_octave)
    padded = -(-records // step) * step
    return np.where((records == 1) & (finest <= 2), 1, padded).astype(np.int64)


def slot_multiple(width: int) -> int:
    """Return of what the number of slots is a multiple, where each holds ``width`` records: 2 or more.

    >>> [slot_multiple(width) for width in (1, 3, 4, 10, 16, 32, 64)]
    [32, 32, 8, 16, 2, 2, 2]
    """
    return max(2, LANES // math.gcd(width, LANES))


def round_up_slots(slots: int, width: int) -> int:
    """Return the number of slots rounded up to a multiple of :func:`slot_multiple`.

    >>> round_up_slots(5, 4), round_up_slots(5, 64)
    (8, 6)
    """
    one = slot_multiple(width)
    return -(-slots // one) * one


def equal_with_nan(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, where NaN equals NaN and nothing else."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let one thread compute: where an array is cut between threads depends on its length.

    The number of threads is a setting of the process, so one training at a time enters. Processes share a round instead
    (docs/how-to/several-processes.md).
    """
    with _TRAINING:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
