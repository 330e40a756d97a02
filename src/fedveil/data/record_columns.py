"""Columns of records (features, targets, users, silos) from separate objects, frames by column names, or data sets.

Data frames of pandas and polars and data sets of Hugging Face are recognised by their attributes, and never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fedveil.data.cells import refuse_rows, unwrap
from fedveil.data.memory_tables import MemoryTable
from fedveil.data.schema import Format
from fedveil.data.table_file import cells_of_objects
from fedveil.errors import ConfigError, DataError
from fedveil.sanitize import describe_columns, sanitize
from fedveil.user_code import name_user_code

_REQUIRED: Final = {
    "features": "what is known of it",
    "targets": "what is predicted",
    "user": "whose record it is",
    "silo": "who holds it",
}
_KEYS: Final = {"x": "features", "features": "features", "y": "targets", "targets": "targets"} | {
    "user": "user",
    "silo": "silo",
}
"""Keys of a data set's items that are mappings."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordColumns:
    """The columns of all records.

    Attributes:
        features, targets, user, silo: one entry per record.
        classes: names of the classes in their order, if the data set declares them; None otherwise.
        reader: reads the same columns of another frame or data set, for public test records.
    """

    features: Any
    targets: Any
    user: Any
    silo: Any
    classes: Sequence[str] | None = None
    reader: Callable[[Any], tuple[Any, Any]] | None = field(default=None, repr=False)

    @property
    def by_name(self) -> dict[str, Any]:
        """The columns by their names in errors."""
        return {name: getattr(self, name) for name in _REQUIRED}


def record_columns(data: Any, features: Any, targets: Any, user: Any, silo: Any) -> RecordColumns:
    """Return the columns of all records.

    Args:
        data: arrays of features, a frame, a data set or its loader; None if ``features`` has the features.
        features: names of the columns of a frame; or the features, if ``data`` is None.
        targets, user, silo: one entry per record, or the name of a column of the frame; None if the data set brings
            them.

    Raises:
        ConfigError: a column is missing, or is passed although the data set contains it; a data set, sampler or frame
            of a kind that cannot be read, with the reason.
        DataError: the data set has no record, or an item has another form than the first.
        UserCodeError: the data set's code fails at a record.
    """
    if data is None:
        data, features = features, None
    elif isinstance(features, str):
        raise ConfigError(f"population: features must be a list of columns, [{features!r}]")
    data = _as_frame(_data_set_of(data), "population")
    if isinstance(data, Dataset):
        if features is not None or targets is not None:
            raise ConfigError("population: a data set brings its own targets; leave features and targets out")
        brought = _of_data_set(data)
        duplicates = [
            name
            for name, column in (("user", user), ("silo", silo))
            if column is not None and name in brought
        ]
        if duplicates:
            raise ConfigError(
                f"population: the data set brings {duplicates[0]} with every record; leave {duplicates[0]} out"
            )
        return RecordColumns(**_all_there({"user": user, "silo": silo, **brought}))
    named = features is not None or any(isinstance(column, str) for column in (targets, user, silo))
    if isinstance(data, _HubTable) or named:
        return _of_frame(data, features, {"targets": targets, "user": user, "silo": silo})
    return RecordColumns(**_all_there({"features": data, "targets": targets, "user": user, "silo": silo}))


