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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar, cast

from gmpy2 import mpz

from fedveil.privacy.claims import Key, Reveals, reveals
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.wire import LARGEST_COUNT, Reader, Writer

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
    layout: FieldCodec[_T], what: Reveals, under: Key | None = None, besides: Reveals | None = None
) -> _T:
    """Declare a field of a :class:`Body`: its codec, and what it discloses to which reader.

    Args:
        layout: codec of the field; the type of its values is the type of the field.
        what: information about private records that the field discloses.
        under: key that opens the field; None if every reader can read it.
        besides: information that the field discloses to every reader even without the key.
    """
    return cast(_T, dataclasses.field(metadata={"layout": layout, **reveals(what, under, besides)}))


def custom_field(what: Reveals, under: Key | None = None) -> Any:
    """Declare a field that its class encodes itself, and what it discloses (see :func:`wire_field`)."""
    return dataclasses.field(metadata=reveals(what, under))


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
