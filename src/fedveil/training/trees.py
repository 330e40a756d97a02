"""Boosted trees over public structures: the model, and the bounded histograms of every record.

Trees are oblivious: all nodes of a level ask the same question, whether feature j exceeds a cut. Features and the ranks
of cuts are drawn from the experiment's seed, without looking at a record. There are R = 30 rounds of B = 32 trees of
depth 3; a record r lies in one of 8 cells of each tree. With phi_t(r) the indicator of its cells in the trees of round
t, the prediction f_t of the trees before round t, and public c and a = c / 5:

    round 1       v(r) = one-hot cells of r's p features / sqrt(p)                    |v| = 1
    round t + 1   v(r) = ( clip(y - m(f_t), c) phi_t(r),  a phi_t(r) ) / sqrt(B (c^2 + a^2)),   |v| <= 1

because phi_t has B ones: |v|^2 = B (|clip|^2 + a^2) / (B (c^2 + a^2)). Round 1 gives the cuts, as quantiles of the
noisy counts; every later round gives the leaves of its trees, as Newton steps (:mod:`fedveil.training.trees`). A
contribution is a mean of such vectors, and a user's weights sum to at most 1: one user, with all records in all silos,
changes the sum by at most 1. docs/theory/boosted-trees.md.

The server's steps of boosted trees: cuts from noisy counts of features, leaves from noisy residuals and counts.

    round 1       cuts of feature j: the edges at the 1/16, ..., 15/16 quantiles of its noisy counts
    round t + 1   leaf of tree b in round t:  (rate / B) clip( G / (s max(N, 0) + sd_G / (2 c)), 8 c )

with G the noisy sum of residuals in the leaf, N the noisy number of records, s the largest slope of the mean (1/4, 1/2
or 1) and sd_G the noise of G. A leaf without people is noise alone; the last term of the denominator keeps its step at
about 2 c. Trees of one round are averaged, not added (B of them), times a rate. All of it is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor, nn

from fedveil.config_keys import Positive
from fedveil.errors import ModelError
from fedveil.training.losses import BinaryCrossEntropy, CrossEntropy, SquaredError
from fedveil.training.newton import LinearFamily
from fedveil.training.record_sums import RecordBatch, RecordSums, RecordVectors
from fedveil.training.server.optimizers import Model, Optimizer, State
from fedveil.training.task import Task

# --- trees and local sums ---

SUMS: Final = "histograms of features and of leaves"
"""Kind of the sums, for the server's step."""
ROUNDS: Final = 30
"""R, rounds that grow trees; the round of the cuts comes before them."""
TREES: Final = 32
"""B, trees of a round."""
DEPTH: Final = 3
LEAVES: Final = 2**DEPTH
CUTS: Final = 15
"""Cuts of a feature that a node may have, at its 1/16, ..., 15/16 quantiles."""
CELLS: Final = 128
"""Cells of equal width in [-1, 1] whose counts give the cuts."""
COUNTED: Final = 0.2
"""a / c: weight of the counts beside the residuals."""
_LOSSES: Final = (BinaryCrossEntropy, CrossEntropy, SquaredError)
_POWERS: Final = tuple(2**level for level in reversed(range(DEPTH)))


