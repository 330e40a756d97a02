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
        decoded = [None if cell is None else cell.decode(errors="replace") for cell in cells.to_pylist()]
        cells = pa.array(decoded, pa.string())
    try:
        text = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    except (pa.ArrowException, ValueError, TypeError):
        raise DataError(f"a column of type {cells.type} holds neither numbers nor text") from None
    missing = pc.or_(pc.is_null(text), pc.is_in(text, missing_values))
    return text, np.asarray(missing, dtype=np.bool_)


def _tables(schema: Schema, path: TableFile, columns: Sequence[str], *, tolerant: bool) -> Iterator[pa.Table]:
    """Yield columns of a file in the format that the schema declares for it; a Parquet file some records at a time."""
    file_format, optional, columns = (
        schema.format_of(path.name),
        schema.may_lack,
        schema.read_columns(columns),
    )
    try:
        if isinstance(path, MemoryTable):
            yield select_columns(path, path.table, columns, optional)
        else:
            refuse_memory_path(path)
            yield from open_pieces(path, columns, file_format, tolerant=tolerant, may_lack=optional)
    except LackingColumnsError as error:
        if not schema.features.keys() >= set(error.columns):
            raise
        absent = "a feature that some table does not have is declared with absent = 'missing'"
        raise DataError(f"{error}; {absent}") from None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _pointed(cells: pa.Array, marks: NumberMarks) -> pa.Array:
    """Rewrite numbers without thousands marks and with "." as the decimal mark, cell by cell.

    The vectorised form of :meth:`NumberMarks.pointed`.
    """
    if marks.thousands is not None:
        plain = pc.replace_substring_regex(cells, marks.between_groups, "")
        cells = pc.if_else(pc.match_substring_regex(cells, marks.grouped), plain, cells)
    if marks.decimal == ".":
        return cells
    # A "." in the cell is not a decimal mark here: "?" makes the cell no number, instead of a number of another value.
    return pc.replace_substring(pc.replace_substring(cells, ".", "?"), marks.decimal, ".")


