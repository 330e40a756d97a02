"""The parts of a letter: what coordinator and silos say to one another. Fixed layouts, no pickle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self, TypeVar, get_args

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from fedveil.crypto.agreement import KEY_BYTES
from fedveil.engine.federation.errors import Cause
from fedveil.protection.errors import ProtocolError
from fedveil.protection.wire import Reader, Writer

DIGEST_BYTES: Final = 32


class Part(Protocol):
    """One thing that a letter says: a frozen value with a body.

    Attributes:
        kind: number of the kind on the wire.
    """

    kind: ClassVar[int]

    def encode(self) -> bytes:
        """Return the body."""
        ...

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Return the part of a body, or raise ProtocolError."""
        ...


PARTS: Final[dict[int, type[Part]]] = {}
"""Every kind of part by its number."""

_P = TypeVar("_P")
_Only = TypeVar("_Only", bound=Part)


def _part(kind: int) -> Callable[[type[_P]], type[_P]]:
    """Register a class of parts under its number on the wire."""

    def register(cls: type[_P]) -> type[_P]:
        assert kind not in PARTS
        registered: Any = cls
        registered.kind = kind
        PARTS[kind] = registered
        return cls

    return register


@_part(1)
@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the coordinator proposes: the experiment, to the members of one federation.

    Attributes:
        experiment: the complete TOML document.
        membership: SHA-256 of the federation's membership (silos, keys, schema).
    """

    kind: ClassVar[int]
    experiment: str
    membership: bytes

    def encode(self) -> bytes:
        """Return digest and text."""
        return Writer().fixed(self.membership, DIGEST_BYTES).bytes() + self.experiment.encode()

    @classmethod
    def decode(cls, body: bytes) -> Terms:
        """Return the terms of a body."""
        reader = Reader(body)
        membership = reader.fixed(DIGEST_BYTES)
        return cls(experiment=_text(reader.rest()), membership=membership)


@_part(2)
@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A silo takes part.

    Attributes:
        counts: (|U|,) its records of each user, or empty where nobody needs them.
    """

    kind: ClassVar[int]
    counts: Int64[np.ndarray, " users"]

    def encode(self) -> bytes:
        """Return the counts."""
        return _counts(self.counts)

    @classmethod
    def decode(cls, body: bytes) -> Joined:
        """Return the acceptance of a body."""
        return cls(counts=_read_counts(body))


@_part(3)
@dataclass(frozen=True, kw_only=True)
class Refused:
    """A silo does not take part, or not any longer.

    Attributes:
        cause: what kind of reason.
        reason: in words, without a private value.
    """

    kind: ClassVar[int]
    cause: Cause
    reason: str

    def encode(self) -> bytes:
        """Return cause and reason."""
        return Writer().number(_CAUSES.index(self.cause), 1).bytes() + self.reason.encode()

    @classmethod
    def decode(cls, body: bytes) -> Refused:
        """Return the refusal of a body."""
        reader = Reader(body)
        number = reader.number(1)
        if number >= len(_CAUSES):
            raise ProtocolError(f"a refusal gives cause {number}, there are {len(_CAUSES)}")
        return cls(cause=_CAUSES[number], reason=_text(reader.rest()))


_CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)


@_part(4)
@dataclass(frozen=True, kw_only=True)
class Lost:
    """A silo does not know the session (it was restarted): the coordinator begins another one."""

    kind: ClassVar[int]

    def encode(self) -> bytes:
        """Return nothing."""
        return b""

    @classmethod
    def decode(cls, body: bytes) -> Lost:
        """Return the part of an empty body."""
        Reader(body).finish()
        return cls()


@_part(5)
@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """What every user holds over all silos, for weights by records.

    Attributes:
        counts: (|U|,) N_u.
    """

    kind: ClassVar[int]
    counts: Int64[np.ndarray, " users"]

    def encode(self) -> bytes:
        """Return the counts."""
        return _counts(self.counts)

    @classmethod
    def decode(cls, body: bytes) -> Totals:
        """Return the totals of a body."""
        return cls(counts=_read_counts(body))


