"""Messages of secure aggregation with recovery (beside those that all protocols share)."""

from __future__ import annotations

from fedveil.crypto.key_agreement import KEY_BYTES, SignedKey
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.crypto.shamir import SHARE_BYTES
from fedveil.privacy.claims import Reveals
from fedveil.protocols.field_codecs import BLOCK, fixed_bytes, message_codec, wire_field
from fedveil.protocols.messages import SIGNED_KEY, SILOS, Message, by_silo, message


@message(11, "two signed public keys")
class RecoveryKeys(Message):
    """A silo's two agreement keys of an attempt, signed: of its masks, and of the shares that are sealed to it."""

    mask: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)
    seal: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)


@message(12, "the silos' signed public keys, two each")
class RecoveryDirectory(Message):
    """Both signed keys of all silos of a cohort, relayed by the server."""

    keys: tuple[tuple[int, RecoveryKeys], ...] = wire_field(
        by_silo(message_codec(RecoveryKeys)), Reveals.NOTHING
    )


@message(15, "sealed shares for the other silos")
class ShareBundle(Message):
    """A silo's shares of its two secrets, one sealed for every other silo, and what shows that a seed is its own.

    Of the mask key, the public half shows it. Of the seed of the silo's own mask, a key derived from it, from which
    nobody finds the seed.
    """

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)
    shown: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.NOTHING)


@message(8, "the other silos' sealed shares")
class RelayedShares(Message):
    """The shares that the other silos sealed for one silo."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)


@message(9, "the silos whose vectors arrived")
class Survivors(Message):
    """The silos whose masked vectors arrived."""

    silos: tuple[int, ...] = wire_field(SILOS, Reveals.NOTHING)


@message(13, "a signature over the survivors")
class SignedSurvivors(Message):
    """A silo's signature over the one list of survivors that it was told of in an attempt."""

    signature: bytes = wire_field(fixed_bytes(SIGNATURE_BYTES), Reveals.NOTHING)


@message(14, "the silos' signatures over the survivors")
class AgreedSurvivors(Message):
    """Who of the survivors was told the same list."""

    signatures: tuple[tuple[int, bytes], ...] = wire_field(
        by_silo(fixed_bytes(SIGNATURE_BYTES)), Reveals.NOTHING
    )


@message(10, "one share per silo")
class RevealedShares(Message):
    """For each silo one share: of its own mask's seed if it survived, of its mask key if it vanished."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(fixed_bytes(SHARE_BYTES)), Reveals.SUM)
