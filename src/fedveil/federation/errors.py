"""What a party of a federation will not do, and why."""

from __future__ import annotations

from typing import Final

from fedveil.errors import BudgetError, ConfigError, FedveilError, IntegrityError, RunFolderError
from fedveil.protection.errors import OwnRecordsError, ProtocolError
from fedveil.protection.parts import Cause

OWN_RECORDS: Final = "the silo's own records do not allow what is asked; its own log says more"
"""All that is said of a refusal that depends on private data: the same words whatever the reason."""

_STORAGE: Final = "the silo cannot read or keep its own state; its own log says more"
_INTEGRITY: Final = "lines are missing from the silo's ledger; its own log says more"
_BUDGET: Final = "the round would bring this silo's users above what they may spend over all runs"


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


def told(error: Exception) -> tuple[Cause, str]:
    """Return what a silo tells the coordinator of an error: words about the request, and none about its own files.

    Where an error may depend on private data, a path or another run, the reason is one constant text; an error of a
    class that is not listed here counts as one that may.
    """
    if isinstance(error, RefusalError):
        return error.cause, error.reason
    if isinstance(error, BudgetError):
        return "budget", _BUDGET
    if isinstance(error, IntegrityError):
        return "integrity", _INTEGRITY
    if isinstance(error, RunFolderError):
        return "storage", _STORAGE
    if isinstance(error, ConfigError | ProtocolError) and not isinstance(error, OwnRecordsError):
        return "request", str(error)
    return "request", OWN_RECORDS
