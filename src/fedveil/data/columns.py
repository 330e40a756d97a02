"""Columns of tables for statistics: every cell counts as valid, missing or invalid; none is refused.

Training refuses an undeclared value, and every participant sees the refusal. A statistic must not refuse: whether the
run goes on would depend on one cell of one person. So a cell that is missing, out of range, undeclared or no number
is counted as such, and no cell of a declared column is an error. Errors concern ids and silos (which link records to
people), files and columns. They name these and repeat no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int8, Int32, Int64

from fedveil.data.identities import index_names
from fedveil.data.memory_tables import TableFile
from fedveil.data.records import Groups, group_by_silo_user
from fedveil.data.schema import Category, Date, Label, Labels, Number, Schema, Survival
from fedveil.data.table_reader import EVENTS, TableReader
from fedveil.data.tables import check_own, own_numbers, silo_numbers
from fedveil.errors import DataError, did_you_mean


class State(IntEnum):
    """Kind of a cell."""

    VALID = 0
    MISSING = 1
    INVALID = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """A numeric column.

    Attributes:
        values: (n,) numbers, 0 for a cell that is not valid. An infinity is a valid number that is out of range.
        state: (n,) :class:`State` of every cell.
    """

    values: Float64[np.ndarray, "n"]
    state: Int8[np.ndarray, "n"]

    def take(self, rows: Int64[np.ndarray, "k"]) -> Numbers:
        """Return the cells of these records."""
        return Numbers(values=self.values[rows], state=self.state[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """A column of declared categories.

    Attributes:
        values: (n,) index of each cell among the declared categories, 0 for a cell that is not valid.
        state: (n,) :class:`State` of every cell; INVALID is an undeclared category.
    """

    values: Int64[np.ndarray, "n"]
    state: Int8[np.ndarray, "n"]

    def take(self, rows: Int64[np.ndarray, "k"]) -> Places:
        """Return the cells of these records."""
        return Places(values=self.values[rows], state=self.state[rows])


Column: TypeAlias = Numbers | Places


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnTable:
    """The records of all silos, column by column.

    Attributes:
        columns: columns by name.
        silo: (n,) silo number of every record, from 0.
        user: (n,) user number of every record, from 0; the same number is the same person in every silo.
        n_users: |U|, the public number of people.
        silo_names: |S| names.
    """

    columns: dict[str, Column]
    silo: Int32[np.ndarray, "n"]
    user: Int32[np.ndarray, "n"]
    n_users: int
    silo_names: tuple[str, ...]

    def __len__(self) -> int:
        """Return n, the number of records."""
        return len(self.silo)

    def numbers(self, name: str) -> Numbers:
        """Return a numeric column.

        Raises:
            DataError: the column has categories, or was not read.
        """
        column = self.columns.get(name)
        if not isinstance(column, Numbers):
            raise DataError(f"column '{name}' is none of the numeric columns that were read")
        return column

    def places(self, name: str) -> Places:
        """Return a column of categories.

        Raises:
            DataError: the column is numeric, or was not read.
        """
        column = self.columns.get(name)
        if not isinstance(column, Places):
            raise DataError(f"column '{name}' is none of the columns of categories that were read")
        return column

    def take(self, rows: Int64[np.ndarray, "k"]) -> ColumnTable:
        """Return the table of the records at these rows."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return replace(self, columns=columns, silo=self.silo[rows], user=self.user[rows])

    def pairs(self) -> Groups:
        """Group by (silo, user), as training does."""
        return group_by_silo_user(self.silo, self.user)


def categories_of(schema: Schema, name: str, key: str = "") -> tuple[str, ...] | None:
    """Return the declared categories of a feature or target column; None for a numeric column.

    Args:
        schema: declaration of the columns.
        name: name of the column.
        key: configuration key that requests the column, for errors.

    Raises:
        DataError: the schema has no such column, or the column holds dates.
    """
    prefix = f"{key}: " if key else ""
    feature = schema.features.get(name)
    if isinstance(feature, Category):
        return feature.categories
    if isinstance(feature, Number):
        return None
    if isinstance(feature, Date):
        raise DataError(
            f"{prefix}column '{name}' is of dates, which are not counted; declare an age or a year as a number"
        )
    target = schema.target
    if isinstance(target, Label) and target.column == name:
        return target.classes
    if (isinstance(target, Survival) and target.event == name) or (
        isinstance(target, Labels) and name in target.columns
    ):
        return EVENTS
    if name in schema.amounts or (isinstance(target, Survival) and name in (target.time, target.entry)):
        return None
    columns = (*schema.features, *schema.target_columns)
    raise DataError(
        f"{prefix}the schema declares no column '{name}' that could be counted; it has: {', '.join(columns)}"
        f"{did_you_mean(name, columns)}"
    )


