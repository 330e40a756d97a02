"""Refusals of a silo, and the mapping from errors to the refusals that the coordinator receives."""

from __future__ import annotations

from fedveil.data.main_silos import MainSilosError
from fedveil.errors import (
    BudgetError,
    ConfigError,
    FedveilError,
    IntegrityError,
    OwnRecordsError,
    ProtocolError,
    RunFolderError,
)
from fedveil.protocols.refusals import Cause, Code, Refusal


class RefusalError(FedveilError):
    """Refusal of a silo to do what the coordinator requests.

    Args:
        code: the reason.
        numbers: values for the sentence of the code; never private ones.
        detail: text for the silo's own log, in place of the sentence. The coordinator does not receive it.
        silo: name of the silo, if the coordinator reports the refusal.

    Attributes:
        why: the refusal that is sent to the coordinator: code and numbers.
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
        """Category of the reason."""
        return self.why.code.cause


def to_refusal(error: BaseException) -> Refusal:
    """Map an error in a silo to the refusal that the coordinator receives.

    The refusal holds neither text of the error nor facts of the silo's files: an error message may quote private
    records. An error of an unlisted class maps to ``OWN_RECORDS``, because the error may depend on private data.
    """
    if isinstance(error, RefusalError):
        return error.why
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Refusal(code)
    return Refusal(Code.OWN_RECORDS)


_CODES: tuple[tuple[type[FedveilError], Code], ...] = (
    (OwnRecordsError, Code.OWN_RECORDS),  # before its base class ProtocolError: the first match counts
    (BudgetError, Code.ROUND_BUDGET),
    (IntegrityError, Code.INTEGRITY),
    (RunFolderError, Code.STORAGE),
    (MainSilosError, Code.MAIN_SILOS),
    (ConfigError, Code.EXPERIMENT),
    (ProtocolError, Code.PROTOCOL),
)
