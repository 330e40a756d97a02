"""Schedule users to take part in every b-th round by a public rule, without sampling or amplification."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Int32, Integer
from pydantic import Field

from fedveil.config_keys import check_ranges
from fedveil.privacy.sampling import Everyone


@dataclass(frozen=True, kw_only=True)
class Scheduled(Everyone):
    """Public schedule: a user takes part in silo s in the rounds t with (number + s) mod b = t mod b.

    ``number`` is the user's number. The schedule is a function of the user and the silo alone: other users that join
    or leave do not change it, and silos need not agree on it. The schedule is public, so it amplifies no claim. The
    server divides a sum by |U| / b, never by the number of participants.

    Args:
        period: b.

    Raises:
        CompositionError: a period below 1.
    """

    period: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        """Refuse a period below 1."""
        check_ranges(self)

    @property
    def rate(self) -> float:  # type: ignore[override]
        """Share of the users in a round, 1 / b; the server divides by it."""
        return 1.0 / self.period

    def refuses(self, method: Any) -> Iterable[str]:
        """Return a reason to refuse channels that ignore the schedule, and so charge every round in full."""
        if len(getattr(method.channel, "strengths", (1.0,))) != self.period:
            yield (
                f"users take part once in {self.period} rounds, and the channel charges every round in full: take "
                "correlated noise of the same period (bands = 1 for independent noise)"
            )

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        return (
            f"each {moves.unit} takes part, in each silo, in one of every {self.period} rounds, by a public schedule",
        )


def is_due(
    owner: Integer[np.ndarray, " m"], silo: Int32[np.ndarray, " m"], period: int, number: int
) -> Bool[np.ndarray, " m"]:
    """Return a mask of the contributions that take part in round ``number``.

    Args:
        owner: (m,) user number of each contribution.
        silo: (m,) silo number of each contribution.
        period: b.
        number: of the round.

    >>> [bool(is_due(np.array([5]), np.array([0], dtype=np.int32), 3, number)[0]) for number in (1, 2, 3, 4, 5)]
    [False, True, False, False, True]
    """
    found: np.ndarray = (owner % period + silo - number) % period == 0
    return found
