"""What a channel says of rounds that follow one another: here, that every round stands by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor


class SingleRounds:
    """A channel whose messages tell of one round each, so that nothing is remembered and all rounds cost the same.

    Attributes:
        memory: how many of its sums before this round's a sender adds parts of to its message.
        gain: how many times as long as its sum a sender's message can be, its noise left aside.
        strengths: of the rounds, repeated: z / sqrt(strength) is the multiplier of a round whose claims say z. A round
            of strength 0 is charged nothing, because one unit moved what it tells in an earlier one.
    """

    @property
    def memory(self) -> int:
        """None."""
        return 0

    @property
    def gain(self) -> float:
        """Its sum is its message."""
        return 1.0

    @property
    def strengths(self) -> tuple[float, ...]:
        """Every round costs what is claimed."""
        return (1.0,)

    def encoded(self, sums: Sequence[Float64[np.ndarray, " d"]]) -> Float64[np.ndarray, " d"]:
        """Return what a silo sends parts of its sums as, this round's first and then those it remembers."""
        return sums[0]

    def init(self, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
        """Return what the reader of the sums remembers before the first round, messages of a length."""
        return {}

    def decoded(
        self,
        total: Float64[np.ndarray, " length"],
        state: Mapping[str, Tensor],
        model: Float32[Tensor, " d"],
        unit: float,
    ) -> tuple[Float64[np.ndarray, " length"], Mapping[str, Tensor]]:
        """Return the round's own sum with its noise, of what was received, and what is remembered after it.

        Args:
            total: the sum of all messages.
            state: what :meth:`init` or the round before returned.
            model: that the round began with.
            unit: of the round's messages.
        """
        return total, {}
