"""Messages of partial encryption (beside those that all protocols share)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Int32, Int64

from fedveil.crypto.agreement import KEY_BYTES
from fedveil.crypto.ckks import FINGERPRINT_BYTES
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import message
from fedveil.protection.wire import Reader, Writer

_SIZES: Final = (4, 8)

Words = Int32[np.ndarray, " n"] | Int64[np.ndarray, " n"]


@message(40)
@dataclass(frozen=True, kw_only=True)
class SealedKeys:
    """The CKKS key and the secret of the ballots' orders, from the first silo to another, sealed for it."""

    purpose: ClassVar[str] = "the silos' common keys, sealed for one silo"
    kind: ClassVar[int]
    sealed: bytes

    def encode(self) -> bytes:
        """Return the sealed keys."""
        return self.sealed

    @classmethod
    def decode(cls, body: bytes) -> SealedKeys:
        """Return the sealed keys of a body."""
        return cls(sealed=bytes(body))


@message(41)
@dataclass(frozen=True, kw_only=True)
class Ballot:
    """A silo's votes: a bitmap of the coordinates in the round's secret order."""

    purpose: ClassVar[str] = "votes in a secret order"
    kind: ClassVar[int]
    bitmap: bytes

    def encode(self) -> bytes:
        """Return the coded bitmap."""
        return self.bitmap

    @classmethod
    def decode(cls, body: bytes) -> Ballot:
        """Return the ballot of a body."""
        return cls(bitmap=bytes(body))


@message(42)
@dataclass(frozen=True, kw_only=True)
class Partition:
    """The coordinates with most votes, as a bitmap in the round's secret order."""

    purpose: ClassVar[str] = "the coordinates to encrypt, in a secret order"
    kind: ClassVar[int]
    bitmap: bytes

    def encode(self) -> bytes:
        """Return the coded bitmap."""
        return self.bitmap

    @classmethod
    def decode(cls, body: bytes) -> Partition:
        """Return the partition of a body."""
        return cls(bitmap=bytes(body))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """Two parts of a vector: whole numbers in clear, little-endian, and ciphertexts.

    Attributes:
        tag: shows that the sender's key is everybody's, and nothing of it.
        fingerprint: of the encryption's parameters.
        clear: the coordinates that are not encrypted, ascending.
        hidden: ciphertexts of the others, ascending.
    """

    tag: bytes
    fingerprint: bytes
    clear: Words
    hidden: bytes

    def encode(self) -> bytes:
        """Return tag, fingerprint, word size, count, words and ciphertexts."""
        size = self.clear.dtype.itemsize
        head = Writer().fixed(self.tag, KEY_BYTES).fixed(self.fingerprint, FINGERPRINT_BYTES).number(size, 1)
        words = self.clear.astype(f"<i{size}", copy=False).tobytes()
        return head.number(len(self.clear), 8).bytes() + words + self.hidden

    @staticmethod
    def read(body: bytes) -> tuple[bytes, bytes, Words, bytes]:
        """Return the fields of a body."""
        reader = Reader(body)
        tag, fingerprint = reader.fixed(KEY_BYTES), reader.fixed(FINGERPRINT_BYTES)
        size = reader.number(1)
        if size not in _SIZES:
            raise ProtocolError(f"numbers in clear have 4 or 8 bytes, not {size}")
        count = reader.count(8, size)
        clear = np.frombuffer(reader.fixed(count * size), dtype=f"<i{size}")
        return tag, fingerprint, clear, reader.rest()


@message(43)
@dataclass(frozen=True, kw_only=True, eq=False)
class PartialUpdate(_Parts):
    """A silo's vector: a part in clear, with its noise, and a part encrypted."""

    purpose: ClassVar[str] = "an update, partly encrypted"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> PartialUpdate:
        """Return the update of a body."""
        tag, fingerprint, clear, hidden = cls.read(body)
        return cls(tag=tag, fingerprint=fingerprint, clear=clear, hidden=hidden)


@message(44)
@dataclass(frozen=True, kw_only=True, eq=False)
class PartialSum(_Parts):
    """The sum of all updates, for every silo: the part in clear, and the part that silos decrypt."""

    purpose: ClassVar[str] = "the sum, partly encrypted"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> PartialSum:
        """Return the sum of a body."""
        tag, fingerprint, clear, hidden = cls.read(body)
        return cls(tag=tag, fingerprint=fingerprint, clear=clear, hidden=hidden)
