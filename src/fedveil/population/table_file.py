"""One table as a file: CSV, Parquet or Excel, read once into columns, CSV cells as text.

No error repeats a value.
"""

import codecs
import re
from collections.abc import Callable, Container, Sequence
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from jaxtyping import Int64, UInt8

from fedveil.errors import ConfigError, DataError, meant
from fedveil.files import LARGEST_FILE, check_file, read_content
from fedveil.foreign import foreign
from fedveil.population.schema import Format

EXCEL: Final = (".xlsx", ".xls", ".ods")
EXCEL_CELL: Final = pa.struct([("text", pa.string()), ("day", pa.date32()), ("id", pa.bool_())])
"""A cell of an Excel file: its text, its day if it is a date, and whether it may be an id, being text or a whole number
that Excel holds exactly. Each is a function of the cell alone, whatever else its column holds."""

REPLACED: Final = "\ufffd"
"""What stands in a cell for bytes that are no text."""

DELIMITERS: Final = ",;\t|"
"""Those that CSV files usually have."""

_Pick: TypeAlias = Callable[[list[str]], list[str]]
"""From the columns that a file has to those that are read."""

_READ: Final = (".csv", ".parquet", *EXCEL)
_USUAL: Final = Format()
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_WHOLE: Final = (
    "write a cell in one line, and one with a mark inside of it between marks, the inner one twice"
)

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
"""What Arrow says was wrong, up to where it quotes a cell or a path."""

_UNEVEN: Final = " columns, got "
"""In what Arrow says of a line with more or fewer cells than the header."""


class LackingColumnsError(DataError):
    """A file does not have columns that are needed.

    Attributes:
        columns: their names.
    """

    def __init__(self, told: str, columns: Sequence[str]) -> None:
        super().__init__(told)
        self.columns = tuple(columns)


def open_table(
    path: Path,
    columns: Sequence[str] | None,
    written: Format = _USUAL,
    *,
    tolerant: bool = False,
    may_lack: Container[str] = frozenset(),
) -> pa.Table:
    """Read these columns of a table (None: all of them).

    Args:
        path: a ``.csv``, ``.parquet``, ``.xlsx``, ``.xls`` or ``.ods`` file.
        columns: by name, without the blanks around it; each must be there once.
        written: how a CSV or Excel file is written.
        tolerant: whether bytes of a CSV file that are no text are read as U+FFFD, so that they are invalid in their
            own cell, and nothing is refused because of them.
        may_lack: columns whose cells are all missing where the file does not have them.

    Returns:
        The columns in the order asked for. CSV cells are text; Excel cells are of the type :data:`EXCEL_CELL`.

    Raises:
        DataError: no such file, another format, or columns that are missing (named, with those the file has).
        ConfigError: an Excel file, and nothing is installed that reads it.
    """
    if path.suffix not in _READ:
        raise DataError(f"{path}: a table is a .csv, a .parquet or an Excel file ({', '.join(EXCEL)})")
    pick = partial(_required_columns, path, columns=columns, may_lack=may_lack)
    try:
        if path.suffix == ".parquet":
            check_file(path, DataError)
            return _completed(_parquet(path, pick), columns)
        content = read_content(path, DataError, largest=LARGEST_FILE)
        if path.suffix in EXCEL:
            return _completed(_excel(path, pick, written), columns)
        text = _in_utf8(path, content, written.encoding, tolerant)
        _check_delimiter(path, text, columns, written.delimiter)
        return _completed(_csv(path, _whole_lines(path, text, written.delimiter), pick, written), columns)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or 'damaged'}") from error
    except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError) as error:
        raise DataError(f"{path} is damaged or no {path.suffix} file: {_without_values(error)}") from error


def _check_delimiter(path: Path, content: bytes, columns: Sequence[str] | None, declared: str) -> None:
    """Refuse a header that is one column under the declared delimiter and several under another one."""
    header = content.partition(b"\n")[0].decode(errors="replace")
    other = max(DELIMITERS, key=header.count)
    if columns is not None and len(columns) > 1 and declared not in header and other in header:
        raise DataError(
            f"{path}: the header has no {declared!r}, the declared delimiter, but it has {other!r}: declare it in the "
            "schema, format.delimiter"
        )


