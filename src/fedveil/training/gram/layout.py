"""How contributions are laid side by side, so that one tensor operation steps them all.

Two layouts. *Blocks*: contributions of one size share square blocks of a common width, as many as fit,
because many small matrix products cost more than a few padded ones. *Stacks*: one contribution per row,
padded to the largest, for mini-batches and for losses that couple records.

The width of a block, and how many records of a stack a step reads, follow from a contribution's own number of records,
and rows come in multiples that kernels do not tell apart (:mod:`fedveil.training.shapes`): rows of padding fill them
up. The width of a stack follows from its largest, and no product runs over it: each runs over tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final, cast

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from fedveil.training.gram.products import Gram, Rows
from fedveil.training.shapes import round_up_slots, slot_multiple
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort

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
class RecordCounts:
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
    held: RecordCounts,
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
    held: RecordCounts,
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
    held: RecordCounts,
    most: int,
    batch_size: int | None,
) -> Iterator[Layout]:
    """Yield stacks of contributions, largest first, at most ``most`` matrix entries each where one allows it.

    Arguments as in :func:`block_layouts`, and the batch size of the steps. Contributions whose steps read equally
    many records may share a stack: its width decides no product, because products run over tiles
    (:func:`fedveil.training.gram.steps.train_batches`). Those whose every step reads all of their records have stacks
    of their own: batches are laid out once, and a row is as wide as a step where that is less than a tile. A stack is
    closed before a contribution of less than half its width when it has enough entries to keep the processor busy, so
    at most three quarters of a large one are padding.
    """
    sizes = held.sizes
    reads = step_widths(sizes[members], batch_size)
    whole_reads = sizes[members] <= reads
    for step, in_whole in product(np.unique(reads)[::-1].tolist(), (False, True)):
        left = members[(reads == step) & (whole_reads == in_whole)]
        left = left[np.argsort(-sizes[left], kind="stable")]
        tile, multiple = tile_of(step), slot_multiple(step)
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
    held: RecordCounts,
) -> Layout:
    """Lay contributions at their seats; ``shape`` is the width of a row and how many records of it a step reads."""
    (width, step), sizes, starts, padding = shape, held.sizes, held.starts, held.padding
    records = np.full((round_up_slots(int(setting[-1]) + 1, step), width), padding)
    size = sizes[members]
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    records[np.repeat(setting, size), np.repeat(offset, size) + within] = (
        np.repeat(starts[members], size) + within
    )
    return Layout(members=members, setting=setting, records=records, step=step)


# --- plan ----------------------------------------------------------------------------------------------------------
# What span training prepares once for a set of contributions: where records lie, and their Gram matrices.

_ALWAYS_SPAN = 256  # so few records that their Gram matrix costs less than the overhead of another path
_CHUNK_ENTRIES = 1 << 21
_LINEAR = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear)
"""What a linear model is made of: exactly these, since a class derived from one may compute something else."""


def linear_layer(model: nn.Module) -> nn.Linear | None:
    """Return the layer of a model that is one trainable linear layer on flattened features, else None."""
    parts = [part for _, part in model.named_modules(remove_duplicate=False)]
    if any(type(part) not in _LINEAR or _has_own_ways(part) for part in parts):
        return None
    layers = [part for part in parts if type(part) is not nn.Sequential]
    if not layers or not all(isinstance(layer, nn.Flatten | nn.Identity) for layer in layers[:-1]):
        return None
    last = layers[-1]
    flattening = [layer for layer in layers if isinstance(layer, nn.Flatten)]
    flattens = all(layer.start_dim == 1 and layer.end_dim == -1 for layer in flattening)
    if not isinstance(last, nn.Linear) or not flattens or not all(p.requires_grad for p in last.parameters()):
        return None
    return last


def _has_own_ways(part: nn.Module) -> bool:
    """Return whether a layer has hooks, or a ``forward`` that was put in the place of its class's."""
    held = vars(part).items()
    return "forward" in vars(part) or any(value for name, value in held if name.endswith("_hooks"))


def split_linear(
    task: Task, vector: Float32[Tensor, "*batch d"]
) -> tuple[Float32[Tensor, "*batch k p"], Float32[Tensor, "*batch k"] | None]:
    """Return the weight and the bias of a linear model as views of its vector."""
    named = {name.rpartition(".")[2]: value for name, value in task.layout.unflatten(vector).items()}
    return named["weight"], named.get("bias")


