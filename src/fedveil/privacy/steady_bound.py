"""What every bound answers about its own course over the rounds; here one that stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

_Bound = TypeVar("_Bound", bound="SteadyBound")


class SteadyBound:
    """A bound that is the same in every round: nothing rides beside the updates, and nothing is remembered.

    Attributes:
        extra: coordinates of a message beside those of the update.
    """

    extra: ClassVar[int] = 0

    @property
    def unit(self) -> float:
        """1: messages are in the unit of the updates."""
        return 1.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why the bound has no place in a method."""
        return ()

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        """Return what moves the bound, in words."""
        return ()

    def init(self) -> Mapping[str, Tensor]:
        """Return what is remembered before the first round."""
        return {}

    def measured_in(self: _Bound, unit: float) -> _Bound:
        """Return the bound whose messages are in this unit, as another process said."""
        return self

    def possible(self, unit: float, number: int) -> bool:
        """Return whether messages of the round of this number may be in this unit."""
        return unit == self.unit

    def at_state(self: _Bound, state: Mapping[str, Tensor]) -> _Bound:
        """Return the bound of the next round."""
        return self

    def next_state(
        self, marks: Float64[Tensor, " extra"], users: float, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return what is remembered after a round.

        Args:
            marks: the released sums of what :meth:`marks` gave, with their noise.
            users: how many take part in expectation, q |U|.
            state: what was remembered before it.
        """
        return {}

    def marks(
        self, norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float64[Tensor, "m extra"]:
        """Return what each contribution adds beside its update, in the unit of a message, on the bound's grid."""
        return torch.zeros(len(norms), self.extra, dtype=torch.float64)
