"""The seam between the parties of a federation and whatever carries their messages.

The coordinator has at most one current message for each silo. A transport delivers the current message to its silo, and
again to a silo that asks again. So a transport needs no acknowledgements, no timers that send again, and no list of
the silos that are online: what it loses, the silo fetches again. This module imports the standard library alone,
because the processes that face the network are small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

AnswerMessage = Callable[[bytes], bytes]
"""The silo's end of a transport: returns the answer to a message. Raises NoAnswerError."""


class NoAnswerError(OSError):
    """The silo's key process refused the message or is not there; its own log says why."""


@dataclass(frozen=True)
class Received:
    """A message of a silo, as a transport delivers it.

    Attributes:
        silo: number of the silo that the transport authenticated. The coordinator verifies the signature itself: a
            transport that reports another number can stop a run and do nothing else.
        message: the bytes.
    """

    silo: int
    message: bytes


class Transport(Protocol):
    """The coordinator's end of a transport; one thread uses it."""

    def offer(self, messages: Mapping[int, bytes], withdrawn: Collection[int] = ()) -> None:
        """Set the current message of some silos.

        A message is delivered until it is replaced or withdrawn. Offering the same bytes again asks the silo again.

        Args:
            messages: the messages by silo number.
            withdrawn: silos that have no current message any more.
        """

    def collect(self, seconds: float) -> list[Received]:
        """Return the answers that have arrived; wait for the first of them at most this long.

        An answer may be returned twice, late, or after a newer offer.
        """

    def close(self) -> None:
        """Release connections. The last offer may still be delivered: a silo that was away learns that a run ended."""
