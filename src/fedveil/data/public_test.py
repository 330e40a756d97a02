"""Refusal of a public test table that contains training records.

The exact metrics of a public test table may be published, so the table must not contain private records. Rows are
compared by a digest of their features: order, targets and container do not matter.
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
"""Number of standard deviations above the expected number of coincidences beyond which the table is refused."""


def refuse_training_records(
    features: Features,
    user: Int32[np.ndarray, "n"],
    tested: Shaped[np.ndarray, "m *others"],
    called: Callable[[int], str],
) -> None:
    """Refuse a test table that shares more rows with the training table than chance explains.

    Let p be the share of training rows whose features also occur for another person. A test table of m rows of other
    people then has about m p rows in common with the training rows. The table is refused if it has more than
    m p + 5 sqrt(m p (1 - p)) common rows; if all people differ (p = 0), one common row suffices. The table is also
    refused, for any p, if its rows are the training rows in another order.

    Args:
        features: (n, ...) features of the training records.
        user: (n,) user number of each training record.
        tested: (m, ...) features of the test records.
        called: function from the row of a test record to its name in errors.

    Raises:
        DataError: the table is refused; the error names the first test row that is a training row, and no value.

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
    # p, the share of training rows that another person has too; m p common rows are expected by chance, with a
    # binomial variance of m p (1 - p).
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
    """Return a 128-bit digest of the float32 features of each row; 0 and -0 have the same digest."""
    found: list[bytes] = []
    rows = max(1, CHUNK // math.prod(features.shape[1:]))
    for start in range(0, len(features), rows):
        numbers = features[start : start + rows].astype(np.float32) + np.float32(0)  # -0 + 0 = +0
        data, width = numbers.tobytes(), numbers[0].nbytes
        found += [
            blake2b(data[at : at + width], digest_size=16).digest() for at in range(0, len(data), width)
        ]
    return found
