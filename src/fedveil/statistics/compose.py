"""From what is asked for to the vector that is released: a layout of blocks, by the schema and public names alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from fedveil.data.columns import categories_of
from fedveil.data.schema import Number, Schema, Survival, refuse_late_entry
from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block, Encoder, Layout, LayoutSlot, OneHot, Powers
from fedveil.statistics.cells import (
    Bins,
    Categories,
    Events,
    Everybody,
    Exits,
    Partition,
    Product,
    Silos,
    States,
    declared_groups,
)
from fedveil.statistics.intervals import NORMAL_95
from fedveil.statistics.local_vectors import LocalStatistic
from fedveil.statistics.request import (
    ColumnRelease,
    CorrelationRelease,
    CrossRelease,
    Request,
    SurvivalRelease,
)
from fedveil.statistics.strategy import Kind

_BINS = 32
CELLS, MOMENTS, EXITS, EVENTS = "cells", "moments", "exits", "events"
COMPLETE, FIRSTS, SECONDS = "complete", "firsts", "seconds"


def compose(request: Request, schema: Schema, silos: tuple[str, ...]) -> LocalStatistic:
    """Return the local step of a request.

    Args:
        request: what is asked for.
        schema: what the columns are.
        silos: names of all silos.

    Raises:
        ConfigError: a column that cannot be shown so, with the key.
        DataError: a column that the schema does not declare.
    """
    composer = _Composer(request, schema, silos)
    step = LocalStatistic(layout=Layout(composer.blocks()), combine=request.combine, order=request.order)
    if request.order is not None and categories_of(schema, request.order, "statistics.order") is not None:
        raise ConfigError(f"statistics.order: '{request.order}' is no number")
    if request.combine == "any":
        for name in step.columns:
            if set(categories_of(schema, name) or ()) != {"0", "1"}:
                raise ConfigError(
                    f"statistics.combine: \"any\" is the larger of 0 and 1, and column '{name}' is not declared with "
                    "the categories 0 and 1"
                )
    return step


class _Composer:
    """Blocks of a request, release by release."""

    def __init__(self, request: Request, schema: Schema, silos: tuple[str, ...]) -> None:
        self._request, self._schema, self._silos = request, schema, silos

    def blocks(self) -> tuple[Block, ...]:
        """Return all blocks."""
        blocks: list[Block] = []
        for name, release in self._request.release.items():
            key = f"statistics.release.{name}"
            match release:
                case ColumnRelease():
                    blocks += self._column(name, release, key)
                case SurvivalRelease():
                    blocks += self._survival(name, release, key)
                case CrossRelease():
                    blocks.append(self._cross(name, release, key))
                case CorrelationRelease():
                    blocks += self._correlation(name, release, key)
        return tuple(blocks)

    def groups(self, excluded: tuple[str, ...] = ()) -> Partition:
        """Return the groups of a release, without the columns that it crosses itself."""
        parts = tuple(self._group(name) for name in self._request.by if name not in excluded)
        return Everybody() if not parts else parts[0] if len(parts) == 1 else Product(parts)

    def _group(self, name: str) -> Partition:
        return Silos(self._silos) if name == "silo" else declared_groups(self._schema, name, "statistics.by")

    def _column(self, name: str, release: ColumnRelease, key: str) -> Iterator[Block]:
        column, show = release.column or name, set(release.show)
        declared = categories_of(self._schema, column, key)
        cells: Partition = States(column)
        kind: Kind = "flat"
        if declared is not None:
            for wrong in ("histogram", "quantiles", "mean", "variance"):
                if wrong in show:
                    raise ConfigError(f"{key}.show: '{wrong}' is of numbers; '{column}' has categories")
            if "categories" in show:
                cells = Categories(column, declared)
        else:
            if "categories" in show:
                raise ConfigError(f"{key}.show: '{column}' is a number; ask for its histogram")
            if show & {"histogram", "quantiles"}:
                cells = Bins(column, self._edges(column, release, key))
                both = {"histogram", "quantiles"} <= show
                kind = "stacked" if both else "prefix" if "quantiles" in show else "flat"
        if declared is not None or show - {"mean", "variance"}:
            yield self._block(name, CELLS, OneHot(cells), release.weight, kind)
        if show & {"mean", "variance"}:
            powers = Powers(((column, *self._range(column, release, key)),), (0, 1, 2))
            yield self._block(name, MOMENTS, powers, release.weight)

    def _survival(self, name: str, release: SurvivalRelease, key: str) -> Iterator[Block]:
        target = self._schema.target
        if not isinstance(target, Survival):
            raise ConfigError(f"{key}: the schema's target is no survival time (target.kind = 'survival')")
        refuse_late_entry(self._schema, "a survival curve")
        exits = Exits(target.time, target.event, release.grid)
        yield self._block(name, EXITS, OneHot(exits), release.weight, "prefix")
        events = Events(target.time, target.event, release.grid)
        yield self._block(name, EVENTS, OneHot(events), release.weight)

    def _cross(self, name: str, release: CrossRelease, key: str) -> Block:
        parts = (declared_groups(self._schema, column, f"{key}.columns") for column in release.columns)
        cells = Product(tuple(parts))
        return self._block(name, CELLS, OneHot(cells), release.weight, excluded=release.columns)

    def _correlation(self, name: str, release: CorrelationRelease, key: str) -> Iterator[Block]:
        ranges = tuple((column, *self._range(column, None, f"{key}.columns")) for column in release.columns)
        for part, degree in ((COMPLETE, 0), (FIRSTS, 1), (SECONDS, 2)):
            yield self._block(name, part, Powers(ranges, (degree,)), release.weight)

    def _block(
        self,
        name: str,
        part: str,
        encoder: Encoder,
        weight: float,
        kind: Kind = "flat",
        excluded: tuple[str, ...] = (),
    ) -> Block:
        groups = self.groups(excluded)
        return Block(release=name, part=part, encoder=encoder, groups=groups, kind=kind, weight=weight)

    def _edges(self, column: str, release: ColumnRelease, key: str) -> tuple[float, ...]:
        if release.edges is not None:
            return release.edges
        lower, upper = self._range(column, release, key)
        bins = release.bins if isinstance(release.bins, int) else _BINS
        return tuple(float(edge) for edge in np.linspace(lower, upper, bins + 1))

    def _range(self, column: str, release: ColumnRelease | None, key: str) -> tuple[float, float]:
        """Return the declared bounds of a number."""
        if release is not None and release.lower is not None and release.upper is not None:
            return release.lower, release.upper
        feature = self._schema.features.get(column)
        if isinstance(feature, Number):
            return feature.lower, feature.upper
        if release is not None and release.edges is not None:
            return release.edges[0], release.edges[-1]
        if categories_of(self._schema, column, key) is not None:
            raise ConfigError(f"{key}: '{column}' has categories; numbers are needed")
        raise ConfigError(
            f"{key}: '{column}' has no declared bounds, and bounds taken from the records would leak information "
            f"about them; give "
            "lower and upper, or edges"
        )


# --- prediction of the errors, and refusal of a hopeless release before a record is read ---
# Predictions take all n_users people to have one record each, spread evenly over cells; numbers have a standard
# deviation of a third of half their declared range, so that the bounds are three away. What is true of the noise is
# exact.


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
        share: share of the squared norm.
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


def check(
    predictions: tuple[Planned, ...], noise_multiplier: float, epsilon: Callable[[float], float]
) -> None:
    """Refuse blocks whose noise hides what they are to show, before anything is charged.

    Args:
        predictions: what is predicted.
        noise_multiplier: noise multiplier of the release.
        epsilon: what a release with another multiplier would cost.

    Raises:
        ConfigError: names every such block, and what would do.
    """
    wrong = list(_refusals(predictions, noise_multiplier, epsilon))
    if wrong:
        raise ConfigError("; ".join(wrong))


def _refusals(
    predictions: tuple[Planned, ...], noise_multiplier: float, epsilon: Callable[[float], float]
) -> Iterator[str]:
    for prediction in predictions:
        if prediction.noise > prediction.allowed:
            factor = prediction.noise / prediction.allowed
            needed, fewer = epsilon(noise_multiplier / factor), math.floor(prediction.cells / factor)
            cells = f"about {fewer} cells, " if fewer > 1 else ""
            yield (
                f"statistics.release.{prediction.release}: epsilon is too small for its {prediction.cells} cells: the "
                f"noise would have a standard deviation of {prediction.noise:.3g}, and {prediction.allowed:.3g} is "
                f"allowed (max_standard_error); epsilon = {needed:.2g}, {cells}fewer groups or releases, or a larger "
                "weight would do"
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
