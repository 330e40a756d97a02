"""The passes of span training over the features: logits, Gram matrices and the weighted sum of records.

Everything else that :mod:`fedveil.training.gram.trainer` does is independent of the number of features. Rows are
visited in the order of the contributions, a block at a time, and become float32 as every trainer reads
them, so memory is O(block x features) whatever the number of records.
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
_RUN: Final = 16
_RUN_ROWS: Final = _RUN * BLOCK_ROWS
ADDITIONS: Final = _RUN + 40
"""On the way from a block to the total: 2^40 runs of blocks are more than any silo has."""

_GRAM_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 16 << 20
_COLUMNS: Final = 8


class Gram(NamedTuple):
    """Gram matrices of some rows of a layout, each of the first n records of its row; a lone one stands there twice."""

    rows: Int64[Tensor, "g"]
    products: Float64[Tensor, "g n n"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The records of the contributions that take part, in the order of the contributions.

    Args:
        cohort: the table.
        index: (r,) the row of the table that each record is.
        bias: whether every record has one more feature that is always 1.
    """

    cohort: Cohort
    index: Int64[np.ndarray, "r"]
    bias: bool

    @cached_property
    def _features(self) -> Float32[Tensor, "r p"] | None:
        """All features, flattened, where they are few: three passes read them, and every round of a plan."""
        if 4 * len(self.index) * self.cohort.features[0].numel() > _KEPT_BYTES:
            return None
        return self.cohort.features_of(torch.from_numpy(self.index)).flatten(1)

    def read(self, records: Int64[Tensor, "*batch"]) -> Float32[Tensor, "*batch p"]:
        """Return the features of some records, flattened, without the constant one; of padding, those of any."""
        numbers = records.flatten().clamp(max=len(self.index) - 1)
        if self._features is not None:
            found = self._features.index_select(0, numbers.to(self._features.device))
        else:
            found = self.cohort.features_of(torch.from_numpy(self.index)[numbers]).flatten(1)
        return found.view(*records.shape, -1)

    def _row(self, first: int, last: int) -> Float32[Tensor, "b p"]:
        """Return the features of records ``first .. last``: a view where all are kept."""
        if self._features is not None:
            return self._features[first:last]
        return self.cohort.features_of(torch.from_numpy(self.index[first:last])).flatten(1)

    def _among(self, chosen: Int64[np.ndarray, "b"]) -> Float32[Tensor, "b p"]:
        """Return the features of some records, in ascending order."""
        first, last = int(chosen[0]), int(chosen[-1]) + 1
        in_a_row = last - first == len(chosen)
        return self._row(first, last) if in_a_row else self.read(torch.from_numpy(chosen))

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the blocks of ``first .. last``."""
        for start in range(first, last, BLOCK_ROWS):
            yield start, min(start + BLOCK_ROWS, last)

    def logits(
        self, weight: Float[Tensor, "k p"], bias: Float[Tensor, "k"] | None
    ) -> Float[Tensor, "r_plus_1 k"]:
        """Return the outputs of one linear model for every record, and a last row of zeros that pads."""
        outputs = weight.new_zeros(len(self.index) + 1, len(weight))
        padded = weight.new_zeros(BLOCK_ROWS, weight.shape[1])
        for first, last in self.blocks(0, len(self.index)):
            block = self._row(first, last)
            if len(block) < BLOCK_ROWS or block.dtype != padded.dtype:
                padded[: len(block)] = block
                block = padded  # always the same product, whoever is there
            outputs[first:last] = torch.mm(block, weight.T)[: last - first]
        if bias is not None:
            outputs[:-1] += bias
        return outputs

    def grams(
        self, records: Int64[Tensor, "rows width"], owner: Int64[Tensor, "r_plus_1"], alone: bool
    ) -> Iterator[Gram]:
        """Yield the inner products of records in one row and one contribution, else 0.

        Args:
            records: numbers of records, ``len(index)`` for none.
            owner: the contribution of each record, -1 for none.
            alone: whether a row holds one contribution: then so many of its columns are read as follow from its own
                number of records, and rows without any are left out.
        """
        held = (records < len(self.index)).sum(1)
        columns = -(-held // _COLUMNS) * _COLUMNS if alone else torch.full_like(held, records.shape[1])
        for taken in sorted(set(columns.tolist()) - {0}):
            rows = (columns == taken).nonzero().flatten()
            rows = rows if len(rows) > 1 else rows.expand(2)  # one alone has another kernel
            read = records[rows, :taken]
            shape, device = (len(rows), taken, taken), self.cohort.features.device
            products = torch.empty(shape, dtype=torch.float64, device=device)
            at_once = max(2, _GRAM_BYTES // (8 * taken * self.cohort.features[0].numel()))
            for first in range(0, len(rows), at_once):
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
        """Return coefficients^T X over some records in float64, weight then bias.

        Blocks are added up sixteen at a time, these sums in pairs, the pairs in pairs, and so on: the error of entry
        (c, j) is at most (BLOCK_ROWS + ADDITIONS) 2^-53 sum_r |coefficients_rc| |x_rj|, however many records there are.
        ``drop_nonfinite`` reads features that are not finite as 0 (they belong to dropped contributions).
        """
        factors = coefficients[torch.from_numpy(chosen)]
        outputs, width = factors.shape[1], self.cohort.features[0].numel()
        buffer = factors.new_empty(BLOCK_ROWS, width)

        def total(first: int, last: int) -> Float64[Tensor, "d"]:
            if last - first > _RUN_ROWS:
                middle = first + -(-(last - first) // (2 * _RUN_ROWS)) * _RUN_ROWS
                return total(first, middle).add_(total(middle, last))
            weight, bias = factors.new_zeros(outputs, width), factors.new_zeros(outputs)
            for start, end in self.blocks(first, last):
                features = buffer[: end - start].copy_(self._among(chosen[start:end]))
                if drop_nonfinite:
                    features.nan_to_num_(0.0, 0.0, 0.0)
                weight.addmm_(factors[start:end].T, features)
                bias += factors[start:end].sum(0)
            return torch.cat([weight.flatten(), bias]) if self.bias else weight.flatten()

        return total(0, len(chosen))


# --- sums ----------------------------------------------------------------------------------------------------------
# How span training bounds and sums updates that it never forms.
#
# An update is Delta = A^T X + (c - 1) W0 with coefficients A (n, k) and records X (n, p + 1). Its norm
# follows from the Gram matrix, and the sum over all contributions of a silo is one matrix product. The bound
# holds in the arithmetic that is used; the proof of every constant here is in docs/theory/span-training.md.

_UNIT: Final = 2.0**-52
_CANCELLATION: Final = 64.0
MOST_WEIGHT: Final = 2**28 // (BLOCK_ROWS + ADDITIONS + 8)
"""Sum of the weights in a silo up to which the rounding of its product stays within the margin; 838,860."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """What is known of each update's length.

    Args:
        square: the computed ||Delta||^2, NaN where the update is not finite.
        mass: sum_r ||a_r|| ||x_r|| + |c - 1| ||W0||, what the length would be if nothing cancelled.
        terms: how many products the computed square adds up, at most.
    """

    square: Float64[Tensor, "m"]
    mass: Float64[Tensor, "m"]
    terms: Float64[Tensor, "m"]

    @property
    def norms(self) -> Float64[Tensor, "m"]:
        """Return the computed ||Delta||, NaN where it is not finite."""
        norms = self.square.clamp(min=0).sqrt()
        return torch.where(torch.isfinite(norms) & torch.isfinite(self.mass), norms, torch.nan)

    @property
    def upper(self) -> Float64[Tensor, "m"]:
        """Return a bound that ||Delta|| never exceeds: sqrt(square + terms 2^-52 mass^2)."""
        square = self.square.clamp(min=0) + self.terms * _UNIT * self.mass.square()
        return torch.where(self.norms.isnan(), torch.nan, square.sqrt())


def coefficients(
    bound: Bound, lengths: Lengths, weights: Float64[Tensor, "m"], dimension: int
) -> Float64[Tensor, "m"]:
    """Return by what each update is multiplied in the sum: its weight, and less where the bound wants it.

    Under a :class:`~fedveil.privacy.bounds.Clip` with bound C and grid g,

        min(w, (w C' - (sqrt(d) + 1) g) / upper, 64 w C / mass)

    The margin (sqrt(d) + 1) g pays for rounding the silo's total to the grid: with or without a contribution,
    the rounded totals differ by at most w C. Truncating each contribution by itself may lose as much.

    Returns:
        (m,) coefficients; 0 for updates that are not finite.

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
    scaled = torch.minimum(scaled, _CANCELLATION * bound.longest * weights / lengths.mass)
    scaled = torch.where(weights > 0, scaled, 0)
    return torch.where(finite, torch.where(lengths.upper > 0, scaled, 0), 0)


def counts(bound: Bound, weights: Float64[Tensor, "m"], dimension: int) -> Bool[Tensor, "m"]:
    """Return which contributions may add anything, by their own weights: the others take no part in the product.

    What is left of a weight below the margin is 0, and a row of zeros would still move the blocks of the product, whose
    rounding nobody's margin pays for.
    """
    if not bound.bounded:
        return weights > 0
    return weights * bound.effective_norm > _margin(bound, dimension)


def _margin(bound: Bound, dimension: int) -> float:
    """Return (sqrt(d) + 1) g."""
    return (math.sqrt(dimension) + 1) * bound.grid * bound.unit


def round_to_grid(bound: Bound, total: Float64[Tensor, "d"], weight: float) -> Float64[Tensor, "d"]:
    """Round one silo's total to the nearest multiple of the grid, in the unit of a message; nothing without a clip.

    Args:
        bound: the bound of the contributions.
        total: the silo's matrix product.
        weight: sum of the weights of its contributions.

    Raises:
        PrivacyError: weights beyond the proof. The number of users bounds them, and
            :func:`~fedveil.training.trainer_choice.choose_trainer` asks that before a run.
    """
    if not bound.bounded:
        return total
    if weight > MOST_WEIGHT:
        raise PrivacyError(
            'a silo has more weight than the span trainer can bound; take trainer.name = "vmap"'
        )
    return (total / (bound.grid * bound.unit)).round_() * bound.grid
