"""The rows of a release's tables: every figure with its interval, and how much of that is the price of privacy.

All rows are functions of the noisy vector and public things (post-processing). A count whose interval reaches below
``floor`` people, and a figure that has no interval, are not shown.

Figures that nobody asked for before the release, from what was released: they cost nothing and read no record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product, repeat
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from jaxtyping import Float64

from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block, Cells, OneHot, Powers, isotonic_regression
from fedveil.statistics.cells import Bins, Exits, Partition, Product
from fedveil.statistics.compose import CELLS, COMPLETE, EVENTS, EXITS, FIRSTS, MOMENTS, SECONDS
from fedveil.statistics.correlations import Sums, correlations, display_correlations
from fedveil.statistics.intervals import (
    LEAST_RATIO,
    NORMAL_95,
    Interval,
    at_the_ends,
    interval_between,
    normal,
    ratio,
    share,
)
from fedveil.statistics.request import (
    TOO_FEW,
    ColumnRelease,
    CorrelationRelease,
    CrossRelease,
    SurvivalRelease,
)
from fedveil.statistics.result import ReleasedStatistics
from fedveil.statistics.survival import Curve, curve

# --- rows of tables ---

# --- quantiles ----------------------------------------------------------------------------------------------
# Quantiles from noisy cumulative counts: where the distribution function crosses q, and a band around it.
#
# With C_j the people up to edge x_j and V all people with a value, T_j = C_j - q V is linear in the cells: its noise is
# exact, and at the quantile the choice of people adds V q (1 - q) at most. The interval holds all x between the edge
# before the first j with T_j + z sd_j >= 0 and the edge after the last with T_j - z sd_j < 0. It is wrong on one side
# only if T at ONE edge beside the quantile is off by z sd, so it covers 95 % whatever the other edges do; ends are
# edges, so it is no narrower than a bin.


def cumulative(
    values: Float64[np.ndarray, " B"], covariance: Float64[np.ndarray, "B B"], level: float
) -> tuple[Float64[np.ndarray, " B"], Float64[np.ndarray, " B"]]:
    """Return T_j = C_j - level V at every edge after a cell, with its variance by the noise."""
    size = len(values)
    weights = np.tril(np.ones((size, size))) - level
    return weights @ values, np.einsum("jk,kl,jl->j", weights, covariance, weights)


def quantile(
    values: Float64[np.ndarray, " B"],
    covariance: Float64[np.ndarray, "B B"],
    edges: tuple[float, ...],
    level: float,
    people_per_unit: float,
) -> Interval | None:
    """Return a quantile with its interval; None where nobody is left to have one.

    Args:
        values: (B + 2,) ordered cells: below, bins, above.
        covariance: covariance of their noise.
        edges: (B + 1,) of the bins.
        level: q in (0, 1).
        people_per_unit: how much more than one unit one person may add to a count (|S| for person-silo pairs).

    Returns:
        The interval; an end is None where the quantile may lie outside the declared bounds. Where the estimate does,
        it is the bound that it lies beyond.
    """
    total = float(values.sum())
    if total <= 0:
        return None
    distance, noise = (part[:-1] for part in cumulative(values, covariance, level))
    people = people_per_unit * total * level * (1 - level)
    ends, ends_here = (_ends(distance, np.sqrt(noise + own), edges) for own in (people, 0.0))
    shares = isotonic_regression(np.cumsum(values) / total, y_min=0.0, y_max=1.0)
    nearest = int(np.argmin(np.abs(distance)))
    estimate, beyond = _interpolated(shares[:-1], edges, level)
    return replace(
        interval_between(estimate, ends, ends_here, share(float(noise[nearest]), people)), beyond=beyond
    )


def _ends(
    distance: Float64[np.ndarray, " E"], sd: Float64[np.ndarray, " E"], edges: tuple[float, ...]
) -> tuple[float | None, float | None]:
    """Return the edges around all crossings that cannot be ruled out."""
    possible = np.flatnonzero(distance + NORMAL_95 * sd >= 0)
    first = int(possible[0]) if len(possible) else len(edges)
    below = np.flatnonzero(distance - NORMAL_95 * sd < 0)
    last = int(below[-1]) if len(below) else -1
    return (edges[first - 1] if first > 0 else None), (edges[last + 1] if last + 1 < len(edges) else None)


def _interpolated(
    shares: Float64[np.ndarray, " E"], edges: tuple[float, ...], level: float
) -> tuple[float, Literal["below", "above"] | None]:
    """Return where the isotonic distribution function reaches a level, linear within bins; outside, which bound."""
    index = int(np.searchsorted(shares, level, side="left"))
    if index == 0:
        return edges[0], "below" if shares[0] > level else None
    if index == len(edges):
        return edges[-1], "above"
    before, after = float(shares[index - 1]), float(shares[index])
    within = 0.5 if math.isclose(before, after) else (level - before) / (after - before)
    return edges[index - 1] + within * (edges[index] - edges[index - 1]), None


# --- moments ------------------------------------------------------------------------------------------------
# Means and variances from noisy sums of powers of numbers scaled to [-1, 1].
#
# Every figure is a smooth function of sums; their noise is white and known. What the choice of people adds would need
# moments that were not released, so it is bounded by those that were and by the declared range: intervals may be wide,
# and cover. With s^2 the released second central moment and K the largest distance from the mean within the range:
#
# ==============  ====================================================================================================
# figure          variance by the choice of n people, at most
# ==============  ====================================================================================================
# mean            s^2 / n                      (a person's records are averaged, which adds no spread)
# variance        (K^2 s^2 - s^4) / n          ((x - m)^2 lies in [0, K^2] and has mean s^2)
# ==============  ====================================================================================================


def mean(
    sums: Float64[np.ndarray, " 3"], covariance: Float64[np.ndarray, "3 3"], people_per_unit: float
) -> Interval | None:
    """Return the mean of numbers in [-1, 1] from (n, sum x, sum x^2); None where n is too close to 0."""
    n, first, second = (float(value) for value in sums)
    if n <= 0:
        return None
    spread = float(np.clip(second / n - (first / n) ** 2, 0, 1))
    noise = (float(covariance[1, 1]), float(covariance[0, 0]), float(covariance[0, 1]))
    return ratio(first, n, noise, people_per_unit * n * spread)


def variance(
    sums: Float64[np.ndarray, " 3"], covariance: Float64[np.ndarray, "3 3"], people_per_unit: float
) -> Interval | None:
    """Return the variance of numbers in [-1, 1] over records of people weighted 1; None as for the mean."""
    n, first, second = (float(value) for value in sums)
    if n <= 0 or n < LEAST_RATIO * math.sqrt(covariance[0, 0]):
        return None
    centre = first / n
    spread = second / n - centre**2
    gradient = np.array([(2 * centre**2 - second / n) / n, -2 * centre / n, 1 / n])
    farthest = (1 + min(1.0, abs(centre))) ** 2
    bounded = min(max(spread, 0.0), farthest)
    people = people_per_unit * max(0.0, farthest * bounded - bounded**2) / n
    return normal(spread, float(gradient @ covariance @ gradient), people)


# --- figures ------------------------------------------------------------------------------------------------


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
        document: dict[str, str | float | None] = {
            "release": self.release,
            "figure": self.figure,
            "group": self.group,
            "cell": self.cell,
        }
        if self.interval is None:
            return document | {"estimate": None, "reason": TOO_FEW}
        return document | vars(self.interval)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """A group's cells of one block.

    Attributes:
        name: name of the group.
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
    clipped, total = np.clip(group.values, 0, None), group.everybody
    squares = people_per_unit * float(weights**2 @ clipped)
    mean_square = float(weights @ clipped) ** 2 / total if total > 0 and people_per_unit == 1 else 0.0
    return normal(estimate, noise, max(0.0, squares - mean_square))


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
    all_rows: list[Row] = []
    for name, release in released.request.release.items():
        all_rows += _MAKERS[release.kind](released, name, release)
    return tuple(all_rows)


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
        for index in (width - 2, width - 1):
            yield row(labels[index], counted([index]))
        enough = counted(range(width)) is not None
        absent = part_of(group, _indicator(width, (width - 2, width - 1)), per_unit)
        yield row("share without a value", absent if enough else None)
    if {"histogram", "categories"} & set(release.show):
        for index in range(width - 2):
            yield row("count", counted([index]), labels[index])
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
        interval = quantile(values, covariance, edges, level, per_unit) if enough else None
        yield Row(release=name, figure="quantile", group=group.name, cell=f"{level:g}", interval=interval)


