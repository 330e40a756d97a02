"""Reader of table files: CSV, Parquet or Excel into Arrow columns, with CSV cells as text.

No error repeats a value, nor does its traceback: errors of Arrow quote cells, and are never its cause or context.
"""

import codecs
import re
import zipfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from decimal import Decimal
from functools import cached_property, partial, reduce
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from jaxtyping import Bool, Int64, UInt8

from fedveil.data.schema import Format
from fedveil.errors import ConfigError, DataError
from fedveil.files import LARGEST_FILE, check_file, read_content, with_host_code
from fedveil.sanitize import describe_columns, sanitize

# --- lines of a CSV text ---

_NEWLINE, _RETURN = b"\n\r"
_BOM: Final = b"\xef\xbb\xbf"
_QUOTATION_HINT: Final = "write a mark inside of a cell twice, and the cell between marks"


class CsvLines:
    """Line ends and record ends of a CSV text, derived from its quotation marks.

    The 1st, 3rd, ... quotation mark of a file opens a cell or a part of it, and the 2nd, 4th, ... closes it. A
    doubled mark closes and reopens. Delimiters and line breaks between an opening and a closing mark belong to the
    cell.

    Args:
        path: name of the file in errors.
        content: the text in UTF-8.
        delimiter: one ASCII character between cells.
        quote: quotation mark, one ASCII character; empty: every mark is a part of its cell.
    """

    def __init__(self, path: Path, content: bytes, delimiter: str, quote: str = '"') -> None:
        self._quote = quote.encode()
        self._path, self._content, self._delimiter = path, content, delimiter
        self._byte: UInt8[np.ndarray, " n"] = np.frombuffer(content, dtype=np.uint8)

    @cached_property
    def _marks(self) -> Int64[np.ndarray, " m"]:
        return np.flatnonzero(np.isin(self._byte, list(self._quote)))

    @cached_property
    def _breaks(self) -> Int64[np.ndarray, " b"]:
        """Positions of line ends: ``LF`` and ``CR`` count one each, so ``CR LF`` is two, as in Arrow's reader."""
        return np.flatnonzero((self._byte == _NEWLINE) | (self._byte == _RETURN))

    @cached_property
    def _delimiters(self) -> Int64[np.ndarray, " d"]:
        return np.flatnonzero(self._byte == ord(self._delimiter))

    @cached_property
    def _is_quoted_break(self) -> Bool[np.ndarray, " b"]:
        """(b,) Mask of the line breaks inside a quoted cell."""
        return self._is_inside(self._breaks)

    def check(self) -> bool:
        """Return whether some cell spans several lines; refuse a text with ambiguous quotation marks.

        A missing mark in one person's cell could merge or hide the records of other people. So a mark must stand at
        the start or the end of a cell. And at least one line of a multi-line record must have fewer cells than the
        header: if every line could be a record without the marks, the marks may be wrong.

        Raises:
            DataError: a mark stands elsewhere, or a multi-line record may be several records. The error names the
                line.
        """
        if not self._quote or self._quote not in self._content:
            return False
        self._check_marks()
        if not self._is_quoted_break.any():
            return False
        self._check_records()
        return True

    def refuse_uneven(self) -> None:
        """Refuse the first record that has more or fewer cells than the header.

        Empty lines are no records: Arrow's reader skips them.

        Raises:
            DataError: a record is uneven; the error names its line.
        """
        # Delimiters and line breaks inside quotation marks belong to a cell. Record i has one cell more than it has
        # other delimiters before its end.
        ends = self._breaks[~self._is_quoted_break]
        borders = self._delimiters[~self._is_inside(self._delimiters)]
        cells = 1 + np.bincount(np.searchsorted(ends, borders), minlength=len(ends) + 1)
        # Two ends with a distance of 1 enclose an empty line, or are the CR and LF of one end: neither is a record.
        records = np.flatnonzero(np.diff(ends, prepend=-1, append=len(self._byte)) > 1)
        uneven = records[cells[records] != cells[records[0]]]  # records[0] is the header
        if len(uneven):
            n_cells, n_header_cells = int(cells[uneven[0]]), int(cells[records[0]])
            self._refuse(
                int(ends[uneven[0] - 1]) + 1,
                f"it has {n_cells} cell{'s' * (n_cells > 1)}, and the header {n_header_cells}; write every cell, empty "
                f"ones too, and one with {self._delimiter!r}, the delimiter, inside of it between quotation marks",
            )

    def _check_marks(self) -> None:
        """Refuse the first mark that does not open a cell at its start or close it at its end."""
        byte, last = self._byte, len(self._byte) - 1
        border = np.array([_NEWLINE, _RETURN, *self._quote, *self._delimiter.encode()], dtype=np.uint8)
        start = len(_BOM) if self._content.startswith(_BOM) else 0
        # An opening mark follows a delimiter, a line end, a mark (a doubled one) or the start of the text; a closing
        # mark precedes one of these or the end.
        opening, closing = self._marks[0::2], self._marks[1::2]
        opens = (opening == start) | np.isin(byte[opening - 1], border)
        closes = (closing == last) | np.isin(byte[np.minimum(closing + 1, last)], border)
        wrong = np.flatnonzero(~(opens[: len(closes)] & closes))
        if not len(wrong) and len(opening) == len(closing):
            return
        # Report the start of the cell with the first wrong mark, not a doubled mark inside this cell.
        index = wrong[0] if len(wrong) else len(closing)
        cells = np.flatnonzero(
            np.append(True, opening[1:] != closing[: len(opening) - 1] + 1)
        )  # no doubled mark
        position = int(opening[cells[np.searchsorted(cells, index, side="right") - 1]])
        line = np.searchsorted(self._breaks, [position])
        odd = np.count_nonzero(np.searchsorted(self._breaks, self._marks) == line) % 2
        self._refuse(
            position,
            f"{'an odd number of quotation marks' if odd else 'a quotation mark inside of a cell'}; {_QUOTATION_HINT}",
        )

    def _check_records(self) -> None:
        """Refuse the first multi-line record of which every line has at least as many cells as the header."""
        ends = self._breaks[~self._is_quoted_break]
        borders = self._delimiters[~self._is_inside(self._delimiters)]
        n_header_delimiters = np.count_nonzero(np.searchsorted(ends, borders) == 0)
        # Per line: its delimiters, inside and outside of marks, as if the text had no quotation marks.
        starts = np.append(0, self._breaks + 1)
        inside_lines = np.bincount(np.searchsorted(self._breaks, self._delimiters), minlength=len(starts))
        record = np.append(0, np.cumsum(~self._is_quoted_break))  # the record of every line
        empty = np.diff(self._breaks, prepend=-1, append=len(self._byte)) <= 1
        fewer = np.bincount(record, weights=(inside_lines < n_header_delimiters) & ~empty)
        several = np.bincount(record, weights=~empty) > 1
        doubtful = np.flatnonzero(several & (fewer == 0))
        if len(doubtful):
            position = int(starts[np.searchsorted(record, doubtful[0])])
            self._refuse(
                position,
                "a cell goes on in the next line, and each of these lines has as many cells as the header, so that a "
                "quotation mark may be wrong; write the cell in one line",
            )

    def _is_inside(self, positions: Int64[np.ndarray, " k"]) -> Bool[np.ndarray, " k"]:
        """Return which positions lie between an opening and a closing mark."""
        # An odd number of marks before a position means that the last one opened a cell.
        inside: Bool[np.ndarray, " k"] = np.searchsorted(self._marks, positions) % 2 == 1
        return inside

    def _refuse(self, position: int, problem: str) -> NoReturn:
        """Raise a DataError that names the line of a byte position."""
        before = self._content[:position]
        line = before.count(b"\n") + before.count(b"\r") - before.count(b"\r\n") + 1
        raise DataError(f"{self._path}, line {line}: {problem}")


