"""Compute the passes of Gram training over the features.

The passes are the logits, the Gram matrices and the weighted sum of records.

All other work of :mod:`fedveil.training.gram.trainer` is independent of the number of features. Rows are read in the
order of the contributions, one block at a time, and converted to float32 as in every trainer. Memory is therefore
O(block x features) for any number of records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from fedveil.errors import PrivacyError
from fedveil.privacy.bounds import Bound
from fedveil.training.trainer import Cohort

BLOCK_ROWS: Final = 256
"""Largest number of records of a block; records of many features have smaller blocks."""
_FEWEST_ROWS: Final = 16
_BLOCK_BYTES: Final = 64 << 20
_RUN: Final = 16
ADDITIONS: Final = _RUN + 40
"""Largest number of additions between a block and the total, for 2^40 runs of blocks, which exceeds any silo."""

_GRAM_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 16 << 20
_COLUMNS: Final = 8


class Gram(NamedTuple):
    """Gram matrices of some rows of a layout.

    Each matrix covers the first n records of its row. A single row appears twice, because one row alone would use
    another kernel.
    """

    rows: Int64[Tensor, "g"]
    products: Float64[Tensor, "g n n"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The records of the contributions that take part, in the order of the contributions.

    Args:
        cohort: the table.
        index: (r,) row of the table of each record.
        bias: whether every record has one more feature that is always 1.
    """

    cohort: Cohort
    index: Int64[np.ndarray, "r"]
    bias: bool

    @cached_property
    def _block_rows(self) -> int:
        """Number of records of a block, by the number of features: a power of two, in float64 up to 64 MiB."""
        fitting = _BLOCK_BYTES // (8 * self.cohort.features[0].numel())
        return max(_FEWEST_ROWS, min(BLOCK_ROWS, 1 << max(0, fitting.bit_length() - 1)))

    @cached_property
    def _features(self) -> Float32[Tensor, "r p"] | None:
        """All features, flattened, or None if they exceed 16 MiB.

        Three passes, and all rounds of a plan, read them.
        """
        if 4 * len(self.index) * self.cohort.features[0].numel() > _KEPT_BYTES:
            return None
        return self.cohort.features_of(torch.from_numpy(self.index)).flatten(1)

    def read(self, records: Int64[Tensor, "*batch"]) -> Float32[Tensor, "*batch p"]:
        """Return the features of some records, flattened, without the constant feature.

        Padding positions return the features of an arbitrary record.
        """
        numbers = records.flatten().clamp(max=len(self.index) - 1)
        if self._features is not None:
            features = self._features.index_select(0, numbers.to(self._features.device))
        else:
            features = self.cohort.features_of(torch.from_numpy(self.index)[numbers]).flatten(1)
        return features.view(*records.shape, -1)

    def _row(self, first: int, last: int) -> Float32[Tensor, "b p"]:
        """Return the features of records ``first`` to ``last`` - 1: a view if all features are kept."""
        if self._features is not None:
            return self._features[first:last]
        return self.cohort.features_of(torch.from_numpy(self.index[first:last])).flatten(1)

    def _among(self, chosen: Int64[np.ndarray, "b"]) -> Float32[Tensor, "b p"]:
        """Return the features of some records, in ascending order."""
        first, last = int(chosen[0]), int(chosen[-1]) + 1
        in_a_row = last - first == len(chosen)
        return self._row(first, last) if in_a_row else self.read(torch.from_numpy(chosen))

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the blocks between ``first`` and ``last``."""
        for start in range(first, last, self._block_rows):
            yield start, min(start + self._block_rows, last)

    def logits(
        self, weight: Float[Tensor, "k p"], bias: Float[Tensor, "k"] | None
    ) -> Float[Tensor, "r_plus_1 k"]:
        """Return the outputs of one linear model for every record, and a last row of zeros for padding."""
        outputs = weight.new_zeros(len(self.index) + 1, len(weight))
        padded = weight.new_zeros(self._block_rows, weight.shape[1])
        for first, last in self.blocks(0, len(self.index)):
            block = self._row(first, last)
            if len(block) < len(padded) or block.dtype != padded.dtype:
                padded[: len(block)] = block
                # A product of one shape: its rounding does not depend on the number of records.
                block = padded
            outputs[first:last] = torch.mm(block, weight.T)[: last - first]
        if bias is not None:
            outputs[:-1] += bias
        return outputs

    def grams(
        self, records: Int64[Tensor, "rows width"], owner: Int64[Tensor, "r_plus_1"], alone: bool
    ) -> Iterator[Gram]:
        """Yield the inner products of records in the same row and contribution; other entries are 0.

        Args:
            records: (rows, width) numbers of records, ``len(index)`` for padding.
            owner: (r + 1,) the contribution of each record, -1 for padding.
            alone: whether each row holds one contribution. Then the number of columns that are read follows from
                the contribution's own number of records, and empty rows are left out.
        """
        sizes = (records < len(self.index)).sum(1)
        columns = -(-sizes // _COLUMNS) * _COLUMNS if alone else torch.full_like(sizes, records.shape[1])
        for n_columns in sorted(set(columns.tolist()) - {0}):
            rows = (columns == n_columns).nonzero().flatten()
            # A batched product of a single matrix uses another kernel, so the matrix is computed twice.
            rows = rows if len(rows) > 1 else rows.expand(2)
            read = records[rows, :n_columns]
            shape, device = (len(rows), n_columns, n_columns), self.cohort.features.device
            products = torch.empty(shape, dtype=torch.float64, device=device)
            at_once = max(2, _GRAM_BYTES // (8 * n_columns * self.cohort.features[0].numel()))
            for first in range(0, len(rows), at_once):
                # The last part starts one matrix earlier if it would hold a single one, for the same reason.
                part = slice(min(first, len(rows) - 2), first + at_once)
                features = self.read(read[part]).double()
                torch.bmm(features, features.mT, out=products[part])
            if self.bias:
                products.add_(1.0)
            owners = owner[read].to(device)
            apart = (owners[:, :, None] != owners[:, None]) | (owners[:, :, None] < 0)
            yield Gram(rows, products.masked_fill_(apart, 0.0))

    def weighted_sum(
        self, coefficients: Float64[Tensor, "r k"], chosen: Int64[np.ndarray, "s"], drop_nonfinite: bool
    ) -> Float64[Tensor, "d"]:
        """Return coefficients^T X over some records in float64: the weight, then the bias.

        Blocks are added up sixteen at a time, and these sums pairwise in a binary tree. The error of entry (c, j) is
        at most (BLOCK_ROWS + ADDITIONS) 2^-53 sum_r |coefficients_rc| |x_rj|, for any number of records.

        Args:
            coefficients: (r, k) factor of each record and output.
            chosen: (s,) the records of the sum, ascending.
            drop_nonfinite: read features that are not finite as 0; they belong to dropped contributions.
        """
        factors = coefficients[torch.from_numpy(chosen)]
        outputs, width = factors.shape[1], self.cohort.features[0].numel()
        buffer = factors.new_empty(self._block_rows, width)
        run = _RUN * self._block_rows

        def total(first: int, last: int) -> Float64[Tensor, "d"]:
            if last - first > run:
                middle = first + -(-(last - first) // (2 * run)) * run
                return total(first, middle).add_(total(middle, last))
            weight, bias = factors.new_zeros(outputs, width), factors.new_zeros(outputs)
            for start, end in self.blocks(first, last):
                features = buffer[: end - start].copy_(self._among(chosen[start:end]))
                # 0 * inf is NaN: the zero factor of a dropped contribution would not remove its infinite features.
                if drop_nonfinite:
                    features.nan_to_num_(0.0, 0.0, 0.0)
                weight.addmm_(factors[start:end].T, features)
                bias += factors[start:end].sum(0)
            return torch.cat([weight.flatten(), bias]) if self.bias else weight.flatten()

        return total(0, len(chosen))


# --- sums ----------------------------------------------------------------------------------------------------------
# Bound and sum the updates of Gram training without forming them.
#
# An update is Delta = A^T X + (c - 1) W0 with coefficients A (n, k) and records X (n, p + 1). Its norm follows from
# the Gram matrix, and the sum over all contributions of a silo is one matrix product. The bound holds in
# floating-point arithmetic; docs/theory/gram-trainer.md derives every constant below.

_UNIT: Final = 2.0**-52
_CANCELLATION: Final = 64.0
MOST_WEIGHT: Final = 2**28 // (BLOCK_ROWS + ADDITIONS + 8)
"""Largest sum of weights in a silo, 838,860, for which the margin covers the rounding of the silo's product."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """Computed lengths of the updates, with their error terms.

    Args:
        square: the computed ||Delta||^2, NaN if the update is not finite.
        mass: sum_r ||a_r|| ||x_r|| + |c - 1| ||W0||, the length without any cancellation.
        terms: largest number of products in the computed square.
    """

    square: Float64[Tensor, "m"]
    mass: Float64[Tensor, "m"]
    terms: Float64[Tensor, "m"]

    @property
    def norms(self) -> Float64[Tensor, "m"]:
        """The computed ||Delta||, NaN if the update is not finite."""
        norms = self.square.clamp(min=0).sqrt()
        return torch.where(torch.isfinite(norms) & torch.isfinite(self.mass), norms, torch.nan)

    @property
    def upper(self) -> Float64[Tensor, "m"]:
        """An upper bound of ||Delta||: sqrt(square + terms 2^-52 mass^2)."""
        # A sum of `terms` products has an error of at most terms 2^-52 times the sum of their absolute values,
        # mass^2.
        square = self.square.clamp(min=0) + self.terms * _UNIT * self.mass.square()
        return torch.where(self.norms.isnan(), torch.nan, square.sqrt())


def coefficients(
    bound: Bound, lengths: Lengths, weights: Float64[Tensor, "m"], dimension: int
) -> Float64[Tensor, "m"]:
    """Return the factor of each update in the sum: its weight, or less if the bound requires it.

    Under a :class:`~fedveil.privacy.bounds.Clip` with bound C and grid g,

        min(w, (w C' - (sqrt(d) + 1) g) / upper, 64 w C / mass)

    The margin (sqrt(d) + 1) g pays for rounding the silo's total to the grid: with or without a contribution, the
    rounded totals differ by at most w C. Truncating each contribution separately may lose as much.

    Args:
        bound: the bound of the contributions.
        lengths: lengths of the updates.
        weights: (m,) weight w of each contribution.
        dimension: d.

    Returns:
        (m,) factors; 0 for updates that are not finite.

    Raises:
        PrivacyError: a weight outside [0, 1].
    """
    if bool((~((weights >= 0) & (weights <= 1))).any()):
        raise PrivacyError("a contribution's weight is not in [0, 1]; a user's weights must sum to at most 1")
    finite = ~lengths.norms.isnan()
    if not bound.bounded:
        return torch.where(finite, weights, 0)
    allowed = (weights * bound.effective_norm - _margin(bound, dimension)).clamp(min=0)
    scaled = torch.minimum(weights, allowed / lengths.upper)
    # If an update is tiny compared with its mass, the product's rounding error (proportional to the mass) would
    # exceed the margin; the third term limits it.
    scaled = torch.minimum(scaled, _CANCELLATION * bound.longest * weights / lengths.mass)
    scaled = torch.where(weights > 0, scaled, 0)
    return torch.where(finite, torch.where(lengths.upper > 0, scaled, 0), 0)


def counts(bound: Bound, weights: Float64[Tensor, "m"], dimension: int) -> Bool[Tensor, "m"]:
    """Return which contributions may add anything, by their weights; the others stay out of the product.

    A weight below the margin has the factor 0. Its rows of zeros would still shift the blocks of the product, and no
    margin pays for the rounding of that shift.
    """
    if not bound.bounded:
        return weights > 0
    return weights * bound.effective_norm > _margin(bound, dimension)


def _margin(bound: Bound, dimension: int) -> float:
    """Return the margin (sqrt(d) + 1) g of one contribution."""
    # Rounding two totals to the grid moves each coordinate by at most g / 2 twice: sqrt(d) g in l2 norm. The other g
    # covers the rounding of the product, up to MOST_WEIGHT.
    return (math.sqrt(dimension) + 1) * bound.grid * bound.unit


def round_to_grid(bound: Bound, total: Float64[Tensor, "d"], weight: float) -> Float64[Tensor, "d"]:
    """Round one silo's total to the nearest multiple of the grid, in the unit of a message.

    Without a clip, the total is returned unchanged.

    Args:
        bound: the bound of the contributions.
        total: (d,) the silo's matrix product.
        weight: sum of the weights of its contributions.

    Raises:
        PrivacyError: weights beyond the proof. The number of users bounds the weights, and
            :func:`~fedveil.training.trainer_choice.choose_trainer` checks this before a run.
    """
    if not bound.bounded:
        return total
    if weight > MOST_WEIGHT:
        raise PrivacyError(
            'a silo has more weight than the Gram trainer can bound; take trainer.name = "vmap"'
        )
    return (total / (bound.grid * bound.unit)).round_() * bound.grid