@_part(6)
@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The work of one round.

    Attributes:
        round: counts from 1.
        model: (d,) float32, the global model to train from.
        drawn: (|U|,) who takes part; None: everybody.
    """

    kind: ClassVar[int]
    round: int
    model: Float32[np.ndarray, " d"]
    drawn: Bool[np.ndarray, " users"] | None

    def encode(self) -> bytes:
        """Return round, model and participants (one bit each)."""
        writer = Writer().number(self.round, 4).block(self.model.astype("<f4").tobytes())
        if self.drawn is not None:
            writer.number(len(self.drawn), 4).fixed(
                np.packbits(self.drawn).tobytes(), -(-len(self.drawn) // 8)
            )
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> Task:
        """Return the task of a body."""
        reader = Reader(body)
        number, model = reader.number(4), _numbers(reader.block(), "<f4")
        rest = reader.rest()
        if not rest:
            return cls(round=number, model=model, drawn=None)
        reader = Reader(rest)
        users = reader.number(4)
        bits = np.frombuffer(reader.fixed(-(-users // 8)), dtype=np.uint8)
        reader.finish()
        return cls(round=number, model=model, drawn=np.unpackbits(bits, count=users).astype(np.bool_))


@_part(9)
@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Who takes part in the round whose task follows, where the silos are not told: the same users, the same bytes.

    Attributes:
        commitment: SHA-256 of the users and of a random number that the coordinator keeps with them.
    """

    kind: ClassVar[int]
    commitment: bytes

    def encode(self) -> bytes:
        """Return the commitment."""
        return Writer().fixed(self.commitment, DIGEST_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> Drawn:
        """Return the part of a body."""
        reader = Reader(body)
        commitment = reader.fixed(DIGEST_BYTES)
        reader.finish()
        return cls(commitment=commitment)


@_part(7)
@dataclass(frozen=True, kw_only=True, eq=False)
class Vector:
    """A silo's sum of a round, with its share of the noise, in the open.

    Attributes:
        values: (d,) float64, multiples of the message's grid where the method has one.
    """

    kind: ClassVar[int]
    values: Float64[np.ndarray, " d"]

    def encode(self) -> bytes:
        """Return the values, little-endian."""
        return self.values.astype("<f8").tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Vector:
        """Return the vector of a body."""
        return cls(values=_numbers(body, "<f8"))


@_part(8)
@dataclass(frozen=True, kw_only=True)
class Relay:
    """A message of a protection's protocol; :class:`~fedveil.protection.messages.Envelope` reads it."""

    kind: ClassVar[int]
    message: bytes

    def encode(self) -> bytes:
        """Return the message."""
        return self.message

    @classmethod
    def decode(cls, body: bytes) -> Relay:
        """Return the part of a body."""
        return cls(message=body)


@_part(20)
@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A key to agree on a secret with, for the session of the letter that brings it.

    Attributes:
        public: 32 bytes, X25519.
    """

    kind: ClassVar[int]
    public: bytes

    def encode(self) -> bytes:
        """Return the key."""
        return Writer().fixed(self.public, KEY_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> Agreement:
        """Return the key of a body."""
        reader = Reader(body)
        public = reader.fixed(KEY_BYTES)
        reader.finish()
        return cls(public=public)


@_part(21)
@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A message that a silo's channel made of its sum, with its key; none but the coordinator can open it."""

    kind: ClassVar[int]
    sealed: bytes

    def encode(self) -> bytes:
        """Return the sealed bytes."""
        return self.sealed

    @classmethod
    def decode(cls, body: bytes) -> Sealed:
        """Return the part of a body."""
        return cls(sealed=body)


@_part(22)
@dataclass(frozen=True, kw_only=True)
class Learned:
    """A silo has the next model, on its disk; the coordinator has none.

    Attributes:
        tag: 32 bytes that silos with the same model have in common, and that tell nothing of it.
    """

    kind: ClassVar[int]
    tag: bytes

    def encode(self) -> bytes:
        """Return the tag."""
        return Writer().fixed(self.tag, KEY_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> Learned:
        """Return the part of a body."""
        reader = Reader(body)
        tag = reader.fixed(KEY_BYTES)
        reader.finish()
        return cls(tag=tag)


def only(parts: Sequence[Part], kind: type[_Only], silo: int) -> _Only:
    """Return the one part of a kind that an answer must have.

    Raises:
        ProtocolError: none, or several.
    """
    found = [part for part in parts if isinstance(part, kind)]
    if len(found) != 1:
        raise ProtocolError(f"sent {len(found)} parts of kind {kind.__name__} instead of 1", silo=silo)
    return found[0]


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a text is not UTF-8") from None


def _numbers(raw: bytes, kind: str) -> np.ndarray:
    """Return the array of a body; an array that is damaged is no array."""
    dtype = np.dtype(kind)
    if len(raw) % dtype.itemsize:
        raise ProtocolError(f"an array of {dtype.itemsize}-byte numbers has {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).astype(dtype.newbyteorder("="))


def _counts(counts: Int64[np.ndarray, " users"]) -> bytes:
    return counts.astype("<u4").tobytes()


def _read_counts(body: bytes) -> Int64[np.ndarray, " users"]:
    return _numbers(body, "<u4").astype(np.int64)
