"""Blocks: what a record adds to a release, as a fixed vector whose length and norm are declared.

Convexity does the rest. A person's vector in a silo is a mean of those of the records there, a person's weights sum
to at most 1, and norms are convex: so no person is longer than the longest record (docs/theory/statistics.md).

The vector of a release: its blocks one after the other, each scaled so that one person's vector has norm 1 at most.

Block b has vectors of norm at most c_b and d_b numbers whose errors count lambda_b each. Sent as a_b v_b with
sum (a_b c_b)^2 = 1, its numbers have noise sigma / a_b. The sum of lambda_b d_b (sigma / a_b)^2 is least for

    share_b = (a_b c_b)^2 = c_b sqrt(lambda_b d_b) / sum of the same,

which is as good as separate releases that split mu^2 = sigma^-2, in one exchange and for one charge.

Decoding, from noisy numbers to cells: the linear inverse of the strategy, and totals that agree.

    cells = D z / a,    covariance = (sigma / a)^2 D D'

Every block whose cells cover all records estimates the same number of people in every group. Their totals t_b with
variances v_b are combined into the least-squares total n = sum(t_b / v_b) / sum(1 / v_b), and every block moves to it
along k_b = Sigma_b 1 / v_b: the best linear unbiased estimate under the constraint that all agree. Its covariance is

    Sigma_b - k_b k_b' (v_b - v),   v = 1 / sum(1 / v_b).

All of it is linear in the noise, so covariances are exact. What is displayed may be projected (no negative counts);
intervals never come from projected values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64
from scipy import sparse

from fedveil.data.columns import ColumnTable, State
from fedveil.errors import ConfigError
from fedveil.statistics.cells import Everybody, Partition
from fedveil.statistics.strategy import Kind, Strategy

# --- blocks ---


class Encoder(ABC):
    """Base class: map a record to the numbers of a block, before grouping and strategy.

    Attributes:
        width: length of a record's vector.
        norm: the largest l2 norm that any record's vector has, in closed form.
        one_hot: whether a record's vector is a unit vector or zero, which is what codes of ordered cells need.
        covers: whether a record's vector adds up to 1, so that its sum counts all people.
        ordered: how many leading coordinates are cells in an order.
        spread: how many cells people are expected to spread over, for predictions alone.
    """

    one_hot: ClassVar[bool] = False

    @property
    def covers(self) -> bool:
        """False, unless an encoder says so."""
        return False

    @property
    def ordered_cells(self) -> int:
        """None is, unless an encoder says so."""
        return 0

    @property
    def n_expected_cells(self) -> int:
        """Return 1; encoders with longer vectors override this."""
        return 1

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that are read."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Length of a record's vector."""

    @property
    @abstractmethod
    def norm(self) -> float:
        """Return the largest l2 norm of a record's vector."""

    @abstractmethod
    def rows(self, table: ColumnTable) -> sparse.csr_array:
        """Return the (n, width) vectors of all records."""


@dataclass(frozen=True)
class OneHot(Encoder):
    """The unit vector of a record's cell; zero where it has none."""

    one_hot: ClassVar[bool] = True

    cells: Partition
    norm: ClassVar[float] = 1.0  # a record lies in one cell at most

    @property
    def columns(self) -> tuple[str, ...]:
        return self.cells.columns

    @property
    def covers(self) -> bool:
        return self.cells.covers

    @property
    def ordered_cells(self) -> int:
        return self.cells.ordered_cells

    @property
    def n_expected_cells(self) -> int:
        """Return the cells other than those for missing values."""
        return self.cells.n_expected_cells

    @property
    def width(self) -> int:
        return self.cells.size

    def rows(self, table: ColumnTable) -> sparse.csr_array:
        cell = self.cells.assign(table)
        return _csr(np.where(cell >= 0, 1.0, 0.0), np.maximum(cell, 0), len(table), self.width)


