"""Votes for coordinates: secret orders of the coordinates, the largest of a vector, bitmaps as bytes, counts.

A ballot is a bitmap of d bits in an order that the voters share and the counter lacks. A fresh order for every round
and attempt makes a ballot a uniformly random set to the counter, but for ties (:func:`secret_order`): it sees how
ballots overlap, and no coordinate. Of equal values, such as the zeros of a voter without records, each voter takes
those that come first in an order of its own: the first in the order of all would be seen in a ballot, and with them how
many values are not zero.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.protocols.errors import ProtocolError
from fedveil.randomness import KeyedStream

LARGEST_LENGTH: Final = 2**28
_RAW, _GAPS = 0, 1
_CONTINUED: Final = 255  # a gap of 255 or more goes on in the next byte

Order = Int64[np.ndarray, " d"]
"""order[p] is the coordinate at place p of a ballot."""


def secret_order(key: bytes, length: int) -> Order:
    """Return the order of the coordinates that a key stands for; both holders draw the same.

    Coordinates are sorted by words of the key's stream, of which 64 - ceil(log2 d) bits are random. Those that tie, of
    11 million about 60 neighbours, stay in natural order.

    Args:
        key: 32 bytes that serve no other order.
        length: d, at most 2^28.
    """
    index = np.uint64((1 << max(1, (length - 1).bit_length())) - 1)
    words = KeyedStream(key).uint64(length) & ~index
    words |= np.arange(length, dtype=np.uint64)
    words.sort()
    words &= index
    return words.view(np.int64)


def largest(
    values: Float64[np.ndarray, " d"] | Int64[np.ndarray, " d"], count: int, key: bytes | None = None
) -> Bool[np.ndarray, " d"]:
    """Return which ``count`` values are the largest; of equal ones those that come first.

    Args:
        values: any numbers.
        count: how many, at most d.
        key: 32 bytes that stand for an order of equal values; None: the order of the values.

    >>> largest(np.array([5, 7, 5, 9, 5]), 3).astype(int).tolist()
    [1, 1, 0, 1, 0]
    """
    if count == 0:
        return np.zeros(len(values), dtype=np.bool_)
    least = np.partition(values, len(values) - count)[len(values) - count]
    chosen: np.ndarray = values > least
    ties, left = np.flatnonzero(values == least), count - int(chosen.sum())
    if key is not None and left < len(ties):
        ties = ties[secret_order(key, len(ties))]
    chosen[ties[:left]] = True
    return chosen


def encode_bitmap(bits: Bool[np.ndarray, " d"]) -> bytes:
    """Return a bitmap in the shorter of two forms: d bits, or the gaps between its ones, a byte each below 255."""
    raw = np.packbits(bits).tobytes()
    gaps = np.diff(np.flatnonzero(bits), prepend=-1) - 1
    if len(gaps) + int((gaps // _CONTINUED).sum()) >= len(raw):
        return bytes([_RAW]) + raw
    ends = np.cumsum(gaps // _CONTINUED + 1) - 1
    steps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _CONTINUED, dtype=np.uint8)
    steps[ends] = gaps % _CONTINUED
    return bytes([_GAPS]) + steps.tobytes()


def decode_bitmap(data: bytes, length: int, ones: int) -> Bool[np.ndarray, " d"]:
    """Return the bitmap of received bytes.

    Args:
        data: what :func:`encode_bitmap` gave.
        length: d.
        ones: how many bits must be set.

    Raises:
        ProtocolError: another length, another number of ones, or bytes that no bitmap has.
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
    found = int(bits.sum())
    if found != ones:
        raise ProtocolError(f"a bitmap has {found} ones; {ones} are due")
    return bits
