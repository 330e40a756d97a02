"""The rows of a release's tables: every figure with its interval, and how much of that is the price of privacy.

All rows are functions of the noisy vector and public things (post-processing). A count whose interval reaches below
``floor`` people, and a figure that has no interval, are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from types import MappingProxyType
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.statistics import moments
from fedveil.statistics.blocks import Block, OneHot, Powers
from fedveil.statistics.cells import Bins, Exits
from fedveil.statistics.compose import CELLS, COMPLETE, EVENTS, EXITS, FIRSTS, MOMENTS, SECONDS
from fedveil.statistics.correlations import Sums, correlations, display_correlations
from fedveil.statistics.decoding import Cells
from fedveil.statistics.intervals import Interval, at_the_ends, normal, ratio
from fedveil.statistics.limits import TOO_FEW
from fedveil.statistics.quantiles import quantile
from fedveil.statistics.request import (
    ColumnRelease,
    CorrelationRelease,
    CrossRelease,
    SurvivalRelease,
)
from fedveil.statistics.result import ReleasedStatistics
from fedveil.statistics.survival import Curve, curve

ALL: Final = "all"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        release: the name under which it was asked for.
        figure: what it is.
        group: whose it is.
        cell: which one, where there are several.
        interval: the figure; None where it is not shown.
    """

    release: str
    figure: str
    group: str
    cell: str = ""
    interval: Interval | None

    def to_json(self) -> dict[str, str | float | None]:
        """Return the row as JSON; a figure that is not shown says why."""
        found: dict[str, str | float | None] = {
            "release": self.release,
            "figure": self.figure,
            "group": self.group,
            "cell": self.cell,
        }
        if self.interval is None:
            return found | {"estimate": None, "reason": TOO_FEW}
        return found | vars(self.interval)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """A group's cells of one block.

    Attributes:
        name: of the group.
        values: (width,) estimates.
        covariance: (width, width) of their noise.
        everybody: the estimated number of units of all people, whatever their group.
    """

    name: str
    values: Float64[np.ndarray, " width"]
    covariance: Float64[np.ndarray, "width width"]
    everybody: float

    def total(self, weights: Float64[np.ndarray, " width"]) -> tuple[float, float]:
        """Return a weighted sum of the cells, and the variance of its noise."""
        return float(weights @ self.values), float(weights @ self.covariance @ weights)


def groups_of(block: Block, cells: Cells) -> tuple[Group, ...]:
    """Return all people together, and every group where there are several."""
    n, values = block.groups.size, cells.values.sum(axis=0)
    everybody = float(np.clip(values, 0, None).sum())
    whole = Group(name=ALL, values=values, covariance=n * cells.covariance, everybody=everybody)
    if n == 1:
        return (whole,)
    single = zip(block.groups.labels, cells.values, strict=True)
    return whole, *(
        Group(name=name, values=row, covariance=cells.covariance, everybody=everybody) for name, row in single
    )


def count(group: Group, weights: Float64[np.ndarray, " width"], people_per_unit: float) -> Interval:
    """Return a weighted sum of one-hot cells, for a fixed number of people drawn from a population.

    A person's share of the sum is h with E h^2 at most people_per_unit times the weighted squares of the cells; what
    is subtracted is the square of its mean, over the number of people, which is the total of all groups where units are
    people. How many of them are in a group is drawn too: a group's own size is no fixed number.
    """
    estimate, noise = group.total(weights)
    seen, total = np.clip(group.values, 0, None), group.everybody
    squares = people_per_unit * float(weights**2 @ seen)
    known = float(weights @ seen) ** 2 / total if total > 0 and people_per_unit == 1 else 0.0
    return normal(estimate, noise, max(0.0, squares - known))


