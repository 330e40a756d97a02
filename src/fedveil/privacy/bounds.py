"""Bound the contribution of one unit to a sum, with guarantees that hold in floating point.

A contribution is a row Delta_i of a float32 matrix, with a weight w_i in [0, 1]. Under :class:`Clip` the stored
contribution is a vector of whole numbers

    y_i = trunc(w_i · min(1, C' / ||Delta_i||) · Delta_i / g),  C' = C (1 - 2^-20),  g = 2^(ceil log2 C - 18),

and g · y_i enters the sum. Three facts follow, for every float32 input:

* ``||g · y_i||_2 <= w_i · C``. Truncation moves every coordinate towards zero, so it cannot lengthen a
  vector, for any dimension and any number of silos. The slack of 2^-20 outweighs the rounding of the
  norm and of the products. A user whose weights over all silos sum to at most 1 changes the sum by at most C.
* Sums are exact. A coordinate of y_i is a whole number of size at most 2^18 · w_i. So 64 rows (or any rows
  whose weights sum to 64) add up exactly in float32, and 2^35 rows in float64. The sum does not depend on
  order, chunks, threads or processes. Removing a user changes the sum by exactly that user's contribution.
* NaN and infinity do not spread. A row with a non-finite coordinate becomes the zero contribution.

The grid is a power of two, so ``g · y`` is exact as well. The proof is in docs/theory/clipping.md.
:class:`ClipL1` keeps the same three facts for the l1 norm, on a grid of C · 2^-22: an l1 bound leaves each coordinate
about C / d, which a coarser grid would truncate to zero. Rows of :class:`ClipL1` add up exactly in float64 alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, get_args

import torch
from jaxtyping import Bool, Float32, Float64
from torch import Tensor

from fedveil.config_keys import is_number, make_plain
from fedveil.errors import CompositionError, PrivacyError
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.row_norms import (
    EXACT_FLOAT32_ROWS,
    UNITS_BITS,
    ScalingBound,
    SteadyBound,
    check_weights,
    contribution_norms,
    drop_nonfinite_,
    l1_norms,
    truncate_,
)

_L1_UNITS_BITS: Final = 22
_FIXED_SLACK: Final = 2.0**-30
_FIXED_DIMENSION: Final = 2**20
_SMALLEST_NORM, _LARGEST_NORM = 2.0**-100, 2.0**100


@dataclass(frozen=True, kw_only=True)
class _NormClip(ScalingBound):
    """Base of clips to a constant norm; :class:`Clip` documents the guarantee and the edge cases.

    Attributes:
        norm: C, same unit as the updates.
        bounded: whether the bound is finite.
        order: p of the bounded norm l_p.
        exact_rows: number of contributions of weight at most 1 whose sum is exact in float32, in grid units.
        units_bits: C is at most 2^units_bits steps of the grid.
    """

    norm: float

    bounded: ClassVar[bool] = True
    order: ClassVar[int]
    exact_rows: ClassVar[int]
    units_bits: ClassVar[int]

    def __post_init__(self) -> None:
        """Refuse a norm that is not positive and finite, or outside the range of float32 updates."""
        make_plain(self)
        if not (is_number(self.norm) and math.isfinite(self.norm) and self.norm > 0.0):
            raise PrivacyError(
                f"clip norm is {self.norm}; it must be a positive finite number (to clip "
                "nothing, use no bound: the statement then says that there is no guarantee)"
            )
        if not _SMALLEST_NORM <= self.norm <= _LARGEST_NORM:
            raise PrivacyError(f"clip norm is {self.norm}; float32 updates need one between 2^-100 and 2^100")

    @property
    def grid(self) -> float:
        """Spacing g of the grid: the power of two with 2^17 < C / g <= 2^18 (l1: 2^21 and 2^22)."""
        mantissa, exponent = math.frexp(self.norm)
        # frexp gives norm = mantissa 2^exponent with mantissa in [1/2, 1), so ceil log2 C is `exponent`, or one less
        # if C is itself a power of two (mantissa 1/2).
        return math.ldexp(1.0, exponent - (1 if mantissa == 0.5 else 0) - self.units_bits)

    @property
    def longest(self) -> float:
        """C, in the unit of the updates."""
        return self.norm

    @property
    def largest(self) -> float:
        """C, which is constant over the rounds."""
        return self.norm


@dataclass(frozen=True, kw_only=True)
class Clip(_NormClip):
    """Clipping to l2 norm C: longer contributions are scaled down to C, and all are stored on a grid.

    Guarantee: for every float32 row and every weight w in [0, 1], the contribution g · y of :meth:`quantize_`
    satisfies ``||g · y||_2 <= w · C`` as real numbers. Abadi et al. 2016, Algorithm 1, clips in exact
    arithmetic; the grid makes the bound and the sum hold in floating point.

    ====================  ==================================================================================
    input                 result
    ====================  ==================================================================================
    norm <= C'            scaled by w alone
    NaN or infinite row   zero contribution; its norm is reported as NaN, so it can be counted
    zero row, d = 0       zero contribution
    coordinate below g/w  zero coordinate (at most g is lost per coordinate: C · 2^-18 to C · 2^-17)
    C = 0                 refused: the sum would be zero; leave the contribution out instead
    C negative, NaN, inf  refused; ``Unbounded()`` is the bound that clips nothing
    C outside 2^±100      refused: the grid would leave float32's range
    weight outside [0,1]  refused
    ====================  ==================================================================================

    Args:
        norm: the bound C > 0, same unit as the updates.

    Raises:
        PrivacyError: a norm outside the domain above.

    >>> clip = Clip(norm=1.0)
    >>> rows = torch.tensor([[3.0, 4.0], [0.25, 0.0]])
    >>> units = clip.quantize_(rows, contribution_norms(rows), torch.ones(2, dtype=torch.float64))
    >>> (units * clip.grid).tolist()
    [[0.5999984741210938, 0.7999992370605469], [0.25, 0.0]]
    """

    order: ClassVar[int] = 2
    exact_rows: ClassVar[int] = EXACT_FLOAT32_ROWS
    units_bits: ClassVar[int] = UNITS_BITS

    def norms(self, deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """Return the l2 norm of every row, as :func:`contribution_norms` does."""
        return contribution_norms(deltas)


@dataclass(frozen=True, kw_only=True)
class ClipL1(_NormClip):
    """Clipping to l1 norm C: longer contributions are scaled down to C, and all are stored on a grid.

    Guarantee: for every float32 row and every weight w in [0, 1], the contribution g · y of :meth:`quantize_`
    satisfies ``||g · y||_1 <= w · C`` as real numbers, as Laplace noise on every coordinate requires. Its l2 norm is
    then at most w · C as well. Edge cases are those of :class:`Clip`.

    Args:
        norm: the bound C > 0, same unit as the updates.

    Raises:
        PrivacyError: a norm outside the domain of :class:`Clip`.

    >>> clip = ClipL1(norm=1.0)
    >>> rows = torch.tensor([[3.0, -1.0], [0.25, 0.0]])
    >>> units = clip.quantize_(rows, clip.norms(rows), torch.ones(2, dtype=torch.float64))
    >>> [[round(value, 6) for value in row] for row in (units.double() * clip.grid).tolist()]
    [[0.749999, -0.25], [0.25, 0.0]]
    """

    order: ClassVar[int] = 1
    exact_rows: ClassVar[int] = 1
    units_bits: ClassVar[int] = _L1_UNITS_BITS

    def norms(self, deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """Return the l1 norm of every row, as :func:`l1_norms` does."""
        return l1_norms(deltas)


@dataclass(frozen=True, kw_only=True)
class FixedVector(_NormClip):
    """Bound of a statistic whose vector has norm at most C by construction, on the grid of the noise.

    A histogram adds up to a million contributions of size 1. Truncation on the grid of :class:`Clip` would take 2^-18
    of each contribution: a total of more people than the noise hides. This bound uses the step of the messages
    instead (std / grid >= 2^29), and rows are float64. Truncation then takes less than one person in 2^29.

    Guarantee: for every float64 row and every weight w in [0, 1], ``||g · y||_2 <= w · C`` as real numbers.
    Truncation cannot lengthen a row, and the slack of 2^-30 outweighs the rounding of norm and products for at most
    2^20 coordinates. Edge cases are those of :class:`Clip`.

    Args:
        norm: the bound C > 0 of one person's vectors.
        step: the grid g, a power of two.

    Raises:
        PrivacyError: a norm outside the domain of :class:`Clip`, or a step that is no power of two.

    >>> bound = FixedVector(norm=1.0, step=2.0**-29)
    >>> rows = torch.tensor([[0.6, 0.8], [0.5, 0.0]], dtype=torch.float64)
    >>> units = bound.quantize_(rows, bound.norms(rows), torch.ones(2, dtype=torch.float64))
    >>> [[round(value, 6) for value in row] for row in (units * bound.grid).tolist()]
    [[0.6, 0.8], [0.5, 0.0]]
    """

    order: ClassVar[int] = 2
    exact_rows: ClassVar[int] = 1
    step: float

    def __post_init__(self) -> None:
        """Refuse a norm that :class:`Clip` refuses, and a step that is no power of two."""
        super().__post_init__()
        if not (is_number(self.step) and self.step > 0 and math.frexp(self.step)[0] == 0.5):
            raise PrivacyError(f"the grid of a statistic is {self.step}; it must be a power of two")

    @property
    def grid(self) -> float:
        """Step g of the messages."""
        return self.step

    @property
    def effective_norm(self) -> float:
        """Norm to which rows are scaled: C (1 - 2^-30)."""
        return self.norm * (1.0 - _FIXED_SLACK)

    def norms(self, deltas: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """Return the l2 norm of every row, NaN if the row holds a NaN or an infinity.

        Raises:
            PrivacyError: a row has more than 2^20 coordinates, the largest dimension of the proof.
        """
        if deltas.shape[1] > _FIXED_DIMENSION:
            raise PrivacyError(
                f"a statistic has {deltas.shape[1]} numbers; its bound is proved for at most 2^20: ask for fewer bins, "
                "groups or columns"
            )
        norms = torch.linalg.vector_norm(deltas, dim=1)
        return torch.where(torch.isfinite(norms), norms, torch.nan)

    def quantize_(
        self, deltas: Float64[Tensor, "m d"], norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float64[Tensor, "m d"]:
        """Replace every row in place by its weighted contribution in units of :attr:`grid`.

        Args:
            deltas: (m, d) float64 vectors; overwritten.
            norms: (m,) result of :meth:`norms` for the same rows.
            weights: (m,) weights in [0, 1]; the weights of one person must sum to at most 1 over all silos.

        Returns:
            ``deltas``, now whole numbers in float64.

        Raises:
            PrivacyError: a weight outside [0, 1].
        """
        check_weights(weights)
        drop_nonfinite_(deltas, norms)
        scale = weights * self.coefficients(norms) / self.grid
        return truncate_(deltas.mul_(scale[:, None]))


@dataclass(frozen=True, kw_only=True)
class Unbounded(SteadyBound):
    """No bound: contributions keep their length, and the release has no guarantee (plain FedAVG).

    Non-finite rows still become zero contributions. Nothing is rounded to a grid (:attr:`grid` is 1), so sums depend
    on their order as floating-point sums do.
    """

    bounded: ClassVar[bool] = False
    norm: ClassVar[float] = math.inf
    longest: ClassVar[float] = math.inf
    largest: ClassVar[float] = math.inf
    effective_norm: ClassVar[float] = math.inf
    order: ClassVar[int] = 2
    exact_rows: ClassVar[int] = EXACT_FLOAT32_ROWS
    grid: ClassVar[float] = 1.0

    def norms(self, deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """Return the l2 norm of every row, as :func:`contribution_norms` does."""
        return contribution_norms(deltas)

    def coefficients(self, norms: Float64[Tensor, " m"]) -> Float64[Tensor, " m"]:
        """Return 1 for every contribution, 0 if its norm is not finite."""
        return torch.isfinite(norms).double()

    def is_clipped(self, norms: Float64[Tensor, " m"]) -> Bool[Tensor, " m"]:
        """Return False for every contribution."""
        return torch.zeros_like(norms, dtype=torch.bool)

    def quantize_(
        self, deltas: Float32[Tensor, "m d"], norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float32[Tensor, "m d"]:
        """Multiply every row by its weight in place; a non-finite row becomes zero."""
        check_weights(weights)
        drop_nonfinite_(deltas, norms)
        return deltas.mul_(weights.float()[:, None])


Bound = Clip | ClipL1 | FixedVector | AdaptiveClip | Unbounded


def check_enforced(bound: Any) -> None:
    """Check that the training kernels enforce this class of bound.

    The kernels read the fields of a bound, and some of them never call its methods. A subclass that overrides a
    method would be ignored, so the exact class counts.

    Raises:
        CompositionError: a class outside :data:`Bound`, subclasses included.
    """
    # `type`, not `isinstance`: the kernels would ignore a method that a subclass overrides.
    if type(bound) not in get_args(Bound):
        supported = ", ".join(kind.__name__ for kind in get_args(Bound))
        raise CompositionError(
            f"{type(bound).__name__}, given as bound: kernels enforce {supported} from their fields, and would ignore "
            "what another class defines; take one of these"
        )


def bound_of(clip: float | AdaptiveClip) -> Clip | AdaptiveClip:
    """Return the l2 bound for a method's key ``clip``: a number gives :class:`Clip`."""
    return clip if isinstance(clip, AdaptiveClip) else Clip(norm=clip)
