"""Check of quotation marks, lines and records of a CSV text, before Arrow parses it.

Errors name line numbers and repeat no text of the file.
"""

from functools import cached_property
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from fedveil.errors import DataError

_NEWLINE, _RETURN = b"\n\r"
_BOM: Final = b"\xef\xbb\xbf"
_WHOLE: Final = "write a mark inside of a cell twice, and the cell between marks"


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
    def _inner(self) -> Bool[np.ndarray, " b"]:
        """(b,) True for a line break inside a quoted cell."""
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
        if not self._inner.any():
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
        ends = self._breaks[~self._inner]
        borders = self._delimiters[~self._is_inside(self._delimiters)]
        cells = 1 + np.bincount(np.searchsorted(ends, borders), minlength=len(ends) + 1)
        # Two ends with a distance of 1 enclose an empty line, or are the CR and LF of one end: neither is a record.
        records = np.flatnonzero(np.diff(ends, prepend=-1, append=len(self._byte)) > 1)
        uneven = records[cells[records] != cells[records[0]]]  # records[0] is the header
        if len(uneven):
            there, needed = int(cells[uneven[0]]), int(cells[records[0]])
            self._refuse(
                int(ends[uneven[0] - 1]) + 1,
                f"it has {there} cell{'s' * (there > 1)}, and the header {needed}; write every cell, empty ones too, "
                f"and one with {self._delimiter!r}, the delimiter, inside of it between quotation marks",
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
        place = int(opening[cells[np.searchsorted(cells, index, side="right") - 1]])
        line = np.searchsorted(self._breaks, [place])
        odd = np.count_nonzero(np.searchsorted(self._breaks, self._marks) == line) % 2
        self._refuse(
            place,
            f"{'an odd number of quotation marks' if odd else 'a quotation mark inside of a cell'}; {_WHOLE}",
        )

    def _check_records(self) -> None:
        """Refuse the first multi-line record of which every line has at least as many cells as the header."""
        ends = self._breaks[~self._inner]
        borders = self._delimiters[~self._is_inside(self._delimiters)]
        needed = np.count_nonzero(np.searchsorted(ends, borders) == 0)  # delimiters of the header
        # Per line: its delimiters, inside and outside of marks, as if the text had no quotation marks.
        starts = np.append(0, self._breaks + 1)
        inside_lines = np.bincount(np.searchsorted(self._breaks, self._delimiters), minlength=len(starts))
        record = np.append(0, np.cumsum(~self._inner))  # the record of every line
        empty = np.diff(self._breaks, prepend=-1, append=len(self._byte)) <= 1
        fewer = np.bincount(record, weights=(inside_lines < needed) & ~empty)
        several = np.bincount(record, weights=~empty) > 1
        doubtful = np.flatnonzero(several & (fewer == 0))
        if len(doubtful):
            place = int(starts[np.searchsorted(record, doubtful[0])])
            self._refuse(
                place,
                "a cell goes on in the next line, and each of these lines has as many cells as the header, so that a "
                "quotation mark may be wrong; write the cell in one line",
            )

    def _is_inside(self, places: Int64[np.ndarray, " k"]) -> Bool[np.ndarray, " k"]:
        """Return which positions lie between an opening and a closing mark."""
        # An odd number of marks before a position means that the last one opened a cell.
        inside: Bool[np.ndarray, " k"] = np.searchsorted(self._marks, places) % 2 == 1
        return inside

    def _refuse(self, place: int, problem: str) -> NoReturn:
        """Raise a DataError that names the line of a byte position."""
        before = self._content[:place]
        line = before.count(b"\n") + before.count(b"\r") - before.count(b"\r\n") + 1
        raise DataError(f"{self._path}, line {line}: {problem}")