@dataclass(frozen=True, eq=False)
class Grams:
    """The Gram matrices of a layout: exact ones for norms, rounded ones of whole rows for the steps."""

    exact: list[Gram]
    rounded: Float32[Tensor, "rows width width"]

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(gram.products.nbytes for gram in self.exact) + self.rounded.nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class GramPlan:
    """The contributions that take part, numbered 0 .. m-1 by their row of the sums, then in the order of the cohort.

    Args:
        cohort: the table.
        members: (m,) their indices in the cohort's groups.
        sizes: (m,) how many records each has.
        rows: the r records of the contributions that are trained in the span.
        held: where each contribution's lie among them.
        owner: (r + 1,) the contribution of each, -1 for the padding record.
        blocks: layouts of contributions whose steps take all their records.
        stacks: layouts of those that take mini-batches.
        primal: contributions with so many records that plain training is cheaper.
        memory: bytes of Gram matrices to keep.
    """

    cohort: Cohort
    members: Int64[np.ndarray, "m"]
    sizes: Int64[np.ndarray, "m"]
    rows: Rows
    held: RecordCounts
    owner: Int64[Tensor, "r_plus_1"]
    blocks: list[Layout]
    stacks: list[Layout]
    primal: Int64[np.ndarray, "q"]
    memory: int
    _kept: dict[int, Grams] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        cohort: Cohort,
        members: Int64[np.ndarray, "m"],
        *,
        bias: bool,
        batch_size: int | None,
        by_row: bool,
        memory: int,
    ) -> "GramPlan":
        """Lay out contributions.

        Args:
            cohort: the table.
            members: indices into its groups; those of one row of the sums are adjacent.
            bias: whether the model has a bias.
            batch_size: of the local steps.
            by_row: whether several contributions may stand side by side in a call of the loss.
            memory: bytes of Gram matrices to keep.
        """
        groups = cohort.groups
        sizes = groups.size[members]
        features = cohort.features[0].numel() + bias
        whole = (sizes <= batch_size) if batch_size is not None else np.ones(len(members), dtype=bool)
        in_span = sizes <= max(_ALWAYS_SPAN, features)
        counted = np.where(in_span, sizes, 0)
        starts = np.cumsum(counted) - counted
        within = np.arange(int(counted.sum())) - np.repeat(starts, counted)
        index = groups.order[np.repeat(groups.start[members], counted) + within]
        numbers = np.arange(len(members))
        in_blocks = in_span & (sizes > 0) & whole if by_row else np.zeros_like(whole)
        in_stacks = in_span & (sizes > 0) & ~in_blocks

        held = RecordCounts(sizes=sizes, starts=starts, padding=len(index))
        return cls(
            cohort=cohort,
            members=members,
            sizes=sizes,
            rows=Rows(cohort=cohort, index=index, bias=bias),
            held=held,
            owner=torch.from_numpy(np.append(np.repeat(numbers, counted), -1)).to(cohort.device),
            blocks=list(block_layouts(numbers[in_blocks], held, _CHUNK_ENTRIES)),
            stacks=list(stack_layouts(numbers[in_stacks], held, _CHUNK_ENTRIES, batch_size)),
            primal=numbers[~in_span & (sizes > 0)],
            memory=memory,
        )

    def fits(self, cohort: Cohort, members: Int64[np.ndarray, "m"]) -> bool:
        """Return whether this plan is for these contributions of this table."""
        mine = self.cohort
        return (
            mine.groups is cohort.groups
            and mine.rows is cohort.rows
            and mine.features.data_ptr() == cohort.features.data_ptr()
            and mine.features.shape == cohort.features.shape
            and mine.scale == cohort.scale
            and mine.device == cohort.device
            and np.array_equal(self.members, members)
        )

    def grams(self, layout: Layout) -> Grams:
        """Return the Gram matrices of a layout, kept from the last round where the memory allows."""
        if id(layout) in self._kept:
            return self._kept[id(layout)]
        grams = self.compute_grams(layout)
        if sum(kept.nbytes for kept in self._kept.values()) + grams.nbytes <= self.memory:
            self._kept[id(layout)] = grams
        return grams

    def compute_grams(self, layout: Layout) -> Grams:
        """Compute the Gram matrices of a layout, of this plan or another."""
        rows, width = layout.records.shape
        exact = list(self.rows.grams(torch.from_numpy(layout.records), self.owner, width > layout.tile))
        rounded = torch.zeros(rows, width, width, device=self.cohort.device)
        for gram in exact:
            taken = gram.products.shape[1]
            rounded[gram.rows, :taken, :taken] = gram.products.float()
        return Grams(exact, rounded)

    @cached_property
    def silo_ranges(self) -> list[tuple[int, int, int]]:
        """(row of the sums, first record, last record) of each silo with records.

        Raises:
            ValueError: the members of a silo are not adjacent, so that a silo would have several totals to round.
        """
        silos = self.cohort.sum_rows[self.members][self.owner[:-1].cpu().numpy()]
        cuts = np.flatnonzero(np.diff(silos)) + 1
        if len(np.unique(silos)) < len(cuts) + (len(silos) > 0):
            raise ValueError("the members of a plan are not sorted by their silo")
        bounds = zip([0, *cuts.tolist()], [*cuts.tolist(), len(silos)], strict=True)
        return [(int(silos[first]), first, last) for first, last in bounds if last > first]