# --- files of tables ---

EXCEL: Final = (".xlsx", ".xls", ".ods")
EXCEL_CELL: Final = pa.struct([("text", pa.string()), ("day", pa.date32()), ("id", pa.bool_())])
"""Type of an Excel cell: its text, its day if it is a date, and whether it may be an id, that is, text or a whole
number that Excel holds exactly. Each field is a function of the cell alone, whatever else its column holds."""

DELIMITERS: Final = ",;\t|"
"""Usual delimiters of CSV files."""

_Pick: TypeAlias = Callable[[list[str]], list[str]]
"""Function from the columns of a file to the columns to read."""

REPLACED: Final = "\ufffd"
"""Character that replaces undecodable bytes in a cell."""

TEXT: Final = (".csv", ".txt", ".tsv")
"""Suffixes of CSV files."""

_CELL: Final = re.compile(rb"""\sr\s*=\s*["']([A-Z]{0,3})([0-9]{1,7})["']""")
"""Place of a cell or of a row in the XML of a sheet."""

_PART: Final = 1 << 20
_SPARSE: Final = 64
_SMALL_SHEET: Final = 1 << 22
"""A sheet has at most 64 places for each of its cells, or this number of places."""

_UNWRITTEN: Final = 1 << 1100
"""Whole numbers from here on are larger than every float64."""

