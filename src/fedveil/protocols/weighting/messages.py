"""Messages of the private weighting protocol (beside those that all protocols share)."""

from __future__ import annotations

from typing import Final

from gmpy2 import mpz

from fedveil.crypto.aead import OVERHEAD_BYTES
from fedveil.crypto.oblivious_transfer import POINT_BYTES
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.field_codecs import (
    BLOCK,
    REST,
    custom_field,
    fixed_bytes,
    integers,
    number,
    repeated,
    wire_field,
)
from fedveil.protocols.messages import Message, message
from fedveil.protocols.weighting.inputs import SEED_BYTES
from fedveil.protocols.wire import Reader, Writer

_MOST: Final = 1 << 19
"""No letter holds more ciphertexts: they have 512 bytes or more each; and there is one for every user."""
_BLOCKS: Final = repeated(BLOCK, size=4, most=_MOST)


@message(20, "the server's public encryption key")
class WeightingKey(Message):
    """The server's public encryption key."""

    key: bytes = wire_field(REST, Reveals.NOTHING)


@message(21, "the blinding seed, sealed for one silo")
class SealedSeed(Message):
    """The seed of the multiplicative blinds, from silo 0 to another silo, sealed under their pairwise key."""

    sealed: bytes = wire_field(fixed_bytes(SEED_BYTES + OVERHEAD_BYTES), Reveals.NOTHING)


@message(22, "doubly blinded record counts")
class BlindedHistogram(Message):
    """A silo's record counts, blinded by r_u and under pairwise masks: uniform numbers to the server."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.COUNTS, Key.SILOS, besides=Reveals.PRESENCE)


@message(23, "the users who take part")
class Participants(Message):
    """Which users have a record anywhere (one byte each)."""

    present: tuple[bool, ...] = wire_field(
        repeated(number(1).mapped(int, bool), size=4, most=_MOST), Reveals.PRESENCE
    )


@message(24, "the round's encrypted weights")
class EncryptedWeights(Message):
    """A round begins: fresh encrypted weights of all participants, or none if the last ones still hold."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.DRAWN, Key.SERVER, besides=Reveals.PRESENCE)


@message(25, "an encrypted masked sum")
class EncryptedSum(Message):
    """A silo's encrypted, masked and re-randomised weighted sum; the server, who decrypts it, sees how it was made."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.SUM, Key.SERVER, besides=Reveals.CIPHERTEXTS)


@message(26, "points for oblivious transfer")
class TransferOffer(Message):
    """A round with private sub-sampling begins: the server's points for the oblivious transfers."""

    public: mpz = custom_field(Reveals.NOTHING)
    constants: tuple[mpz, ...] = custom_field(Reveals.NOTHING)

    def encode(self) -> bytes:
        """Return the points, as one list."""
        return Writer().integers([self.public, *self.constants], POINT_BYTES).bytes()

    @classmethod
    def decode(cls, data: bytes) -> TransferOffer:
        """Return the offer of a body."""
        reader = Reader(data)
        points = reader.integers(POINT_BYTES)
        reader.finish()
        if len(points) < 2:
            raise ProtocolError("an offer of oblivious transfer has at least 2 points")
        return cls(public=points[0], constants=tuple(points[1:]))


@message(27, "hidden choices of oblivious transfers")
class TransferRequests(Message):
    """A silo's requests, one per participant: the place asked for is hidden."""

    points: tuple[mpz, ...] = wire_field(
        integers(POINT_BYTES), Reveals.DRAWN, Key.NOBODY, besides=Reveals.PRESENCE
    )


@message(28, "sealed places of oblivious transfers")
class TransferAnswers(Message):
    """All places of every transfer, sealed so that one of each opens."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.DRAWN, Key.NOBODY, besides=Reveals.PRESENCE)
