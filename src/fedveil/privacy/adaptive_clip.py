"""Adapt the clip norm to a quantile of the update norms, within the private release of the updates.

Notation: C_t is the clip norm of round t, gamma the quantile, kappa the share, and m = max(gamma, 1 - gamma).
Contribution i with weight w_i adds these d + 1 numbers to the sum:

    w_i ( clip(Delta_i, C_t) / C_t,  kappa a_i ),   a_i = 1 - gamma   if 0 < ||Delta_i|| <= C_t,
                                                          -gamma      if it is longer, or not finite,
                                                          0           if it is zero

The l2 norm of these numbers is at most w_i sqrt(1 + kappa^2 m^2). The standard deviation of every coordinate's noise
is a multiple z of that bound. A round is therefore one Gaussian release of noise multiplier z, of updates and marks
together, for every C_t. With v the released last coordinate,

    C_{t+1} = C_t exp(-h_t v / (kappa q |U|)),   h_t = 0.2 + 1.3 x 0.7^(t-1).

C_t is a function of released values (post-processing), so it costs no further privacy (Andrew, Thakkar, McMahan and
Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021; here the marks have their mean
at 0). Messages are in units of C_t: grid, noise and range are the same in every round, and the server multiplies the
sum by C_t afterwards. Claim and proof: docs/theory/adaptive-clipping.md.
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
    """Clipping to a norm C_t that follows a quantile of the update norms.

    Contributions are stored in units of C_t.

    Guarantee: for every float32 row, every weight w in [0, 1] and every C_t, the stored contribution (update and mark
    together) has l2 norm at most w :attr:`norm` as real numbers. Edge cases of an update are those of
    :class:`~fedveil.privacy.bounds.Clip`: a row with a NaN or an infinity is the zero update; its mark says "longer".

    Args:
        start: C_1, in the unit of the updates. A low start costs little, a high start costs noise.
        quantile: gamma, the target share of the weight of non-zero updates with norm at most C_t.
        share: kappa, the largest mark relative to an update of norm 1; the noise grows by sqrt(1 + kappa^2 m^2).
        least: lower limit of C_t.
        most: upper limit of C_t.

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

    # --- privacy claim ----------------------------------------------------------------------------------------

    @property
    def norm(self) -> float:
        """Sensitivity of a message, update and mark together: sqrt(1 + kappa^2 m^2) at weight 1."""
        return math.sqrt(1.0 + (self.share * max(self.quantile, 1.0 - self.quantile)) ** 2)

    @property
    def largest(self) -> float:
        """Largest value that C_t can reach, in the unit of the updates."""
        return max(self.start, self.most)

    def refuses(self, method: Any) -> Iterable[str]:
        """Return the reasons why a method cannot use adaptive clipping.

        Adaptive clipping needs one contribution per (silo, user) pair, constant noise, an undivided update, and a
        limit ``most`` if the method sends single gradients.
        """
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

    # --- evolution of C_t -------------------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """C_t, in the unit of the updates."""
        return self.start

    def init(self) -> Mapping[str, Tensor]:
        """Return the state before round 1: C_1 and a count of 0 rounds."""
        return {
            "norm": torch.tensor([self.start], dtype=torch.float64),
            "round": torch.zeros(1, dtype=torch.int64),
        }

    def measured_in(self, unit: float) -> AdaptiveClip:
        """Return the bound of the round whose clip norm C_t is ``unit``."""
        return replace(self, start=unit)

    def possible(self, unit: float, number: int) -> bool:
        """Return whether round ``number`` may have the clip norm C_t = ``unit``.

        Round 1 has C_1; C_t of later rounds lies between ``least`` and ``most``.
        """
        return unit == self.start if number == 1 else self.least <= unit <= self.most

    def at_state(self, state: Mapping[str, Tensor]) -> AdaptiveClip:
        """Return the bound of the next round, with the C_t of the state."""
        return self.measured_in(float(state["norm"])) if state else self

    def next_state(
        self, marks: Float64[Tensor, " extra"], users: float, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the state after a round: C_{t+1} and the number of rounds.

        C_{t+1} = C_t exp(-h_t v / (kappa q |U|)), limited to [``least``, ``most``].

        Args:
            marks: (1,) v, the released noisy sum of the marks.
            users: q |U|, the expected number of participants.
            state: the state before the round.
        """
        number = int(state["round"]) + 1
        # h_t: long steps while C_1 may be far from the quantile, short steps once the noise dominates.
        speed = 0.2 + 1.3 * 0.7 ** (number - 1)
        step = -speed * float(marks[0]) / (self.share * users)
        moved = float(state["norm"]) * math.exp(max(-_LARGEST_STEP, min(_LARGEST_STEP, step)))
        return {
            "norm": torch.tensor([min(max(moved, self.least), self.most)], dtype=torch.float64),
            "round": torch.tensor([number], dtype=torch.int64),
        }

    # --- stored contributions ----------------------------------------------------------------------------------

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
        """Return w kappa a of every contribution, rounded towards zero to a multiple of the grid.

        Args:
            norms: (m,) l2 norms, NaN for a row that is not finite.
            weights: (m,) weights in [0, 1].

        Returns:
            (m, 1) marks, in units of a message.
        """
        # A NaN norm compares as false and so gets the mark "longer". Truncation towards zero cannot lengthen a mark.
        mark = torch.where(norms <= self.unit, 1.0 - self.quantile, -self.quantile)
        mark = torch.where(norms == 0, 0.0, mark)
        return (torch.trunc(weights * self.share * mark / self.grid) * self.grid)[:, None]


_LARGEST_STEP: Final = 20.0
"""Largest change of ln C_t in a round; a larger step comes from noise, not from the quantile."""