def _completed(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    """Return a table with all columns that were asked for; one that the file lacks has no value."""
    lacked = [name for name in columns or () if name not in table.column_names]
    for name in lacked:
        table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
    return table.select(columns) if lacked else table


def _csv(path: Path, content: bytes, pick: _Pick, written: Format) -> pa.Table:
    try:
        return _parsed(content, pick, written)
    except pa.ArrowInvalid as error:
        if _UNEVEN in str(error):
            _refuse_uneven(path, content, written.delimiter)
        raise


def _parsed(content: bytes, pick: _Pick, written: Format) -> pa.Table:
    parsing = pa_csv.ParseOptions(delimiter=written.delimiter)
    # A copy in Arrow's own memory: its threads let go of it last, and of Python's they would abort a process that ends.
    held = pa.array([content], pa.large_binary()).buffers()[2]
    with pa_csv.open_csv(pa.BufferReader(held), parse_options=parsing) as reader:
        read = _named(reader.schema.names, pick)
    own = list(read.values())
    as_text = pa_csv.ConvertOptions(
        include_columns=own, column_types=dict.fromkeys(own, pa.string()), strings_can_be_null=False
    )
    table = pa_csv.read_csv(pa.BufferReader(held), parse_options=parsing, convert_options=as_text)
    return table.rename_columns(list(read))


def _named(present: Sequence[str], pick: _Pick) -> dict[str, str]:
    """Return the columns to read, by their names without the blanks around them, each as the file calls it."""
    names = [one.strip() for one in present]
    return {one: present[names.index(one)] for one in pick(names)}


def _in_utf8(path: Path, content: bytes, encoding: str, tolerant: bool) -> bytes:
    """Return a text's bytes in UTF-8, as Arrow reads them."""
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # in the header, which is public
    wide = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    if tolerant and (wide or not marked):
        return content.decode(encoding, errors="replace").encode()
    try:
        if encoding.lower().replace("_", "-") not in ("utf-8", "utf8", "ascii"):
            return content.decode(encoding).encode()
        content.decode()
        return content
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not {encoding}; convert the file, or declare the encoding that all files "
            "have in the schema: format.encoding (latin-1, cp1252, utf-16, ...)"
        ) from None


def _whole_lines(path: Path, content: bytes, delimiter: str) -> bytes:
    """Return the content if every line of it is whole: a mark opens a cell at its start or closes it at its end.

    A cell that goes on in the next line would make one record of many, or, where a reader takes the file in blocks,
    many of one, by where it stands: one person's cell would decide which records of others there are. The number of
    marks in a line does not tell: readers take a mark inside of a cell for a letter, and the next one for an opening.
    Of the marks of a line, the 1st, 3rd, ... open and the 2nd, 4th, ... close; a doubled mark closes and opens again.

    Raises:
        DataError: a line that is not whole, by its number.
    """
    if _QUOTE not in content:
        return content
    byte = np.frombuffer(content, dtype=np.uint8)
    ends = _ends(byte)
    marks = np.flatnonzero(byte == _QUOTE)
    lines = np.searchsorted(ends, marks)
    odd = np.flatnonzero(np.bincount(lines) % 2)
    if len(odd):
        _refuse_line(path, content, ends, int(odd[0]), f"an odd number of quotation marks; {_WHOLE}")
    border = np.array([_NEWLINE, _RETURN, _QUOTE, *delimiter.encode()], dtype=np.uint8)
    start = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    opening, closing = marks[0::2], marks[1::2]
    opens = (opening == start) | np.isin(byte[opening - 1], border)
    closes = (closing == len(byte) - 1) | np.isin(byte[np.minimum(closing + 1, len(byte) - 1)], border)
    inside = np.flatnonzero(~(opens & closes))
    if len(inside):
        _refuse_line(
            path, content, ends, int(lines[2 * inside[0]]), f"a quotation mark inside of a cell; {_WHOLE}"
        )
    return content


def _refuse_uneven(path: Path, content: bytes, delimiter: str) -> None:
    """Refuse the first line that has more or fewer cells than the header.

    Empty lines are none to the reader. As every line is whole, a delimiter behind an odd number of marks is a letter.
    """
    byte = np.frombuffer(content, dtype=np.uint8)
    ends, found = _ends(byte), np.flatnonzero(byte == ord(delimiter))
    borders = found[np.searchsorted(np.flatnonzero(byte == _QUOTE), found) % 2 == 0]
    cells = 1 + np.bincount(np.searchsorted(ends, borders), minlength=len(ends) + 1)
    lines = np.flatnonzero(np.diff(ends, prepend=-1, append=len(byte)) > 1)
    uneven = lines[cells[lines] != cells[lines[0]]]
    if len(uneven):
        there, needed = int(cells[uneven[0]]), int(cells[lines[0]])
        problem = (
            f"it has {there} cell{'s' * (there > 1)}, and the header {needed}; write every cell, empty ones too, and "
            f"one with {delimiter!r}, the delimiter, inside of it between quotation marks"
        )
        _refuse_line(path, content, ends, int(uneven[0]), problem)


def _ends(byte: UInt8[np.ndarray, " n"]) -> Int64[np.ndarray, " e"]:
    """Return where lines end: every ending is one, as it is for the reader, and ``CR LF`` is two."""
    return np.flatnonzero((byte == _NEWLINE) | (byte == _RETURN))


def _refuse_line(
    path: Path, content: bytes, ends: Int64[np.ndarray, " e"], index: int, problem: str
) -> NoReturn:
    before = content[: int(ends[index - 1]) + 1] if index else b""
    line = before.count(b"\n") + before.count(b"\r") - before.count(b"\r\n") + 1
    raise DataError(f"{path}, line {line}: {problem}")


