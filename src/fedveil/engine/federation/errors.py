"""What a party of a federation will not do, and why."""

from __future__ import annotations

from typing import Literal

from fedveil.errors import FedveilError

Cause = Literal["policy", "budget", "schema", "replay", "state", "storage", "request"]
"""Why a silo refuses: its policy, its users' budget, another schema, a request that was answered with something else
before, its own state is not what it was, its disk, or a request that makes no sense."""


class RefusalError(FedveilError):
    """A silo does not take part in what the coordinator asks.

    Attributes:
        cause: what kind of reason.
        reason: what was asked and what would be accepted; never a private value.
        silo: the silo's name, where the coordinator tells of it.
    """

    def __init__(self, cause: Cause, reason: str, *, silo: str | None = None) -> None:
        self.cause, self.reason, self.silo = cause, reason, silo
        super().__init__(f"{'' if silo is None else f'silo {silo} '}refuses ({cause}): {reason}")
