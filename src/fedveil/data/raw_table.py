"""All records of several table files, read without refusing a cell: the input of the data report.

Rows are compared by hashes. Ids and cells are only compared and counted, so that no report repeats a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import UInt64

from fedveil.data.columns import Column, Numbers, State, concatenate_columns, numbers_of, places_of
from fedveil.data.memory_tables import TableFile
from fedveil.data.schema import Category, Date, Feature, Label, Labels, Schema, Survival
from fedveil.data.table_reader import EVENTS, TableReader
from fedveil.data.tables import check_files


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeTable:
    """All records of several files, one file after the other.

    Attributes:
        schema: declaration of the columns.
        user: (n,) user ids as they are written; None for a record without an id.
        silo: (n,) silo ids as they are written; None for a record without a silo.
        columns: feature and target columns by name.
        rows: (n,) hash of all columns of a record, including silo and user.
        contents: (n,) hash of the features and the target of a record.
        otherwise: number of invalid cells, by column, that differ from a declared value only in case.
    """

    schema: Schema
    user: list[str | None]
    silo: list[str | None]
    columns: dict[str, Column]
    rows: UInt64[np.ndarray, "n"]
    contents: UInt64[np.ndarray, "n"]
    otherwise: Mapping[str, int]

    def __len__(self) -> int:
        """Return n, the number of records."""
        return len(self.user)


def read_whole(schema: Schema, files: Sequence[TableFile]) -> WholeTable:
    """Read all columns of a schema without refusing a cell.

    Raises:
        ConfigError: two files would be one silo, which a run refuses.
        DataError: a file cannot be read or lacks a column.
    """
    check_files(schema, files)
    user: list[str | None] = []
    silo: list[str | None] = []
    parts: dict[str, list[Column]] = {name: [] for name in (*schema.target_columns, *schema.features)}
    texts: dict[str, list[pa.Array]] = {name: [] for name in schema.columns}
    otherwise: Counter[str] = Counter()
    for path in files:
        reader = TableReader.by_schema(schema, path, schema.columns, tolerant=schema.bins_invalid)
        for name in schema.columns:
            text, missing = reader.text(name)
            texts[name].append(pc.if_else(pa.array(missing), None, text))
        user += reader.ids(schema.user)
        silo += [path.stem] * reader.n_records if schema.silo is None else reader.ids(schema.silo)
        for name, found in parts.items():
            column = _column(schema, reader, name)
            if declared := _declared(schema, name):
                otherwise[name] += _other_case(column, texts[name][-1], declared)
            found.append(column)
    hashes = {
        name: _hashed(pa.concat_arrays(cells), place) for place, (name, cells) in enumerate(texts.items(), 1)
    }
    contents = [hashes[name] for name in schema.read_columns(parts)]
    return WholeTable(
        schema=schema,
        user=user,
        silo=silo,
        columns={name: concatenate_columns(found) for name, found in parts.items()},
        rows=_summed(list(hashes.values())),
        contents=_summed(contents),
        otherwise=otherwise,
    )


def _column(schema: Schema, reader: TableReader, name: str) -> Column:
    """Read one column as categories, numbers or days, without refusing a cell."""
    feature: Feature | None = schema.features.get(name)
    if declared := _declared(schema, name):
        return places_of(reader, name, declared)
    if not isinstance(feature, Date):
        return _as_runs_read(schema, name, numbers_of(reader, name))
    days, missing = reader.dates(name, feature.format)
    state = np.where(missing, State.MISSING, np.where(np.isnan(days), State.INVALID, State.VALID))
    return Numbers(values=np.where(state == State.VALID, days, 0.0), state=state.astype(np.int8))


def _as_runs_read(schema: Schema, name: str, found: Numbers) -> Numbers:
    """Mark as invalid the numbers that a run refuses: infinities, and times and entries below 0."""
    values, target = found.values, schema.target
    wrong = ~np.isfinite(values)
    if isinstance(target, Survival) and name in (target.time, target.entry):
        wrong |= values < 0
    state = np.where((found.state == State.VALID) & wrong, State.INVALID, found.state).astype(np.int8)
    return Numbers(values=np.where(state == State.VALID, values, 0.0), state=state)


def _declared(schema: Schema, name: str) -> tuple[str, ...]:
    """Return the declared values of a column; empty for a number or a date."""
    feature = schema.features.get(name)
    if isinstance(feature, Category):
        return feature.categories
    target = schema.target
    labels = isinstance(target, Labels) and name in target.columns
    if labels or (isinstance(target, Survival) and name == target.event):
        return EVENTS
    return target.classes if isinstance(target, Label) and name == target.column else ()


def _other_case(column: Column, cells: pa.Array, declared: Sequence[str]) -> int:
    """Return the number of invalid cells that equal a declared value except for case."""
    lowered = pa.array([one.lower() for one in declared], pa.string())
    same = np.asarray(pc.fill_null(pc.is_in(pc.utf8_lower(cells), lowered), False), dtype=np.bool_)
    return int((same & (column.state == State.INVALID)).sum())


def _hashed(cells: pa.Array, place: int) -> UInt64[np.ndarray, "n"]:
    """Return a 64-bit hash of each cell: a uniform random word per distinct text of the column.

    The hash of a row is the sum of its cells' hashes modulo 2^64 (:func:`_summed`). Two unequal rows have equal sums
    with probability 2^-64.
    """
    # `place` seeds each column separately. With one seed for all columns, two rows that exchange the values of two
    # columns could have equal sums.
    coded = cells.dictionary_encode(null_encoding="encode")
    random = np.random.default_rng((7, place)).integers(
        0, 1 << 64, max(1, len(coded.dictionary)), dtype=np.uint64
    )
    chosen: UInt64[np.ndarray, "n"] = random[coded.indices.to_numpy(zero_copy_only=False)]
    return chosen


def _summed(hashes: list[UInt64[np.ndarray, "n"]]) -> UInt64[np.ndarray, "n"]:
    """Return the sum of the hashes of every row, modulo 2^64."""
    total: UInt64[np.ndarray, "n"] = np.stack(hashes).sum(axis=0, dtype=np.uint64)
    return total
