"""How the lattice points of a block are written: one integer after another, each under what is known by then.

The parameters of a block are modelled as N(0, s^2) with the block's spread s, which travels in the message. Given the
scale beta and the accepted dither V, the lattice point M is the quantised x / beta - V. On Z^n its coordinates are
independent and coordinate i is N(-V_i, (s / beta)^2) rounded to an integer: the model is exact for a Gaussian x. On the
other lattices the integer coordinates are written from the last to the first, each a Gaussian on the coset that the
ones before it leave, with the variance of x_i / beta and of the error (rho^2 / (n + 2), a uniform point of the ball),
less the variance that the width of the coset's steps adds by itself.

A model decides how many bits are spent, never what is decoded.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from fedveil.quantization.errors import MessageError
from fedveil.quantization.lattices import Lattice
from fedveil.quantization.models import Contexts
from fedveil.quantization.symbols import SymbolReader, SymbolWriter


def _cubic(lattice: Lattice) -> bool:
    return lattice.name.startswith("Z")


def _deviation(lattice: Lattice, ratio: Float64[np.ndarray, " m"], i: int) -> Float64[np.ndarray, " m"]:
    """Standard deviation of integer coordinate i, in its own steps."""
    step = float(lattice.generator[i, i])
    excess = lattice.packing_radius**2 / (lattice.dimension + 2) - step**2 / 12
    square = ratio * ratio
    return np.asarray(np.sqrt(np.maximum(square + excess, 0.25 * square)) / step)


def write_points(
    writer: SymbolWriter,
    points: Float64[np.ndarray, "m n"],
    dithers: Float64[np.ndarray, "m n"],
    ratio: Float64[np.ndarray, " m"],
    lattice: Lattice,
) -> None:
    """Write lattice points; ``ratio`` is s / beta of each sub-vector."""
    if _cubic(lattice):
        contexts = Contexts.choose(dithers.ravel(), np.repeat(ratio, lattice.dimension))
        writer.integers(points.ravel().astype(np.int64), contexts)
        return
    integers = lattice.integers(points)
    rest = -dithers
    for i in range(lattice.dimension - 1, -1, -1):
        row = lattice.generator[i]
        mean = rest[:, i] / row[i]
        centre = np.rint(mean)
        contexts = Contexts.choose(centre - mean, _deviation(lattice, ratio, i))
        writer.integers(integers[:, i] - centre.astype(np.int64), contexts)
        rest -= integers[:, i, None] * row


def read_points(
    reader: SymbolReader,
    dithers: Float64[np.ndarray, "m n"],
    ratio: Float64[np.ndarray, " m"],
    lattice: Lattice,
) -> Float64[np.ndarray, "m n"]:
    """Read what :func:`write_points` wrote.

    Raises:
        MessageError: a point too far away for any sender.
    """
    if _cubic(lattice):
        contexts = Contexts.choose(dithers.ravel(), np.repeat(ratio, lattice.dimension))
        return reader.integers(contexts).astype(np.float64).reshape(dithers.shape)
    integers = np.empty(dithers.shape, dtype=np.int64)
    rest = -dithers
    for i in range(lattice.dimension - 1, -1, -1):
        row = lattice.generator[i]
        mean = rest[:, i] / row[i]
        centre = np.rint(mean)
        contexts = Contexts.choose(centre - mean, _deviation(lattice, ratio, i))
        integers[:, i] = centre.astype(np.int64) + reader.integers(contexts)
        rest -= integers[:, i, None] * row
        if np.abs(rest).max(initial=0) > 2.0**58:
            raise MessageError("the message holds a lattice point that no sender writes")
    return lattice.points(integers)
