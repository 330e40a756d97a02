"""A user's own tables, CSV or Parquet, read by a public schema into a population.

Either each silo has its own file, named after it, or one or more files have a silo column. Records are
counted from 1, without the header, in every error. No error repeats a value.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from fedveil.errors import ConfigError, DataError
from fedveil.files import check_file
from fedveil.foreign import foreign
from fedveil.population.identities import keys_of, numbered
from fedveil.population.records import Population, Records, Targets, Task
from fedveil.population.schema import MISSING_VALUES, Category, Label, Number, Schema, Survival
from fedveil.population.splits import holdout_by_user
from fedveil.randomness import ExperimentRandomness

TASKS: dict[str, Task] = {"label": "classification", "number": "regression", "survival": "survival"}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """What one file holds, before users and silos of all files are numbered together; it may be no record at all."""

    features: Float32[np.ndarray, "n d"]
    targets: Targets
    silo: tuple[str, ...] | list[str]
    user: list[str]


def read_tables(
    schema: Schema,
    files: Sequence[Path],
    *,
    test: Path | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    name: str = "tables",
) -> Population:
    """Read tables into a population.

    Args:
        schema: what the columns are.
        files: CSV (``.csv``) or Parquet (``.parquet``) files; without a silo column each is a silo, named by
            the file's stem.
        test: a table for testing; its user and silo columns are not read. None holds records out of the
            training tables.
        test_share: probability with which each record is held out where there is no test table, between 0 and 1.
        seed: of the hold-out.
        name: of the data set, in reports.

    Returns:
        The population. Users are numbered by the sorted union of their ids over all files, silos by name in
        the order of the schema's ``silos``, else sorted. A silo is one that is declared, or has a file, or, where
        there is a silo column and nothing is declared, has a record; it may hold none.

    Raises:
        ConfigError: no file, two files of one name, a share outside (0, 1).
        DataError: a file that cannot be read or lacks a column (named, with those it has); a value that does
            not fit the schema, by file, record and column; more users than ``n_users``; a test table without a
            record.

    Guarantees:
        Nothing about the private records enters another user's: scaling and categories are the schema's, and whether
        a record is held out, and what its user's batches are seeded by, depends on her id and her own records alone.
        Taking a user's records away is never refused, down to tables that are a header alone.
    """
    _check_request(schema, files, test, test_share)
    parts = [_read_part(schema, path) for path in files]
    features = np.concatenate([part.features for part in parts])
    targets = np.concatenate([part.targets for part in parts])
    users, user = numbered([who for part in parts for who in part.user])
    key = keys_of(users)[user]
    if len(users) > schema.n_users:
        raise DataError(
            f"n_users is {schema.n_users} in the schema, but {len(users)} users have records; it is the "
            "public number of "
            "all users and must not be below the number present"
        )
    silo_names, silo = silo_numbers(schema, files, [where for part in parts for where in part.silo])
    notes = [
        "Features are scaled and encoded from declared bounds and categories: nothing is fitted on records."
    ]
    if test is not None:
        test_part = _read_part(schema, test, tested=True)
        kept = np.ones(len(features), dtype=np.bool_)
        test_features, test_targets = test_part.features, test_part.targets
        notes.append(f"The test table is the declared file {test.name}; no guarantee covers its records.")
    else:
        held_out = holdout_by_user(
            user, key, test_share, ExperimentRandomness(seed).integer("tables", "test")
        )
        kept, test_features, test_targets = ~held_out, features[held_out], targets[held_out]
        notes.append(
            f"A share of {test_share} of the records, drawn at random, is held out for testing: a user may have "
            "records on both sides, and no guarantee covers the held-out ones."
        )
    if schema.silo is not None and schema.silos is None:
        notes.append(
            "The silos are those that have records: their names and their number are taken from the tables, and no "
            "guarantee covers that. Declare silos in the schema."
        )
    return Population(
        name=name,
        train=Records(
            features=features[kept], targets=targets[kept], silo=silo[kept], user=user[kept], key=key[kept]
        ),
        test_features=test_features,
        test_targets=test_targets,
        n_users=schema.n_users,
        silo_names=silo_names,
        task=TASKS[schema.target.kind],
        n_classes=len(schema.target.classes) if isinstance(schema.target, Label) else None,
        notes=tuple(notes),
    )


def read_own(schema: Schema, path: Path, *, silo: int, name: str, users: Sequence[str] | None) -> Records:
    """Read the table of one silo of a federation, where nobody sees the tables of all.

    Args:
        schema: what the columns are.
        path: the silo's own file.
        silo: the silo's number.
        name: the silo's name; where the schema has a silo column, every record must carry it.
        users: all users' ids, in the order of their numbers, as the silos agreed on it among themselves. None: the
            ids are the numbers, from 0.

    Raises:
        DataError: as :func:`read_tables`; a user without a number, or a record of another silo, named by record.
    """
    part = _read_part(schema, path)
    if schema.silo is not None:
        _refuse_first(path, schema.silo, [where != name for where in part.silo], f"is not of silo '{name}'")
    known = range(schema.n_users) if users is None else users
    number = {str(who): place for place, who in enumerate(known)}
    if len(number) != len(known) or len(number) > schema.n_users:
        raise DataError(
            f"{len(known)} users are listed, {len(number)} of them different; the schema has {schema.n_users}, "
            "and each is listed once"
        )
    place = [number.get(who, -1) for who in part.user]
    problem = (
        f"the user is no whole number below {schema.n_users}" if users is None else "the user is not listed"
    )
    _refuse_first(path, schema.user, [at < 0 for at in place], problem)
    return Records(
        features=part.features,
        targets=part.targets,
        silo=np.full(len(place), silo, dtype=np.int32),
        user=np.array(place, dtype=np.int32),
        key=keys_of(list(number))[place],
    )


def read_test(schema: Schema, path: Path) -> tuple[Float32[np.ndarray, "n d"], Targets]:
    """Read features and targets of a public test table; its user and silo columns are not read.

    Raises:
        DataError: as :func:`read_tables`.
    """
    part = _read_part(schema, path, tested=True)
    return part.features, part.targets


def read_features_by_schema(schema: Schema, path: Path) -> Float32[np.ndarray, "n width"]:
    """Read the features of a table alone, encoded as for training; no other column is read.

    Raises:
        DataError: as :func:`read_tables`.
    """
    table = open_table(path, tuple(schema.features))
    if table.num_rows == 0:
        return np.zeros((0, schema.width), dtype=np.float32)
    reader = TableReader(path, table, schema.missing_values)
    return np.concatenate([reader.encode(name, feature) for name, feature in schema.features.items()], axis=1)


def read_number_columns(path: Path, columns: Sequence[str] | None) -> Float32[np.ndarray, "n width"]:
    """Read columns of numbers as they are, in this order (None: all, in theirs).

    Raises:
        DataError: as :func:`read_tables`; a number that is missing.
    """
    table = open_table(path, columns)
    if table.num_rows == 0:
        return np.zeros((0, table.num_columns), dtype=np.float32)
    reader = TableReader(path, table, MISSING_VALUES)
    return np.stack([reader.number(name) for name in columns or table.column_names], axis=1)


def _refuse_first(path: Path, column: str, wrong: list[bool], problem: str) -> None:
    """Raise the error of the first wrong record, if any."""
    if any(wrong):
        raise DataError(
            f"{path}, record {wrong.index(True) + 1} (the header not counted), column '{column}': {problem}"
        )


def _check_request(schema: Schema, files: Sequence[Path], test: Path | None, test_share: float) -> None:
    if not files:
        raise ConfigError("no table is named; give one file per silo, or one with a silo column")
    stems = [path.stem for path in files]
    twice = [stem for stem in stems if stems.count(stem) > 1]
    if schema.silo is None and twice:
        raise ConfigError(
            f"two files would both be silo '{twice[0]}'; without a silo column each file names a silo"
        )
    if test is None and not 0 < test_share < 1:
        raise ConfigError(
            f"the share of records held out for testing must be between 0 and 1, not {test_share}"
        )


def open_table(path: Path, columns: Sequence[str] | None) -> pa.Table:
    """Read these columns of a CSV or Parquet file (None: all of them), CSV cells as text.

    Raises:
        DataError: no such file, another format, or a column that is missing (named, with those the file has).
    """
    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"{path}: a table is a .csv or a .parquet file")
    check_file(path, DataError)
    try:
        if path.suffix == ".parquet":
            present = pa_parquet.read_schema(path).names
            wanted = _required_columns(path, present, columns)
            return pa_parquet.read_table(path, columns=wanted)
        with pa_csv.open_csv(path) as reader:
            present = reader.schema.names
        wanted = _required_columns(path, present, columns)
        as_text = pa_csv.ConvertOptions(
            include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()), strings_can_be_null=False
        )
        return pa_csv.read_csv(path, convert_options=as_text)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or 'damaged'}") from error
    except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError) as error:
        raise DataError(f"{path} is damaged or no {path.suffix} file: {_without_values(error)}") from error


def _required_columns(path: Path, present: list[str], columns: Sequence[str] | None) -> list[str]:
    """The columns to read, each of which the file must have once."""
    wanted = list(present if columns is None else columns)
    for column in wanted:
        if present.count(column) != 1:
            raise DataError(
                f"{path} has {present.count(column) or 'no'} column '{column}', and exactly one is needed; "
                f"it has: {foreign(', '.join(present))}"
            )
    return wanted


def _without_values(error: Exception) -> str:
    """What Arrow says was wrong, without the cells that it quotes."""
    uneven = re.match(r"CSV parse error: (Row #\d+: )?Expected \d+ columns, got \d+", str(error))
    return uneven.group() if uneven else str(error).split(":")[0]


def _read_part(schema: Schema, path: Path, tested: bool = False) -> _Part:
    """Read one file; ``tested`` leaves user and silo out."""
    columns = (*schema.target_columns, *schema.features) if tested else schema.columns
    table = open_table(path, columns)
    if tested and table.num_rows == 0:
        raise DataError(f"{path} has no record; a test table needs at least one")
    if table.num_rows == 0:  # columns without a value may have any type, or none
        table = pa.table({name: pa.array([], pa.string()) for name in table.column_names})
    reader = TableReader(path, table, schema.missing_values)
    features = [reader.encode(column, feature) for column, feature in schema.features.items()]
    if tested:
        silo, user = [""] * table.num_rows, [""] * table.num_rows
    else:
        user = reader.identities(schema.user)
        silo = reader.identities(schema.silo) if schema.silo is not None else [path.stem] * table.num_rows
    return _Part(
        features=np.concatenate(features, axis=1), targets=reader.targets(schema), silo=silo, user=user
    )


def text_cells(column: pa.ChunkedArray, missing_values: pa.Array) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
    """Cells as text without surrounding blanks, and which are missing: null, or a declared missing value."""
    cells = column.combine_chunks()
    if pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if pa.types.is_boolean(cells.type):
        cells = cells.cast(pa.int8())
    try:
        text = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"a column of type {cells.type} holds neither numbers nor text") from error
    missing = pc.or_(pc.is_null(text), pc.is_in(text, missing_values))
    return text, np.asarray(missing, dtype=np.bool_)


class TableReader:
    """Turns columns of one file into arrays; every error names file, record and column."""

    def __init__(self, path: Path, table: pa.Table, missing_values: Sequence[str]) -> None:
        self._path = path
        self._table = table
        self._missing_values = pa.array(missing_values, pa.string())

    def encode(self, column: str, feature: Number | Category) -> Float32[np.ndarray, "n width"]:
        """Return a column's features by its declaration."""
        return (
            self._scaled(column, feature) if isinstance(feature, Number) else self._one_hot(column, feature)
        )

    def number(self, column: str) -> Float32[np.ndarray, "n"]:
        """Return a column of numbers as it is."""
        values, missing = self._numbers(column)
        self._refuse(missing, column, "the value is missing; the model was trained without missing values")
        self._refuse(np.abs(values) > np.finfo(np.float32).max, column, "the value is too large for float32")
        return values.astype(np.float32)

    def identities(self, column: str) -> list[str]:
        """Return the ids of a user or silo column as text; strings and integers are ids, nothing else.

        Raises:
            DataError: a missing id, or a column of another type.
        """
        kind = self._table.schema.field(column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
            raise DataError(f"{self._path}, column '{column}': ids are text or whole numbers, not {kind}")
        cells, missing = self._text(column)
        self._refuse(missing, column, "the id is missing; every record needs one")
        return [str(cell) for cell in cells.to_pylist()]

    def targets(self, schema: Schema) -> Targets:
        """Return labels, numbers, or (event, time)."""
        target = schema.target
        if isinstance(target, Label):
            return self._classes(target)
        if isinstance(target, Survival):
            event, time = self._required(target.event), self._required(target.time)
            self._refuse((event != 0) & (event != 1), target.event, "the event must be 0 or 1")
            self._refuse(time < 0, target.time, "the time must not be negative")
            return np.stack((event, time), axis=1).astype(np.float32)
        return self._required(target.column).astype(np.float32)

    def _scaled(self, column: str, feature: Number) -> Float32[np.ndarray, "n width"]:
        values, missing = self._numbers(column)
        if feature.missing == "error":
            self._refuse(
                missing, column, "the value is missing; declare `missing` in the schema if that may be"
            )
        clipped = np.clip(values, feature.lower, feature.upper)
        scaled = 2 * (clipped - feature.lower) / (feature.upper - feature.lower) - 1
        scaled[missing] = 0.0
        columns = (scaled, missing) if feature.missing == "indicator" else (scaled,)
        return np.stack(columns, axis=1).astype(np.float32)

    def _one_hot(self, column: str, feature: Category) -> Float32[np.ndarray, "n width"]:
        place, missing = self.places(column, feature.categories)
        if feature.missing == "error":
            self._refuse(
                missing, column, "the value is missing; declare `missing` in the schema if that may be"
            )
        if feature.unknown == "error":
            self._refuse((place < 0) & ~missing, column, "the value is not among the declared categories")
        encoded = place[:, None] == np.arange(len(feature.categories))
        columns = (encoded, missing) if feature.missing == "indicator" else (encoded,)
        return np.column_stack(columns).astype(np.float32)

    def _classes(self, target: Label) -> Int64[np.ndarray, "n"]:
        place, missing = self.places(target.column, target.classes)
        self._refuse(missing, target.column, "the label is missing")
        self._refuse(place < 0, target.column, "the label is not among the declared classes")
        return place

    def _required(self, column: str) -> Float64[np.ndarray, "n"]:
        values, missing = self._numbers(column)
        self._refuse(missing, column, "the target is missing")
        self._refuse(np.abs(values) > np.finfo(np.float32).max, column, "the target is too large for float32")
        return values

    def places(
        self, column: str, declared: Sequence[str]
    ) -> tuple[Int64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Place of every cell in a declared list, -1 where it is not in it; and which cells are missing."""
        cells, missing = self._text(column)
        place = pc.fill_null(pc.index_in(cells, pa.array(declared, pa.string())), -1)
        return np.where(missing, -1, place.to_numpy(zero_copy_only=False)).astype(np.int64), missing

    def _numbers(self, column: str) -> tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Values of a numeric column, 0 where missing; and which are missing."""
        values, missing = self.cells(column)
        if not pa.types.is_floating(values.type):
            values = self._parsed(column, pc.if_else(pa.array(missing), None, values), missing)
        numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        numbers[missing] = 0.0
        self._refuse(~np.isfinite(numbers), column, "the value is infinite")
        return numbers, missing

    def _parsed(self, column: str, cells: pa.Array, missing: Bool[np.ndarray, "n"]) -> pa.Array:
        """Text cells as numbers; the first that is none is looked for only where Arrow refuses the column."""
        try:
            return pc.cast(cells, pa.float64())
        except pa.ArrowInvalid:
            values = pa.array([number_of(cell) for cell in cells.to_pylist()], pa.float64())
            self._refuse(np.asarray(values.is_null()) & ~missing, column, "the value is no number")
            return values

    def cells(self, column: str) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
        """Cells as they are, float64 of a numeric column and else text; and which are missing."""
        kind = self._table.schema.field(column).type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind):
            values = self._table.column(column).combine_chunks().cast(pa.float64(), safe=False)
            return values, np.asarray(values.is_null(nan_is_null=True), dtype=np.bool_)
        return self._text(column)

    def _text(self, column: str) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
        try:
            return text_cells(self._table.column(column), self._missing_values)
        except DataError as error:
            raise DataError(f"{self._path}, column '{column}': {error}") from error

    def _refuse(self, wrong: Bool[np.ndarray, "n"], column: str, problem: str) -> None:
        """Raise the error of the first wrong cell, if any."""
        if wrong.any():
            record = int(np.argmax(wrong)) + 1
            raise DataError(
                f"{self._path}, record {record} (the header not counted), column '{column}': {problem}"
            )


def number_of(cell: str | None) -> float | None:
    """A cell as a number, None if it is none."""
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def silo_numbers(
    schema: Schema, files: Sequence[Path], names: list[str]
) -> tuple[tuple[str, ...], Int32[np.ndarray, "n"]]:
    """Silo names and the silo number of every record; a file that is a silo's is one without a record too."""
    known = sorted({path.stem for path in files} if schema.silo is None else set(names))
    silos = tuple(known) if schema.silos is None else schema.silos
    for silo in known:
        if silo not in silos:
            raise DataError(f"silo '{silo}' is not among the silos of the schema: {', '.join(silos)}")
    number = {silo: place for place, silo in enumerate(silos)}
    return silos, np.array([number[name] for name in names], dtype=np.int32)
