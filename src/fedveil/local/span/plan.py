"""What span training prepares once for a set of contributions: where records lie, and their Gram matrices."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from fedveil.local.span.features import Gram, Rows
from fedveil.local.span.packing import Held, Layout, block_layouts, stack_layouts
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort

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
class Plan:
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
    held: Held
    owner: Int64[Tensor, "r_plus_1"]
    blocks: list[Layout]
    stacks: list[Layout]
    primal: Int64[np.ndarray, "q"]
    memory: int
    _kept: dict[int, Grams] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        cohort: Cohort,
        members: Int64[np.ndarray, "m"],
        *,
        bias: bool,
        batch_size: int | None,
        by_row: bool,
        memory: int,
    ) -> "Plan":
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

        held = Held(sizes=sizes, starts=starts, padding=len(index))
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
        grams = self.made(layout)
        if sum(kept.nbytes for kept in self._kept.values()) + grams.nbytes <= self.memory:
            self._kept[id(layout)] = grams
        return grams

    def made(self, layout: Layout) -> Grams:
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
