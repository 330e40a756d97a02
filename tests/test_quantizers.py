"""The vectorised quantiser against a loop that reads like the paper."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.quantization import (
    GaussianLaw,
    InsecureSimulationStreams,
    KeyedStreams,
    LaplaceLaw,
    Lattice,
    Law,
    LayeredQuantizer,
    StreamReuseError,
    StudentLaw,
    lattice,
    update_key,
)
from fedveil.quantization.portable import log, normals, sine_quarter, uniforms
from fedveil.quantization.streams import SharedStreams
from fedveil.randomness import KeyedStream

PAIRS = [
    (GaussianLaw(std=0.1), "Z1"),
    (GaussianLaw(std=2.0), "Z2"),
    (GaussianLaw(std=1.0), "Z3"),
    (GaussianLaw(std=1.0), "A2"),
    (GaussianLaw(std=1.0), "D3"),
    (GaussianLaw(std=1.0), "D4"),
    (GaussianLaw(std=1.0), "E8"),
    (LaplaceLaw(b=0.5), "Z1"),
    (StudentLaw(t_scale=1.0, degrees=3), "Z2"),
]


def loop_quantize(
    x: np.ndarray, law: Law, grid: Lattice, streams: SharedStreams
) -> tuple[list[np.ndarray], list[int], list[np.ndarray]]:
    """Algorithm 2 of CEPAM, sub-vector by sub-vector: the oracle. Returns points, rejected attempts, outputs."""
    count, n = x.shape
    latents = law.latent(streams.source("latent", 0), count, n)
    beta = [float(law.radius(latents[j : j + 1])[0]) / grid.packing_radius for j in range(count)]
    dither_stream = streams.source("dither", 0)
    points, outputs, attempts = [np.zeros(n)] * count, [np.zeros(n)] * count, [0] * count
    waiting = list(range(count))
    attempt = 0
    while waiting:
        rejected = []
        for j in waiting:
            dither = grid.cell_points(uniforms(dither_stream, n).reshape(1, n))
            scaled = x[j : j + 1] / beta[j]
            point = grid.nearest(scaled - dither)
            error = point - (scaled - dither)
            if n == 1 or float((error**2).sum()) <= grid.packing_radius**2:
                points[j], outputs[j], attempts[j] = point[0], (beta[j] * (point + dither))[0], attempt
            else:
                rejected.append(j)
        waiting = rejected
        attempt += 1
    return points, attempts, outputs


def streams(seed: int = 0) -> InsecureSimulationStreams:
    return InsecureSimulationStreams(seed, "quantizer tests")


@settings(max_examples=40)
@given(
    pair=st.sampled_from(PAIRS),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([0.0, 1e-9, 1.0, 1e5]),
)
def test_vectorised_quantiser_equals_the_loop(
    pair: tuple[Law, str], count: int, seed: int, size: float
) -> None:
    law, grid = pair[0], lattice(pair[1])
    x = np.random.default_rng(seed).normal(size=(count, grid.dimension)) * size
    points, attempts, outputs = loop_quantize(x, law, grid, streams(seed))
    quantizer = LayeredQuantizer(law=law, lattice=grid)
    fast = quantizer.quantize(x, streams(seed), 0)
    assert np.array_equal(fast.points, np.array(points))
    assert fast.attempts.tolist() == attempts
    assert np.array_equal(quantizer.reconstruct(fast.points, fast.dithers, fast.scales), np.array(outputs))


@given(pair=st.sampled_from(PAIRS), count=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_receiver_replays_the_senders_dithers_and_scales(
    pair: tuple[Law, str], count: int, seed: int
) -> None:
    quantizer = LayeredQuantizer(law=pair[0], lattice=lattice(pair[1]))
    x = np.random.default_rng(seed).normal(size=(count, quantizer.lattice.dimension))
    sent = quantizer.quantize(x, streams(seed), 5)
    assert np.array_equal(quantizer.replay_dithers(sent.attempts, streams(seed), 5), sent.dithers)
    assert np.array_equal(quantizer.scales(streams(seed), 5, count), sent.scales)


@pytest.mark.parametrize("name", ["Z1", "Z2", "Z3", "A2", "D3", "D4", "E8"])
def test_attempts_are_geometric(name: str) -> None:
    grid = lattice(name)
    quantizer = LayeredQuantizer(law=GaussianLaw(std=1.0), lattice=grid)
    attempts = quantizer.quantize(np.zeros((20_000, grid.dimension)), streams(), 0).attempts
    expected = 1 / grid.acceptance - 1
    deviation = np.sqrt(1 - grid.acceptance) / grid.acceptance
    assert abs(attempts.mean() - expected) <= 6 * deviation / np.sqrt(20_000)


def test_error_stays_inside_the_layer() -> None:
    quantizer = LayeredQuantizer(law=GaussianLaw(std=1.0), lattice=lattice("E8"))
    x = np.random.default_rng(0).normal(size=(5000, 8))
    sent = quantizer.quantize(x, streams(), 0)
    error = quantizer.reconstruct(sent.points, sent.dithers, sent.scales) - x
    radius = sent.scales * quantizer.lattice.packing_radius
    assert (np.linalg.norm(error, axis=1) <= radius * (1 + 1e-12)).all()


def test_key_depends_on_everything_that_tells_updates_apart() -> None:
    secret = b"sixteen bytes ok"
    base = {"run": "a", "client": 1, "round_number": 2, "attempt": 0}
    keys = {update_key(secret, **base), update_key(b"another secret!!", **base)}
    for change in (
        {"run": "b"},
        {"client": 2},
        {"round_number": 3},
        {"attempt": 1},
        {"client": 12, "round_number": 0},
    ):
        keys.add(update_key(secret, **(base | change)))
    assert len(keys) == 7
    assert all(len(key) == 32 for key in keys)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        update_key(b"short", **base)


def test_streams_are_equal_for_equal_keys_and_paths_alone() -> None:
    one, two, other = KeyedStreams(bytes(32)), KeyedStreams(bytes(32)), KeyedStreams(bytes(31) + b"\1")
    assert np.array_equal(one.source("latent", 0).uint64(8), two.source("latent", 0).uint64(8))
    drawn = [
        s.source(*path).uint64(8).tobytes()
        for s in (one, other)
        for path in (("latent", 0), ("latent", 1), ("dither", 0))
    ]
    assert len(set(drawn)) == 6
    assert one.secure
    assert not streams().secure
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedStreams(b"short")


def test_stream_carries_one_update_only() -> None:
    used = streams()
    used.claim()
    with pytest.raises(StreamReuseError, match="already carried an update"):
        used.claim()


PINNED = ["-0x1.25ba11b799ad8p-1", "0x1.8c435e6dc8712p-1", "-0x1.1115c68e47bc6p+1", "0x1.5e3e0b5856b1dp-2"]


def test_portable_functions_are_accurate_and_pinned() -> None:
    """The bits are pinned: another processor that computes others would not understand our messages."""
    source = KeyedStream(bytes(32))
    u = uniforms(source, 100_000)
    assert u.min() > 0
    assert u.max() < 1
    np.testing.assert_allclose(log(u), np.log(u), rtol=2e-15)
    np.testing.assert_allclose(
        sine_quarter(2 * u - 1), np.sin(np.pi / 2 * (2 * u - 1)), rtol=2e-15, atol=1e-17
    )
    drawn = normals(source.uint64(8))
    assert [
        float(value).hex() for value in (log(u[:1])[0], sine_quarter(u[:1])[0], drawn[0], drawn[1])
    ] == PINNED


def test_uniforms_reach_neither_end() -> None:
    class Ends:
        def uint64(self, count: int) -> np.ndarray:
            return np.resize(np.array([0, 2**64 - 1], dtype=np.uint64), count)

    low, high = uniforms(Ends(), 2)
    assert low == 2.0**-53
    assert high == 1 - 2.0**-53
