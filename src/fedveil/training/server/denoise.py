"""Estimate the aggregate from a noisy aggregate and the known size of its noise: denoisers.

A denoiser receives y = x + N(0, nu^2 I), the noisy mean update, and knows nu. It reads no record, so it is
post-processing: its output has every guarantee that y has (Dwork and Roth 2014, Proposition 2.1).

==============  ======================================================  ==========================================
denoiser        estimate of x                                           reference
==============  ======================================================  ==========================================
NoDenoiser      y
Laplacian       A_sigma^{-1} y, A_sigma = I + sigma Lap (a cycle)       DP-Fed-LS, Algorithm 1
JamesStein      (1 - (d - 2) nu^2 / ||y||^2) y                          Balle and Wang 2018, section 4
ByRule          Laplacian if the noise ratio rho is >= 1/2, else y      docs/theory/noise-to-travel.md
SoftThreshold   sign(y) max(0, |y| - nu sqrt(2 ln d))                   Balle and Wang 2018, section 4
==============  ======================================================  ==========================================

docs/theory/laplacian-smoothing.md has the argument and the tests that try to refute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy import fft
from torch import Tensor

from fedveil.config_keys import NonNegative
from fedveil.errors import CompositionError, ModelError
from fedveil.privacy.row_norms import is_finite
from fedveil.stage import Sensitivity, Stage, duty

Shapes: TypeAlias = Sequence[tuple[int, ...]]
"""Shapes of the model's tensors, in the order of the vector."""
Scope: TypeAlias = Literal["tensor", "vector"]
Order: TypeAlias = Literal["BCHW", "BCWH", "BHWC", "BWHC"]

_BLOCK: Final = 1 << 18


