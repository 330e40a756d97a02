"""The running, bounded sum of each silo's contributions: what every trainer streams its updates into."""

from __future__ import annotations

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.privacy.bounds import Bound
from fedveil.training.shapes import single_threaded


class SiloSums:
    """Bounds updates and adds them up per silo, in O(silos · d) memory.

    Rows are turned into whole numbers of grid units by the bound; as many of one silo as the bound allows are
    added in float32, which is exact, and these in float64, which is exact too. So with a
    :class:`~fedveil.privacy.bounds.Clip` or ``ClipL1`` the totals do not depend on the order or the chunks in which
    updates arrive. They are added, never multiplied: a product may run in TensorFloat-32 or bfloat16, whose bits do not
    hold these whole numbers, where ``torch.set_float32_matmul_precision`` or a backend's flag says so.
    """

    def __init__(self, n_silos: int, dimension: int, bound: Bound, device: torch.device) -> None:
        self._bound = bound
        self._units = torch.zeros(n_silos, dimension, dtype=torch.float64, device=device)

    def add_(
        self,
        deltas: Float32[Tensor, "b d"],
        weights: Float64[Tensor, " b"],
        silos: Int64[Tensor, " b"],
    ) -> Float64[Tensor, " b"]:
        """Bound the updates (in place), add them to their silos and return their norms before the bound."""
        with single_threaded():  # of a long row that is alone, threads would share out the numbers
            norms = self._bound.norms(deltas)
        units = self._bound.quantize_(deltas, norms, weights)
        together = self._bound.exact_rows
        for rows, owners in zip(torch.split(units, together), torch.split(silos, together), strict=True):
            present, local = torch.unique(owners, return_inverse=True)
            if len(present) == 1:
                self._units[present] += rows.sum(0)
            else:
                sums = torch.zeros(len(present), rows.shape[1], dtype=torch.float32, device=rows.device)
                self._units[present] += sums.index_add_(0, local, rows)
        return norms

    def total(self) -> Float64[Tensor, "silos d"]:
        """Return the sums in the unit of the updates."""
        return self._units * self._bound.grid