def _all_there(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns.

    Raises:
        ConfigError: one is missing.
    """
    for name, meaning in _REQUIRED.items():
        if columns.get(name) is None:
            raise ConfigError(f"population: {name} is required: for every record, {meaning}")
    return {name: columns[name] for name in _REQUIRED}


# --- frames -----------------------------------------------------------------------------------------------------------


def as_arrow_table(data: Any, where: str = "population") -> Any:
    """Return a polars frame or a Hugging Face data set as an Arrow table; other objects unchanged.

    Args:
        data: the object.
        where: name of the function or argument in errors.

    Raises:
        ConfigError: an object of these packages that has no rows of its own, with what to hand over instead.
    """
    frame = _as_frame(data, where)
    return frame.table if isinstance(frame, _HubTable) else frame


def _as_frame(data: Any, where: str) -> Any:
    """Return a polars frame as an Arrow table, a Hugging Face data set with its classes, other objects unchanged.

    Args and errors are those of :func:`as_arrow_table`.
    """
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):
        raise ConfigError(f"{where}: a lazy frame has no rows yet; hand over .collect()")
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        if isinstance(data.column_names, Mapping):
            splits = ", ".join(map(str, data.column_names))
            raise ConfigError(
                f"{where}: a dictionary of splits ({splits}); hand over one of them, data['train']"
            )
        if not hasattr(data, "__len__"):
            raise ConfigError(
                f"{where}: an iterable data set has no length and no items by number; load it without "
                "streaming=True"
            )
        return _HubTable(table=data.with_format("arrow")[:], classes=_hub_classes(data))
    if hasattr(data, "to_arrow") and hasattr(data, "columns") and not hasattr(data, "iloc"):
        return data.to_arrow()
    return data


@dataclass(frozen=True, kw_only=True, eq=False)
class _HubTable:
    """A Hugging Face data set as an Arrow table, with the class names of its label columns."""

    table: pa.Table
    classes: Mapping[str, tuple[str, ...]]


def _hub_classes(data: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of the columns of a Hugging Face data set that declare them."""
    kinds = getattr(data, "features", None) or {}
    return {name: tuple(kind.names) for name, kind in kinds.items() if hasattr(kind, "int2str")}


def _of_frame(data: Any, features: Any, named: Mapping[str, Any]) -> RecordColumns:
    """Return the columns of a frame by their names; a column that is no name is taken as it is.

    Raises:
        ConfigError: ``data`` is no frame; a column does not exist, or is named twice.
    """
    classes: Mapping[str, tuple[str, ...]] = {}
    if isinstance(data, _HubTable):
        data, classes = data.table, data.classes
    existing = _column_names(data)
    if existing is None:
        raise ConfigError(
            "population: columns are named, and the data are no frame with columns (pandas, polars, Arrow, Hugging "
            f"Face), but {type(data).__name__}"
        )
    if not isinstance(features, list | tuple) or not features:
        requested = [column for column in named.values() if isinstance(column, str)]
        raise ConfigError(
            f"population: features must be a list of columns of the frame: {describe_columns(existing, requested)}"
        )
    columns = [("features", name) for name in features]
    columns += [(key, column) for key, column in named.items() if isinstance(column, str)]
    targets = named["targets"]
    several = _several_columns(targets, existing, len(data))
    columns += [("targets", name) for name in several]
    _check_names(columns, existing)
    labels = classes.get(targets) if isinstance(targets, str) else None

    def targets_of(table: Any) -> Any:
        return _features_of(table, several) if several else _targets_of(table, targets, labels)

    def read(frame: Any) -> tuple[Any, Any]:
        table = as_arrow_table(frame)
        present = _column_names(table)
        if present is None:
            raise ConfigError(
                f"population: test: a frame of the same columns is needed, not {type(table).__name__}"
            )
        _check_names([entry for entry in columns if entry[0] in ("features", "targets")], present, "test: ")
        return _features_of(table, list(features)), targets_of(table)

    values = {
        key: _column(data, column) if isinstance(column, str) else column for key, column in named.items()
    }
    values |= {"features": _features_of(data, list(features)), "targets": targets_of(data)}
    return RecordColumns(**_all_there(values), classes=labels, reader=read)


def _column_names(data: Any) -> tuple[str, ...] | None:
    """Return the column names of a frame; None for any other object."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        return tuple(data.schema.names)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        return tuple(str(name) for name in data.columns)
    return None


def _several_columns(source: Any, existing: Sequence[str], n_rows: int) -> list[str]:
    """Return the names of several target columns: event and time, k labels or k numbers; empty for any other object.

    A list of as many texts as the frame has rows holds the records' labels, unless all of them are column names.
    """
    is_text = isinstance(source, list | tuple) and all(isinstance(name, str) for name in source)
    if not is_text or len(source) < 2:
        return []
    labels = len(source) == n_rows and len(source) > 2 and not set(source) <= set(existing)
    return [] if labels else list(source)


def _check_names(columns: Sequence[tuple[str, Any]], existing: Sequence[str], prefix: str = "") -> None:
    """Check that every named column exists once in the frame, and is named once.

    Raises:
        ConfigError: the error names the argument and the column.
    """
    names = [name for _, name in columns]
    for key, name in columns:
        if not isinstance(name, str) or name not in existing:
            requested = [column for column in names if isinstance(column, str)]
            raise ConfigError(
                f"population: {prefix}{key}: no column {sanitize(repr(name))}; there are: "
                f"{describe_columns(existing, requested, name if isinstance(name, str) else '')}"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"population: {prefix}column '{sanitize(name)}' is named twice; it has one meaning"
            )
        if list(existing).count(name) > 1:
            raise ConfigError(f"population: {prefix}two columns are called '{sanitize(name)}'")


def _column(data: Any, name: str) -> Any:
    return data.column(name) if isinstance(data, pa.Table | pa.RecordBatch) else data[name]


def _features_of(data: Any, names: list[str]) -> Any:
    """Return the features: several columns as a table, one column of lists as a list of records."""
    if not isinstance(data, pa.Table | pa.RecordBatch):
        return data[names]
    kind = data.schema.field(names[0]).type
    if len(names) == 1 and (pa.types.is_nested(kind)):
        return _nested(data.column(names[0]), names[0])
    return data.select(names)


def _nested(column: Any, name: str) -> list[Any]:
    """Return a column of lists as one array per record.

    Raises:
        DataError: a record is missing.
    """
    values: list[Any] = column.to_pylist()
    refuse_rows(
        np.array([value is None for value in values], dtype=np.bool_),
        f"features, column '{sanitize(name)}'",
        "the entry is missing; fill it with a declared constant, or leave the record out",
    )
    return values


def _targets_of(data: Any, targets: Any, labels: Sequence[str] | None) -> Any:
    """Return the targets; numbers of declared classes become their names.

    Raises:
        DataError: a number is of no declared class; -1 stands for a missing label.
    """
    if not isinstance(targets, str):
        return targets
    column = _column(data, targets)
    if labels is None:
        return column
    numbers = [-1 if label is None else label for label in column.to_pylist()]
    refuse_rows(
        np.array([not 0 <= number < len(labels) for number in numbers], dtype=np.bool_),
        "targets",
        f"the label is missing, or the number of none of the {len(labels)} declared classes",
    )
    return [labels[number] for number in numbers]


# --- data sets of PyTorch ---------------------------------------------------------------------------------------------


def _data_set_of(data: Any) -> Any:
    """Return the data set of a ``DataLoader``; other objects unchanged.

    Its batch size and its shuffling have no meaning here: local batches are made for each contribution.

    Raises:
        ConfigError: a sampler, a batch sampler or a ``collate_fn`` of one's own, which would change the records or who
            counts; a loader that leaves records out; an iterable data set.
    """
    if isinstance(data, DataLoader):
        loader, data = data, data.dataset
        if not isinstance(data, IterableDataset):
            _check_loader(loader)
    if isinstance(data, IterableDataset):
        raise ConfigError(
            "population: an iterable data set has no length and no items by number, "
            "so no record can be assigned to its user; make it a data set with __len__ and __getitem__"
        )
    return data


def _check_loader(loader: Any) -> None:
    """Check that a loader gives every record of its data set once, by itself.

    Raises:
        ConfigError: as :func:`_data_set_of`.
    """
    sampler, instead = loader.sampler, "hand over the data set itself, loader.dataset"
    is_complete = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"population: the loader's batch sampler of one's own decides which records count; {instead}"
        )
    if not is_complete:
        raise ConfigError(
            f"population: the loader's {type(sampler).__name__} draws records unequally, which would change who "
            f"counts; {instead}"
        )
    if loader.drop_last:
        raise ConfigError(f"population: the loader's drop_last leaves records out; {instead}")
    if loader.batch_size is not None and loader.collate_fn is not default_collate:
        raise ConfigError(
            "population: the loader's collate_fn sees several records at a time; compute features in the data set, one "
            f"record at a time, and {instead}"
        )


def _of_data_set(data: Any) -> dict[str, Any]:
    """Read a PyTorch data set into memory.

    An item is (features, target), (features, target, user, silo), or a mapping with the keys x, y, user, silo.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            "population: a data set needs a length and items by number; an iterable one has neither"
        )
    if not len(data):
        raise DataError("population: the data set has no record, so the shape of a record is unknown")
    with name_user_code():  # an error of the data set's code is reported as the user's
        items = [data[row] for row in range(len(data))]
    if isinstance(items[0], Mapping):
        return _of_mappings(items)
    width = len(items[0]) if isinstance(items[0], tuple | list) else 0
    alike = [isinstance(item, tuple | list) and len(item) == width for item in items]
    problem = (
        "an item of the data set must be (features, target) or (features, target, user, silo), or a mapping with x, y, "
        "user and silo, and all alike"
    )
    refuse_rows(~np.array(alike), "population", problem)
    if width not in (2, 4):
        raise DataError(f"population: {problem}")
    names = ("targets", "user", "silo")[: width - 1]
    features = {"features": [item[0] for item in items]}
    return features | {
        name: [_single(item[position]) for item in items] for position, name in enumerate(names, 1)
    }


