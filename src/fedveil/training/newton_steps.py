"""Newton steps of the server for a linear model: theta <- theta + A g, from released second moments H and scores g.

A record with features x has the vector z = W (x, 1) of length n, where W is the current basis. The first rounds release
H, the second moments of z, with noise of standard deviation sd_H on a diagonal entry. The server then takes the basis

    W <- (1 / L) V diag(m_i)^(-1/2) V' W,    H = V diag(h) V',    m_i = max(h_i, sd_H sqrt(n)),
    L^2 = 1.3^2 max(0.1, sum h_i / m_i).

The floor sd_H sqrt(n) is the order of the noise's largest eigenvalue; smaller eigenvalues of H carry no information.
In the new basis, second moments are at most about 1 / L^2 in every direction. The division by L makes the root
mean square of a record's length about 1 / 1.3 of the bound B = 1. The second round of moments uses this basis and shows
directions that the noise of the first round hid.

The curvature of the loss is at most s H (:mod:`fedveil.training.newton`), so the step needs no further release:

    A = 1 / max(s / L^2, 2 ridge s sd_g / c)

with s = `LinearFamily.slope`, c = `LinearFamily.residual_norm` and sd_g the noise of scores. The second term limits the
length of a step that consists of noise only to about c / (2 s ridge). All of it is post-processing of released sums
(Dwork and Roth 2014, Proposition 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.config_keys import Positive
from fedveil.statistics.inference.scores import ScoreSums
from fedveil.training.newton import MOMENT_ROUNDS, SUMS, LinearFamily
from fedveil.training.server.optimizers import Model, Optimizer, State

_SINGULAR: Final = 1e-10
_LONGER: Final = 1.3
"""Ratio of the bound B to the root mean square of a record's length."""
_LEAST: Final = 0.1
"""Lower limit of the mean square length, whose noisy estimate may be too small or negative."""


@dataclass(frozen=True, kw_only=True)
class NewtonSteps(Optimizer):
    """Steps of a linear model from released curvatures and scores.

    The first two rounds release curvatures, set the basis and predict the family's center. Every later round releases
    scores at the model.

    Attributes:
        family: the public bounds of scores and curvatures.
        ridge: factor of the noise in a step.
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
            yield "Newton steps weigh curvature against the noise, whose size is not known here"

    def init(self, model: Model) -> State:
        """Return the state before the first round: 0 rounds, and L^2 = 0 until a round of moments sets it."""
        return {
            "newton.round": torch.zeros((), dtype=torch.int64),
            "newton.length": torch.zeros((), dtype=torch.float64),
        }

    def step(self, model: Model, mean: Float64[Tensor, " length"], state: State) -> tuple[Model, State]:
        """Return the next model and state; ``mean`` is (length,) the mean of the round's vectors."""
        number, family = int(state["newton.round"]) + 1, self.family
        code = family.code(len(model), number)
        found = code.decode(mean.cpu().numpy(), self.noise_std)
        after = model.cpu().double().numpy().copy()
        basis, slopes, baseline = family.split(after)
        squared = state["newton.length"]
        if number <= MOMENT_ROUNDS:
            moved, length = whitening(found.curvature, found.curvature_sd)
            basis[:] = moved @ basis
            # Coefficients whose prediction is the center, whatever the features.
            slopes[:] = np.linalg.solve(basis.T, np.eye(family.width)[-1]) * family.center
            baseline[:] = 0.0
            squared = torch.tensor(length, dtype=torch.float64)
        else:
            gradient, beside = np.split(found.gradient, [slopes.size])
            slopes += gradient.reshape(slopes.shape) / self._steepness(slopes, float(squared), found)
            baseline += family.baseline_step(beside, found.gradient_sd)
        stepped = torch.from_numpy(after).float().to(model.device)
        return stepped, {"newton.round": torch.tensor(number), "newton.length": squared}

    def _steepness(self, slopes: np.ndarray, squared: float, found: ScoreSums) -> float:
        """Return 1 / A, the divisor of a step along the scores."""
        slope, norm = self.family.slope(len(slopes)), self.family.residual_norm(len(slopes))
        return max(slope / squared, 2 * self.ridge * slope * found.gradient_sd / norm)


def whitening(moments: Float64[np.ndarray, "n n"], sd: float) -> tuple[Float64[np.ndarray, "n n"], float]:
    """Return (n, n) the map to a basis with released second moments of at most 1 / L^2 in every direction, and L^2.

    Args:
        moments: (n, n) released second moments.
        sd: standard deviation of the noise on a diagonal entry.
    """
    values, vectors = np.linalg.eigh(moments)
    floor = max(sd * math.sqrt(len(moments)), _SINGULAR * float(values.max(initial=0.0)), 1e-300)
    kept = np.maximum(values, floor)
    squared = _LONGER**2 * max(_LEAST, float((values / kept).sum()))
    return (vectors / np.sqrt(kept)) @ vectors.T / math.sqrt(squared), squared
