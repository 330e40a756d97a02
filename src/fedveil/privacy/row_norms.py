"""Rows of updates, one a contribution: their norms, and their whole numbers once they are scaled.

What a bound does to a row it does through these functions, so that every bound treats numbers that are not finite, and
numbers that float32 cannot carry, alike. docs/theory/clipping.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from fedveil.errors import PrivacyError
from fedveil.privacy.steady_bound import SteadyBound

EXACT_FLOAT32_ROWS: Final = 64
"""Contributions of weight at most 1 whose sum is exact in float32, in grid units of at most 2^18."""
UNITS_BITS: Final = 18
"""A bound is at most 2^18 steps of its grid: 64 x 2^18 = 2^24, up to which float32 holds every whole number."""
SLACK: Final = 2.0**-20
"""By what share of a bound norms are scaled further down: more than their rounding and that of products."""

_LARGEST_DIMENSION: Final = 2**28
_BLOCK_ELEMENTS: Final = 2**17  # float64 squares of one block stay in a core's cache


def contribution_norms(deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
    """Return the l2 norm of every row in float64, NaN where a row holds a NaN or an infinity.

    The square of a float32 number is exact in float64 and neither overflows nor underflows there, so the
    relative error is below d · 2^-53 for every finite row, subnormal and 1e38 alike.

    Args:
        deltas: (m, d) updates, one contribution per row; m = 0 and d = 0 are allowed.

    Returns:
        (m,) norms, in the unit of the updates.

    Raises:
        PrivacyError: a row has more than 2^28 coordinates, the largest dimension of the proof.

    >>> contribution_norms(torch.tensor([[3.0, 4.0], [float("inf"), 0.0]])).tolist()
    [5.0, nan]
    """
    norms = _row_sums(deltas, Tensor.square_).sqrt_()
    return torch.where(torch.isfinite(norms), norms, torch.nan)


def l1_norms(deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
    """Return the l1 norm of every row in float64, NaN where a row holds a NaN or an infinity.

    The relative error is below d · 2^-53, as that of :func:`contribution_norms`; arguments and errors are the same.

    >>> l1_norms(torch.tensor([[3.0, -4.0], [float("inf"), 0.0]])).tolist()
    [7.0, nan]
    """
    norms = _row_sums(deltas, Tensor.abs_)
    return torch.where(torch.isfinite(norms), norms, torch.nan)


def _row_sums(deltas: Float32[Tensor, "m d"], of_each_: Callable[[Tensor], Tensor]) -> Float64[Tensor, " m"]:
    """Return, row by row, the float64 sum of a non-negative function of every coordinate."""
    rows, dimension = deltas.shape
    if dimension > _LARGEST_DIMENSION:
        raise PrivacyError(f"a contribution has {dimension} coordinates; clipping is proved for at most 2^28")
    sums = torch.empty(rows, dtype=torch.float64, device=deltas.device)
    step = max(1, _BLOCK_ELEMENTS // max(1, dimension))
    for first in range(0, rows, step):
        sums[first : first + step] = of_each_(deltas[first : first + step].double()).sum(1)
    return sums


def check_weights(weights: Float64[Tensor, " m"]) -> None:
    outside = ~((weights >= 0.0) & (weights <= 1.0))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise PrivacyError(
            f"the weight of contribution {row} is not in [0, 1]; a user's weights must sum to at most 1"
        )


def drop_nonfinite_(deltas: Float[Tensor, "m d"], norms: Float64[Tensor, " m"]) -> None:
    """Zero the rows without a finite norm: a coefficient of 0 alone would leave 0 · NaN = NaN."""
    dropped = ~torch.isfinite(norms)
    if bool(dropped.any()):
        deltas[dropped] = 0.0


def float32_below(values: Float64[Tensor, " m"]) -> Float32[Tensor, " m"]:
    """Return the nearest float32 that is not above each non-negative value (subnormal results round far)."""
    nearest = values.float()
    return torch.where(nearest.double() > values, torch.nextafter(nearest, nearest.new_zeros(())), nearest)


class ScalingBound(SteadyBound):
    """What bounds share that scale a row of an update down to a length, and store it on a grid."""

    @property
    def longest(self) -> float:
        """C, in the unit of the updates."""
        raise NotImplementedError

    @property
    def grid(self) -> float:
        """Spacing of what is stored, in the unit of messages."""
        raise NotImplementedError

    @property
    def effective_norm(self) -> float:
        """What the computed norm is scaled to: C' = C (1 - 2^-20)."""
        return self.longest * (1.0 - SLACK)

    def coefficients(self, norms: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """Return min(1, C' / norm) for every contribution, 0 where the norm is not finite."""
        shortened = torch.clamp(self.effective_norm / norms, max=1.0)
        return torch.where(torch.isfinite(norms), shortened, 0.0)

    def is_clipped(self, norms: Float64[Tensor, " m"]) -> Bool[Tensor, " m"]:
        """Return which contributions the bound shortened (a non-finite one was dropped, not shortened)."""
        return norms > self.effective_norm

    def quantize_(
        self, deltas: Float32[Tensor, "m d"], norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float32[Tensor, "m d"]:
        """Turn every row into its weighted, clipped contribution in units of :attr:`grid`, in place.

        Args:
            deltas: (m, d) updates; overwritten.
            norms: (m,) what ``norms`` returned for these very rows.
            weights: (m,) weights in [0, 1]; those of one user must sum to at most 1 over all silos.

        Returns:
            ``deltas``, now whole numbers y with ``||grid unit y_i|| <= weights_i C``, ``unit`` being that of messages.

        Raises:
            PrivacyError: a weight outside [0, 1].
        """
        check_weights(weights)
        drop_nonfinite_(deltas, norms)
        scale = weights * self.coefficients(norms) / (self.unit * self.grid)
        return deltas.mul_(float32_below(scale)[:, None]).trunc_()
