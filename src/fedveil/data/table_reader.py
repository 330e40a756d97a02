"""Reader of the columns of one table: cells as text, numbers or dates, encoded by a schema.

Errors count records from 1, without the header, and repeat no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float32, Float64, Int64

from fedveil.data.cell_values import (
    USUAL_MARKS,
    DeclaredValues,
    NumberMarks,
    day_of,
    number_of,
    whole_number,
    without_fraction,
)
from fedveil.data.memory_tables import MemoryTable, TableFile, refuse_memory_path
from fedveil.data.records import Targets
from fedveil.data.schema import (
    ISO_DATE,
    Amount,
    Amounts,
    Category,
    Date,
    Duration,
    Feature,
    Label,
    Labels,
    Number,
    Schema,
    Survival,
)
from fedveil.data.table_file import (
    EXCEL_CELL,
    REPLACED,
    LackingColumnsError,
    open_pieces,
    select_columns,
    without_days,
)
from fedveil.errors import DataError
from fedveil.sanitize import sanitize

EVENTS: Final = ("0", "1")
"""Declared values of a survival event: "0" for a censored record, "1" for the event."""


def text_cells(column: pa.ChunkedArray, missing_values: pa.Array) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
    """Return the cells as text without surrounding blanks, and the mask of missing cells.

    A cell is missing if it is null or equals a declared missing value. Bytes that are no text become U+FFFD.

    Raises:
        DataError: the column holds durations, or values that are neither numbers nor text.
    """
    cells = without_days(column)
    if pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if pa.types.is_duration(cells.type):
        raise DataError(
            f"a column of type {cells.type} holds durations, which are no numbers without a unit; write it as a column "
            "of numbers, of days, say"
        )
    if pa.types.is_boolean(cells.type):
        cells = cells.cast(pa.int8())
    if pa.types.is_binary(cells.type) or pa.types.is_large_binary(cells.type):
        # One by one: a cast of the whole column is refused where a single cell has bytes that are no text.
        decoded = [None if one is None else one.decode(errors="replace") for one in cells.to_pylist()]
        cells = pa.array(decoded, pa.string())
    try:
        text = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    except (pa.ArrowException, ValueError, TypeError):
        raise DataError(f"a column of type {cells.type} holds neither numbers nor text") from None
    missing = pc.or_(pc.is_null(text), pc.is_in(text, missing_values))
    return text, np.asarray(missing, dtype=np.bool_)


def _tables(schema: Schema, path: TableFile, columns: Sequence[str], *, tolerant: bool) -> Iterator[pa.Table]:
    """Yield columns of a file in the format that the schema declares for it; a Parquet file some records at a time."""
    written, lacked, columns = schema.format_of(path.name), schema.may_lack, schema.read_columns(columns)
    try:
        if isinstance(path, MemoryTable):
            yield select_columns(path, path.table, columns, lacked)
        else:
            refuse_memory_path(path)
            yield from open_pieces(path, columns, written, tolerant=tolerant, may_lack=lacked)
    except LackingColumnsError as error:
        if not schema.features.keys() >= set(error.columns):
            raise
        absent = "a feature that some table does not have is declared with absent = 'missing'"
        raise DataError(f"{error}; {absent}") from None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _pointed(cells: pa.Array, marks: NumberMarks) -> pa.Array:
    """Return :meth:`NumberMarks.pointed` of every cell."""
    if marks.thousands is not None:
        plain = pc.replace_substring_regex(cells, marks.between_groups, "")
        cells = pc.if_else(pc.match_substring_regex(cells, marks.grouped), plain, cells)
    if marks.decimal == ".":
        return cells
    return pc.replace_substring(pc.replace_substring(cells, ".", "?"), marks.decimal, ".")


class TableReader:
    """Converts the columns of one file to arrays; every error names file, record and column.

    Args:
        path: the table, named in errors.
        table: the columns of the file.
        missing_values: texts of cells that count as missing.
        marks: decimal and thousands mark of numbers that are text.
        binned: whether a cell that its declaration does not allow is counted as invalid instead of refused. An
            invalid feature is encoded in a feature of its own; a record with an invalid target is left out.
        spellings: alternative spellings by column, each mapped to its declared value.
    """

    def __init__(
        self,
        path: TableFile,
        table: pa.Table,
        missing_values: Sequence[str],
        marks: NumberMarks = USUAL_MARKS,
        *,
        binned: bool = False,
        spellings: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        if table.num_rows == 0:  # columns without a value may have any type, or none
            table = pa.table({name: pa.array([], pa.string()) for name in table.column_names})
        self._path = path
        self._table = table
        self._missing_values = pa.array(missing_values, pa.string())
        self._marks = marks
        self._date: str | None = (
            None  # format of all dates of the file that are text; None: that of the column
        )
        numbers = self.parse_numbers(self._missing_values)
        self._missing_numbers = numbers.filter(pc.invert(pc.is_nan(numbers)))
        self._binned, self._spellings = binned, spellings
        self._first = 0  # place of the first record in the file
        self._durations: Mapping[str, Duration] = {}
        self._invalid: dict[str, Bool[np.ndarray, "n"]] = {}

    @classmethod
    def by_schema(
        cls, schema: Schema, path: TableFile, columns: Sequence[str], *, tolerant: bool, binned: bool = False
    ) -> TableReader:
        """Open columns of a file in the format that the schema declares for it.

        Args:
            schema: declaration of the columns and of the files' formats.
            path: the file.
            columns: columns to read; of a time between two dates, its name stands for both.
            tolerant: whether undecodable bytes are read as U+FFFD instead of refused (:func:`open_pieces`).
            binned: whether invalid cells are counted instead of refused.

        Raises:
            DataError: as :func:`open_pieces`.
        """
        whole = pa.concat_tables(_tables(schema, path, columns, tolerant=tolerant))
        return cls._of_schema(schema, path, whole, binned=binned)

    @classmethod
    def pieces_by_schema(
        cls, schema: Schema, path: TableFile, columns: Sequence[str], *, tolerant: bool, binned: bool = False
    ) -> Iterator[TableReader]:
        """Open columns of a file as :meth:`by_schema`, some records at a time if the file is Parquet.

        Every cell is read by itself, so that the values do not depend on the pieces.
        """
        first = 0
        for table in _tables(schema, path, columns, tolerant=tolerant):
            reader = cls._of_schema(schema, path, table, binned=binned)
            reader._first = first
            yield reader
            first += table.num_rows

    @classmethod
    def _of_schema(cls, schema: Schema, path: TableFile, table: pa.Table, *, binned: bool) -> TableReader:
        reader = cls(
            path,
            table,
            schema.missing_values_of(path.name),
            schema.format_of(path.name).marks,
            binned=binned,
            spellings=schema.spellings,
        )
        reader._durations, reader._date = schema.durations, schema.format_of(path.name).date
        return reader

    @property
    def n_records(self) -> int:
        """Number of records of the file."""
        return int(self._table.num_rows)

    def encode(self, column: str, feature: Feature) -> Float32[np.ndarray, "n width"]:
        """Encode a column as (n, width) features by its declaration.

        If the reader is binned, the last feature marks invalid cells.
        """
        encoded = (
            self._one_hot(column, feature) if isinstance(feature, Category) else self._scaled(column, feature)
        )
        if not self._binned:
            return encoded
        wrong = self.invalid(column)  # filled by the encoding above
        encoded[wrong] = 0.0
        return np.column_stack((encoded, wrong)).astype(np.float32)

    def invalid(self, *columns: str) -> Bool[np.ndarray, "n"]:
        """Return the (n,) mask of records with an invalid cell in one of these columns.

        Only columns that were encoded or read as a target count: the mask is filled during reading.
        """
        found = np.zeros(self.n_records, dtype=np.bool_)
        for column in columns:
            found |= self._invalid.get(column, False)
        return found

    def number(self, column: str) -> Float32[np.ndarray, "n"]:
        """Return a numeric column without scaling.

        Raises:
            DataError: a value is missing, no number, or too large for float32.
        """
        values, missing = self._numbers(column)
        self._refuse(missing, column, "the value is missing; the model was trained without missing values")
        self._refuse(np.abs(values) > np.finfo(np.float32).max, column, "the value is too large for float32")
        return values.astype(np.float32)

    def identities(self, column: str) -> list[str]:
        """Return the ids of a user or silo column as text; only strings and integers are ids.

        A fraction of zeros is stripped (:func:`without_fraction`): ``7.0`` is 7, and ``07`` is another id.

        Raises:
            DataError: an id is missing or has undecodable bytes, or the column (in an Excel file: a cell) has another
                type.
        """
        kind = self._table.schema.field(column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind == EXCEL_CELL:
            fit = self._table.column(column).combine_chunks().field("id").to_numpy(zero_copy_only=False)
            self._refuse(~fit, column, "ids are text or whole numbers below 2^53")
        elif not (_is_text(kind) or pa.types.is_integer(kind)):
            raise DataError(f"{self._path}, column '{column}': ids are text or whole numbers, not {kind}")
        ids = self.ids(column)
        missing = np.array([one is None for one in ids], dtype=np.bool_)
        self._refuse(missing, column, "the id is missing; every record needs one")
        unknown = np.array(
            [REPLACED in (one or "") for one in ids], dtype=np.bool_
        )  # two different undecodable ids may look equal after the replacement
        self._refuse(unknown, column, "the id has bytes that are no text")
        return [str(one) for one in ids]

    def ids(self, column: str) -> list[str | None]:
        """Return the cells of a user or silo column as ids, None for a cell without an id; no cell is refused."""
        cells, missing = self.text(column)
        found = [
            None if gone else self._plain(one) for one, gone in zip(cells.to_pylist(), missing, strict=True)
        ]
        nothing = frozenset(self._missing_values.to_pylist())
        return [None if one in nothing else one for one in found]

    def targets(self, schema: Schema) -> Targets:
        """Return the targets: (n,) int64 labels, (n,) float32 numbers, or (n, k) float32.

        The k columns are (event, time) or (event, time, entry), k labels, each 0 or 1, or k numbers.
        """
        target = schema.target
        if isinstance(target, Label):
            return self._classes(target)
        if isinstance(target, Survival):
            return self._survival(target)
        if isinstance(target, Labels):
            labels = [self._zero_or_one(column, "label", "label") for column in target.columns]
            return np.stack(labels, axis=1).astype(np.float32)
        numbers = [self._amount(one) for one in schema.amounts.values()]
        return np.stack(numbers, axis=1) if isinstance(target, Amounts) else numbers[0]

    def _survival(self, target: Survival) -> Float32[np.ndarray, "n k"]:
        """Return (event, time), and the entry if one is declared; count times below 0 and entries after the time."""
        dated = bool(target.durations)
        before = f"the date is before '{target.start}', the start of follow-up"
        event, time = self._zero_or_one(target.event, "target", "event"), self._required(target.time)
        self._count(time < 0, target.end or target.time, before if dated else "the time must not be negative")
        if target.entry is None:
            return np.stack((event, time), axis=1).astype(np.float32)
        found = np.stack((event, time, self._required(target.entry)), axis=1).astype(np.float32)
        self._count(found[:, 2] < 0, target.entry, before if dated else "the entry must not be negative")
        late = f"the entry must be before the {'end' if dated else 'time'} ('{target.end or target.time}')"
        self._count(found[:, 2] >= found[:, 1], target.entry, late)
        return found

    def _amount(self, target: Amount) -> Float32[np.ndarray, "n"]:
        """Return a column of numbers to predict, clipped if declared; count those outside of their bounds."""
        values = self._required(target.column)
        if target.count:
            self._count(
                values != np.floor(values), target.column, "the target is a count, and this is a fraction"
            )
        if target.bounds is not None:
            inside = np.clip(values, *target.bounds)
            if target.outside == "error":
                lower, upper = target.bounds
                self._count(
                    inside != values,
                    target.column,
                    f"the target is outside of its bounds, {lower:g} to {upper:g}",
                )
            values = inside
        return values.astype(np.float32)

    def _scaled(self, column: str, feature: Number | Date) -> Float32[np.ndarray, "n width"]:
        values, missing = (
            self._numbers(column) if isinstance(feature, Number) else self._days(column, feature)
        )
        if feature.missing == "error":
            self._count(
                missing, column, "the value is missing; declare `missing` in the schema if that may be"
            )
        lower, upper = feature.bounds
        # x in [lower, upper] becomes 2 (x - lower) / (upper - lower) - 1 in [-1, 1].
        scaled = 2 * (np.clip(values, lower, upper) - lower) / (upper - lower) - 1
        scaled[missing] = feature.fill_value
        columns = (scaled, missing) if feature.missing == "indicator" else (scaled,)
        return np.stack(columns, axis=1).astype(np.float32)

    def _one_hot(self, column: str, feature: Category) -> Float32[np.ndarray, "n width"]:
        place, missing = self.places(column, feature.categories)
        if feature.missing == "error":
            self._count(
                missing, column, "the value is missing; declare `missing` in the schema if that may be"
            )
        if feature.unknown == "error":
            self._count((place < 0) & ~missing, column, "the value is not among the declared categories")
        encoded = place[:, None] == np.arange(len(feature.categories))
        columns = (encoded, missing) if feature.missing == "indicator" else (encoded,)
        return np.column_stack(columns).astype(np.float32)

    def _classes(self, target: Label) -> Int64[np.ndarray, "n"]:
        place, missing = self.places(target.column, target.classes)
        self._count(missing, target.column, "the label is missing")
        self._count(place < 0, target.column, "the label is not among the declared classes")
        found: Int64[np.ndarray, "n"] = np.maximum(place, 0)
        return found

    def _zero_or_one(self, column: str, what: str, of: str) -> Int64[np.ndarray, "n"]:
        place, missing = self.places(column, EVENTS)
        self._count(missing, column, f"the {what} is missing")
        self._count((place < 0) & ~missing, column, f"the {of} must be 0 or 1")
        found: Int64[np.ndarray, "n"] = np.maximum(place, 0)
        return found

    def _required(self, column: str) -> Float64[np.ndarray, "n"]:
        values, missing = self._numbers(column)
        self._count(missing, column, "the target is missing")
        # Replaced by 0 below: with bins no error is raised, and the value would overflow in float32.
        large = np.abs(values) > np.finfo(np.float32).max
        self._count(large, column, "the target is too large for float32")
        return np.where(large, 0.0, values)

    def places(
        self, column: str, declared: Sequence[str]
    ) -> tuple[Int64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the index of every cell in a declared list (-1 if unlisted), and the mask of missing cells.

        A cell is matched by its text. An undeclared text is matched by its value, as a whole number or a truth value
        (:class:`DeclaredValues`). Both rules apply to missing values as well.
        """
        cells, missing = self.text(column)
        meant = {one: place for place, one in enumerate(declared)}
        meant |= {one: meant[other] for one, other in self._spellings.get(column, {}).items()}
        place = pa.array(list(meant.values()), pa.int32()).take(
            pc.index_in(cells, pa.array(list(meant), pa.string()))
        )
        rest = pc.and_(pc.is_null(place), pa.array(~missing))
        if pc.any(rest).as_py():
            other = pc.unique(cells.filter(rest))  # parse each distinct text once
            by_value, gone = self._by_value(other.to_pylist(), meant)
            at = pc.index_in(cells, other)
            place = pc.coalesce(place, by_value.take(at))
            missing = missing | np.asarray(pc.fill_null(pc.and_(rest, gone.take(at)), False), dtype=np.bool_)
        found = pc.fill_null(place, -1).to_numpy(zero_copy_only=False)
        return np.where(missing, -1, found).astype(np.int64), missing

    def _by_value(self, cells: Sequence[str], declared: Mapping[str, int]) -> tuple[pa.Array, pa.Array]:
        """Return the index of every text by its value (null if none), and whether it is a missing value.

        A value that is both declared and missing gets neither an index nor the mark of a missing value.
        """
        found = DeclaredValues(declared, self._marks)
        missing = {whole_number(one, self._marks) for one in self._missing_values.to_pylist()} - {None}
        places = [found.place(one) for one in cells]
        gone = [whole_number(one, self._marks) in missing for one in cells]
        kept = [None if is_gone else place for place, is_gone in zip(places, gone, strict=True)]
        lost = [is_gone and place is None for place, is_gone in zip(places, gone, strict=True)]
        return pa.array(kept, pa.int32()), pa.array(lost, pa.bool_())

    def _plain(self, cell: str) -> str:
        return without_fraction(cell, self._marks)

    def _numbers(self, column: str) -> tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the values of a numeric column, 0 if missing or infinite, and the mask of missing cells."""
        values, missing = self.cells(column)
        if not pa.types.is_floating(values.type):
            values = self._parsed(column, pc.if_else(pa.array(missing), None, values), missing)
            missing = missing | self.standing_for_none(values)
        numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        numbers[missing] = 0.0
        dates = self._durations.get(column)
        self._count(
            ~np.isfinite(numbers),
            column,
            "the value is infinite"
            if dates is None
            else f"the start ('{dates.start}') or the end ('{dates.end}') is no date as {self._date or dates.format}",
        )
        return np.where(np.isfinite(numbers), numbers, 0.0), missing

    def _days(self, column: str, feature: Date) -> tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the days since 1970-01-01 (0 if missing or no date), and the mask of missing cells."""
        days, missing = self.dates(column, feature.format)
        self._count(
            np.isnan(days) & ~missing, column, f"the value is no date as {self._date or feature.format}"
        )
        return np.where(np.isnan(days), 0.0, days), missing

    def dates(self, column: str, written: str) -> tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the days since 1970-01-01 (NaN if missing or no date), and the mask of missing cells.

        Args:
            column: the column.
            written: its format; one of the whole file takes its place.
        """
        written = self._date or written
        cells = self._table.column(column).combine_chunks()
        if pa.types.is_date(cells.type) or pa.types.is_timestamp(cells.type):
            days = cells.cast(pa.date32(), safe=False).cast(pa.int32())
            missing = np.asarray(cells.is_null(), dtype=np.bool_)
        else:
            text, missing = self.text(column)
            coded = text.dictionary_encode()
            plain = [
                self._plain(one) for one in coded.dictionary.to_pylist()
            ]  # a program that reads the column as floats writes 20200131 as 20200131.0
            found = [day_of(one, written) for one in coded.dictionary.to_pylist()]
            found = [
                day_of(one, written) if day is None else day for one, day in zip(plain, found, strict=True)
            ]
            days = pa.array(found, pa.int32()).take(coded.indices)
            gone = pc.is_in(pa.array(plain, pa.string()), self._missing_values).take(coded.indices)
            missing = missing | np.asarray(pc.fill_null(gone, False), dtype=np.bool_)
            if cells.type == EXCEL_CELL:
                days = pc.coalesce(cells.field("day").cast(pa.int32()), days)
        missing = missing | np.asarray(pc.is_in(days, self._missing_days(written)), dtype=np.bool_)
        return pc.fill_null(days.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False), missing

    def _missing_days(self, written: str) -> pa.Array:
        """Return the days of the declared missing values, read in this format or else in ISO 8601."""
        marks = self._missing_values.to_pylist()
        days = [day_of(one, written) for one in marks], [day_of(one, ISO_DATE) for one in marks]
        return pc.drop_null(pc.coalesce(*(pa.array(one, pa.int32()) for one in days)))

    def _parsed(self, column: str, cells: pa.Array, missing: Bool[np.ndarray, "n"]) -> pa.Array:
        """Convert text cells to numbers; refuse or count a cell that is neither missing nor a number."""
        values = self.parse_numbers(cells)
        self._count(
            np.asarray(values.is_null()) & ~missing,
            column,
            f"the value is no number ({self._marks.described()})",
        )
        return values

    def parse_numbers(self, cells: pa.Array) -> pa.Array:
        """Convert text cells to float64, null for a cell that is no number.

        Cells are converted one by one only if Arrow cannot convert the whole column.
        """
        cells = _pointed(cells, self._marks)
        try:
            return pc.cast(cells, pa.float64())
        except pa.ArrowInvalid:
            return pa.array([number_of(cell) for cell in cells.to_pylist()], pa.float64())

    def cells(self, column: str) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
        """Return the cells, as float64 for a numeric column and else as text, and the mask of missing cells.

        A time between two dates is missing if one of them is, and NaN if one is no date.
        """
        if column in self._durations:
            first, last, written, unit = self._durations[column]
            (start, unknown), (end, missing) = (self.dates(one, written) for one in (first, last))
            return pa.array((end - start) / unit), missing | unknown
        kind = self._table.schema.field(column).type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
            values = self._table.column(column).combine_chunks()
            if pa.types.is_decimal(
                kind
            ):  # through its text, as in a CSV table: a direct cast to float rounds twice
                values = values.cast(pa.string())
            values = values.cast(pa.float64(), safe=False)
            missing = np.asarray(values.is_null(nan_is_null=True), dtype=np.bool_)
            return values, missing | self.standing_for_none(values, kind)
        return self.text(column)

    def standing_for_none(self, values: pa.Array, kind: pa.DataType | None = None) -> Bool[np.ndarray, "n"]:
        """Return the mask of numbers that equal a declared missing value, rounded to the column's float type."""
        marks = self._missing_numbers
        if kind is not None and pa.types.is_floating(kind):
            # A float32 column holds a declared -99.9 as its nearest float32, not as the float64 of the same text.
            marks = marks.cast(kind, safe=False).cast(pa.float64())
        return np.asarray(pc.is_in(values, marks), dtype=np.bool_)

    def text(self, column: str) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
        """Return the cells as text, and the mask of missing cells."""
        try:
            return text_cells(self._table.column(column), self._missing_values)
        except DataError as error:
            raise DataError(f"{self._path}, column '{sanitize(column)}': {error}") from None

    def _count(self, wrong: Bool[np.ndarray, "n"], column: str, problem: str) -> None:
        """Mark wrong cells as invalid if the reader is binned; else raise a DataError for the first one."""
        if self._binned:
            self._invalid[column] = self.invalid(column) | wrong
        else:
            self._refuse(wrong, column, problem)

    def _refuse(self, wrong: Bool[np.ndarray, "n"], column: str, problem: str) -> None:
        """Raise a DataError for the first wrong cell, if any."""
        if wrong.any():
            record = self._first + int(np.argmax(wrong)) + 1
            raise DataError(
                f"{self._path}, record {record} (the header not counted), column '{column}': {problem}"
            )
