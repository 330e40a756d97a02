"""How span training bounds and sums updates that it never forms.

An update is Delta = A^T X + (c - 1) W0 with coefficients A (n, k) and records X (n, p + 1). Its norm
follows from the Gram matrix, and the sum over all contributions of a silo is one matrix product. The bound
holds in the arithmetic that is used; the proof of every constant here is in docs/theory/span-training.md.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.errors import PrivacyError
from fedveil.local.span.features import BLOCK_ROWS
from fedveil.privacy.bounds import Bound

_UNIT: Final = 2.0**-52
_CANCELLATION: Final = 64.0
_LARGEST_LOAD: Final = 2.0**28


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
    margin = (math.sqrt(dimension) + 1) * bound.grid * bound.unit
    allowed = (weights * bound.effective_norm - margin).clamp(min=0)
    scaled = torch.minimum(weights, allowed / lengths.upper)
    scaled = torch.minimum(scaled, _CANCELLATION * bound.longest * weights / lengths.mass)
    scaled = torch.where(weights > 0, scaled, 0)
    return torch.where(finite, torch.where(lengths.upper > 0, scaled, 0), 0)


def round_to_grid(
    bound: Bound, total: Float64[Tensor, "d"], weight: float, records: int
) -> Float64[Tensor, "d"]:
    """Round one silo's total to the nearest multiple of the grid, in the unit of a message; nothing without a clip.

    Args:
        bound: the bound of the contributions.
        total: the silo's matrix product.
        weight: sum of the weights of its contributions.
        records: how many records the product ran over.

    Raises:
        PrivacyError: so many contributions that the product's own rounding could exceed the margin.
    """
    if not bound.bounded:
        return total
    if weight * (BLOCK_ROWS + records / BLOCK_ROWS + 8) > _LARGEST_LOAD:
        raise PrivacyError(
            'a silo has more records or weight than the span trainer can bound; take trainer.name = "vmap"'
        )
    return (total / (bound.grid * bound.unit)).round_() * bound.grid
