"""Define the interface of bounds over rounds, with the behaviour of a constant bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

_Bound = TypeVar("_Bound", bound="SteadyBound")


class SteadyBound:
    """Base of bounds; by default a bound is constant, adds nothing to the updates and has no state.

    Attributes:
        extra: number of coordinates of a message in addition to those of the update.
    """

    extra: ClassVar[int] = 0

    @property
    def unit(self) -> float:
        """Unit of messages, in units of the updates: 1."""
        return 1.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why a method cannot use the bound."""
        return ()

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        """Return the mechanism of the bound in words; empty for a constant bound."""
        return ()

    def init(self) -> Mapping[str, Tensor]:
        """Return the state before the first round."""
        return {}

    def measured_in(self: _Bound, unit: float) -> _Bound:
        """Return the bound whose messages are in ``unit``, as received from another process."""
        return self

    def possible(self, unit: float, number: int) -> bool:
        """Return whether the messages of round ``number`` may be in ``unit``."""
        return unit == self.unit

    def at_state(self: _Bound, state: Mapping[str, Tensor]) -> _Bound:
        """Return the bound of the next round, given the state after the last round."""
        return self

    def next_state(
        self, marks: Float64[Tensor, " extra"], users: float, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the state after a round.

        Args:
            marks: (extra,) released noisy sums of the values of :meth:`marks`.
            users: q |U|, the expected number of participants.
            state: the state before the round.
        """
        return {}

    def marks(
        self, norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float64[Tensor, "m extra"]:
        """Return the (m, extra) additional coordinates of each contribution, on the bound's grid.

        The unit is that of a message.
        """
        return torch.zeros(len(norms), self.extra, dtype=torch.float64)
