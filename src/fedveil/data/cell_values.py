"""Values of single table cells: numbers, whole numbers, ids and days, parsed from the cell's text.

Programs that write tables choose one type for a whole column. One missing cell turns the whole numbers of a pandas
column into ``0.0`` and ``1.0``; one time of day turns its dates into ``2020-01-31 00:00:00``. So one person's cell
changes how the cells of all other people are written. A declared value is therefore matched by the value of a cell,
not by its text alone. Every function here reads one cell, never the column.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import cache
from typing import Final

MOST_EXACT: Final = 1 << 53
"""Bound on the absolute value of exact whole numbers in float64 (2^53): larger ones may have been rounded before the
program wrote them."""

MARKS_IN_DATES: Final = {"d": 2, "m": 2, "Y": 4, "H": 2, "I": 2, "M": 2, "S": 2, "f": 6}
"""Directives of ``strptime`` that stand for digits, and their largest number of digits."""

_EPOCH: Final = date(1970, 1, 1).toordinal()
_TRUTH: Final = {"false": 0, "False": 0, "FALSE": 0, "true": 1, "True": 1, "TRUE": 1}
_NUMBER: Final = re.compile(r"[+-]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?")
_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]*")
_NO_FRACTION: Final = re.compile(r"(0|-?[1-9][0-9]*)\.0+")
_CLOCK: Final = re.compile(r"[ T](?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,9})?)?\Z")
_CLOCK_MARKS: Final = re.compile(r"[ T]%H:%M(?::%S(?:\.%f)?)?\Z")
_MARKS: Final = re.compile(r"%.|\s+|.", re.DOTALL)


@dataclass(frozen=True)
class NumberMarks:
    """The marks in numbers that are text.

    Attributes:
        decimal: decimal mark, "." or ",".
        thousands: mark between groups of three digits; None: numbers have none. A space also stands for the
            no-break, thin and narrow no-break space.
    """

    decimal: str = "."
    thousands: str | None = None

    @property
    def between_groups(self) -> str:
        """Regular expression of the thousands mark."""
        assert self.thousands is not None
        return "[ \u00a0\u2009\u202f]" if self.thousands == " " else re.escape(self.thousands)

    @property
    def grouped(self) -> str:
        """Regular expression of a whole cell whose digits are in groups of three: ``1.234.567,8``."""
        return rf"^[+-]?[1-9][0-9]{{0,2}}(?:{self.between_groups}[0-9]{{3}})+(?:{re.escape(self.decimal)}[0-9]*)?$"

    def described(self) -> str:
        """Return the marks for an error."""
        between = "" if self.thousands is None else f", thousands mark '{self.thousands}'"
        return f"decimal mark '{self.decimal}'{between}"

    def pointed(self, cell: str) -> str:
        """Return a number's text with a decimal point and without thousands marks.

        Digits that are not in groups of three keep their marks, so that they are no number. If the decimal mark is a
        comma, any other point is replaced by ``?``, so that ``1.000`` (a thousand) is refused, not read as 1.

        >>> NumberMarks(",", ".").pointed("1.234,5"), NumberMarks(",", ".").pointed("1.23")
        ('1234.5', '1?23')
        """
        if self.thousands is not None and re.match(self.grouped, cell):
            cell = re.sub(self.between_groups, "", cell)
        return cell if self.decimal == "." else cell.replace(".", "?").replace(self.decimal, ".")


USUAL_MARKS: Final = NumberMarks()


def number_of(cell: str | None) -> float | None:
    """Return a cell as a number, None if it is no number.

    ``1_0`` is Python syntax and not a number of a table.
    """
    try:
        return None if cell is None or "_" in cell else float(cell)
    except ValueError:
        return None


def whole_number(cell: str, marks: NumberMarks = USUAL_MARKS) -> int | None:
    """Return the whole number below 2^53 in absolute value that a cell stands for, or None.

    A number with leading zeros is a code and stands for no number: ``010`` and ``10`` are different diagnoses.

    >>> [whole_number(cell) for cell in ("1", "1.0", "1E+03", "-0.0", "01", "1.5", "true", "9007199254740993")]
    [1, 1, 1000, 0, None, None, None, None]
    """
    cell = marks.pointed(cell)
    if not _NUMBER.fullmatch(cell):
        return None
    value = Decimal(cell)
    exact = abs(value) < MOST_EXACT and value == value.to_integral_value()
    return int(value) if exact else None


def without_fraction(cell: str, marks: NumberMarks = USUAL_MARKS) -> str:
    """Strip a fraction of zeros, and thousands marks, from a whole number below 2^53; return other cells unchanged.

    This is the rule for ids. Numbers in exponent notation stay unchanged: a program may have rounded several ids to
    the same such number.

    >>> [without_fraction(cell) for cell in ("7.0", "-9.00", "07.0", "7.5", "1E+03", "9007199254740992.0")]
    ['7', '-9', '07.0', '7.5', '1E+03', '9007199254740992.0']
    """
    pointed = marks.pointed(cell)
    if marks.thousands is not None and _WHOLE.fullmatch(pointed):
        pointed += ".0"
    match = _NO_FRACTION.fullmatch(pointed)
    return match[1] if match and len(match[1]) < 18 and abs(int(match[1])) < MOST_EXACT else cell


class DeclaredValues:
    """Lookup of declared texts by their value as a whole number or truth value.

    A value that belongs to declared texts with different places is left out, because it is ambiguous. Truth values
    stand for 1 and 0, and only if both 0 and 1 are declared.

    Args:
        places: place of each declared text; several texts may have the same place.
        marks: the marks in numbers.

    >>> find = DeclaredValues({"0": 0, "1": 1, "unknown": 2}).place
    >>> find("1.0"), find("TRUE"), find("2.0"), DeclaredValues({"1": 0, "2": 1}).place("True")
    (1, 1, None, None)
    """

    def __init__(self, places: Mapping[str, int], marks: NumberMarks = USUAL_MARKS) -> None:
        # `_value` reads truth values while `_truth` is set: declared "true" and "false" count as declared 1 and 0.
        self._marks, self._truth = marks, True
        values = {self._value(text) for text in places}
        self._truth = {0, 1} <= values
        indices: dict[int, set[int]] = {}
        for text, index in places.items():
            if (value := self._value(text)) is not None:
                indices.setdefault(value, set()).add(index)
        self._places = {value: same.pop() for value, same in indices.items() if len(same) == 1}

    def place(self, cell: str) -> int | None:
        """Return the place of the declared text with the same value as a cell, None if no text has it."""
        value = self._value(cell)
        return None if value is None else self._places.get(value)

    def _value(self, text: str) -> int | None:
        return _TRUTH[text] if self._truth and text in _TRUTH else whole_number(text, self._marks)


def day_of(cell: str, date_format: str) -> int | None:
    """Return a cell's day since 1970-01-01, None if it is no date of this format.

    A time of day after the date is ignored, whether the format has one or not: a program writes times in the whole
    column if one cell has one. Adjacent numeric directives need all their digits (:func:`date_pattern`).

    >>> [day_of(cell, "%d%m%Y") for cell in ("02011970", "2011970", "02011970 00:00:00")]
    [1, None, 1]
    """
    # First the cell as it is, then cell and format without their times of day.
    for text, form in ((cell, date_format), (_CLOCK.sub("", cell), _CLOCK_MARKS.sub("", date_format))):
        if date_pattern(form).fullmatch(text):
            try:
                return datetime.strptime(text, form).date().toordinal() - _EPOCH
            except ValueError:
                continue
    return None


@cache
def date_pattern(date_format: str) -> re.Pattern[str]:
    """Return a regular expression for the texts of a date format that have exactly one reading.

    ``strptime`` accepts one or two digits for a day or a month: under ``%d%m%Y`` it reads ``1012020`` as 10 January,
    and 1 January fits as well. So in a run of numeric directives that touch one another, or literal digits, the
    pattern requires the full width of each directive. No directive can have more digits, so the run has one reading.
    Directives between other characters have one reading anyway.
    """
    parts = list[str]()
    marks: list[str] = _MARKS.findall(date_format)
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
