"""Represent one message of a channel: its cost, its bytes with their key, and its decoded numbers."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.errors import ChannelError, CompositionError
from fedveil.quantization.codec import MAX_RATIO, Codec, Sent, gaussian_channel
from fedveil.quantization.lattices import lattice
from fedveil.quantization.laws import GaussianLaw, LaplaceLaw, information_limit
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import KeyedStreams, update_key
from fedveil.randomness import BitSource, PrivacyRandomness

_KEY_BYTES: Final = 32
_SCALE: Final = struct.Struct("<d")


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Sender of a message, in one attempt at a round.

    Attributes:
        number: number of the silo or client.
        senders: number of senders.
        round: number of the round, from 1.
        attempt: number of earlier attempts at the round; every attempt has its own noise.
        grid: grid step to which the numbers to send were rounded, in the unit of the update.
        privacy: the sender's own randomness.
        measured: whether a cost includes the information limit, which takes longer to compute than the encoding.
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
        # The first attempt keeps the path without a suffix. Two attempts must never share noise: the difference of
        # their messages would show the difference of the sums.
        attempt = ("attempt", self.attempt) if self.attempt else ()
        return self.privacy.stream(purpose, self.round, self.number, *attempt)


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """Cost of one message of a silo or client.

    Attributes:
        parameters: number of parameters in the message.
        bytes: length of the whole message in bytes.
        limit: information limit of :func:`~fedveil.quantization.laws.information_limit`, in bits per
            parameter; None if the message is not compressed to its noise.
        acceptance: share of the quantiser's random draws that were accepted; None without draws.
    """

    parameters: int
    bytes: int
    limit: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True, kw_only=True)
class CodedMessage:
    """Message of a channel that sends bytes, with the key and scale that its receiver needs to decode it.

    Attributes:
        key: 32 bytes, for this message alone; a holder of the key learns more than the decoded value.
        message: bytes of the codec.
        scale: scale of the noise, if it is the sender's own (CEPAM by norm); None if it is a public number.
    """

    key: bytes
    message: bytes
    scale: float | None = None

    def to_bytes(self) -> bytes:
        """Return key, scale (float64, NaN for a public one) and message as one byte string, to be sealed."""
        return self.key + _SCALE.pack(math.nan if self.scale is None else self.scale) + self.message

    @classmethod
    def from_bytes(cls, data: bytes) -> CodedMessage:
        """Parse the result of :meth:`to_bytes`.

        Raises:
            ChannelError: too short.
        """
        start = _KEY_BYTES + _SCALE.size
        if len(data) < start:
            raise ChannelError(f"a coded message has at least {start} bytes, this one {len(data)}")
        (scale,) = _SCALE.unpack_from(data, _KEY_BYTES)
        return cls(key=data[:_KEY_BYTES], message=data[start:], scale=None if math.isnan(scale) else scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedMessage:
    """Message before it is received: numbers, or the bytes of a codec.

    Attributes:
        cost: cost of the message, if it is counted.
        values: the numbers, if the channel sends numbers.
        coded: the message as it is sent, if the channel sends bytes.
    """

    cost: MessageCost | None = None
    values: Float64[np.ndarray, " d"] | None = None
    coded: CodedMessage | None = None

    @property
    def numbers(self) -> Float64[np.ndarray, " d"]:
        """Numbers of the message.

        Raises:
            CompositionError: the channel sends bytes.
        """
        if self.values is None:
            raise CompositionError("a message that a codec made is no numbers before it is decoded")
        return self.values

    @property
    def payload(self) -> Float64[np.ndarray, " d"] | bytes:
        """Content to send: the numbers, or the codec's bytes with their key, to be sealed."""
        return self.numbers if self.coded is None else self.coded.to_bytes()


# --- quantized encoding -------------------------------------------------------------------------------------
# Shared by the channels that send bytes: the codec of a law, a message under its own key, and the assumptions that no
# epsilon covers.

KEY_REASON: Final = (
    "a message's key bounds the error of every parameter, and its blocks' spreads depend on the sum"
)
OF_LAYERS: Final = (
    "the lengths of messages and the spreads in them, and the message sizes and information limits in metrics.jsonl: "
    "they depend on private sums, so messages must travel encrypted",
    "numerical error in the channel's noise, and a break of its cipher: the noise has the stated distribution in real "
    "numbers, but is computed in float64 from 52-bit uniform numbers of a ChaCha20 stream under a fresh key",
)
"""Assumptions behind a layered quantiser, which no epsilon covers."""
OF_DITHERS: Final = (
    "numerical error in the dithered quantisers, and a break of their cipher: epsilon against readers and clients "
    "counts the noise of several messages, of which the quantisers' errors are independent in real numbers, but these "
    "are computed in float64 from 52-bit uniform numbers of a ChaCha20 stream under a fresh key",
)
"""Assumptions behind dithered quantisers; a claim about a single message's noise needs none of them."""


def layered_codec(law: GaussianLaw | LaplaceLaw, name: str | None) -> Codec:
    """Return the codec whose error has a law, on a lattice; None sends Gaussian noise in the cheapest way."""
    if name is None and isinstance(law, GaussianLaw):
        return gaussian_channel(law.std)
    return Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice(name or "Z1")))


def encode_layered(
    values: Float64[np.ndarray, " d"],
    sender: Sender,
    law: GaussianLaw | LaplaceLaw,
    name: str | None,
    scale: float | None = None,
) -> EncodedMessage:
    """Encode numbers as a message whose compression error has a given law.

    Args:
        values: (d,) float64, the numbers to send.
        sender: the sender.
        law: law of the error.
        name: name of the lattice; None: see :func:`layered_codec`.
        scale: scale of the noise, if it is the sender's own.
    """
    sent, coded = encode_quantized(layered_codec(law, name), values, sender, sender.source("channel"))
    cost = MessageCost(
        parameters=len(values),
        bytes=len(sent.message),
        limit=information_limit(values, law) if sender.measured else None,
        acceptance=sent.accepted / sent.draws,
    )
    return EncodedMessage(cost=cost, coded=replace(coded, scale=scale))


def encode_quantized(
    codec: Codec, values: Float64[np.ndarray, " d"], sender: Sender, source: BitSource
) -> tuple[Sent, CodedMessage]:
    """Encode numbers with a codec under a fresh key; return the codec's message, and it with the key.

    ``source`` is privacy randomness of this sender and attempt. It stands for a key agreement: the secret is drawn
    from it, so attempts never share a key. Numbers above 2^30 scales of the codec's law are clipped. Clipping moves
    two sums no farther apart, while a refusal would reveal that a sum is large.
    """
    longest = MAX_RATIO * codec.quantizer.law.scale
    secret = source.uint64(4).astype("<u8").tobytes()
    key = update_key(secret, run="one process", client=sender.number, round_number=sender.round)
    sent = codec.send(np.clip(values, -longest, longest), KeyedStreams(key))
    return sent, CodedMessage(key=key, message=sent.message)
