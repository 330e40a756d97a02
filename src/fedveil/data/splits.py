"""Test records: seeded hold-outs, and the refusal of a public test table that contains training records.

The exact metrics of a public test table may be published, so the table must not contain private records. Rows are
compared by a digest of their features: order, targets and container do not matter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, Shaped

from fedveil.config_keys import is_number
from fedveil.data.column_checks import CHUNK
from fedveil.data.column_files import GrowingColumn, Owners
from fedveil.data.records import Features
from fedveil.errors import ConfigError, DataError, show_argument

TEST_SHARE: Final = 0.2
"""Default share of the records of tables and arrays that is held out."""

LOCAL_TEST_SHARE = 0.1
"""Share of its records that a large silo of the ULDP-FL experiments sets aside."""

LOCAL_TEST_ABOVE = 500
"""Number of records above which a silo of the ULDP-FL experiments sets records aside."""


def check_share(where: str, share: Any, test: Any, *, least: float | None = None) -> None:
    """Check that the share to hold out is in (0, 1), and is not combined with a public test table.

    Args:
        where: name of the calling function in errors.
        share: the argument ``test_share``; the default counts as left out.
        test: public records to test on; None if there are none.
        least: 0 if a share of 0 is accepted, which holds no record out.

    Raises:
        ConfigError: the share is invalid, or is combined with ``test``.
    """
    if test is not None and share != TEST_SHARE:
        raise ConfigError(
            f"{where}: test_share is of the records that are held out, and beside test= none are; leave test_share or "
            "test out"
        )
    if not (is_number(share) and (0 < share < 1 or share == least)):
        raise ConfigError(
            f"{where}: test_share must be between 0 and 1, not {show_argument(share)}; public records to test on go "
            "into test="
        )


def holdout_by_user(
    user: Integer[np.ndarray, "n"],
    key: Int64[np.ndarray, "n"],
    share: float,
    seed: int,
    *,
    silo: Int32[np.ndarray, "n"] | None = None,
    folder: Path | None = None,
) -> Bool[np.ndarray, "n"]:
    """Mark each record with probability ``share``, by a hash of seed, user and place.

    The place is the record's position among its user's records. So the choice for a record does not depend on the
    presence of other users. A choice by position in the whole table would move other users' records between training
    and test when one user's records are removed.

    Args:
        user: (n,) integer that identifies the user of each record.
        key: (n,) seed key of the user, equal for all records of the user.
        share: probability, at least 0 and below 1.
        seed: seed of the choice.
        silo: (n,) number of the silo of each record, if places are counted in each silo by itself.
        folder: folder of a file that keeps the marks; None keeps them in memory.

    Returns:
        (n,) True for a record that is held out.
    """
    with GrowingColumn(folder) as marks:
        marks.append(np.zeros(0, dtype=np.bool_))
        for rows, _, position in Owners(user, silo).places():
            words = _mixed(
                _mixed(_mixed(np.uint64(seed)) ^ key[rows].astype(np.uint64)) ^ position.astype(np.uint64)
            )
            # A uniform 64-bit word is below share * 2^64 with probability `share`.
            marks.append(words < np.uint64(share * 2.0**64))
        return marks.array()


def fold_of_user(key: Int64[np.ndarray, "n"], folds: int, seed: int) -> Int64[np.ndarray, "n"]:
    """Return the fold of each record's user, from 0: a hash of the seed and of the user's own key.

    A fold does not depend on which other users have records.

    Args:
        key: (n,) seed key of the user of each record.
        folds: number of folds.
        seed: seed of the choice.
    """
    words = _mixed(_mixed(np.uint64(seed)) ^ key.astype(np.uint64))
    return (words % np.uint64(folds)).astype(np.int64)


def _mixed(words: np.ndarray | np.uint64) -> np.ndarray:
    """Hash 64-bit words one by one: the finaliser of SplitMix64, as in ``training/counters.py``."""
    with np.errstate(over="ignore"):
        words = np.asarray(words) + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))


def stratified_holdout(
    labels: Int64[np.ndarray, "n"], count: int, generator: np.random.Generator
) -> Bool[np.ndarray, "n"]:
    """Mark ``count`` of n records at random, in proportion to the classes.

    Class c with n_c records contributes count * n_c / n records, rounded by the largest remainder (ties at random).

    Args:
        labels: (n,) classes.
        count: number of records to mark, at most n.
        generator: source of the choice within a class.

    Returns:
        (n,) True for a marked record; exactly ``count`` records are marked.
    """
    classes, of_record, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    # Largest remainder: floor of every share, then one record more for the largest remainders. The noise of at most
    # 1e-9 breaks ties at random.
    exact = count * sizes / len(labels)
    share = np.floor(exact).astype(np.int64)
    remainder = exact - share + generator.random(len(classes)) * 1e-9
    share[np.argsort(-remainder)[: count - share.sum()]] += 1
    order = np.lexsort((generator.random(len(labels)), of_record))
    position = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(labels), dtype=np.bool_)
    chosen[order] = position < np.repeat(share, sizes)
    return chosen


def local_tests(
    silo: Int32[np.ndarray, "n"], labels: Int64[np.ndarray, "n"], generator: np.random.Generator
) -> Bool[np.ndarray, "n"]:
    """Mark the records that silos set aside: a stratified tenth of each silo with more than 500 records.

    The tenth is rounded up. The ULDP-FL experiments set these records aside as a local test set and never use them,
    so MNIST trains on 54,000 records.
    """
    aside = np.zeros(len(silo), dtype=np.bool_)
    order = np.argsort(silo, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(silo))[:-1]):
        if len(rows) > LOCAL_TEST_ABOVE:
            aside[rows] = stratified_holdout(
                labels[rows], int(np.ceil(LOCAL_TEST_SHARE * len(rows))), generator
            )
    return aside


# --- public test tables ---

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
    public = list(_digests(tested))
    # Usually no row is common, and then p does not matter: the digests of all training rows need not be kept.
    if set(public).isdisjoint(_digests(features)):
        return
    trained = list(_digests(features))
    first: dict[bytes, int] = {}
    several = {
        row
        for row, person in zip(trained, user.tolist(), strict=True)
        if first.setdefault(row, person) != person
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


def _digests(features: Shaped[np.ndarray, "n *shape"]) -> Iterator[bytes]:
    """Yield a 128-bit digest of the float32 features of each row; 0 and -0 have the same digest."""
    rows = max(1, CHUNK // math.prod(features.shape[1:]))
    for start in range(0, len(features), rows):
        numbers = features[start : start + rows].astype(np.float32) + np.float32(0)  # -0 + 0 = +0
        data, width = numbers.tobytes(), numbers[0].nbytes
        for begin in range(0, len(data), width):
            yield blake2b(data[begin : begin + width], digest_size=16).digest()
