"""From update to bytes and back: round trips, sizes, streaming, refusals."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedveil.quantization import (
    BallLaw,
    CellLaw,
    ChannelError,
    Codec,
    ForeignStreamError,
    GaussianLaw,
    InsecureSimulationStreams,
    KeyedStreams,
    LaplaceLaw,
    Law,
    LayeredQuantizer,
    MessageError,
    StreamReuseError,
    StudentLaw,
    UpdateError,
    gaussian_channel,
    lattice,
    update_key,
)
from fedveil.quantization.codec import unseal
from fedveil.quantization.symbols import Contexts, SymbolReader, SymbolWriter, tables
from tests.test_coder_fuzz import decode_any

LAWS: list[tuple[Law, str]] = [
    (GaussianLaw(std=1.0), "Z1"),
    (GaussianLaw(std=1.0), "Z3"),
    (GaussianLaw(std=1.0), "A2"),
    (GaussianLaw(std=1.0), "D4"),
    (GaussianLaw(std=1.0), "E8"),
    (LaplaceLaw(b=1.0), "Z1"),
    (StudentLaw(t_scale=1.0, degrees=2), "D3"),
    (BallLaw(ball_radius=1.0), "E8"),
    (CellLaw(inner_radius=1.0), "A2"),
]


def channel(law: Law | None = None, name: str = "Z1", *, adaptive: bool = False) -> Codec:
    return Codec(
        quantizer=LayeredQuantizer(law=law or GaussianLaw(std=1.0), lattice=lattice(name)), adaptive=adaptive
    )


def streams(seed: int = 0) -> InsecureSimulationStreams:
    return InsecureSimulationStreams(seed, "coder tests")


@settings(max_examples=60)
@given(
    pair=st.sampled_from(LAWS),
    adaptive=st.booleans(),
    length=st.integers(1, 700),
    sizes=st.lists(st.sampled_from([0.0, 1e-30, 0.01, 0.3, 1.0, 50.0, 1e5, 1e8]), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_receiver_gets_what_the_sender_quantised(
    pair: tuple[Law, str], adaptive: bool, length: int, sizes: list[float], seed: int
) -> None:
    x = np.random.default_rng(seed).normal(size=length) * np.resize(sizes, length)
    one = channel(*pair, adaptive=adaptive)
    message = one.encode(x, streams(seed))
    received = one.decode(message, streams(seed), length=length)
    assert message == one.encode(x, streams(seed)), "encoding is not deterministic"
    assert np.array_equal(received, decode_any(message, streams(seed), length))
    if isinstance(pair[0], BallLaw | CellLaw):
        assert (np.abs(received - x) <= 2 * (1 + 1e-9) + 1e-7 * np.abs(x)).all()
    if not adaptive:
        n = one.quantizer.lattice.dimension
        rows = np.append(x, np.zeros(-length % n)).reshape(-1, n)
        quantized = one.quantizer.quantize(rows, streams(seed), 0)
        sent = one.quantizer.reconstruct(quantized.points, quantized.dithers, quantized.scales)
        assert np.array_equal(received, sent.reshape(-1)[:length])


@given(
    integers=arrays(np.int64, st.integers(0, 200), elements=st.integers(-(2**50), 2**50)),
    spread=st.floats(2.0**-40, 2.0**45),
    seed=st.integers(0, 2**31),
)
def test_integers_survive_any_model(integers: np.ndarray, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = Contexts.choose(
        rng.uniform(-0.5, 0.5, len(integers)), spread * np.exp(rng.normal(size=len(integers)))
    )
    writer = SymbolWriter()
    writer.field(12345, 16)
    writer.integers(integers, contexts)
    writer.attempts(np.abs(integers) % 1000, 0.25)
    writer.fields(np.abs(integers) % 7, 3)
    reader = SymbolReader(writer.finish())
    assert reader.field(16) == 12345
    assert np.array_equal(reader.integers(contexts), integers)
    assert np.array_equal(reader.attempts(len(integers), 0.25, 10**6), np.abs(integers) % 1000)
    assert np.array_equal(reader.fields(len(integers), 3), np.abs(integers) % 7)


@pytest.mark.parametrize("offset", [-0.5, -0.25, 0.0, 0.1, 0.5])
@pytest.mark.parametrize("deviation", [0.01, 0.07, 0.3, 1.0, 9.0, 40.0, 3e4])
def test_coded_size_is_the_entropy(offset: float, deviation: float) -> None:
    """Against the exact entropy of the rounded Gaussian: the tables cost less than 0.015 bit."""
    count = 40_000
    rng = np.random.default_rng(3)
    integers = np.rint(-offset + deviation * rng.normal(size=count)).astype(np.int64)
    contexts = Contexts.choose(np.full(count, offset), np.full(count, deviation))
    writer = SymbolWriter()
    writer.integers(integers, contexts)
    bits = 8 * len(writer.finish()) / count
    _, counts = np.unique(integers, return_counts=True)
    if deviation < 100:
        empirical = float(-(counts / count * np.log2(counts / count)).sum())
        assert bits < empirical + 0.015
    else:
        assert bits < np.log2(deviation * np.sqrt(2 * np.pi * np.e)) + 0.03


# Bits a parameter, header and all, for vectors of 10^6 at sd(X) / sigma: Z1, and the best way found.
@pytest.mark.parametrize(
    ("ratio", "scalar", "best"),
    [(0.05, 0.056, 0.012), (0.2, 0.22, 0.11), (1.0, 0.98, 0.98), (3.0, 2.2, 2.06), (10.0, 3.9, 3.73)],
)
def test_message_is_as_short_as_promised(ratio: float, scalar: float, best: float) -> None:
    m = 200_000  # a fifth of the vector: the fixed cost weighs five times as much here
    x = np.random.default_rng(0).normal(size=m) * ratio
    assert 8 * len(channel().encode(x, streams())) / m < scalar
    assert 8 * len(channel(name="E8", adaptive=True).encode(x, streams())) / m < best


def test_spread_is_known_block_by_block() -> None:
    """Blocks of very different spreads cost what each would cost alone."""
    rng = np.random.default_rng(0)
    small, large = rng.normal(size=1 << 16) * 0.1, rng.normal(size=1 << 16) * 10
    together = len(channel().encode(np.concatenate((small, large)), streams()))
    alone = len(channel().encode(small, streams(1))) + len(channel().encode(large, streams(2)))
    assert together < 1.01 * alone


def test_another_process_decodes_from_the_bytes_alone() -> None:
    key = update_key(b"a shared secret of two", run="r", client=3, round_number=9)
    x = np.random.default_rng(0).normal(size=5000) * 0.3
    one = channel(name="E8", adaptive=True)
    message = one.encode(x, KeyedStreams(key))
    program = (
        "import sys; from fedveil.quantization import *; from fedveil.quantization.codec import unseal\n"
        "key = update_key(b'a shared secret of two', run='r', client=3, round_number=9)\n"
        "message = bytes.fromhex(sys.stdin.read())\n"
        "header = unseal(message, KeyedStreams(key)).header\n"
        "received = Codec(quantizer=header.quantizer).decode(message, KeyedStreams(key), length=header.length)\n"
        "print(received.tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=message.hex(), capture_output=True, text=True, check=True
    )
    assert bytes.fromhex(done.stdout.strip()) == one.decode(message, KeyedStreams(key), length=5000).tobytes()


def test_float32_is_the_same_as_its_float64() -> None:
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert channel().encode(x, streams()) == channel().encode(x.astype(np.float64), streams())


@pytest.mark.slow
def test_memory_is_that_of_a_block() -> None:
    tables()
    x = np.random.default_rng(0).normal(size=3_000_000).astype(np.float32) * np.float32(0.2)
    tracemalloc.start()
    message = channel().encode(x, streams())
    peak_encode = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    total = sum(len(values) for values in channel().decode_blocks(message, streams(), length=len(x)))
    peak_decode = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == len(x)
    assert max(peak_encode, peak_decode) < 16 * 2**20


def test_header_tells_law_lattice_and_length() -> None:
    message = channel(StudentLaw(t_scale=0.25, degrees=7), "D4").encode(np.zeros(300), streams())
    header = unseal(message, streams()).header
    assert header.quantizer.law == StudentLaw(t_scale=0.25, degrees=7)
    assert header.quantizer.lattice.name == "D4"
    assert header.length == 300
    assert not header.secure


def test_short_update_has_a_short_message() -> None:
    assert len(channel(adaptive=True).encode(np.zeros(1), streams())) < 45


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_update_that_is_not_finite_is_refused_before_anything_is_drawn(bad: float) -> None:
    x = np.zeros(100)
    x[57] = bad
    fresh = streams()
    with pytest.raises(UpdateError, match="not finite"):
        channel().encode(x, fresh)
    channel().encode(np.zeros(100), fresh)


def test_update_too_large_for_the_noise_is_refused() -> None:
    with pytest.raises(UpdateError, match="2\\^30 times"):
        channel().encode(np.array([0.0, 2e9]), streams())


def test_empty_update_is_refused() -> None:
    with pytest.raises(UpdateError, match="has 1 to"):
        channel().encode(np.zeros(0), streams())


def test_stream_is_used_once() -> None:
    fresh = streams()
    channel().encode(np.zeros(10), fresh)
    with pytest.raises(StreamReuseError):
        channel().encode(np.zeros(10), fresh)


def test_search_effort_has_bounds() -> None:
    with pytest.raises(ChannelError, match="from 0 to 7"):
        Codec(quantizer=channel().quantizer, search=8)


@pytest.mark.parametrize("search", [0, 1, 5])
def test_search_effort_travels_in_the_message(search: int) -> None:
    x = np.random.default_rng(0).normal(size=20_000) * 0.1
    sender = Codec(quantizer=channel().quantizer, adaptive=True, search=search)
    message = sender.encode(x, streams())
    received = channel().decode(message, streams(), length=len(x))
    assert abs((received - x).std() - 1) < 0.03


@pytest.mark.parametrize(
    "change",
    [{"run": "s"}, {"client": 4}, {"round_number": 10}, {"attempt": 1}],
    ids=lambda change: next(iter(change)),
)
def test_stream_of_another_update_is_noticed(change: dict[str, object]) -> None:
    base = {"run": "r", "client": 3, "round_number": 9, "attempt": 0}
    secret = b"a shared secret of two"
    message = channel().encode(np.zeros(500), KeyedStreams(update_key(secret, **base)))  # type: ignore[arg-type]
    other = KeyedStreams(update_key(secret, **(base | change)))  # type: ignore[arg-type]
    with pytest.raises(ForeignStreamError, match="another shared stream"):
        channel().decode(message, other, length=500)


def test_simulation_is_not_mistaken_for_cryptography() -> None:
    message = channel().encode(np.zeros(50), streams())
    with pytest.raises(ForeignStreamError, match="insecure simulation"):
        channel().decode(message, KeyedStreams(bytes(32)), length=50)


@pytest.mark.parametrize(
    ("other", "length", "match"),
    [
        (channel(), 999, "holds 1000 parameters where 999"),
        (channel(GaussianLaw(std=1.5)), 1000, "expects GaussianLaw"),
        (channel(name="Z2"), 1000, "expects .* on Z2"),
        (channel(LaplaceLaw(b=1.0)), 1000, "expects LaplaceLaw"),
    ],
)
def test_message_of_another_channel_is_refused(other: Codec, length: int, match: str) -> None:
    message = channel().encode(np.zeros(1000), streams())
    with pytest.raises(MessageError, match=match):
        other.decode(message, streams(), length=length)


def test_a_block_whose_rows_are_partly_sent_as_points_is_decoded_from_written_memory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = gaussian_channel(4.0)
    x = np.random.default_rng(3).normal(size=60_000) * 0.8
    x[:400] = 8.0  # some of these rows fit no drawn candidate, and go as lattice points
    message = one.encode(x, streams())
    decoded = one.decode(message, streams(), length=len(x))
    plain = np.empty

    def filthy(shape: object, dtype: object = float, **rest: object) -> np.ndarray:
        memory: np.ndarray = plain(shape, dtype, **rest)  # type: ignore[call-overload]
        memory.fill(1e308 if memory.dtype.kind == "f" else 99)
        return memory

    monkeypatch.setattr(np, "empty", filthy)
    assert np.array_equal(one.decode(message, streams(), length=len(x)), decoded)
