"""Arrange contributions in arrays, so that one tensor operation steps all of them.

Two layouts exist. *Blocks*: contributions of one size share square blocks of a common width, as many as fit, because
many small matrix products cost more than a few padded ones. *Stacks*: one contribution per row, padded to the
largest, for mini-batches and for losses that couple records.

The width of a block, and the number of records of a stack that a step reads, follow from a contribution's own number
of records. Rows come in multiples that kernels treat alike (:mod:`fedveil.training.shapes`), filled up by rows of
padding. The width of a stack follows from its largest contribution, but no product runs over it: products run over
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from fedveil.training.gram.products import Gram, Rows
from fedveil.training.shapes import round_up_slots, slot_multiple
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort

_WIDTH: Final = 32  # smallest block: below it the overhead of a product outweighs its padding
_TILE: Final = 48  # one product of this length covers all records of most contributions


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Positions of the records of some contributions in a (rows, width) array.

    Args:
        members: (g,) positions of the contributions, in the order of ``setting``.
        setting: (g,) the row of each contribution; later rows are padding.
        records: (rows, width) the record at each position; the number of records marks padding.
        step: number of records of a row that a step reads; in a block, all of them.
    """

    members: Int64[np.ndarray, "g"]
    setting: Int64[np.ndarray, "g"]
    records: Int64[np.ndarray, "rows width"]
    step: int

    @property
    def tile(self) -> int:
        """Length of the products over a row: a whole row of a block, or a part of a stack's row."""
        return min(int(self.records.shape[1]), tile_of(self.step))


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordCounts:
    """The records that contributions hold.

    Args:
        sizes: number of records of each contribution.
        starts: the first record of each.
        padding: the record number that marks padding.
    """

    sizes: Int64[np.ndarray, "all"]
    starts: Int64[np.ndarray, "all"]
    padding: int


def block_layouts(
    members: Int64[np.ndarray, "m"],
    counts: RecordCounts,
    most: int,
) -> Iterator[Layout]:
    """Yield blocks of equal width that hold these contributions.

    Args:
        members: the contributions to lay out, each with records.
        counts: the records of all contributions.
        most: bound on rows x width x width, unless a single block exceeds it.
    """
    sizes = counts.sizes
    widths = _widths(sizes[members])
    for width in np.unique(widths):
        chosen = members[widths == width]
        chosen = chosen[np.argsort(sizes[chosen], kind="stable")]
        size = sizes[chosen]
        rank = np.arange(len(chosen)) - np.searchsorted(size, size)
        # Contributions of one size share blocks: `rank` counts within a size, `fitting` fit into a block. `before` is
        # the number of blocks of all smaller sizes.
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
                counts,
            )


