"""Figures that nobody asked for before the release, from what was released: they cost nothing and read no record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block, OneHot
from fedveil.statistics.cells import Bins, Partition, Product
from fedveil.statistics.compose import CELLS
from fedveil.statistics.decoding import Cells
from fedveil.statistics.figures import ALL, Group, Row, count, groups_of, quantile_rows, suppress_small_count
from fedveil.statistics.result import ReleasedStatistics


def cross(released: ReleasedStatistics, columns: Sequence[str]) -> tuple[Row, ...]:
    """Return the cross table of columns that some release has together, groups included, with the least noise.

    Raises:
        ConfigError: none has them together; names those that there are.
    """
    tables = tuple(_tables(released))
    fitting = [(name, block) for name, block in tables if set(columns) <= set(_crossing(block))]
    if not fitting:
        there = sorted({", ".join(_crossing(block)) for _, block in tables})
        raise ConfigError(
            f"--cross {','.join(columns)}: no release has these together, and what was not released cannot be had "
            f"without a new one; there are: {'; '.join(there)}"
        )
    name, block = min(fitting, key=lambda one: _noise(released.cells[one[0], CELLS], one[1], columns))
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
    found: list[Partition] = []
    for partition in (block.groups, block.encoder.cells):
        found += partition.parts if isinstance(partition, Product) else [partition]
    return tuple(found)


def _crossing(block: Block) -> tuple[str, ...]:
    """Return the columns of a table, groups first."""
    return tuple(axis.columns[0] for axis in _axes(block) if axis.columns)


def _noise(cells: Cells, block: Block, columns: Sequence[str]) -> float:
    """Return about how much noise a cell of the cross table has: that of all cells, over its own number of cells."""
    asked = np.prod([axis.size for axis in _axes(block) if axis.columns and axis.columns[0] in columns])
    return float(np.trace(cells.covariance)) * block.groups.size / float(asked)


def _crossed(released: ReleasedStatistics, name: str, block: Block, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table, summed over the axes that are not asked for."""
    axes = _axes(block)
    cells = released.cells[name, CELLS]
    n_groups, width = cells.values.shape
    sizes = [axis.size for axis in axes]
    place = np.arange(n_groups * width).reshape(sizes)
    kept = [next(i for i, axis in enumerate(axes) if axis.columns == (column,)) for column in columns]
    # independent groups: the joint covariance has one block of the cells' a group
    whole = Group(
        name=ALL,
        values=cells.values.ravel(),
        covariance=np.kron(np.eye(n_groups), cells.covariance),
        everybody=float(np.clip(cells.values, 0, None).sum()),
    )
    for chosen in product(*(range(sizes[axis]) for axis in kept)):
        index: list[slice | int] = [slice(None)] * len(axes)
        for axis, at in zip(kept, chosen, strict=True):
            index[axis] = at
        weights = np.zeros(n_groups * width)
        weights[place[tuple(index)].ravel()] = 1.0
        label = ", ".join(axes[axis].labels[at] for axis, at in zip(kept, chosen, strict=True))
        interval = count(whole, weights, released.people_per_unit)
        yield Row(
            release=name,
            figure="count",
            group=ALL,
            cell=label,
            interval=suppress_small_count(interval, released.request.floor),
        )
