"""Define the messages of partial encryption, in addition to those that all protocols share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.ckks import FINGERPRINT_BYTES
from fedveil.crypto.key_agreement import KEY_BYTES
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.field_codecs import REST, custom_field, wire_field
from fedveil.protocols.messages import Message, message
from fedveil.protocols.wire import Reader, Writer

LARGEST_WORD: Final = 8


@message(40, "the silos' common keys, sealed for one silo")
class SealedKeys(Message):
    """CKKS key and secret of the ballots' orders, sealed by silo 0 for one other silo."""

    sealed: bytes = wire_field(REST, Reveals.NOTHING)


@message(41, "votes in a secret order")
class Ballot(Message):
    """Votes of a silo: a bitmap of the coordinates in the round's secret order, which only the silos know."""

    bitmap: bytes = wire_field(REST, Reveals.VOTES, Key.SILOS, besides=Reveals.BALLOT)


@message(42, "the coordinates to encrypt, in a secret order")
class Partition(Message):
    """Coordinates with most votes: a bitmap in the round's secret order, which only the silos know."""

    bitmap: bytes = wire_field(REST, Reveals.VOTES, Key.SILOS)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts(Message):
    """Two parts of a vector: integers in the clear, and CKKS ciphertexts.

    Attributes:
        tag: equal for silos with the same common keys; it discloses nothing else about the keys.
        fingerprint: fingerprint of the encryption's parameters.
        size: bytes of a number in the clear, 1 to 8; the numbers are little-endian and signed.
        clear: (d - k,) int64, coordinates that are not encrypted, ascending.
        hidden: ciphertexts of the k encrypted coordinates, ascending.
    """

    tag: bytes = custom_field(Reveals.NOTHING)
    fingerprint: bytes = custom_field(Reveals.NOTHING)
    size: int = custom_field(Reveals.NOTHING)
    clear: Int64[np.ndarray, " n"] = custom_field(Reveals.CLEAR)  # noqa: RUF009
    hidden: bytes = custom_field(Reveals.HIDDEN, Key.SILOS)

    def encode(self) -> bytes:
        """Return tag, fingerprint, size, count, numbers and ciphertexts."""
        head = Writer().fixed_bytes(self.tag, KEY_BYTES).fixed_bytes(self.fingerprint, FINGERPRINT_BYTES)
        head.number(self.size, 1).number(len(self.clear), 8)
        split = self.clear.astype("<i8").reshape(-1, 1).view(np.uint8)
        return head.bytes() + split[:, : self.size].tobytes() + self.hidden

    @classmethod
    def decode(cls, data: bytes) -> Self:
        reader = Reader(data)
        tag, fingerprint = reader.fixed_bytes(KEY_BYTES), reader.fixed_bytes(FINGERPRINT_BYTES)
        size = reader.number(1)
        if not 1 <= size <= LARGEST_WORD:
            raise ProtocolError(f"numbers in clear have 1 to {LARGEST_WORD} bytes, not {size}")
        count = reader.count(8, size)
        split = np.frombuffer(reader.fixed_bytes(count * size), dtype=np.uint8).reshape(count, size)
        # The bytes go to the top of a word; the arithmetic shift back extends the sign.
        padded = np.zeros((count, LARGEST_WORD), dtype=np.uint8)
        padded[:, LARGEST_WORD - size :] = split
        clear = padded.view("<i8")[:, 0] >> (8 * (LARGEST_WORD - size))
        return cls(tag=tag, fingerprint=fingerprint, size=size, clear=clear, hidden=reader.rest())


@message(43, "an update, partly encrypted", eq=False)
class PartialUpdate(_Parts):
    """Vector of a silo: one part in the clear with its noise, and one encrypted part."""


@message(44, "the sum, partly encrypted", eq=False)
class PartialSum(_Parts):
    """Sum of all updates for every silo: one part in the clear, one part that only silos can decrypt."""

    clear: Int64[np.ndarray, " n"] = custom_field(Reveals.SUM)
    hidden: bytes = custom_field(Reveals.SUM, Key.SILOS)
