"""The four columns of records: features, targets, users and silos, handed over one by one or by a PyTorch data set."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset

from fedveil.data.cells import refuse_rows, unwrap
from fedveil.errors import ConfigError, DataError
from fedveil.user_code import name_user_code

_REQUIRED: Final = {
    "features": "what is known of it",
    "targets": "what is predicted",
    "user": "whose record it is",
    "silo": "who holds it",
}


def record_columns(features: Any, targets: Any, user: Any, silo: Any) -> dict[str, Any]:
    """Return the four columns; those that a data set brings with its records are read from it.

    Raises:
        ConfigError: a column that is missing, or that the data set brings too; a data set without a length.
        DataError: a data set without a record, or an item that is not like the first.
        UserCodeError: the data set's own code fails at a record.
    """
    if isinstance(features, Dataset):
        if targets is not None:
            raise ConfigError("population: a data set brings its own targets; leave targets out")
        brought = _of_data_set(features)
        both = [
            name for name, given in (("user", user), ("silo", silo)) if given is not None and name in brought
        ]
        if both:
            raise ConfigError(
                f"population: the data set brings {both[0]} with every record; leave {both[0]} out"
            )
        columns = {"user": user, "silo": silo, **brought}
    else:
        columns = {"features": features, "targets": targets, "user": user, "silo": silo}
    for name, column in columns.items():
        if column is None:
            raise ConfigError(f"population: {name} is required: for every record, {_REQUIRED[name]}")
    return columns


def _of_data_set(data: Any) -> dict[str, Any]:
    """Read a PyTorch data set into memory, record by record."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            "population: a data set needs a length and items by number; an iterable one has neither"
        )
    if not len(data):
        raise DataError("population: the data set has no record, so the shape of a record is unknown")
    with name_user_code():
        items = [data[row] for row in range(len(data))]
    width = len(items[0]) if isinstance(items[0], tuple | list) else 0
    alike = [isinstance(one, tuple | list) and len(one) == width for one in items]
    problem = (
        "an item of the data set must be (features, target) or (features, target, user, silo), and all alike"
    )
    refuse_rows(~np.array(alike), "population", problem)
    if width not in (2, 4):
        raise DataError(f"population: {problem}")
    names = ("targets", "user", "silo")[: width - 1]
    features = {"features": [item[0] for item in items]}
    return features | {name: [_single(item[place]) for item in items] for place, name in enumerate(names, 1)}


def _single(value: Any) -> Any:
    """Return the one number of an array or a tensor as Python has it; return anything else as it is."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() == 1:
        return unwrap(value.reshape(()))
    if isinstance(value, np.ndarray) and value.size == 1:
        return unwrap(value.reshape(()))
    return unwrap(value)
