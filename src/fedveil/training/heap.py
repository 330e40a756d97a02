"""Keep freed memory in the process while models are trained.

A step of training allocates the same arrays again and again. The C library of Linux (glibc) gives arrays of megabytes
back to the system as soon as they are free, and the system hands out pages of zeros for the next ones: for a large
model this takes longer than the arithmetic. Inside :func:`keep_freed_memory` freed memory is reused instead. No number
changes. The largest memory of the process hardly changes either, because a later step needs what an earlier one freed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

# Parameters of mallopt(3): the free memory at the end of the heap that is given back to the system, the size from which
# an array gets a mapping of its own, and the number of such mappings.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_MMAP_MAX: Final = -4

_INSIDE: Final = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1))
# The default number of mappings, and the sizes up to which glibc raises its thresholds by its own rule, which a call of
# mallopt ends.
_OUTSIDE: Final = ((_MMAP_MAX, 1 << 16), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20))

_LOCK: Final = threading.Lock()
_depth = 0


@contextmanager
def keep_freed_memory(*, release: bool = False) -> Iterator[None]:
    """Reuse freed memory inside this context; calls may be nested, and made from several threads.

    After the last context has ended, glibc's own rule holds again: it gives back what lies at the end of the heap, and
    reuses the rest. Threads other than the main one reuse arrays of up to 32 MiB. Without glibc nothing changes.

    Args:
        release: give all freed memory back to the system at the end. A run does so once; a round that did would ask for
            the same pages in the next round.
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)
        library = _glibc()
        if release and library is not None:
            library.malloc_trim(0)


def _enter(change: int) -> None:
    """Count the open contexts, and tell the C library when the first begins and the last ends."""
    global _depth
    with _LOCK:
        before, _depth = _depth, _depth + change
        library = _glibc()
        if library is not None and (before == 0 or _depth == 0):
            for parameter, value in _INSIDE if _depth else _OUTSIDE:
                library.mallopt(parameter, value)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
