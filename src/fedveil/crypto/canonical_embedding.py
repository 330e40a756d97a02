"""Real polynomials modulo X^N + 1 and their values at roots of it: the canonical embedding of CKKS, by FFT.

With zeta = exp(i pi / N) a polynomial p is given by its values at zeta^(4m+1), m < N/2; the other roots are their
conjugates. As (zeta^(4m+1))^(N/2) = i,

    p(zeta^(4m+1)) = sum_{k < N/2} (p_k + i p_{k+N/2}) zeta^k exp(2 pi i m k / (N/2)):

one discrete Fourier transform of half the size. Products of values are products of polynomials modulo X^N + 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Complex128, Float64


def values(coefficients: Float64[np.ndarray, "*b n"]) -> Complex128[np.ndarray, "*b half"]:
    """Return the values of real polynomials at zeta^(4m+1), m = 0 .. N/2 - 1.

    Args:
        coefficients: (..., N) of 1, X, ..., X^(N-1); N is even.
    """
    half = coefficients.shape[-1] // 2
    folded = np.empty((*coefficients.shape[:-1], half), dtype=np.complex128)
    folded.real, folded.imag = coefficients[..., :half], coefficients[..., half:]
    folded *= _roots(half)
    return np.fft.ifft(folded, norm="forward")


def coefficients(values: Complex128[np.ndarray, "*b half"]) -> Float64[np.ndarray, "*b n"]:
    """Return the real polynomials that have these values; the inverse of :func:`values`."""
    folded = np.fft.fft(values, norm="forward")
    folded *= _roots(values.shape[-1]).conj()
    return np.concatenate([folded.real, folded.imag], axis=-1)


@lru_cache(maxsize=4)
def _roots(half: int) -> Complex128[np.ndarray, " half"]:
    """Return zeta^0 .. zeta^(N/2-1), every one to the last bit (no powers of powers)."""
    roots: np.ndarray = np.exp(0.5j * np.pi * np.arange(half) / half)
    roots.flags.writeable = False
    return roots
