"""Messages of the private weighting protocol (beside those that all protocols share)."""

from __future__ import annotations

from typing import Final

from gmpy2 import mpz

from fedveil.crypto.aead import OVERHEAD_BYTES
from fedveil.crypto.transfer import POINT_BYTES
from fedveil.privacy.claims import Key, Tells
from fedveil.protection.errors import ProtocolError
from fedveil.protection.fields import BLOCK, REST, fixed, integers, many, number, sent_as, told
from fedveil.protection.messages import Message, message
from fedveil.protection.weighting.given import SEED_BYTES
from fedveil.protection.wire import Reader, Writer

_MOST: Final = 1 << 19
"""No letter holds more ciphertexts: they have 512 bytes or more each; and there is one for every user."""
_BLOCKS: Final = many(BLOCK, size=4, most=_MOST)


@message(20, "the server's public encryption key")
class WeightingKey(Message):
    """The server's public encryption key."""

    key: bytes = sent_as(REST, Tells.NOTHING)


@message(21, "the blinding seed, sealed for one silo")
class SealedSeed(Message):
    """The seed of the multiplicative blinds, from silo 0 to another silo, sealed under their pairwise key."""

    sealed: bytes = sent_as(fixed(SEED_BYTES + OVERHEAD_BYTES), Tells.NOTHING)


@message(22, "doubly blinded record counts")
class BlindedHistogram(Message):
    """A silo's record counts, blinded by r_u and under pairwise masks: uniform numbers to the server."""

    blocks: tuple[bytes, ...] = sent_as(_BLOCKS, Tells.COUNTS, Key.SILOS, besides=Tells.PRESENCE)


@message(23, "the users who take part")
class Participants(Message):
    """Which users have a record anywhere (one byte each)."""

    present: tuple[bool, ...] = sent_as(many(number(1).of(int, bool), size=4, most=_MOST), Tells.PRESENCE)


@message(24, "the round's encrypted weights")
class EncryptedWeights(Message):
    """A round begins: fresh encrypted weights of all participants, or none if the last ones still hold."""

    blocks: tuple[bytes, ...] = sent_as(_BLOCKS, Tells.DRAWN, Key.SERVER, besides=Tells.PRESENCE)


@message(25, "an encrypted masked sum")
class EncryptedSum(Message):
    """A silo's encrypted, masked and re-randomised weighted sum; the server, who decrypts it, sees how it was made."""

    blocks: tuple[bytes, ...] = sent_as(_BLOCKS, Tells.SUM, Key.SERVER, besides=Tells.CIPHERTEXTS)


@message(26, "points for oblivious transfer")
class TransferOffer(Message):
    """A round with private sub-sampling begins: the server's points for the oblivious transfers."""

    public: mpz = told(Tells.NOTHING)
    constants: tuple[mpz, ...] = told(Tells.NOTHING)

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

    points: tuple[mpz, ...] = sent_as(integers(POINT_BYTES), Tells.DRAWN, Key.NOBODY, besides=Tells.PRESENCE)


@message(28, "sealed places of oblivious transfers")
class TransferAnswers(Message):
    """All places of every transfer, sealed so that one of each opens."""

    blocks: tuple[bytes, ...] = sent_as(_BLOCKS, Tells.DRAWN, Key.NOBODY, besides=Tells.PRESENCE)
