"""Values that the text of one table cell stands for: numbers, whole numbers, ids, days.

Programs that write tables choose one type for a whole column. One missing cell turns the whole numbers of a pandas
column into ``0.0`` and ``1.0``; one time of day turns its dates into ``2020-01-31 00:00:00``. So one person's cell
changes how everybody else's cells are written. A declared value is therefore matched by what a cell stands for. Every
function here looks at one cell alone, never at the column.
"""

import re
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from functools import cache
from typing import Final

MOST_EXACT: Final = 1 << 53
"""Whole numbers below it, by size, are exact in float64; a program may have rounded others before it wrote them."""

MARKS_IN_DATES: Final = {"d": 2, "m": 2, "Y": 4, "H": 2, "I": 2, "M": 2, "S": 2, "f": 6}
"""Marks of ``strptime`` that stand for digits, and their largest number of digits."""

_EPOCH: Final = date(1970, 1, 1).toordinal()
_TRUTH: Final = {"false": 0, "False": 0, "FALSE": 0, "true": 1, "True": 1, "TRUE": 1}
_NUMBER: Final = re.compile(r"[+-]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?")
_NO_FRACTION: Final = re.compile(r"(0|-?[1-9][0-9]*)\.0+")
_CLOCK: Final = re.compile(r"[ T](?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,9})?)?\Z")
_CLOCK_MARKS: Final = re.compile(r"[ T]%H:%M(?::%S(?:\.%f)?)?\Z")
_MARKS: Final = re.compile(r"%.|\s+|.", re.DOTALL)


def number_of(cell: str | None) -> float | None:
    """Return a cell as a number, None if it is none; ``1_0`` is Python's, and no table's."""
    try:
        return None if cell is None or "_" in cell else float(cell)
    except ValueError:
        return None


def whole_number(cell: str, decimal: str = ".") -> int | None:
    """Return the whole number below 2^53 that a cell stands for, None if it stands for none.

    A number with leading zeros is a code and stands for no number: ``010`` and ``10`` are different diagnoses.

    >>> [whole_number(cell) for cell in ("1", "1.0", "1E+03", "-0.0", "01", "1.5", "true", "9007199254740993")]
    [1, 1, 1000, 0, None, None, None, None]
    """
    cell = _pointed(cell, decimal)
    if not _NUMBER.fullmatch(cell):
        return None
    value = Decimal(cell)
    exact = abs(value) < MOST_EXACT and value == value.to_integral_value()
    return int(value) if exact else None


def without_fraction(cell: str, decimal: str = ".") -> str:
    """Return a whole number below 2^53 without the fraction of zeros that is behind it; any other cell as it is.

    This is the rule for ids. Numbers in exponent notation stay as they are: a program may have written several ids
    as one of them.

    >>> [without_fraction(cell) for cell in ("7.0", "-9.00", "07.0", "7.5", "1E+03", "9007199254740992.0")]
    ['7', '-9', '07.0', '7.5', '1E+03', '9007199254740992.0']
    """
    found = _NO_FRACTION.fullmatch(_pointed(cell, decimal))
    return found[1] if found and len(found[1]) < 18 and abs(int(found[1])) < MOST_EXACT else cell


def _pointed(cell: str, decimal: str) -> str:
    """Return a number's text with a decimal point; a point under another decimal mark makes it no number."""
    return cell if decimal == "." else cell.replace(".", "?").replace(decimal, ".")


class DeclaredValues:
    """The whole numbers and truth values among declared texts.

    A value that several declared texts with different places have is left out: nothing says which of them is meant.
    Truth values stand for 1 and 0, and only where both are declared.

    Args:
        places: declared texts, each with its place; several may have the same one.
        decimal: the decimal mark.

    >>> find = DeclaredValues({"0": 0, "1": 1, "unknown": 2}).place
    >>> find("1.0"), find("TRUE"), find("2.0"), DeclaredValues({"1": 0, "2": 1}).place("True")
    (1, 1, None, None)
    """

    def __init__(self, places: Mapping[str, int], decimal: str = ".") -> None:
        self._decimal, self._truth = decimal, True
        values = {self._value(text) for text in places}
        self._truth = {0, 1} <= values
        found: dict[int, set[int]] = {}
        for text, place in places.items():
            if (value := self._value(text)) is not None:
                found.setdefault(value, set()).add(place)
        self._places = {value: same.pop() for value, same in found.items() if len(same) == 1}

    def place(self, cell: str) -> int | None:
        """Return the place of the declared text that has a cell's value, None where there is no such text."""
        value = self._value(cell)
        return None if value is None else self._places.get(value)

    def _value(self, text: str) -> int | None:
        return _TRUTH[text] if self._truth and text in _TRUTH else whole_number(text, self._decimal)


def day_of(cell: str, written: str) -> int | None:
    """Return a cell's day since 1970-01-01, None if it is no date of this format.

    A time of day behind the date is ignored, whether the format has one or not: a program writes times in a whole
    column as soon as one cell of it has one. Digits of marks that touch must be complete (:func:`date_pattern`).

    >>> [day_of(cell, "%d%m%Y") for cell in ("02011970", "2011970", "02011970 00:00:00")]
    [1, None, 1]
    """
    for text, form in ((cell, written), (_CLOCK.sub("", cell), _CLOCK_MARKS.sub("", written))):
        if date_pattern(form).fullmatch(text):
            try:
                return datetime.strptime(text, form).date().toordinal() - _EPOCH
            except ValueError:
                continue
    return None


@cache
def date_pattern(written: str) -> re.Pattern[str]:
    """Return what texts of a date format look like, so that each of them is of one day.

    ``strptime`` takes one digit or two for a day or a month: under ``%d%m%Y`` it reads ``1012020`` as 10 January, and
    1 January fits as well. In a run of marks that touch one another, or digits, each mark has all of its digits here;
    as none can have more, the run has one reading. Marks between other characters have one reading anyway.
    """
    parts = list[str]()
    marks: list[str] = _MARKS.findall(written)
    for before, mark, after in zip(["", *marks], marks, [*marks[1:], ""], strict=False):
        width = MARKS_IN_DATES.get(mark[1:]) if mark.startswith("%") else None
        if width is not None:
            touching = _is_numeric(before) or _is_numeric(after)
            parts.append(rf"[\d ]\d{{{width - 1}}}" if touching else r" ?\d+")
        elif mark.startswith("%"):
            parts.append("%" if mark == "%%" else ".+?")
        else:
            parts.append(r"\s+" if mark.isspace() else re.escape(mark))
    return re.compile("".join(parts), re.IGNORECASE)


def _is_numeric(mark: str) -> bool:
    return mark.isdigit() or (mark.startswith("%") and mark[1:] in MARKS_IN_DATES)
