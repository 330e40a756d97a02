"""Partitions: every record lies in exactly one declared cell, whatever its cells hold.

A record's vector is then the unit vector of its cell. Its norm is 1 however many cells, groups or silos there are, so
tables by group and by silo cost people per cell and no noise. Missing, out of range, undeclared and unreadable are
cells too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.data.columns import ColumnTable, State, categories_of
from fedveil.data.schema import Schema
from fedveil.errors import ConfigError

MISSING, UNREADABLE, UNDECLARED, OTHER = "missing", "unreadable", "undeclared", "missing or undeclared"
NO_CELL = -1
"""The place of a record that has no cell: its vector is zero."""


class Partition(ABC):
    """Disjoint cells, declared before any record is seen.

    Attributes:
        columns: what is read of a record.
        ordered: how many leading cells are in an order.
        covers: whether every record has a cell, so that the cells add up to all people.
    """

    covers: ClassVar[bool] = True

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that are read."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """Names of the cells, in their order."""

    @property
    def ordered_cells(self) -> int:
        """None is, unless a partition says so."""
        return 0

    @property
    def size(self) -> int:
        """Return the number of cells."""
        return len(self.labels)

    @property
    def n_expected_cells(self) -> int:
        """Return the number of cells that people are expected to spread over; used only in predictions."""
        return self.size

    @abstractmethod
    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        """Return the cell of every record; NO_CELL where it has none."""


@dataclass(frozen=True)
class _OfColumn(Partition):
    """Cells that follow from one column."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)


@dataclass(frozen=True)
class States(_OfColumn):
    """Cells "valid", "missing" and "unreadable" of a column."""

    labels: ClassVar[tuple[str, ...]] = ("with a value", MISSING, UNREADABLE)
    n_expected_cells: ClassVar[int] = 1  # most have a value

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        return table.columns[self.column].state.astype(np.int64)


@dataclass(frozen=True)
class Bins(_OfColumn):
    """Bins of a number between declared edges: below, [e_0, e_1), ..., [e_B-1, e_B], above; missing; unreadable."""

    edges: tuple[float, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        edges = [f"{edge:g}" for edge in self.edges]
        inner = (f"{low} to {high}" for low, high in pairwise(edges))
        return (f"below {edges[0]}", *inner, f"above {edges[-1]}", MISSING, UNREADABLE)

    @property
    def ordered_cells(self) -> int:
        """Return the number of cells except "missing" and "unreadable"."""
        return len(self.edges) + 1

    @property
    def n_expected_cells(self) -> int:
        return len(self.edges) - 1

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        column = table.numbers(self.column)
        edges = np.array(self.edges)
        cell = np.searchsorted(edges, column.values, side="right")
        cell[column.values == edges[-1]] = len(edges) - 1
        return _or_state(cell, column.state, self.ordered_cells)


@dataclass(frozen=True)
class Categories(_OfColumn):
    """Declared categories, and what is none of them: missing and undeclared, in one cell if ``pooled``."""

    categories: tuple[str, ...]
    pooled: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.categories, *((OTHER,) if self.pooled else (MISSING, UNDECLARED)))

    @property
    def n_expected_cells(self) -> int:
        return len(self.categories)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        column = table.places(self.column)
        if self.pooled:
            return np.where(column.state == State.VALID, column.values, len(self.categories))
        return _or_state(column.values, column.state, len(self.categories))


def declared_groups(schema: Schema, name: str, key: str) -> Categories:
    """Return the groups of a column of categories; a record that has none of them is in a group of its own.

    Args:
        schema: what the columns are.
        name: name of the column.
        key: key of the document that asks, for its errors.

    Raises:
        ConfigError: a column that is a number.
        DataError: one that the schema does not have.
    """
    declared = categories_of(schema, name, key)
    if declared is None:
        raise ConfigError(
            f"{key}: '{name}' is a number, and groups are declared categories, of which a record has one"
        )
    return Categories(name, declared, pooled=True)


@dataclass(frozen=True)
class Silos(Partition):
    """The declared silos."""

    names: tuple[str, ...]
    columns: ClassVar[tuple[str, ...]] = ("silo",)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.names

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        return table.silo.astype(np.int64)


@dataclass(frozen=True)
class Everybody(Partition):
    """One cell."""

    columns: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[tuple[str, ...]] = ("all",)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        return np.zeros(len(table), dtype=np.int64)


@dataclass(frozen=True)
class Product(Partition):
    """Cells of several partitions at once; the last one's place runs fastest."""

    parts: tuple[Partition, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.columns)

    @property
    def size(self) -> int:
        return math.prod(part.size for part in self.parts)

    @property
    def n_expected_cells(self) -> int:
        return math.prod(part.n_expected_cells for part in self.parts)

    @property
    def labels(self) -> tuple[str, ...]:
        labels = [""]
        for part in self.parts:
            labels = [f"{before}, {label}" if before else label for before in labels for label in part.labels]
        return tuple(labels)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        cell = np.zeros(len(table), dtype=np.int64)
        for part in self.parts:
            cell = cell * part.size + part.assign(table)
        return cell


@dataclass(frozen=True)
class _Followed(Partition):
    """Intervals of a grid in which records that are followed over time leave.

    Attributes:
        time, event: columns.
        grid: g_0 < ... < g_J; a time on a grid point belongs to the interval that it ends.
    """

    time: str
    event: str
    grid: tuple[float, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.time, self.event)

    def _intervals(self) -> list[str]:
        return [f"{low:g} to {high:g}" for low, high in pairwise(self.grid)]

    def _left(self, table: ColumnTable) -> tuple[Int64[np.ndarray, "n"], np.ndarray]:
        """Return the interval of every time (J: beyond the grid), and which records are readable."""
        times, events = table.numbers(self.time), table.places(self.event)
        edges: Float64[np.ndarray, " J1"] = np.array(self.grid)
        readable = (times.state == State.VALID) & (events.state == State.VALID) & (times.values >= edges[0])
        interval = np.maximum(np.searchsorted(edges, times.values, side="left") - 1, 0)
        return interval.astype(np.int64), readable


@dataclass(frozen=True)
class Exits(_Followed):
    """Interval in which a record is last followed, LAST INTERVAL FIRST, so that leading sums count people at risk.

    Cells: beyond the grid; (g_J-1, g_J]; ...; [g_0, g_1]; unreadable (no time, a time before the grid, no event).
    """

    @property
    def labels(self) -> tuple[str, ...]:
        """Intervals, last first."""
        return (f"beyond {self.grid[-1]:g}", *reversed(self._intervals()), UNREADABLE)

    @property
    def ordered_cells(self) -> int:
        """Return the number of cells except "unreadable"."""
        return len(self.grid)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        interval, readable = self._left(table)
        return np.where(readable, len(self.grid) - 1 - interval, len(self.grid))


@dataclass(frozen=True)
class Events(_Followed):
    """The interval of a record's event; a record without one has no cell."""

    covers: ClassVar[bool] = False

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._intervals())

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        interval, readable = self._left(table)
        happened = readable & (table.places(self.event).values == 1) & (interval < len(self.grid) - 1)
        return np.where(happened, interval, NO_CELL)


def _or_state(cell: np.ndarray, state: np.ndarray, first: int) -> Int64[np.ndarray, "n"]:
    """Return the place of a valid cell, and one of the two after ``first`` for the others."""
    return np.where(state == State.VALID, cell, first + state.astype(np.int64) - 1).astype(np.int64)
