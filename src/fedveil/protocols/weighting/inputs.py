"""Inputs that a silo contributes to a round of private weighting, and persists on its own disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64

from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.weighting.private_weighting import Contributions
from fedveil.protocols.wire import Reader, Writer

SEED_BYTES: Final = 32
"""Bytes of every seed of the protocol."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedInputs:
    """Input of a client to a round.

    Attributes:
        contributions: (m, d) int32 or int64, clipped contributions of weight 1 of the m users with records at this
            client, ascending by user, in grid units.
        noise: (d,) int64, the client's exact share of the noise, in grid units.
        dither: 32-byte key of the client's share v of the remainders modulo C; None draws a fresh key.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes | None = None

    def encode(self) -> bytes:
        """Return the input as bytes, for the client's own disk; a repeated round sends all three values again."""
        users, length = self.contributions.shape
        size = self.contributions.dtype.itemsize
        # A fresh key in a repeated round would show two remainders of one sum: more than the noise covers.
        assert self.dither is not None
        head = Writer().number(users, 4).number(length, 4).number(size, 1)
        numbers = self.contributions.astype(f"<i{size}").tobytes() + self.noise.astype("<i8").tobytes()
        return head.bytes() + numbers + self.dither

    @classmethod
    def decode(cls, data: bytes) -> WeightedInputs:
        """Return the input that :meth:`encode` encoded.

        Raises:
            ProtocolError: :meth:`encode` cannot have made these bytes.
        """
        reader = Reader(data)
        users, length, size = reader.number(4), reader.number(4), reader.number(1)
        if size not in (4, 8):
            raise ProtocolError(f"contributions are numbers of 4 or 8 bytes, not of {size}")
        rows = np.frombuffer(reader.fixed_bytes(users * length * size), dtype=f"<i{size}").reshape(
            users, length
        )
        noise = np.frombuffer(reader.fixed_bytes(8 * length), dtype="<i8")
        dither = reader.fixed_bytes(SEED_BYTES)
        reader.finish()
        return cls(contributions=rows, noise=noise, dither=dither)
