"""What every lattice must satisfy: an exact closest-point decoder, its radius, its volume, its coordinates."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedveil.quantization import ChannelError, Lattice, lattice

NAMES = ("Z1", "Z2", "Z3", "Z5", "A2", "D3", "D4", "E8")
# Squared covering radius, volume of the cell and number of shortest vectors (Conway & Sloane, table 1.2 and ch. 4).
KNOWN = {
    "Z1": (1 / 4, 1, 2),
    "Z2": (1 / 2, 1, 4),
    "Z3": (3 / 4, 1, 6),
    "Z5": (5 / 4, 1, 10),
    "A2": (1 / 3, 3**0.5 / 2, 6),
    "D3": (1, 2, 12),
    "D4": (1, 2, 24),
    "E8": (1, 1, 240),
}


@pytest.fixture(params=NAMES)
def grid(request: pytest.FixtureRequest) -> Lattice:
    return lattice(request.param)


def short_vectors(grid: Lattice) -> np.ndarray:
    """All lattice points within twice the covering radius of the origin, among which every Voronoi neighbour is."""
    if grid.name == "E8":
        halves = np.array(list(itertools.product((-0.5, 0.5), repeat=8)))
        wholes = np.array(
            [
                np.eye(8)[i] * a + np.eye(8)[j] * b
                for i, j in itertools.combinations(range(8), 2)
                for a in (1, -1)
                for b in (1, -1)
            ]
        )
        doubles = np.array([np.eye(8)[i] * a for i in range(8) for a in (2.0, -2.0)])
        fours = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=8)))
        fours = fours[np.abs(fours).sum(axis=1) == 4]
        return np.concatenate((halves[np.prod(halves, axis=1) > 0], wholes, doubles, fours))
    reach = 4 if grid.dimension <= 4 else 2
    integers = np.array(
        list(itertools.product(range(-reach, reach + 1), repeat=grid.dimension)), dtype=np.int64
    )
    points = grid.points(integers)
    square = (points**2).sum(axis=1)
    return points[(square > 0) & (square <= 4 * KNOWN[grid.name][0] + 1e-9)]


def squared(x: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", x, x)


def test_no_neighbour_is_closer_than_the_decoded_point(grid: Lattice) -> None:
    x = np.random.default_rng(0).normal(size=(4000, grid.dimension)) * 3
    decoded = grid.nearest(x)
    assert np.array_equal(grid.points(grid.integers(decoded)), decoded), "not a lattice point"
    error = x - decoded
    for neighbour in short_vectors(grid):
        assert (squared(error) <= squared(error - neighbour) + 1e-9).all()


def test_brute_force_finds_the_same_point(grid: Lattice) -> None:
    x = np.random.default_rng(1).uniform(-0.5, 0.5, size=(300, grid.dimension))
    candidates = np.concatenate((np.zeros((1, grid.dimension)), short_vectors(grid)))
    best = ((x[:, None] - candidates) ** 2).sum(axis=2).min(axis=1)
    np.testing.assert_allclose(squared(x - grid.nearest(x)), best, atol=1e-12)


def test_packing_radius_is_half_the_shortest_vector(grid: Lattice) -> None:
    lengths = squared(short_vectors(grid))
    shortest = lengths.min()
    assert grid.packing_radius**2 * 4 == pytest.approx(shortest)
    assert np.isclose(lengths, shortest).sum() == KNOWN[grid.name][2], "kissing number"


def test_volume_is_the_determinant(grid: Lattice) -> None:
    assert (
        grid.volume == pytest.approx(abs(np.linalg.det(grid.generator))) == pytest.approx(KNOWN[grid.name][1])
    )


def test_decoding_error_fills_the_cell(grid: Lattice) -> None:
    """The normalised second moment of the error of a uniform dither is that of the cell (Conway & Sloane, ch. 21)."""
    moments = {
        "Z1": 1 / 12,
        "Z2": 1 / 12,
        "Z3": 1 / 12,
        "Z5": 1 / 12,
        "A2": 0.0801875,
        "D3": 0.0787451,
        "D4": 0.0766032,
        "E8": 0.0716821,
    }
    cell = grid.cell_points(np.random.default_rng(2).random((200_000, grid.dimension)))
    assert not grid.nearest(cell * (1 - 1e-9)).any(), (
        "a point of the cell is nearest to another lattice point"
    )
    measured = squared(cell).mean() / grid.dimension / grid.volume ** (2 / grid.dimension)
    assert measured == pytest.approx(moments[grid.name], rel=5e-3)


def test_acceptance_is_the_share_of_the_cell_inside_the_ball(grid: Lattice) -> None:
    cell = grid.cell_points(np.random.default_rng(3).random((200_000, grid.dimension)))
    share = (squared(cell) <= grid.packing_radius**2).mean()
    assert share == pytest.approx(grid.acceptance, abs=5 * (0.25 / 200_000) ** 0.5)


@given(data=st.data(), name=st.sampled_from(NAMES))
def test_decoder_commutes_with_lattice_translations(data: st.DataObject, name: str) -> None:
    grid = lattice(name)
    n = grid.dimension
    integers = data.draw(arrays(np.int64, (1, n), elements=st.integers(-(2**20), 2**20)))
    offset = data.draw(arrays(np.float64, (1, n), elements=st.floats(-0.24, 0.24)))
    point = grid.points(integers)
    assert np.array_equal(grid.integers(point), integers)
    moved = point + offset * (grid.packing_radius / 0.25 / n**0.5 * 0.99)
    np.testing.assert_allclose(grid.nearest(moved), point, rtol=0, atol=1e-9)


def test_ties_go_to_a_closest_point(grid: Lattice) -> None:
    """Half of every short vector lies on a border."""
    border = short_vectors(grid) / 2
    np.testing.assert_array_less(squared(border - grid.nearest(border)), squared(border) + 1e-12)


@pytest.mark.parametrize("name", ["", "Z", "Z0", "Z65", "E7", "z2", "Z٣"])
def test_unknown_lattice_is_refused(name: str) -> None:
    with pytest.raises(ChannelError, match="no lattice is called"):
        lattice(name)
