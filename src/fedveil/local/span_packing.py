"""How contributions are laid side by side, so that one tensor operation steps them all.

Two layouts. *Blocks*: contributions of one size share square blocks of a common width, as many as fit,
because many small matrix products cost more than a few padded ones. *Stacks*: one contribution per row,
padded to a power of two, for mini-batches and for losses that couple records.

A width follows from a contribution's own number of records, and rows come in multiples that kernels do not tell apart
(:mod:`fedveil.local.shapes`): rows of padding fill them up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from jaxtyping import Int64

from fedveil.local.shapes import unit, whole

_WIDTH: Final = 32  # smallest block: below it the overhead of a product outweighs its padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the records of some contributions lie in a (rows, width) array.

    Args:
        members: (g,) positions of the contributions, in the order of ``seat``.
        seat: (g,) the row of each contribution; rows beyond them are padding.
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
                (int(width), 1),
                sizes,
                starts,
                padding,
            )


def single_blocks(
    members: Int64[np.ndarray, "m"],
    sizes: Int64[np.ndarray, "all"],
    starts: Int64[np.ndarray, "all"],
    padding: int,
    most: int,
) -> Iterator[Layout]:
    """Yield blocks of the widths of :func:`block_layouts` that hold one contribution each; arguments as there."""
    widths = _widths(sizes[members])
    for width in np.unique(widths).tolist():
        yield from _in_rows(members[widths == width], width, 1, (sizes, starts, padding), most)


def stack_layouts(
    members: Int64[np.ndarray, "m"],
    sizes: Int64[np.ndarray, "all"],
    starts: Int64[np.ndarray, "all"],
    padding: int,
    most: int,
    batch_size: int | None,
) -> Iterator[Layout]:
    """Yield stacks of contributions of one width, largest first, at most ``most`` matrix entries each.

    Arguments as in :func:`block_layouts`, and the batch size of the steps, for whose every width the rows suffice.
    """
    widths = stack_widths(sizes[members])
    for width in np.unique(widths)[::-1].tolist():
        chosen = members[widths == width]
        batch = min(batch_size or width, width)
        multiple = max(unit(batch), unit(width % batch or batch))
        chosen = chosen[np.argsort(-sizes[chosen], kind="stable")]
        yield from _in_rows(chosen, width, multiple, (sizes, starts, padding), most)


def stack_widths(sizes: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
    """Return the row width of each size in a stack: a power of two, from 16."""
    return cast(np.ndarray, 2 ** np.ceil(np.log2(np.maximum(sizes, 16))).astype(np.int64))


def _in_rows(
    members: Int64[np.ndarray, "m"],
    width: int,
    multiple: int,
    where: tuple[np.ndarray, np.ndarray, int],
    most: int,
) -> Iterator[Layout]:
    """Yield layouts with a contribution per row, their rows a multiple of ``multiple``."""
    per_layout = max(1, most // width**2 // multiple) * multiple
    for first in range(0, len(members), per_layout):
        chosen = members[first : first + per_layout]
        rows = np.arange(len(chosen))
        yield _filled(chosen, rows, np.zeros_like(rows), (width, multiple), *where)


def _widths(sizes: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
    """Return the block width of each size: powers of two and the steps half-way between them, from 32."""
    power = 2 ** np.ceil(np.log2(np.maximum(sizes, _WIDTH))).astype(np.int64)
    between = power * 3 // 4
    return cast(np.ndarray, np.where((sizes <= between) & (power > _WIDTH), between, power))


def _filled(
    members: Int64[np.ndarray, "g"],
    seat: Int64[np.ndarray, "g"],
    offset: Int64[np.ndarray, "g"],
    shape: tuple[int, int],
    sizes: Int64[np.ndarray, "all"],
    starts: Int64[np.ndarray, "all"],
    padding: int,
) -> Layout:
    """Lay contributions at their seats; ``shape`` is the width and what the rows are a multiple of, beside its unit."""
    width, multiple = shape
    rows = whole(int(seat[-1]) + 1, width)
    records = np.full((-(-rows // multiple) * multiple, width), padding)
    size = sizes[members]
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    records[np.repeat(seat, size), np.repeat(offset, size) + within] = (
        np.repeat(starts[members], size) + within
    )
    return Layout(members=members, seat=seat, offset=offset, records=records)
