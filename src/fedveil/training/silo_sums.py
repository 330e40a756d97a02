"""Accumulate the bounded sum of each silo's contributions; every trainer adds its updates here."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.privacy.bounds import Bound
from fedveil.training.local_algorithms import LocalAlgorithm, LocalState, Tensors
from fedveil.training.shapes import single_threaded

_BLOCK: Final = 1 << 17  # numbers that are added at a time: they stay in a core's cache


class SiloSums:
    """Bounded sums of updates per silo, in O(silos · d) memory.

    The bound converts rows to whole numbers of grid units. Up to ``bound.exact_rows`` rows of one silo are added in
    float32, which is exact, and these sums in float64, which is exact too. With a
    :class:`~fedveil.privacy.bounds.Clip` or ``ClipL1``, the totals therefore do not depend on the order or the chunks
    in which updates arrive. Rows are added, never multiplied by a matrix: a product may run in TensorFloat-32 or
    bfloat16 (``torch.set_float32_matmul_precision``, or a flag of a backend), whose significands do not hold these
    whole numbers.

    Args:
        n_silos: number of rows of the sums.
        dimension: d.
        bound: the bound that is enforced on each update.
        device: of the sums.
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
        """Bound the updates in place, add them to their silos, and return their norms before the bound.

        Args:
            deltas: (b, d) updates; overwritten.
            weights: (b,) weight of each update.
            silos: (b,) row of the sums of each update.
        """
        with single_threaded():  # threads would divide a single long row, and its norm would round by the cut
            norms = self._bound.norms(deltas)
        units = self._bound.quantize_(deltas, norms, weights)
        together = self._bound.exact_rows
        # Under a clip, a row holds at most 2^units_bits grid units per coordinate. So exact_rows of them sum to at
        # most 2^24, the limit up to which float32 holds every whole number.
        for rows, owners in zip(torch.split(units, together), torch.split(silos, together), strict=True):
            present, local = torch.unique(owners, return_inverse=True)
            if len(present) == 1:
                # In place and in blocks: an index by a tensor, and a sum of two types, would each copy d numbers.
                row = rows[0] if len(rows) == 1 else rows.sum(0)
                for block, part in zip(
                    torch.split(self._units[int(present)], _BLOCK), torch.split(row, _BLOCK), strict=True
                ):
                    block.add_(part)
            else:
                sums = torch.zeros(len(present), rows.shape[1], dtype=torch.float32, device=rows.device)
                self._units[present] += sums.index_add_(0, local, rows)
        return norms

    def finish_(
        self,
        deltas: Float32[Tensor, "b d"],
        weights: Float64[Tensor, " b"],
        silos: Int64[Tensor, " b"],
        algorithm: LocalAlgorithm,
        state: LocalState,
    ) -> tuple[Float64[Tensor, " b"], Tensors]:
        """Add updates as :meth:`add_`, and return their norms and what the local algorithm keeps of them.

        Args:
            deltas: (b, d) updates; overwritten.
            weights: (b,) weight of each update.
            silos: (b,) row of the sums of each update.
            algorithm: the local algorithm.
            state: of these contributions before the round.
        """
        sent = deltas.clone() if algorithm.keeps else None
        norms = self.add_(deltas, weights, silos)
        if sent is None:
            return norms, {}
        factors = self._bound.coefficients(norms).float()[:, None]
        return norms, algorithm.finish(torch.where(factors > 0, sent * factors, 0.0), state)

    def total(self) -> Float64[Tensor, "silos d"]:
        """Return the sums in the unit of the updates."""
        return self._units * self._bound.grid
