"""How much a coordinator may have a silo do for nothing: seconds of a processor a day, and of a clock for a round.

Claim: whatever letters a coordinator signs, and however many, a silo spends no more than its policy's
``uncharged_cpu_seconds`` of a processor in 24 hours, and one letter more, on those that lead to no charged round: on
refusals, on answers outside a session, on sessions that charge none, and on rounds that are asked for again and cost no
charge, until another one is charged. Rounds are bounded by the budget.
Condition: the work is done in the thread that reads the letters; what linear algebra does in threads of its own is not
counted. Enforced by :class:`CpuQuota` in
:meth:`fedveil.federation.silo.SiloParty.receive`; ``tests/test_federation_limits.py`` spends it.
"""

from __future__ import annotations

import time
from typing import Final, Literal

from fedveil.federation.errors import RefusalError
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.refusals import Code

_DAY: Final = 86400.0


Outcome = Literal["charged", "answered", "refused"]
"""What came of a letter: a round was charged; its session goes on; nothing."""


class CpuQuota:
    """What letters without fruit have cost since a day began."""

    def __init__(self) -> None:
        self._spent = self._unpaid = 0.0
        self._paid = False
        self._since = time.monotonic()

    def check(self, limit: float) -> None:
        """Return if a letter may be read.

        Args:
            limit: seconds of a processor, a day.

        Raises:
            ProtocolError: nothing is left of the day.
        """
        if time.monotonic() - self._since >= _DAY:
            self._spent, self._since = 0.0, time.monotonic()
        if self._spent + self._unpaid >= limit:
            raise ProtocolError(
                f"letters that led to no round have taken {limit:g} s of a processor within a day, which is all "
                "that policy.toml allows (uncharged_cpu_seconds): none is read until it is over"
            )

    def begin(self) -> None:
        """Note that a session begins: what one before it cost that charged nothing is spent."""
        self._spent, self._unpaid, self._paid = self._spent + self._unpaid, 0.0, False

    def begin_round(self) -> None:
        """Note that a round is asked for: what was charged before was another, or is this one asked for again."""
        self._paid = False

    def count(self, seconds: float, outcome: Outcome) -> None:
        """Note what a letter cost and what came of it: a round that is charged costs nothing here."""
        if outcome == "charged":
            self._unpaid, self._paid = 0.0, True
        elif outcome == "refused":
            self._spent += seconds
        elif not self._paid:
            self._unpaid += seconds


class Deadline:
    """Ends the training of a round, or scoring, that takes too long; looked at between chunks, and every second within.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def __call__(self, done: int, total: int) -> None:
        """Return while there is time left.

        Raises:
            RefusalError: there is none; what was charged stays charged.
        """
        if time.monotonic() >= self._until:
            raise RefusalError(Code.OVERTIME, self._seconds)
