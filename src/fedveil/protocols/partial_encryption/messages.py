"""Define the messages of partial encryption, in addition to those that all protocols share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.ckks import FINGERPRINT_BYTES
from fedveil.crypto.key_agreement import KEY_BYTES
from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.field_codecs import REST, Reader, Writer, custom_field, wire_field
from fedveil.protocols.messages import Message, message

# --- messages ---

LARGEST_WORD: Final = 8


@message(40, "the silos' common keys, sealed for one silo")
class SealedKeys(Message):
    """CKKS key and secret of the ballots' orders, sealed by silo 0 for one other silo."""

    sealed: bytes = wire_field(REST, Reveals.NOTHING)


@message(41, "votes in a secret order")
class Ballot(Message):
    """Votes of a silo: a bitmap of the coordinates in the round's secret order, which only the silos know."""

    bitmap: bytes = wire_field(REST, Reveals.VOTES, Key.SILOS, besides=Reveals.BALLOT)


@message(42, "the coordinates to encrypt, in a secret order")
class Partition(Message):
    """Coordinates with most votes: a bitmap in the round's secret order, which only the silos know."""

    bitmap: bytes = wire_field(REST, Reveals.VOTES, Key.SILOS)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts(Message):
    """Two parts of a vector: integers in the clear, and CKKS ciphertexts.

    Attributes:
        tag: equal for silos with the same common keys; it discloses nothing else about the keys.
        fingerprint: fingerprint of the encryption's parameters.
        size: bytes of a number in the clear, 1 to 8; the numbers are little-endian and signed.
        clear: (d - k,) int64, coordinates that are not encrypted, ascending.
        hidden: ciphertexts of the k encrypted coordinates, ascending.
    """

    tag: bytes = custom_field(Reveals.NOTHING)
    fingerprint: bytes = custom_field(Reveals.NOTHING)
    size: int = custom_field(Reveals.NOTHING)
    clear: Int64[np.ndarray, " n"] = custom_field(Reveals.CLEAR)  # noqa: RUF009
    hidden: bytes = custom_field(Reveals.HIDDEN, Key.SILOS)

    def encode(self) -> bytes:
        """Return tag, fingerprint, size, count, numbers and ciphertexts."""
        head = Writer().fixed_bytes(self.tag, KEY_BYTES).fixed_bytes(self.fingerprint, FINGERPRINT_BYTES)
        head.number(self.size, 1).number(len(self.clear), 8)
        split = self.clear.astype("<i8").reshape(-1, 1).view(np.uint8)
        return head.bytes() + split[:, : self.size].tobytes() + self.hidden

    @classmethod
    def decode(cls, data: bytes) -> Self:
        reader = Reader(data)
        tag, fingerprint = reader.fixed_bytes(KEY_BYTES), reader.fixed_bytes(FINGERPRINT_BYTES)
        size = reader.number(1)
        if not 1 <= size <= LARGEST_WORD:
            raise ProtocolError(f"numbers in clear have 1 to {LARGEST_WORD} bytes, not {size}")
        count = reader.count(8, size)
        split = np.frombuffer(reader.fixed_bytes(count * size), dtype=np.uint8).reshape(count, size)
        # The bytes go to the top of a word; the arithmetic shift back extends the sign.
        padded = np.zeros((count, LARGEST_WORD), dtype=np.uint8)
        padded[:, LARGEST_WORD - size :] = split
        clear = padded.view("<i8")[:, 0] >> (8 * (LARGEST_WORD - size))
        return cls(tag=tag, fingerprint=fingerprint, size=size, clear=clear, hidden=reader.rest())


@message(43, "an update, partly encrypted", eq=False)
class PartialUpdate(_Parts):
    """Vector of a silo: one part in the clear with its noise, and one encrypted part."""


@message(44, "the sum, partly encrypted", eq=False)
class PartialSum(_Parts):
    """Sum of all updates for every silo: one part in the clear, one part that only silos can decrypt."""

    clear: Int64[np.ndarray, " n"] = custom_field(Reveals.SUM)
    hidden: bytes = custom_field(Reveals.SUM, Key.SILOS)


# --- inputs and results ---


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
