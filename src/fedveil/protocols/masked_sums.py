"""Specify secure aggregation as a protocol over integers, with or without recovery of clients.

The sum equals the sum of the plain float64 messages bit for bit. The messages are multiples of the grid's step, so
division by the step is exact. The masks cancel in integer arithmetic. A sum below 2^53 steps is exact in
float64, in any order of addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, cast

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.errors import ProtocolError
from fedveil.protocols.messages import (
    Announcement,
    Directory,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protocols.protocol import (
    ClientContext,
    ClientInputs,
    ClientProtocol,
    Exchanges,
    ExchangeStep,
    ServerProtocol,
)
from fedveil.protocols.recoverable_aggregation import (
    AgreedSurvivors,
    RecoverableServer,
    RecoverableSilo,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
    check_threshold,
)
from fedveil.protocols.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo

Units: TypeAlias = Int64[np.ndarray, " d"]

MASKED: Final = Exchanges(
    on_join=(Announcement,),
    session_start=(Directory,),
    round_start=(RoundStart,),
    answers=lambda _: ((MaskedVector,), (ExchangeStep((RevealRequest,), (OwnMask,)),)),
)
"""Exchanges of secure aggregation without recovery: every client must answer."""

_FOLLOWING: Final = (
    ExchangeStep((RecoveryDirectory,), (ShareBundle,)),
    ExchangeStep((RelayedShares,), (MaskedVector,)),
    ExchangeStep((Survivors,), (SignedSurvivors,)),
    ExchangeStep((AgreedSurvivors,), (RevealedShares,)),
)
RECOVERED: Final = Exchanges(round_start=(RoundStart,), answers=lambda _: ((RecoveryKeys,), _FOLLOWING))
"""Exchanges of secure aggregation with recovery, with every client that has not vanished."""

_BUNDLE_BYTES: Final = 512
"""Upper bound of the bytes that one client's signed keys, or its sealed shares for another, take in a message."""


@dataclass(frozen=True, kw_only=True)
class MaskedSumSpec(AggregationPlan):
    """Public specification of secure aggregation for all parties of a run.

    Attributes:
        grid: step of the messages' grid, in the unit of the update: a power of two, or 5, 6 or 7 times one.
        threshold: fewest clients that must survive a round with recovery; None if every client must.

    Raises:
        ProtocolError: fewer than two clients, sums that do not fit 64 bits, or a threshold not above half of the
            clients.
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
        """Fewest clients of a sum: the threshold with recovery, else all clients."""
        return self.clients if self.threshold is None else self.threshold

    @property
    def repeatable(self) -> bool:
        """Return whether every sum is over all clients; a sum with recovery may have other clients and noise."""
        return self.threshold is None

    @property
    def max_exchange_bytes(self) -> tuple[int, int]:
        """Most bytes of one exchange from a client (a vector, or shares) and to a client (keys, or shares)."""
        return self.word_bytes * self.length + _BUNDLE_BYTES * self.clients, _BUNDLE_BYTES * self.clients

    def exchanges(self, client: int) -> Exchanges:
        """Return the exchanges of a session, which are the same for every client."""
        return MASKED if self.threshold is None else RECOVERED

    def client_input(self, inputs: ClientInputs, client: int) -> Units:
        """Return the client's message in grid units; exact, because the message is a multiple of the grid."""
        return self.units(cast(Float64[np.ndarray, " d"], inputs.message(client)))

    def units(self, message: Float64[np.ndarray, " d"]) -> Units:
        """Convert a (d,) float64 message to int64 grid units."""
        # Exact: the message is a multiple of the step, and float64 division returns a quotient that it can hold.
        return (message / self.grid).astype(np.int64)

    def decode_sum(self, result: Units) -> Float64[np.ndarray, " d"]:
        """Convert a sum from grid units to the unit of the update; exact below 2^53 grid units."""
        return np.asarray(result * self.grid)

    def pack(self, units: Units) -> bytes:
        """Return a vector as bytes (int64, little-endian)."""
        return units.astype("<i8", copy=False).tobytes()

    def unpack(self, data: bytes) -> Units:
        """Return the vector that :meth:`pack` encoded.

        Raises:
            ProtocolError: the bytes have another length than a vector.
        """
        if len(data) != 8 * self.length:
            raise ProtocolError(f"a kept vector has {len(data)} bytes instead of {8 * self.length}")
        return np.frombuffer(data, dtype="<i8").astype(np.int64)

    def server(self, run: bytes) -> ServerProtocol[Units]:
        """Return the server's end of a session."""
        if self.threshold is None:
            return AggregationServer(self, run)
        return RecoverableServer(self, run, threshold=self.threshold)

    def client(self, context: ClientContext) -> ClientProtocol[Units, Units]:
        """Return a client's end of a session."""
        if self.threshold is None:
            return AggregationSilo(self, context)
        return RecoverableSilo(self, context, threshold=self.threshold)
