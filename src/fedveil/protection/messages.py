"""The envelope every message travels in, and the messages that all protocols share.

    magic "FV" | version 1 | kind | run (16) | round (4) | attempt (2) | sender (2) | recipient (2) | length (8) | body

A message of another run, round or attempt, to somebody else, or seen before is refused by :class:`Inbox` before its
body is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol, Self, TypeVar

import numpy as np
from jaxtyping import UInt32, UInt64

from fedveil.crypto.agreement import KEY_BYTES, RUN_BYTES, Moment, SignedKey
from fedveil.protection.errors import ProtocolError
from fedveil.protection.wire import Reader, Writer

SERVER: Final = 0xFFFF
"""The server's number as sender or recipient; silos count from 0."""

LARGEST_SILOS: Final = 1000

_MAGIC: Final = b"FV"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(f">2sBB{RUN_BYTES}sIHHHQ")
SIGNATURE_BYTES: Final = 64


class Message(Protocol):
    """One kind of message: a frozen value with a body.

    Attributes:
        kind: number of the kind on the wire.
        purpose: what it is for, as the transcript prints it.
    """

    kind: ClassVar[int]
    purpose: ClassVar[str]

    def encode(self) -> bytes:
        """Return the body."""
        ...

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Return the message of a body, or raise ProtocolError."""
        ...


KINDS: Final[dict[int, type[Message]]] = {}
"""Every kind of message by its number."""

_M = TypeVar("_M")


def message(kind: int) -> Callable[[type[_M]], type[_M]]:
    """Register a message class under its number on the wire."""

    def register(cls: type[_M]) -> type[_M]:
        assert kind not in KINDS
        registered: Any = cls
        registered.kind = kind
        KINDS[kind] = registered
        return cls

    return register


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A message with its address; :meth:`encode` and :meth:`decode` are the only way to and from bytes."""

    moment: Moment
    sender: int
    recipient: int
    message: Message

    def encode(self) -> bytes:
        """Return the bytes to carry."""
        body = self.message.encode()
        moment = self.moment
        return (
            _HEADER.pack(
                _MAGIC,
                _VERSION,
                self.message.kind,
                moment.run,
                moment.round,
                moment.attempt,
                self.sender,
                self.recipient,
                len(body),
            )
            + body
        )

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Return the envelope of received bytes.

        Raises:
            ProtocolError: not a message of this version, an unknown kind, or a body that does not fit it.
        """
        if len(data) < _HEADER.size:
            raise ProtocolError(f"a message has at least {_HEADER.size} bytes, this one has {len(data)}")
        fields = _HEADER.unpack_from(data)
        magic, version, kind, run, round_number, attempt, sender, recipient, length = fields
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError(f"not a message of protocol version {_VERSION}")
        if kind not in KINDS:
            raise ProtocolError(f"messages of kind {kind} do not exist in version {_VERSION}")
        if length != len(data) - _HEADER.size:
            raise ProtocolError(f"a message announces {length} bytes and has {len(data) - _HEADER.size}")
        return cls(
            moment=Moment(run=run, round=round_number, attempt=attempt),
            sender=sender,
            recipient=recipient,
            message=KINDS[kind].decode(data[_HEADER.size :]),
        )

    @classmethod
    def from_silo(cls, data: bytes, sender: int, cohort: tuple[int, ...]) -> Envelope:
        """Return the envelope of what a silo sent to the server.

        Args:
            data: what it sent.
            sender: the silo at the other end of the channel, as the transport knows it.
            cohort: the silos that take part.

        Raises:
            ProtocolError: as :meth:`decode`, or another sender than the transport's, or one outside the cohort; names
                the silo.
        """
        try:
            envelope = cls.decode(data)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        if envelope.sender != sender or sender not in cohort:
            raise ProtocolError("sent a message as somebody else or outside its cohort", silo=sender)
        return envelope


class Inbox:
    """Lets through each message once, and only those of the moment that is being played.

    Args:
        owner: the party's own number.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._moment: Moment | None = None
        self._seen: set[tuple[int, int]] = set()

    def open(self, moment: Moment) -> None:
        """Begin a round or an attempt, which must come after every earlier one of the run.

        Raises:
            ProtocolError: it is not later than the last one, so its keys were used before.
        """
        last = self._moment
        if last is not None and (
            moment.run != last.run or (moment.round, moment.attempt) <= (last.round, last.attempt)
        ):
            raise ProtocolError(
                f"round {moment.round}, attempt {moment.attempt} does not follow round {last.round}, "
                f"attempt {last.attempt} of the same run; keys are used once"
            )
        self._moment = moment
        self._seen.clear()

    def accept(self, envelope: Envelope, *kinds: type[Message]) -> None:
        """Return if the message may be read now.

        Raises:
            ProtocolError: another run, round, attempt or recipient, a kind that is not awaited, or a replay.
        """
        sender = None if envelope.sender == SERVER else envelope.sender
        if envelope.recipient != self._owner:
            raise ProtocolError("a message is addressed to somebody else", silo=sender)
        if envelope.moment != self._moment:
            raise ProtocolError(
                f"a message belongs to another run, or to round {envelope.moment.round}, attempt "
                f"{envelope.moment.attempt}, which is not being played",
                silo=sender,
            )
        if not isinstance(envelope.message, kinds):
            raise ProtocolError(f"did not expect a message with {envelope.message.purpose} now", silo=sender)
        key = (envelope.sender, envelope.message.kind)
        if key in self._seen:
            raise ProtocolError(f"sent {envelope.message.purpose} twice (a replay)", silo=sender)
        self._seen.add(key)


