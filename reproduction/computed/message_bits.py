"""CEPAM, section IV-B: the bits of a message as the paper counts them, beside those that are sent.

A sub-vector is the pair (H, M). H, the number of dithers until one is accepted, is Geom(p(u)) given the latent U = u. M
is one of the lattice points (X + L_u) / beta(u) - P, where X holds all sub-vectors of an update of norm 1 (gamma = 1),
L_u is the ball of the noise's layer and P the cell. (The paper leaves out the division.) So the paper's cost is

    E[h(p(U)) / p(U)] + E[ceil(log2 |M(U)|)]   bits a sub-vector, h the binary entropy;

with balls of radius r = R(u) in cells of side 2 r, p is 1, pi/4 and pi/6 for n = 1, 2 and 3, and a point m counts if
the cube m + P is within a = (1 + r) / (2 r) of the origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from scipy import stats

from fedveil.quantization.codec import Codec
from fedveil.quantization.lattices import lattice
from fedveil.quantization.laws import GaussianLaw, LaplaceLaw, NoiseLaw
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import InsecureSimulationStreams
from reproduction.results import Values

_NOISE: Final = 0.1
_PARAMETERS: Final = 6_422  # of the paper's CNN
_LAYERS: Final = 2_000


def message_bits(seed: int) -> Iterator[tuple[str, Values]]:
    """Yield the paper's bits a parameter, their two parts, and the codec's on an update in a random direction."""
    rows: list[tuple[str, NoiseLaw, int]] = [
        (f"Gaussian, n = {n}", GaussianLaw(std=_NOISE), n) for n in (1, 2, 3)
    ]
    rows.append(("Laplace, n = 1", LaplaceLaw(b=_NOISE), 1))
    update = np.random.default_rng(seed).standard_normal(_PARAMETERS)
    update /= np.linalg.norm(update)
    for name, law, n in rows:
        codec = Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice(f"Z{n}")))
        sent = codec.encode(update, InsecureSimulationStreams(seed, name))
        tries, points = paper_bits(n, layers(n, gaussian=isinstance(law, GaussianLaw)))
        yield (
            name,
            {
                "bits sent": 8 * len(sent) / _PARAMETERS,
                "bits of the paper": (tries + points) / n,
                "of H": tries / n,
                "of M": points / n,
            },
        )


def layers(n: int, *, gaussian: bool) -> np.ndarray:
    """Return radii R(u) at equally likely latents u: sigma sqrt(chi^2_{n+2}), or b Gamma(2, 1)."""
    at = (np.arange(_LAYERS) + 0.5) / _LAYERS
    return np.asarray(_NOISE * (np.sqrt(stats.chi2.ppf(at, n + 2)) if gaussian else stats.gamma.ppf(at, 2)))


def paper_bits(n: int, radii: np.ndarray) -> tuple[float, float]:
    """Return the bits of H and of M for a sub-vector of n coordinates, in the mean over the radii."""
    p = math.pi ** (n / 2) / math.gamma(n / 2 + 1) / 2**n
    tries = 0.0 if n == 1 else -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
    counts = [lattice_points(n, (1 + r) / (2 * r)) for r in radii]
    return tries, float(np.ceil(np.log2(counts)).mean())


def lattice_points(n: int, reach: float) -> int:
    """Return how many m of Z^n have a cube m + (-1/2, 1/2]^n within ``reach`` of the origin."""
    along = np.maximum(np.abs(np.arange(-math.ceil(reach) - 1, math.ceil(reach) + 2)) - 0.5, 0.0) ** 2
    squares = along
    for _ in range(n - 1):
        squares = np.add.outer(squares, along)
    return int((squares < reach**2).sum())
