"""Define noise laws as mixtures of uniform laws on balls: a latent U selects the radius of a layer.

A density f that falls with the distance from its centre is a mixture of uniform laws on balls. To sample from it,
draw the latent U, then a uniform point of the layer, the ball of radius r(U). For N(0, sigma^2 I_n) the latent is
chi-square with n + 2 degrees of freedom and r = sigma sqrt(U) (CEPAM, Lemma 17). For Laplace(0, b) in one dimension
it is Gamma(2, 1) and r = b U (Lemma 18). For Student's t with nu degrees it is chi-square(n + 2) / (chi-square(nu) /
nu), and r = scale sqrt(U).

Latents are drawn with portable arithmetic (see :mod:`fedveil.quantization.portable`), so both ends get the same bits.
They are raised to a floor, below which they fall with probability at most 2^-64, so that lattice points stay 64-bit
integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64
from scipy.fft import next_fast_len

from fedveil.errors import ChannelError, UnsupportedPairError
from fedveil.quantization import portable
from fedveil.randomness import BitSource

SMALLEST_SCALE = 2.0**-200
"""Smallest accepted scale; its inverse is the largest.

Products with scales outside [2^-200, 2^200] would leave the normal numbers.
"""
SQUARE_FLOOR = 2.0**-44
"""Smallest latent of a law whose radius is scale * sqrt(U).