def part_of(group: Group, weights: Float64[np.ndarray, " width"], people_per_unit: float) -> Interval | None:
    """Return the share of the cells with weight 1 among all of a group, by Fieller."""
    above, of_above = group.total(weights)
    everyone = np.ones_like(weights)
    below, of_below = group.total(everyone)
    joint = float(weights @ group.covariance @ everyone)
    p = float(np.clip(above / below, 0, 1)) if below > 0 else 0.0
    people = people_per_unit * (max(below, 0.0) * p * (1 - p) + at_the_ends(-p, 1 - p))
    return ratio(above, below, (of_above, of_below, joint), people)


def rows(released: ReleasedStatistics) -> tuple[Row, ...]:
    """Return every row of a release, in the order in which it was asked for."""
    found: list[Row] = []
    for name, release in released.request.release.items():
        found += _MAKERS[release.kind](released, name, release)
    return tuple(found)


def suppress_small_count(interval: Interval | None, floor: float) -> Interval | None:
    """Return a count unless its interval reaches below the floor."""
    return interval if interval is not None and interval.low is not None and interval.low >= floor else None


def _column(released: ReleasedStatistics, name: str, release: ColumnRelease) -> Iterator[Row]:
    parts = {slot.block.part: slot.block for slot in released.layout.slots_of(name)}
    if CELLS in parts:
        block = parts[CELLS]
        for group in groups_of(block, released.cells[name, CELLS]):
            yield from _one_hot(released, release, block, group, name)
    if MOMENTS in parts:
        yield from _moments(released, release, parts[MOMENTS], name)


def _one_hot(
    released: ReleasedStatistics, release: ColumnRelease, block: Block, group: Group, name: str
) -> Iterator[Row]:
    encoder, per_unit, floor = block.encoder, released.people_per_unit, released.request.floor
    assert isinstance(encoder, OneHot)
    labels = encoder.cells.labels
    width = len(labels)

    def row(figure: str, interval: Interval | None, cell: str = "") -> Row:
        return Row(release=name, figure=figure, group=group.name, cell=cell, interval=interval)

    def counted(chosen: Sequence[int]) -> Interval | None:
        return suppress_small_count(count(group, _indicator(width, chosen), per_unit), floor)

    if "count" in release.show:
        yield row(released.counted_unit, counted(range(width)))
        yield row("with a value", counted(range(width - 2)))
    if "missing" in release.show:
        for place in (width - 2, width - 1):
            yield row(labels[place], counted([place]))
        enough = counted(range(width)) is not None
        absent = part_of(group, _indicator(width, (width - 2, width - 1)), per_unit)
        yield row("share without a value", absent if enough else None)
    if {"histogram", "categories"} & set(release.show):
        for place in range(width - 2):
            yield row("count", counted([place]), labels[place])
    if "quantiles" in release.show:
        assert isinstance(encoder.cells, Bins)
        yield from quantile_rows(released, name, group, encoder.cells.edges, release.quantiles)


def quantile_rows(
    released: ReleasedStatistics, name: str, group: Group, edges: tuple[float, ...], levels: Sequence[float]
) -> Iterator[Row]:
    """Yield quantiles of a group's bins, shown where those with a value are more than the floor."""
    values, covariance, per_unit = group.values[:-2], group.covariance[:-2, :-2], released.people_per_unit
    valued = _indicator(len(group.values), range(len(values)))
    enough = suppress_small_count(count(group, valued, per_unit), released.request.floor) is not None
    for level in levels:
        found = quantile(values, covariance, edges, level, per_unit) if enough else None
        yield Row(release=name, figure="quantile", group=group.name, cell=f"{level:g}", interval=found)


def _moments(released: ReleasedStatistics, release: ColumnRelease, block: Block, name: str) -> Iterator[Row]:
    encoder = block.encoder
    assert isinstance(encoder, Powers)
    ((_, lower, upper),) = encoder.ranges
    half, middle = (upper - lower) / 2, (upper + lower) / 2
    for group in groups_of(block, released.cells[name, MOMENTS]):
        people = normal(float(group.values[0]), float(group.covariance[0, 0]), 0.0)
        enough = suppress_small_count(people, released.request.floor) is not None
        for figure, of, factor, shift in (
            ("mean", moments.mean, half, middle),
            ("variance", moments.variance, half**2, 0.0),
        ):
            if figure in release.show:
                found = of(group.values, group.covariance, released.people_per_unit) if enough else None
                interval = None if found is None else found.affine(factor, shift)
                yield Row(release=name, figure=figure, group=group.name, interval=interval)