def _moments(released: ReleasedStatistics, release: ColumnRelease, block: Block, name: str) -> Iterator[Row]:
    encoder = block.encoder
    assert isinstance(encoder, Powers)
    ((_, lower, upper),) = encoder.ranges
    half, middle = (upper - lower) / 2, (upper + lower) / 2
    for group in groups_of(block, released.cells[name, MOMENTS]):
        people = normal(float(group.values[0]), float(group.covariance[0, 0]), 0.0)
        enough = suppress_small_count(people, released.request.floor) is not None
        for figure, estimator, factor, shift in (
            ("mean", mean, half, middle),
            ("variance", variance, half**2, 0.0),
        ):
            if figure in release.show:
                moment = (
                    estimator(group.values, group.covariance, released.people_per_unit) if enough else None
                )
                interval = None if moment is None else moment.affine(factor, shift)
                yield Row(release=name, figure=figure, group=group.name, interval=interval)


def _cross(released: ReleasedStatistics, name: str, release: CrossRelease) -> Iterator[Row]:
    ((block),) = (slot.block for slot in released.layout.slots_of(name))
    encoder = block.encoder
    assert isinstance(encoder, OneHot)
    for group in groups_of(block, released.cells[name, CELLS]):
        for index, label in enumerate(encoder.cells.labels):
            counted = count(group, _indicator(encoder.width, [index]), released.people_per_unit)
            interval = suppress_small_count(counted, released.request.floor)
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
        exited.name: curve(
            (exited.values[:-1], exited.covariance[:-1, :-1]),
            (happened.values, happened.covariance),
            encoder.cells.grid,
            released.people_per_unit,
        )
        for exited, happened in zip(exits, events, strict=True)
    }


