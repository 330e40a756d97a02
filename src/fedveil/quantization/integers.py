"""Encode whole numbers as bytes by a range coder, without a key: messages that are rounded after their noise.

A message is, block by block, the root mean square of the block's numbers and the numbers themselves, as a rounded
Gaussian of that size. The model determines the number of bits, never the decoded numbers.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from fedveil.quantization.codec import BLOCK, read_spread, spread_code
from fedveil.quantization.errors import MessageError
from fedveil.quantization.models import Contexts
from fedveil.quantization.symbols import SymbolReader, SymbolWriter

_SPREAD_BITS = 16


def encode_integers(values: Int64[np.ndarray, " m"]) -> bytes:
    """Return the code of numbers below 2^59.

    >>> decode_integers(encode_integers(np.array([3, -5, 0])), 3).tolist()
    [3, -5, 0]
    """
    writer = SymbolWriter()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        code = spread_code(block.astype(np.float64), 1.0)
        writer.field(code, _SPREAD_BITS)
        writer.integers(block, _contexts(code, len(block)))
    return writer.finish()


def decode_integers(message: bytes, length: int) -> Int64[np.ndarray, " m"]:
    """Return the ``length`` numbers of a code.

    Raises:
        MessageError: bytes that no sender writes, or the code of other numbers.
    """
    reader, found = SymbolReader(message), np.empty(length, dtype=np.int64)
    for start in range(0, length, BLOCK):
        block = found[start : start + BLOCK]
        block[:] = reader.integers(_contexts(reader.field(_SPREAD_BITS), len(block)))
    if encode_integers(found) != message:
        raise MessageError("the message is the code of no numbers of this length")
    return found


def _contexts(code: int, count: int) -> Contexts:
    """Return the models of a block's numbers, given the code of their root mean square."""
    return Contexts.choose(np.zeros(count), np.full(count, read_spread(code)))
