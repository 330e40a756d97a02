"""Evaluate real polynomials modulo X^N + 1 at its roots by FFT: the canonical embedding of CKKS.

Let zeta = exp(i pi / N). The values of a real polynomial p at zeta^(4m+1), m < N/2, determine p, because the other
roots are the conjugates of these. As (zeta^(4m+1))^(N/2) = i,

    p(zeta^(4m+1)) = sum_{k < N/2} (p_k + i p_{k+N/2}) zeta^k exp(2 pi i m k / (N/2)).

This is one discrete Fourier transform of half the size. Products of values are the values of products of polynomials
modulo X^N + 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Complex128, Float64


def values(coefficients: Float64[np.ndarray, "*b n"]) -> Complex128[np.ndarray, "*b half"]:
    """Return the values of real polynomials at zeta^(4m+1), m = 0 .. N/2 - 1.

    Args:
        coefficients: (..., N) float64, coefficients of 1, X, ..., X^(N-1); N is even.

    Returns:
        (..., N/2) complex128.
    """
    half = coefficients.shape[-1] // 2
    folded = np.empty((*coefficients.shape[:-1], half), dtype=np.complex128)
    folded.real, folded.imag = coefficients[..., :half], coefficients[..., half:]
    folded *= _roots(half)
    return np.fft.ifft(folded, norm="forward")


def coefficients(values: Complex128[np.ndarray, "*b half"]) -> Float64[np.ndarray, "*b n"]:
    """Return the coefficients of the real polynomials with given values; inverse of :func:`values`."""
    folded = np.fft.fft(values, norm="forward")
    folded *= _roots(values.shape[-1]).conj()
    return np.concatenate([folded.real, folded.imag], axis=-1)


@lru_cache(maxsize=4)
def _roots(half: int) -> Complex128[np.ndarray, " half"]:
    """Return zeta^0 .. zeta^(N/2-1), each from its own exponential to avoid accumulated rounding."""
    roots: np.ndarray = np.exp(0.5j * np.pi * np.arange(half) / half)
    roots.flags.writeable = False
    return roots
