"""Inputs that a client of partial encryption persists, and the result that every client learns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.wire import Reader, Writer


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitUpdate:
    """Message of a client, split by the partition, with its noise.

    Attributes:
        partition: (d,) bool, True for encrypted coordinates.
        clear: (d - k,) int64, coordinates in the clear with their noise, ascending, in grid units.
        hidden: (k,) int64, encrypted coordinates with their noise, ascending, in grid units.
    """

    partition: Bool[np.ndarray, " d"]
    clear: Int64[np.ndarray, " c"]
    hidden: Int64[np.ndarray, " h"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialInputs:
    """Input of a client to a round.

    Attributes:
        values: (d,) values by which the client votes; if no silo votes, values that are the same for all silos.
        message: (d,) message of the client in the unit of the update, without noise, not split yet.
        votes: (d,) the client's share of the noise on the counts of votes; None if votes have no noise.
        divided: parts of the message once it has been split; None until then.
    """

    values: Float64[np.ndarray, " d"]
    message: Float64[np.ndarray, " d"]
    votes: Int64[np.ndarray, " d"] | None = None
    divided: SplitUpdate | None = None

    def encode(self) -> bytes:
        """Return the input as bytes, for the client's own disk."""
        writer = Writer().block(self.message.astype("<f8").tobytes())
        # A silo that votes by its message stores the vector once.
        writer.block(b"" if self.values is self.message else self.values.astype("<f8").tobytes())
        writer.block(b"" if self.votes is None else self.votes.astype("<i8").tobytes())
        if self.divided is not None:
            writer.block(np.packbits(self.divided.partition).tobytes())
            for part in (self.divided.clear, self.divided.hidden):
                writer.block(part.astype("<i8").tobytes())
        return writer.bytes()

    @classmethod
    def decode(cls, data: bytes) -> PartialInputs:
        """Return the input that :meth:`encode` encoded.

        Raises:
            ProtocolError: :meth:`encode` cannot have made these bytes.
        """
        reader = Reader(data)
        message = _numbers(reader, "<f8")
        values, votes = _numbers(reader, "<f8"), _numbers(reader, "<i8")
        divided = None
        if reader.n_remaining:
            bits = np.frombuffer(reader.block(), dtype=np.uint8)
            if len(bits) != -(-len(message) // 8):
                raise ProtocolError(f"a kept partition of {len(message)} coordinates has {len(bits)} bytes")
            partition = np.unpackbits(bits, count=len(message)).astype(np.bool_)
            divided = SplitUpdate(
                partition=partition, clear=_numbers(reader, "<i8"), hidden=_numbers(reader, "<i8")
            )
        reader.finish()
        return cls(
            values=values if len(values) else message,
            message=message,
            votes=votes if len(votes) else None,
            divided=divided,
        )


def _numbers(reader: Reader, kept: str) -> np.ndarray:
    content = reader.block()
    if len(content) % 8:
        raise ProtocolError(f"kept numbers of 8 bytes have {len(content)} bytes")
    return np.frombuffer(content, dtype=kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResult:
    """Result of a round, which every client of the cohort learns.

    Attributes:
        partition: (d,) bool, True for coordinates that were encrypted.
        clear: (d - k,) int64, sum of the coordinates in the clear, ascending, in grid units.
        hidden: (k,) int64, sum of the encrypted coordinates, ascending, in grid units.
    """

    partition: Bool[np.ndarray, " d"]
    clear: Int64[np.ndarray, " c"]
    hidden: Int64[np.ndarray, " h"]

    def __eq__(self, other: object) -> bool:
        """Return whether partition and both sums are equal."""
        return isinstance(other, PartialResult) and all(
            np.array_equal(mine, its)
            for mine, its in (
                (self.partition, other.partition),
                (self.clear, other.clear),
                (self.hidden, other.hidden),
            )
        )

    __hash__ = None  # type: ignore[assignment]
