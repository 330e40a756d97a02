"""Messages of partial encryption (beside those that all protocols share)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.agreement import KEY_BYTES
from fedveil.crypto.ckks import FINGERPRINT_BYTES
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import message
from fedveil.protection.wire import Reader, Writer

LARGEST_WORD: Final = 8


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
    """Two parts of a vector: whole numbers in clear, as many little-endian bytes each as they need, and ciphertexts.

    Attributes:
        tag: shows that the sender's key is everybody's, and nothing of it.
        fingerprint: of the encryption's parameters.
        size: bytes of a number in clear, 1 to 8.
        clear: the coordinates that are not encrypted, ascending.
        hidden: ciphertexts of the others, ascending.
    """

    tag: bytes
    fingerprint: bytes
    size: int
    clear: Int64[np.ndarray, " n"]
    hidden: bytes

    def encode(self) -> bytes:
        """Return tag, fingerprint, size, count, numbers and ciphertexts."""
        head = Writer().fixed(self.tag, KEY_BYTES).fixed(self.fingerprint, FINGERPRINT_BYTES)
        head.number(self.size, 1).number(len(self.clear), 8)
        split = self.clear.astype("<i8").reshape(-1, 1).view(np.uint8)
        return head.bytes() + split[:, : self.size].tobytes() + self.hidden

    @staticmethod
    def read(body: bytes) -> tuple[bytes, bytes, int, Int64[np.ndarray, " n"], bytes]:
        """Return the fields of a body."""
        reader = Reader(body)
        tag, fingerprint = reader.fixed(KEY_BYTES), reader.fixed(FINGERPRINT_BYTES)
        size = reader.number(1)
        if not 1 <= size <= LARGEST_WORD:
            raise ProtocolError(f"numbers in clear have 1 to {LARGEST_WORD} bytes, not {size}")
        count = reader.count(8, size)
        split = np.frombuffer(reader.fixed(count * size), dtype=np.uint8).reshape(count, size)
        padded = np.zeros((count, LARGEST_WORD), dtype=np.uint8)
        padded[:, LARGEST_WORD - size :] = split
        clear = padded.view("<i8")[:, 0] >> (8 * (LARGEST_WORD - size))  # keeps the sign
        return tag, fingerprint, size, clear, reader.rest()


@message(43)
@dataclass(frozen=True, kw_only=True, eq=False)
class PartialUpdate(_Parts):
    """A silo's vector: a part in clear, with its noise, and a part encrypted."""

    purpose: ClassVar[str] = "an update, partly encrypted"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> PartialUpdate:
        """Return the update of a body."""
        tag, fingerprint, size, clear, hidden = cls.read(body)
        return cls(tag=tag, fingerprint=fingerprint, size=size, clear=clear, hidden=hidden)


@message(44)
@dataclass(frozen=True, kw_only=True, eq=False)
class PartialSum(_Parts):
    """The sum of all updates, for every silo: the part in clear, and the part that silos decrypt."""

    purpose: ClassVar[str] = "the sum, partly encrypted"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> PartialSum:
        """Return the sum of a body."""
        tag, fingerprint, size, clear, hidden = cls.read(body)
        return cls(tag=tag, fingerprint=fingerprint, size=size, clear=clear, hidden=hidden)
