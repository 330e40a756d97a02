"""What a Python program gives: features, ids, labels and numbers of numpy, PyTorch, pandas and pyarrow, as arrays.

pandas is never imported: its tables are known by what they can do. Rows count from 0 in every error, and no error
repeats a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from fedveil.errors import DataError
from fedveil.foreign import foreign
from fedveil.population.records import Features, Label, Targets, Task

_LARGEST_WHOLE: Final = 1 << 24
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureTable:
    """Features as a model reads them, and the names of their columns where they came as a table."""

    values: Features
    names: tuple[str, ...] | None


def check_alike(columns: Mapping[str, Any]) -> None:
    """Return if no two pandas tables or series have different indexes: rows are matched by position, indexes not read.

    Raises:
        DataError: names the two, and says what would be right.
    """
    indexed = {name: one.index for name, one in columns.items() if hasattr(one, "iloc")}
    for first, second in pairwise(indexed):
        if not indexed[first].equals(indexed[second]):
            raise DataError(
                f"{first} and {second}: their pandas indexes differ, and rows are matched by position; align them (by "
                "loc, say), or call reset_index(drop=True) on both where position is what is meant"
            )


def read_features(given: Any, where: str = "features") -> FeatureTable:
    """Read (n, ...) numbers: an array, a tensor, a list of lists, or a table whose columns are all numbers.

    uint8 stays uint8; everything else becomes float32.

    Raises:
        DataError: no numbers, NaN or infinity, a value that float32 cannot hold, a single axis; names row and column.
    """
    names = _names(given, where)
    if names is None:
        values = _array(given, where)
    else:
        columns = [
            _numbers(_array(_column(given, name), f"{where}, column '{foreign(name)}'"), name)
            for name in names
        ]
        values = np.stack(columns, axis=1) if columns else np.zeros((len(given), 0), np.float32)
    if values.ndim < 2:
        raise DataError(
            f"{where}: one row a record is needed, (records, ...), but the shape is {values.shape}; a single "
            "feature is given as values[:, None]"
        )
    if 0 in values.shape[1:]:
        raise DataError(f"{where}: a record has no feature: the shape is {values.shape}")
    return FeatureTable(values=as_float32(values, where), names=names)


def as_float32(values: np.ndarray, where: str) -> Features:
    """Return numbers as float32, or as uint8 where they are that.

    Raises:
        DataError: text or objects, a NaN, an infinity, or a number that float32 cannot hold.
    """
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: the values are {values.dtype}, not numbers; encode them first (a category as one 0/1 column for "
            "each DECLARED category), or describe the table by a schema and use fedveil.tables"
        )
    _refuse(
        ~np.isfinite(values),
        where,
        "the value is NaN or infinite; fill it with a declared constant, or leave the record out",
    )
    if values.dtype.kind in "iu":
        _refuse(
            np.abs(values.astype(np.float64)) > _LARGEST_WHOLE,
            where,
            "a whole number above 16777216, which float32 does not hold exactly; scale it first",
        )
    _refuse(
        np.abs(values.astype(np.float64)) > _LARGEST,
        where,
        "the value is too large for float32; scale it first",
    )
    return values.astype(np.float32)


def read_ids(given: Any, where: str) -> list[str]:
    """Read one id a record: text or whole numbers, as text; the number 7 and the text "7" are the same.

    Raises:
        DataError: an id that is missing, empty, or of another type.
    """
    values = _entries(given, where)
    if values.ndim != 1:
        raise DataError(f"{where}: one id a record is needed, but the shape is {values.shape}")
    if not len(values):
        return []  # nobody's records: numpy takes an empty list for floats
    if values.dtype.kind not in "iuUO":
        raise DataError(
            f"{where}: ids are text or whole numbers, not {values.dtype}; a missing id makes a column of floats"
        )
    ids = values.tolist()
    wrong = np.array([not isinstance(one, str | int) or isinstance(one, bool) for one in ids], dtype=np.bool_)
    _refuse(wrong, where, "the id is missing, or neither text nor a whole number; every record needs one")
    _refuse(
        np.array([one == "" for one in ids], dtype=np.bool_), where, "the id is empty; every record needs one"
    )
    broken = [any("\ud800" <= letter <= "\udfff" for letter in one) for one in map(str, ids)]
    _refuse(
        np.array(broken, dtype=np.bool_), where, "the id has half a character (a surrogate), which is no text"
    )
    return [str(one) for one in ids]


def read_labels(given: Any, classes: Sequence[Any] | None, where: str) -> tuple[Targets, tuple[Label, ...]]:
    """Read class labels; return each one's number, and the classes; 1, "1" and True are the same label.

    Args:
        given: one label a record: whole numbers, text or truth values.
        classes: in the order of their numbers; None takes those that occur, sorted.
        where: what to call the column.

    Raises:
        DataError: a label that is missing, of another type, or not among the classes.
    """
    values = _entries(given, where)
    if values.ndim != 1:
        raise DataError(f"{where}: one class label a record is needed, but the shape is {values.shape}")
    if values.dtype.kind == "f":
        _refuse(~np.isfinite(values), where, "the label is missing")
        _refuse(
            values != np.round(values), where, "the label is a fraction; task='regression' predicts numbers"
        )
        values = values.astype(np.int64)
    wrong = np.array([not isinstance(one, str | int) for one in values.tolist()], dtype=np.bool_)
    _refuse(wrong, where, "the label is missing, or neither text nor a whole number")
    labels = values.tolist()
    known = (
        sorted(set(labels), key=lambda one: (isinstance(one, str), one)) if classes is None else list(classes)
    )
    words = tuple(_label(one) for one in known)
    if len(set(words)) != len(words):
        raise DataError(f"{where}: a class is declared twice")
    number = {word: place for place, word in enumerate(words)}
    found = np.array([number.get(_label(one), -1) for one in labels], dtype=np.int64)
    _refuse(found < 0, where, f"the label is not among the {len(words)} classes that were declared")
    return found, tuple(_plain(one) for one in known)


def read_numbers(given: Any, task: Task, where: str) -> Targets:
    """Read (n,) numbers to predict, or (n, 2) of (event, time) for survival, as float32.

    Raises:
        DataError: another shape or type, NaN or infinity.
    """
    values = _array(given, where)
    if task == "regression" and values.ndim != 1:
        raise DataError(
            f"{where}: one number a record is needed, but the shape is {values.shape}; reshape(-1) flattens (n, 1)"
        )
    if task == "survival" and (values.ndim != 2 or values.shape[1] != 2):
        raise DataError(
            f"{where}: survival needs (records, 2) of (event, time), but the shape is {values.shape}"
        )
    return as_float32(values, where).astype(np.float32)


def refuse_outside(targets: Targets, within: tuple[float, float] | None, where: str) -> None:
    """Return if every number to predict lies within its declared range, or none is declared.

    Raises:
        DataError: names the first row that does not.
    """
    if within is not None:
        lower, upper = np.float32(within[0]), np.float32(within[1])
        _refuse(
            (targets < lower) | (targets > upper),
            where,
            f"the target is outside of target_range, {lower:g} to {upper:g}; numpy.clip takes it for the bound",
        )


def _label(one: Any) -> str:
    return str(_plain(one))


def _plain(one: Any) -> Label:
    """A label as JSON has it: text, or a whole number."""
    return str(one) if isinstance(one, str) else int(one)


def _names(given: Any, where: str) -> tuple[str, ...] | None:
    """Names of a table's columns; None for anything that is no table."""
    if isinstance(given, pa.Table | pa.RecordBatch):
        names = tuple(given.schema.names)
    elif hasattr(given, "columns") and hasattr(given, "iloc"):
        names = tuple(str(name) for name in given.columns)
    else:
        return None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where}: two columns are called '{foreign(twice)}'")
    return names