def _parquet(path: Path, pick: _Pick) -> pa.Table:
    """Read a Parquet file piece by piece: room is made for the rows that it has, not for those that it announces."""
    with pa_parquet.ParquetFile(path) as file:
        present = file.schema_arrow
        read = _named(present.names, pick)
        own = list(read.values())
        pieces = [piece.select(own) for piece in file.iter_batches(columns=own)]
        table = pa.Table.from_batches(pieces, pa.schema([present.field(name) for name in own]))
        if table.num_rows != file.metadata.num_rows:
            raise DataError(
                f"{path}: is damaged: it has {table.num_rows} rows and announces {file.metadata.num_rows}"
            )
        return table.rename_columns(list(read))


def _excel(path: Path, pick: _Pick, written: Format) -> pa.Table:
    try:
        calamine: Any = import_module("python_calamine")
    except ImportError:
        raise ConfigError(
            f"{path}: Excel files are read by the extra excel: pip install 'fedveil[excel]'"
        ) from None
    try:
        book = calamine.CalamineWorkbook.from_path(str(path))
        sheets = book.sheet_names
        if written.sheet is not None and written.sheet not in sheets:
            raise DataError(f"{path} has no sheet '{written.sheet}'; it has: {foreign(', '.join(sheets))}")
        if not sheets:
            raise DataError(f"{path} has no sheet")
        rows = book.get_sheet_by_name(written.sheet or sheets[0]).to_python(skip_empty_area=False)
    except calamine.CalamineError:
        raise DataError(f"{path} is damaged or no {path.suffix} file") from None
    if not rows:
        raise DataError(f"{path}: the sheet is empty; its first row names the columns")
    header, *body = rows
    names = [str(cell) for cell in header]
    read = {name: names.index(own) for name, own in _named(names, pick).items() if name}
    return pa.table({name: _cells([row[at] for row in body], written) for name, at in read.items()})


def _cells(cells: list[Any], written: Format) -> pa.Array:
    """Return an Excel column, one cell by one; an empty cell has no text."""
    found = [
        {
            "text": None if cell == "" else _text(cell, written),
            "day": date(cell.year, cell.month, cell.day) if isinstance(cell, date) else None,
            "id": isinstance(cell, str) or (_is_whole(cell) and abs(cell) < 1 << 53),
        }
        for cell in cells
    ]
    return pa.array(found, EXCEL_CELL)


def _text(cell: Any, written: Format) -> str:
    """Return one cell as somebody would have written it."""
    if isinstance(cell, bool):
        return str(int(cell))
    if isinstance(cell, float) and not _is_whole(cell):
        return repr(cell).replace(".", written.decimal)
    if isinstance(cell, date):
        return str(date(cell.year, cell.month, cell.day))
    return str(int(cell)) if _is_whole(cell) else str(cell)


def _is_whole(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool) and float(cell).is_integer()


def without_days(column: pa.ChunkedArray) -> pa.Array:
    """Return a column's cells as others read them: those of an Excel file as their text."""
    cells = column.combine_chunks()
    return cells.field("text") if cells.type == EXCEL_CELL else cells


def _required_columns(
    path: Path, present: list[str], *, columns: Sequence[str] | None, may_lack: Container[str]
) -> list[str]:
    """The columns to read: those asked for, each of which the file must have once, or may lack.

    One that it may lack and has in another case, or without the blanks that somebody declared around it, is not
    lacking: it would be read as missing in every record.
    """
    if columns is None:
        columns = present
    cases = {one.lower() for one in present}
    lacking = [one for one in columns if one not in present]
    _refuse_lacking(
        path, present, [one for one in lacking if one not in may_lack or one.strip().lower() in cases]
    )
    for column in columns:
        if present.count(column) > 1 and column:
            raise DataError(
                f"{path} has {present.count(column)} columns '{foreign(column)}', and exactly one is needed; it has: "
                f"{foreign(', '.join(present))}"
            )
    if columns and len(lacking) == len(columns):
        _refuse_lacking(path, present, lacking)
    return [one for one in columns if one in present]


def _refuse_lacking(path: Path, present: list[str], lacking: Sequence[str]) -> None:
    if lacking:
        several, names = "s" * (len(lacking) > 1), "', '".join(map(foreign, lacking))
        near = meant(lacking[0], present) if len(lacking) == 1 else ""
        if any(REPLACED in name for name in present):
            near += "; the header is written in another encoding than the schema's: declare format.encoding"
        told = (
            f"{path} has no column{several} '{names}'; it has: {foreign(', '.join(present))}{foreign(near)}"
        )
        raise LackingColumnsError(told, lacking)


def _without_values(error: Exception) -> str:
    """What Arrow says was wrong, without the cells that it quotes."""
    said = str(error)
    if "Empty CSV file" in said:
        return "it is empty; one without records has its header"
    found = next((match.group() for pattern in _REASONS if (match := pattern.search(said))), None)
    return found or said.split(":")[0]
