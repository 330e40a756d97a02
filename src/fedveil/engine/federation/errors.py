"""What a party of a federation will not do, and why."""

from __future__ import annotations

from fedveil.errors import FedveilError
from fedveil.protection.parts import Cause


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