_PARQUET: Final = ".parquet"
_ROWS_A_BYTE: Final = 8
_FEW_ROWS: Final = 1 << 20
"""A Parquet file has at most 8 rows for each of its bytes, or this number of rows. Equal rows take nearly no bytes: a
file of 1 MB can have 10^8 of them, which would take minutes and gigabytes. A row of a real table takes a bit and more.
"""

_LONG_TEXTS: Final = 1 << 28
"""Most bytes of a column's texts in a batch of a Parquet file; in the file a repeated text takes no bytes."""

_WIDEST: Final = 1 << 12  # bytes of a fixed-width binary value
_DEFAULT_FORMAT: Final = Format()

_REASONS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"In CSV column #\d+: (Row #\d+: )?CSV conversion error to \w+: invalid UTF8 data",
        r"CSV parser got out of sync with chunker",
        r"straddling object straddles two block boundaries",
        r"Parquet magic bytes not found in footer[^:]*",
        r"Parquet file size is \d+ bytes[^:]*",
        r"Couldn't deserialize thrift",
        r"Unexpected end of stream",
    )
)
"""Beginnings of Arrow's error messages, up to the point where Arrow quotes a cell or a path."""

_UNEVEN: Final = " columns, got "
"""Part of Arrow's message about a line with more or fewer cells than the header."""


class LackingColumnsError(DataError):
    """Error of a file that lacks required columns.

    Attributes:
        columns: names of the missing columns.
    """

    def __init__(self, message: str, columns: Sequence[str]) -> None:
        super().__init__(message)
        self.columns = tuple(columns)


def open_table(
    path: Path,
    columns: Sequence[str] | None,
    file_format: Format = _DEFAULT_FORMAT,
    *,
    tolerant: bool = False,
    may_lack: Container[str] = frozenset(),
) -> pa.Table:
    """Read columns of a table file (None: all columns).

    Args:
        path: a ``.csv``, ``.txt``, ``.tsv``, ``.parquet``, ``.xlsx``, ``.xls`` or ``.ods`` file; case is ignored.
        columns: names of the columns, without surrounding blanks; each must occur exactly once.
        file_format: format of a CSV or Excel file.
        tolerant: whether undecodable bytes of a CSV file are read as U+FFFD. They then make their own cell invalid,
            and no file is refused because of them.
        may_lack: columns that the file may lack; all their cells are then missing.

    Returns:
        The columns in the requested order. CSV cells are text; Excel cells have the type :data:`EXCEL_CELL`.

    Raises:
        DataError: the file does not exist, has another format, or lacks columns (the error lists its columns).
        ConfigError: the file is an Excel file and no reader for it is installed.
    """
    suffix = path.suffix.lower()
    if suffix not in (*TEXT, _PARQUET, *EXCEL):
        raise DataError(
            f"{path}: a table is a .csv (.txt, .tsv), a .parquet or an Excel file ({', '.join(EXCEL)})"
        )
    pick = partial(_required_columns, path, columns=columns, may_lack=may_lack)
    with _refuse_damaged(path):
        if suffix == _PARQUET:
            return pa.concat_tables(_read_parquet(path, pick, columns))
        content = read_content(path, DataError, largest=LARGEST_FILE)
        if suffix in EXCEL:
            return _add_lacking(_read_excel(path, pick, file_format), columns)
        # Undecodable bytes are refused only after parsing, and only if a column that is read holds them: a cell that
        # nobody requests must not cause a refusal.
        text, undecodable = _to_utf8(path, content, file_format.encoding, tolerant)
        _check_delimiter(path, text, columns, file_format.delimiter)
        table = _parse_csv(path, text, pick, file_format)
        if undecodable is not None and _has_replaced(table):
            raise undecodable
        return _add_lacking(table, columns)


