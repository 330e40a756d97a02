"""Conversion of features, ids, labels and targets from numpy, PyTorch, pandas and pyarrow to numpy.

pandas is never imported; its tables are recognised by their attributes ``columns`` and ``iloc``. Errors count rows
from 0 and repeat no value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from jaxtyping import Int32, Int64

from fedveil.data.cells import (
    numbers_of_cells,
    read_entries,
    refuse_rows,
    stack_records,
    to_array,
    to_float32,
    unwrap,
)
from fedveil.data.column_checks import SEVERAL_TARGETS
from fedveil.data.identities import index_names
from fedveil.data.records import Features, Label, Targets, Task
from fedveil.data.target_leakage import refuse_time_before_event
from fedveil.errors import ConfigError, DataError, did_you_mean, show_argument
from fedveil.sanitize import sanitize

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_EXACT_WHOLE: Final = 1 << 53
"""Bound below which a Python float holds every whole number exactly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureTable:
    """Features as a model reads them, with the column names (None if the input is not a table)."""

    values: Features
    names: tuple[str, ...] | None


def check_alike(columns: Mapping[str, Any]) -> None:
    """Check that all pandas tables and series have equal indexes.

    Rows are matched by position and indexes are not read, so unequal indexes mean that rows may be misaligned.

    Raises:
        DataError: two indexes differ; the error names both columns.
    """
    indexed = {name: column.index for name, column in columns.items() if hasattr(column, "iloc")}
    for first, second in pairwise(indexed):
        if not indexed[first].equals(indexed[second]):
            raise DataError(
                f"{first} and {second}: their pandas indexes differ, and rows are matched by position; align them (by "
                "loc, say), or call reset_index(drop=True) on both where position is what is meant"
            )


def read_features(
    source: Any, where: str = "features", *, column_names: Sequence[str] | None = None
) -> FeatureTable:
    """Read (n, ...) numeric features from an array, a tensor, a list of records, or a numeric table.

    uint8 stays uint8; every other type becomes float32. Records of a list are converted one by one.

    Args:
        source: the features.
        where: name of the argument in errors.
        column_names: columns of a table that are read, in this order; None: all.

    Raises:
        DataError: a wanted column is missing; a value is no number, NaN, infinite, or too large for float32; or the
            array has a single axis. The error names row and column.
    """
    names = names_of(source, where)
    if names is not None:
        read = names if column_names is None else tuple(column_names)
        for name in read:
            if name not in names:
                raise DataError(
                    f"{where}: column '{sanitize(name)}' is missing, on which the model was trained"
                    f"{did_you_mean(name, names)}"
                )
        values = to_float32(_columns(source, {name: names.index(name) for name in read}, where), where)
        names = read
    elif isinstance(source, list | tuple):
        values = stack_records(source, where, keep_bytes=True)
    else:
        values = to_float32(_whole(source, where), where)
    if values.ndim < 2:
        raise DataError(
            f"{where}: one row a record is needed, (records, ...), but the shape is {values.shape}; a single "
            "feature is given as values[:, None]"
        )
    if 0 in values.shape[1:]:
        raise DataError(f"{where}: a record has no feature: the shape is {values.shape}")
    return FeatureTable(values=values, names=names)


def read_ids(source: Any, where: str) -> tuple[list[str], Int32[np.ndarray, " n"]]:
    """Read one id per record, text or a whole number, as text.

    The number 7, the text "7" and the bytes b"7" are the same id: bytes are read as UTF-8.

    Returns:
        The sorted distinct ids, and the (n,) index among them of each record's id.

    Raises:
        DataError: an id is missing, empty, or of another type.
    """
    entries = read_entries(source, where, "id")
    ids, index, kind = entries.values, entries.positions, entries.kind
    if not ids:
        # numpy gives an empty list the type float, which the check below would refuse
        return [], index.astype(np.int32)
    if kind.kind not in "iuUOS":
        raise DataError(
            f"{where}: ids are text or whole numbers, not {kind}; a missing id makes a column of floats"
        )
    ids = [_decoded(entry) if isinstance(entry, bytes) else entry for entry in ids]

    def refuse(is_wrong: list[bool], problem: str) -> None:
        refuse_rows(np.array(is_wrong, dtype=np.bool_)[index], where, problem)

    # bool is a subclass of int, but True is no id.
    refuse(
        [not isinstance(entry, str | int) or isinstance(entry, bool) for entry in ids],
        "the id is missing, or neither text nor a whole number; every record needs one",
    )
    refuse([entry == "" for entry in ids], "the id is empty; every record needs one")
    # An unpaired surrogate has no UTF-8 encoding, so the id could not be hashed to a seed key.
    texts = [str(entry) for entry in ids]
    refuse(
        [not text.isascii() and _SURROGATE.search(text) is not None for text in texts],
        "the id has half a character (a surrogate), which is no text",
    )
    names, of_text = index_names(texts)
    return names, of_text[index]


