"""Work on big numbers on all cores: gmpy2 releases the interpreter's lock while it computes a power."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, TypeVar

from gmpy2 import get_context

_T = TypeVar("_T")


def in_threads(function: Callable[..., _T], *columns: Iterable[Any]) -> list[_T]:
    """Return ``[function(*row) for row in zip(*columns)]``, by as many threads as there are cores.

    It pays where one call is a full-size power (milliseconds). Single multiplications modulo a 6144-bit number take
    longer in two threads than in one, because handing the lock over costs more than they do. The threads end with the
    call, so that nothing is left for a process that forks; and no process that is to end waits for them.
    """
    rows = list(zip(*columns, strict=True))
    count = min(len(rows), os.cpu_count() or 1)
    if count < 2:
        return [function(*row) for row in rows]
    made: dict[int, _T] = {}
    failed: list[BaseException] = []
    left = iter(range(len(rows)))  # whose next number one thread alone is given

    def work() -> None:
        get_context().allow_release_gil = True  # contexts are the threads' own
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
