"""How contributions are laid side by side, so that one tensor operation steps them all.

Two layouts. *Blocks*: contributions of one size share square blocks of a common width, as many as fit,
because many small matrix products cost more than a few padded ones. *Stacks*: one contribution per row,
padded to the largest, for mini-batches and for losses that couple records.

The width of a block, and how many records of a stack a step reads, follow from a contribution's own number of records,
and rows come in multiples that kernels do not tell apart (:mod:`fedveil.local.shapes`): rows of padding fill them up.
The width of a stack follows from its largest, and no product runs over it: each runs over tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, cast

import numpy as np
from jaxtyping import Int64

from fedveil.local.shapes import unit, whole

_WIDTH: Final = 32  # smallest block: below it the overhead of a product outweighs its padding
_TILE: Final = 48  # most contributions' records, in one product


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the records of some contributions lie in a (rows, width) array.

    Args:
        members: (g,) positions of the contributions, in the order of ``setting``.
        setting: (g,) the row of each contribution; rows beyond them are padding.
        records: (rows, width) which record lies where; the number of records where there is none.
        step: how many records of a row a step reads: all of a block's.
    """

    members: Int64[np.ndarray, "g"]
    setting: Int64[np.ndarray, "g"]
    records: Int64[np.ndarray, "rows width"]
    step: int

    @property
    def tile(self) -> int:
        """The length of the products over a row: the row of a block, and a part of a stack's."""
        return min(int(self.records.shape[1]), tile_of(self.step))


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """Which records contributions hold.

    Args:
        sizes: how many each has.
        starts: the first record of each.
        padding: the record number that stands for none.
    """

    sizes: Int64[np.ndarray, "all"]
    starts: Int64[np.ndarray, "all"]
    padding: int


def block_layouts(
    members: Int64[np.ndarray, "m"],
    held: Held,
    most: int,
) -> Iterator[Layout]:
    """Yield blocks of equal width that hold these contributions, at most ``most`` matrix entries at a time.

    Args:
        members: the contributions to lay out, each with records.
        held: the records of all contributions.
        most: bound on rows x width x width, unless a single block exceeds it.
    """
    sizes = held.sizes
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
                (int(width), int(width)),
                held,
            )


def single_blocks(
    members: Int64[np.ndarray, "m"],
    held: Held,
    most: int,
) -> Iterator[Layout]:
    """Yield blocks of the widths of :func:`block_layouts` that hold one contribution each; arguments as there."""
    widths = _widths(held.sizes[members])
    for width in np.unique(widths).tolist():
        of_width, per_layout = members[widths == width], max(1, most // width**2)
        for first in range(0, len(of_width), per_layout):
            chosen = of_width[first : first + per_layout]
            rows = np.arange(len(chosen))
            yield _filled(chosen, rows, np.zeros_like(rows), (width, width), held)


def stack_layouts(
    members: Int64[np.ndarray, "m"],
    held: Held,
    most: int,
    batch_size: int | None,
) -> Iterator[Layout]:
    """Yield stacks of contributions, largest first, at most ``most`` matrix entries each where one allows it.

    Arguments as in :func:`block_layouts`, and the batch size of the steps. Contributions whose steps read equally
    many records may share a stack: its width decides no product, because products run over tiles
    (:func:`fedveil.local.span.steps.train_batches`). Those whose every step reads all of their records have stacks of
    their own: batches are laid out once, and a row is as wide as a step where that is less than a tile. A stack is
    closed before a contribution of less than half its width when it has enough entries to keep the processor busy, so
    at most three quarters of a large one are padding.
    """
    sizes = held.sizes
    reads = step_widths(sizes[members], batch_size)
    whole_reads = sizes[members] <= reads
    for step, in_whole in product(np.unique(reads)[::-1].tolist(), (False, True)):
        left = members[(reads == step) & (whole_reads == in_whole)]
        left = left[np.argsort(-sizes[left], kind="stable")]
        tile, multiple = tile_of(step), unit(step)
        while len(left):
            largest = int(sizes[left[0]])
            longest = -(-largest // step) * step
            width = step if in_whole and step < tile else -(-max(longest, tile) // tile) * tile
            halves = int(np.searchsorted(-sizes[left], -(largest // 2), side="left"))
            count = min(max(1, most // width**2), max(halves, _BUSY // largest**2, 1))
            count = -(-count // multiple) * multiple
            chosen, left = left[:count], left[count:]
            rows = np.arange(len(chosen))
            yield _filled(chosen, rows, np.zeros_like(rows), (width, step), held)


_BUSY: Final = 1 << 18


def step_widths(sizes: Int64[np.ndarray, "m"], batch_size: int | None) -> Int64[np.ndarray, "m"]:
    """Return how many records a step of each contribution in a stack reads, padding included.

    The batch size, or less where the records are fewer: a power of two, from 16; where every step takes all
    records, from 2.
    """
    least = 2 if batch_size is None else 16
    powers = 2 ** np.ceil(np.log2(np.maximum(sizes, least))).astype(np.int64)
    return cast(np.ndarray, powers if batch_size is None else np.minimum(powers, batch_size))


def tile_of(step: int) -> int:
    """Return the length of the products of steps that read this many records: 48, or a power of two above it.

    >>> tile_of(4), tile_of(50)
    (48, 64)
    """
    return _TILE if step <= _TILE else 1 << (step - 1).bit_length()


def _widths(sizes: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
    """Return the block width of each size: powers of two and the steps half-way between them, from 32."""
    power = 2 ** np.ceil(np.log2(np.maximum(sizes, _WIDTH))).astype(np.int64)
    between = power * 3 // 4
    return cast(np.ndarray, np.where((sizes <= between) & (power > _WIDTH), between, power))


def _filled(
    members: Int64[np.ndarray, "g"],
    setting: Int64[np.ndarray, "g"],
    offset: Int64[np.ndarray, "g"],
    shape: tuple[int, int],
    held: Held,
) -> Layout:
    """Lay contributions at their seats; ``shape`` is the width of a row and how many records of it a step reads."""
    (width, step), sizes, starts, padding = shape, held.sizes, held.starts, held.padding
    records = np.full((whole(int(setting[-1]) + 1, step), width), padding)
    size = sizes[members]
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    records[np.repeat(setting, size), np.repeat(offset, size) + within] = (
        np.repeat(starts[members], size) + within
    )
    return Layout(members=members, setting=setting, records=records, step=step)