def open_pieces(
    path: Path, columns: Sequence[str], file_format: Format, *, tolerant: bool, may_lack: Container[str]
) -> Iterator[pa.Table]:
    """Read columns of a table file as :func:`open_table`, a Parquet file some records at a time.

    Yields:
        At least one table; together, the records in their order.

    Raises:
        DataError: as :func:`open_table`.
    """
    if path.suffix.lower() != _PARQUET:
        yield open_table(path, columns, file_format, tolerant=tolerant, may_lack=may_lack)
        return
    with _refuse_damaged(path):
        yield from _read_parquet(
            path, partial(_required_columns, path, columns=columns, may_lack=may_lack), columns
        )


@contextmanager
def _refuse_damaged(path: Path) -> Iterator[None]:
    """Turn the errors of reading a table into one that names the file and repeats no cell."""
    try:
        yield
    except OSError as error:
        failed = DataError(f"{path} cannot be read: {error.strerror or 'damaged'}")
        raise with_host_code(error, failed) from None
    except zipfile.BadZipFile:
        raise DataError(f"{path} is damaged or no {path.suffix} file") from None
    except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError) as error:
        raise DataError(f"{path} is damaged or no {path.suffix} file: {_without_values(error)}") from None


def _check_delimiter(path: Path, content: bytes, columns: Sequence[str] | None, delimiter: str) -> None:
    """Refuse a header that is one column under the declared delimiter and several under another one."""
    header = content.partition(b"\n")[0].decode(errors="replace")
    other = max(DELIMITERS, key=header.count)
    if columns is not None and len(columns) > 1 and delimiter not in header and other in header:
        raise DataError(
            f"{path}: the header has no {delimiter!r}, the declared delimiter, but it has {other!r}: "
            f"declare it {_where_to_declare(path)}"
        )