def _decoded(text: bytes) -> str | None:
    """Return bytes as text; None, which is no id, if they are not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def read_labels(source: Any, classes: Sequence[Any] | None, where: str) -> tuple[Targets, tuple[Label, ...]]:
    """Read class labels; return the class number of each record, and the classes.

    1, 1.0, "1" and True are the same label.

    Args:
        source: one label per record: whole numbers, text or truth values.
        classes: the classes in the order of their numbers; None takes the labels that occur, sorted.
        where: name of the column in errors.

    Raises:
        ConfigError: a class is neither text nor a whole number.
        DataError: a label is missing, of another type, or not among the classes.
    """
    labels, index = _label_entries(source, where)
    if (
        classes is None
    ):  # if one label occurs as a number and as text, the sort lets the number name the class
        written = {
            _label(label): label for label in sorted(set(labels), key=lambda label: isinstance(label, int))
        }
        ordered = sorted(written.values(), key=lambda label: (isinstance(label, str), label))
    else:
        ordered = [_class(label) for label in classes]
    words = tuple(_label(label) for label in ordered)
    if len(set(words)) != len(words):
        raise DataError(f"{where}: a class is declared twice")
    number = {word: position for position, word in enumerate(words)}
    numbers = np.array([number.get(_label(label), -1) for label in labels], dtype=np.int64)
    numbers = numbers[index]
    refuse_rows(numbers < 0, where, f"the label is not among the {len(words)} classes that were declared")
    return numbers, tuple(_plain(label) for label in ordered)


def _label_entries(source: Any, where: str) -> tuple[list[str | int], Int64[np.ndarray, " n"]]:
    """Return the distinct labels as text or whole numbers, and the (n,) index among them of each record's label.

    Raises:
        DataError: a label is missing, a fraction, of another type, or a float so large that it may be rounded. The
            error names the row.
    """
    entries = read_entries(source, where, "class label")
    labels, index, kind = entries.values, entries.positions, entries.kind
    if kind.kind not in "biufUO":
        raise DataError(f"{where}: class labels are text, whole numbers or truth values, not {kind}")
    # A float type with p significand bits (nmant + 1) holds every whole number below 2^p, and rounds larger ones.
    exact = _EXACT_WHOLE if kind.kind != "f" else min(_EXACT_WHOLE, 2 ** (np.finfo(kind).nmant + 1))
    floats = np.array([label if isinstance(label, float) else 0.0 for label in labels], dtype=np.float64)
    wrong = [not isinstance(label, str | int | float) for label in labels]
    refuse_rows(
        (np.array(wrong, dtype=np.bool_) | ~np.isfinite(floats))[index],
        where,
        "the label is missing, or neither text nor a whole number",
    )
    refuse_rows(
        (floats != np.round(floats))[index],
        where,
        "the label is a fraction; task='regression' predicts numbers",
    )
    refuse_rows(
        (np.abs(floats) >= exact)[index],
        where,
        f"the label is a whole number of {exact} or more written as a float, which may be another one rounded; hand "
        "over integers or text",
    )
    return [int(label) if isinstance(label, float) else label for label in labels], index


def read_numbers(source: Any, task: Task, where: str) -> Targets:
    """Read (n,) numeric targets, or (n, k) of several targets, as float32.

    Survival has (n, 2) of (event, time), or (n, 3) of (event, time, entry) with late entry. The columns of a table may
    have different types, including truth values and nullable types.

    Raises:
        DataError: another shape or type, NaN or infinity; a table whose column names say that the time comes first.
    """
    if task == "survival":
        source = _event_and_time(source, where)
    names = names_of(source, where)
    if names is not None:
        values = _columns(source, {name: position for position, name in enumerate(names)}, where)
    elif isinstance(source, list | tuple):
        values = stack_records(source, where, keep_bytes=False)
        if task == "survival" and not len(values):  # an empty list has no second axis
            values = values.reshape(0, 2)
    else:
        values = _whole(source, where)
    if task == "regression" and values.ndim != 1:
        raise DataError(
            f"{where}: one number a record is needed, but the shape is {values.shape}; reshape(-1) flattens (n, 1), "
            "and task='multi-output' predicts several numbers"
        )
    if task in SEVERAL_TARGETS and (values.ndim != 2 or values.shape[1] < 2):
        raise DataError(
            f"{where}: {task} needs (records, k) of two targets or more, but the shape is {values.shape}; "
            f"task='{'classification' if task == 'multi-label' else 'regression'}' predicts one"
        )
    if task == "survival" and (values.ndim != 2 or values.shape[1] not in (2, 3)):
        raise DataError(
            f"{where}: survival needs (records, 2) of (event, time), or (records, 3) of (event, time, entry) where "
            f"records entered late, but the shape is {values.shape}"
        )
    if task == "survival" and names is not None:
        refuse_time_before_event(names, where)
    return to_float32(values, where).astype(np.float32)


def _event_and_time(source: Any, where: str) -> Any:
    """Return a structured array of an event and a time, as of scikit-survival, as (n, 2) of (event, time).

    The event is the field of truth values; the other field is the time. Anything else is returned unchanged.

    Raises:
        DataError: a structured array with other fields; the error says which are needed.
    """
    kind = getattr(source, "dtype", None)
    if not isinstance(source, np.ndarray) or kind is None or kind.names is None:
        return source
    events = [name for name in kind.names if kind[name].kind == "b"]
    times = [name for name in kind.names if kind[name].kind in "iuf"]
    if len(kind.names) != 2 or len(events) != 1 or len(times) != 1:
        raise DataError(
            f"{where}: a structured array for survival needs two fields: the event, of truth values, and the time, a "
            "number, as scikit-survival's Surv.from_arrays makes it"
        )
    return np.stack([source[events[0]].astype(np.float64), source[times[0]].astype(np.float64)], axis=1)


def refuse_outside(targets: Targets, within: tuple[float, float] | None, where: str) -> None:
    """Check that every target lies within the declared range; do nothing if no range is declared.

    Raises:
        DataError: a target lies outside; the error names the first row.
    """
    if within is not None:
        # The targets are float32: a target at a bound must not lie outside because only one of them was rounded.
        lower, upper = np.float32(within[0]), np.float32(within[1])
        outside = ((targets < lower) | (targets > upper)).reshape(len(targets), -1)
        refuse_rows(
            np.asarray(outside.any(axis=1)),
            where,
            f"the target is outside of target_range, {lower:g} to {upper:g}; numpy.clip takes it for the bound",
        )


def _label(label: Any) -> str:
    return str(_plain(label))


def _plain(label: Any) -> Label:
    """Return a label as a JSON value: text or a whole number."""
    return str(label) if isinstance(label, str) else int(label)


def _class(declared: Any) -> Label:
    """Return a declared class as text or as a whole number.

    Raises:
        ConfigError: the class is neither.
    """
    value = unwrap(declared)
    if not isinstance(value, str | int) and not (isinstance(value, float) and value.is_integer()):
        raise ConfigError(
            f"population: classes are text or whole numbers, and {show_argument(declared)} is neither"
        )
    return _plain(value)


def names_of(source: Any, where: str) -> tuple[str, ...] | None:
    """Return the column names of a table; None if ``source`` is not a table."""
    if isinstance(source, pa.Table | pa.RecordBatch):
        names = tuple(source.schema.names)
    elif hasattr(source, "columns") and hasattr(source, "iloc"):
        names = tuple(str(name) for name in source.columns)
    else:
        return None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where}: two columns are called '{sanitize(twice)}'")
    return names


def _columns(source: Any, places: Mapping[str, int], where: str) -> np.ndarray:
    """Convert columns of a table, given with their places, to (n, columns) float64, each column by its own type.

    Raises:
        DataError: a column is not numeric, or a value is missing or infinite; the error names the column.
    """
    columns = []
    for name, position in places.items():
        called = f"{where}, column '{sanitize(name)}'"
        table = isinstance(source, pa.Table | pa.RecordBatch)
        values = to_array(source.column(position) if table else source.iloc[:, position], called)
        if values.dtype.kind == "O":
            values = numbers_of_cells(values, called)
        elif values.dtype.kind not in "biuf":
            to_float32(values, called)  # raises the error for a column that is not numeric
        refuse_rows(
            ~np.isfinite(values),
            called,
            "the value is missing, NaN or infinite; fill it with a declared constant, or leave the record out",
        )
        columns.append(values.astype(np.float64))
    return np.stack(columns, axis=1) if columns else np.zeros((len(source), 0), np.float32)


def _whole(value: Any, where: str) -> np.ndarray:
    if isinstance(value, Mapping):
        raise DataError(
            f"{where}: a mapping of columns is no table; make it a frame, such as pandas.DataFrame(...)"
        )
    if hasattr(value, "toarray"):
        raise DataError(f"{where}: a sparse matrix is not read; hand over .toarray()")
    values = to_array(value, where)
    if values.ndim == 0:
        raise DataError(f"{where}: one entry a record is needed, not a single {type(value).__name__}")
    return values
