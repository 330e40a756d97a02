"""Messages of secure aggregation with recovery (beside those that all protocols share)."""

from __future__ import annotations

from fedveil.crypto.agreement import KEY_BYTES, SignedKey
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.crypto.shamir import SHARE_BYTES
from fedveil.privacy.claims import Tells
from fedveil.protection.fields import BLOCK, body, fixed, sent_as
from fedveil.protection.messages import SIGNED_KEY, SILOS, Message, by_silo, message


@message(11, "two signed public keys")
class RecoveryKeys(Message):
    """A silo's two agreement keys of an attempt, signed: of its masks, and of the shares that are sealed to it."""

    mask: SignedKey = sent_as(SIGNED_KEY, Tells.NOTHING)
    seal: SignedKey = sent_as(SIGNED_KEY, Tells.NOTHING)


@message(12, "the silos' signed public keys, two each")
class RecoveryDirectory(Message):
    """Both signed keys of all silos of a cohort, relayed by the server."""

    keys: tuple[tuple[int, RecoveryKeys], ...] = sent_as(by_silo(body(RecoveryKeys)), Tells.NOTHING)


@message(15, "sealed shares for the other silos")
class ShareBundle(Message):
    """A silo's shares of its two secrets, one sealed for every other silo, and what shows that a seed is its own.

    Of the mask key, the public half shows it. Of the seed of the silo's own mask, a key derived from it, from which
    nobody finds the seed.
    """

    shares: tuple[tuple[int, bytes], ...] = sent_as(by_silo(BLOCK), Tells.NOTHING)
    shown: bytes = sent_as(fixed(KEY_BYTES), Tells.NOTHING)


@message(8, "the other silos' sealed shares")
class RelayedShares(Message):
    """The shares that the other silos sealed for one silo."""

    shares: tuple[tuple[int, bytes], ...] = sent_as(by_silo(BLOCK), Tells.NOTHING)


@message(9, "the silos whose vectors arrived")
class Survivors(Message):
    """The silos whose masked vectors arrived."""

    silos: tuple[int, ...] = sent_as(SILOS, Tells.NOTHING)


@message(13, "a signature over the survivors")
class SignedSurvivors(Message):
    """A silo's signature over the one list of survivors that it was told of in an attempt."""

    signature: bytes = sent_as(fixed(SIGNATURE_BYTES), Tells.NOTHING)


@message(14, "the silos' signatures over the survivors")
class AgreedSurvivors(Message):
    """Who of the survivors was told the same list."""

    signatures: tuple[tuple[int, bytes], ...] = sent_as(by_silo(fixed(SIGNATURE_BYTES)), Tells.NOTHING)


@message(10, "one share per silo")
class RevealedShares(Message):
    """For each silo one share: of its own mask's seed if it survived, of its mask key if it vanished."""

    shares: tuple[tuple[int, bytes], ...] = sent_as(by_silo(fixed(SHARE_BYTES)), Tells.SUM)
