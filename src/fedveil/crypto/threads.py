"""Compute with big integers on all cores: gmpy2 releases the interpreter's lock during a power."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, TypeVar

from gmpy2 import get_context

_T = TypeVar("_T")


def in_threads(function: Callable[..., _T], *columns: Iterable[Any]) -> list[_T]:
    """Return ``[function(*row) for row in zip(*columns)]``, computed in one thread per core.

    Threads pay for calls that are full-size powers (milliseconds). Single multiplications modulo a 6144-bit number
    take longer in two threads than in one, because passing the lock costs more than a multiplication. The threads end
    with the call, so a process that forks later has none of them. They are daemons, so an exiting process does not
    wait.
    """
    rows = list(zip(*columns, strict=True))
    count = min(len(rows), os.cpu_count() or 1)
    if count < 2:
        return [function(*row) for row in rows]
    made: dict[int, _T] = {}
    failed: list[BaseException] = []
    left = iter(range(len(rows)))  # next() of a range iterator is atomic, so each index goes to one thread

    def work() -> None:
        get_context().allow_release_gil = True  # each thread has its own gmpy2 context
        try:
            for place in left:
                if failed:
                    return
                made[place] = function(*rows[place])
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=work, name="fedveil-powers", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [made[place] for place in range(len(rows))]
