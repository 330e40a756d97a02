"""Seeded hold-outs: which records are kept for testing."""

import numpy as np
from jaxtyping import Bool, Int32, Int64

LOCAL_TEST_SHARE = 0.1
LOCAL_TEST_ABOVE = 500


def holdout(n: int, count: int, generator: np.random.Generator) -> Bool[np.ndarray, "n"]:
    """Mark ``count`` of n records, all subsets alike likely."""
    chosen = np.zeros(n, dtype=np.bool_)
    chosen[generator.permutation(n)[:count]] = True
    return chosen


def stratified_holdout(
    labels: Int64[np.ndarray, "n"], count: int, generator: np.random.Generator
) -> Bool[np.ndarray, "n"]:
    """Mark ``count`` of n records so that each class gets its share.

    Class c with n_c records gives count * n_c / n, rounded to whole records by the largest remainder (ties
    at random).

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

    The ULDP-FL experiments set them aside as a local test set and never use them, so MNIST trains on 54,000
    records.
    """
    aside = np.zeros(len(silo), dtype=np.bool_)
    order = np.argsort(silo, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(silo))[:-1]):
        if len(rows) > LOCAL_TEST_ABOVE:
            aside[rows] = stratified_holdout(
                labels[rows], int(np.ceil(LOCAL_TEST_SHARE * len(rows))), generator
            )
    return aside
