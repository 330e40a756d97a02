"""Ids of people and silos, as text: numbered, and hashed to what a person's own training is seeded by."""

import numpy as np
from jaxtyping import Int32, Int64

from fedveil.randomness import key_of


def numbered(names: list[str]) -> tuple[list[str], Int32[np.ndarray, "n"]]:
    """Return the sorted distinct names, and the place of each name among them."""
    distinct, place = np.unique(np.array(names, dtype=np.str_), return_inverse=True)
    return distinct.tolist(), place.astype(np.int32)


def keys_of(users: list[str]) -> Int64[np.ndarray, "users"]:
    """Return what each user's batches are seeded by: her id, not her place among those present."""
    return np.array([key_of(who) for who in users], dtype=np.int64)
