"""Define the messages of private weighting, in addition to those that all protocols share."""

from __future__ import annotations

from typing import Final

from gmpy2 import mpz

from fedveil.crypto.key_agreement import OVERHEAD_BYTES
from fedveil.crypto.oblivious_transfer import POINT_BYTES
from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.field_codecs import (
    BLOCK,
    REST,
    Reader,
    Writer,
    custom_field,
    fixed_bytes,
    integers,
    number,
    repeated,
    wire_field,
)
from fedveil.protocols.messages import Message, message
from fedveil.protocols.weighting.plan import SEED_BYTES

_MOST: Final = 1 << 19
"""Most ciphertexts of one message. A ciphertext has at least 512 bytes, and weights have one ciphertext per user."""
_BLOCKS: Final = repeated(BLOCK, size=4, most=_MOST)


@message(20, "the server's public encryption key")
class WeightingKey(Message):
    """Public encryption key of the server."""

    key: bytes = wire_field(REST, Reveals.NOTHING)


@message(21, "the blinding seed, sealed for one silo")
class SealedSeed(Message):
    """Seed of the multiplicative blinds r_u, sealed by silo 0 under its pairwise key with a silo."""

    sealed: bytes = wire_field(fixed_bytes(SEED_BYTES + OVERHEAD_BYTES), Reveals.NOTHING)


@message(22, "doubly blinded record counts")
class BlindedHistogram(Message):
    """Record counts of a silo, blinded by r_u and by pairwise masks: uniform numbers to the server."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.COUNTS, Key.SILOS, besides=Reveals.PRESENCE)


@message(23, "the users who take part")
class Participants(Message):
    """Users with a record in any silo, as one byte per user."""

    present: tuple[bool, ...] = wire_field(
        repeated(number(1).mapped(int, bool), size=4, most=_MOST), Reveals.PRESENCE
    )


@message(24, "the round's encrypted weights")
class EncryptedWeights(Message):
    """Start of a round with the participants' encrypted weights; empty if the last weights still hold."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.DRAWN, Key.SERVER, besides=Reveals.PRESENCE)


@message(25, "an encrypted masked sum")
class EncryptedSum(Message):
    """Encrypted, masked, re-randomised weighted sum of a silo; the server sees the ciphertexts."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.SUM, Key.SERVER, besides=Reveals.CIPHERTEXTS)


@message(26, "points for oblivious transfer")
class TransferOffer(Message):
    """Start of a round with private sub-sampling, with the server's points for the oblivious transfers."""

    public: mpz = custom_field(Reveals.NOTHING)
    constants: tuple[mpz, ...] = custom_field(Reveals.NOTHING)

    def encode(self) -> bytes:
        """Return all points as one list, the public point first."""
        return Writer().integers([self.public, *self.constants], POINT_BYTES).bytes()

    @classmethod
    def decode(cls, data: bytes) -> TransferOffer:
        """Return the offer that a body encodes; raise a ProtocolError if it has fewer than two points."""
        reader = Reader(data)
        points = reader.integers(POINT_BYTES)
        reader.finish()
        if len(points) < 2:
            raise ProtocolError("an offer of oblivious transfer has at least 2 points")
        return cls(public=points[0], constants=tuple(points[1:]))


@message(27, "hidden choices of oblivious transfers")
class TransferRequests(Message):
    """Oblivious-transfer requests of a silo, one per participant; each hides the requested place."""

    points: tuple[mpz, ...] = wire_field(
        integers(POINT_BYTES), Reveals.DRAWN, Key.NOBODY, besides=Reveals.PRESENCE
    )


@message(28, "sealed places of oblivious transfers")
class TransferAnswers(Message):
    """All places of every oblivious transfer, sealed so that the silo can open one place of each transfer."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.DRAWN, Key.NOBODY, besides=Reveals.PRESENCE)