class Denoiser(Stage):
    """An estimator of the aggregate under known noise; an immutable value.

    Attributes:
        needs_noise_std: whether :meth:`estimate` reads the size of the noise, so that it must be known.
        changes: whether the estimate may differ from the noisy aggregate.
    """

    needs_noise_std: ClassVar[bool]
    changes: ClassVar[bool] = True

    @property
    def description(self) -> str:
        """Description in a few words, for reports."""
        return type(self).__name__

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise of unknown size if the estimate reads it."""
        if self.needs_noise_std and not method.noise_known:
            yield (
                f"{self.description} needs the size of the noise, which DP-SGD inside the silos leaves unknown; use "
                "the Laplacian denoiser"
            )

    def resolve(self, ratio: Callable[[], float], shape: tuple[int, ...]) -> Denoiser:
        """Return the denoiser of a run, once the run's noise is known.

        Args:
            ratio: returns the run's noise-to-travel ratio (:mod:`fedveil.methods.noise_ratio`).
            shape: shape of a record's features.
        """
        return self

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return the sentences of the statement that describe the denoiser."""
        return (
            f"the server denoises the noisy mean ({self.description}): post-processing, at no privacy cost",
        )

    @duty
    def estimate(self, noisy: Float[Tensor, " d"], noise_std: float, shapes: Shapes) -> Float[Tensor, " d"]:
        """Return the estimate of the aggregate; ``noisy`` is not modified.

        Args:
            noisy: (d,) the aggregate with its noise, in the unit of an update.
            noise_std: nu, standard deviation of the noise in each coordinate, same unit.
            shapes: shapes of the tensors that the vector holds; their sizes add up to d.

        Raises:
            ModelError: the aggregate has a NaN or an infinity.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NoDenoiser(Denoiser):
    """No denoising: the noisy aggregate, unchanged."""

    needs_noise_std: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    description: ClassVar[str] = "none"

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        return ()

    def estimate(self, noisy: Float[Tensor, " d"], noise_std: float, shapes: Shapes) -> Float[Tensor, " d"]:
        _check(noisy, shapes)
        return noisy


@dataclass(frozen=True, kw_only=True)
class Laplacian(Denoiser):
    """Laplacian smoothing: A_sigma^{-1} y with A_sigma = I + sigma Lap, Lap the Laplacian of a cycle.

    A_sigma is circulant with first row (1 + 2 sigma, -sigma, 0, ..., 0, -sigma), so its inverse multiplies the k-th
    Fourier coefficient by 1 / (1 + 2 sigma (1 - cos(2 pi k / d))). The mean of y is kept (k = 0), and no other
    frequency grows, so the estimate is never longer than y. Noise has equal energy at all frequencies, and updates
    concentrate at low ones; therefore the damping helps (Liang et al., "Differentially private federated learning
    with Laplacian smoothing", Figure 1).

    On a cycle of one node Lap = 0, and a single value does not change. On a cycle of two nodes, both neighbours of a
    node are the other node, and the difference is divided by 1 + 4 sigma. (The authors' program also leaves one node
    unchanged, but changes the mean of two nodes.)

    Args:
        smoothing: sigma >= 0; 0 is no smoothing.
        scope: "tensor" smooths each tensor of the model separately, "vector" the whole vector as one cycle.
        order: the order in which the axes of a 4-dimensional tensor are unfolded into a cycle. Such a tensor is a
            convolution kernel with stored order BCHW: output channel, input channel, height, width.

    Raises:
        CompositionError: a smoothing that is negative or not finite.

    >>> y = torch.tensor([3.0, 0.0, 0.0, 0.0])
    >>> smoothed = Laplacian(smoothing=1.0).estimate(y, 0.0, [(4,)])
    >>> round(float(smoothed.mean()), 6), bool(smoothed[0] < y[0])
    (0.75, True)
    """

    smoothing: NonNegative = 1.0
    scope: Scope = "tensor"
    order: Order = "BCHW"

    needs_noise_std: ClassVar[bool] = False

    @property
    def description(self) -> str:
        return f"Laplacian smoothing, sigma {self.smoothing:g}, per {self.scope}, {self.order}"

    def estimate(self, noisy: Float[Tensor, " d"], noise_std: float, shapes: Shapes) -> Float[Tensor, " d"]:
        """Return A_sigma^{-1} y; the size of the noise is not used."""
        _check(noisy, shapes)
        if self.smoothing == 0 or len(noisy) == 0:
            return noisy
        if self.scope == "vector" and self.order == "BCHW":
            return smooth(noisy, self.smoothing)
        axes = tuple("BCHW".index(axis) for axis in self.order)
        parts = [part.permute(axes) if part.ndim == 4 else part for part in _split(noisy, shapes)]
        if self.scope == "vector":
            flat = smooth(torch.cat([part.reshape(-1) for part in parts]), self.smoothing)
            smoothed = list(torch.split(flat, [part.numel() for part in parts]))
        else:
            smoothed = [smooth(part.reshape(-1), self.smoothing) for part in parts]
        back = tuple(axes.index(axis) for axis in range(4))
        folded = [new.view(old.shape) for new, old in zip(smoothed, parts, strict=True)]
        return torch.cat([(part.permute(back) if part.ndim == 4 else part).reshape(-1) for part in folded])


@dataclass(frozen=True, kw_only=True)
class ByRule(Denoiser):
    """Laplacian smoothing if the noise-to-travel ratio rho is at least 1/2, else no denoising.

    rho is the length of the whole run's noise over the longest displacement of the model.

    If it smooths, sigma is 0.25, and 1 for images of 28 x 28 pixels or more. On a long cycle, smoothing leaves
    (1 + 2 sigma) / (1 + 4 sigma)^1.5 of the noise's variance and removes a share of the displacement. No public
    number says which of the two is larger. The threshold was therefore chosen by trial with linear models on digits,
    MNIST with 100 users and TcgaBrca. It is a heuristic. Its errors cost no privacy; it errs with a small
    convolutional network (docs/theory/noise-to-travel.md).
    """

    needs_noise_std: ClassVar[bool] = True
    description: ClassVar[str] = "by rule"

    def resolve(self, ratio: Callable[[], float], shape: tuple[int, ...]) -> Denoiser:
        # Columns of a table have no neighbours, so smoothing over their order has no meaning.
        if len(shape) < _IMAGE_AXES or ratio() < SMOOTHED_FROM:
            return NO_DENOISER
        large = min(sorted(shape)[-2:]) >= _LARGE_IMAGE
        return Laplacian(smoothing=1.0 if large else 0.25)

    def estimate(self, noisy: Float[Tensor, " d"], noise_std: float, shapes: Shapes) -> Float[Tensor, " d"]:
        """Refuse to estimate, because :meth:`resolve` returns the denoiser once the noise of the run is known.

        Raises:
            CompositionError: always.
        """
        raise CompositionError(
            "denoiser 'by-rule' is resolved once the noise of a run is known; take that one"
        )


SMOOTHED_FROM: Final = 0.5
"""Smallest noise-to-travel ratio at which ``by-rule`` smooths."""
_LARGE_IMAGE: Final = 28
_IMAGE_AXES: Final = 2


@dataclass(frozen=True, kw_only=True)
class JamesStein(Denoiser):
    """Shrinkage of the whole vector: (1 - (d - 2) nu^2 / ||y||^2) y.

    Reference: James and Stein 1961; Balle and Wang 2018.

    This is the published estimator, not its positive part: a vector shorter than its noise changes sign. Vectors of
    fewer than three coordinates and the zero vector do not change, because the estimator is not defined for them.
    """

    needs_noise_std: ClassVar[bool] = True
    description: ClassVar[str] = "James-Stein shrinkage"

    def estimate(self, noisy: Float[Tensor, " d"], noise_std: float, shapes: Shapes) -> Float[Tensor, " d"]:
        _check(noisy, shapes)
        _check_std(noise_std)
        square = float(noisy.double().square().sum())
        if len(noisy) < 3 or square == 0:
            return noisy
        return noisy * (1 - (len(noisy) - 2) * noise_std**2 / square)


@dataclass(frozen=True, kw_only=True)
class SoftThreshold(Denoiser):
    """Soft thresholding: shift every coordinate towards zero by nu sqrt(2 ln d).

    Reference: Donoho and Johnstone 1994; Balle and Wang 2018.
    """

    needs_noise_std: ClassVar[bool] = True
    description: ClassVar[str] = "soft thresholding at nu sqrt(2 ln d)"

    def estimate(self, noisy: Float[Tensor, " d"], noise_std: float, shapes: Shapes) -> Float[Tensor, " d"]:
        _check(noisy, shapes)
        _check_std(noise_std)
        threshold = noise_std * math.sqrt(2 * math.log(max(1, len(noisy))))
        return noisy.sign() * (noisy.abs() - threshold).clamp_(min=0)


def smooth(values: Float[Tensor, " d"], smoothing: float) -> Float[Tensor, " d"]:
    """Return A_sigma^{-1} of a cycle of d values, by one real FFT and its inverse.

    The computation has the precision of the values.

    Args:
        values: (d,) float32 or float64; d = 0, 1 and 2 are allowed.
        smoothing: sigma >= 0.
    """
    size = len(values)
    if size < 2:
        return values.clone()
    spectrum = torch.fft.rfft(values)
    # Blocks keep the temporary gains small: 2^18 numbers instead of d / 2.
    for first in range(0, len(spectrum), _BLOCK):
        block = spectrum[first : first + _BLOCK]
        block.mul_(_gains(first, len(block), size, smoothing, values.dtype, values.device))
    smoothed: Tensor = torch.fft.irfft(spectrum, n=size)
    return smoothed


def effective_dimensions(size: int, smoothing: float) -> tuple[float, float]:
    """Return (d_sigma, d~_sigma): the sum of the d eigenvalues of A_sigma^{-1}, and of their squares.

    d~_sigma / d is the share of the noise's variance that smoothing leaves.

    >>> effective_dimensions(10, 0.0)
    (10.0, 10.0)
    """
    once = twice = 0.0
    for first in range(0, size, _BLOCK):
        gains = _gains(first, min(_BLOCK, size - first), size, smoothing, torch.float64, torch.device("cpu"))
        once += float(gains.sum())
        twice += float(gains.square().sum())
    return once, twice


def _gains(
    first: int, count: int, size: int, smoothing: float, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, " count"]:
    """Return the eigenvalues 1 / (1 + 4 sigma sin^2(pi k / d)) for ``count`` values k from ``first`` on.

    They equal the factors of :class:`Laplacian`, because 2 (1 - cos 2x) = 4 sin^2 x.
    """
    k: Float64[Tensor, " count"] = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return k.mul_(math.pi / size).to(dtype).sin_().square_().mul_(4 * smoothing).add_(1).reciprocal_()


def _split(vector: Float[Tensor, " d"], shapes: Shapes) -> Iterator[Float[Tensor, "..."]]:
    """Yield the tensors that the vector holds, as views."""
    first = 0
    for shape in shapes:
        size = math.prod(shape)
        yield vector[first : first + size].view(shape)
        first += size


def _check(noisy: Float[Tensor, " d"], shapes: Shapes) -> None:
    total = sum(math.prod(shape) for shape in shapes)
    assert total == len(noisy), f"shapes hold {total} values, the vector {len(noisy)}"
    if not is_finite(noisy):
        raise ModelError(
            "the aggregate has a NaN or an infinity: contributions were not bounded and training diverged; "
            "give the method a clip bound, or lower local.learning_rate"
        )


def _check_std(noise_std: float) -> None:
    assert math.isfinite(noise_std), f"noise_std = {noise_std}"
    assert noise_std >= 0, f"noise_std = {noise_std}"


NO_DENOISER: Final = NoDenoiser()


# --- spectrum of an update ---

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
