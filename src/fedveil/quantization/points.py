"""Encode the lattice points of a block as integers, each conditional on the integers before it.

The parameters of a block are modelled as N(0, s^2) with the block's spread s, which the message contains. Given the
scale beta and the accepted dither V, the lattice point M is the quantised x / beta - V. On Z^n its coordinates are
independent, and coordinate i is N(-V_i, (s / beta)^2) rounded to an integer. This model is exact for a Gaussian x. On
other lattices the integer coordinates are written from the last to the first, each as a Gaussian on the coset that
the later coordinates leave. Its variance is that of x_i / beta, plus that of the error (rho^2 / (n + 2), a uniform
point of the ball), minus the variance of the rounding to the coset's steps.

A model determines the number of bits, never the decoded values.
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
    """Return the standard deviation of integer coordinate i, in its own steps."""
    step = float(lattice.generator[i, i])
    excess = lattice.packing_radius**2 / (lattice.dimension + 2) - step**2 / 12
    square = ratio * ratio
    # The excess can be negative; a floor of a quarter of the variance keeps the model valid.
    return np.asarray(np.sqrt(np.maximum(square + excess, 0.25 * square)) / step)


def write_points(
    writer: SymbolWriter,
    points: Float64[np.ndarray, "m n"],
    dithers: Float64[np.ndarray, "m n"],
    ratio: Float64[np.ndarray, " m"],
    lattice: Lattice,
) -> None:
    """Write lattice points.

    Args:
        writer: destination.
        points: (m, n) lattice points.
        dithers: (m, n) accepted dithers.
        ratio: (m,) s / beta of each sub-vector.
        lattice: of the points.
    """
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
    """Read the lattice points that :func:`write_points` wrote.

    Raises:
        MessageError: a point that is too far away for any sender.
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
        # A hostile message must not overflow int64 in the next coordinate.
        if np.abs(rest).max(initial=0) > 2.0**58:
            raise MessageError("the message holds a lattice point that no sender writes")
    return lattice.points(integers)
