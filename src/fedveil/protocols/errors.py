"""Errors that end a round: the silo that caused the error, and the reason."""

from __future__ import annotations

from fedveil.errors import FedveilError


class ProtocolError(FedveilError):
    """Refused message, or violated condition of the protocol; it ends the round.

    Attributes:
        silo: number of the silo that caused the error; None for the server or for a setting.
        reason: the value found and the value that would be right; never a private value.
    """

    def __init__(self, reason: str, *, silo: int | None = None) -> None:
        self.silo, self.reason = silo, reason
        super().__init__(reason if silo is None else f"silo {silo}: {reason}")


class OwnRecordsError(ProtocolError):
    """A request does not fit the silo's own records; the refusal sent to the coordinator does not say how."""


class RefusedSumError(ProtocolError):
    """A silo refuses the decrypted sum of a round. The sum depends on the messages of other silos."""


class SiloVanished(ProtocolError):
    """Silos did not answer; the attempt is over, their vectors stay masked, the round may be repeated.

    Attributes:
        silos: numbers of the silos that did not answer.
        may_have_released: whether the opening of the sum had begun; if so, the attempt must be charged.
    """

    def __init__(self, silos: tuple[int, ...], *, may_have_released: bool) -> None:
        self.silos, self.may_have_released = silos, may_have_released
        when = (
            "after the opening of the sum had begun: the attempt counts as released"
            if may_have_released
            else "before the opening of the sum had begun: nothing was revealed"
        )
        super().__init__(f"silos {', '.join(map(str, silos))} vanished {when}")
