"""Conversion of tensors, arrays, Arrow and pandas columns, and lists to numpy arrays, entry by entry.

An array has one type for all of its entries, and numpy, PyTorch and pandas choose that type from all of the entries.
If the type decided how an entry is read, one person's entry could change all other entries: ``torch.stack`` turns
integers into float16 if one record is float16. So lists and columns of objects are converted entry by entry, and the
result for an entry depends on that entry alone. Errors count rows from 0 and repeat no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int64

from fedveil.data.records import Features
from fedveil.errors import DataError

LARGEST_WHOLE: Final = 1 << 24
"""Largest absolute value up to which float32 holds every whole number exactly (2^24)."""

_LARGEST: Final = float(np.finfo(np.float32).max)
_PLAIN: Final = frozenset({str, int, float, bool})
_TENSOR_FLOATS: Final = (torch.float16, torch.float32, torch.float64)
"""Floating-point types that both PyTorch and numpy have; bfloat16 and the float8 types are not among them."""

_ENCODE: Final = (
    "encode them first (a category as one 0/1 column for each DECLARED category), or describe the table by a schema "
    "and use fedveil.tables"
)
_TOO_LARGE_WHOLE: Final = "a whole number above 16777216, which float32 does not hold exactly; scale it first"


def refuse_rows(is_wrong: np.ndarray, where: str, problem: str, rows: Sequence[int] | None = None) -> None:
    """Raise a DataError for the first wrong entry, if any.

    Args:
        is_wrong: (n, ...) True where an entry is wrong.
        where: name of the column in errors.
        problem: the fault and its correction, in words.
        rows: (n,) the row numbers to report; None: 0 .. n - 1.

    Raises:
        DataError: an entry is wrong; the error names the row, and the position in the row.
    """
    if not is_wrong.any():
        return
    row, *position = np.argwhere(is_wrong)[0].tolist()
    suffix = (
        ""
        if not position
        else f", feature {position[0]}"
        if len(position) == 1
        else f", feature {tuple(position)}"
    )
    raise DataError(f"{where}, row {row if rows is None else rows[row]}{suffix}: {problem}")


def to_array(source: Any, where: str, row: int | None = None) -> np.ndarray:
    """Convert a column, a table or one record to a numpy array; copy only if necessary.

    Args:
        source: a tensor, array, Arrow or pandas object, or list.
        where: name of the column in errors.
        row: row number if ``given`` is one record; None if ``given`` holds all records.

    Raises:
        DataError: an entry is masked or missing, rows have different lengths, or numpy has no such type.
    """
    called = where if row is None else f"{where}, row {row}"
    if isinstance(source, torch.Tensor):
        return _tensor_to_array(source, called)
    if np.ma.isMaskedArray(source):  # np.asarray would drop the mask and return the values below it
        masked = np.ma.getmaskarray(source)
        refuse_rows(
            np.atleast_1d(masked) if row is None else masked[None],
            where,
            "the entry is masked; fill it with a declared constant, or leave the record out",
            None if row is None else [row],
        )
    try:
        if isinstance(source, pa.Array | pa.ChunkedArray):
            # Arrow writes a null among integers as NaN, which would turn the whole column into floats.
            refuse_rows(
                source.is_null().to_numpy(**_copied(source)),
                where,
                "the entry is missing; fill it with a declared constant, or leave the record out",
            )
            return np.asarray(source.to_numpy(**_copied(source)))
        return np.asarray(source.to_numpy() if hasattr(source, "to_numpy") else source)
    except (ValueError, TypeError, RuntimeError):  # Arrow's errors are among these
        raise DataError(
            f"{called}: rows of different lengths, or no array at all ({type(source).__name__})"
        ) from None


def _copied(column: pa.Array | pa.ChunkedArray) -> dict[str, bool]:
    return {} if isinstance(column, pa.ChunkedArray) else {"zero_copy_only": False}


def _tensor_to_array(tensor: torch.Tensor, where: str) -> np.ndarray:
    if tensor.layout != torch.strided:
        raise DataError(f"{where}: a tensor of layout {tensor.layout}; hand over .to_dense()")
    try:
        if tensor.is_floating_point() and tensor.dtype not in _TENSOR_FLOATS:
            tensor = tensor.float()  # float32 holds every bfloat16 and float8 exactly
        return np.asarray(tensor.detach().cpu().resolve_conj().resolve_neg().numpy())
    except (TypeError, RuntimeError):
        raise DataError(
            f"{where}: a tensor of {tensor.dtype} on {tensor.device}, which numpy cannot hold; hand over a dense "
            "tensor of float32, with its values"
        ) from None


def to_float32(values: np.ndarray, where: str, rows: Sequence[int] | None = None) -> Features:
    """Convert numbers to float32; uint8 stays uint8.

    The cells of an array of objects are converted one by one.

    Args:
        values: (n, ...) of any type.
        where: name of the column in errors.
        rows: (n,) the row numbers to report; None: 0 .. n - 1.

    Raises:
        DataError: a value is text or another object, NaN, infinite, or a number that float32 cannot hold.
    """
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "O":
        values = numbers_of_cells(values, where, rows)
    if values.dtype.kind not in "biuf":
        suffix = "" if rows is None else f", row {rows[0]}"
        # The type of numpy's texts would tell the length of the longest one.
        kind = "text" if values.dtype.kind in "US" else values.dtype
        raise DataError(f"{where}{suffix}: the values are {kind}, not numbers; {_ENCODE}")
    refuse_rows(
        ~np.isfinite(values),
        where,
        "the value is NaN or infinite; fill it with a declared constant, or leave the record out",
        rows,
    )
    size = np.abs(values.astype(np.float64))  # np.abs of the smallest int64 would overflow
    if values.dtype.kind in "iu":
        refuse_rows(size > LARGEST_WHOLE, where, _TOO_LARGE_WHOLE, rows)
    refuse_rows(size > _LARGEST, where, "the value is too large for float32; scale it first", rows)
    return values.astype(np.float32)


def numbers_of_cells(values: np.ndarray, where: str, rows: Sequence[int] | None = None) -> np.ndarray:
    """Convert an array of Python objects to float64, cell by cell; text is never parsed as a number.

    Raises:
        DataError: a cell is missing or no number, or a whole number that float32 does not hold exactly.
    """
    cells = [unwrap(cell) for cell in values.ravel().tolist()]
    number = np.array([isinstance(cell, int | float | Decimal | Fraction) for cell in cells], dtype=np.bool_)
    refuse_rows(
        ~number.reshape(values.shape),
        where,
        f"the values are not numbers: this one is missing, or text, or another object; {_ENCODE}",
        rows,
    )
    whole = np.array([isinstance(cell, int) and abs(cell) > LARGEST_WHOLE for cell in cells], dtype=np.bool_)
    refuse_rows(whole.reshape(values.shape), where, _TOO_LARGE_WHOLE, rows)
    return np.array([_to_float(cell) for cell in cells], dtype=np.float64).reshape(values.shape)


def _to_float(number: int | float | Decimal | Fraction) -> float:
    """Convert to a float; a number that is too large becomes infinity, which :func:`to_float32` refuses."""
    try:
        return float(number)
    except (OverflowError, ValueError):
        return float("inf")


def unwrap(cell: Any) -> Any:
    """Return the Python value of a numpy scalar or 0-dimensional tensor; return other objects unchanged.

    A numpy date is not converted: its ``item()`` is a whole number in some units and a date in others.
    """
    if type(cell) in _PLAIN:
        return cell
    if isinstance(cell, np.bool_ | np.integer | np.floating | np.str_):
        return cell.item()
    if isinstance(cell, torch.Tensor) and cell.ndim == 0 and not cell.is_meta:
        return cell.item()
    if isinstance(cell, np.ndarray) and cell.ndim == 0 and not np.ma.isMaskedArray(cell):
        return unwrap(cell[()])
    return cell


def stack_records(items: Sequence[Any], where: str, *, keep_bytes: bool) -> Features:
    """Convert records (arrays, tensors, lists, numbers) to float32, each by itself, and stack them.

    Args:
        items: n records of one shape.
        where: name of the column in errors.
        keep_bytes: whether uint8 records stay uint8. If so, a mixture of uint8 and other types is refused: otherwise
            one record would decide how all records are stored.

    Raises:
        DataError: records have different shapes; otherwise as :func:`to_float32`. The error names the row.
    """
    records = [to_array(item, where, row) for row, item in enumerate(items)]
    if not records:
        return np.zeros(0, dtype=np.float32)
    other = [record.shape != records[0].shape for record in records]
    refuse_rows(
        np.array(other),
        where,
        "another shape than the record of row 0; rows of different lengths are no array",
    )
    is_bytes = np.array([record.dtype == np.uint8 for record in records])
    if keep_bytes:
        refuse_rows(
            is_bytes != is_bytes[0],
            where,
            "uint8 here and not in row 0, or the reverse; hand over all records as uint8, or none",
        )
    stored = np.uint8 if keep_bytes and is_bytes[0] else np.float32
    stacked = np.empty((len(records), *records[0].shape), dtype=stored)
    rows_of: dict[np.dtype[Any], list[int]] = {}
    for row, record in enumerate(records):
        rows_of.setdefault(record.dtype, []).append(row)
    for (
        rows
    ) in rows_of.values():  # one `np.stack` per type, so that numpy never promotes a record to a common type
        stacked[rows] = to_float32(np.stack([records[row] for row in rows]), where, rows)
    return stacked


@dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """The entries of a column: each distinct one once.

    Args:
        values: the distinct entries as Python values, in any order.
        positions: (n,) index among them of the entry of each row.
        kind: type of the column; object for a list.
    """

    values: list[Any]
    positions: Int64[np.ndarray, " n"]
    kind: np.dtype[Any]


def read_entries(column: Any, where: str, entry_word: str) -> Entries:
    """Return the distinct entries of a column as Python values.

    Entries of different types are distinct, even if they are equal (1, 1.0 and True).

    Args:
        column: one entry per record.
        where: name of the column in errors.
        entry_word: word for an entry in errors.

    Raises:
        DataError: ``column`` does not have exactly one axis.

    >>> found = read_entries(["b", 1, "b", True], "user", "id")
    >>> found.values, found.positions.tolist()
    (['b', 1, True], [0, 1, 0, 2])
    """
    if isinstance(column, list | tuple):
        return _distinct([unwrap(entry) for entry in column], np.dtype(object))
    values = to_array(column, where)
    if values.ndim == 0:
        raise DataError(f"{where}: one {entry_word} a record is needed, not a single {type(column).__name__}")
    if values.ndim != 1:
        raise DataError(
            f"{where}: one {entry_word} a record is needed, but the shape is {values.shape}; reshape(-1) flattens "
            "(n, 1), and argmax(axis=1) takes a column per class for the class"
        )
    if values.dtype.kind in "biuf":
        distinct, index = np.unique(values, return_inverse=True)
        return Entries(
            values=[unwrap(entry) for entry in distinct.tolist()], positions=index, kind=values.dtype
        )
    return _distinct([unwrap(entry) for entry in values.tolist()], values.dtype)


def _distinct(entries: list[Any], kind: np.dtype[Any]) -> Entries:
    types = set(map(type, entries))
    keys: Sequence[Any] = (
        entries if types <= {str} or types <= {int} else [(type(entry), entry) for entry in entries]
    )
    try:
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    except TypeError:  # an entry that cannot be hashed, which the caller refuses by its type
        return Entries(values=entries, positions=np.arange(len(entries)), kind=kind)
    index = np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))
    return Entries(
        values=list(numbers) if keys is entries else [entry for _, entry in numbers],
        positions=index,
        kind=kind,
    )
