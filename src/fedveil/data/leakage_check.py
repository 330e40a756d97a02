"""Features handed over in Python that are an id, or the target: a model that reads one knows nothing of anybody new."""

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
"""Records that tell of most columns that they are neither."""


def find_leaking_features(
    table: FeatureTable, targets: Targets, who: tuple[list[str], Int32[np.ndarray, "n"]]
) -> Iterator[str]:
    """Yield a sentence for each such feature; it names the column and no value.

    Args:
        table: the features; where records are no rows of a table, none is looked at.
        targets: of the records; of a class its number.
        who: the ids, and whose record each is.
    """
    if table.values.ndim != 2 or not len(targets):  # nobody's records look like nothing
        return
    (names, person), kinds = who, targets.reshape(len(targets), -1).T
    for place in range(table.values.shape[1]):
        column = table.values[:, place]
        called = f"column {place}" if table.names is None else f"column '{sanitize(table.names[place])}'"
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
    """Return a sentence if all survival times are 0 or 1, as they are where times and events are exchanged."""
    if task != "survival" or not len(targets) or not np.isin(targets[:, 1], (0, 1)).all():
        return []
    return ["targets: every time is 0 or 1, as events are; survival targets are (event, time), in this order"]


def _equal(column: Shaped[np.ndarray, "n"], kind: Shaped[np.ndarray, "n"]) -> bool:
    return np.array_equal(column[:_FIRST], kind[:_FIRST]) and np.array_equal(column, kind)


def _may_be_an_id(column: Shaped[np.ndarray, "n"], person: Int32[np.ndarray, "n"]) -> bool:
    """Return whether no number is that of two people here."""
    return len(set(zip(column.tolist(), person.tolist(), strict=True))) == len(np.unique(column))
