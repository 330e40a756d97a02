"""How the silos' messages of a round become whole numbers that secure aggregation adds up.

The sum is that of the plain float64 vectors, bit for bit. Messages lie on a grid that is a power of two, so dividing by
it is exact, masks cancel in whole numbers, and a sum below 2^53 units is exact in float64 in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import SiloSums
from fedveil.methods.method import Method
from fedveil.protection.masking.masked_sums import MaskedSums
from fedveil.protection.masking.recoverable_aggregation import check_threshold
from fedveil.randomness import PrivacyRandomness

NOISE_REACH: Final = 40.0  # in standard deviations: a share reaches farther with a probability below 1e-340


@dataclass(frozen=True, kw_only=True)
class MaskedRange:
    """What the parties of a run under secure aggregation agree on; public numbers alone.

    Attributes:
        silos: |S|.
        length: d, coordinates of a message.
        grid: the step of a message, a power of two, in the unit of the update.
        limit: the largest absolute value of a message's coordinate, in units of grid.
        threshold: how many silos must survive a round with recovery; None without recovery.

    Raises:
        ProtocolError: fewer than two silos, or a sum that 64 bits do not hold.
    """

    silos: int
    length: int
    grid: float
    limit: int
    threshold: int | None = None

    def __post_init__(self) -> None:
        """Refuse before any training what the protocol would refuse."""
        self._sums()

    @classmethod
    def of(cls, method: Method, *, n_silos: int, n_users: int, length: int) -> MaskedRange:
        """Return the range of the messages of a method under secure aggregation.

        A silo's sum is at most C times the largest weight that |U| users can have in one silo. To it comes its share
        of the noise, at most 40 standard deviations; beyond that, with a probability below 1e-340 a coordinate, the
        round would end with an error.
        """
        channel, bound = method.channel, method.bound
        assert bound.bounded, "the protection refuses unbounded contributions"
        contributions = n_users if method.contribution.per == "pair" else 1
        weight = 1.0 / n_silos if method.weights.uniform else 1.0
        largest = contributions * weight * bound.norm * channel.gain + NOISE_REACH * channel.message_std(
            n_silos
        )
        grid = channel.message_grid(bound.grid, n_silos)
        threshold = n_silos - channel.missing if method.protection.recovers else None
        if threshold is not None:
            check_threshold(threshold, n_silos, channel.colluding)
        return cls(
            silos=n_silos,
            length=length,
            grid=grid,
            limit=math.ceil(largest / grid),
            threshold=threshold,
        )

    def units(self, message: Float64[np.ndarray, " d"]) -> Int64[np.ndarray, " d"]:
        """Return a silo's message in units of the grid, exact: it is a multiple of the grid."""
        units: np.ndarray = (message / self.grid).astype(np.int64)
        return units

    def vector(self, units: Int64[np.ndarray, " d"]) -> Float64[np.ndarray, " d"]:
        """Return a sum of messages from units of the grid, exact."""
        return np.asarray(units * self.grid)

    def protocol(self, privacy: PrivacyRandomness) -> MaskedSums:
        """Return the protocol of these numbers; no noise is drawn in the middle of a round."""
        return self._sums()

    def _sums(self) -> MaskedSums:
        return MaskedSums(clients=self.silos, length=self.length, limit=self.limit, threshold=self.threshold)

    def workload(self, turn: Turn, initial: Float32[Tensor, " d"]) -> SiloSums:
        """Return the silos' noisy sums of a round, in grid units."""
        return SiloSums(turn, self.units, self.vector)
