"""Messages of secure aggregation with recovery (beside those that all protocols share)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from fedveil.crypto.agreement import KEY_BYTES, SignedKey
from fedveil.crypto.shamir import SHARE_BYTES
from fedveil.protection.messages import (
    SIGNATURE_BYTES,
    check_ascending,
    decode_silos,
    encode_silos,
    message,
)
from fedveil.protection.wire import Reader, Writer

_PAIR_BYTES: Final = 2 * (KEY_BYTES + SIGNATURE_BYTES)


@message(11)
@dataclass(frozen=True, kw_only=True)
class RecoveryKeys:
    """A silo's two agreement keys of an attempt, signed: of its masks, and of the shares that are sealed to it."""

    purpose: ClassVar[str] = "two signed public keys"
    kind: ClassVar[int]
    mask: SignedKey
    seal: SignedKey

    def encode(self) -> bytes:
        """Return key and signature of each."""
        writer = Writer()
        for key in (self.mask, self.seal):
            writer.fixed(key.public, KEY_BYTES).fixed(key.signature, SIGNATURE_BYTES)
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> RecoveryKeys:
        """Return the keys of a body."""
        reader = Reader(body)
        keys = cls.read(reader)
        reader.finish()
        return keys

    @classmethod
    def read(cls, reader: Reader) -> RecoveryKeys:
        """Take both keys off a body."""
        mask, seal = (
            SignedKey(public=reader.fixed(KEY_BYTES), signature=reader.fixed(SIGNATURE_BYTES))
            for _ in range(2)
        )
        return cls(mask=mask, seal=seal)


@message(12)
@dataclass(frozen=True, kw_only=True)
class RecoveryDirectory:
    """Both signed keys of all silos of a cohort, relayed by the server."""

    purpose: ClassVar[str] = "the silos' signed public keys, two each"
    kind: ClassVar[int]
    keys: tuple[tuple[int, RecoveryKeys], ...]

    def encode(self) -> bytes:
        """Return silo and both keys of each."""
        writer = Writer().number(len(self.keys), 2)
        for silo, keys in self.keys:
            writer.number(silo, 2).fixed(keys.encode(), _PAIR_BYTES)
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> RecoveryDirectory:
        """Return the directory of a body; the silos must ascend."""
        reader = Reader(body)
        count = reader.count(2, 2 + _PAIR_BYTES)
        keys = tuple((reader.number(2), RecoveryKeys.read(reader)) for _ in range(count))
        reader.finish()
        check_ascending([silo for silo, _ in keys])
        return cls(keys=keys)


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
    """For each silo one share: of its own mask's seed if it survived, of its mask key if it vanished."""

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
