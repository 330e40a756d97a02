"""Work on big numbers on all cores: gmpy2 releases the interpreter's lock while it computes a power."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gmpy2 import get_context

_T = TypeVar("_T")


def in_threads(function: Callable[..., _T], *columns: Iterable[Any]) -> list[_T]:
    """Return ``[function(*row) for row in zip(*columns)]``, by as many threads as there are cores.

    It pays where one call is a full-size power (milliseconds). Single multiplications modulo a 6144-bit number take
    longer in two threads than in one, because handing the lock over costs more than they do. The threads end with the
    call, so that nothing is left for a process that forks.
    """
    rows = list(zip(*columns, strict=True))
    threads = min(len(rows), os.cpu_count() or 1)
    if threads < 2:
        return [function(*row) for row in rows]
    with ThreadPoolExecutor(threads, thread_name_prefix="fedveil-powers", initializer=_release) as pool:
        return list(pool.map(lambda row: function(*row), rows))


def _release() -> None:
    """Let gmpy2 release the lock in this thread; contexts are the threads' own."""
    get_context().allow_release_gil = True
