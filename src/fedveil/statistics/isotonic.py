"""Isotonic regression: the rising sequence that lies nearest to noisy values of one that rises."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64


def isotonic_regression(
    values: Float64[np.ndarray, " n"],
    *,
    sample_weight: Float64[np.ndarray, " n"] | None = None,
    y_min: float | None = None,
    y_max: float | None = None,
) -> Float64[np.ndarray, " n"]:
    """Return the rising sequence with the least weighted sum of squared distances, cut off at two bounds.

    Args:
        values: (n,) what should rise.
        sample_weight: (n,) of each squared distance; None: all the same.
        y_min: what no element of the sequence lies below.
        y_max: what none lies above.
    """
    from sklearn import isotonic  # here, for it is slow to load and few commands need it

    found: Any = isotonic.isotonic_regression(values, sample_weight=sample_weight, y_min=y_min, y_max=y_max)
    return np.asarray(found, dtype=np.float64)
