"""Refuse a public test table that holds records of the people who are trained on.

The exact metrics of a public test table may be shown and handed on, so private records must not be in one. Rows are
compared by a digest of their features: their order, their targets and their container do not matter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import numpy as np
from jaxtyping import Int32, Shaped

from fedveil.data.column_checks import CHUNK
from fedveil.data.records import Features
from fedveil.errors import DataError

_DEVIATIONS: Final = 5.0
"""Standard deviations beyond the expected number of coincidences from which on the records are refused."""


def refuse_training_records(
    features: Features,
    user: Int32[np.ndarray, "n"],
    tested: Shaped[np.ndarray, "m *others"],
    called: Callable[[int], str],
) -> None:
    """Return if no more test rows are training rows than different people's rows coincide by chance.

    Let p be the share of training rows whose features another person's row has too. A test table of m other people
    then has about m p rows in common with the training rows. The table is refused if it has more than
    m p + 5 sqrt(m p (1 - p)), so that a single common row is enough where all people differ (p = 0); and if its rows
    are the training rows in another order, for any p.

    Args:
        features: (n, ...) of the training records.
        user: (n,) whose record each is.
        tested: (m, ...) of the test records.
        called: what to call the test record of a row.

    Raises:
        DataError: names the first test row that is a training row, and no value.

    >>> people, others = np.eye(4, dtype=np.float32), np.full((3, 4), 2, dtype=np.float32)
    >>> refuse_training_records(people, np.arange(4, dtype=np.int32), others, "row {}".format)
    """
    if not features.size or not tested.size:
        return
    trained, public = _digests(features), _digests(tested)
    first: dict[bytes, int] = {}
    several = {
        row for row, who in zip(trained, user.tolist(), strict=True) if first.setdefault(row, who) != who
    }
    shared = sum(row in several for row in trained) / len(trained)
    common = [row in first for row in public]
    expected = len(public) * shared
    most = expected + _DEVIATIONS * math.sqrt(expected * (1 - shared))
    if sum(common) > most or Counter(public) == Counter(trained):
        raise DataError(
            f"{called(common.index(True))}: the features of a record that is trained on, and more test records have "
            "such features than chance explains; training records are protected, and exact metrics of a public test "
            "table are not: test on other, public people (without the records that are alike by chance), or leave test "
            "out, for test_share"
        )


def _digests(features: Shaped[np.ndarray, "n *shape"]) -> list[bytes]:
    """Return a digest of each row's float32 numbers; 0 and -0 are the same number."""
    found: list[bytes] = []
    rows = max(1, CHUNK // math.prod(features.shape[1:]))
    for start in range(0, len(features), rows):
        numbers = features[start : start + rows].astype(np.float32) + np.float32(0)
        data, width = numbers.tobytes(), numbers[0].nbytes
        found += [
            blake2b(data[at : at + width], digest_size=16).digest() for at in range(0, len(data), width)
        ]
    return found
