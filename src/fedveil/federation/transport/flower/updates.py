"""The update in a reply of a Flower app: what its arrays differ in from the arrays that were sent to the client."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from jaxtyping import Float64

from fedveil.errors import ModelError


def arrays_of(message: Message) -> ArrayRecord:
    """Return the one array record of a message.

    Raises:
        ModelError: none or several.
    """
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ModelError(f"a message has {len(records)} array records; exactly 1 is needed")
    return records[0]


def update_of(before: ArrayRecord, after: ArrayRecord) -> Float64[np.ndarray, " d"]:
    """Return after - before as one (d,) vector, arrays in the order of ``before``.

    Raises:
        ModelError: other names or shapes than before, or arrays that are no floating-point numbers.
    """
    if list(before) != list(after):
        raise ModelError("a reply has other arrays than the message before it")
    parts = []
    for name in before:
        old, new = before[name].numpy(), after[name].numpy()
        if old.shape != new.shape or not np.issubdtype(old.dtype, np.floating):
            raise ModelError(f"array '{name}': floating-point numbers of the shape {old.shape} are needed")
        parts.append((new.astype(np.float64) - old.astype(np.float64)).reshape(-1))
    return np.concatenate(parts)


def moved_by(before: ArrayRecord, update: Float64[np.ndarray, " d"]) -> ArrayRecord:
    """Return before + update, in the types and shapes of ``before``."""
    moved, at = {}, 0
    for name, array in before.items():
        old = array.numpy()
        part = update[at : at + old.size].reshape(old.shape)
        moved[name] = Array((old.astype(np.float64) + part).astype(old.dtype))
        at += old.size
    return ArrayRecord(moved)


def replace_arrays(message: Message, arrays: ArrayRecord) -> None:
    """Put arrays in the place of a message's one array record."""
    (name,) = message.content.array_records
    message.content.array_records[name] = arrays
