"""Estimate the least number of bits that carry an update through a noisy channel, as a reference."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Float64
from scipy.fft import next_fast_len

from fedveil.quantization.laws import GaussianLaw, NoiseLaw

_TAIL = 1e-10
_MAX_CELLS = 1 << 22


def gaussian_limit(ratio: float) -> float:
    """Return I(X; X + Z) in bits for X ~ N(0, ratio^2), Z ~ N(0, 1): log2(1 + ratio^2) / 2.

    >>> gaussian_limit(1.0)
    0.5
    """
    return 0.5 * math.log2(1 + ratio**2)


def information_limit(update: Float[np.ndarray, " m"], law: NoiseLaw) -> float:
    """Estimate I(X; X + Z) in bits per parameter, X uniform over the update's parameters and Z of the law.

    No exact simulation of the channel x -> x + Z uses fewer bits on average over parameters that are sampled
    independently from the values of this update (Harsha et al., "The communication complexity of correlation"). A
    coder with more knowledge (the spread of each layer, for instance) may use fewer bits; estimate per layer in that
    case.

    The estimate is h(X + Z) - h(Z) with densities on a grid and one convolution. If noise and update need more than
    four million cells, the function returns the limit of a Gaussian of the same variance for Gaussian noise; this
    limit is never smaller. For other laws the grid becomes coarser.

    Args:
        update: (m,) finite parameters.
        law: the noise.

    Returns:
        Bits per parameter, at least 0.
    """
    values = update.astype(np.float64)
    spread = float(values.std())
    if spread == 0:
        return 0.0
    reach = law.scale
    while float(law.cdf(np.array([-reach]))[0]) > _TAIL and reach < 2.0**18 * law.scale:
        reach *= 1.5
    step = min(law.scale / 16, spread / 6)
    low, high = float(values.min()), float(values.max())
    if (high - low + 2 * reach) / step > _MAX_CELLS:
        if isinstance(law, GaussianLaw):
            return gaussian_limit(spread / law.std)
        step = (high - low + 2 * reach) / _MAX_CELLS
    cells = math.ceil(reach / step)
    noise = np.diff(law.cdf((np.arange(-cells, cells + 2) - 0.5) * step))
    signal = _shares(values, low, step)
    size = len(noise) + len(signal) - 1
    fast = next_fast_len(size, real=True)  # an FFT of prime length takes up to 20 times as long
    both = np.fft.irfft(np.fft.rfft(noise, fast) * np.fft.rfft(signal, fast), fast)[:size]
    # I(X; X + Z) = h(X + Z) - h(Z). The logarithm of the grid step cancels in the difference of the discrete
    # entropies.
    return max(0.0, _entropy(both) - _entropy(noise))


def _shares(values: Float64[np.ndarray, " m"], low: float, step: float) -> Float64[np.ndarray, " cells"]:
    """Return the distribution of the values over grid points, each value split between its two neighbours."""
    place = (values - low) / step
    below = np.floor(place).astype(np.int64)
    above_share = place - below
    size = int(below.max()) + 2
    shares = np.bincount(below, 1 - above_share, size) + np.bincount(below + 1, above_share, size)
    return shares / len(values)


def _entropy(mass: Float64[np.ndarray, " cells"]) -> float:
    positive = mass[mass > 1e-18]
    return float(-(positive * np.log2(positive)).sum())
