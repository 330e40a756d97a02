"""Flags of ULDP-GROUP: which records stay when a user may keep at most k of them over all silos."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from fedveil.population.records import Records


def keep_at_most(records: Records, per_user: int) -> Int64[np.ndarray, "kept"]:
    """Return the rows kept, in the order of the table: at most ``per_user`` records of each user over all silos.

    A user's records are taken in turn from the silos (the first of each silo, then the second of each, ...), as the
    authors' flags are, so that no silo loses more than it must.

    >>> one = np.zeros(4, dtype=np.int32)
    >>> table = Records(features=np.zeros((4, 1), np.float32), targets=np.zeros(4, np.int64),
    ...                 silo=np.array([0, 0, 0, 1], np.int32), user=one)
    >>> keep_at_most(table, 2).tolist()
    [0, 3]
    """
    by_pair = np.lexsort((records.silo, records.user))
    turn = np.empty(len(records), dtype=np.int64)
    turn[by_pair] = _position_in_run(records.user[by_pair].astype(np.int64) << 32 | records.silo[by_pair])
    by_user = np.lexsort((records.silo, turn, records.user))
    place = np.empty(len(records), dtype=np.int64)
    place[by_user] = _position_in_run(records.user[by_user])
    return np.flatnonzero(place < per_user)


def _position_in_run(keys: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... within every run of equal keys."""
    begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    lengths = np.diff(np.r_[begins, len(keys)])
    return np.arange(len(keys)) - np.repeat(begins, lengths)