def _column(given: Any, name: str) -> Any:
    if isinstance(given, pa.Table | pa.RecordBatch):
        return given.column(name)
    return given.iloc[:, [str(one) for one in given.columns].index(name)]


def _numbers(values: np.ndarray, name: str) -> np.ndarray:
    """A table's column as float64, so that columns of any numeric type stack; text is refused by its column."""
    if values.dtype.kind not in "biuf":
        as_float32(values, f"features, column '{foreign(name)}'")
    _refuse(
        ~np.isfinite(values),
        f"features, column '{foreign(name)}'",
        "the value is missing, NaN or infinite; fill it with a declared constant, or leave the record out",
    )
    return values.astype(np.float64)


def _array(given: Any, where: str) -> np.ndarray:
    """Any column or table of numbers, labels or ids as a numpy array; copied only where it must be."""
    if isinstance(given, torch.Tensor):
        if given.layout != torch.strided:
            raise DataError(f"{where}: a tensor of layout {given.layout}; hand over .to_dense()")
        if given.dtype == torch.bfloat16:  # numpy has no such numbers
            given = given.float()
        return np.asarray(given.detach().cpu().resolve_conj().resolve_neg().numpy())
    if np.ma.isMaskedArray(given):
        _refuse(
            np.ma.getmaskarray(given),
            where,
            "the entry is masked; fill it with a declared constant, or leave out",
        )
    if isinstance(given, pa.Array | pa.ChunkedArray):
        return np.asarray(
            given.to_numpy() if isinstance(given, pa.ChunkedArray) else given.to_numpy(zero_copy_only=False)
        )
    try:
        values = np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else given)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{where}: rows of different lengths, or no array at all ({type(given).__name__})"
        ) from error
    if values.ndim == 0:
        raise DataError(f"{where}: one entry a record is needed, not a single {type(given).__name__}")
    return values


def _entries(given: Any, where: str) -> np.ndarray:
    """As :func:`_array`, but the entries of a list stay apart: beside text numpy would make text of a missing one."""
    values = _array(given, where)
    if not isinstance(given, list | tuple) or values.ndim != 1 or values.dtype.kind not in "UO":
        return values
    entries = np.empty(len(given), dtype=object)
    entries[:] = [one.item() if isinstance(one, np.generic) else one for one in given]
    return entries


def _refuse(wrong: np.ndarray, where: str, problem: str) -> None:
    """Raise the error of the first wrong entry, if any, by its row (and its place in the row)."""
    if not wrong.any():
        return
    row, *place = np.argwhere(wrong)[0].tolist()
    at = "" if not place else f", feature {place[0]}" if len(place) == 1 else f", feature {tuple(place)}"
    raise DataError(f"{where}, row {row}{at}: {problem}")
