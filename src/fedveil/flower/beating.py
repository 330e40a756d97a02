"""Signs of life: Flower takes a task back, or a node for gone, after 30 seconds without one."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final

_BEAT_SECONDS: Final = 10.0
_LONGEST_SECONDS: Final = 120.0


@contextlib.contextmanager
def beating(beat: Callable[[], object], log: logging.Logger) -> Iterator[None]:
    """Give signs of life in a thread of their own, every ten seconds.

    Args:
        beat: sends one; where it fails, the next may succeed.
        log: where it says so.
    """
    ended = threading.Event()

    def beat_on() -> None:
        while True:
            try:
                beat()
            except Exception as error:  # whatever a proxy answered: without signs of life the node is gone
                log.warning("the link took no sign of life (%s)", type(error).__name__)
            if ended.wait(_BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LONGEST_SECONDS)
