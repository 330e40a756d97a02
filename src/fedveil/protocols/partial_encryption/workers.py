"""Start the worker processes in which the clients of one process encrypt."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from concurrent.futures import Executor, ProcessPoolExecutor
from threading import Thread


def worker_pool(processes: int, owner: object) -> Executor | None:
    """Return a pool of processes that ends with its owner; None if one process suffices.

    Args:
        processes: wanted number of processes; the pool has at most one per CPU core.
        owner: object whose garbage collection shuts the pool down.
    """
    # The coordinator chooses `processes`, but a silo's machine may have fewer cores than the coordinator's.
    count = min(processes, os.cpu_count() or 1)
    if count == 1:
        return None
    spawned = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(count, mp_context=spawned, initializer=_end_with_parent)
    weakref.finalize(owner, workers.shutdown)
    return workers


def _end_with_parent() -> None:
    """End this process when its parent process ends; otherwise the worker would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end only this thread

    Thread(target=watch, daemon=True).start()
