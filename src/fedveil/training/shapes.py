"""Choose tensor shapes so that a contribution's float32 training is independent of its batch.

Kernels round by shape. A product of 31 rows may use another kernel than one of 32. The last numbers of an array are
computed by scalar code and the others by vector code. Threads cut an array at places that depend on its length.
Training at a high rate over many epochs amplifies a last bit to any difference, so none of this may depend on other
contributions. Two rules ensure it; docs/theory/batch-independence.md has the argument:

* Every tensor dimension except the number of contributions (slots) is a function of the contribution's own number of
  records and of public facts (:func:`padded_sizes`).
* The number of slots is a multiple of :func:`slot_multiple`. No array of a batch then leaves a remainder that is not
  a whole number of vectors, and a matrix product never changes its kernel. One thread computes it
  (:func:`single_threaded`).

The rules cannot prove anything about the kernels of a machine: :mod:`fedveil.training.batch_independence` tests these
before training.
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
"""Numbers that the widest loops of a CPU kernel process at once: two vectors of 16 float32 numbers."""

_TRAINING = threading.RLock()


def padded_sizes(records: Int64[np.ndarray, " m"], finest: int, an_octave: int) -> Int64[np.ndarray, " m"]:
    """Return the padded number of records of each contribution, from its own number of records alone.

    Args:
        records: (m,) numbers of records, at least 1 each.
        finest: a power of two; every padded number is a multiple of it (but 1 stays 1 if ``finest`` is at most 2).
        an_octave: number of padded sizes per octave, 1 or 4: at most a half or a quarter of a large size is padding.

    >>> padded_sizes(np.array([1, 2, 3, 5, 9, 13, 33]), 2, 4).tolist()
    [1, 2, 4, 6, 10, 14, 40]
    >>> padded_sizes(np.array([1, 5, 9, 13, 33]), 4, 1).tolist()
    [4, 8, 16, 16, 64]
    """
    # records - 0.5 places an exact power of two into the octave that it ends: 32 pads to 32, and 33 to the next size.
    octave = np.floor(np.log2(np.maximum(records - 0.5, 1))).astype(np.int64)
    step = np.maximum(finest, 2**octave // an_octave)
    padded = -(-records // step) * step
    return np.where((records == 1) & (finest <= 2), 1, padded).astype(np.int64)


def slot_multiple(width: int) -> int:
    """Return the number, 2 or more, that divides every number of slots of ``width`` records each.

    It is the smallest number m >= 2 such that m * width is a multiple of :data:`LANES`.

    >>> [slot_multiple(width) for width in (1, 3, 4, 10, 16, 32, 64)]
    [32, 32, 8, 16, 2, 2, 2]
    """
    return max(2, LANES // math.gcd(width, LANES))


def round_up_slots(slots: int, width: int) -> int:
    """Return the number of slots rounded up to a multiple of :func:`slot_multiple`.

    >>> round_up_slots(5, 4), round_up_slots(5, 64)
    (8, 6)
    """
    multiple = slot_multiple(width)
    return -(-slots // multiple) * multiple


def equal_with_nan(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, where NaN equals NaN only."""
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


@contextmanager
def single_threaded() -> Iterator[None]:
    """Compute with one thread inside this context.

    The cut of an array between threads would depend on its length.

    The number of threads is a setting of the process, so a lock admits one training at a time. Several processes can
    divide a round instead (docs/how-to/several-processes.md).
    """
    with _TRAINING:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
