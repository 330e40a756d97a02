"""Prediction of the errors of a release from public numbers, and refusal of a hopeless one, before a record is read.

Predictions take all n_users people to have one record each, spread evenly over cells; numbers have a standard deviation
of a third of half their declared range, so that the bounds are three away. What is true of the noise is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block, Layout, LayoutSlot
from fedveil.statistics.compose import COMPLETE, FIRSTS, SECONDS
from fedveil.statistics.intervals import NORMAL_95
from fedveil.statistics.request import Request

_SPREAD: Final = 1 / 3
MOST_CORRELATION_ERROR: Final = 0.15
_ALLOWED_SHARE: Final = 0.25
_QUARTERS: Final = 4
"""Cells that sums of leading cells are compared with: a quantile's error matters beside a quarter of all people."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Predicted errors of one block.

    Attributes:
        release, part: which.
        cells: how many cells people spread over, all groups together.
        numbers: how many numbers are sent.
        share: of the squared norm.
        noise: standard deviation of the noise on a cell, in people; on a sum of leading cells where these are coded;
            of a correlation.
        error: predicted half width of the 95 % interval for the population.
        allowed: the largest noise that is not refused.
    """

    release: str
    part: str
    cells: int
    numbers: int
    share: float
    noise: float
    error: float
    allowed: float


def predict_errors(
    request: Request, layout: Layout, *, n_users: int, noise_std: float, unit: float
) -> tuple[Planned, ...]:
    """Return what is predicted of every block.

    Args:
        request: what is asked for.
        layout: its vector.
        n_users: |U|, public.
        noise_std: standard deviation of the noise on every number sent.
        unit: what a person weighs in a sum at most.
    """
    return tuple(_planned(request, slot, n_users, noise_std / (slot.scale * unit)) for slot in layout.slots)


def check(found: tuple[Planned, ...], noise_multiplier: float, epsilon: Callable[[float], float]) -> None:
    """Refuse blocks whose noise hides what they are to show, before anything is charged.

    Args:
        found: what is predicted.
        noise_multiplier: of the release.
        epsilon: what a release with another multiplier would cost.

    Raises:
        ConfigError: names every such block, and what would do.
    """
    wrong = list(_refusals(found, noise_multiplier, epsilon))
    if wrong:
        raise ConfigError("; ".join(wrong))


def _refusals(
    found: tuple[Planned, ...], noise_multiplier: float, epsilon: Callable[[float], float]
) -> Iterator[str]:
    for one in found:
        if one.noise > one.allowed:
            factor = one.noise / one.allowed
            needed, fewer = epsilon(noise_multiplier / factor), math.floor(one.cells / factor)
            cells = f"about {fewer} cells, " if fewer > 1 else ""
            yield (
                f"statistics.release.{one.release}: epsilon is too small for its {one.cells} cells: the noise would "
                f"have a standard deviation of {one.noise:.3g}, and {one.allowed:.3g} is allowed (max_standard_error); "
                f"epsilon = {needed:.2g}, {cells}fewer groups or releases, or a larger weight would do"
            )


def _planned(request: Request, slot: LayoutSlot, n_users: int, unit_noise: float) -> Planned:
    block = slot.block
    groups, coded = block.groups.n_expected_cells, block.strategy.kind == "prefix"
    cells = _QUARTERS if coded else block.encoder.n_expected_cells
    noise = unit_noise * (block.strategy.leading_noise if coded else block.strategy.cell_noise)
    total, people = groups * cells, n_users / (groups * cells)
    allowed = request.max_standard_error or _ALLOWED_SHARE * people
    error = NORMAL_95 * math.sqrt(noise**2 + people * (1 - 1 / total))
    if block.part in (COMPLETE, FIRSTS, SECONDS):
        noise, error, allowed = _correlation(block, noise, n_users / groups)
    return Planned(
        release=block.release,
        part=block.part,
        cells=total,
        numbers=block.length,
        share=slot.share,
        noise=noise,
        error=error,
        allowed=allowed,
    )


def _correlation(block: Block, noise: float, people: float) -> tuple[float, float, float]:
    """Return noise, error and what is allowed of a correlation of 0 between numbers that the noise is on."""
    scaled = noise / people / _SPREAD**2 if block.part == SECONDS else 0.0
    return scaled, NORMAL_95 * math.sqrt(scaled**2 + 1 / people), MOST_CORRELATION_ERROR