def read_columns(schema: Schema, files: Sequence[TableFile], column_names: Sequence[str]) -> ColumnTable:
    """Read declared columns of the tables of all silos without refusing a cell.

    Args:
        schema: declaration of the columns.
        files: CSV, Parquet or Excel files. Without a silo column, each file is a silo, named by the file's stem.
        column_names: columns to read, in addition to users and silos.

    Raises:
        DataError: a file cannot be read or lacks a column; a record has no id; more people than ``n_users`` have
            records; a silo is not declared.
    """
    columns, users, silos = _read(schema, files, column_names)
    names, user = index_names(users)
    if len(names) > schema.n_users:
        raise DataError(
            f"n_users is {schema.n_users} in the schema, but more people have records; it is the public number "
            "of all people and must not be below the number present"
        )
    silo_names, silo = silo_numbers(schema, files, silos, silos.index)
    return ColumnTable(columns=columns, silo=silo, user=user, n_users=schema.n_users, silo_names=silo_names)


def read_own_columns(
    schema: Schema,
    path: Path,
    column_names: Sequence[str],
    *,
    silo: int,
    silo_names: tuple[str, ...],
    users: Sequence[str] | None,
) -> ColumnTable:
    """Read declared columns of the table of one silo of a federation without refusing a cell.

    Args:
        schema: declaration of the columns.
        path: the silo's file.
        column_names: columns to read, in addition to users and silos.
        silo: number of the silo.
        silo_names: names of all silos.
        users: ids of all users in the order of their numbers. None: the ids are the numbers, from 0.

    Raises:
        DataError: as :func:`read_columns`; a user has no number, or a record belongs to another silo. The error names
            the record.
    """
    columns, ids, silos = _read(schema, (path,), column_names)
    rows = np.arange(len(ids))
    if schema.silo is not None:
        check_own(schema, path, rows, *index_names(silos), silo_names[silo])
    user = own_numbers(schema, path, rows, *index_names(ids), users)
    return ColumnTable(
        columns=columns,
        silo=np.full(len(ids), silo, dtype=np.int32),
        user=user,
        n_users=schema.n_users,
        silo_names=silo_names,
    )


def _read(
    schema: Schema, files: Sequence[TableFile], column_names: Sequence[str]
) -> tuple[dict[str, Column], list[str], list[str]]:
    """Return the columns by name, the user id of every record, and the silo id of every record."""
    categories = {name: categories_of(schema, name) for name in column_names}
    ids = (schema.user,) if schema.silo is None else (schema.user, schema.silo)
    read: dict[str, list[Column]] = {name: [] for name in column_names}
    users, silos = list[str](), list[str]()
    for path in files:
        reader = TableReader.by_schema(
            schema, path, tuple(dict.fromkeys((*ids, *column_names))), tolerant=True
        )
        users += reader.identities(schema.user)
        silos += [path.stem] * reader.n_records if schema.silo is None else reader.identities(schema.silo)
        for name, declared in categories.items():
            read[name].append(
                numbers_of(reader, name) if declared is None else places_of(reader, name, declared)
            )
    return {name: concatenate_columns(parts) for name, parts in read.items()}, users, silos


def concatenate_columns(parts: Sequence[Column]) -> Column:
    """Concatenate the parts of a column from several files."""
    values = np.concatenate([part.values for part in parts])
    state = np.concatenate([part.state for part in parts])
    return (
        Numbers(values=values, state=state)
        if isinstance(parts[0], Numbers)
        else Places(values=values, state=state)
    )


def numbers_of(reader: TableReader, name: str) -> Numbers:
    """Read a numeric column: a cell that is no number is invalid; an infinity is valid and out of range."""
    cells, missing = reader.cells(name)
    if pa.types.is_string(
        cells.type
    ):  # CSV and Excel cells; -99.0 also matches a declared missing value of -99
        cells = reader.parse_numbers(pc.if_else(pa.array(missing), None, cells))
        missing = missing | reader.is_missing_number(cells)
    values = pc.fill_null(cells, np.nan).to_numpy(zero_copy_only=False).astype(np.float64)
    state = np.where(missing, State.MISSING, np.where(np.isnan(values), State.INVALID, State.VALID))
    return Numbers(values=np.where(state == State.VALID, values, 0.0), state=state.astype(np.int8))


def places_of(reader: TableReader, name: str, declared: Sequence[str]) -> Places:
    """Read a column of categories: an undeclared value is invalid."""
    index, missing = reader.places(name, declared)
    state = np.where(missing, State.MISSING, np.where(index < 0, State.INVALID, State.VALID))
    return Places(values=np.maximum(index, 0), state=state.astype(np.int8))
