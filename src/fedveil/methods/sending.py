"""One message of a channel: what it cost, its bytes with what decodes them, and what was decoded."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.errors import CompositionError
from fedveil.quantization.errors import ChannelError
from fedveil.randomness import BitSource, PrivacyRandomness

_KEY_BYTES: Final = 32
_SCALE: Final = struct.Struct("<d")


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Who sends a message, in which attempt at a round.

    Attributes:
        number: the silo's or client's own.
        senders: how many there are.
        round: counts from 1.
        attempt: how often the round was begun before; every attempt has noise of its own.
        grid: the step on which what is sent was rounded, in the unit of the update.
        privacy: the sender's own randomness.
        measured: whether a cost says what the message could cost at least, which takes longer than to encode it.
    """

    number: int
    senders: int
    round: int
    attempt: int = 0
    grid: float
    privacy: PrivacyRandomness
    measured: bool = True

    def source(self, purpose: str) -> BitSource:
        """Return the sender's randomness for a purpose in this attempt."""
        attempt = ("attempt", self.attempt) if self.attempt else ()
        return self.privacy.stream(purpose, self.round, self.number, *attempt)


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """What one message of a silo or client cost.

    Attributes:
        parameters: how many it holds.
        bytes: length of the whole message.
        limit: the information limit of :func:`~fedveil.quantization.information.information_limit`, bits a parameter;
            None where the message is not compressed to its noise.
        acceptance: share of the quantiser's draws that were accepted; None where nothing is drawn.
    """

    parameters: int
    bytes: int
    limit: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A message of a channel of bytes, and what its receiver needs to decode it.

    Attributes:
        key: 32 bytes, of this message alone; who holds it learns more than the decoded value.
        message: what the codec made.
        scale: what its noise is measured in, where that is the sender's own (CEPAM by norm); None: a public number.
    """

    key: bytes
    message: bytes
    scale: float | None = None

    def to_bytes(self) -> bytes:
        """Return key, scale (float64, NaN for a public one) and message as one byte string, to be sealed."""
        return self.key + _SCALE.pack(math.nan if self.scale is None else self.scale) + self.message

    @classmethod
    def from_bytes(cls, data: bytes) -> Coded:
        """Return the message of :meth:`to_bytes`.

        Raises:
            ChannelError: too short.
        """
        start = _KEY_BYTES + _SCALE.size
        if len(data) < start:
            raise ChannelError(f"a coded message has at least {start} bytes, this one {len(data)}")
        (scale,) = _SCALE.unpack_from(data, _KEY_BYTES)
        return cls(key=data[:_KEY_BYTES], message=data[start:], scale=None if math.isnan(scale) else scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sending:
    """One message before it is received: numbers, or what a codec made of them.

    Attributes:
        cost: of the message, where it is counted.
        values: the numbers, where the channel sends numbers.
        coded: the message as it travels, where the channel makes bytes of it.
    """

    cost: MessageCost | None = None
    values: Float64[np.ndarray, " d"] | None = None
    coded: Coded | None = None

    @property
    def numbers(self) -> Float64[np.ndarray, " d"]:
        """The numbers.

        Raises:
            CompositionError: the channel makes bytes of what it sends.
        """
        if self.values is None:
            raise CompositionError("a message that a codec made is no numbers before it is decoded")
        return self.values

    @property
    def payload(self) -> Float64[np.ndarray, " d"] | bytes:
        """What travels: the numbers, or the codec's bytes with their key, to be sealed."""
        return self.numbers if self.coded is None else self.coded.to_bytes()
