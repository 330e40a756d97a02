"""Write and read the bytes of messages: fixed layouts, checked lengths, big-endian integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from gmpy2 import mpz

from fedveil.protocols.errors import ProtocolError

LARGEST_COUNT: Final = 2**28
"""Most items of one list in a message."""


class Writer:
    """Writer that appends fields to the body of a message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def number(self, value: int, size: int) -> Writer:
        """Append an unsigned integer of ``size`` bytes."""
        self._parts.append(value.to_bytes(size, "big"))
        return self

    def fixed_bytes(self, value: bytes, size: int) -> Writer:
        """Append exactly ``size`` bytes."""
        if len(value) != size:
            raise ProtocolError(f"a field of {size} bytes was given {len(value)}")
        self._parts.append(value)
        return self

    def block(self, value: bytes) -> Writer:
        """Append bytes of any length, preceded by their length (8 bytes)."""
        self._parts += [struct.pack(">Q", len(value)), value]
        return self

    def integers(self, values: Sequence[mpz], size: int) -> Writer:
        """Append a list of unsigned integers of ``size`` bytes each, preceded by count and size."""
        self._parts.append(struct.pack(">II", len(values), size))
        self._parts += [int(value).to_bytes(size, "big") for value in values]
        return self

    def rest(self, value: bytes) -> Writer:
        """Append bytes that run to the end of the body."""
        self._parts.append(value)
        return self

    def bytes(self) -> bytes:
        """Return the body."""
        return b"".join(self._parts)


class Reader:
    """Reader of the fields of a body, in the order in which they were written.

    Every method raises a ProtocolError if the body ends before the requested field.

    Args:
        body: bytes of the message.
        at: offset of the first field in bytes.
    """

    def __init__(self, body: bytes, at: int = 0) -> None:
        self._body, self._at = body, at

    @property
    def n_remaining(self) -> int:
        """Number of bytes that are left."""
        return len(self._body) - self._at

    def fixed_bytes(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        if size > self.n_remaining:
            raise ProtocolError(f"a message ends {size - self.n_remaining} bytes early")
        self._at += size
        return self._body[self._at - size : self._at]

    def number(self, size: int) -> int:
        """Read an unsigned integer of ``size`` bytes."""
        return int.from_bytes(self.fixed_bytes(size), "big")

    def count(self, size: int, item_bytes: int, most: int = LARGEST_COUNT) -> int:
        """Read a count of at most ``most`` items of at least ``item_bytes`` bytes each.

        Raises:
            ProtocolError: more than ``most`` items, or more items than the remaining bytes can hold.
        """
        value = self.number(size)
        # Bounds memory by the bytes received: a short message cannot announce 2^28 items and have them allocated.
        if value > most or value * item_bytes > self.n_remaining:
            raise ProtocolError(
                f"a message announces {value} items and has {self.n_remaining} bytes left for them"
            )
        return value

    def block(self) -> bytes:
        """Read bytes preceded by their length (8 bytes)."""
        return self.fixed_bytes(self.number(8))

    def integers(self, size: int) -> list[mpz]:
        """Read a list of unsigned integers, which must have ``size`` bytes each."""
        count = self.count(4, size)
        found = self.number(4)
        if found != size:
            raise ProtocolError(f"numbers of {size} bytes are expected, the message has numbers of {found}")
        raw = self.fixed_bytes(count * size)
        return [mpz.from_bytes(raw[first : first + size], "big") for first in range(0, count * size, size)]

    def rest(self) -> bytes:
        """Read all bytes that are left."""
        return self.fixed_bytes(self.n_remaining)

    def finish(self) -> None:
        """Check that no bytes are left; raise a ProtocolError otherwise."""
        if self.n_remaining:
            raise ProtocolError(f"a message has {self.n_remaining} bytes too many")
