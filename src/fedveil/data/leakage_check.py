"""Detection of leaking features in arrays: user ids and copies of the target.

A model that uses one of them does not generalise to new people.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Int32, Shaped

from fedveil.data.identities import identifies_user
from fedveil.data.input_arrays import FeatureTable
from fedveil.data.records import Targets, Task
from fedveil.sanitize import sanitize

_FIRST: Final = 1000
"""Number of first records on which most columns are excluded cheaply, before all records are compared."""


def find_leaking_features(
    table: FeatureTable, targets: Targets, who: tuple[list[str], Int32[np.ndarray, "n"]]
) -> Iterator[str]:
    """Yield a sentence for each feature that is an id or a copy of the target.

    A sentence names the column and no value.

    Args:
        table: the features; features that are not (n, d) are not checked.
        targets: targets of the records; a class is given by its number.
        who: the sorted ids, and the (n,) index of each record's user among them.
    """
    if table.values.ndim != 2 or not len(targets):  # without records, every column would equal the target
        return
    (names, person), kinds = who, targets.reshape(len(targets), -1).T
    for place in range(table.values.shape[1]):
        column = table.values[:, place]
        called = f"column {place}" if table.names is None else f"column '{sanitize(table.names[place])}'"
        # A constant column equals a constant target without a leak: np.ptp excludes it.
        if len(column) and np.ptp(column) and any(_equal(column, kind) for kind in kinds):
            yield (
                f"features: {called} is what is predicted, in every record: nobody has it when it is needed; take it "
                "out"
            )
        if _may_be_an_id(column[:_FIRST], person[:_FIRST]) and identifies_user(
            column.astype(np.float64), person, names
        ):
            yield (
                f"features: {called} has one whole number in all records of a person, and another for everybody else: "
                "if it is an id, a model learns from it who somebody is; take it out"
            )


def times_like_events(task: Task, targets: Targets) -> list[str]:
    """Return a sentence if all survival times are 0 or 1: times and events may be exchanged."""
    if task != "survival" or not len(targets) or not np.isin(targets[:, 1], (0, 1)).all():
        return []
    return ["targets: every time is 0 or 1, as events are; survival targets are (event, time), in this order"]


def _equal(column: Shaped[np.ndarray, "n"], kind: Shaped[np.ndarray, "n"]) -> bool:
    return np.array_equal(column[:_FIRST], kind[:_FIRST]) and np.array_equal(column, kind)


def _may_be_an_id(column: Shaped[np.ndarray, "n"], person: Int32[np.ndarray, "n"]) -> bool:
    """Return whether all values of the column are whole numbers, and none belongs to two people."""
    return np.array_equal(column, np.rint(column)) and len(
        set(zip(column.tolist(), person.tolist(), strict=True))
    ) == len(np.unique(column))
