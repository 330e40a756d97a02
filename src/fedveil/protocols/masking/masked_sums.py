"""Secure aggregation as a protocol of whole numbers, with recovery of vanished clients or without.

The sum is that of the plain float64 messages, bit for bit: they lie on a grid that is a power of two, so dividing by it
is exact, masks cancel in whole numbers, and a sum below 2^53 steps is exact in float64 in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, cast

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.exchanges import Exchanges, ExchangeStep
from fedveil.protocols.masking.recoverable_aggregation import check_threshold
from fedveil.protocols.masking.recovery_messages import (
    AgreedSurvivors,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
)
from fedveil.protocols.masking.recovery_server import RecoverableServer
from fedveil.protocols.masking.recovery_silo import RecoverableSilo
from fedveil.protocols.masking.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo
from fedveil.protocols.messages import (
    Announcement,
    Directory,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protocols.protocol import ClientContext, ClientInputs, ClientProtocol, ServerProtocol

Units: TypeAlias = Int64[np.ndarray, " d"]

MASKED: Final = Exchanges(
    joined=(Announcement,),
    first=(Directory,),
    begin=(RoundStart,),
    played=lambda _: ((MaskedVector,), (ExchangeStep((RevealRequest,), (OwnMask,)),)),
)
"""The messages of secure aggregation with every client."""

_FOLLOWING: Final = (
    ExchangeStep((RecoveryDirectory,), (ShareBundle,)),
    ExchangeStep((RelayedShares,), (MaskedVector,)),
    ExchangeStep((Survivors,), (SignedSurvivors,)),
    ExchangeStep((AgreedSurvivors,), (RevealedShares,)),
)
RECOVERED: Final = Exchanges(begin=(RoundStart,), played=lambda _: ((RecoveryKeys,), _FOLLOWING))
"""The messages of secure aggregation that recovers, with every client that is there."""

_BUNDLE_BYTES: Final = 512
"""More than one client's keys, or its sealed shares for another, take in a message."""


@dataclass(frozen=True, kw_only=True)
class MaskedSumSpec(AggregationPlan):
    """What all parties of a run under secure aggregation agree on.

    Attributes:
        grid: the step of a message, a power of two, in the unit of the update.
        threshold: how many clients must survive a round with recovery; None: every client must.

    Raises:
        ProtocolError: fewer than two clients, sums that would not fit, or a threshold not above half of the clients.
    """

    grid: float = 1.0
    threshold: int | None = None
    result_at_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_threshold(self.threshold, self.clients)

    @property
    def quorum(self) -> int:
        """All clients, or as many as open the masks of the others."""
        return self.clients if self.threshold is None else self.threshold

    @property
    def repeatable(self) -> bool:
        """Whether every sum is over all clients: another attempt may be over others, with other noise."""
        return self.threshold is None

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """A vector, or what a client seals for all others; shares for it come back, or everybody's keys."""
        return 8 * self.length + _BUNDLE_BYTES * self.clients, _BUNDLE_BYTES * self.clients

    def exchanges(self, client: int) -> Exchanges:
        """Return the same messages for every client."""
        return MASKED if self.threshold is None else RECOVERED

    def client_input(self, inputs: ClientInputs, client: int) -> Units:
        """Return the client's message in units of the grid, exact: it is a multiple of the grid."""
        return self.units(cast(Float64[np.ndarray, " d"], inputs.message(client)))

    def units(self, message: Float64[np.ndarray, " d"]) -> Units:
        """Return a message in units of the grid."""
        return (message / self.grid).astype(np.int64)

    def decode_sum(self, result: Units) -> Float64[np.ndarray, " d"]:
        """Return a sum of messages from units of the grid, exact."""
        return np.asarray(result * self.grid)

    def pack(self, given: Units) -> bytes:
        """Return the numbers of a vector (int64, little-endian)."""
        return given.astype("<i8", copy=False).tobytes()

    def unpack(self, data: bytes) -> Units:
        """Return the vector of :meth:`pack`."""
        if len(data) != 8 * self.length:
            raise ProtocolError(f"a kept vector has {len(data)} bytes instead of {8 * self.length}")
        return np.frombuffer(data, dtype="<i8").astype(np.int64)

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end."""
        if self.threshold is None:
            return AggregationServer(self, run)
        return RecoverableServer(self, run, threshold=self.threshold)

    def client(self, context: ClientContext) -> ClientProtocol[Units, Units]:
        """Return a client's end."""
        if self.threshold is None:
            return AggregationSilo(self, context)
        return RecoverableSilo(self, context, threshold=self.threshold)
