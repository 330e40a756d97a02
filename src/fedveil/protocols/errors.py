"""The error that ends a round: who caused it and why."""

from __future__ import annotations

from fedveil.errors import FedveilError


class ProtocolError(FedveilError):
    """A message that must not be accepted, or a condition of the protocol that does not hold; the round ends.

    Attributes:
        silo: the silo that caused it, None for the server or for a setting.
        reason: what was found and what would be right; never a private value.
    """

    def __init__(self, reason: str, *, silo: int | None = None) -> None:
        self.silo, self.reason = silo, reason
        super().__init__(reason if silo is None else f"silo {silo}: {reason}")


class OwnRecordsError(ProtocolError):
    """What is asked does not fit a silo's own records; who asked is not told which way."""


class RefusedSumError(ProtocolError):
    """What the sum of a round decrypts to is refused: that depends on what other silos sent."""


class SiloVanished(ProtocolError):
    """Silos did not answer, so the attempt is over; what it gave away is masked, and it may be repeated.

    Attributes:
        silos: those that did not answer.
        may_have_released: whether the opening of the sum had begun: then the attempt has to be paid for.
    """

    def __init__(self, silos: tuple[int, ...], *, may_have_released: bool) -> None:
        self.silos, self.may_have_released = silos, may_have_released
        when = (
            "after the opening of the sum had begun: the attempt counts as released"
            if may_have_released
            else "before the opening of the sum had begun: nothing was revealed"
        )
        super().__init__(f"silos {', '.join(map(str, silos))} vanished {when}")