def _survival(released: ReleasedStatistics, name: str, release: SurvivalRelease) -> Iterator[Row]:
    for group, group_curve in curves(released, name).items():
        for index, time in enumerate(release.grid[1:]):
            interval = group_curve.point(index) if index < len(group_curve.grid) else None
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
        intervals = (
            [interval for row in display_correlations(correlations(sums)) for interval in row]
            if enough
            else repeat(None)
        )
        for (column, other), interval in zip(combinations(columns, 2), intervals, strict=False):
            cell = f"{column}, {other}"
            yield Row(release=name, figure="correlation", group=n.name, cell=cell, interval=interval)


_MAKERS: Final[Mapping[str, Callable[..., Iterator[Row]]]] = MappingProxyType(
    {"column": _column, "survival": _survival, "cross": _cross, "correlation": _correlation}
)


def _indicator(width: int, chosen: Sequence[int]) -> Float64[np.ndarray, " width"]:
    """Return 1 at the chosen cells and 0 elsewhere."""
    indicator = np.zeros(width)
    indicator[list(chosen)] = 1.0
    return indicator


# --- derived figures ---


def cross(released: ReleasedStatistics, columns: Sequence[str]) -> tuple[Row, ...]:
    """Return the cross table of columns that some release has together, groups included, with the least noise.

    Raises:
        ConfigError: none has them together; names those that there are.
    """
    tables = tuple(_tables(released))
    fitting = [(name, block) for name, block in tables if set(columns) <= set(_crossing(block))]
    if not fitting:
        available = sorted({", ".join(_crossing(block)) for _, block in tables})
        raise ConfigError(
            f"--cross {','.join(columns)}: no release has these together, and what was not released cannot be had "
            f"without a new one; there are: {'; '.join(available)}"
        )
    name, block = min(fitting, key=lambda table: _noise(released.cells[table[0], CELLS], table[1], columns))
    return tuple(_crossed(released, name, block, columns))


