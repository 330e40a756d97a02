"""Define the envelope of every message, and the messages that all protocols share.

    magic "FV" | version 1 | kind | run (16) | round (4) | attempt (2) | sender (2) | recipient (2) | length (8) |
    body

Sizes are in bytes, integers are big-endian. :class:`Inbox` refuses a message of another run, round or attempt, a
message for another recipient, and a repeated message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final, TypeVar, dataclass_transform

import numpy as np

from fedveil.crypto.key_agreement import KEY_BYTES, RUN_BYTES, RoundId, SignedKey
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.crypto.masks import Words
from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Key, Reveals, check_reveals
from fedveil.protocols.field_codecs import (
    Body,
    FieldCodec,
    Reader,
    Writer,
    custom_field,
    fixed_bytes,
    number,
    pair,
    repeated,
    wire_field,
)

SERVER: Final = 0xFFFF
"""Number of the server as sender or recipient; silos are numbered from 0."""

LARGEST_SILOS: Final = 1000

WORD_BYTES: Final = (2, 3, 4, 8)
"""Sizes of a masked word on the wire."""

_MAGIC: Final = b"FV"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(f">2sBB{RUN_BYTES}sIHHHQ")


class Message(Body):
    """Base class of one kind of message: a frozen value with a body.

    Attributes:
        kind: number of the kind on the wire.
        purpose: content of the message in words, as the transcript prints it.
    """

    kind: ClassVar[int]
    purpose: ClassVar[str]


KINDS: Final[dict[int, type[Message]]] = {}
"""Every kind of message by its number."""

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(wire_field, custom_field))
def message(kind: int, purpose: str, *, eq: bool = True) -> Callable[[type[_M]], type[_M]]:
    """Make a class a frozen dataclass and register it under its number on the wire.

    Args:
        kind: number of the kind on the wire.
        purpose: content of the message in words, as the transcript prints it.
        eq: whether two messages can be compared; False if they hold arrays.

    Raises:
        TypeError: a field does not declare what it discloses, or the number is taken; those from 128 are free.
    """

    def register(cls: type[_M]) -> type[_M]:
        if kind in KINDS:
            raise TypeError(
                f"message number {kind} is that of {KINDS[kind].__name__}; numbers from 128 are free"
            )
        cls.kind, cls.purpose = kind, purpose
        KINDS[kind] = cls
        return check_reveals(dataclass(frozen=True, kw_only=True, eq=eq)(cls))

    return register


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """Message with its round, sender and recipient; only :meth:`encode` and :meth:`decode` convert it."""

    round_id: RoundId
    sender: int
    recipient: int
    message: Message

    def encode(self) -> bytes:
        """Return header and body as bytes."""
        body = self.message.encode()
        round_id = self.round_id
        return (
            _HEADER.pack(
                _MAGIC,
                _VERSION,
                self.message.kind,
                round_id.run,
                round_id.round,
                round_id.attempt,
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
            ProtocolError: not a message of this version, an unknown kind, or a body that does not fit the kind.
        """
        kind = cls.kind_of(data)
        _, _, _, run, round_number, attempt, sender, recipient, length = _HEADER.unpack_from(data)
        if length != len(data) - _HEADER.size:
            raise ProtocolError(f"a message announces {length} bytes and has {len(data) - _HEADER.size}")
        return cls(
            round_id=RoundId(run=run, round=round_number, attempt=attempt),
            sender=sender,
            recipient=recipient,
            message=kind.decode(data[_HEADER.size :]),
        )

    @staticmethod
    def kind_of(data: bytes) -> type[Message]:
        """Return the kind of message that the header names; the body is not read.

        Raises:
            ProtocolError: not a message of this version, or an unknown kind.
        """
        if len(data) < _HEADER.size:
            raise ProtocolError(f"a message has at least {_HEADER.size} bytes, this one has {len(data)}")
        magic, version, kind, *_ = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError(f"not a message of protocol version {_VERSION}")
        if kind not in KINDS:
            raise ProtocolError(f"messages of kind {kind} do not exist in version {_VERSION}")
        return KINDS[kind]

    @classmethod
    def from_server(cls, data: bytes) -> Envelope:
        """Return the envelope of the bytes that a silo received, which must name the server as their sender.

        Raises:
            ProtocolError: as :meth:`decode`, or the envelope names another sender.
        """
        envelope = cls.decode(data)
        if envelope.sender != SERVER:
            raise ProtocolError("a message comes from another sender than the server")
        return envelope

    @classmethod
    def from_silo(cls, data: bytes, sender: int, cohort: Collection[int]) -> Envelope:
        """Return the envelope of the bytes that a silo sent to the server.

        Args:
            data: the received bytes.
            sender: number of the silo, as the transport authenticated it.
            cohort: numbers of the silos that take part.

        Raises:
            ProtocolError: as :meth:`decode`, or the envelope names another sender than the transport, or the sender
                is not in the cohort; the error names the silo.
        """
        try:
            envelope = cls.decode(data)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        # The sender in the envelope is not authenticated; only the transport knows the silo at the other end.
        if envelope.sender != sender or sender not in cohort:
            raise ProtocolError(
                "sent a message under another party's name or outside its cohort", silo=sender
            )
        return envelope


