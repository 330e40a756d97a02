"""Columns of records (features, targets, users, silos) from separate objects or a PyTorch data set."""

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
    """Return the four columns by name; a PyTorch data set supplies the columns that its items contain.

    Raises:
        ConfigError: a column is missing, or is passed although the data set contains it; the data set has no length.
        DataError: the data set has no record, or an item has another form than the first.
        UserCodeError: the data set's code fails at a record.
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
    """Read a PyTorch data set of (features, target) or (features, target, user, silo) into memory."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            "population: a data set needs a length and items by number; an iterable one has neither"
        )
    if not len(data):
        raise DataError("population: the data set has no record, so the shape of a record is unknown")
    with name_user_code():  # an error of the data set's code is reported as the user's
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
    """Return the entry of a one-element array or tensor as a Python value; return other objects unchanged."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() == 1:
        return unwrap(value.reshape(()))
    if isinstance(value, np.ndarray) and value.size == 1:
        return unwrap(value.reshape(()))
    return unwrap(value)
