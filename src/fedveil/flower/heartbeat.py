"""Signs of life: Flower takes a task back, or a node for gone, after 30 seconds without one."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final

_BEAT_SECONDS: Final = 10.0
_LONGEST_SECONDS: Final = 120.0
_MOST_FAILED: Final = 6


@contextlib.contextmanager
def heartbeat(beat: Callable[[], bool], log: logging.Logger) -> Iterator[threading.Event]:
    """Give signs of life in a thread of their own, every ten seconds.

    Args:
        beat: sends one, and returns whether the other side took it; where it fails, the next may succeed.
        log: where it says so.

    Yields:
        What is set once a minute of them has failed: the other side takes this one for gone.
    """
    ended, lost = threading.Event(), threading.Event()

    def beat_on() -> None:
        failed = 0
        while True:
            try:
                reason = "" if beat() else "refused"
            except Exception as error:  # whatever a proxy answered: without signs of life the node is gone
                reason = type(error).__name__
            failed = failed + 1 if reason else 0
            if reason:
                log.warning("the link took no sign of life (%s)", reason)
            if failed == _MOST_FAILED:
                lost.set()
            if ended.wait(_BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat_on, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        ended.set()
        thread.join(_LONGEST_SECONDS)
