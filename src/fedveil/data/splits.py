"""Seeded hold-outs: which records are kept for testing."""

from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from fedveil.config_keys import is_number
from fedveil.errors import ConfigError

TEST_SHARE: Final = 0.2
"""The share of tables and arrays that is held out where no other is asked for."""

LOCAL_TEST_SHARE = 0.1
LOCAL_TEST_ABOVE = 500


def check_share(where: str, share: Any, test: Any) -> None:
    """Return if a share of records to hold out can be one, and nothing else is to be tested on too.

    Args:
        where: the function that was called.
        share: what was given; the usual one counts as left out.
        test: public records to test on; None: there are none.

    Raises:
        ConfigError: names both arguments.
    """
    if test is not None and share != TEST_SHARE:
        raise ConfigError(
            f"{where}: test_share is of the records that are held out, and beside test= none are; leave test_share or "
            "test out"
        )
    if not (is_number(share) and 0 < share < 1):
        raise ConfigError(
            f"{where}: test_share must be between 0 and 1, not {share!r}; public records to test on go into test="
        )


def holdout_by_user(
    user: Integer[np.ndarray, "n"], key: Int64[np.ndarray, "n"], share: float, seed: int
) -> Bool[np.ndarray, "n"]:
    """Mark each record with probability ``share``, by a hash of seed, user and its place among the user's records.

    So no record's fate depends on whether another user is there: with a count of all records, removing one user
    would move the others' records between the two sides.

    Args:
        user: (n,) whose record it is, or whose in which silo.
        key: (n,) a word that names the user, alike for all the user's records.
        share: probability, between 0 and 1.
        seed: of the choice.
    """
    order = np.argsort(user, kind="stable")
    sorted_user = user[order]
    place = np.empty(len(user), dtype=np.int64)
    place[order] = np.arange(len(user)) - np.searchsorted(sorted_user, sorted_user)
    words = _mixed(_mixed(_mixed(np.uint64(seed)) ^ key.astype(np.uint64)) ^ place.astype(np.uint64))
    return words < np.uint64(share * 2.0**64)


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
    """Mark ``count`` of n records so that each class gets its share.

    Class c with n_c records gives count * n_c / n, rounded to whole records by the largest remainder (ties at random).

    Args:
        labels: (n,) classes.
        count: records to mark, at most n.
        generator: source of the choice within a class.

    Returns:
        (n,) True where a record is marked; exactly ``count`` are.
    """
    classes, of_record, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    exact = count * sizes / len(labels)
    share = np.floor(exact).astype(np.int64)
    remainder = exact - share + generator.random(len(classes)) * 1e-9
    share[np.argsort(-remainder)[: count - share.sum()]] += 1
    order = np.lexsort((generator.random(len(labels)), of_record))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(labels), dtype=np.bool_)
    chosen[order] = place < np.repeat(share, sizes)
    return chosen


def local_tests(
    silo: Int32[np.ndarray, "n"], labels: Int64[np.ndarray, "n"], generator: np.random.Generator
) -> Bool[np.ndarray, "n"]:
    """Mark the records that silos set aside: a stratified tenth (rounded up) of each silo with more than 500.

    The ULDP-FL experiments set them aside as a local test set and never use them, so MNIST trains on 54,000 records.
    """
    aside = np.zeros(len(silo), dtype=np.bool_)
    order = np.argsort(silo, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(silo))[:-1]):
        if len(rows) > LOCAL_TEST_ABOVE:
            aside[rows] = stratified_holdout(
                labels[rows], int(np.ceil(LOCAL_TEST_SHARE * len(rows))), generator
            )
    return aside
