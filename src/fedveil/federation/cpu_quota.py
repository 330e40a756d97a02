"""Limits on work without a charge: processor seconds a day, and seconds a round.

Claim: regardless of the messages that a coordinator signs, a silo spends at most its policy's
``uncharged_cpu_seconds`` of processor time in 24 hours, plus one message, on messages that lead to no charged round.
These are refusals, answers outside a session, sessions without a charge, and repeated rounds that cost no charge,
until another round is charged. The budget bounds the charged rounds.
Condition: the work runs in the thread that reads the messages. Threads of linear algebra libraries are not counted.
Enforced by :class:`CpuQuota` in :meth:`fedveil.federation.silo.SiloParty.receive`;
``tests/test_federation_limits.py`` exhausts it.
"""

from __future__ import annotations

import time
from typing import Final, Literal

from fedveil.federation.errors import RefusalError
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.refusals import Code

_DAY: Final = 86400.0


Outcome = Literal["charged", "answered", "refused"]
"""Effect of a message: a round was charged, the session continues, or nothing happened."""


class CpuQuota:
    """Counter of the processor seconds of one day that led to no charge."""

    def __init__(self) -> None:
        self._spent = self._unpaid = 0.0
        self._paid = False
        self._since = time.monotonic()

    def check(self, limit: float) -> None:
        """Check that a message may be read.

        Args:
            limit: processor seconds a day.

        Raises:
            ProtocolError: the limit of the day is reached.
        """
        # Fixed windows of 24 hours since the start of the process or of the last window.
        if time.monotonic() - self._since >= _DAY:
            self._spent, self._since = 0.0, time.monotonic()
        if self._spent + self._unpaid >= limit:
            raise ProtocolError(
                f"letters that led to no round have taken {limit:g} s of a processor within a day, which is all "
                "that policy.toml allows (uncharged_cpu_seconds): none is read until it is over"
            )

    def begin(self) -> None:
        """Begin a session: the open cost of an earlier session without a charge becomes spent."""
        self._spent, self._unpaid, self._paid = self._spent + self._unpaid, 0.0, False

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
            self._spent += seconds
        elif not self._paid:
            self._unpaid += seconds


class Deadline:
    """Time limit of training or scoring; tested between chunks, and every second inside a chunk.

    Args:
        seconds: limit from now.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def __call__(self, done: int, total: int) -> None:
        """Check that time is left. The arguments are unused; they match the progress callback.

        Raises:
            RefusalError: the time is over; a charge that was made stays.
        """
        if time.monotonic() >= self._until:
            raise RefusalError(Code.OVERTIME, self._seconds)
