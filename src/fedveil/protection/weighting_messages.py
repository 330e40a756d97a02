"""Messages of the private weighting protocol (beside those that all protocols share)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gmpy2 import mpz

from fedveil.crypto.transfer import POINT_BYTES
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import message
from fedveil.protection.wire import Reader, Writer


@message(20)
@dataclass(frozen=True, kw_only=True)
class WeightingKey:
    """The server's public encryption key."""

    purpose: ClassVar[str] = "the server's public encryption key"
    kind: ClassVar[int]
    key: bytes

    def encode(self) -> bytes:
        """Return the key."""
        return self.key

    @classmethod
    def decode(cls, body: bytes) -> WeightingKey:
        """Return the key of a body."""
        return cls(key=bytes(body))


@message(21)
@dataclass(frozen=True, kw_only=True)
class SealedSeed:
    """The seed of the multiplicative blinds, from silo 0 to another silo, sealed under their pairwise key."""

    purpose: ClassVar[str] = "the blinding seed, sealed for one silo"
    kind: ClassVar[int]
    sealed: bytes

    def encode(self) -> bytes:
        """Return the sealed seed."""
        return self.sealed

    @classmethod
    def decode(cls, body: bytes) -> SealedSeed:
        """Return the sealed seed of a body."""
        return cls(sealed=bytes(body))


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """A list of opaque blocks, each preceded by its length."""

    blocks: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return count and blocks."""
        writer = Writer().number(len(self.blocks), 4)
        for block in self.blocks:
            writer.block(block)
        return writer.bytes()

    @staticmethod
    def read(body: bytes) -> tuple[bytes, ...]:
        """Return the blocks of a body."""
        reader = Reader(body)
        blocks = tuple(reader.block() for _ in range(reader.count(4, 8)))
        reader.finish()
        return blocks


@message(22)
@dataclass(frozen=True, kw_only=True)
class BlindedHistogram(_Blocks):
    """A silo's record counts, blinded by r_u and under pairwise masks: uniform numbers to the server."""

    purpose: ClassVar[str] = "doubly blinded record counts"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> BlindedHistogram:
        """Return the histogram of a body."""
        return cls(blocks=cls.read(body))


@message(23)
@dataclass(frozen=True, kw_only=True)
class Participants:
    """Which users have a record anywhere."""

    purpose: ClassVar[str] = "the users who take part"
    kind: ClassVar[int]
    present: tuple[bool, ...]

    def encode(self) -> bytes:
        """Return count and one byte per user."""
        return Writer().number(len(self.present), 4).bytes() + bytes(self.present)

    @classmethod
    def decode(cls, body: bytes) -> Participants:
        """Return the users of a body."""
        reader = Reader(body)
        present = tuple(bool(reader.number(1)) for _ in range(reader.count(4, 1)))
        reader.finish()
        return cls(present=present)


@message(24)
@dataclass(frozen=True, kw_only=True)
class EncryptedWeights(_Blocks):
    """A round begins: fresh encrypted weights of all participants, or none if the last ones still hold."""

    purpose: ClassVar[str] = "the round's encrypted weights"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> EncryptedWeights:
        """Return the weights of a body."""
        return cls(blocks=cls.read(body))


@message(25)
@dataclass(frozen=True, kw_only=True)
class EncryptedSum(_Blocks):
    """A silo's encrypted, masked and re-randomised weighted sum."""

    purpose: ClassVar[str] = "an encrypted masked sum"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> EncryptedSum:
        """Return the sum of a body."""
        return cls(blocks=cls.read(body))


@message(26)
@dataclass(frozen=True, kw_only=True)
class TransferOffer:
    """A round with private sub-sampling begins: the server's points for the oblivious transfers."""

    purpose: ClassVar[str] = "points for oblivious transfer"
    kind: ClassVar[int]
    public: mpz
    constants: tuple[mpz, ...]

    def encode(self) -> bytes:
        """Return the points."""
        return Writer().integers([self.public, *self.constants], POINT_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> TransferOffer:
        """Return the offer of a body."""
        reader = Reader(body)
        points = reader.integers(POINT_BYTES)
        reader.finish()
        if len(points) < 2:
            raise ProtocolError("an offer of oblivious transfer has at least 2 points")
        return cls(public=points[0], constants=tuple(points[1:]))


@message(27)
@dataclass(frozen=True, kw_only=True)
class TransferRequests:
    """A silo's requests, one per participant: the place asked for is hidden."""

    purpose: ClassVar[str] = "hidden choices of oblivious transfers"
    kind: ClassVar[int]
    points: tuple[mpz, ...]

    def encode(self) -> bytes:
        """Return the points."""
        return Writer().integers(self.points, POINT_BYTES).bytes()

    @classmethod
    def decode(cls, body: bytes) -> TransferRequests:
        """Return the requests of a body."""
        reader = Reader(body)
        points = reader.integers(POINT_BYTES)
        reader.finish()
        return cls(points=tuple(points))


@message(28)
@dataclass(frozen=True, kw_only=True)
class TransferAnswers(_Blocks):
    """All places of every transfer, sealed so that one of each opens."""

    purpose: ClassVar[str] = "sealed places of oblivious transfers"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> TransferAnswers:
        """Return the answers of a body."""
        return cls(blocks=cls.read(body))
