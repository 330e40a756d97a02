"""Quantise updates with an error that is privacy noise of an exact law, and encode them as bytes.

A :class:`~fedveil.quantization.codec.Codec` turns an update into one byte string and back into update + noise.
It is the entry point; docs/theory/lrsuq.md gives the guarantees and their conditions.
"""

from fedveil.errors import (
    ChannelError,
    ForeignStreamError,
    MessageError,
    StreamReuseError,
    UnsupportedPairError,
    UpdateError,
)
from fedveil.quantization.codec import Codec, gaussian_channel
from fedveil.quantization.lattices import Lattice, lattice
from fedveil.quantization.laws import (
    BallLaw,
    CellLaw,
    GaussianLaw,
    LaplaceLaw,
    Law,
    NoiseLaw,
    StudentLaw,
    gaussian_limit,
    information_limit,
)
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import InsecureSimulationStreams, KeyedStreams, SharedStreams, update_key

__all__ = [
    "BallLaw",
    "CellLaw",
    "ChannelError",
    "Codec",
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
    "gaussian_channel",
    "gaussian_limit",
    "information_limit",
    "lattice",
    "update_key",
]
