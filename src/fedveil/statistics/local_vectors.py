"""Vectors that silos contribute to a statistic: one per (silo, person) pair, bounded and summed on the bound's grid.

A person's vector in a silo is a convex combination of the vectors of the person's records there. It depends on these
records and on public parameters only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float64, Int32, Int64
from scipy import sparse
from torch import Tensor

from fedveil.data.columns import Column, ColumnTable, Places, State
from fedveil.data.records import Groups
from fedveil.privacy.bounds import FixedVector
from fedveil.stage import Source
from fedveil.statistics.blocks import Layout, LayoutSlot

Progress = Callable[[int, int], None]
"""Called after each chunk with the number of finished (silo, person) pairs and the number of all pairs."""
Combine = Literal["mean", "first", "last", "any"]
_MOST_FILLED = 8
_CHUNK_ELEMENTS = 1 << 20  # vectors of a block of people, in numbers: 8 MiB, so that few calls are made


@dataclass(frozen=True, kw_only=True)
class PersonVector(Source):
    """Base class: map each person's records in a silo to one vector of l2 norm at most 1.

    Attributes:
        combine: how the records are combined. "mean": their mean. "first", "last": the record with the smallest or
            largest value of ``order``; ties are averaged, and records without a value of ``order`` count only if no
            record has one. "any": for 0/1 columns, a record with a 1 in each column in which any record has a 1.
        order: the column that "first" and "last" compare.
    """

    own_noise: ClassVar[bool] = False
    one_gradient: ClassVar[bool] = False

    combine: Combine = "mean"
    order: str | None = None

    @property
    @abstractmethod
    def read(self) -> tuple[str, ...]:
        """Names of the columns that determine a record's vector."""

    @property
    @abstractmethod
    def length(self) -> int:
        """d, the dimension of a person's vector."""

    @abstractmethod
    def vectors(
        self, table: ColumnTable, mixed: sparse.csr_array
    ) -> Iterator[tuple[slice, Float64[Tensor, "m d"]]]:
        """Yield the vectors of all pairs in chunks: (slice of the pairs, (m, d) tensor).

        The next chunk overwrites the tensor.

        Args:
            table: the table from :meth:`pairs`.
            mixed: (pairs, records) weights from :meth:`pairs`, or some rows of them.
        """

    def few(self, table: ColumnTable, mixed: sparse.csr_array) -> sparse.csr_array | None:
        """Return the vectors of all pairs as one sparse (pairs, d) matrix, or None if they are dense.

        The choice depends on the public layout only, not on records.
        """
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that are read, ``order`` included."""
        return tuple(dict.fromkeys((*self.read, *(() if self.order is None else (self.order,)))))

    def pairs(self, table: ColumnTable) -> tuple[ColumnTable, Groups, sparse.csr_array]:
        """Return the table, its (silo, user) pairs, and the (pairs, records) matrix of convex weights."""
        groups = table.pairs()
        if self.combine == "any":
            table, groups = _any(table, groups)
        weights = np.ones(len(table)) if self.order is None else self._extreme(table, groups)
        owner = np.repeat(np.arange(len(groups)), groups.size)
        ordered = weights[groups.order]
        total = np.bincount(owner, weights=ordered, minlength=len(groups))
        data = ordered / total[owner] if len(owner) else ordered
        starts = np.concatenate((groups.start, [len(groups.order)])).astype(np.int64)
        return table, groups, sparse.csr_array((data, groups.order, starts), shape=(len(groups), len(table)))

    def _extreme(self, table: ColumnTable, groups: Groups) -> Float64[np.ndarray, "n"]:
        """Return (records,) 1 for the first or last records of each pair by ``order``, and 0 for all others."""
        assert self.order is not None
        column = table.numbers(self.order)
        sign = -1.0 if self.combine == "last" else 1.0
        value = np.where(column.state == State.VALID, sign * column.values, np.inf)[groups.order]
        least = np.minimum.reduceat(value, groups.start) if len(groups) else value
        chosen = np.zeros(len(table))
        chosen[groups.order] = value == np.repeat(least, groups.size)
        return chosen


@dataclass(frozen=True, kw_only=True)
class LocalStatistic(PersonVector):
    """Vectors of a statistic that is declared by a layout of blocks.

    Attributes:
        layout: blocks of the vector, with their offsets and scales.
    """

    layout: Layout

    @property
    def read(self) -> tuple[str, ...]:
        return self.layout.columns

    @property
    def length(self) -> int:
        return self.layout.length

    def vectors(
        self, table: ColumnTable, mixed: sparse.csr_array
    ) -> Iterator[tuple[slice, Float64[Tensor, "m d"]]]:
        """Yield the vectors of all pairs in chunks: weighted means of cells, encoded in coded blocks."""
        n, rows = mixed.shape[0], max(1, _CHUNK_ELEMENTS // self.length)
        plain, coded = mixed @ self._plain(table), self._coded(table, mixed)
        buffer = torch.empty((min(rows, max(n, 1)), self.length), dtype=torch.float64)
        for first in range(0, n, rows):
            chunk = slice(first, min(n, first + rows))
            part = buffer[: chunk.stop - first]
            plain[chunk].toarray(out=part.numpy())
            for slot, of_pairs in coded:
                part.numpy()[:, slot.place] = slot.block.encode(of_pairs[chunk]) * slot.scale
            yield chunk, part

    def few(self, table: ColumnTable, mixed: sparse.csr_array) -> sparse.csr_array | None:
        """Return sparse vectors if no block is coded and a record fills at most 1/8 of the d coordinates."""
        blocks = [slot.block for slot in self.layout.slots]
        filled = sum(1 if block.encoder.one_hot else block.encoder.width for block in blocks)
        if any(block.strategy.kind != "flat" for block in blocks) or _MOST_FILLED * filled > self.length:
            return None
        vectors = sparse.csr_array(mixed @ self._plain(table))
        vectors.sort_indices()
        return vectors

    def _plain(self, table: ColumnTable) -> sparse.csr_array:
        """Return the (records, d) scaled cells of uncoded blocks; coordinates of coded blocks are 0."""
        blocks = []
        for slot in self.layout.slots:
            if slot.block.strategy.kind == "flat":
                blocks.append(slot.block.cells(table) * slot.scale)
            else:
                blocks.append(sparse.csr_array((len(table), slot.block.length)))
        return sparse.csr_array(sparse.hstack(blocks, format="csr"))

    def _coded(
        self, table: ColumnTable, mixed: sparse.csr_array
    ) -> list[tuple[LayoutSlot, sparse.csr_array]]:
        """Return each coded block with its (pairs, width) cells."""
        coded = (slot for slot in self.layout.slots if slot.block.strategy.kind != "flat")
        return [(slot, mixed @ slot.block.cells(table)) for slot in coded]


def silo_sums(
    step: PersonVector,
    table: ColumnTable,
    weights: Float64[Tensor, " m"],
    bound: FixedVector,
    progress: Progress | None = None,
) -> Float64[np.ndarray, "silos d"]:
    """Return each silo's sum of weighted, bounded vectors, in exact multiples of the bound's grid.

    Args:
        step: maps a person's records to a vector.
        table: the records of all silos.
        weights: (m,) weight of each (silo, user) pair, in the order of :meth:`ColumnTable.pairs`.
        bound: norm bound, enforced on every vector.
        progress: called before the first and after each chunk of ``step.vectors``.
    """
    table, groups, mixed = step.pairs(table)
    if progress is not None:
        progress(0, len(groups))
    sums = np.zeros((len(table.silo_names), step.length))
    few = step.few(table, mixed)
    if few is not None:
        _add_few(sums, few, groups.silo, weights, bound)
        return sums * bound.grid
    for chunk, vectors in step.vectors(table, mixed):
        units = bound.quantize_(vectors, bound.norms(vectors), weights[chunk])
        silo = groups.silo[chunk]
        # Pairs are sorted by silo. The sum of integers does not depend on the order.
        for own in np.unique(silo).tolist():
            first, last = np.searchsorted(silo, [own, own + 1])
            sums[own] += units[first:last].sum(0).numpy()
        if progress is not None:
            progress(chunk.stop, len(groups))
    return sums * bound.grid


def _add_few(
    sums: Float64[np.ndarray, "silos d"],
    vectors: sparse.csr_array,
    silo: Int32[np.ndarray, " m"],
    weights: Float64[Tensor, " m"],
    bound: FixedVector,
) -> None:
    """Add bounded sparse vectors to the sums of their silos, in units of the grid.

    The nonzero entries of a vector are packed into a row whose length is the next power of two. The length, and so the
    rounding, depends on this vector only, not on other people.
    """
    count = np.diff(vectors.indptr)
    width = 1 << np.ceil(np.log2(np.maximum(count, 1))).astype(np.int64)
    for size in np.unique(width).tolist():
        own = np.flatnonzero(width == size)
        rows = max(1, _CHUNK_ELEMENTS // size)
        for first in range(0, len(own), rows):
            pairs = own[first : first + rows]
            positions = np.repeat(
                vectors.indptr[pairs] - np.cumsum(count[pairs]) + count[pairs], count[pairs]
            )
            positions = positions + np.arange(len(positions))
            row = np.repeat(np.arange(len(pairs)), count[pairs])
            column = positions - vectors.indptr[pairs][row]
            packed = torch.zeros((len(pairs), size), dtype=torch.float64)
            packed.numpy()[row, column] = vectors.data[positions]
            units = bound.quantize_(packed, bound.norms(packed), weights[torch.from_numpy(pairs)])
            cells = silo[pairs][row].astype(np.int64) * sums.shape[1] + vectors.indices[positions]
            binned = np.bincount(cells, weights=units.numpy()[row, column], minlength=sums.size)
            sums += binned.reshape(sums.shape)  # integers: exact in any order


def _any(table: ColumnTable, groups: Groups) -> tuple[ColumnTable, Groups]:
    """Return a table with one record per pair, and its groups: combine = "any".

    In a 0/1 column the value is 1 if any record of the pair has a 1, otherwise 0 if any has a 0, otherwise the state
    that says why there is no value (missing or invalid).
    """
    columns: dict[str, Column] = {}
    for name in table.columns:
        column = table.places(name)
        rank = np.where(column.state == State.VALID, 3 + column.values, 2 - column.state)[groups.order]
        best = np.maximum.reduceat(rank, groups.start) if len(groups) else rank
        state = np.where(best >= 3, State.VALID, 2 - best).astype(np.int8)
        columns[name] = Places(values=np.maximum(best - 3, 0), state=state)
    every: Int64[np.ndarray, " m"] = np.arange(len(groups))
    condensed = replace(table, columns=columns, silo=groups.silo, user=groups.user)
    return condensed, Groups(
        order=every, start=every, size=np.ones_like(every), silo=groups.silo, user=groups.user
    )