def single_blocks(
    members: Int64[np.ndarray, "m"],
    counts: RecordCounts,
    most: int,
) -> Iterator[Layout]:
    """Yield blocks that hold one contribution each.

    Widths and arguments are those of :func:`block_layouts`.
    """
    widths = _widths(counts.sizes[members])
    for width in np.unique(widths).tolist():
        of_width, per_layout = members[widths == width], max(1, most // width**2)
        for first in range(0, len(of_width), per_layout):
            chosen = of_width[first : first + per_layout]
            rows = np.arange(len(chosen))
            yield _filled(chosen, rows, np.zeros_like(rows), (width, width), counts)


def stack_layouts(
    members: Int64[np.ndarray, "m"],
    counts: RecordCounts,
    most: int,
    batch_size: int | None,
) -> Iterator[Layout]:
    """Yield stacks of contributions, largest first.

    A stack has at most ``most`` matrix entries, unless a single contribution exceeds it.

    Contributions whose steps read equally many records may share a stack. The width of a stack decides no product,
    because products run over tiles (:func:`fedveil.training.gram.steps.train_batches`). Contributions whose every
    step reads all of their records have separate stacks: their batches are laid out once, and a row is as wide as a
    step if that is less than a tile. A stack ends before a contribution of less than half its width if it has enough
    entries to keep the processor busy. So at most three quarters of a large stack are padding.

    Args:
        members: the contributions to lay out, each with records.
        counts: the records of all contributions.
        most: bound on rows x width x width.
        batch_size: batch size of the local steps; None takes all records.
    """
    sizes = counts.sizes
    reads = step_widths(sizes[members], batch_size)
    whole_reads = sizes[members] <= reads
    for step, in_whole in product(np.unique(reads)[::-1].tolist(), (False, True)):
        remaining = members[(reads == step) & (whole_reads == in_whole)]
        remaining = remaining[np.argsort(-sizes[remaining], kind="stable")]
        tile, multiple = tile_of(step), slot_multiple(step)
        while len(remaining):
            largest = int(sizes[remaining[0]])
            longest = -(-largest // step) * step
            width = step if in_whole and step < tile else -(-max(longest, tile) // tile) * tile
            halves = int(np.searchsorted(-sizes[remaining], -(largest // 2), side="left"))
            count = min(max(1, most // width**2), max(halves, _BUSY // largest**2, 1))
            count = -(-count // multiple) * multiple
            chosen, remaining = remaining[:count], remaining[count:]
            rows = np.arange(len(chosen))
            yield _filled(chosen, rows, np.zeros_like(rows), (width, step), counts)


_BUSY: Final = 1 << 18


def step_widths(sizes: Int64[np.ndarray, "m"], batch_size: int | None) -> Int64[np.ndarray, "m"]:
    """Return the number of records that a step of each contribution in a stack reads, padding included.

    It is the batch size, or less for fewer records: a power of two, from 16; if every step takes all records, from 2.
    """
    least = 2 if batch_size is None else 16
    powers = 2 ** np.ceil(np.log2(np.maximum(sizes, least))).astype(np.int64)
    return cast(np.ndarray, powers if batch_size is None else np.minimum(powers, batch_size))


def tile_of(step: int) -> int:
    """Return the length of the products of steps that read this many records.

    It is 48, or a power of two above it.

    >>> tile_of(4), tile_of(50)
    (48, 64)
    """
    return _TILE if step <= _TILE else 1 << (step - 1).bit_length()


def _widths(sizes: Int64[np.ndarray, "m"]) -> Int64[np.ndarray, "m"]:
    """Return the block width of each size: powers of two and the midpoints between them, from 32."""
    power = 2 ** np.ceil(np.log2(np.maximum(sizes, _WIDTH))).astype(np.int64)
    between = power * 3 // 4
    return cast(np.ndarray, np.where((sizes <= between) & (power > _WIDTH), between, power))


def _filled(
    members: Int64[np.ndarray, "g"],
    setting: Int64[np.ndarray, "g"],
    offset: Int64[np.ndarray, "g"],
    shape: tuple[int, int],
    counts: RecordCounts,
) -> Layout:
    """Place contributions in their rows, at their offsets.

    Args:
        members: (g,) the contributions.
        setting: (g,) the row of each, ascending.
        offset: (g,) the first column of each.
        shape: the width of a row, and the number of its records that a step reads.
        counts: the records of all contributions.
    """
    (width, step), sizes, starts, padding = shape, counts.sizes, counts.starts, counts.padding
    records = np.full((round_up_slots(int(setting[-1]) + 1, step), width), padding)
    size = sizes[members]
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    records[np.repeat(setting, size), np.repeat(offset, size) + within] = (
        np.repeat(starts[members], size) + within
    )
    return Layout(members=members, setting=setting, records=records, step=step)


# --- plan ----------------------------------------------------------------------------------------------------------
# The preparation of Gram training for a set of contributions, made once: positions of records and Gram matrices.

# Up to this number of records, a Gram matrix costs less than the overhead of the primal path.
_ALWAYS_SPAN = 256
_CHUNK_ENTRIES = 1 << 21
_LINEAR = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear)
"""Exact classes of the layers of a linear model; a derived class may compute something else."""


def linear_layer(model: nn.Module) -> nn.Linear | None:
    """Return the layer of a model that is one trainable linear layer on flattened features, or None."""
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
    """Return whether a layer has hooks, or a ``forward`` set on the instance."""
    attributes = vars(part).items()
    return "forward" in vars(part) or any(value for name, value in attributes if name.endswith("_hooks"))


LinearViews: TypeAlias = tuple[Float32[Tensor, "*batch k p"], Float32[Tensor, "*batch k"] | None]
"""Weight and bias of linear models, as views of their vectors."""


def split_linear(task: Task, vector: Float32[Tensor, "*batch d"]) -> LinearViews:
    """Return the weight and the bias of a linear model as views of its vector."""
    named = {name.rpartition(".")[2]: value for name, value in task.layout.unflatten(vector).items()}
    return named["weight"], named.get("bias")


@dataclass(frozen=True, eq=False)
class Grams:
    """The Gram matrices of a layout: exact ones for norms, and float32 ones of whole rows for the steps."""

    exact: list[Gram]
    rounded: Float32[Tensor, "rows width width"]

    @property
    def nbytes(self) -> int:
        """Memory of the matrices, in bytes."""
        return sum(gram.products.nbytes for gram in self.exact) + self.rounded.nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class GramPlan:
    """Layouts and Gram matrices of the contributions that take part.

    Contributions are numbered 0 .. m-1 by their row of the sums, then in the order of the cohort.

    Args:
        cohort: the table.
        members: (m,) their indices in the cohort's groups.
        sizes: (m,) number of records of each.
        rows: the r records of the contributions that are trained in the span.
        held: positions of each contribution's records among these.
        owner: (r + 1,) the contribution of each record, -1 for the padding record.
        blocks: layouts of contributions whose steps take all their records.
        stacks: layouts of contributions that take mini-batches, or whose loss couples records.
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
            members: indices into its groups; the members of one row of the sums are adjacent.
            bias: whether the model has a bias.
            batch_size: batch size of the local steps.
            by_row: whether one call of the loss may hold rows of several contributions.
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

        record_counts = RecordCounts(sizes=sizes, starts=starts, padding=len(index))
        return cls(
            cohort=cohort,
            members=members,
            sizes=sizes,
            rows=Rows(cohort=cohort, index=index, bias=bias),
            held=record_counts,
            owner=torch.from_numpy(np.append(np.repeat(numbers, counted), -1)).to(cohort.device),
            blocks=list(block_layouts(numbers[in_blocks], record_counts, _CHUNK_ENTRIES)),
            stacks=list(stack_layouts(numbers[in_stacks], record_counts, _CHUNK_ENTRIES, batch_size)),
            primal=numbers[~in_span & (sizes > 0)],
            memory=memory,
        )

    def fits(self, cohort: Cohort, members: Int64[np.ndarray, "m"]) -> bool:
        """Return whether this plan is for these contributions of this table."""
        planned_cohort = self.cohort
        return (
            # Identity of the table is enough: trainers never write to it.
            planned_cohort.groups is cohort.groups
            and planned_cohort.rows is cohort.rows
            and planned_cohort.features.data_ptr() == cohort.features.data_ptr()
            and planned_cohort.features.shape == cohort.features.shape
            and planned_cohort.scale == cohort.scale
            and planned_cohort.device == cohort.device
            and np.array_equal(self.members, members)
        )

    def grams(self, layout: Layout) -> Grams:
        """Return the Gram matrices of a layout, kept from the last round if the memory allows."""
        if id(layout) in self._kept:
            return self._kept[id(layout)]
        grams = self.compute_grams(layout)
        if sum(cached.nbytes for cached in self._kept.values()) + grams.nbytes <= self.memory:
            self._kept[id(layout)] = grams
        return grams

    def compute_grams(self, layout: Layout) -> Grams:
        """Compute the Gram matrices of a layout, of this plan or of another."""
        rows, width = layout.records.shape
        exact = list(self.rows.grams(torch.from_numpy(layout.records), self.owner, width > layout.tile))
        rounded = torch.zeros(rows, width, width, dtype=torch.float32, device=self.cohort.device)
        for gram in exact:
            columns = gram.products.shape[1]
            rounded[gram.rows, :columns, :columns] = gram.products.float()
        return Grams(exact, rounded)

    @cached_property
    def silo_ranges(self) -> list[tuple[int, int, int]]:
        """(row of the sums, first record, last record + 1) of each silo with records.

        Raises:
            ValueError: the members of a silo are not adjacent, so that the silo would have several totals to round.
        """
        silos = self.cohort.sum_rows[self.members][self.owner[:-1].cpu().numpy()]
        cuts = np.flatnonzero(np.diff(silos)) + 1
        # Adjacent members give each silo one range. Two ranges of a silo would be rounded separately, and the margin
        # of a contribution pays for one rounding only.
        if len(np.unique(silos)) < len(cuts) + (len(silos) > 0):
            raise ValueError("the members of a plan are not sorted by their silo")
        bounds = zip([0, *cuts.tolist()], [*cuts.tolist(), len(silos)], strict=True)
        return [(int(silos[first]), first, last) for first, last in bounds if last > first]