class Inbox:
    """Filter of received messages: accepts each message once, and only messages of the current attempt.

    Args:
        owner: number of the party that receives the messages.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._round_id: RoundId | None = None
        self._seen: set[tuple[int, int]] = set()

    def open(self, round_id: RoundId) -> None:
        """Begin a round or an attempt, which must be later than every earlier attempt of the run.

        Raises:
            ProtocolError: the attempt is not later than the last attempt, so its keys were used before.
        """
        last = self._round_id
        if last is not None and (
            round_id.run != last.run or (round_id.round, round_id.attempt) <= (last.round, last.attempt)
        ):
            raise ProtocolError(
                f"round {round_id.round}, attempt {round_id.attempt} does not follow round {last.round}, "
                f"attempt {last.attempt} of the same run; keys are used once"
            )
        self._round_id = round_id
        self._seen.clear()

    def accept(self, envelope: Envelope, *kinds: type[_M]) -> _M:
        """Return the message of an envelope that is expected now.

        Raises:
            ProtocolError: another run, round, attempt or recipient, a kind outside ``kinds``, or a replay.
        """
        sender = None if envelope.sender == SERVER else envelope.sender
        if envelope.recipient != self._owner:
            raise ProtocolError("a message is addressed to another party", silo=sender)
        if envelope.round_id != self._round_id:
            raise ProtocolError(
                f"a message belongs to another run, or to round {envelope.round_id.round}, attempt "
                f"{envelope.round_id.attempt}, which is not being played",
                silo=sender,
            )
        received = envelope.message
        if not isinstance(received, kinds):
            raise ProtocolError(f"did not expect a message with {received.purpose} now", silo=sender)
        # Marked as seen only after all other checks, so that a refused message does not block the right one.
        key = (envelope.sender, received.kind)
        if key in self._seen:
            raise ProtocolError(f"sent {received.purpose} twice (a replay)", silo=sender)
        self._seen.add(key)
        return received


def _ascending(silos: Iterable[int]) -> bool:
    """Return whether the numbers ascend strictly and lie between 0 and ``LARGEST_SILOS`` - 1."""
    return all(a < b for a, b in pairwise([-1, *silos, LARGEST_SILOS]))


_ASCEND: Final = f"a list of silos must ascend and stay below {LARGEST_SILOS}"

SILOS: Final = repeated(number(2), size=2).with_check(_ascending, _ASCEND)
"""Codec of the numbers of silos, ascending."""


def by_silo(layout: FieldCodec[_T]) -> FieldCodec[tuple[tuple[int, _T], ...]]:
    """Return the codec of pairs of a silo's number and a value; the numbers ascend."""
    values = repeated(pair(number(2), layout), size=2)
    return values.with_check(lambda pairs: _ascending(silo for silo, _ in pairs), _ASCEND)


SIGNED_KEY: Final[FieldCodec[SignedKey]] = pair(fixed_bytes(KEY_BYTES), fixed_bytes(SIGNATURE_BYTES)).mapped(
    lambda key: (key.public, key.signature), lambda raw: SignedKey(public=raw[0], signature=raw[1])
)


@message(1, "a signed public key")
class Announcement(Message):
    """Agreement key of a silo, signed with the silo's identity key."""

    key: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)


@message(2, "the silos' signed public keys")
class Directory(Message):
    """Signed agreement keys of all silos of a cohort, relayed by the server."""

    keys: tuple[tuple[int, SignedKey], ...] = wire_field(by_silo(SIGNED_KEY), Reveals.NOTHING)


@message(3, "the start of a round")
class RoundStart(Message):
    """Start of a round, or of another attempt at it, with the numbers of its silos."""

    cohort: tuple[int, ...] = wire_field(SILOS, Reveals.NOTHING)


def word_dtype(word_bytes: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype that holds words of a size; words of 3 bytes are the low bytes of uint32 words."""
    return np.dtype({2: "<u2", 3: "<u4", 4: "<u4", 8: "<u8"}[word_bytes])


@message(4, "a masked vector", eq=False)
class MaskedVector(Message):
    """Vector of a silo under its masks; its words are uniform to a reader that lacks one of the masks.

    Attributes:
        words: (d,) words modulo 2^(8 ``word_bytes``). Words of 3 bytes are uint32, and only their low 24 bits are sent.
        word_bytes: 2, 3, 4 or 8.
    """

    words: Words = custom_field(Reveals.CONTENT, Key.NOBODY)
    word_bytes: int = custom_field(Reveals.NOTHING)

    def encode(self) -> bytes:
        """Return the word size and the words (little-endian)."""
        low = self.words.view(np.uint8).reshape(-1, self.words.dtype.itemsize)[:, : self.word_bytes]
        return Writer().number(self.word_bytes, 1).bytes() + low.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> MaskedVector:
        size = Reader(data[:1]).number(1)
        if size not in WORD_BYTES or (len(data) - 1) % size:
            raise ProtocolError(f"a masked vector has words of 2, 3, 4 or 8 bytes, this one claims {size}")
        dtype = word_dtype(size)
        low = np.frombuffer(data, dtype=np.uint8, offset=1).reshape(-1, size)
        if size < dtype.itemsize:
            low = np.pad(low, ((0, 0), (0, dtype.itemsize - size)))
        return cls(words=low.view(dtype).reshape(-1), word_bytes=size)


@message(5, "the request for the silos' own masks")
class RevealRequest(Message):
    """Request for the seeds of the silos' own masks; all masked vectors of the attempt have arrived."""


@message(6, "the seed of a silo's own mask")
class OwnMask(Message):
    """Seed of a silo's own mask; without this seed the sum stays hidden, with it only the sum is revealed."""

    seed: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.SUM)
