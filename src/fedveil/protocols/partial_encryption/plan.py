"""Define the public plan of partial encryption, on which all parties of a run agree, with its ballots and messages.

Silos vote for the coordinates to encrypt. A ballot is a bitmap of d bits in an order that the silos share and the
server does not know. The order is fresh for every round and attempt. A ballot is therefore a uniformly random set to
the server, except for ties of the order (:func:`secret_order`). The server sees how ballots overlap, and no coordinate.

A silo breaks ties between equal values (for example the zeros of a silo without records) by an order of its own. If
it took the first in the common order instead, a ballot would show these coordinates, and with them the number of
values that are not zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64, UInt32

from fedveil.crypto.ckks import FINGERPRINT_BYTES, CkksParameters
from fedveil.crypto.key_agreement import KEY_BYTES
from fedveil.errors import CryptoError, ProtocolError
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Key, Reveals
from fedveil.privacy.noise import NOISE_REACH, DiscreteGaussian, grid_law
from fedveil.protocols.field_codecs import REST, Reader, Writer, custom_field, wire_field
from fedveil.protocols.messages import Message, message
from fedveil.randomness import KeyedStream, PrivacyRandomness

# --- ballots ---

LARGEST_LENGTH: Final = 2**28
_RAW, _GAPS = 0, 1
_CONTINUED: Final = 255  # a byte of 255 adds 255 to the gap, which continues in the next byte

Order = Int64[np.ndarray, " d"]
"""Permutation of the coordinates: order[p] is the coordinate at position p of a ballot."""


def secret_order(key: bytes, length: int) -> Order:
    """Derive the secret order of d coordinates from a key; all holders of the key derive the same order.

    Coordinates are sorted by words of the key's stream, of which 64 - ceil(log2 d) bits are random. Coordinates whose
    random bits tie stay in natural order. Of 11 million coordinates, about 60 tie with a neighbour.

    Args:
        key: 32 bytes that no other order uses.
        length: d, at most 2^28.

    Returns:
        (d,) int64, see :data:`Order`.
    """
    # The index replaces the low bits of a random word: one in-place sort of 8 bytes per coordinate, no argsort.
    index = np.uint64((1 << max(1, (length - 1).bit_length())) - 1)
    words = KeyedStream(key).uint64(length) & ~index
    words |= np.arange(length, dtype=np.uint64)
    words.sort()
    words &= index
    return words.view(np.int64)


def largest(
    values: Float64[np.ndarray, " d"] | Int64[np.ndarray, " d"], count: int, key: bytes | None = None
) -> Bool[np.ndarray, " d"]:
    """Select the ``count`` largest values; of equal values it takes the first in an order.

    Args:
        values: (d,) numbers.
        count: number of values to select, at most d.
        key: 32 bytes from which the order of equal values is derived; None takes the order of ``values``.

    Returns:
        (d,) bool, True for the selected values.

    >>> largest(np.array([5, 7, 5, 9, 5]), 3).astype(int).tolist()
    [1, 1, 0, 1, 0]
    """
    if count == 0:
        return np.zeros(len(values), dtype=np.bool_)
    # np.partition finds the count-th largest value in O(d); only values equal to it need an order.
    least = np.partition(values, len(values) - count)[len(values) - count]
    chosen: np.ndarray = values > least
    ties, needed = np.flatnonzero(values == least), count - int(chosen.sum())
    if key is not None and needed < len(ties):
        ties = ties[secret_order(key, len(ties))]
    chosen[ties[:needed]] = True
    return chosen


def encode_bitmap(bits: Bool[np.ndarray, " d"]) -> bytes:
    """Encode a bitmap in the shorter of two forms: d bits, or the gaps between its ones as bytes."""
    raw = np.packbits(bits).tobytes()
    gaps = np.diff(np.flatnonzero(bits), prepend=-1) - 1
    if len(gaps) + int((gaps // _CONTINUED).sum()) >= len(raw):
        return bytes([_RAW]) + raw
    ends = np.cumsum(gaps // _CONTINUED + 1) - 1
    # A gap of 255 a + b is written as a bytes of 255 and one byte b; `ends` are the positions of the last bytes.
    steps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _CONTINUED, dtype=np.uint8)
    steps[ends] = gaps % _CONTINUED
    return bytes([_GAPS]) + steps.tobytes()


def decode_bitmap(data: bytes, length: int, ones: int) -> Bool[np.ndarray, " d"]:
    """Decode the bitmap of received bytes.

    Args:
        data: bytes from :func:`encode_bitmap`.
        length: d, number of bits.
        ones: number of bits that must be set.

    Raises:
        ProtocolError: another length, another number of ones, or bytes that encode no bitmap.
    """
    form, body = data[:1], np.frombuffer(data, dtype=np.uint8, offset=min(1, len(data)))
    if form == bytes([_RAW]):
        if len(body) != -(-length // 8):
            raise ProtocolError(
                f"a bitmap of {length} bits has {-(-length // 8)} bytes, this one {len(body)}"
            )
        bits = np.unpackbits(body).view(np.bool_)
        if bits[length:].any():
            raise ProtocolError("a bitmap has ones behind its end")
        bits = bits[:length]
    elif form == bytes([_GAPS]):
        ends = body < _CONTINUED
        count = int(ends.sum())
        places = np.cumsum(body, dtype=np.int64)[ends] + np.arange(count)
        if (len(body) and not ends[-1]) or (count and places[-1] >= length):
            raise ProtocolError(f"the gaps of a bitmap run beyond its {length} bits")
        bits = np.zeros(length, dtype=np.bool_)
        bits[places] = True
    else:
        raise ProtocolError("a bitmap comes in a form that does not exist")
    n_ones = int(bits.sum())
    if n_ones != ones:
        raise ProtocolError(f"a bitmap has {n_ones} ones; {ones} are due")
    return bits


# --- the plan ---


@dataclass(frozen=True, kw_only=True)
class PartialPlan:
    """Public sizes, limits and partition rule of a run under partial encryption.

    Attributes:
        silos: number of silos.
        length: d, number of coordinates of a vector.
        ratio: r_0, fraction of the coordinates that the first round encrypts.
        decay: lambda, factor by which the fraction decreases from round to round.
        ballots: "plain" shows the server the ballot of each silo, "secagg" only the sum of all ballots. With "none"
            no silo votes, and every silo computes the partition from values that all silos have.
        pick: whether a silo votes for its coordinates of largest or of smallest absolute value.
        clear_limit: largest absolute value of one silo's coordinate in the clear, noise included, in grid units.
        hidden_limit: largest absolute value of one silo's encrypted coordinate, noise included, in grid units.
        ballot_limit: largest absolute value of one silo's noise on one count of votes; 0 if votes have no noise.

    Raises:
        ProtocolError: fewer than two silos, a fraction or limit out of range, or sums that do not fit.
    """

    silos: int
    length: int
    ratio: float
    decay: float = 1.0
    ballots: Literal["plain", "secagg", "none"] = "plain"
    pick: Literal["largest", "smallest"] = "largest"
    clear_limit: int
    hidden_limit: int
    ballot_limit: int = 0

    def __post_init__(self) -> None:
        """Check, before any training, the conditions that would end a round."""
        if self.silos < 2 or not 1 <= self.length <= LARGEST_LENGTH:
            raise ProtocolError(
                f"partial encryption needs at least 2 silos and 1 to 2^28 coordinates, not {self.silos} silos and "
                f"{self.length} coordinates: one silo's decrypted sum would be its own update"
            )
        if not 0 <= self.ratio <= 1 or not 0 < self.decay <= 1:
            raise ProtocolError(
                f"the encrypted share is r = {self.ratio} and its decay lambda = {self.decay}; "
                "0 <= r <= 1 and 0 < lambda <= 1 are possible"
            )
        exact = self.clear_limit <= 2**53 and self.silos * self.clear_limit < 2**63
        if min(self.clear_limit, self.hidden_limit) < 1 or not exact:
            raise ProtocolError(
                f"{self.silos} silos with values up to {self.clear_limit} grid units in clear: a limit of 1 at least "
                "and of 2^53 at most, beyond which float64 rounds a sum with its noise, and sums below 2^63 are needed"
            )
        if self.ballot_limit and self.ballots != "secagg":
            raise ProtocolError(f"noise on ballots = {self.ballots!r} gives no privacy; take 'secagg'")
        if self.silos * (self.ballot_limit + 1) >= 2**31:
            raise ProtocolError(f"counts with noise up to {self.ballot_limit} do not fit 32 bits")
        try:
            room = self.ckks.limit
        except CryptoError as error:
            raise ProtocolError(str(error)) from error
        if self.hidden_limit > room:
            raise ProtocolError(
                f"encrypted sums hold values of up to {self.hidden_limit} grid units from at most "
                f"{self.silos * room // self.hidden_limit} silos, not from {self.silos}; take fewer silos, a "
                "smaller bound of what a silo sends (with weights by records all users may be in one), or secure "
                "aggregation"
            )

    @cached_property
    def ckks(self) -> CkksParameters:
        """Parameters of the CKKS encryption, which follow from the number of silos."""
        return CkksParameters(silos=self.silos)

    @property
    def clear_bytes(self) -> int:
        """Bytes of one silo's number in the clear."""
        return _signed_bytes(self.clear_limit)

    @property
    def sum_bytes(self) -> int:
        """Bytes of one coordinate of the sum in the clear."""
        return _signed_bytes(self.silos * self.clear_limit)

    def n_encrypted(self, round_number: int) -> int:
        """Return the number of encrypted coordinates of round t: floor(r_0 lambda^(t-1) d).

        The number is at least 1 if r_0 > 0, and 0 if r_0 = 0.
        """
        share = self.ratio * self.decay ** (round_number - 1)
        if share == 0 and self.ratio == 0:
            return 0
        # The factor 1 + 2^-40 undoes rounding of float64: 0.29 * 100 is below 29.
        return max(1, math.floor(share * self.length * (1 + 2.0**-40)))

    def votes(self, round_number: int) -> bool:
        """Return whether silos vote in a round; they do not if the partition is everything, nothing or public."""
        return self.ballots != "none" and 0 < self.n_encrypted(round_number) < self.length

    @property
    def count_type(self) -> np.dtype[np.integer]:
        """Dtype of a masked count of votes, wide enough that no count overflows into its neighbour."""
        if self.ballot_limit:
            return np.dtype("<i4")
        return np.dtype("u1") if self.silos < 2**8 else np.dtype("<u2")

    @property
    def count_words(self) -> int:
        """Number of 32-bit words that hold the counts of all coordinates."""
        return -(-self.length * self.count_type.itemsize // 4)

    def pack_counts(self, counts: Int64[np.ndarray, " d"]) -> UInt32[np.ndarray, " w"]:
        """Pack (d,) votes with their noise into 32-bit words, which are then masked."""
        fields = np.zeros(4 * self.count_words // self.count_type.itemsize, dtype=self.count_type)
        fields[: self.length] = counts
        return fields.view("<u4")

    def unpack_counts(self, words: UInt32[np.ndarray, " w"]) -> Int64[np.ndarray, " d"]:
        """Unpack the (d,) counts from the sum of all silos' words."""
        return words.view(self.count_type)[: self.length].astype(np.int64)


def _signed_bytes(limit: int) -> int:
    return (limit.bit_length() + 8) // 8


# --- encoding of one part of a message ---


@dataclass(frozen=True, kw_only=True)
class PartEncoding:
    """Bound, noise and grid of one part of a message (in the clear, or encrypted).

    Attributes:
        bound: l2 bound that is enforced on this part separately; None if the whole message was bounded, or if no
            bound applies.
        noise_std: standard deviation of the noise, in the unit of the update; 0 for no noise.
        noise_grid: grid of the values to which the noise is added, a power of two, in the unit of the update.
        finest: lower limit for the step of the noise's grid, if sums cannot hold finer steps; a power of two, or 0.
        largest: largest absolute value of a number before the noise. A larger number is clipped to it rather than
            refused, because a refusal would disclose the number's size to the server.
    """

    bound: Bound | None = None
    noise_std: float = 0.0
    noise_grid: float = 1.0
    finest: float = 0.0
    largest: float = 1.0

    @property
    def law(self) -> DiscreteGaussian | None:
        """Distribution of the noise; None if the part has no noise."""
        return grid_law(self.noise_std, self.noise_grid, self.finest) if self.noise_std else None

    @property
    def grid(self) -> float:
        """Step of the integers, a power of two, in the unit of the update."""
        return self.noise_grid if self.law is None else self.law.grid

    @property
    def limit(self) -> int:
        """Largest absolute value of an integer of this part, noise included, in grid units."""
        return math.ceil((self.largest + NOISE_REACH * self.noise_std) / self.grid)

    def units(
        self, values: Float64[np.ndarray, " n"], privacy: PrivacyRandomness, *path: str | int
    ) -> Int64[np.ndarray, " n"]:
        """Bound the part, add its noise and round it to its grid.

        Args:
            values: (n,) numbers of the part, in the unit of the update.
            privacy: source of the noise.
            path: name of the noise stream.

        Returns:
            (n,) int64 in grid units.
        """
        if len(values) == 0:
            return np.zeros(0, dtype=np.int64)
        if self.bound is not None:
            row = torch.from_numpy(values.astype(np.float32))[None]
            weight = torch.ones(1, dtype=torch.float64)
            values = self.bound.quantize_(row, self.bound.norms(row), weight)[0].double().numpy()
            values = values * self.bound.grid
        values = np.clip(values, -self.largest, self.largest)
        if self.law is not None:
            values = values + self.law.sample((len(values),), privacy.stream(*path))
        return np.rint(values / self.grid).astype(np.int64)


def finest_grid_step(std: float, largest: float, silos: int) -> float:
    """Return the finest grid step with which the encrypted sum can hold numbers with their noise.

    Args:
        std: standard deviation of the noise of one number.
        largest: largest absolute value of a number before the noise.
        silos: number of ciphertexts in the sum.

    Raises:
        CryptoError: so many silos that no useful sum fits.
    """
    return (largest + NOISE_REACH * std) / CkksParameters(silos=silos).limit


WHOLE_NUMBERS: Final = PartEncoding(largest=2.0**52)
"""Encoding of numbers that are integers already, without bound and noise."""


# --- messages, in addition to those that all protocols share ---

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


def _numbers(reader: Reader, dtype: str) -> np.ndarray:
    content = reader.block()
    if len(content) % 8:
        raise ProtocolError(f"kept numbers of 8 bytes have {len(content)} bytes")
    return np.frombuffer(content, dtype=dtype)


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
            np.array_equal(own_array, other_array)
            for own_array, other_array in (
                (self.partition, other.partition),
                (self.clear, other.clear),
                (self.hidden, other.hidden),
            )
        )

    __hash__ = None  # type: ignore[assignment]
