"""Users who take part in every b-th round, by a public schedule: nobody draws, and nothing is amplified."""

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
    """A user takes part in silo s in the rounds t with (the user's number + s) mod b = t mod b.

    The schedule is a function of the user and of the silo, of nothing else: no other user's coming or going moves it,
    and silos need not agree on it. It is public and hides nobody, so no claim is amplified; a sum is divided by |U| / b
    and never by how many of them there are.

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
        """1 / b: the share of the users in a round, which the server divides by."""
        return 1.0 / self.period

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse a channel that does not count on the schedule, so that every round would be charged in full."""
        if len(method.channel.strengths) != self.period:
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
    """Return which contributions take part in a round of this number, by their owner and silo.

    >>> [bool(is_due(np.array([5]), np.array([0], dtype=np.int32), 3, number)[0]) for number in (1, 2, 3, 4, 5)]
    [False, True, False, False, True]
    """
    found: np.ndarray = (owner % period + silo - number) % period == 0
    return found
