"""One table, CSV or Parquet, read column by column: cells as text or numbers, encoded as a schema declares.

Records are counted from 1, without the header, in every error. No error repeats a value.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from jaxtyping import Bool, Float32, Float64, Int64

from fedveil.errors import DataError
from fedveil.files import check_file
from fedveil.foreign import foreign
from fedveil.population.records import Targets
from fedveil.population.schema import Category, Label, Number, Schema, Survival


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
        _check_quotes(path)
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


def _check_quotes(path: Path) -> None:
    """Return if every line of a CSV file is whole: with an even number of quotation marks.

    A cell that goes on in the next line would make one record of many, or, where a reader takes the file in blocks,
    many of one, by where it stands: one person's cell would decide which records of others there are.

    Raises:
        DataError: a line that is not whole, by its number.
    """
    with path.open(encoding="latin-1") as lines:  # every ending of lines is one, as it is for the reader
        for number, line in enumerate(lines, start=1):
            if line.count('"') % 2:
                raise DataError(
                    f"{path}, line {number}: an odd number of quotation marks; write a cell in one line, and a mark "
                    "inside of it twice"
                )


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
