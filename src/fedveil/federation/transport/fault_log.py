"""A log of repeated faults that grows by at most one line a minute for each cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from fedveil.sanitize import sanitize

INTERVAL_SECONDS: Final = 60.0
_MOST_CAUSES: Final = 100


class FaultLog:
    """Logs faults; a fault of the same cause within a minute is counted and not written.

    Args:
        log: where lines go.
        clock: seconds; never goes back.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._next: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warn(self, cause: str, sentence: str) -> None:
        """Log a fault.

        Args:
            cause: short name; faults of one name count as the same.
            sentence: what happened and what to do; may hold text from outside.
        """
        now = self._clock()
        if now < self._next.get(cause, now):
            self._suppressed[cause] = self._suppressed.get(cause, 0) + 1
            return
        if len(self._next) >= _MOST_CAUSES:
            self.forget()
        count = self._suppressed.pop(cause, 0)
        self._next[cause] = now + INTERVAL_SECONDS
        more = f" ({count} more like it since the last such line)" if count else ""
        self._log.warning("%s: %s%s", cause, sanitize(sentence), more)

    def forget(self) -> None:
        """Start anew: the next fault of every cause is written."""
        self._next.clear()
        self._suppressed.clear()
