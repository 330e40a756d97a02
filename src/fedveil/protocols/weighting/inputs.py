"""What a silo puts into a round under private weighting, and keeps of it on its own disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64

from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.weighting.private_weighting import Contributions
from fedveil.protocols.wire import Reader, Writer

SEED_BYTES: Final = 32
"""Of every seed of the protocol."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedInputs:
    """What a client puts into a round.

    Attributes:
        contributions: (m, d) clipped contributions of weight 1 of the users it has records of, ascending; grid units.
        noise: (d,) its exact integer share of the noise, in grid units.
        dither: 32-byte key of its share of the remainders modulo C; None: a new one.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes | None = None

    def encode(self) -> bytes:
        """Return the bytes to keep: the same contributions, noise and remainders for the same round."""
        users, length = self.contributions.shape
        size = self.contributions.dtype.itemsize
        assert (
            self.dither is not None
        )  # two remainders of one sum would tell more of it than the noise covers
        head = Writer().number(users, 4).number(length, 4).number(size, 1)
        numbers = self.contributions.astype(f"<i{size}").tobytes() + self.noise.astype("<i8").tobytes()
        return head.bytes() + numbers + self.dither

    @classmethod
    def decode(cls, data: bytes) -> WeightedInputs:
        """Return what :meth:`encode` kept.

        Raises:
            ProtocolError: the bytes are none that it made.
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
