"""Checks of record columns (dtypes, shapes, finiteness, targets) and of declared bounds and formats."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import numpy as np

from fedveil.data.cell_values import MARKS_IN_DATES, whole_number
from fedveil.errors import DataError
from fedveil.sanitize import sanitize

CHUNK: Final = 1 << 18
"""Number of values that are processed at once, so that a memory-mapped table is never loaded as a whole."""


SEVERAL_TARGETS: Final = frozenset({"multi-label", "multi-output"})
"""Tasks of k targets of a record: k labels, each 0 or 1, or k numbers."""

_LARGEST_BOUND: Final = 3.4e38
"""Largest absolute value of a declared bound, just below the largest float32 (3.4028e38)."""

_NAMES_A_DAY_AGAIN: Final = frozenset({"%b", "%B", "%c", "%G", "%j", "%U", "%V", "%W", "%x"})
"""Directives that repeat the day, month or year of %d, %m and %Y: a text could name two dates."""


def check_declared_bounds(lower: object, upper: object, outside: str) -> None:
    """Refuse one bound without the other, and clipping without bounds.

    Raises:
        ValueError: names what is missing.
    """
    if (lower is None) != (upper is None):
        raise ValueError("lower and upper go together: give both or neither")
    if lower is None and outside == "clip":
        raise ValueError("outside: clipping needs bounds; give lower and upper")


def check_distinct(columns: tuple[str, ...]) -> None:
    """Refuse a column that is named twice.

    Raises:
        ValueError: a column is named twice.
    """
    if len(set(columns)) != len(columns):
        raise ValueError("columns: a column is named twice")


def check_count(lower: float | None, upper: float | None) -> None:
    """Refuse bounds of a count other than 0 and a whole number.

    Raises:
        ValueError: names the bounds that are needed.
    """
    if lower != 0 or upper is None or not upper.is_integer():
        raise ValueError(
            "count: give lower = 0 and upper, the largest count, as a whole number (about 4 times the mean that you "
            'expect; outside = "clip" takes larger counts for it)'
        )


def check_bounds(lower: int | float, upper: int | float) -> None:
    """Check that lower < upper in float32, which holds both bounds and their difference.

    Otherwise a value that is scaled by the bounds, or clipped to them, could become infinite or NaN, and one person's
    cell would cause all tables to be refused.

    Raises:
        ValueError: the bounds are out of order, too near each other, or too large.
    """
    if not lower < upper:
        raise ValueError("lower must be below upper")
    if max(abs(lower), abs(upper)) <= _LARGEST_BOUND and not np.float32(lower) < np.float32(upper):
        raise ValueError("lower and upper are the same number in float32; declare bounds further apart")
    if max(abs(lower), abs(upper), upper - lower) > _LARGEST_BOUND:
        raise ValueError("lower and upper must be numbers of at most 3.4e38, as must be their distance")


def check_date_format(date_format: str) -> None:
    """Check that a ``strptime`` format gives every day exactly one text, and every text exactly one day.

    Raises:
        ValueError: the format lacks day, month or year, names one of them twice, or cannot be parsed.
    """
    marks = re.findall("%.", date_format)
    if "%y" in marks:
        raise ValueError(
            "format: %y, a year of two digits, has no century; write years with four, in the tables too, and %Y"
        )
    if not {"%d", "%m", "%Y"} <= set(marks):
        raise ValueError("format must have a day %d, a month %m and a year %Y")
    if again := sorted(_NAMES_A_DAY_AGAIN & set(marks)):
        raise ValueError(f"format: {again[0]} beside %d, %m and %Y names the day twice; leave it out")
    if re.search(rf"%z(\d|%[{''.join(MARKS_IN_DATES)}])", date_format):
        raise ValueError(
            "format: a digit may not follow %z directly, whose length varies; write a blank between them"
        )
    # `strptime` raises re.error for a directive that occurs twice, and ValueError for one that it does not support.
    try:
        datetime.strptime(datetime(2001, 2, 3, tzinfo=UTC).strftime(date_format), date_format)
    except (ValueError, re.error):
        raise ValueError(
            "format: no text is read by it; use marks of Python's strptime alone, and each once"
        ) from None


def check_spellings(also: Mapping[str, str] | None, declared: Sequence[str]) -> None:
    """Check that every alternative spelling maps to a declared value, and is not itself a declared value.

    Raises:
        ValueError: a spelling violates this; the error names the first one.
    """
    for spelling, meant in (also or {}).items():
        if spelling in declared or meant not in declared:
            raise ValueError(
                'also: another spelling and the declared value that it stands for, as in { f = "F" }; '
                f"'{sanitize(spelling)}' = '{sanitize(meant)}' is none"
            )


def check_not_missing(column: str, declared: Sequence[str], missing_values: Sequence[str]) -> None:
    """Check that no declared value or spelling is also a missing value.

    The cells of such a value would silently count as missing.

    Whole numbers are compared by value: a program may write ``1`` as ``1.0``.

    Raises:
        ValueError: a value is both; the error names column and value, which the public schema contains.
    """
    numbers = {whole_number(value) for value in missing_values} - {None}
    for value in declared:
        if value in missing_values or whole_number(value) in numbers:
            raise ValueError(
                f"column '{sanitize(column)}': '{sanitize(value)}' is declared, and is one of missing_values, "
                "so that its "
                "cells would be missing; leave it out of one of them"
            )


def check_columns(where: str, features: np.ndarray, targets: np.ndarray) -> None:
    """Check lengths, dtypes, shapes and finiteness of features and targets.

    Args:
        where: name of the table in errors.
        features: (n, ...) float32 or uint8.
        targets: (n,) int64 labels, (n,) float32 numbers, or (n, k) float32: (event, time) or (event, time,
            entry), k labels or k numbers.

    Raises:
        DataError: lengths differ, a dtype or shape is another, or a value is not finite. The error names table, row
            and column.
    """
    if features.dtype not in (np.float32, np.uint8) or features.ndim < 2:
        raise DataError(
            f"{where}: features must be (records, ...) of float32 or uint8, not {describe_values(features)}"
        )
    labels = targets.dtype == np.int64 and targets.ndim == 1
    numbers = targets.dtype == np.float32 and targets.ndim in (1, 2)
    if not labels and not numbers:
        raise DataError(
            f"{where}: targets must be (records,) int64 labels, (records,) float32 numbers or (records, k) float32: "
            f"(event, time), k labels or k numbers, not {describe_values(targets)}"
        )
    if len(features) != len(targets):
        raise DataError(
            f"{where} has {len(features)} rows of features and {len(targets)} targets; they must agree"
        )
    for name, column in (("feature", features), ("target", targets)):
        location = _first_not_finite(column)
        if location is not None:
            row, suffix = location
            raise DataError(
                f"{where}, row {row}: {name}{suffix} is NaN or infinite; every value must be a finite number"
            )


def check_task(where: str, targets: np.ndarray, task: str, n_classes: int | None) -> None:
    """Check that targets fit a task.

    Classification needs labels in 0 .. n_classes - 1, regression numbers, survival (event in {0, 1}, time >= 0) and
    perhaps an entry in [0, time), multi-label (k in {0, 1}) and multi-output (k numbers), k >= 2.

    Raises:
        DataError: a target does not fit. The error names table and row and the allowed values, never the value.
    """
    if (task == "classification") != (n_classes is not None):
        raise DataError(
            f"{where}: n_classes is a number of classes for classification and None for anything else"
        )
    if n_classes is not None:
        if targets.dtype != np.int64:
            raise DataError(f"{where}: classification needs int64 labels, not {describe_values(targets)}")
        problem = f"the label is outside the classes 0 .. {n_classes - 1}"
    elif task == "survival":
        if targets.shape[1:] not in ((2,), (3,)):
            raise DataError(
                f"{where}: survival needs (records, 2) float32 of (event, time), or (records, 3) with the entry, not "
                f"{describe_values(targets)}"
            )
        problem = "the event must be 0 or 1 and the time must not be negative"
        if targets.shape[1] > 2:
            problem = (
                "the event must be 0 or 1, the time not negative, and the entry from 0 to below the time"
            )
    elif task in SEVERAL_TARGETS:
        if targets.dtype != np.float32 or targets.ndim != 2 or targets.shape[1] < 2:
            single_task = "classification" if task == "multi-label" else "regression"
            raise DataError(
                f"{where}: {task} needs (records, k) float32 targets, k >= 2, not {describe_values(targets)}; a single "
                f"target is a {single_task}"
            )
        problem = "every label must be 0 or 1"
    else:
        if targets.dtype != np.float32 or targets.ndim != 1:
            raise DataError(
                f"{where}: regression needs (records,) float32 targets, not {describe_values(targets)}"
            )
        return
    for first in range(0, len(targets), CHUNK):
        outside = _are_outside(targets[first : first + CHUNK], task, n_classes)
        if outside.any():
            raise DataError(f"{where}, row {first + int(np.argmax(outside))}: {problem}")


def _are_outside(targets: np.ndarray, task: str, n_classes: int | None) -> np.ndarray:
    """Return which targets of the right dtype and shape do not fit a task other than regression."""
    if n_classes is not None:
        outside: np.ndarray = (targets < 0) | (targets >= n_classes)
    elif task == "survival":
        outside = ((targets[:, 0] != 0) & (targets[:, 0] != 1)) | (targets[:, 1] < 0)
        if targets.shape[1] > 2:
            outside |= (targets[:, 2] < 0) | (targets[:, 2] >= targets[:, 1])
    else:
        outside = ((targets != 0) & (targets != 1)).any(axis=1) & (task == "multi-label")
    return outside


def describe_values(array: np.ndarray) -> str:
    """Return an array's dtype and shape in words, for errors."""
    return f"{array.dtype} of shape {array.shape}"


def _first_not_finite(values: np.ndarray) -> tuple[int, str] | None:
    """Return row and column (as words) of the first value that is NaN or infinite; None if all are finite."""
    if values.dtype.kind != "f":
        return None
    width = max(1, int(np.prod(values.shape[1:])))
    step = max(1, CHUNK // width)
    for first in range(0, len(values), step):
        finite = np.isfinite(values[first : first + step])
        if not finite.all():
            row, *column = np.argwhere(~finite)[0].tolist()
            return first + row, _column_words(column)
    return None


def _column_words(column: Sequence[int]) -> str:
    return "" if not column else f" {column[0]}" if len(column) == 1 else f" {tuple(column)}"
