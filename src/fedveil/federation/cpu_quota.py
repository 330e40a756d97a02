"""Limits on work without a charge: processor seconds a day, and seconds a round.

Claim: regardless of the messages that a coordinator signs, a silo spends at most its policy's
``uncharged_cpu_seconds`` of processor time in any 24 hours, plus one message, on messages that lead to no charged
round. These are refusals, answers outside a session, sessions without a charge, and repeated rounds that cost no
charge, until another round is charged. The budget bounds the charged rounds. Every restart of the silo's process adds
at most one second and the open session, which are not on disk yet; more while the disk is full.
Condition: the work runs in the thread that reads the messages. Threads of linear algebra libraries are not counted.
The clock of the silo's host is right.
Enforced by :class:`CpuQuota` in :meth:`fedveil.federation.silo.SiloParty.receive`;
``tests/test_federation_limits.py`` exhausts it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from fedveil.errors import ProtocolError, RunFolderError
from fedveil.federation.errors import RefusalError
from fedveil.files import parse_json, read_content, reading, replace_file
from fedveil.protocols.refusals import Code

_HOUR: Final = 3600.0
_HOURS: Final = 24
_LARGEST: Final = 1 << 16

FILE: Final = "uncharged_cpu.json"
"""File in the silo's state folder: processor seconds without a charge, by hour since 1970."""

Outcome = Literal["charged", "answered", "refused"]
"""Effect of a message: a round was charged, the session continues, or nothing happened."""


class CpuQuota:
    """Counter of the processor seconds of the last 24 hours that led to no charge.

    Args:
        path: file that keeps the seconds for the next process.
        clock: seconds since 1970.

    Raises:
        RunFolderError: the file is damaged.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._spent = _read(path)
        self._unpaid = self._unsaved = 0.0
        self._paid = False

    def check(self, limit: float) -> None:
        """Check that a message may be read.

        Args:
            limit: processor seconds a day.

        Raises:
            ProtocolError: the limit of the day is reached.
        """
        # Whole hours: the present one and the 24 before it cover any 24 hours that end now.
        now = int(self._clock() // _HOUR)
        self._spent = {hour: seconds for hour, seconds in self._spent.items() if hour >= now - _HOURS}
        if math.fsum(self._spent.values()) + self._unpaid >= limit:
            raise ProtocolError(
                f"messages that led to no round have taken {limit:g} s of a processor within a day, which is all "
                "that policy.toml allows (uncharged_cpu_seconds): none is read until it is over"
            )

    def begin(self) -> None:
        """Begin a session: the open cost of an earlier session without a charge becomes spent."""
        self._spend(self._unpaid)
        self._unpaid, self._paid = 0.0, False

    def begin_round(self) -> None:
        """Begin a round: the charge of an earlier round does not cover this request, which may be a repeat."""
        self._paid = False

    def count(self, seconds: float, outcome: Outcome) -> None:
        """Count the cost of a message; messages of a charged round are free, even before the charge."""
        # "answered" is provisional (_unpaid): a charge later in the round clears it, and a new session makes it
        # final.
        if outcome == "charged":
            self._unpaid, self._paid = 0.0, True
        elif outcome == "refused":
            self._spend(seconds)
        elif not self._paid:
            self._unpaid += seconds

    def _spend(self, seconds: float) -> None:
        """Add seconds to the present hour; write the file once a second of processor time is not in it."""
        hour = int(self._clock() // _HOUR)
        self._spent[hour] = self._spent.get(hour, 0.0) + seconds
        self._unsaved += seconds
        if self._unsaved >= 1.0:
            with suppress(OSError):  # a full disk keeps no answer back; the next message tries again
                replace_file(self._path, json.dumps(self._spent).encode(), mode=0o600)
                self._unsaved = 0.0


def _read(path: Path) -> dict[int, float]:
    """Return the seconds of a file by hour; none if it does not exist."""
    if not path.exists():
        return {}
    with reading(path, RunFolderError):
        content = parse_json(read_content(path, RunFolderError, largest=_LARGEST), path, RunFolderError)
        found = {int(hour): float(seconds) for hour, seconds in content.items()}
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in found.values()):
            raise ValueError
        return found


class Deadline:
    """Time limit of training or scoring; tested between chunks, and every second inside a chunk.

    Args:
        seconds: limit from now.
        clock: seconds since any moment; never goes back.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self._until = clock, seconds, clock() + seconds

    def __call__(self, done: int, total: int) -> None:
        """Check that time is left. The arguments are unused; they match the progress callback.

        Raises:
            RefusalError: the time is over; a charge that was made stays.
        """
        if self._clock() >= self._until:
            raise RefusalError(Code.OVERTIME, self._seconds)
