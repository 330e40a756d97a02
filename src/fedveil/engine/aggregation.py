"""Secure aggregation of a round's messages, in one process: whole numbers in, the server's sum out.

The sum is that of the plain float64 vectors, bit for bit. Messages lie on a grid that is a power of two, so dividing by
it is exact, masks cancel in whole numbers, and a sum below 2^53 units is exact in float64 in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.agreement import RUN_BYTES
from fedveil.methods.method import Method
from fedveil.methods.protections import SecureAggregation
from fedveil.methods.stages import GaussianShares, SiloUserContribution, Weights
from fedveil.privacy.bounds import Clip
from fedveil.protection.secure_aggregation import AggregationPlan
from fedveil.protection.session import AggregationSession
from fedveil.protection.transcript import Line

_NOISE_REACH: Final = 40.0  # in standard deviations: a share reaches farther with a probability below 1e-340


@dataclass(frozen=True, kw_only=True)
class MaskedRange:
    """What the parties of a run under secure aggregation agree on; public numbers alone.

    Attributes:
        silos: |S|.
        length: d, coordinates of a message.
        grid: the step of a message, a power of two, in the unit of the update.
        limit: the largest absolute value of a message's coordinate, in units of grid.

    Raises:
        ProtocolError: fewer than two silos, or a sum that 64 bits do not hold.
    """

    silos: int
    length: int
    grid: float
    limit: int

    def __post_init__(self) -> None:
        """Refuse before any training what the protocol would refuse."""
        AggregationPlan(run=bytes(RUN_BYTES), silos=self.silos, length=self.length, limit=self.limit)

    @classmethod
    def of(cls, method: Method, *, n_silos: int, n_users: int, length: int) -> MaskedRange | None:
        """Return the range of a method's messages; None if it runs without secure aggregation.

        A silo's sum is at most C times the largest weight that |U| users can have in one silo. To it comes its share
        of the noise, at most 40 standard deviations; beyond that, with a probability below 1e-340 a coordinate, the
        round would end with an error.
        """
        if not isinstance(method.protection, SecureAggregation):
            return None
        channel, bound = method.channel, method.bound
        assert isinstance(channel, GaussianShares)
        assert isinstance(bound, Clip)
        contributions = n_users if isinstance(method.contribution, SiloUserContribution) else 1
        weight = 1.0 / n_silos if method.weights is Weights.UNIFORM else 1.0
        largest = contributions * weight * bound.norm + _NOISE_REACH * channel.share_std(n_silos)
        grid = channel.message_grid(bound.grid, n_silos)
        return cls(silos=n_silos, length=length, grid=grid, limit=math.ceil(largest / grid))


class SecureSum:
    """The parties of a run under secure aggregation, played in this process; all that passes between them is bytes.

    Every object makes new keys, so a run that is resumed uses none twice.

    Args:
        agreed: the range of the messages.
    """

    def __init__(self, agreed: MaskedRange) -> None:
        self._agreed = agreed
        self._session = AggregationSession(silos=agreed.silos, length=agreed.length, limit=agreed.limit)
        self._listed = 0

    def total(
        self, round_number: int, messages: Sequence[Float64[np.ndarray, " d"]]
    ) -> Float64[np.ndarray, " d"]:
        """Return the sum of the silos' messages, as the server learns it.

        Args:
            round_number: counts from 1; each round can be played once.
            messages: per silo its (d,) noisy sum, multiples of the grid.

        Raises:
            ProtocolError: a message beyond the range, naming the silo, or a round that was played before.
        """
        grid = self._agreed.grid
        units = {silo: (message / grid).astype(np.int64) for silo, message in enumerate(messages)}
        return np.asarray(self._session.aggregate(round_number, units) * grid)

    def messages(self) -> tuple[Line, ...]:
        """Return what passed between the parties since the last call: sender, size and purpose, no content."""
        lines = self._session.transcript.lines[self._listed :]
        self._listed += len(lines)
        return lines

    def bytes_up(self, round_number: int) -> int:
        """Return the bytes that all silos sent to the server in a round: masked vectors and seeds of own masks."""
        lines = self._session.transcript.lines
        return sum(line.bytes for line in lines if line.round == round_number and line.recipient == "server")