def _of_mappings(items: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of items that are mappings.

    Raises:
        ConfigError: a key that stands for no column, or two keys for one.
        DataError: an item has other keys than the first.
    """
    keys = list(items[0])
    refuse_rows(
        np.array([not isinstance(item, Mapping) or list(item) != keys for item in items]),
        "population",
        "the item has other keys than that of row 0",
    )
    columns: dict[str, Any] = {}
    for key in keys:
        name = _KEYS.get(key)
        if name is None or name in columns:
            allowed = "x (or features), y (or targets), user, silo"
            raise ConfigError(
                f"population: key {sanitize(repr(key))} of the data set's items; they have {allowed}"
            )
        columns[name] = [item[key] if name == "features" else _single(item[key]) for item in items]
    return columns


def _single(value: Any) -> Any:
    """Return the entry of a one-element array or tensor as a Python value; return other objects unchanged."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() == 1:
        return unwrap(value.reshape(()))
    if isinstance(value, np.ndarray) and value.size == 1:
        return unwrap(value.reshape(()))
    return unwrap(value)


# --- frames and mappings as tables in memory ---
#
# How a cell is read depends on this cell and on the type of its column, as in a Parquet file. A column of Python
# objects is converted cell by cell, as a column of an Excel file: one cell never decides how another is read.


def memory_table(name: str, source: Any, file_format: Format) -> MemoryTable:
    """Return a table in memory.

    Args:
        name: its name.
        source: a frame (pandas, polars, Arrow), a Hugging Face data set, or a mapping from names of columns to arrays,
            tensors or lists of one axis and one length.
        file_format: format of numbers that are text.

    Raises:
        ConfigError: the name is no name of a silo, or ``source`` is no table.
        DataError: a column has another number of axes or of entries than the others, or a type that Arrow lacks.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"tables: '{sanitize(name)}' is no name of a table; give the silo's name")
    frame = as_arrow_table(source)
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if isinstance(frame, pa.Table):
        return MemoryTable(name=name, table=frame)
    if hasattr(frame, "columns") and hasattr(frame, "iloc"):
        columns = {str(column): frame.iloc[:, index] for index, column in enumerate(frame.columns)}
        if len(columns) != len(frame.columns):
            raise DataError(f"tables: '{sanitize(name)}' has two columns of one name")
    elif isinstance(frame, Mapping):
        columns = dict(frame)
    else:
        raise ConfigError(
            f"tables: '{sanitize(name)}' is {type(source).__name__}; a frame is needed, or a mapping from names of "
            "columns to arrays"
        )
    return MemoryTable(name=name, table=_assembled(name, columns, file_format))


def _assembled(name: str, columns: Mapping[str, Any], file_format: Format) -> pa.Table:
    """Return columns as a table."""
    arrays = {}
    for column, entries in columns.items():
        where = f"table '{sanitize(name)}', column '{sanitize(str(column))}'"
        try:
            arrays[str(column)] = _array_column(entries, file_format)
        except (pa.ArrowException, TypeError, ValueError, RuntimeError):
            raise DataError(
                f"{where}: {type(entries).__name__} is no column of numbers, text or dates with one entry a record"
            ) from None
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        raise DataError(f"table '{sanitize(name)}': its columns have different numbers of records")
    return pa.table(arrays)


def _array_column(source: Any, file_format: Format) -> pa.Array:
    """Return a column as an Arrow array; a column of objects or of numpy's text is converted cell by cell."""
    if isinstance(source, pa.Array | pa.ChunkedArray):
        return source
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().numpy()
    if isinstance(source, list | tuple):
        return cells_of_objects(source, file_format)
    if getattr(source, "ndim", 0) != 1:
        raise ValueError("a column has one axis")
    # Arrow refuses a whole column of numpy's text where one entry is no Unicode text.
    if getattr(getattr(source, "dtype", None), "kind", "") in ("O", "U"):
        return cells_of_objects(list(source), file_format)
    return pa.array(source, from_pandas=True)
