"""The server's steps of boosted trees: cuts from noisy counts of features, leaves from noisy residuals and counts.

    round 1       cuts of feature j: the edges at the 1/16, ..., 15/16 quantiles of its noisy counts
    round t + 1   leaf of tree b in round t:  (rate / B) clip( G / (s max(N, 0) + sd_G / (2 c)), 8 c )

with G the noisy sum of residuals in the leaf, N the noisy number of records, s the largest slope of the mean (1/4, 1/2
or 1) and sd_G the noise of G. A leaf without people is noise alone; the last term of the denominator keeps its step at
about 2 c. Trees of one round are averaged, not added (B of them), times a rate. All of it is post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.config_keys import Positive
from fedveil.training.newton import LinearFamily
from fedveil.training.server.optimizers import Model, Optimizer, State
from fedveil.training.trees import CELLS, CUTS, LEAVES, SUMS, TREES, TreeLayout, vector_scale

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
        found = torch.from_numpy(after).float().to(model.device)
        return found, {**state, "trees.round": torch.tensor(number)}

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