def _add_lacking(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    """Return the table with all requested columns; a column that the file lacks is null in every record."""
    lacked = [name for name in columns or () if name not in table.column_names]
    for name in lacked:
        table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
    return table.select(columns) if lacked else table


def _parse_csv(path: Path, content: bytes, pick: _Pick, file_format: Format) -> pa.Table:
    """Parse a CSV text; errors about its records come from :class:`CsvLines`, which quotes no cell."""
    lines = CsvLines(path, content, file_format.delimiter, file_format.quotation_mark)
    parsing = pa_csv.ParseOptions(
        delimiter=file_format.delimiter,
        quote_char=file_format.quotation_mark or False,
        newlines_in_values=lines.check(),
    )
    try:
        return _parse_columns(content, pick, parsing)
    except pa.ArrowInvalid as error:
        if _UNEVEN not in str(error):
            raise
    # Not in the handler: Arrow's error quotes the line, and a traceback would show it as the context of this one.
    lines.refuse_uneven()
    raise DataError(f"{path} is damaged or no {path.suffix} file: cells and header do not match")


def _parse_columns(content: bytes, pick: _Pick, parsing: pa_csv.ParseOptions) -> pa.Table:
    # Copy the text into memory that Arrow owns. Arrow's threads release the buffer last; if Python owned it, a
    # release during the exit of the interpreter would abort the process.
    buffer = pa.array([content], pa.large_binary()).buffers()[2]
    # Read the header first, then all columns as text: an inferred type would depend on all cells of a column.
    with pa_csv.open_csv(pa.BufferReader(buffer), parse_options=parsing) as reader:
        file_names = _find_columns(reader.schema.names, pick)
    file_columns = list(file_names.values())
    as_text = pa_csv.ConvertOptions(
        include_columns=file_columns,
        column_types=dict.fromkeys(file_columns, pa.string()),
        strings_can_be_null=False,
    )
    table = pa_csv.read_csv(pa.BufferReader(buffer), parse_options=parsing, convert_options=as_text)
    return table.rename_columns(list(file_names))


def _find_columns(present: Sequence[str], pick: _Pick) -> dict[str, str]:
    """Map the stripped name of every column to read to its name in the file."""
    names = [name.strip() for name in present]
    return {name: present[names.index(name)] for name in pick(names)}


def _to_utf8(path: Path, content: bytes, encoding: str, tolerant: bool) -> tuple[bytes, DataError | None]:
    """Convert a text to UTF-8 for Arrow.

    Return also the error to raise if a column with undecodable bytes is read; None if the text has no such bytes or
    they are tolerated.

    In UTF-8, undecodable bytes stay within their own cell, and do no harm in a column that is not read.
    """
    has_utf16_mark = content.startswith(
        (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    )  # in the header, which is public
    # Even tolerant reading reports a UTF-16 file under a declared UTF-8: otherwise all its cells would be invalid.
    is_wide = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    if tolerant and (is_wide or not has_utf16_mark):
        return content.decode(encoding, errors="replace").encode(), None
    is_utf8 = encoding.lower().replace("_", "-") in ("utf-8", "utf8", "ascii")
    try:
        text = content.decode() if is_utf8 else content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        location = f"byte {error.start}" if is_wide or has_utf16_mark else f"line {line}, byte {error.start}"
        undecodable = DataError(
            f"{path}, {location}: not {encoding}; declare the encoding (latin-1, cp1252, utf-16, ...) "
            f"{_where_to_declare(path)}"
        )
        if has_utf16_mark or not is_utf8:
            raise undecodable from None
        return content.decode(errors="replace").encode(), undecodable
    return content if is_utf8 else text.encode(), None


def _where_to_declare(path: Path) -> str:
    """Return where the format of a file is declared, for errors."""
    key = f'[formats."{sanitize(path.name)}"]'
    return f"in the schema, [format] for all files or {key} for one; a silo, in silo.toml; a prediction, by --format"


def _has_replaced(table: pa.Table) -> bool:
    """Return whether a column of the table, or its name, has undecodable bytes."""
    named = any(REPLACED in name for name in table.column_names)
    return named or any(pc.any(pc.match_substring(column, REPLACED)).as_py() for column in table.columns)


def _read_parquet(path: Path, pick: _Pick, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    """Read a Parquet file batch by batch; yield at least one table.

    Memory is allocated for the rows that the file has, not for the number of rows that its header announces. Files
    that expand to far more than a table of their size holds are refused before they do.
    """
    check_file(path, DataError)
    present = pa_parquet.read_schema(path)
    file_names = _find_columns(present.names, pick)
    file_columns = list(file_names.values())
    schema = pa.schema([present.field(name) for name in file_columns])
    if columns is not None:
        _refuse_wide(path, schema)
    texts = [field.name for field in schema if _is_bytes(field.type)]
    # Texts are read as indices into a dictionary, whose length is known before they are written out.
    with pa_parquet.ParquetFile(path, read_dictionary=texts) as file:
        announced, records = file.metadata.num_rows, 0
        if announced > max(_FEW_ROWS, _ROWS_A_BYTE * path.stat().st_size):
            raise DataError(
                f"{path}: announces more than {_ROWS_A_BYTE} rows for each of its bytes, so nearly all of its rows "
                "would be equal; write the table again, each record once"
            )
        yield _add_lacking(schema.empty_table().rename_columns(list(file_names)), columns)
        # Group by group: an iterator over all groups keeps the whole file in memory.
        for group in range(file.num_row_groups):
            for piece in file.iter_batches(row_groups=[group], columns=file_columns):
                records += piece.num_rows
                cells = [_plain_cells(path, piece.column(field.name), field) for field in schema]
                table = pa.Table.from_arrays(cells, schema=schema)
                yield _add_lacking(table.rename_columns(list(file_names)), columns)
        if records != announced:
            raise DataError(f"{path}: is damaged: it has {records} rows and announces {announced}")


def _is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are texts or binary of any length."""
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _refuse_wide(path: Path, schema: pa.Schema) -> None:
    """Refuse nested types and long fixed-size binary: no schema declares them, and a row can take any memory."""
    for field in schema:
        kind = field.type
        if pa.types.is_nested(kind) or (pa.types.is_fixed_size_binary(kind) and kind.byte_width > _WIDEST):
            raise DataError(
                f"{path}, column '{sanitize(field.name)}': a column of type {kind} holds neither numbers nor text"
            )


def _plain_cells(path: Path, column: pa.Array, field: pa.Field) -> pa.Array:
    """Return the cells of a batch in the type of the file's schema, unless written out they would be too long."""
    if not pa.types.is_dictionary(column.type):
        return column
    if _is_bytes(column.type.value_type):
        lengths = pc.binary_length(column.dictionary).cast(pa.int64())
        if (pc.sum(lengths.take(column.indices)).as_py() or 0) > _LONG_TEXTS:
            raise DataError(
                f"{path}, column '{sanitize(field.name)}': the texts of {len(column)} rows have more than "
                f"{_LONG_TEXTS} bytes; write shorter ones"
            )
    return column if column.type == field.type else column.dictionary_decode().cast(field.type)


def _read_excel(path: Path, pick: _Pick, file_format: Format) -> pa.Table:
    try:
        calamine: Any = import_module("python_calamine")
    except ImportError:
        raise ConfigError(
            f"{path}: Excel files are read by the extra excel: pip install 'fedveil[excel]'"
        ) from None
    try:
        _refuse_sparse(path)
        book = calamine.CalamineWorkbook.from_path(str(path))
        sheets = book.sheet_names
        if file_format.sheet is not None and file_format.sheet not in sheets:
            existing = sanitize(", ".join(sheets))
            raise DataError(f"{path} has no sheet '{file_format.sheet}'; it has: {existing}")
        if not sheets:
            raise DataError(f"{path} has no sheet")
        rows = book.get_sheet_by_name(file_format.sheet or sheets[0]).to_python(skip_empty_area=False)
    except calamine.CalamineError:
        raise DataError(f"{path} is damaged or no {path.suffix} file") from None
    if not rows:
        raise DataError(f"{path}: the sheet is empty; its first row names the columns")
    header, *body = rows
    names = [str(cell) for cell in header]
    numbers = {name: names.index(in_file) for name, in_file in _find_columns(names, pick).items() if name}
    columns = {name: [row[i] for row in body] for name, i in numbers.items()}
    return pa.table({name: cells_of_objects(cells, file_format) for name, cells in columns.items()})


def _refuse_sparse(path: Path) -> None:
    """Refuse an ``.xlsx`` file with a sheet that is nearly empty between its first and its last cell.

    The reader allocates every cell of the rectangle, and its process is aborted where there is no memory: two cells
    in opposite corners, a file of 1 kB, would take 500 GB.
    """
    if path.suffix.lower() != ".xlsx":
        return
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > LARGEST_FILE:
            raise DataError(f"{path}: expands to more than {LARGEST_FILE} bytes, the most that is read")
        for member in archive.infolist():
            if member.filename.startswith("xl/worksheets/") and member.filename.endswith(".xml"):
                with archive.open(member) as sheet:
                    cells, rectangle = _extent(sheet.read)
                if rectangle > max(_SMALL_SHEET, _SPARSE * cells):
                    raise DataError(
                        f"{path}, {sanitize(member.filename)}: the sheet is nearly empty between its first and its "
                        "last cell; delete the cells far from the table, and save it again"
                    )


def _extent(read: Callable[[int], bytes]) -> tuple[int, int]:
    """Return how many cells a sheet's XML names, and how many the rectangle has in which they lie."""
    cells = rows = width = 0
    tail = b""
    while part := read(_PART):
        text = tail + part
        end = text.rfind(b">") + 1  # no tag is read in two halves
        for letters, digits in _CELL.findall(text, 0, end):
            cells += bool(letters)
            rows = max(rows, int(digits))
            # Letters number the columns in base 26: A is 1, Z is 26, AA is 27.
            width = max(width, reduce(lambda number, letter: 26 * number + letter - 64, letters, 0))
        tail = text[end:][-_PART:]
    return cells, rows * width


def cells_of_objects(cells: Sequence[Any], file_format: Format) -> pa.Array:
    """Convert Python objects, as of an Excel column, one by one to :data:`EXCEL_CELL`.

    An empty text, None, NaN, NaT and pandas' NA have no text. No cell is refused, whatever object it is: its text
    decides what it counts as.
    """
    return pa.array([_cell_of(cell, file_format) for cell in cells], EXCEL_CELL)


def _cell_of(cell: Any, file_format: Format) -> dict[str, Any]:
    """Return the fields of one cell."""
    if _is_empty(cell):
        return {"text": None, "day": None, "id": isinstance(cell, str)}
    return {
        "text": _text(cell, file_format),
        "day": date(cell.year, cell.month, cell.day) if isinstance(cell, date) else None,
        "id": isinstance(cell, str) or (_is_whole(cell) and abs(int(cell)) < 1 << 53),
    }


def _is_empty(cell: Any) -> bool:
    if cell is None or isinstance(cell, str):
        return not cell
    try:
        return bool(cell != cell)  # NaN and NaT differ from themselves
    except Exception:
        # pandas' NA and a signalling NaN compare with nothing; an array or a tensor has an answer for every entry. An
        # object of another class may raise anything.
        return not hasattr(cell, "__len__")


def _text(cell: Any, file_format: Format) -> str:
    """Return the text of one cell.

    Whole numbers have no fraction, dates are in ISO 8601, truth values are 1 and 0. Half of a surrogate pair, which no
    encoding has, becomes :data:`REPLACED`.
    """
    if isinstance(cell, bool | np.bool_):
        return str(int(cell))
    if _is_whole(cell):
        # Python writes no whole number of thousands of digits; beyond the largest float64 only the sign matters.
        whole = int(cell)
        return str(whole) if abs(whole) < _UNWRITTEN else ("1e999" if whole > 0 else "-1e999")
    if isinstance(cell, float | np.floating):
        return repr(float(cell)).replace(".", file_format.decimal)
    if isinstance(cell, Decimal):
        return str(cell).replace(".", file_format.decimal)
    if isinstance(cell, date):
        return str(date(cell.year, cell.month, cell.day))
    try:
        text = str(cell)
    except Exception:  # as above
        return REPLACED
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_whole(cell: Any) -> bool:
    if isinstance(cell, float | np.floating):
        return float(cell).is_integer()
    return isinstance(cell, Integral) and not isinstance(cell, bool)


def without_days(column: pa.ChunkedArray) -> pa.Array:
    """Return the cells of a column in one array: of Excel cells the text, of other columns the cells unchanged."""
    cells = column.combine_chunks()
    return cells.field("text") if cells.type == EXCEL_CELL else cells


def select_columns(
    path: object, table: pa.Table, columns: Sequence[str], may_lack: Container[str]
) -> pa.Table:
    """Return columns of a table in memory, by the rules of :func:`open_table`.

    Raises:
        DataError: a column is lacking, or there twice; the error names ``path``.
    """
    pick = partial(_required_columns, path, columns=columns, may_lack=may_lack)
    file_names = _find_columns(table.column_names, pick)
    selected = table.select(list(file_names.values())).rename_columns(list(file_names))
    return _add_lacking(selected, columns)


def _required_columns(
    path: object, present: list[str], *, columns: Sequence[str] | None, may_lack: Container[str]
) -> list[str]:
    """Return the requested columns that the file has; each must occur exactly once unless the file may lack it.

    A column that the file may lack is refused if the file has it in another case, or without declared surrounding
    blanks: it would silently be read as missing in every record.
    """
    if columns is None:
        columns = present
    cases = {name.lower() for name in present}
    lacking = [name for name in columns if name not in present]
    _refuse_lacking(
        path,
        present,
        columns,
        [name for name in lacking if name not in may_lack or name.strip().lower() in cases],
    )
    for column in columns:
        if present.count(column) > 1 and column:
            raise DataError(
                f"{path} has {present.count(column)} columns '{sanitize(column)}', and exactly one is needed; it has: "
                f"{sanitize(', '.join(present))}"
            )
    if columns and len(lacking) == len(columns):  # not a single requested column: probably another table
        _refuse_lacking(path, present, columns, lacking)
    return [name for name in columns if name in present]


def _refuse_lacking(path: object, present: list[str], columns: Sequence[str], lacking: Sequence[str]) -> None:
    if lacking:
        several, names = "s" * (len(lacking) > 1), "', '".join(map(sanitize, lacking))
        available = describe_columns(present, columns, lacking[0] if len(lacking) == 1 else "")
        if any(REPLACED in name for name in present):
            where = sanitize(_where_to_declare(Path(str(path))))
            available += f"; the header is written in another encoding; declare it {where}"
        raise LackingColumnsError(f"{path} has no column{several} '{names}'; it has: {available}", lacking)


def _without_values(error: Exception) -> str:
    """Return Arrow's error message without the cells that it quotes."""
    message = str(error)
    if "Empty CSV file" in message:
        return "it is empty; one without records has its header"
    reason = next((match.group() for pattern in _REASONS if (match := pattern.search(message))), None)
    return reason or message.split(":")[0]
