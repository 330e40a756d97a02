"""How contributions are laid side by side, so that one tensor operation steps them all.

Two layouts. *Blocks*: contributions of one size share square blocks of a common width, as many as fit,
because many small matrix products cost more than a few padded ones. *Stacks*: one contribution per row,
padded to the largest, for mini-batches and for losses that couple records.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from jaxtyping import Int64

_WIDTH: Final = 32  # smallest block: below it the overhead of a product outweighs its padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the records of some contributions lie in a (rows, width) array.

    Args:
        members: (g,) positions of the contributions, in the order of ``seat``.
        seat: (g,) the row of each contribution.
        offset: (g,) its first column.
        records: (rows, width) which record lies where; the number of records where there is none.
    """

    members: Int64[np.ndarray, "g"]
    seat: Int64[np.ndarray, "g"]
    offset: Int64[np.ndarray, "g"]
    records: Int64[np.ndarray, "rows width"]


def block_layouts(
    members: Int64[np.ndarray, "m"],
    sizes: Int64[np.ndarray, "all"],
    starts: Int64[np.ndarray, "all"],
    padding: int,
    most: int,
) -> Iterator[Layout]:
    """Yield blocks of equal width that hold these contributions, at most ``most`` matrix entries at a time.

    Args:
        members: the contributions to lay out, each with records.
        sizes: of all contributions.
        starts: first record of each contribution.
        padding: the record number that stands for none.
        most: bound on rows x width x width, unless a single block exceeds it.
    """
    widths = _widths(sizes[members])
    for width in np.unique(widths):
        chosen = members[widths == width]
        chosen = chosen[np.argsort(sizes[chosen], kind="stable")]
        size = sizes[chosen]
        rank = np.arange(len(chosen)) - np.searchsorted(size, size)
        fitting = width // size
        in_block = rank // fitting
        first_of_size = np.searchsorted(size, size) == np.arange(len(size))
        blocks_of_size = -(-(np.searchsorted(size, size, side="right") - np.arange(len(size))) // fitting)
        before = (
            np.cumsum(np.where(first_of_size, blocks_of_size, 0))
            - blocks_of_size[np.searchsorted(size, size)]
        )
        block, offset = before + in_block, (rank % fitting) * size
        per_chunk = max(1, most // int(width) ** 2)
        for first in range(0, int(block[-1]) + 1, per_chunk):
            low, high = np.searchsorted(block, (first, first + per_chunk))
            yield _filled(
                chosen[low:high],
                block[low:high] - first,
                offset[low:high],
                int(width),
                sizes,
                starts,
                padding,
            )


def stack_layouts(
    members: Int64[np.ndarray, "m"],
    sizes: Int64[np.ndarray, "all"],
    starts: Int64[np.ndarray, "all"],
    padding: int,
    most: int,
) -> Iterator[Layout]:
    """Yield stacks of contributions, largest first, at most ``most`` matrix entries each where one allows it.

    Arguments as in :func:`block_layouts`. A stack is closed before a contribution of less than half its
    width when it has enough entries to keep the processor busy, so at most three quarters of a large one
    are padding.
    """
    left = members[np.argsort(-sizes[members], kind="stable")]
    while len(left):
        width = int(sizes[left[0]])
        count = max(1, most // width**2)
        halves = int(np.searchsorted(-sizes[left], -(width // 2), side="left"))
        count = min(count, max(halves, _BUSY // width**2, 1))
        chosen, left = left[:count], left[count:]
        rows = np.arange(len(chosen))
        yield _filled(chosen, rows, np.zeros_like(rows), width, sizes, starts, padding)


_BUSY: Final = 1 << 18


def _widths(sizes: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
    """Return the block width of each size: powers of two and the steps half-way between them, from 32."""
    power = 2 ** np.ceil(np.log2(np.maximum(sizes, _WIDTH))).astype(np.int64)
    between = power * 3 // 4
    return cast(np.ndarray, np.where((sizes <= between) & (power > _WIDTH), between, power))


def _filled(
    members: Int64[np.ndarray, "g"],
    seat: Int64[np.ndarray, "g"],
    offset: Int64[np.ndarray, "g"],
    width: int,
    sizes: Int64[np.ndarray, "all"],
    starts: Int64[np.ndarray, "all"],
    padding: int,
) -> Layout:
    records = np.full((int(seat[-1]) + 1, width), padding)
    size = sizes[members]
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    records[np.repeat(seat, size), np.repeat(offset, size) + within] = (
        np.repeat(starts[members], size) + within
    )
    return Layout(members=members, seat=seat, offset=offset, records=records)
