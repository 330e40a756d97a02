"""Messages of secure aggregation with recovery (beside those that all protocols share)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedveil.crypto.shamir import SHARE_BYTES
from fedveil.protection.messages import check_ascending, decode_silos, encode_silos, message
from fedveil.protection.wire import Reader, Writer


@dataclass(frozen=True, kw_only=True)
class _Sealed:
    """Sealed shares, each with the number of a silo."""

    shares: tuple[tuple[int, bytes], ...]

    def encode(self) -> bytes:
        """Return silo and sealed shares of each."""
        writer = Writer().number(len(self.shares), 2)
        for silo, sealed in self.shares:
            writer.number(silo, 2).block(sealed)
        return writer.bytes()

    @staticmethod
    def read(body: bytes) -> tuple[tuple[int, bytes], ...]:
        """Return the shares of a body; the silos must ascend."""
        reader = Reader(body)
        shares = tuple((reader.number(2), reader.block()) for _ in range(reader.count(2, 10)))
        reader.finish()
        check_ascending([silo for silo, _ in shares])
        return shares


@message(7)
@dataclass(frozen=True, kw_only=True)
class ShareBundle(_Sealed):
    """A silo's shares of its two secrets, one sealed for every other silo."""

    purpose: ClassVar[str] = "sealed shares for the other silos"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> ShareBundle:
        """Return the bundle of a body."""
        return cls(shares=cls.read(body))


@message(8)
@dataclass(frozen=True, kw_only=True)
class RelayedShares(_Sealed):
    """The shares that the other silos sealed for one silo."""

    purpose: ClassVar[str] = "the other silos' sealed shares"
    kind: ClassVar[int]

    @classmethod
    def decode(cls, body: bytes) -> RelayedShares:
        """Return the shares of a body."""
        return cls(shares=cls.read(body))


@message(9)
@dataclass(frozen=True, kw_only=True)
class Survivors:
    """The silos whose masked vectors arrived."""

    purpose: ClassVar[str] = "the silos whose vectors arrived"
    kind: ClassVar[int]
    silos: tuple[int, ...]

    def encode(self) -> bytes:
        """Return the silos' numbers."""
        return encode_silos(self.silos)

    @classmethod
    def decode(cls, body: bytes) -> Survivors:
        """Return the survivors of a body."""
        return cls(silos=decode_silos(body))


@message(10)
@dataclass(frozen=True, kw_only=True)
class RevealedShares:
    """For each silo one share: of its own mask's seed if it survived, of its agreement key if it vanished."""

    purpose: ClassVar[str] = "one share per silo"
    kind: ClassVar[int]
    shares: tuple[tuple[int, bytes], ...]

    def encode(self) -> bytes:
        """Return silo and share of each."""
        writer = Writer().number(len(self.shares), 2)
        for silo, share in self.shares:
            writer.number(silo, 2).fixed(share, SHARE_BYTES)
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> RevealedShares:
        """Return the shares of a body; the silos must ascend."""
        reader = Reader(body)
        count = reader.count(2, 2 + SHARE_BYTES)
        shares = tuple((reader.number(2), reader.fixed(SHARE_BYTES)) for _ in range(count))
        reader.finish()
        check_ascending([silo for silo, _ in shares])
        return cls(shares=shares)