class BoostedTrees(nn.Module):
    """Sum of oblivious trees over features in [-1, 1].

    Attributes:
        cuts: (p, 15) cuts of every feature.
        leaves: (30, 32, 8, k) values of the leaves; zero at the start.
        feature: (30, 32, 3) feature of every level.
        rank: (30, 32, 3) which of the feature's cuts.

    Args:
        inputs: p.
        outputs: k.
        generator: draws the structure; it decides nothing else.
    """

    feature: Tensor
    rank: Tensor

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        shape = (ROUNDS, TREES, DEPTH)
        self.register_buffer("feature", torch.randint(inputs, shape, generator=generator))
        self.register_buffer("rank", torch.randint(CUTS, shape, generator=generator))
        even = torch.linspace(-1, 1, CUTS + 2)[1:-1]
        self.cuts = nn.Parameter(even.repeat(inputs, 1))
        self.leaves = nn.Parameter(torch.zeros(ROUNDS, TREES, LEAVES, outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Return (n, k) outputs for (n, ...) features."""
        feature, rank = self.feature.flatten(0, 1), self.rank.flatten(0, 1)
        above = features.flatten(1)[:, feature] > self.cuts[feature, rank]
        cell = (above * torch.tensor(_POWERS, device=above.device)).sum(-1)
        leaves = self.leaves.flatten(0, 2)
        first = torch.arange(ROUNDS * TREES, device=cell.device) * LEAVES
        outputs: Tensor = leaves[cell + first].sum(1)
        return outputs

    def wrong_index(self) -> str | None:
        """Return the tensor that names a feature or a cut which the model does not have; None if none does."""
        for name, most in (("feature", len(self.cuts)), ("rank", CUTS)):
            places: Tensor = getattr(self, name)
            if bool(((places < 0) | (places >= most)).any()):
                return name
        return None

    @torch.no_grad()
    def importances(self) -> Float32[Tensor, " p"]:
        """Return each feature's share of what the trees decide; the shares sum to 1, or are 0 before any tree.

        A level of a tree counts for its feature by the mean square of the change of the output across its cut, the
        other levels being given. This is a function of the released model, at no privacy cost. Noise in the leaves
        gives every feature a share: compare shares with one another, not with 0.
        """
        shares = torch.zeros(len(self.cuts), dtype=torch.float64)
        cells = self.leaves.double().cpu().view(ROUNDS, TREES, *(2,) * DEPTH, -1)
        for level in range(DEPTH):
            across = cells.diff(dim=2 + level).square().flatten(2).mean(-1)
            shares.index_add_(0, self.feature[..., level].flatten().cpu(), across.flatten())
        return (shares / shares.sum().clamp(min=torch.finfo(torch.float64).tiny)).float()


def boosted_trees(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """Build boosted trees of the flattened features, whose structure follows from torch's seed.

    Two classes have one output, the logit of the second.
    """
    return BoostedTrees(math.prod(input_shape), 1 if n_outputs == 2 else n_outputs)


@dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """Places in a model's vector and in a message.

    Attributes:
        inputs: p.
        outputs: k.
    """

    inputs: int
    outputs: int

    @classmethod
    def from_dimension(cls, inputs: int, dimension: int) -> TreeLayout:
        """Return the layout of a model of ``dimension`` parameters."""
        return cls(inputs=inputs, outputs=(dimension - inputs * CUTS) // (ROUNDS * TREES * LEAVES))

    @property
    def sent(self) -> int:
        """Length of the histograms of a round of trees: residuals output by output, then counts."""
        return TREES * LEAVES * (self.outputs + 1)

    @property
    def length(self) -> int:
        """Length of a message: the longer of the two kinds of histograms."""
        return max(self.inputs * CELLS, self.sent)

    def cuts(self, model: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, "p cuts"]:
        """Return the cuts in a model's vector, as a view."""
        return model[: self.inputs * CUTS].reshape(self.inputs, CUTS)

    def leaves(self, model: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, "rounds trees leaves k"]:
        """Return the leaves in a model's vector, as a view."""
        return model[self.inputs * CUTS :].reshape(ROUNDS, TREES, LEAVES, self.outputs)


def vector_scale(residual_norm: float) -> tuple[float, float]:
    """Return the factors of residuals and counts in a vector: 1 and a over sqrt(B (c^2 + a^2)).

    Args:
        residual_norm: c.
    """
    count = COUNTED * residual_norm
    whole = math.sqrt(TREES * (residual_norm**2 + count**2))
    return 1 / whole, count / whole


@dataclass(frozen=True, kw_only=True)
class LocalTrees(RecordSums):
    """Histograms of features, then of residuals and counts by leaf.

    Attributes:
        family: the public bounds of residuals; its record length is not used.
    """

    sends: ClassVar[str] = SUMS

    family: LinearFamily

    def message_length(self, dimension: int) -> int:
        return TreeLayout.from_dimension(self.family.inputs, dimension).length

    def vectors(self, task: Task, cache: dict[str, Any] | None = None) -> RecordVectors:
        model = task.model
        if not isinstance(model, BoostedTrees):
            raise ModelError(
                "method boosted-trees: it grows its own model; take model.name = 'boosted-trees'"
            )
        if type(task.loss) not in _LOSSES:
            raise ModelError(
                f"method boosted-trees: the loss {task.loss.name} is not one that its leaves step by; take "
                "binary_cross_entropy, cross_entropy or squared_error without class weights"
            )
        layout = TreeLayout.from_dimension(self.family.inputs, task.dimension)
        if self.round_number == 1:
            return _FeatureHistograms(layout)
        grown = Predictions(model, layout, {} if cache is None else cache, self.family.center)
        return _LeafHistograms(self.family, layout, grown, self.round_number - 2)


class _FeatureHistograms(RecordVectors):
    """One-hot cells of all features."""

    def __init__(self, layout: TreeLayout) -> None:
        self.width, self.length = layout.inputs * CELLS, layout.length
        self._inputs = layout.inputs

    def sums(self, start: Float64[np.ndarray, " d"], batch: RecordBatch) -> Float64[np.ndarray, "m width"]:
        contributions, owners = len(batch.first), batch.owners
        histograms = np.empty((contributions, self._inputs, CELLS))
        for j, column in enumerate(batch.features.T):
            cell = np.clip(np.floor((column + 1) * (CELLS / 2)), 0, CELLS - 1).astype(np.int64)
            counts = np.bincount(owners * CELLS + cell, minlength=contributions * CELLS)
            histograms[:, j] = counts.reshape(contributions, CELLS)
        return histograms.reshape(contributions, self.width) / math.sqrt(self._inputs)


class _LeafHistograms(RecordVectors):
    """Residuals and counts by leaf of the trees of one round."""

    def __init__(self, family: LinearFamily, layout: TreeLayout, grown: Predictions, number: int) -> None:
        self._family, self._layout, self._grown, self._round = family, layout, grown, number
        self.width, self.length = layout.sent, layout.length

    def sums(self, start: Float64[np.ndarray, " d"], batch: RecordBatch) -> Float64[np.ndarray, "m width"]:
        contributions, owners, layout = len(batch.first), batch.owners, self._layout
        predicted = self._grown.before(self._round, start, batch)
        residual = self._family.residuals(predicted, batch.targets)
        of_residuals, of_counts = vector_scale(self._family.residual_norm(layout.outputs))
        totals = np.empty((contributions, layout.outputs + 1, TREES, LEAVES))
        for tree, cell in enumerate(self._grown.cells(self._round, start, batch.features)):
            index, size = owners * LEAVES + cell, contributions * LEAVES
            for k in range(layout.outputs):
                pulled = np.bincount(index, weights=residual[:, k], minlength=size)
                totals[:, k, tree] = pulled.reshape(contributions, LEAVES) * of_residuals
            counts = np.bincount(index, minlength=size)
            totals[:, -1, tree] = counts.reshape(contributions, LEAVES) * of_counts
        return totals.reshape(contributions, self.width)


class Predictions:
    """Predictions of the trees of earlier rounds, kept from round to round for the records of one table.

    A kept prediction is used only if the model has the cuts and leaves from which it was computed. A prediction adds
    round by round and tree by tree, so that its bits do not depend on what was kept.

    Args:
        model: its structure is read.
        layout: places in the model's vector.
        cache: predictions by record, the number of rounds in each, and the model of which they are; updated in place.
        center: prediction before the first tree.
    """

    def __init__(
        self, model: BoostedTrees, layout: TreeLayout, cache: dict[str, Any], center: float = 0.0
    ) -> None:
        self._feature, self._rank = model.feature.cpu().numpy(), model.rank.cpu().numpy()
        self._layout, self._kept, self._center = layout, cache, center

    def cells(
        self, number: int, start: Float64[np.ndarray, " d"], features: Float64[np.ndarray, "n p"]
    ) -> list[Int64[np.ndarray, " n"]]:
        """Return the cells of records in the trees of round ``number``, from 0."""
        cuts, columns = self._layout.cuts(start), features.T
        tree_cells = []
        for features_of_tree, ranks in zip(self._feature[number], self._rank[number], strict=True):
            cell = np.zeros(len(features), dtype=np.int64)
            for j, rank in zip(features_of_tree, ranks, strict=True):
                cell = 2 * cell + (columns[j] > cuts[j, rank])
            tree_cells.append(cell)
        return tree_cells

    def before(
        self, number: int, start: Float64[np.ndarray, " d"], batch: RecordBatch
    ) -> Float64[np.ndarray, "n k"]:
        """Return the predictions of the trees before round ``number``."""
        cache, leaves = self._kept, self._layout.leaves(start)
        self._forget_others(number, start)
        self._make_room(int(batch.records.max()) + 1)
        rounds = cache["rounds"][batch.records]
        for first in np.unique(rounds):
            positions = np.flatnonzero(rounds == first)
            features, predicted = batch.features[positions], cache["predicted"][batch.records[positions]]
            for earlier in range(first, number):
                added = np.zeros_like(predicted)
                for tree, cell in enumerate(self.cells(earlier, start, features)):
                    added += leaves[earlier, tree, cell]
                predicted = predicted + added
            cache["predicted"][batch.records[positions]] = predicted
        cache["rounds"][batch.records] = number
        predictions: np.ndarray = cache["predicted"][batch.records]
        return predictions

    def _forget_others(self, number: int, start: Float64[np.ndarray, " d"]) -> None:
        """Forget what was computed from other cuts or leaves, or with more rounds than are asked for."""
        cache = self._kept
        if "model" in cache:
            rounds, model = int(cache["rounds"].max(initial=0)), cache["model"]
            leaves, cached_leaves = self._layout.leaves(start), self._layout.leaves(model)
            alike = np.array_equal(self._layout.cuts(start), self._layout.cuts(model))
            if rounds > number or not alike or not np.array_equal(leaves[:rounds], cached_leaves[:rounds]):
                cache.clear()
        cache["model"] = start.copy()

    def _make_room(self, records: int) -> None:
        cache, outputs = self._kept, self._layout.outputs
        capacity = len(cache.get("rounds", ()))
        if capacity >= records:
            return
        size = max(records, 2 * capacity)
        rounds, predicted = np.zeros(size, dtype=np.int64), np.full((size, outputs), self._center)
        if capacity:
            rounds[:capacity], predicted[:capacity] = cache["rounds"], cache["predicted"]
        cache.update(rounds=rounds, predicted=predicted)


# --- steps of the server ---

_LONGEST: Final = 8.0


@dataclass(frozen=True, kw_only=True)
class TreeSteps(Optimizer):
    """Steps of boosted trees: the first sets the cuts, every other the leaves of its trees.

    Attributes:
        family: the public bounds of residuals.
        rate: step of a round.
        noise_std: standard deviation of the noise on every number of the mean.
    """

    reads: ClassVar[str] = SUMS

    family: LinearFamily
    rate: Positive = 3.0
    noise_std: float = 0.0

    def at_noise(self, noise_std: float) -> TreeSteps:
        return replace(self, noise_std=noise_std)

    def init(self, model: Model) -> State:
        """Return the state before the first round: the number of rounds."""
        return {"trees.round": torch.zeros((), dtype=torch.int64)}

    def step(self, model: Model, mean: Float64[Tensor, " length"], state: State) -> tuple[Model, State]:
        """Return the next model and state; ``mean`` is (length,) the mean of the round's vectors."""
        number, released = int(state["trees.round"]) + 1, mean.cpu().numpy()
        after = model.cpu().double().numpy().copy()
        layout = TreeLayout.from_dimension(self.family.inputs, len(after))
        if number == 1:
            counts = released[: layout.inputs * CELLS].reshape(layout.inputs, CELLS)
            layout.cuts(after)[:] = quantile_cuts(counts)
            # The trees of the last round hold the center until they grow: residuals begin there.
            layout.leaves(after)[-1] = self.family.center / TREES
        else:
            layout.leaves(after)[number - 2] += self._leaves(released[: layout.sent], layout)
        updated = torch.from_numpy(after).float().to(model.device)
        return updated, {**state, "trees.round": torch.tensor(number)}

    def _leaves(
        self, released: Float64[np.ndarray, " sent"], layout: TreeLayout
    ) -> Float64[np.ndarray, "trees leaves k"]:
        outputs, norm = layout.outputs, self.family.residual_norm(layout.outputs)
        of_residuals, of_counts = vector_scale(norm)
        sums = released.reshape(outputs + 1, TREES, LEAVES)
        pulled, counts = sums[:outputs] / of_residuals, sums[outputs] / of_counts
        # The smallest number keeps an empty leaf at 0 where there is no noise.
        evidence = self.noise_std / of_residuals / (2 * norm) + np.finfo(np.float64).tiny
        step = pulled / (self.family.slope(outputs) * np.maximum(counts, 0) + evidence)
        longest = _LONGEST * norm
        return np.asarray(np.clip(step, -longest, longest).transpose(1, 2, 0) * (self.rate / TREES))


def quantile_cuts(counts: Float64[np.ndarray, "p cells"]) -> Float64[np.ndarray, "p cuts"]:
    """Return the edges nearest above the 1/16, ..., 15/16 quantiles of noisy counts; an edge has cells on both sides.

    Args:
        counts: (p, 128) noisy counts of equal cells in [-1, 1]; only their ratios matter.
    """
    shown = np.maximum(counts, 0.0)
    below = np.cumsum(shown, axis=1)
    total = below[:, -1:]
    ranks = np.arange(1, CUTS + 1) / (CUTS + 1)
    # The number of cells that end at or below the quantile; 1 to 127 leave cells on both sides.
    edge = (below[:, :, None] < ranks * np.maximum(total, 1e-300)[:, :, None]).sum(axis=1) + 1
    edge = np.where(total > 0, edge, np.round(ranks * CELLS).astype(np.int64))
    return np.asarray(np.clip(edge, 1, CELLS - 1) * (2 / CELLS) - 1)
