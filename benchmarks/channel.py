"""The channel: speed against a loop, bytes on the wire against the information limit, and against Gaussian then SDQ.

Speeds are CPU seconds of one thread, encoding to bytes and decoding from bytes, at sd(X) = sigma. Sizes are whole
messages for vectors of 10^6 parameters (10^5 with ``quick``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks.harness import Row, at_most, compared, cpu_seconds
from fedveil.quantization import (
    CellLaw,
    Codec,
    GaussianLaw,
    InsecureSimulationStreams,
    KeyedStreams,
    LayeredQuantizer,
    gaussian_channel,
    gaussian_limit,
    lattice,
)
from fedveil.quantization.codec import DENSE_FROM
from fedveil.quantization.portable import uniforms

RATIOS = (0.05, 0.2, 1.0, 3.0, 10.0)
SCALAR_TARGETS = dict(zip(RATIOS, (0.056, 0.22, 0.98, 2.2, 3.9), strict=True))
LATTICES = ("Z1", "Z2", "Z3", "A2", "D3", "D4", "E8")
LAW = GaussianLaw(std=1.0)
RATE_TARGET, LOOP_TARGET = 4.0, 200.0


def channel(name: str, *, adaptive: bool = False, search: int = 2) -> Codec:
    """Gaussian noise of standard deviation 1 on a lattice."""
    return Codec(quantizer=LayeredQuantizer(law=LAW, lattice=lattice(name)), adaptive=adaptive, search=search)


def loop(x: np.ndarray, name: str) -> None:
    """Quantise sub-vector by sub-vector, as the paper's algorithm reads; without coding, which only flatters it."""
    grid = lattice(name)
    n = grid.dimension
    streams = InsecureSimulationStreams(0)
    latents, dithers = streams.source("latent", 0), streams.source("dither", 0)
    for row in x.reshape(-1, n):
        beta = LAW.radius(LAW.latent(latents, 1, n))[0] / grid.packing_radius
        while True:
            dither = grid.cell_points(uniforms(dithers, n).reshape(1, n))
            target = row[None] / beta - dither
            point = grid.nearest(target)
            if n == 1 or float(((point - target) ** 2).sum()) <= grid.packing_radius**2:
                break


def encode(one: Codec, x: np.ndarray) -> bytes:
    """Encode under a cryptographic stream."""
    return one.encode(x, KeyedStreams(bytes(32)))


def decode(one: Codec, message: bytes, length: int) -> np.ndarray:
    """Decode under the same stream."""
    return one.decode(message, KeyedStreams(bytes(32)), length=length)


def speeds(m: int, names: Sequence[str], few: int = 1_512, repeats: int = 5) -> Iterator[Row]:
    """Millions of parameters a second of m, and against the loop over few of them."""
    x = np.random.default_rng(0).normal(size=m)
    for name in names:
        one = channel(name)
        encoding, decoding, slow = cpu_seconds(
            partial(encode, one, x),
            partial(decode, one, encode(one, x), m),
            partial(loop, x[:few], name),
            repeats=repeats,
        )
        for what, seconds in (("encode", encoding), ("decode", decoding)):
            rate = m / seconds / 1e6
            target = RATE_TARGET if name.startswith("Z") else None
            met = None if target is None else rate >= target
            yield Row(case=f"{what} {name}", unit="M parameters/s", ours=rate, target=target, met=met)
        target = LOOP_TARGET if name.startswith("Z") else None
        yield compared(
            f"encode {name} against a loop", "M parameters/s", m / encoding / 1e6, few / slow / 1e6, target
        )
    for ratio in (0.05, 0.2):
        one = gaussian_channel(LAW.std)
        message = encode(one, x * ratio)
        encoding, decoding = cpu_seconds(
            partial(encode, one, x * ratio), partial(decode, one, message, m), repeats=min(3, repeats)
        )
        for what, seconds in (("encode", encoding), ("decode", decoding)):
            case = f"{what}, default rule at sd(X)/sigma = {ratio}"
            yield Row(case=case, unit="M parameters/s", ours=m / seconds / 1e6)


def bits(one: Codec, x: np.ndarray) -> float:
    """Bits a parameter of the whole message."""
    return 8 * len(one.encode(x, InsecureSimulationStreams(1))) / len(x)


def gaussian_then_dither(x: np.ndarray, share: float) -> float:
    """Bits a parameter of Gaussian noise followed by SDQ; ``share`` of the unit variance is the Gaussian's."""
    noisy = x + np.random.default_rng(2).normal(size=len(x)) * np.sqrt(share)
    step = np.sqrt(12 * (1 - share))
    law = CellLaw(inner_radius=float(step) / 2)
    return bits(Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice("Z1"))), noisy)


def sizes(m: int, names: Sequence[str], searches: Sequence[int]) -> Iterator[Row]:
    """Bits a parameter of m on lattices and in the best way found, the information limit as the peer."""
    for ratio in RATIOS:
        x = np.random.default_rng(0).normal(size=m) * ratio
        limit = gaussian_limit(ratio)
        case = f"sd(X)/sigma = {ratio}"
        scalar = bits(channel("Z1"), x)
        yield at_most(f"{case}, Z1, bits a parameter", "bits", scalar, SCALAR_TARGETS[ratio])
        for name in names:
            size = bits(channel(name), x)
            yield Row(
                case=f"{case}, {name}, bits a parameter",
                unit="bits",
                ours=size,
                peer=limit,
                ratio=limit / size,
            )
            if name == "E8" and ratio >= DENSE_FROM:
                yield Row(
                    case=f"{case}, E8 against Z1",
                    unit="bits",
                    ours=size,
                    peer=scalar,
                    ratio=scalar / size,
                    target=1.0,
                    met=size <= scalar,
                )
        for search in searches if ratio < 0.5 else searches[:1]:
            size = bits(channel("E8", adaptive=True, search=search), x)
            yield Row(
                case=f"{case}, adaptive, search {search}",
                unit="bits",
                ours=size,
                peer=limit,
                ratio=limit / size,
            )
        best = bits(gaussian_channel(LAW.std), x)
        for share in (0.5, 0.9):
            rival = gaussian_then_dither(x, share)
            yield Row(
                case=f"{case}, adaptive against {share:.0%} Gaussian + SDQ of the same variance",
                unit="bits",
                ours=best,
                peer=rival,
                ratio=rival / best,
                target=1.0,
                met=best < rival,
            )


def rows(quick: bool) -> Iterator[Row]:
    """Yield every case."""
    if quick:
        yield from speeds(390_000, ("Z1", "Z2", "Z3", "E8"))
        yield from sizes(100_000, ("E8",), (2,))
    else:
        yield from speeds(1_950_000, LATTICES)
        yield from sizes(1_000_000, LATTICES[1:], (2, 5))


def smallest() -> Iterator[Row]:
    """Yield the speed of one lattice, and the sizes of another, of a few thousand parameters."""
    yield from speeds(1_560, ("Z1",), few=24, repeats=1)
    yield from sizes(1_000, ("E8",), (2,))
