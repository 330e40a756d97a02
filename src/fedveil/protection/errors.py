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
