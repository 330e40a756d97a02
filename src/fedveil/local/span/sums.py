"""How span training bounds and sums updates that it never forms.

An update is Delta = A^T X + (c - 1) W0 with coefficients A (n, k) and records X (n, p + 1). Its norm
follows from the Gram matrix, and the sum over all contributions of a silo is one matrix product. The bound
holds in the arithmetic that is used; the proof of every constant here is in docs/theory/span-training.md.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from fedveil.errors import PrivacyError
from fedveil.local.span.features import ADDITIONS, BLOCK_ROWS
from fedveil.privacy.bounds import Bound

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
            :func:`~fedveil.local.choice.choose_trainer` asks that before a run.
    """
    if not bound.bounded:
        return total
    if weight > MOST_WEIGHT:
        raise PrivacyError(
            'a silo has more weight than the span trainer can bound; take trainer.name = "vmap"'
        )
    return (total / (bound.grid * bound.unit)).round_() * bound.grid