def quantiles(released: ReleasedStatistics, column: str, levels: Sequence[float]) -> tuple[Row, ...]:
    """Return quantiles of a number that some release has bins of.

    Raises:
        ConfigError: none has, or a level that is not between 0 and 1.
    """
    if not all(0 < level < 1 for level in levels):
        raise ConfigError(f"--quantile {column}: levels lie between 0 and 1")
    for name, block in _tables(released):
        cells = block.encoder.cells if isinstance(block.encoder, OneHot) else None
        if isinstance(cells, Bins) and cells.column == column:
            groups = groups_of(block, released.cells[name, CELLS])
            return tuple(
                row for group in groups for row in quantile_rows(released, name, group, cells.edges, levels)
            )
    raise ConfigError(f"--quantile {column}: no release has bins of it")


def _tables(released: ReleasedStatistics) -> Iterator[tuple[str, Block]]:
    """Yield the one-hot blocks that every record has a cell of, and not the parts of a survival curve."""
    for slot in released.layout.slots:
        if slot.block.part == CELLS:
            yield slot.block.release, slot.block


def _axes(block: Block) -> tuple[Partition, ...]:
    """Return the partitions of a table, groups first."""
    assert isinstance(block.encoder, OneHot)
    axes: list[Partition] = []
    for partition in (block.groups, block.encoder.cells):
        axes += partition.parts if isinstance(partition, Product) else [partition]
    return tuple(axes)


def _crossing(block: Block) -> tuple[str, ...]:
    """Return the columns of a table, groups first."""
    return tuple(axis.columns[0] for axis in _axes(block) if axis.columns)


def _noise(cells: Cells, block: Block, columns: Sequence[str]) -> float:
    """Return about how much noise a cell of the cross table has: that of all cells, over its own number of cells."""
    n_shown = np.prod([axis.size for axis in _axes(block) if axis.columns and axis.columns[0] in columns])
    return float(np.trace(cells.covariance)) * block.groups.size / float(n_shown)


def _crossed(released: ReleasedStatistics, name: str, block: Block, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table, summed over the axes that are not asked for."""
    axes = _axes(block)
    cells = released.cells[name, CELLS]
    n_groups, width = cells.values.shape
    sizes = [axis.size for axis in axes]
    positions = np.arange(n_groups * width).reshape(sizes)
    kept_axes = [next(i for i, axis in enumerate(axes) if axis.columns == (column,)) for column in columns]
    # independent groups: the joint covariance has one block of the cells' a group
    whole = Group(
        name=ALL,
        values=cells.values.ravel(),
        covariance=np.kron(np.eye(n_groups), cells.covariance),
        everybody=float(np.clip(cells.values, 0, None).sum()),
    )
    for chosen in product(*(range(sizes[axis]) for axis in kept_axes)):
        index: list[slice | int] = [slice(None)] * len(axes)
        for axis, at in zip(kept_axes, chosen, strict=True):
            index[axis] = at
        weights = np.zeros(n_groups * width)
        weights[positions[tuple(index)].ravel()] = 1.0
        label = ", ".join(axes[axis].labels[at] for axis, at in zip(kept_axes, chosen, strict=True))
        interval = count(whole, weights, released.people_per_unit)
        yield Row(
            release=name,
            figure="count",
            group=ALL,
            cell=label,
            interval=suppress_small_count(interval, released.request.floor),
        )
