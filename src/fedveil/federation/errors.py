"""What a party of a federation will not do, and why."""

from __future__ import annotations

from fedveil.data.main_silos import MainSilosError
from fedveil.errors import BudgetError, ConfigError, FedveilError, IntegrityError, RunFolderError
from fedveil.protocols.errors import OwnRecordsError, ProtocolError
from fedveil.protocols.refusals import Cause, Code, Refusal


class RefusalError(FedveilError):
    """A silo does not take part in what the coordinator asks.

    Args:
        code: why.
        numbers: those that the code's sentence names; never private ones.
        detail: what the silo's own log says instead of the sentence; it does not travel.
        silo: the silo's name, where the coordinator tells of it.

    Attributes:
        why: what travels.
    """

    exit_code = 3

    def __init__(
        self, code: Code, *numbers: float, detail: str | None = None, silo: str | None = None
    ) -> None:
        self.why = Refusal(code, tuple(map(float, numbers)))
        who = "" if silo is None else f"silo {silo} "
        super().__init__(f"{who}refuses ({code.cause}): {self.why.sentence if detail is None else detail}")

    @property
    def cause(self) -> Cause:
        """What kind of reason."""
        return self.why.code.cause


def to_refusal(error: BaseException) -> Refusal:
    """Return what a silo tells the coordinator of an error: nothing of its own files, and no word of its message.

    An error of a class that is not listed here counts as one that may depend on private data.
    """
    if isinstance(error, RefusalError):
        return error.why
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Refusal(code)
    return Refusal(Code.OWN_RECORDS)


_CODES: tuple[tuple[type[FedveilError], Code], ...] = (
    (OwnRecordsError, Code.OWN_RECORDS),  # before its base
    (BudgetError, Code.ROUND_BUDGET),
    (IntegrityError, Code.INTEGRITY),
    (RunFolderError, Code.STORAGE),
    (MainSilosError, Code.MAIN_SILOS),
    (ConfigError, Code.EXPERIMENT),
    (ProtocolError, Code.PROTOCOL),
)
