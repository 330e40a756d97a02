"""Compute the spectrum of an update over the frequencies that smoothing damps (DP-Fed-LS, Figure 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from scipy import fft
from torch import Tensor

_LONG: Final = 1 << 20
"""Number of parameters above which a vector is padded with zeros to a length that is a product of small primes. The
transform of a length with a large prime factor takes 125 bytes for each parameter."""


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Root mean square magnitudes of Fourier coefficients, in bands of equal width on a logarithmic scale.

    Attributes:
        frequencies: geometric middle of each band, in cycles over the whole vector (1 .. d / 2).
        magnitudes: root mean square of |rfft(v)_k| over the band, in the unit of v.
    """

    frequencies: tuple[float, ...]
    magnitudes: tuple[float, ...]


def spectrum(vector: Float[Tensor, " d"], bands: int = 48) -> Spectrum:
    """Return the spectrum of a vector without its mean (frequency 0).

    Noise alone has a flat spectrum at nu sqrt(d). Vectors of more than 2^20 numbers are transformed in float32.

    Args:
        vector: (d,) an update.
        bands: largest number of bands; fewer result at low frequencies, where a band is one coefficient.

    >>> flat = spectrum(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    >>> flat.frequencies, [round(magnitude, 6) for magnitude in flat.magnitudes]
    ((1.0, 2.0, 3.0), [1.0, 1.0, 1.0])
    """
    power, spacing = _power(vector)
    if len(power) == 0:
        return Spectrum(frequencies=(), magnitudes=())
    numbers = np.arange(1, len(power) + 1)
    edges = np.unique(np.round(np.geomspace(1, len(power) + 1, bands + 1)).astype(np.int64))
    firsts, counts = edges[:-1] - 1, np.diff(edges)
    middles = spacing * np.exp(np.add.reduceat(np.log(numbers), firsts) / counts)
    means = np.sqrt(np.add.reduceat(power, firsts, dtype=np.float64) / counts)
    return Spectrum(
        frequencies=tuple(round(float(middle), 6) for middle in middles), magnitudes=tuple(means.tolist())
    )


def _power(vector: Float[Tensor, " d"]) -> tuple[Float[np.ndarray, " k"], float]:
    """Return squared magnitudes without frequency 0, and the step of their frequencies in cycles over the vector."""
    length = len(vector)
    if length < 2:
        return np.zeros(0), 1.0
    if length <= _LONG:
        return torch.fft.rfft(vector.double()).abs().square()[1:].numpy(), 1.0
    padded = fft.next_fast_len(length, real=True)
    # The mean would leak from frequency 0 into its neighbours, because the padded vector is longer than the vector.
    centred = (vector - vector.mean()).float().numpy()
    return np.square(np.abs(fft.rfft(centred, padded)[1:])), length / padded