P(chi-square(3) < 2^-44) < 2^-67, and less in more dimensions.
"""
LINEAR_FLOOR = 2.0**-32
"""Smallest latent of the Laplace law: P(Gamma(2, 1) < 2^-32) < 2^-64."""


@runtime_checkable
class Law(Protocol):
    """Spherically symmetric noise law that is a mixture of uniform laws on balls."""

    @property
    def name(self) -> str:
        """Name of the law in files and messages."""
        ...

    @property
    def scale(self) -> float:
        """Scale of the law, in the unit of the update."""
        ...

    @property
    def shape(self) -> int:
        """Integer shape parameter of the law, 0 if it has none."""
        ...

    def require(self, dimension: int) -> None:
        """Raise :class:`UnsupportedPairError` unless the law's layers are balls in this dimension."""
        ...

    def latent(self, source: BitSource, count: int, dimension: int) -> Float64[np.ndarray, " count"]:
        """Draw ``count`` latents U for sub-vectors of ``dimension`` parameters."""
        ...

    def radius(self, latent: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
        """Return the radius of the layer of each latent, in the unit of the update."""
        ...


@runtime_checkable
class NoiseLaw(Law, Protocol):
    """Layered law with a density, which can serve as privacy noise."""

    def cdf(self, x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
        """Return the distribution function of one coordinate of the noise."""
        ...


def _require_scale(name: str, value: float) -> None:
    if not SMALLEST_SCALE <= value <= 1 / SMALLEST_SCALE:
        raise ChannelError(f"{name} must be a finite number above 0, between 2^-200 and 2^200, got {value}")


@dataclass(frozen=True, kw_only=True)
class GaussianLaw:
    """Gaussian law N(0, std^2 I_n) in any dimension n.

    Args:
        std: standard deviation per coordinate, in the unit of the update.
    """

    std: float

    name = "gaussian"
    shape = 0

    def __post_init__(self) -> None:
        _require_scale("std", self.std)

    @property
    def scale(self) -> float:
        """Standard deviation per coordinate."""
        return self.std

    def require(self, dimension: int) -> None:
        """Accept every dimension."""

    def latent(self, source: BitSource, count: int, dimension: int) -> Float64[np.ndarray, " count"]:
        """Draw U of the chi-square law with ``dimension + 2`` degrees of freedom."""
        return np.asarray(np.maximum(portable.chi_square(source, count, dimension + 2), SQUARE_FLOOR))

    def radius(self, latent: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
        """Return std * sqrt(U)."""
        return np.asarray(self.std * np.sqrt(latent))

    def cdf(self, x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
        """Return Phi(x / std)."""
        from scipy import stats

        return np.asarray(stats.norm.cdf(x, scale=self.std))


@dataclass(frozen=True, kw_only=True)
class LaplaceLaw:
    """Law Laplace(0, b) on the line: density exp(-|z|/b) / 2b.

    Args:
        b: the law's scale, in the unit of the update; its variance is 2 b^2.
    """

    b: float

    name = "laplace"
    shape = 0

    def __post_init__(self) -> None:
        _require_scale("b", self.b)

    @property
    def scale(self) -> float:
        """Scale b."""
        return self.b

    def require(self, dimension: int) -> None:
        """Accept one dimension alone.

        Raises:
            UnsupportedPairError: more dimensions; the layers of independent Laplace coordinates are cross-polytopes,
                not balls.
        """
        if dimension != 1:
            raise UnsupportedPairError(
                f"the Laplace law works on the line only, not in {dimension} dimensions: the layers of independent "
                "Laplace coordinates are cross-polytopes, which no ball fills; use the lattice Z1"
            )

    def latent(self, source: BitSource, count: int, dimension: int) -> Float64[np.ndarray, " count"]:
        """Draw U of the Gamma(2, 1) law."""
        # Gamma(2, 1) is the sum of two exponentials: -ln(u1 u2).
        product = portable.uniforms(source, count)
        product *= portable.uniforms(source, count)
        return np.asarray(np.maximum(-portable.log(product), LINEAR_FLOOR))

    def radius(self, latent: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
        """Return b U."""
        return self.b * latent

    def cdf(self, x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
        """Return the Laplace distribution function."""
        from scipy import stats

        return np.asarray(stats.laplace.cdf(x, scale=self.b))


@dataclass(frozen=True, kw_only=True)
class StudentLaw:
    """Multivariate Student t law: N(0, scale^2 I_n) divided by sqrt(chi-square(degrees) / degrees).

    Args:
        t_scale: the law's scale, in the unit of the update.
        degrees: degrees of freedom, an integer from 1 to 255.
    """

    t_scale: float
    degrees: int

    name = "student"

    def __post_init__(self) -> None:
        _require_scale("t_scale", self.t_scale)
        if not 1 <= self.degrees <= 255:
            raise ChannelError(f"degrees must be an integer from 1 to 255, got {self.degrees}")

    @property
    def scale(self) -> float:
        return self.t_scale

    @property
    def shape(self) -> int:
        """Degrees of freedom."""
        return self.degrees

    def require(self, dimension: int) -> None:
        """Accept every dimension."""

    def latent(self, source: BitSource, count: int, dimension: int) -> Float64[np.ndarray, " count"]:
        """Draw U = chi-square(dimension + 2) / (chi-square(degrees) / degrees)."""
        latent = portable.chi_square(source, count, dimension + 2) * self.degrees
        latent /= np.maximum(portable.chi_square(source, count, self.degrees), SQUARE_FLOOR**2)
        return np.asarray(np.maximum(latent, SQUARE_FLOOR))

    def radius(self, latent: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
        """Return scale * sqrt(U)."""
        return np.asarray(self.t_scale * np.sqrt(latent))

    def cdf(self, x: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
        """Return Student's distribution function."""
        from scipy import stats

        return np.asarray(stats.t.cdf(x, self.degrees, scale=self.t_scale))


@dataclass(frozen=True, kw_only=True)
class BallLaw:
    """Uniform law on the ball of one radius: the error of RSUQ, a single layer.

    Args:
        ball_radius: radius of the ball, in the unit of the update.
    """

    ball_radius: float

    name = "ball"
    shape = 0

    def __post_init__(self) -> None:
        _require_scale("ball_radius", self.ball_radius)

    @property
    def scale(self) -> float:
        """Radius of the ball."""
        return self.ball_radius

    def require(self, dimension: int) -> None:
        """Accept every dimension."""

    def latent(self, source: BitSource, count: int, dimension: int) -> Float64[np.ndarray, " count"]:
        """Return ones: the law has a single layer."""
        return np.ones(count)

    def radius(self, latent: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
        return self.ball_radius * latent


@dataclass(frozen=True, kw_only=True)
class CellLaw:
    """Uniform law on a lattice's scaled basic cell: the error of subtractive dithering (SDQ).

    Every dither is accepted.

    Args:
        inner_radius: packing radius of the scaled cell, in the unit of the update: half the step on Z^n.
    """

    inner_radius: float

    name = "cell"
    shape = 0

    def __post_init__(self) -> None:
        _require_scale("inner_radius", self.inner_radius)

    @property
    def scale(self) -> float:
        """Packing radius of the scaled cell."""
        return self.inner_radius

    def require(self, dimension: int) -> None:
        """Accept every dimension."""

    def latent(self, source: BitSource, count: int, dimension: int) -> Float64[np.ndarray, " count"]:
        """Return ones: the law has a single layer."""
        return np.ones(count)

    def radius(self, latent: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
        """Return the packing radius of the scaled cell."""
        return self.inner_radius * latent


# --- bits that a law needs ---

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
    position = (values - low) / step
    below = np.floor(position).astype(np.int64)
    above_share = position - below
    size = int(below.max()) + 2
    shares = np.bincount(below, 1 - above_share, size) + np.bincount(below + 1, above_share, size)
    return shares / len(values)


def _entropy(mass: Float64[np.ndarray, " cells"]) -> float:
    positive = mass[mass > 1e-18]
    return float(-(positive * np.log2(positive)).sum())
