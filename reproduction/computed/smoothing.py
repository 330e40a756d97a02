"""Laplacian smoothing of a known signal: Proposition 1 of DP-Fed-LS, and its Figure S15."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float64

from fedveil.training.server.denoise import smooth
from reproduction.results import Values

_SIZE, _DRAWS = 600, 200


def proposition_1(seed: int) -> Iterator[tuple[str, Values]]:
    """Measured risk of the smoothed signal over the risk that the proposition gives."""
    for name, signal in _signals().items():
        for noise in (0.1, 0.5):
            for smoothing in (0.5, 1.0, 3.0):
                drawn = np.random.default_rng((seed, round(10 * noise), round(10 * smoothing)))
                found = _risk(signal, noise, smoothing, drawn)
                yield (
                    f"{name}, nu {noise:g}, sigma {smoothing:g}",
                    {"ratio": found / _bias_and_variance(signal, noise, smoothing)},
                )


def figure_s15(seed: int) -> Iterator[tuple[str, Values]]:
    """By how much of the noise's mean square error smoothing lowers it, for y = sin(x), x in [0, 30]."""
    signal = _signals()["sine"]
    for noise in (0.01, 0.03, 0.1, 0.3, 1.0):
        for smoothing in (0.5, 1.0, 3.0):
            drawn = np.random.default_rng((seed, round(100 * noise), round(10 * smoothing)))
            before = _SIZE * noise**2
            yield (
                f"nu {noise:g}, sigma {smoothing:g}",
                {
                    "reduction": 1 - _risk(signal, noise, smoothing, drawn) / before,
                    "by Proposition 1": 1 - _bias_and_variance(signal, noise, smoothing) / before,
                },
            )


def _signals() -> dict[str, Float64[np.ndarray, " d"]]:
    line = np.linspace(0, 30, _SIZE)
    rough = np.random.default_rng(7).standard_normal(_SIZE)
    return {"sine": np.sin(line), "white signal": rough}


def _risk(
    signal: Float64[np.ndarray, " d"], noise: float, smoothing: float, drawn: np.random.Generator
) -> float:
    """Return the mean of ||A^-1 (v + n) - v||^2 over draws of n."""
    total = 0.0
    for _ in range(_DRAWS):
        noisy = signal + noise * drawn.standard_normal(len(signal))
        smoothed = smooth(torch.from_numpy(noisy), smoothing).numpy()
        total += float(((smoothed - signal) ** 2).sum())
    return total / _DRAWS


def _bias_and_variance(signal: Float64[np.ndarray, " d"], noise: float, smoothing: float) -> float:
    """Return the sum over i of (sigma lambda / (1 + sigma lambda))^2 <v, e_i>^2 + nu^2 / (1 + sigma lambda)^2."""
    size = len(signal)
    damping = 1 + 2 * smoothing * (1 - np.cos(2 * np.pi * np.arange(size) / size))
    power = np.abs(np.fft.fft(signal)) ** 2 / size
    return float((((1 - 1 / damping) ** 2) * power + noise**2 / damping**2).sum())
