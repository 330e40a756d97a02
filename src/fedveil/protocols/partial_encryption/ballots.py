"""Vote for coordinates in secret orders: ballots, selection of the largest counts, bitmaps.

A ballot is a bitmap of d bits in an order that the silos share and the server does not know. The order is fresh for
every round and attempt. A ballot is therefore a uniformly random set to the server, except for ties of the order
(:func:`secret_order`). The server sees how ballots overlap, and no coordinate.

A silo breaks ties between equal values (for example the zeros of a silo without records) by an order of its own. If
it took the first in the common order instead, a ballot would show these coordinates, and with them the number of
values that are not zero.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.protocols.errors import ProtocolError
from fedveil.randomness import KeyedStream

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
    ties, left = np.flatnonzero(values == least), count - int(chosen.sum())
    if key is not None and left < len(ties):
        ties = ties[secret_order(key, len(ties))]
    chosen[ties[:left]] = True
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
    found = int(bits.sum())
    if found != ones:
        raise ProtocolError(f"a bitmap has {found} ones; {ones} are due")
    return bits
