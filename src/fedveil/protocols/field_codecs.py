"""Fields of messages: a class names each field once, with its layout, and its bytes follow.

    @message(99, "where to connect")
    class Offer(Message):
        port: int = sent_as(number(2))
        names: tuple[bytes, ...] = sent_as(many(BLOCK, size=1))

is a frozen dataclass of two bytes, then a count of one byte and so many blocks. Fields are sent in the order in which
the class names them. A layout refuses bytes that do not fit it with a ProtocolError; a message whose bytes are not
field by field has its own ``encode`` and ``decode``.
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
    """How a value is written and read.

    Attributes:
        write: appends it to a body.
        read: takes it off one.
        least: bytes of the shortest value, so that an announced count of them is bounded by the bytes that are there.
    """

    write: Callable[[Writer, _T], object]
    read: Callable[[Reader], _T]
    least: int = 0

    def with_check(self, fits: Callable[[_T], bool], reason: str) -> FieldCodec[_T]:
        """Return the layout that refuses to read values that do not fit, with the reason."""

        def read(reader: Reader) -> _T:
            value = self.read(reader)
            if not fits(value):
                raise ProtocolError(reason)
            return value

        return FieldCodec(self.write, read, self.least)

    def mapped(self, to: Callable[[_U], _T], back: Callable[[_T], _U]) -> FieldCodec[_U]:
        """Return the layout of what is turned into this one's value to be written, and back when read."""
        return FieldCodec(
            lambda writer, value: self.write(writer, to(value)),
            lambda reader: back(self.read(reader)),
            self.least,
        )


def number(size: int) -> FieldCodec[int]:
    """Return the layout of an unsigned number of ``size`` bytes."""
    return FieldCodec(
        lambda writer, value: writer.number(value, size), lambda reader: reader.number(size), size
    )


def fixed_bytes(size: int) -> FieldCodec[bytes]:
    """Return the layout of exactly ``size`` bytes."""
    return FieldCodec(
        lambda writer, value: writer.fixed_bytes(value, size), lambda reader: reader.fixed_bytes(size), size
    )


BLOCK: Final = FieldCodec(Writer.block, Reader.block, least=8)
"""Bytes of any length, preceded by it (8 bytes)."""

REST: Final = FieldCodec(Writer.rest, Reader.rest)
"""Bytes of any length, to the message's end."""


def integers(size: int) -> FieldCodec[tuple[mpz, ...]]:
    """Return the layout of unsigned numbers of ``size`` bytes each, preceded by their count and ``size``."""
    return FieldCodec(
        lambda writer, values: writer.integers(values, size), lambda reader: tuple(reader.integers(size)), 8
    )


def pair(first: FieldCodec[_T], second: FieldCodec[_U]) -> FieldCodec[tuple[_T, _U]]:
    """Return the layout of two values, one behind the other."""

    def write(writer: Writer, value: tuple[_T, _U]) -> None:
        first.write(writer, value[0])
        second.write(writer, value[1])

    return FieldCodec(
        write, lambda reader: (first.read(reader), second.read(reader)), first.least + second.least
    )


def repeated(item: FieldCodec[_T], *, size: int, most: int = LARGEST_COUNT) -> FieldCodec[tuple[_T, ...]]:
    """Return the layout of up to ``most`` values of one layout, preceded by their count in ``size`` bytes."""

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
    """Return the field of a :class:`Body` that has a layout (its type is the layout's), and what it tells to whom.

    Args:
        layout: its bytes.
        what: what it tells of private records.
        under: who can open it; None: every reader.
        besides: what it tells every reader all the same.
    """
    return cast(_T, dataclasses.field(metadata={"layout": layout, **reveals(what, under, besides)}))


def custom_field(what: Reveals, under: Key | None = None) -> Any:
    """Return a field whose bytes its class writes by itself, and what it tells to whom."""
    return dataclasses.field(metadata=reveals(what, under))


class Body:
    """A value whose bytes are its fields, in the order in which its class names them."""

    def encode(self) -> bytes:
        """Return the bytes."""
        writer = Writer()
        message_codec(type(self)).write(writer, self)
        return writer.bytes()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the value of bytes, or raise ProtocolError."""
        reader = Reader(data)
        value = message_codec(cls).read(reader)
        reader.finish()
        return value


def message_codec(kind: type[_B]) -> FieldCodec[_B]:
    """Return the layout of a class's fields, one behind the other."""
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
