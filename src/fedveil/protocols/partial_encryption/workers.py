"""The processes in which the clients of one process encrypt."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from concurrent.futures import Executor, ProcessPoolExecutor
from threading import Thread


def worker_pool(processes: int, owner: object) -> Executor | None:
    """Return processes that end with their owner; None for one.

    There are never more than the machine has cores: a silo's machine is not the coordinator's.
    """
    count = min(processes, os.cpu_count() or 1)
    if count == 1:
        return None
    spawned = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(count, mp_context=spawned, initializer=_end_with_parent)
    weakref.finalize(owner, workers.shutdown)
    return workers


def _end_with_parent() -> None:
    """Have this process end when the one that started it does, however that ends: by itself it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
