"""What channels of bytes share: the codec of a law, a message under a key of its own, and what no epsilon covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.methods.sending import Coded, MessageCost, Sender, Sending
from fedveil.quantization.codec import MAX_RATIO, Codec, Sent, gaussian_channel
from fedveil.quantization.information import information_limit
from fedveil.quantization.lattices import lattice
from fedveil.quantization.laws import GaussianLaw, LaplaceLaw
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import KeyedStreams, update_key
from fedveil.randomness import BitSource

KEY_REASON: Final = (
    "a message's key bounds the error of every parameter, and its blocks' spreads depend on the sum"
)
OF_LAYERS: Final = (
    "the lengths of messages and the spreads in them, and the message sizes and information limits in metrics.jsonl: "
    "they depend on private sums, so messages must travel encrypted",
    "numerical error in the channel's noise, and a break of its cipher: the noise has the stated distribution in real "
    "numbers, but is computed in float64 from 52-bit uniform numbers of a ChaCha20 stream under a fresh key",
)
"""What no epsilon over a layered quantiser covers."""
OF_DITHERS: Final = (
    "numerical error in the dithered quantisers, and a break of their cipher: epsilon against readers and clients "
    "counts the noise of several messages, of which the quantisers' errors are independent in real numbers, but these "
    "are computed in float64 from 52-bit uniform numbers of a ChaCha20 stream under a fresh key",
)
"""What no epsilon over Gaussian noise of several messages covers, where they are dithered; one message is covered."""


def layered_codec(law: GaussianLaw | LaplaceLaw, name: str | None) -> Codec:
    """Return the codec whose error has a law, on a lattice; None sends Gaussian noise in the cheapest way."""
    if name is None and isinstance(law, GaussianLaw):
        return gaussian_channel(law.std)
    return Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice(name or "Z1")))


def layered(
    values: Float64[np.ndarray, " d"],
    at: Sender,
    law: GaussianLaw | LaplaceLaw,
    name: str | None,
    scale: float | None = None,
) -> Sending:
    """Return numbers as a message whose compression error has a law.

    Args:
        values: (d,) what is sent.
        at: who sends it.
        law: of the error.
        name: of the lattice; None: see :func:`layered_codec`.
        scale: what the noise is measured in, where that is the sender's own.
    """
    sent, coded = quantized(layered_codec(law, name), values, at, at.source("channel"))
    cost = MessageCost(
        parameters=len(values),
        bytes=len(sent.message),
        limit=information_limit(values, law) if at.measured else None,
        acceptance=sent.accepted / sent.drawn,
    )
    return Sending(cost=cost, coded=replace(coded, scale=scale))


def quantized(
    codec: Codec, values: Float64[np.ndarray, " d"], at: Sender, source: BitSource
) -> tuple[Sent, Coded]:
    """Return the message of a codec, and the message with its key, which no other message has.

    The source is privacy randomness of this sender and attempt. It stands for a key agreement: the secret is drawn from
    it, so attempts never share a key. A number that is too large for the codec, above 2^30 scales of its law, is cut:
    nobody moves a cut sum farther than the sum, and a refusal would tell of it.
    """
    longest = MAX_RATIO * codec.quantizer.law.scale
    secret = source.uint64(4).astype("<u8").tobytes()
    key = update_key(secret, run="one process", client=at.number, round_number=at.round)
    sent = codec.send(np.clip(values, -longest, longest), KeyedStreams(key))
    return sent, Coded(key=key, message=sent.message)
