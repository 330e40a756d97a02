"""Define the messages of secure aggregation with recovery."""

from __future__ import annotations

from fedveil.crypto.key_agreement import KEY_BYTES, SignedKey
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.crypto.shamir import SHARE_BYTES
from fedveil.privacy.claims import Reveals
from fedveil.protocols.field_codecs import BLOCK, fixed_bytes, message_codec, wire_field
from fedveil.protocols.messages import SIGNED_KEY, SILOS, Message, by_silo, message


@message(11, "two signed public keys")
class RecoveryKeys(Message):
    """Two signed agreement keys of a silo for one attempt: for masks, and for sealed shares."""

    mask: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)
    seal: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)


@message(12, "the silos' signed public keys, two each")
class RecoveryDirectory(Message):
    """Both signed agreement keys of all silos of a cohort, relayed by the server."""

    keys: tuple[tuple[int, RecoveryKeys], ...] = wire_field(
        by_silo(message_codec(RecoveryKeys)), Reveals.NOTHING
    )


@message(15, "sealed shares for the other silos")
class ShareBundle(Message):
    """Sealed shares of a silo's two secrets, one pair per other silo, with a check value of its seed.

    The server checks a rebuilt mask key against the public half that the silo announced. It checks a rebuilt seed of
    the silo's own mask against ``shown``, a key derived from the seed. The seed cannot be computed from ``shown``.
    """

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)
    shown: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.NOTHING)


@message(8, "the other silos' sealed shares")
class RelayedShares(Message):
    """Shares that the other silos sealed for the recipient, relayed by the server."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)


@message(9, "the silos whose vectors arrived")
class Survivors(Message):
    """Numbers of the silos whose masked vectors arrived, ascending."""

    silos: tuple[int, ...] = wire_field(SILOS, Reveals.NOTHING)


@message(13, "a signature over the survivors")
class SignedSurvivors(Message):
    """Signature of a silo over the only list of survivors that it accepts in an attempt."""

    signature: bytes = wire_field(fixed_bytes(SIGNATURE_BYTES), Reveals.NOTHING)


@message(14, "the silos' signatures over the survivors")
class AgreedSurvivors(Message):
    """Survivors' signatures over the list of survivors; they show which silos received the same list."""

    signatures: tuple[tuple[int, bytes], ...] = wire_field(
        by_silo(fixed_bytes(SIGNATURE_BYTES)), Reveals.NOTHING
    )


@message(10, "one share per silo")
class RevealedShares(Message):
    """One share for each silo: of the seed of its own mask if it survived, of its mask key if it vanished."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(fixed_bytes(SHARE_BYTES)), Reveals.SUM)