@dataclass(frozen=True)
class Powers(Encoder):
    """Products of numbers scaled from declared bounds to [-1, 1]: of degree 0 (a 1), 1 (x_i) and 2 (x_i x_j, i <= j).

    A record that lacks one of the numbers is the zero vector; numbers out of range are taken for their bound. Every
    coordinate is at most 1 in size, so the norm is at most the square root of their number.

    Attributes:
        ranges: (column, lower, upper) of every number.
        degrees: which products, ascending.
    """

    ranges: tuple[tuple[str, float, float], ...]
    degrees: tuple[int, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.ranges)

    @property
    def width(self) -> int:
        """1, m and m (m + 1) / 2 for the degrees 0, 1 and 2."""
        m = len(self.ranges)
        return sum((1, m, m * (m + 1) // 2)[degree] for degree in self.degrees)

    @property
    def norm(self) -> float:
        """Return the square root of the width, where all numbers are at a bound."""
        return math.sqrt(self.width)

    def rows(self, table: ColumnTable) -> sparse.csr_array:
        complete = np.ones(len(table), dtype=np.bool_)
        scaled = np.empty((len(table), len(self.ranges)))
        for index, (name, lower, upper) in enumerate(self.ranges):
            column = table.numbers(name)
            complete &= column.state == State.VALID
            scaled[:, index] = 2 * (np.clip(column.values, lower, upper) - lower) / (upper - lower) - 1
        first, second = np.triu_indices(len(self.ranges))
        parts: list[Float64[np.ndarray, "n k"]] = [
            (np.ones((len(table), 1)), scaled, scaled[:, first] * scaled[:, second])[degree]
            for degree in self.degrees
        ]
        dense = np.concatenate(parts, axis=1)
        dense[~complete] = 0.0
        return sparse.csr_array(dense)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A record's vector in its group, under a strategy.

    Attributes:
        release: the name under which its figures were asked for.
        part: which part of that release it is.
        encoder: the record's vector.
        groups: a partition; the vector stands at its record's group and is zero at all others, so that its norm is
            that of one group.
        kind: kind of the strategy by which every group is sent.
        weight: how much its error counts beside that of other blocks.

    Raises:
        ConfigError: a code of vectors that are not one-hot, whose norm would be more; more bins than a code has.
    """

    release: str
    part: str
    encoder: Encoder
    groups: Partition = field(default_factory=Everybody)
    kind: Kind = "flat"
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what the closed form of the norm does not hold for."""
        if self.kind != "flat" and not self.encoder.one_hot:
            raise ConfigError(f"{self.release}: only one-hot vectors are coded as {self.kind}")
        assert self.strategy.width == self.encoder.width

    @cached_property
    def strategy(self) -> Strategy:
        """Return the strategy matrix of every group; unordered cells are sent as they are."""
        ordered = 0 if self.kind == "flat" else self.encoder.ordered_cells
        return Strategy(self.kind, ordered, self.encoder.width - ordered)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that are read, those of the groups included."""
        return tuple(name for name in (*self.encoder.columns, *self.groups.columns) if name != "silo")

    @property
    def length(self) -> int:
        """Return the number of sent numbers."""
        return self.groups.size * self.strategy.n_sent

    @property
    def norm(self) -> float:
        """Return the largest l2 norm of one person's vector.

        Under a strategy other than flat a record is one-hot, so that its code is a column of the strategy.
        """
        return self.encoder.norm * self.strategy.sensitivity

    def cells(self, table: ColumnTable) -> sparse.csr_array:
        """Return the (n, groups x width) vectors of all records before the strategy."""
        rows = self.encoder.rows(table)
        if self.groups.size == 1:
            return rows
        group = self.groups.assign(table)
        shift = np.repeat(group * self.encoder.width, np.diff(rows.indptr))
        shape = (len(table), self.groups.size * self.encoder.width)
        return sparse.csr_array((rows.data, rows.indices + shift, rows.indptr), shape=shape)

    def encode(self, cells: sparse.csr_array) -> Float64[np.ndarray, "m length"]:
        """Return what is sent of vectors in cells: the strategy, group by group."""
        width, n_groups = self.encoder.width, self.groups.size
        entries = cells.tocoo()
        row, column = entries.row.astype(np.int64), entries.col.astype(np.int64)
        apart = sparse.csr_array(
            (entries.data, (row * n_groups + column // width, column % width)),
            shape=(cells.shape[0] * n_groups, width),
        )
        sent = apart.toarray() if self.kind == "flat" else apart @ self.strategy.matrix.T
        return np.asarray(sent).reshape(cells.shape[0], self.length)


def _csr(values: np.ndarray, columns: np.ndarray, n: int, width: int) -> sparse.csr_array:
    """Return the matrix with one entry a row."""
    return sparse.csr_array((values, columns, np.arange(n + 1)), shape=(n, width))


# --- layout of a release ---

MOST_NUMBERS: Final = 8192
"""Numbers of one release: whoever reads it holds the covariance of its cells, 512 MiB of so many."""


@dataclass(frozen=True, kw_only=True)
class LayoutSlot:
    """A block's place in the vector.

    Attributes:
        block: what it is.
        start: index of its first number in the vector.
        share: share of the squared norm, and so of mu^2.
    """

    block: Block
    start: int
    share: float

    @property
    def scale(self) -> float:
        """a_b, what the block's numbers are multiplied by."""
        return math.sqrt(self.share) / self.block.norm

    @property
    def place(self) -> slice:
        """Return the slice of the vector that holds the numbers."""
        return slice(self.start, self.start + self.block.length)


@dataclass(frozen=True)
class Layout:
    """The blocks of a release with their shares; public, and the same for every silo.

    Raises:
        ConfigError: no block, more than 8,192 numbers, or a weight that is not above 0.
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        """Refuse a vector without numbers, and blocks that nobody weighs."""
        if not self.blocks:
            raise ConfigError("statistics.release: no release is requested")
        if self.length > MOST_NUMBERS:
            many = max(self.blocks, key=lambda block: block.length)
            raise ConfigError(
                f"statistics.release.{many.release}: {many.length} of {self.length} numbers; a release takes "
                f"at most {MOST_NUMBERS}: ask for fewer columns, categories, bins or groups"
            )
        for block in self.blocks:
            if not (math.isfinite(block.weight) and block.weight > 0):
                raise ConfigError(f"statistics.release.{block.release}.weight: must be above 0")

    @cached_property
    def slots(self) -> tuple[LayoutSlot, ...]:
        """Return the blocks with their places and shares, in order."""
        demand = [block.norm * math.sqrt(block.weight * block.length) for block in self.blocks]
        total, start, slots = math.fsum(demand), 0, []
        for block, own_demand in zip(self.blocks, demand, strict=True):
            slots.append(LayoutSlot(block=block, start=start, share=own_demand / total))
            start += block.length
        return tuple(slots)

    @property
    def length(self) -> int:
        """d, how many numbers are sent."""
        return sum(block.length for block in self.blocks)

    @property
    def norm(self) -> float:
        """Return the largest l2 norm of one person's vector: 1."""
        return math.sqrt(math.fsum((slot.scale * slot.block.norm) ** 2 for slot in self.slots))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read, each once."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.columns))

    def slots_of(self, release: str) -> Sequence[LayoutSlot]:
        """Return the parts of one release."""
        return tuple(slot for slot in self.slots if slot.block.release == release)


# --- isotonic regression ------------------------------------------------------------------------------------
# Isotonic regression: the rising sequence that lies nearest to noisy values of one that rises.


def isotonic_regression(
    values: Float64[np.ndarray, " n"],
    *,
    sample_weight: Float64[np.ndarray, " n"] | None = None,
    y_min: float | None = None,
    y_max: float | None = None,
) -> Float64[np.ndarray, " n"]:
    """Return the rising sequence with the least weighted sum of squared distances, cut off at two bounds.

    Args:
        values: (n,) what should rise.
        sample_weight: (n,) of each squared distance; None: all the same.
        y_min: what no element of the sequence lies below.
        y_max: what none lies above.
    """
    from sklearn import isotonic  # here, for it is slow to load and few commands need it

    fitted: Any = isotonic.isotonic_regression(values, sample_weight=sample_weight, y_min=y_min, y_max=y_max)
    return np.asarray(fitted, dtype=np.float64)


# --- decoding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Estimates of a block's cells in every group, with the covariance that the noise gives them.

    Attributes:
        values: (groups, width).
        covariance: (width, width), the same in every group; different groups are independent.
    """

    values: Float64[np.ndarray, "groups width"]
    covariance: Float64[np.ndarray, "width width"]


def decode(
    layout: Layout, noisy: Float64[np.ndarray, " d"], noise_std: float, unit: float = 1.0
) -> Mapping[tuple[str, str], Cells]:
    """Return every block's cells, by release and part.

    Args:
        layout: layout of the vector.
        noisy: (d,) the released sum.
        noise_std: standard deviation of its noise, per number.
        unit: what a person's full weight adds to the sum: 1, or 1/|S| where every silo has that weight; cells are
            divided by it.
    """
    cells = {}
    for slot in layout.slots:
        cells[_key(slot)] = _linear(slot, noisy, noise_std / unit, unit)
    totals: dict[Partition, list[LayoutSlot]] = {}
    for slot in layout.slots:
        if slot.block.encoder.covers:
            totals.setdefault(slot.block.groups, []).append(slot)
    for slots in totals.values():
        agreed = consistent([cells[_key(slot)] for slot in slots])
        cells.update(zip(map(_key, slots), agreed, strict=True))
    return cells


def consistent(blocks: Sequence[Cells]) -> tuple[Cells, ...]:
    """Return blocks over the same people and groups with totals that agree: generalised least squares."""
    variances = np.array([block.covariance.sum() for block in blocks])
    totals = np.stack([block.values.sum(axis=1) for block in blocks])
    variance = 1 / (1 / variances).sum()
    agreed = variance * (totals / variances[:, None]).sum(axis=0)
    adjusted = []
    for block, total, own in zip(blocks, totals, variances, strict=True):
        gain = block.covariance.sum(axis=1) / own
        adjusted.append(
            replace(
                block,
                values=block.values + np.outer(agreed - total, gain),
                covariance=block.covariance - np.outer(gain, gain) * (own - variance),
            )
        )
    return tuple(adjusted)


def _linear(slot: LayoutSlot, noisy: Float64[np.ndarray, " d"], noise_std: float, unit: float) -> Cells:
    strategy = slot.block.strategy
    sent = noisy[slot.place].reshape(slot.block.groups.size, strategy.n_sent) / (slot.scale * unit)
    return Cells(
        values=sent @ strategy.decoder.T, covariance=(noise_std / slot.scale) ** 2 * strategy.covariance
    )


def _key(slot: LayoutSlot) -> tuple[str, str]:
    return slot.block.release, slot.block.part