class TableReader:
    """Converts the columns of one file to arrays; every error names file, record and column.

    Args:
        path: the table, named in errors.
        table: the columns of the file.
        missing_values: texts of cells that count as missing.
        marks: decimal and thousands mark of numbers that are text.
        binned: whether a cell that its declaration does not allow is marked as invalid instead of raising an error
            (``invalid = "bin"`` in the schema). One more feature column then marks the invalid cells of a feature. A
            record with an invalid target is left out.
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
        if (
            table.num_rows == 0
        ):  # an empty column may have any type, also one that is refused otherwise: use text
            table = pa.table({name: pa.array([], pa.string()) for name in table.column_names})
        self._path = path
        self._table = table
        self._missing_values = pa.array(missing_values, pa.string())
        self._marks = marks
        # Format of all dates that are text in this file; None: the format of the column's declaration.
        self._date: str | None = None
        numbers = self.parse_numbers(self._missing_values)
        self._missing_numbers = numbers.filter(pc.invert(pc.is_nan(numbers)))
        self._binned, self._spellings = binned, spellings
        self._first = 0  # index in the file of this reader's first record
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
            columns: columns to read; the name of a declared duration stands for its two columns of dates.
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

        Every cell is converted by itself, so the values do not depend on how the file is divided.
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

        If the reader is binned, the last feature is 1 for an invalid cell, whose other features are 0.
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
        mask = np.zeros(self.n_records, dtype=np.bool_)
        for column in columns:
            mask |= self._invalid.get(column, False)
        return mask

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
            is_id = self._table.column(column).combine_chunks().field("id").to_numpy(zero_copy_only=False)
            self._refuse(~is_id, column, "ids are text or whole numbers below 2^53")
        elif not (_is_text(kind) or pa.types.is_integer(kind)):
            raise DataError(f"{self._path}, column '{column}': ids are text or whole numbers, not {kind}")
        ids = self.ids(column)
        missing = np.array([identity is None for identity in ids], dtype=np.bool_)
        self._refuse(missing, column, "the id is missing; every record needs one")
        # Two different undecodable ids may look equal after the replacement.
        undecodable = np.array([REPLACED in (identity or "") for identity in ids], dtype=np.bool_)
        self._refuse(undecodable, column, "the id has bytes that are no text")
        return [str(identity) for identity in ids]

    def ids(self, column: str) -> list[str | None]:
        """Return the cells of a user or silo column as ids, None for a cell without an id; no cell is refused."""
        cells, missing = self.text(column)
        ids = [
            None if is_missing else self._without_fraction(cell)
            for cell, is_missing in zip(cells.to_pylist(), missing, strict=True)
        ]
        # Again, because a missing value may be declared without the fraction: -9 for a cell -9.0.
        missing_values = frozenset(self._missing_values.to_pylist())
        return [None if identity in missing_values else identity for identity in ids]

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
        numbers = [self._amount(amount) for amount in schema.amounts.values()]
        return np.stack(numbers, axis=1) if isinstance(target, Amounts) else numbers[0]

    def _survival(self, target: Survival) -> Float32[np.ndarray, "n k"]:
        """Return (event, time), or (event, time, entry) if an entry is declared.

        Invalid are a time or entry below 0, and an entry that is not before the time.
        """
        dated = bool(target.durations)
        before = f"the date is before '{target.start}', the start of follow-up"
        event, time = self._zero_or_one(target.event, "target", "event"), self._required(target.time)
        self._mark_invalid(
            time < 0, target.end or target.time, before if dated else "the time must not be negative"
        )
        if target.entry is None:
            return np.stack((event, time), axis=1).astype(np.float32)
        targets = np.stack((event, time, self._required(target.entry)), axis=1).astype(np.float32)
        self._mark_invalid(
            targets[:, 2] < 0, target.entry, before if dated else "the entry must not be negative"
        )
        late = f"the entry must be before the {'end' if dated else 'time'} ('{target.end or target.time}')"
        self._mark_invalid(targets[:, 2] >= targets[:, 1], target.entry, late)
        return targets

    def _amount(self, target: Amount) -> Float32[np.ndarray, "n"]:
        """Return a numeric target, clipped to its bounds if declared; invalid are fractions of a count, and, with
        ``outside = "error"``, values outside of the bounds.
        """
        values = self._required(target.column)
        if target.count:
            self._mark_invalid(
                values != np.floor(values), target.column, "the target is a count, and this is a fraction"
            )
        if target.bounds is not None:
            clipped = np.clip(values, *target.bounds)
            if target.outside == "error":
                lower, upper = target.bounds
                self._mark_invalid(
                    clipped != values,
                    target.column,
                    f"the target is outside of its bounds, {lower:g} to {upper:g}",
                )
            values = clipped
        return values.astype(np.float32)

    def _scaled(self, column: str, feature: Number | Date) -> Float32[np.ndarray, "n width"]:
        values, missing = (
            self._numbers(column) if isinstance(feature, Number) else self._days(column, feature)
        )
        if feature.missing == "error":
            self._mark_invalid(
                missing, column, "the value is missing; declare `missing` in the schema if that may be"
            )
        lower, upper = feature.bounds
        # x in [lower, upper] becomes 2 (x - lower) / (upper - lower) - 1 in [-1, 1].
        scaled = 2 * (np.clip(values, lower, upper) - lower) / (upper - lower) - 1
        scaled[missing] = feature.fill_value
        columns = (scaled, missing) if feature.missing == "indicator" else (scaled,)
        return np.stack(columns, axis=1).astype(np.float32)

    def _one_hot(self, column: str, feature: Category) -> Float32[np.ndarray, "n width"]:
        index, missing = self.places(column, feature.categories)
        if feature.missing == "error":
            self._mark_invalid(
                missing, column, "the value is missing; declare `missing` in the schema if that may be"
            )
        if feature.unknown == "error":
            self._mark_invalid(
                (index < 0) & ~missing, column, "the value is not among the declared categories"
            )
        encoded = index[:, None] == np.arange(len(feature.categories))
        columns = (encoded, missing) if feature.missing == "indicator" else (encoded,)
        return np.column_stack(columns).astype(np.float32)

    def _classes(self, target: Label) -> Int64[np.ndarray, "n"]:
        index, missing = self.places(target.column, target.classes)
        self._mark_invalid(missing, target.column, "the label is missing")
        self._mark_invalid(index < 0, target.column, "the label is not among the declared classes")
        labels: Int64[np.ndarray, "n"] = np.maximum(index, 0)
        return labels

    def _zero_or_one(self, column: str, target_name: str, value_name: str) -> Int64[np.ndarray, "n"]:
        """Return a column of 0 and 1; errors call a missing cell ``target_name`` and a wrong one ``value_name``."""
        index, missing = self.places(column, EVENTS)
        self._mark_invalid(missing, column, f"the {target_name} is missing")
        self._mark_invalid((index < 0) & ~missing, column, f"the {value_name} must be 0 or 1")
        values: Int64[np.ndarray, "n"] = np.maximum(index, 0)
        return values

    def _required(self, column: str) -> Float64[np.ndarray, "n"]:
        values, missing = self._numbers(column)
        self._mark_invalid(missing, column, "the target is missing")
        # A binned reader only marks the cell, so the value, which would overflow in float32, becomes 0.
        large = np.abs(values) > np.finfo(np.float32).max
        self._mark_invalid(large, column, "the target is too large for float32")
        return np.where(large, 0.0, values)

    def places(
        self, column: str, declared: Sequence[str]
    ) -> tuple[Int64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the index of every cell in a declared list (-1 if unlisted), and the mask of missing cells.

        A cell is matched by its text. If its text is not declared, it is matched by its value, as a whole number or a
        truth value (:class:`DeclaredValues`). Both rules apply to missing values as well.
        """
        cells, missing = self.text(column)
        index_of = {value: index for index, value in enumerate(declared)}
        spellings = self._spellings.get(column, {})
        index_of |= {spelling: index_of[value] for spelling, value in spellings.items()}
        index = pa.array(list(index_of.values()), pa.int32()).take(
            pc.index_in(cells, pa.array(list(index_of), pa.string()))
        )
        unmatched = pc.and_(pc.is_null(index), pa.array(~missing))
        if pc.any(unmatched).as_py():
            texts = pc.unique(cells.filter(unmatched))  # parse each distinct text once
            by_value, is_missing = self._by_value(texts.to_pylist(), index_of)
            position = pc.index_in(cells, texts)
            index = pc.coalesce(index, by_value.take(position))
            missing = missing | np.asarray(
                pc.fill_null(pc.and_(unmatched, is_missing.take(position)), False), dtype=np.bool_
            )
        indices = pc.fill_null(index, -1).to_numpy(zero_copy_only=False)
        return np.where(missing, -1, indices).astype(np.int64), missing

    def _by_value(self, cells: Sequence[str], declared: Mapping[str, int]) -> tuple[pa.Array, pa.Array]:
        """Return the index of every text by its value (null if none), and whether it is a missing value.

        A text whose value equals both a declared value and a missing value is ambiguous: it gets no index and is not
        missing.
        """
        values = DeclaredValues(declared, self._marks)
        missing = {whole_number(text, self._marks) for text in self._missing_values.to_pylist()} - {None}
        matches = [(values.place(cell), whole_number(cell, self._marks) in missing) for cell in cells]
        indices = [None if is_missing else index for index, is_missing in matches]
        only_missing = [is_missing and index is None for index, is_missing in matches]
        return pa.array(indices, pa.int32()), pa.array(only_missing, pa.bool_())

    def _without_fraction(self, cell: str) -> str:
        return without_fraction(cell, self._marks)

    def _numbers(self, column: str) -> tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the values of a numeric column, 0 if missing or infinite, and the mask of missing cells."""
        values, missing = self.cells(column)
        if not pa.types.is_floating(values.type):
            values = self._parsed(column, pc.if_else(pa.array(missing), None, values), missing)
            missing = missing | self.is_missing_number(values)
        numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        numbers[missing] = 0.0
        dates = self._durations.get(column)
        self._mark_invalid(
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
        self._mark_invalid(
            np.isnan(days) & ~missing, column, f"the value is no date as {self._date or feature.format}"
        )
        return np.where(np.isnan(days), 0.0, days), missing

    def dates(self, column: str, date_format: str) -> tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the days since 1970-01-01 (NaN if missing or no date), and the mask of missing cells.

        Args:
            column: the column.
            date_format: format of the column's dates; a format that is declared for the whole file replaces it.
        """
        date_format = self._date or date_format
        cells = self._table.column(column).combine_chunks()
        if pa.types.is_date(cells.type) or pa.types.is_timestamp(cells.type):
            days = cells.cast(pa.date32(), safe=False).cast(pa.int32())
            missing = np.asarray(cells.is_null(), dtype=np.bool_)
        else:
            text, missing = self.text(column)
            coded = text.dictionary_encode()
            # A program that reads the column as floats writes 20200131 as 20200131.0.
            plain = [self._without_fraction(cell) for cell in coded.dictionary.to_pylist()]
            parsed = [day_of(cell, date_format) for cell in coded.dictionary.to_pylist()]
            parsed = [
                day_of(cell, date_format) if day is None else day
                for cell, day in zip(plain, parsed, strict=True)
            ]
            days = pa.array(parsed, pa.int32()).take(coded.indices)
            is_missing = pc.is_in(pa.array(plain, pa.string()), self._missing_values).take(coded.indices)
            missing = missing | np.asarray(pc.fill_null(is_missing, False), dtype=np.bool_)
            if cells.type == EXCEL_CELL:
                days = pc.coalesce(cells.field("day").cast(pa.int32()), days)
        missing = missing | np.asarray(pc.is_in(days, self._missing_days(date_format)), dtype=np.bool_)
        return pc.fill_null(days.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False), missing

    def _missing_days(self, date_format: str) -> pa.Array:
        """Return the declared missing values that are dates, as days; in this format or else in ISO 8601."""
        values = self._missing_values.to_pylist()
        days = [day_of(value, date_format) for value in values], [day_of(value, ISO_DATE) for value in values]
        return pc.drop_null(pc.coalesce(*(pa.array(column, pa.int32()) for column in days)))

    def _parsed(self, column: str, cells: pa.Array, missing: Bool[np.ndarray, "n"]) -> pa.Array:
        """Convert text cells to numbers; a cell that is neither missing nor a number is invalid."""
        values = self.parse_numbers(cells)
        self._mark_invalid(
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

        A declared duration is missing if one of its two dates is missing, and NaN if one is not a date.
        """
        if column in self._durations:
            first, last, date_format, unit = self._durations[column]
            start, no_start = self.dates(first, date_format)
            end, no_end = self.dates(last, date_format)
            return pa.array((end - start) / unit), no_start | no_end
        kind = self._table.schema.field(column).type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
            values = self._table.column(column).combine_chunks()
            # A decimal is converted through its text, as in a CSV table: a direct cast to float rounds twice.
            if pa.types.is_decimal(kind):
                values = values.cast(pa.string())
            values = values.cast(pa.float64(), safe=False)
            missing = np.asarray(values.is_null(nan_is_null=True), dtype=np.bool_)
            return values, missing | self.is_missing_number(values, kind)
        return self.text(column)

    def is_missing_number(self, values: pa.Array, kind: pa.DataType | None = None) -> Bool[np.ndarray, "n"]:
        """Return the mask of numbers that equal a declared missing value.

        Args:
            values: the numbers as float64.
            kind: type of the column, to whose precision the missing values are rounded; None: float64.
        """
        missing_numbers = self._missing_numbers
        if kind is not None and pa.types.is_floating(kind):
            # A float32 column holds a declared -99.9 as its nearest float32, not as the float64 of the same text.
            missing_numbers = missing_numbers.cast(kind, safe=False).cast(pa.float64())
        return np.asarray(pc.is_in(values, missing_numbers), dtype=np.bool_)

    def text(self, column: str) -> tuple[pa.Array, Bool[np.ndarray, "n"]]:
        """Return the cells as text, and the mask of missing cells."""
        try:
            return text_cells(self._table.column(column), self._missing_values)
        except DataError as error:
            raise DataError(f"{self._path}, column '{sanitize(column)}': {error}") from None

    def _mark_invalid(self, is_wrong: Bool[np.ndarray, "n"], column: str, problem: str) -> None:
        """Mark wrong cells as invalid if the reader is binned; else raise a DataError for the first one."""
        if self._binned:
            self._invalid[column] = self.invalid(column) | is_wrong
        else:
            self._refuse(is_wrong, column, problem)

    def _refuse(self, is_wrong: Bool[np.ndarray, "n"], column: str, problem: str) -> None:
        """Raise a DataError for the first wrong cell, if any."""
        if is_wrong.any():
            record = self._first + int(np.argmax(is_wrong)) + 1
            raise DataError(
                f"{self._path}, record {record} (the header not counted), column '{column}': {problem}"
            )
