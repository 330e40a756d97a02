"""Quantisers whose error is privacy noise of an exact law, and the bytes that carry them.

A :class:`~fedveil.channel.codec.Channel` turns an update into one byte string and back into update + noise.
Start there; docs/theory/lrsuq.md states what holds and under which conditions.
"""

from fedveil.channel.codec import Channel, decode_any, gaussian_channel
from fedveil.channel.errors import (
    ChannelError,
    ForeignStreamError,
    MessageError,
    StreamReuseError,
    UnsupportedPairError,
    UpdateError,
)
from fedveil.channel.information import gaussian_limit, information_limit
from fedveil.channel.lattices import Lattice, lattice
from fedveil.channel.laws import BallLaw, CellLaw, GaussianLaw, LaplaceLaw, Law, NoiseLaw, StudentLaw
from fedveil.channel.quantizers import LayeredQuantizer
from fedveil.channel.streams import InsecureSimulationStreams, KeyedStreams, SharedStreams, update_key
from fedveil.channel.wire import read_header

__all__ = [
    "BallLaw",
    "CellLaw",
    "Channel",
    "ChannelError",
    "ForeignStreamError",
    "GaussianLaw",
    "InsecureSimulationStreams",
    "KeyedStreams",
    "LaplaceLaw",
    "Lattice",
    "Law",
    "LayeredQuantizer",
    "MessageError",
    "NoiseLaw",
    "SharedStreams",
    "StreamReuseError",
    "StudentLaw",
    "UnsupportedPairError",
    "UpdateError",
    "decode_any",
    "gaussian_channel",
    "gaussian_limit",
    "information_limit",
    "lattice",
    "read_header",
    "update_key",
]
