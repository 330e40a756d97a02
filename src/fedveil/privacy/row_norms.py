"""Compute norms of update rows, scale rows to grid steps, and define the interface of bounds over rounds.

Each bound uses these functions, so every bound treats non-finite numbers, and numbers outside the range of float32,
in the same way. docs/theory/clipping.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from fedveil.errors import PrivacyError

# --- bounds over rounds ---

_Bound = TypeVar("_Bound", bound="SteadyBound")


class SteadyBound:
    """Base of bounds; by default a bound is constant, adds nothing to the updates and has no state.

    Attributes:
        extra: number of coordinates of a message in addition to those of the update.
    """

    extra: ClassVar[int] = 0

    @property
    def unit(self) -> float:
        """Unit of messages, in units of the updates: 1."""
        return 1.0

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why a method cannot use the bound."""
        return ()

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        """Return the mechanism of the bound in words; empty for a constant bound."""
        return ()

    def init(self) -> Mapping[str, Tensor]:
        """Return the state before the first round."""
        return {}

    def measured_in(self: _Bound, unit: float) -> _Bound:
        """Return the bound whose messages are in ``unit``, as received from another process."""
        return self

    def possible(self, unit: float, number: int) -> bool:
        """Return whether the messages of round ``number`` may be in ``unit``."""
        return unit == self.unit

    def at_state(self: _Bound, state: Mapping[str, Tensor]) -> _Bound:
        """Return the bound of the next round, given the state after the last round."""
        return self

    def next_state(
        self, marks: Float64[Tensor, " extra"], users: float, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the state after a round.

        Args:
            marks: (extra,) released noisy sums of the values of :meth:`marks`.
            users: q |U|, the expected number of participants.
            state: the state before the round.
        """
        return {}

    def marks(
        self, norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float64[Tensor, "m extra"]:
        """Return the (m, extra) additional coordinates of each contribution, on the bound's grid.

        The unit is that of a message.
        """
        return torch.zeros(len(norms), self.extra, dtype=torch.float64)


# --- norms of rows ---

EXACT_FLOAT32_ROWS: Final = 64
"""Number of contributions of weight at most 1 whose sum is exact in float32.

Each contribution is at most 2^18 in grid units.
"""
UNITS_BITS: Final = 18
"""A bound is at most 2^18 steps of its grid.

64 x 2^18 = 2^24 is the limit up to which float32 holds every whole number.
"""
_FLOAT32_BITS: Final = 32
SLACK: Final = 2.0**-20
"""Relative amount by which norms are scaled below the bound.

It exceeds the rounding error of a norm and of the products.
"""

_LARGEST_DIMENSION: Final = 2**28
_BLOCK_ELEMENTS: Final = 2**17  # float64 squares of one block stay in a core's cache


def contribution_norms(deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
    """Return the l2 norm of every row in float64, NaN if the row holds a NaN or an infinity.

    The square of a float32 number is exact in float64, and it neither overflows nor underflows there. The relative
    error is therefore below d · 2^-53 for every finite row, for subnormal numbers and for 1e38.

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
    """Return the l1 norm of every row in float64, NaN if the row holds a NaN or an infinity.

    The relative error is below d · 2^-53, as that of :func:`contribution_norms`; arguments and errors are the same.

    >>> l1_norms(torch.tensor([[3.0, -4.0], [float("inf"), 0.0]])).tolist()
    [7.0, nan]
    """
    norms = _row_sums(deltas, Tensor.abs_)
    return torch.where(torch.isfinite(norms), norms, torch.nan)


def _row_sums(deltas: Float32[Tensor, "m d"], of_each_: Callable[[Tensor], Tensor]) -> Float64[Tensor, " m"]:
    """Return the float64 sum of a non-negative function of the coordinates of every row."""
    rows, dimension = deltas.shape
    if dimension > _LARGEST_DIMENSION:
        raise PrivacyError(f"a contribution has {dimension} coordinates; clipping is proved for at most 2^28")
    sums = torch.empty(rows, dtype=torch.float64, device=deltas.device)
    # Blocks of rows, or of one row's columns, bound the memory of the float64 copy and stay in a core's cache. All
    # blocks use the same memory: fresh memory of a megabyte costs more than the squares in it.
    copy = torch.empty(min(rows * dimension, _BLOCK_ELEMENTS), dtype=torch.float64, device=deltas.device)

    def of_block(block: Float32[Tensor, "..."]) -> Float64[Tensor, "..."]:
        return of_each_(copy[: block.numel()].view(block.shape).copy_(block))

    if dimension > _BLOCK_ELEMENTS:
        for row, delta in enumerate(deltas):
            parts = [of_block(part).sum() for part in delta.split(_BLOCK_ELEMENTS)]
            sums[row] = torch.stack(parts).sum()
        return sums
    step = max(1, _BLOCK_ELEMENTS // max(1, dimension))
    for first in range(0, rows, step):
        sums[first : first + step] = of_block(deltas[first : first + step]).sum(1)
    return sums


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite; in blocks, because a test of all at once takes three copies of them.

    >>> is_finite(torch.zeros(3)), is_finite(torch.tensor([1.0, torch.inf]))
    (True, False)
    """
    return all(bool(block.isfinite().all()) for block in torch.split(values.reshape(-1), _BLOCK_ELEMENTS))


def check_weights(weights: Float64[Tensor, " m"]) -> None:
    """Check that every weight lies in [0, 1].

    Raises:
        PrivacyError: names the first contribution whose weight does not.
    """
    outside = ~((weights >= 0.0) & (weights <= 1.0))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise PrivacyError(
            f"the weight of contribution {row} is not in [0, 1]; a user's weights must sum to at most 1"
        )


def drop_nonfinite_(deltas: Float[Tensor, "m d"], norms: Float64[Tensor, " m"]) -> None:
    """Set rows without a finite norm to zero in place: a coefficient of 0 would leave 0 · NaN = NaN."""
    dropped = ~torch.isfinite(norms)
    if bool(dropped.any()):
        deltas[dropped] = 0.0


def truncate_(values: Tensor) -> Tensor:
    """Round every number towards zero to a whole number, in place, and return the values.

    On a CPU NumPy does it, bit for bit as ``torch.trunc``: PyTorch's kernel takes ten times as long, an eighth of a
    step of DP-SGD.

    >>> truncate_(torch.tensor([2.7, -2.7])).tolist()
    [2.0, -2.0]
    """
    if values.device.type != "cpu":
        return values.trunc_()
    numbers = values.numpy()
    np.trunc(numbers, out=numbers)
    return values


def float32_below(values: Float64[Tensor, " m"]) -> Float32[Tensor, " m"]:
    """Return the largest float32 numbers that are not above the non-negative float64 values.

    In the subnormal range of float32 the relative error is large.
    """
    nearest = values.float()
    return torch.where(nearest.double() > values, torch.nextafter(nearest, nearest.new_zeros(())), nearest)


class ScalingBound(SteadyBound):
    """Base of bounds that scale an update row down to a norm and store it on a grid."""

    @property
    def longest(self) -> float:
        """C, in the unit of the updates."""
        raise NotImplementedError

    @property
    def grid(self) -> float:
        """Spacing of stored contributions, in the unit of messages."""
        raise NotImplementedError

    @property
    def effective_norm(self) -> float:
        """Norm to which rows are scaled: C' = C (1 - 2^-20)."""
        return self.longest * (1.0 - SLACK)

    def coefficients(self, norms: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """Return min(1, C' / norm) for every contribution, 0 if its norm is not finite."""
        shortened = torch.clamp(self.effective_norm / norms, max=1.0)
        return torch.where(torch.isfinite(norms), shortened, 0.0)

    def is_clipped(self, norms: Float64[Tensor, " m"]) -> Bool[Tensor, " m"]:
        """Return a mask of the contributions that the bound shortened.

        A non-finite row is dropped, not shortened.
        """
        return norms > self.effective_norm

    def quantize_(
        self, deltas: Float32[Tensor, "m d"], norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float32[Tensor, "m d"]:
        """Replace every row in place by its weighted, clipped contribution in units of :attr:`grid`.

        Args:
            deltas: (m, d) float32 updates; overwritten.
            norms: (m,) result of ``norms`` for the same rows.
            weights: (m,) weights in [0, 1]; the weights of one user must sum to at most 1 over all silos.

        Returns:
            ``deltas``, now whole numbers y with ``||grid unit y_i|| <= weights_i C``, where ``unit`` is that of
            messages.

        Raises:
            PrivacyError: a weight outside [0, 1], or updates of fewer bits than float32.
        """
        check_weights(weights)
        if torch.finfo(deltas.dtype).bits < _FLOAT32_BITS:
            raise PrivacyError(
                f"updates of {deltas.dtype} cannot be bounded: products and sums would round up; float32 is needed"
            )
        drop_nonfinite_(deltas, norms)
        scale = weights * self.coefficients(norms) / (self.unit * self.grid)
        # Rounding the factor to the nearest float32 could lengthen a row by 2^-24; rounding it down cannot.
        return truncate_(deltas.mul_(float32_below(scale)[:, None]))