@message(1)
@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A silo's agreement key, signed with its identity."""

    purpose: ClassVar[str] = "a signed public key"
    kind: ClassVar[int]
    key: SignedKey

    def encode(self) -> bytes:
        """Return key and signature."""
        return Writer().fixed(self.key.public, KEY_BYTES).fixed(self.key.signature, SIGNATURE_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> Announcement:
        """Return the announcement of a body."""
        reader = Reader(body)
        key = SignedKey(public=reader.fixed(KEY_BYTES), signature=reader.fixed(SIGNATURE_BYTES))
        reader.finish()
        return cls(key=key)


@message(2)
@dataclass(frozen=True, kw_only=True)
class Directory:
    """The signed keys of all silos of a cohort, relayed by the server."""

    purpose: ClassVar[str] = "the silos' signed public keys"
    kind: ClassVar[int]
    keys: tuple[tuple[int, SignedKey], ...]

    def encode(self) -> bytes:
        """Return silo, key and signature of each."""
        writer = Writer().number(len(self.keys), 2)
        for silo, key in self.keys:
            writer.number(silo, 2).fixed(key.public, KEY_BYTES).fixed(key.signature, SIGNATURE_BYTES)
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> Directory:
        """Return the directory of a body; the silos must ascend."""
        reader = Reader(body)
        keys = []
        for _ in range(reader.count(2, 2 + KEY_BYTES + SIGNATURE_BYTES)):
            silo = reader.number(2)
            keys.append(
                (silo, SignedKey(public=reader.fixed(KEY_BYTES), signature=reader.fixed(SIGNATURE_BYTES)))
            )
        reader.finish()
        check_ascending([silo for silo, _ in keys])
        return cls(keys=tuple(keys))


@message(3)
@dataclass(frozen=True, kw_only=True)
class RoundStart:
    """The server begins a round or another attempt of it, with these silos."""

    purpose: ClassVar[str] = "the start of a round"
    kind: ClassVar[int]
    cohort: tuple[int, ...]

    def encode(self) -> bytes:
        """Return the silos' numbers."""
        return encode_silos(self.cohort)

    @classmethod
    def decode(cls, body: bytes) -> RoundStart:
        """Return the start of a body; the silos must ascend."""
        return cls(cohort=decode_silos(body))


@message(4)
@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedVector:
    """A silo's vector under its masks: uniform words to whoever lacks one of them."""

    purpose: ClassVar[str] = "a masked vector"
    kind: ClassVar[int]
    words: UInt32[np.ndarray, " d"] | UInt64[np.ndarray, " d"]

    def encode(self) -> bytes:
        """Return the word size and the words (little-endian)."""
        return Writer().number(self.words.dtype.itemsize, 1).bytes() + self.words.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> MaskedVector:
        """Return the vector of a body (read-only, without a copy of the words)."""
        reader = Reader(body[:1])
        size = reader.number(1)
        if size not in (4, 8) or (len(body) - 1) % size:
            raise ProtocolError(f"a masked vector has words of 4 or 8 bytes, this one claims {size}")
        return cls(words=np.frombuffer(body, dtype=f"<u{size}", offset=1))


@message(5)
@dataclass(frozen=True, kw_only=True)
class RevealRequest:
    """All masked inputs of the attempt are in: the silos may give their own masks."""

    purpose: ClassVar[str] = "the request for the silos' own masks"
    kind: ClassVar[int]

    def encode(self) -> bytes:
        """Return nothing."""
        return b""

    @classmethod
    def decode(cls, body: bytes) -> RevealRequest:
        """Return the request of an empty body."""
        Reader(body).finish()
        return cls()


@message(6)
@dataclass(frozen=True, kw_only=True)
class OwnMask:
    """The seed of a silo's own mask; without it the sum stays hidden, with it nothing but the sum shows."""

    purpose: ClassVar[str] = "the seed of a silo's own mask"
    kind: ClassVar[int]
    seed: bytes

    def encode(self) -> bytes:
        """Return the seed."""
        return Writer().fixed(self.seed, KEY_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> OwnMask:
        """Return the seed of a body."""
        reader = Reader(body)
        seed = reader.fixed(KEY_BYTES)
        reader.finish()
        return cls(seed=seed)


def encode_silos(silos: tuple[int, ...]) -> bytes:
    """Return the body of a list of silos."""
    writer = Writer().number(len(silos), 2)
    for silo in silos:
        writer.number(silo, 2)
    return writer.bytes()


def decode_silos(body: bytes) -> tuple[int, ...]:
    """Return the list of silos of a body, which must ascend."""
    reader = Reader(body)
    silos = [reader.number(2) for _ in range(reader.count(2, 2))]
    reader.finish()
    check_ascending(silos)
    return tuple(silos)


def check_ascending(silos: list[int]) -> None:
    """Return if the silos' numbers ascend strictly and are those of silos."""
    if any(a >= b for a, b in pairwise(silos)) or any(silo >= LARGEST_SILOS for silo in silos):
        raise ProtocolError(f"a list of silos must ascend and stay below {LARGEST_SILOS}")
