"""Encode and decode the fields of messages: a class declares each field once, with its codec.

    @message(99, "where to connect")
    class Offer(Message):
        port: int = wire_field(number(2), Reveals.NOTHING)
        names: tuple[bytes, ...] = wire_field(repeated(BLOCK, size=1), Reveals.NOTHING)

is a frozen dataclass. Its bytes are a port of two bytes, a count of one byte, and that many blocks. Fields are sent
in the order of their declaration. A codec raises a ProtocolError for bytes that do not fit it. A message with another
byte format defines its own ``encode`` and ``decode``.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar, cast

from gmpy2 import mpz

from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Key, Reveals, reveals

# --- bytes ---

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
        position: offset of the first field in bytes.
    """

    def __init__(self, body: bytes, position: int = 0) -> None:
        self._body, self._position = body, position

    @property
    def n_remaining(self) -> int:
        """Number of bytes that are left."""
        return len(self._body) - self._position

    def fixed_bytes(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        if size > self.n_remaining:
            raise ProtocolError(f"a message ends {size - self.n_remaining} bytes early")
        self._position += size
        return self._body[self._position - size : self._position]

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
        width = self.number(4)
        if width != size:
            raise ProtocolError(f"numbers of {size} bytes are expected, the message has numbers of {width}")
        raw = self.fixed_bytes(count * size)
        return [mpz.from_bytes(raw[first : first + size], "big") for first in range(0, count * size, size)]

    def rest(self) -> bytes:
        """Read all bytes that are left."""
        return self.fixed_bytes(self.n_remaining)

    def finish(self) -> None:
        """Check that no bytes are left; raise a ProtocolError otherwise."""
        if self.n_remaining:
            raise ProtocolError(f"a message has {self.n_remaining} bytes too many")


# --- fields ---

_T = TypeVar("_T")
_U = TypeVar("_U")
_B = TypeVar("_B", bound="Body")


@dataclass(frozen=True)
class FieldCodec(Generic[_T]):
    """Codec of one value: how it is written to the body of a message and read from it.

    Attributes:
        write: appends a value to a body.
        read: reads a value from a body.
        least: bytes of the shortest value. It bounds an announced count of values by the bytes that are present.
    """

    write: Callable[[Writer, _T], object]
    read: Callable[[Reader], _T]
    least: int = 0

    def with_check(self, fits: Callable[[_T], bool], reason: str) -> FieldCodec[_T]:
        """Return a codec that raises a ProtocolError if a read value does not satisfy ``fits``."""

        def read(reader: Reader) -> _T:
            value = self.read(reader)
            if not fits(value):
                raise ProtocolError(reason)
            return value

        return FieldCodec(self.write, read, self.least)

    def mapped(self, to: Callable[[_U], _T], back: Callable[[_T], _U]) -> FieldCodec[_U]:
        """Return a codec of another type: apply ``to`` before writing and ``back`` after reading."""
        return FieldCodec(
            lambda writer, value: self.write(writer, to(value)),
            lambda reader: back(self.read(reader)),
            self.least,
        )


def number(size: int) -> FieldCodec[int]:
    """Return the codec of an unsigned big-endian integer of ``size`` bytes."""
    return FieldCodec(
        lambda writer, value: writer.number(value, size), lambda reader: reader.number(size), size
    )


def fixed_bytes(size: int) -> FieldCodec[bytes]:
    """Return the codec of exactly ``size`` bytes."""
    return FieldCodec(
        lambda writer, value: writer.fixed_bytes(value, size), lambda reader: reader.fixed_bytes(size), size
    )


BLOCK: Final = FieldCodec(Writer.block, Reader.block, least=8)
"""Codec of bytes of any length, preceded by their length (8 bytes)."""

REST: Final = FieldCodec(Writer.rest, Reader.rest)
"""Codec of bytes of any length that run to the end of the message."""


def integers(size: int) -> FieldCodec[tuple[mpz, ...]]:
    """Return the codec of unsigned integers of ``size`` bytes each, preceded by their count and ``size``."""
    return FieldCodec(
        lambda writer, values: writer.integers(values, size), lambda reader: tuple(reader.integers(size)), 8
    )


def pair(first: FieldCodec[_T], second: FieldCodec[_U]) -> FieldCodec[tuple[_T, _U]]:
    """Return the codec of two values, one after the other."""

    def write(writer: Writer, value: tuple[_T, _U]) -> None:
        first.write(writer, value[0])
        second.write(writer, value[1])

    return FieldCodec(
        write, lambda reader: (first.read(reader), second.read(reader)), first.least + second.least
    )


def repeated(item: FieldCodec[_T], *, size: int, most: int = LARGEST_COUNT) -> FieldCodec[tuple[_T, ...]]:
    """Return the codec of up to ``most`` values of one codec, preceded by their count in ``size`` bytes."""

    def write(writer: Writer, values: tuple[_T, ...]) -> None:
        writer.number(len(values), size)
        for value in values:
            item.write(writer, value)

    def read(reader: Reader) -> tuple[_T, ...]:
        return tuple(item.read(reader) for _ in range(reader.count(size, item.least, most)))

    return FieldCodec(write, read, least=size)


def wire_field(
    layout: FieldCodec[_T], content: Reveals, under: Key | None = None, besides: Reveals | None = None
) -> _T:
    """Declare a field of a :class:`Body`: its codec, and what it discloses to which reader.

    Args:
        layout: codec of the field; the type of its values is the type of the field.
        content: information about private records that the field discloses.
        under: key that opens the field; None if every reader can read it.
        besides: information that the field discloses to every reader even without the key.
    """
    return cast(_T, dataclasses.field(metadata={"layout": layout, **reveals(content, under, besides)}))


def custom_field(content: Reveals, under: Key | None = None) -> Any:
    """Declare a field that its class encodes itself, and what it discloses (see :func:`wire_field`)."""
    return dataclasses.field(metadata=reveals(content, under))


class Body:
    """Value whose bytes are its fields, in the order of their declaration."""

    def encode(self) -> bytes:
        """Return the bytes of all fields."""
        writer = Writer()
        message_codec(type(self)).write(writer, self)
        return writer.bytes()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the value that the bytes encode; raise a ProtocolError if the bytes do not fit the fields."""
        reader = Reader(data)
        value = message_codec(cls).read(reader)
        reader.finish()
        return value


def message_codec(kind: type[_B]) -> FieldCodec[_B]:
    """Return the codec of all fields of a class, one after the other."""
    fields: Any = kind
    layouts: dict[str, FieldCodec[Any]] = {
        field.name: field.metadata["layout"] for field in dataclasses.fields(fields)
    }

    def write(writer: Writer, value: _B) -> None:
        for name, layout in layouts.items():
            layout.write(writer, getattr(value, name))

    def read(reader: Reader) -> _B:
        return kind(**{name: layout.read(reader) for name, layout in layouts.items()})

    return FieldCodec(write, read, sum(layout.least for layout in layouts.values()))
