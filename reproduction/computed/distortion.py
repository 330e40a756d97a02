"""Propositions 14 and 15 of CEPAM: the error of the layered quantiser, and that of one round's mean."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from fedveil.quantization.lattices import lattice
from fedveil.quantization.laws import GaussianLaw, LaplaceLaw, NoiseLaw
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import InsecureSimulationStreams
from reproduction.results import Values

_SCALE, _ROWS = 0.1, 20_000


def proposition_14(seed: int) -> Iterator[tuple[str, Values]]:
    """Measured E||Z||^2 over N Var(f), and the mean of Z in its own standard errors, on the paper's lattices.

    In units of the update's norm, where the proposition's factor gamma^-2 ||x||^2 is 1.
    """
    laws: list[tuple[str, NoiseLaw, str, float]] = [
        (f"Gaussian, n = {n}", GaussianLaw(std=_SCALE), f"Z{n}", n * _SCALE**2) for n in (1, 2, 3)
    ]
    laws.append(("Laplace, n = 1", LaplaceLaw(b=_SCALE), "Z1", 2 * _SCALE**2))
    for name, law, lattice_name, variance in laws:
        quantizer = LayeredQuantizer(law=law, lattice=lattice(lattice_name))
        drawn = np.random.default_rng(seed)
        x = drawn.standard_normal((_ROWS, quantizer.lattice.dimension))
        x /= np.linalg.norm(x)
        error = _error(quantizer, x, InsecureSimulationStreams(seed, name))
        yield (
            name,
            {
                "ratio": float((error**2).sum() / (_ROWS * variance)),
                "mean in standard errors": float(error.mean() / (error.std() / np.sqrt(error.size))),
            },
        )


def proposition_15(seed: int) -> Iterator[tuple[str, Values]]:
    """Measured E||W^ - W||^2 of one round beside the bound, for logistic regression, whose gradients are bounded.

    K clients with records a_i, labels +-1: the gradient of log(1 + exp(-y <a, w>)) is no longer than ||a||, so
    theta_k^2 is the mean of ||a||^2 of client k. tau steps of size eta from w = 0.
    """
    clients, records, size, steps, rate = 10, 50, 30, 15, 0.1
    drawn = np.random.default_rng(seed)
    a = drawn.standard_normal((clients, records, size))
    y = np.sign(a @ drawn.standard_normal(size) + drawn.standard_normal((clients, records)))
    theta = (a**2).sum(2).mean(1)
    for gamma in (0.3, 1.0, 3.0):
        measured = np.mean([_round_error(a, y, steps, rate, gamma, drawn) for _ in range(200)])
        bound = size * gamma**-2 * steps * _SCALE**2 * steps * rate**2 * theta.sum() / clients**2
        yield f"gamma {gamma:g}", {"squared error": float(measured), "bound": float(bound)}


def _error(
    quantizer: LayeredQuantizer, x: Float64[np.ndarray, "m n"], streams: InsecureSimulationStreams
) -> Float64[np.ndarray, "m n"]:
    """Return what the receiver makes of x, less x."""
    sent = quantizer.quantize(x, streams, 0)
    received: Float64[np.ndarray, "m n"] = quantizer.reconstruct(sent.points, sent.dithers, sent.scales)
    error: Float64[np.ndarray, "m n"] = received - x
    return error


def _round_error(
    a: Float64[np.ndarray, "clients records d"],
    y: Float64[np.ndarray, "clients records"],
    steps: int,
    rate: float,
    gamma: float,
    drawn: np.random.Generator,
) -> float:
    """Return ||W^ - W||^2 of one round: the mean of the clients' quantisation errors."""
    clients, records, size = a.shape
    w = np.zeros((clients, size))
    who = np.arange(clients)
    for _ in range(steps):
        row = drawn.integers(records, size=clients)
        features, label = a[who, row], y[who, row]
        margin = label * (features * w).sum(1)
        w += rate * (label / (1 + np.exp(margin)))[:, None] * features
    scale = np.linalg.norm(w, axis=1, keepdims=True) / gamma
    error = scale * _SCALE * drawn.standard_normal(w.shape)
    return float((error.mean(0) ** 2).sum())