def _cross(released: ReleasedStatistics, name: str, release: CrossRelease) -> Iterator[Row]:
    ((block),) = (slot.block for slot in released.layout.slots_of(name))
    encoder = block.encoder
    assert isinstance(encoder, OneHot)
    for group in groups_of(block, released.cells[name, CELLS]):
        for place, label in enumerate(encoder.cells.labels):
            found = count(group, _indicator(encoder.width, [place]), released.people_per_unit)
            interval = suppress_small_count(found, released.request.floor)
            yield Row(release=name, figure="count", group=group.name, cell=label, interval=interval)


def curves(released: ReleasedStatistics, name: str) -> Mapping[str, Curve]:
    """Return the survival curve of every group of a release."""
    parts = {slot.block.part: slot.block for slot in released.layout.slots_of(name)}
    encoder = parts[EXITS].encoder
    assert isinstance(encoder, OneHot)
    assert isinstance(encoder.cells, Exits)
    exits = groups_of(parts[EXITS], released.cells[name, EXITS])
    events = groups_of(parts[EVENTS], released.cells[name, EVENTS])
    return {
        left.name: curve(
            (left.values[:-1], left.covariance[:-1, :-1]),
            (happened.values, happened.covariance),
            encoder.cells.grid,
            released.people_per_unit,
        )
        for left, happened in zip(exits, events, strict=True)
    }


def _survival(released: ReleasedStatistics, name: str, release: SurvivalRelease) -> Iterator[Row]:
    for group, found in curves(released, name).items():
        for place, time in enumerate(release.grid[1:]):
            interval = found.point(place) if place < len(found.grid) else None
            yield Row(release=name, figure="survival", group=group, cell=f"{time:g}", interval=interval)


def _correlation(released: ReleasedStatistics, name: str, release: CorrelationRelease) -> Iterator[Row]:
    columns = release.columns
    blocks = {slot.block.part: slot.block for slot in released.layout.slots_of(name)}
    complete, firsts, seconds = (
        groups_of(blocks[part], released.cells[name, part]) for part in (COMPLETE, FIRSTS, SECONDS)
    )
    pairs = np.triu_indices(len(columns))
    for n, first, second in zip(complete, firsts, seconds, strict=True):
        upper = np.zeros((len(columns), len(columns)))
        upper[pairs] = second.values
        of_n, of_first, of_second = (float(part.covariance[0, 0]) for part in (n, first, second))
        sums = Sums(
            n=float(n.values[0]),
            first=first.values,
            second=upper + np.triu(upper, 1).T,
            variances=(of_n, of_first, of_second),
            people_per_unit=released.people_per_unit,
        )
        enough = suppress_small_count(normal(sums.n, of_n, 0.0), released.request.floor) is not None
        found = (
            [one for row in display_correlations(correlations(sums)) for one in row]
            if enough
            else repeat(None)
        )
        for (one, other), interval in zip(combinations(columns, 2), found, strict=False):
            cell = f"{one}, {other}"
            yield Row(release=name, figure="correlation", group=n.name, cell=cell, interval=interval)


_MAKERS: Final[Mapping[str, Callable[..., Iterator[Row]]]] = MappingProxyType(
    {"column": _column, "survival": _survival, "cross": _cross, "correlation": _correlation}
)


def _indicator(width: int, chosen: Sequence[int]) -> Float64[np.ndarray, " width"]:
    """Return 1 at the chosen cells and 0 elsewhere."""
    found = np.zeros(width)
    found[list(chosen)] = 1.0
    return found
