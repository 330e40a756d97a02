"""Conversion of frames and mappings of arrays to tables in memory, which a schema reads as it reads files.

Claim: how a cell is read depends on this cell and on the type of its column, as in a Parquet file. A column of Python
objects is converted cell by cell, as a column of an Excel file: one cell never decides how another is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from fedveil.data.memory_tables import MemoryTable
from fedveil.data.record_columns import as_arrow_table
from fedveil.data.schema import Format
from fedveil.data.table_file import cells_of_objects
from fedveil.errors import ConfigError, DataError
from fedveil.sanitize import sanitize


def memory_table(name: str, given: Any, written: Format) -> MemoryTable:
    """Return a table in memory.

    Args:
        name: its name.
        given: a frame (pandas, polars, Arrow), a Hugging Face data set, or a mapping from names of columns to arrays,
            tensors or lists of one axis and one length.
        written: format of numbers that are text.

    Raises:
        ConfigError: the name is no name of a silo, or ``given`` is no table.
        DataError: a column has another number of axes or of entries than the others, or a type that Arrow lacks.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"tables: '{sanitize(name)}' is no name of a table; give the silo's name")
    found = as_arrow_table(given)
    if isinstance(found, pa.RecordBatch):
        found = pa.Table.from_batches([found])
    if isinstance(found, pa.Table):
        return MemoryTable(name=name, table=found)
    if hasattr(found, "columns") and hasattr(found, "iloc"):
        columns = {str(one): found.iloc[:, at] for at, one in enumerate(found.columns)}
        if len(columns) != len(found.columns):
            raise DataError(f"tables: '{sanitize(name)}' has two columns of one name")
    elif isinstance(found, Mapping):
        columns = dict(found)
    else:
        raise ConfigError(
            f"tables: '{sanitize(name)}' is {type(given).__name__}; a frame is needed, or a mapping from names of "
            "columns to arrays"
        )
    return MemoryTable(name=name, table=_assembled(name, columns, written))


def _assembled(name: str, columns: Mapping[str, Any], written: Format) -> pa.Table:
    """Return columns as a table."""
    arrays = {}
    for column, given in columns.items():
        where = f"table '{sanitize(name)}', column '{sanitize(str(column))}'"
        try:
            arrays[str(column)] = _column(given, written)
        except (pa.ArrowException, TypeError, ValueError, RuntimeError):
            raise DataError(
                f"{where}: {type(given).__name__} is no column of numbers, text or dates with one entry a record"
            ) from None
    lengths = {len(one) for one in arrays.values()}
    if len(lengths) > 1:
        raise DataError(f"table '{sanitize(name)}': its columns have different numbers of records")
    return pa.table(arrays)


def _column(given: Any, written: Format) -> pa.Array:
    """Return a column as an Arrow array; a column of objects or of numpy's text is converted cell by cell."""
    if isinstance(given, pa.Array | pa.ChunkedArray):
        return given
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    if isinstance(given, list | tuple):
        return cells_of_objects(given, written)
    if getattr(given, "ndim", 0) != 1:
        raise ValueError("a column has one axis")
    # Arrow refuses a whole column of numpy's text where one entry is no Unicode text.
    if getattr(getattr(given, "dtype", None), "kind", "") in ("O", "U"):
        return cells_of_objects(list(given), written)
    return pa.array(given, from_pandas=True)
