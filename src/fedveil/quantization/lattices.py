"""Define lattices with exact, vectorised closest-point decoders, and the entropy code of their points.

A lattice point is ``k @ generator`` for an integer row ``k``. Generators are lower triangular. The last coordinate of
a point therefore depends on the last integer alone, the one before it on the last two, and so on. The entropy coder
sends the integers in that order. Closest-point algorithms: Conway & Sloane, Sphere Packings, Lattices and Groups, ch.
20.

=======  ==========  ==================  ======  ==========================
lattice  dimension   packing radius      volume  ball / cell (acceptance)
=======  ==========  ==================  ======  ==========================
Z^n      n           1/2                 1       1, 0.785, 0.524, ...
A2       2           1/2                 0.866   0.907
D3       3           0.707               2       0.740
D4       4           0.707               2       0.617
E8       8           0.707               1       0.254
=======  ==========  ==================  ======  ==========================

Encode the lattice points of a block as integers, each conditional on the integers before it.

The parameters of a block are modelled as N(0, s^2) with the block's spread s, which the message contains. Given the
scale beta and the accepted dither V, the lattice point M is the quantised x / beta - V. On Z^n its coordinates are
independent, and coordinate i is N(-V_i, (s / beta)^2) rounded to an integer. This model is exact for a Gaussian x. On
other lattices the integer coordinates are written from the last to the first, each as a Gaussian on the coset that
the later coordinates leave. Its variance is that of x_i / beta, plus that of the error (rho^2 / (n + 2), a uniform
point of the ball), minus the variance of the rounding to the coset's steps.

A model determines the number of bits, never the decoded values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.errors import ChannelError, MessageError
from fedveil.quantization.symbols import Contexts, SymbolReader, SymbolWriter


@dataclass(frozen=True, kw_only=True, eq=False)
class Lattice:
    """Lattice in n dimensions.

    Attributes:
        name: Z1, Z2, ..., A2, D3, D4 or E8.
        generator: (n, n), lower triangular, positive diagonal; rows are basis vectors.
        packing_radius: radius of the largest ball inside the basic (Voronoi) cell.
        nearest: maps (m, n) points to the (m, n) closest lattice points; on a border any of the closest.
    """

    name: str
    generator: Float64[np.ndarray, "n n"]
    packing_radius: float
    nearest: Callable[[Float64[np.ndarray, "m n"]], Float64[np.ndarray, "m n"]]

    @property
    def dimension(self) -> int:
        """Number of coordinates n."""
        return len(self.generator)

    @property
    def volume(self) -> float:
        """Volume of the basic (Voronoi) cell."""
        return float(np.prod(np.diagonal(self.generator)))

    @property
    def acceptance(self) -> float:
        """Probability that a dither is accepted: volume of the packing ball over volume of the cell."""
        n = self.dimension
        ball: float = math.pi ** (n / 2) / math.gamma(n / 2 + 1) * self.packing_radius**n
        return min(1.0, ball / self.volume)

    def points(self, integers: Int64[np.ndarray, "m n"]) -> Float64[np.ndarray, "m n"]:
        """Return the (m, n) lattice points of (m, n) integer coordinates, by additions in a fixed order."""
        # No matrix product: BLAS may sum in another order on another processor, and both ends need the same bits.
        points = np.zeros(integers.shape)
        for i, row in enumerate(self.generator):
            for j in np.flatnonzero(row):
                points[:, j] += row[j] * integers[:, i]
        return points

    def integers(self, points: Float64[np.ndarray, "m n"]) -> Int64[np.ndarray, "m n"]:
        """Return the integer coordinates of lattice points; the inverse of :meth:`points`."""
        residual = points.copy()
        integers = np.empty(points.shape, dtype=np.int64)
        for i in range(self.dimension - 1, -1, -1):
            k = np.rint(residual[:, i] / self.generator[i, i])
            integers[:, i] = k
            for j in np.flatnonzero(self.generator[i, :i]):
                residual[:, j] -= self.generator[i, j] * k
        return integers

    def cell_points(self, uniforms: Float64[np.ndarray, "m n"]) -> Float64[np.ndarray, "m n"]:
        """Map uniforms on the unit cube to points that are uniform on the basic cell.

        The generator maps the cube to a parallelepiped; subtracting the closest lattice point folds it into the cell.
        """
        if self.nearest is np.rint:
            return uniforms - 0.5
        points = np.zeros(uniforms.shape)
        for i, row in enumerate(self.generator):
            for j in np.flatnonzero(row):
                points[:, j] += row[j] * uniforms[:, i]
        points -= self.nearest(points)
        return points


def _closest_even(x: Float64[np.ndarray, "m n"]) -> Float64[np.ndarray, "m n"]:
    """Return the closest points of D_n, whose coordinates have an even sum.

    Round every coordinate. If the sum is odd, round the coordinate with the largest error the other way.
    """
    rounded: Float64[np.ndarray, "m n"] = np.rint(x)
    error = x - rounded
    odd = np.flatnonzero(np.rint(rounded.sum(axis=1) * 0.5) * 2.0 != rounded.sum(axis=1))
    worst = np.argmax(np.abs(error[odd]), axis=1)
    rounded[odd, worst] += np.where(error[odd, worst] < 0, -1.0, 1.0)
    return rounded


def _closer(
    x: Float64[np.ndarray, "m n"], first: Float64[np.ndarray, "m n"], second: Float64[np.ndarray, "m n"]
) -> Float64[np.ndarray, "m n"]:
    """Return, row by row, the closer of two candidates to ``x``; overwrites ``first``."""
    difference = first - second
    middle = 0.5 * (first + second)
    nearer_second = np.einsum("ij,ij->i", x - middle, difference) < 0
    first[nearer_second] = second[nearer_second]
    return first


def _closest_hexagonal(x: Float64[np.ndarray, "m n"]) -> Float64[np.ndarray, "m n"]:
    """Return the closest points of A2.

    A2 is a rectangular lattice with sides 1 and sqrt(3), together with a copy shifted to the middle of a rectangle.
    """
    sides = np.array([1.0, math.sqrt(3.0)])
    return _closer(x, np.rint(x / sides) * sides, (np.rint(x / sides - 0.5) + 0.5) * sides)


def _closest_e8(x: Float64[np.ndarray, "m n"]) -> Float64[np.ndarray, "m n"]:
    """Return the closest points of E8, the union of D8 and D8 shifted by (1/2, ..., 1/2)."""
    return _closer(x, _closest_even(x), _closest_even(x - 0.5) + 0.5)


def integer_lattice(n: int) -> Lattice:
    """Return Z^n for n >= 1.

    Raises:
        ChannelError: n is below 1.
    """
    if n < 1:
        raise ChannelError(f"Z^n needs n >= 1, got {n}")
    return Lattice(name=f"Z{n}", generator=np.eye(n), packing_radius=0.5, nearest=np.rint)


def _even_generator(n: int) -> Float64[np.ndarray, "n n"]:
    generator = np.eye(n) - np.eye(n, k=-1)
    generator[0, 0] = 2.0
    return generator


def _e8_generator() -> Float64[np.ndarray, "8 8"]:
    generator = _even_generator(8)
    generator[7] = 0.5
    return generator


A2 = Lattice(
    name="A2",
    generator=np.array([[1.0, 0.0], [0.5, math.sqrt(3.0) / 2]]),
    packing_radius=0.5,
    nearest=_closest_hexagonal,
)
D3 = Lattice(name="D3", generator=_even_generator(3), packing_radius=math.sqrt(0.5), nearest=_closest_even)
D4 = Lattice(name="D4", generator=_even_generator(4), packing_radius=math.sqrt(0.5), nearest=_closest_even)
E8 = Lattice(name="E8", generator=_e8_generator(), packing_radius=math.sqrt(0.5), nearest=_closest_e8)

Z1 = integer_lattice(1)
Z2 = integer_lattice(2)
Z3 = integer_lattice(3)


def lattice(name: str) -> Lattice:
    """Return the lattice of a name: A2, D3, D4, E8, or Z and a number of dimensions from 1 to 64.

    Raises:
        ChannelError: no lattice has this name.

    >>> lattice("Z5").dimension
    5
    """
    lattices = {candidate.name: candidate for candidate in (Z1, Z2, Z3, A2, D3, D4, E8)}
    if name in lattices:
        return lattices[name]
    if name[:1] == "Z" and name[1:].isascii() and name[1:].isdigit() and 1 <= int(name[1:]) <= 64:
        return integer_lattice(int(name[1:]))
    raise ChannelError(f"no lattice is called {name!r}: choose Z1 to Z64, A2, D3, D4 or E8")


# --- entropy coding of lattice points ---


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
        lattice: lattice of the points.
    """
    if _cubic(lattice):
        contexts = Contexts.choose(dithers.ravel(), np.repeat(ratio, lattice.dimension))
        writer.integers(points.ravel().astype(np.int64), contexts)
        return
    integers = lattice.integers(points)
    residual = -dithers
    for i in range(lattice.dimension - 1, -1, -1):
        row = lattice.generator[i]
        mean = residual[:, i] / row[i]
        centre = np.rint(mean)
        contexts = Contexts.choose(centre - mean, _deviation(lattice, ratio, i))
        writer.integers(integers[:, i] - centre.astype(np.int64), contexts)
        residual -= integers[:, i, None] * row


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
    residual = -dithers
    for i in range(lattice.dimension - 1, -1, -1):
        row = lattice.generator[i]
        mean = residual[:, i] / row[i]
        centre = np.rint(mean)
        contexts = Contexts.choose(centre - mean, _deviation(lattice, ratio, i))
        integers[:, i] = centre.astype(np.int64) + reader.integers(contexts)
        residual -= integers[:, i, None] * row
        # A hostile message must not overflow int64 in the next coordinate.
        if np.abs(residual).max(initial=0) > 2.0**58:
            raise MessageError("the message holds a lattice point that no sender writes")
    return lattice.points(integers)
