"""The server's Newton steps: theta <- theta + A g, from released scores g and released second moments.

With n = |z|, s H the bound of the curvature (:mod:`fedveil.training.newton`), released with noise of standard deviation
sd_H on a diagonal entry, and scores released with noise of standard deviation sd_g:

    A = V diag(1 / max(s h_i, ridge (s sd_H sqrt(n) + sd_g))) V',     H = V diag(h) V'.

The first term of the floor is the order of the largest eigenvalue of the noise in s H, below which an eigenvalue says
nothing. The second keeps a step along a direction with little evidence shorter than about 1 / ridge. As s H bounds the
curvature everywhere, no step overshoots for want of noise, and A needs one release. Several outputs share H.

All of it is post-processing of released sums (Dwork and Roth 2014, Proposition 2.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.config_keys import Positive
from fedveil.training.newton import SUMS, LinearFamily
from fedveil.training.server.optimizers import Model, Optimizer, State

_SINGULAR = 1e-10


@dataclass(frozen=True, kw_only=True)
class NewtonSteps(Optimizer):
    """Steps of a linear model from released scores and curvatures.

    The first round releases the curvature and sets the model to 0. Every later round releases scores at the model.

    Attributes:
        family: the public bounds of scores and curvatures.
        ridge: factor of the floor.
        noise_std: standard deviation of the noise on every number of the mean.
    """

    reads: ClassVar[str] = SUMS

    family: LinearFamily
    ridge: Positive = 1.0
    noise_std: float = 0.0

    def at_noise(self, noise_std: float) -> NewtonSteps:
        return replace(self, noise_std=noise_std)

    def refuses(self, method: Any) -> Iterable[str]:
        yield from super().refuses(method)
        if not method.noise_known:
            yield "Newton steps weigh eigenvalues against the noise, whose size is not known here"

    def init(self, model: Model) -> State:
        """Return the state before the first round: the number of rounds, and the inverse A, not known yet."""
        width = self.family.width
        return {
            "newton.round": torch.zeros((), dtype=torch.int64),
            "newton.inverse": torch.zeros(width, width, dtype=torch.float64),
        }

    def step(self, model: Model, mean: Float64[Tensor, " length"], state: State) -> tuple[Model, State]:
        """Return the next model and state; ``mean`` is (length,) the mean of the round's vectors."""
        number, family = int(state["newton.round"]) + 1, self.family
        code, outputs = family.code(len(model), number), family.outputs(len(model))
        found = code.decode(mean.cpu().numpy(), self.noise_std)
        counted = {**state, "newton.round": torch.tensor(number)}
        if number == 1:
            inverse = self._inverse(found.curvature, found.curvature_sd, outputs)
            return torch.zeros_like(model), {**counted, "newton.inverse": torch.from_numpy(inverse)}
        inputs, inverse = family.inputs, state["newton.inverse"].numpy()
        slopes, intercepts = np.split(found.gradient, [outputs * inputs])
        scores = np.concatenate((slopes.reshape(outputs, inputs), intercepts[:, None]), axis=1)
        moves = scores @ inverse
        move = np.concatenate((moves[:, :inputs].reshape(-1), moves[:, inputs]))
        after = model.double().cpu() + torch.from_numpy(move)
        return after.float().to(model.device), counted

    def _inverse(self, moments: np.ndarray, sd: float, outputs: int) -> np.ndarray:
        """Return A, given the released second moments and the standard deviation of their noise."""
        family, slope = self.family, self.family.slope(outputs)
        values, vectors = np.linalg.eigh(moments)
        of_scores = family.code(outputs * family.width, 2)
        floor = self.ridge * (slope * sd * np.sqrt(family.width) + self.noise_std / of_scores.scales[0])
        steep = np.maximum(
            slope * values, max(floor, _SINGULAR * slope * float(values.max(initial=0.0)), 1e-300)
        )
        return np.asarray((vectors / steep) @ vectors.T)
