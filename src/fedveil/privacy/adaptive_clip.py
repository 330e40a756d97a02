"""A clip that moves to a quantile of the updates' lengths, in one private release with the updates themselves.

With C_t the clip of round t, gamma the quantile, kappa the share and m = max(gamma, 1 - gamma), contribution i with the
weight w_i adds the d + 1 numbers

    w_i ( clip(Delta_i, C_t) / C_t,  kappa a_i ),   a_i = 1 - gamma   if 0 < ||Delta_i|| <= C_t,
                                                          -gamma      if it is longer, or not finite,
                                                          0           if it is zero

to the sum, whose l2 norm is at most w_i sqrt(1 + kappa^2 m^2). The noise of every coordinate is a multiple z of that
norm, so a round is one Gaussian release of multiplier z, updates and marks together, whatever C_t is. With v the
released last coordinate,

    C_{t+1} = C_t exp(-h_t v / (kappa q |U|)),   h_t = 0.2 + 1.3 x 0.7^(t-1):

C_t is a function of what was released, and so costs nothing more (Andrew, Thakkar, McMahan and Ramaswamy,
"Differentially private learning with adaptive clipping", NeurIPS 2021, with marks centred at their mean). Messages are
in units of C_t: grid, noise and range are the same in every round, and the server multiplies by C_t afterwards.
docs/theory/adaptive-clipping.md has the claim and its proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import torch
from jaxtyping import Float32, Float64
from pydantic import ConfigDict, Field
from torch import Tensor

from fedveil.config_keys import check_ranges
from fedveil.privacy.row_norms import EXACT_FLOAT32_ROWS, UNITS_BITS, ScalingBound, contribution_norms
from fedveil.privacy.statement import show_at_most

_UNLIMITED: Final = 2.0**40
_Length = Annotated[float, Field(ge=2.0**-40, le=2.0**40)]


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(ScalingBound):
    """Scale a contribution down to C_t and divide it by C_t, where C_t follows a quantile of the lengths.

    Guarantee: for every float32 row, every weight w in [0, 1] and every C_t, what is stored of a contribution, update
    and mark together, has l2 norm at most w :attr:`norm` as real numbers. Edge cases of an update are those of
    :class:`~fedveil.privacy.bounds.Clip`: a row with a NaN or an infinity is the zero update; its mark says "longer".

    Args:
        start: C_1, in the unit of the updates; too low costs little, too high costs noise.
        quantile: gamma, the share of the weight of non-zero updates that shall be no longer than C_t.
        share: kappa, what the mark may move beside an update of length 1; the noise grows by sqrt(1 + kappa^2 m^2).
        least: C_t never falls below.
        most: C_t never rises above.

    Raises:
        CompositionError: a number outside its range.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    grid: ClassVar[float] = 2.0**-UNITS_BITS

    start: _Length = 0.1
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    least: _Length = 2.0**-40
    most: _Length = _UNLIMITED

    bounded: ClassVar[bool] = True
    order: ClassVar[int] = 2
    exact_rows: ClassVar[int] = EXACT_FLOAT32_ROWS
    extra: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Refuse a number outside its range."""
        check_ranges(self)

    # --- what it claims ----------------------------------------------------------------------------------------

    @property
    def norm(self) -> float:
        """sqrt(1 + kappa^2 m^2): how far a contribution of weight 1 moves a message, update and mark together."""
        return math.sqrt(1.0 + (self.share * max(self.quantile, 1.0 - self.quantile)) ** 2)

    @property
    def largest(self) -> float:
        """The longest that C_t can become."""
        return max(self.start, self.most)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse whatever has no pairs to count, another schedule of the noise, parts, or steps that grow with C_t."""
        if method.contribution.per != "pair":
            yield (
                "adaptive clipping moves C by one mark per (silo, user) pair, whose weights sum to at most 1 for a "
                f"user; contributions of this method are those of a {method.contribution.per}: give clip a number"
            )
        if method.noise_decay != 1:
            yield (
                "adaptive clipping measures the noise in a clip that moves, and noise that falls is a second schedule: "
                "take noise_decay = 1"
            )
        if method.protection.divides:
            yield (
                "the guarantee of adaptive clipping is of update and mark in one release under one noise, and partial "
                "encryption makes two of an update, each with noise of its own, or none: give clip a number"
            )
        if method.local.one_gradient and self.most >= _UNLIMITED:
            yield (
                "gradients grow with the steps that are taken, and a longer clip means longer steps, so C may run away "
                "under a method that sends gradients: give clip.most"
            )

    def mechanisms(self, moves: Any) -> tuple[str, ...]:
        return (
            "each update is clipped to norm C_t and sent in units of C_t, together with a mark that says whether it "
            f"was zero, at most C_t or longer (l2 norm of both together: at most {show_at_most(self.norm)}); C_t "
            f"starts at {self.start:g} and tracks the {self.quantile:g} quantile of the norms, using only the noisy "
            "sum of the marks: post-processing",
        )

    # --- the course of C_t -------------------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """C_t, in the unit of the updates."""
        return self.start

    def init(self) -> Mapping[str, Tensor]:
        """Return C_1, and that no round has been played."""
        return {
            "norm": torch.tensor([self.start], dtype=torch.float64),
            "round": torch.zeros(1, dtype=torch.int64),
        }

    def measured_in(self, unit: float) -> AdaptiveClip:
        """Return the bound of the round whose C_t this is."""
        return replace(self, start=unit)

    def possible(self, unit: float, number: int) -> bool:
        """Return whether the round of this number may have this C_t: C_1 is given, and later ones have limits."""
        return unit == self.start if number == 1 else self.least <= unit <= self.most

    def at_state(self, state: Mapping[str, Tensor]) -> AdaptiveClip:
        """Return the bound of the next round, which starts at C_t."""
        return self.measured_in(float(state["norm"])) if state else self

    def next_state(
        self, marks: Float64[Tensor, " extra"], users: float, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return C_{t+1} = C_t exp(-h_t v / (kappa q |U|)) within its limits, and the number of rounds."""
        number = int(state["round"]) + 1
        speed = 0.2 + 1.3 * 0.7 ** (number - 1)
        step = -speed * float(marks[0]) / (self.share * users)
        moved = float(state["norm"]) * math.exp(max(-_LARGEST_STEP, min(_LARGEST_STEP, step)))
        return {
            "norm": torch.tensor([min(max(moved, self.least), self.most)], dtype=torch.float64),
            "round": torch.tensor([number], dtype=torch.int64),
        }

    # --- what is stored ----------------------------------------------------------------------------------------

    @property
    def longest(self) -> float:
        """C_t, in the unit of the updates."""
        return self.unit

    def norms(self, deltas: Float32[Tensor, "m d"]) -> Float64[Tensor, " m"]:
        """Return the l2 norm of every row, in the unit of the updates."""
        return contribution_norms(deltas)

    def marks(
        self, norms: Float64[Tensor, " m"], weights: Float64[Tensor, " m"]
    ) -> Float64[Tensor, "m extra"]:
        """Return w kappa a of every contribution, rounded towards zero to a multiple of the grid."""
        mark = torch.where(norms <= self.unit, 1.0 - self.quantile, -self.quantile)
        mark = torch.where(norms == 0, 0.0, mark)
        return (torch.trunc(weights * self.share * mark / self.grid) * self.grid)[:, None]


_LARGEST_STEP: Final = 20.0
"""Of log C in a round: noise beyond that is no quantile."""
