"""Send a contribution's score and curvature as one vector of l2 norm at most 1, and read their released sums.

Regressions (``fedveil infer``) and training by Newton steps (``newton``) release the same sums. With psi the score of a
contribution, |psi| <= c_g, H its symmetric curvature, ||H||_F <= c_H, and S = psi psi', the vector is

    ( sqrt(q_g) psi / c_g,   sqrt(q_H) H / c_H,   sqrt(q_S) S / c_g^2 ),     q_g + q_H + q_S = 1.

Matrices are sent as upper triangles with the off-diagonal entries times sqrt 2, so that the l2 norm of a triangle is
the Frobenius norm. Hence the vector's norm is at most sqrt(q_g + q_H + q_S) = 1. A part with share 0 is not sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Division of the squared norm of one release; the shares sum to 1.

    Attributes:
        gradient: q_g.
        curvature: q_H.
        spread: q_S; 0 if the spread is not sent.
    """

    gradient: float
    curvature: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreSums:
    """Sums of scores, curvatures and spreads, read from a released vector.

    Attributes:
        gradient: (g,) sum of the scores; zeros if their share is 0.
        curvature: (n, n) symmetric sum of the curvatures; zeros if their share is 0.
        spread: (g, g) symmetric sum of psi psi'; None if its share is 0.
        gradient_sd: standard deviation of the noise on every number of the gradient; 0 if its share is 0.
        curvature_sd: the same of a diagonal entry of the curvature; on another entry it is 1 / sqrt 2 of that.
        spread_sd: the same of the spread.
    """

    gradient: Float64[np.ndarray, " g"]
    curvature: Float64[np.ndarray, "n n"]
    spread: Float64[np.ndarray, "g g"] | None
    gradient_sd: float
    curvature_sd: float
    spread_sd: float


@dataclass(frozen=True, kw_only=True)
class ScoreCode:
    """Layout and scales of the vectors of one release.

    Attributes:
        scores: g, the length of a score.
        width: n, the width of a curvature.
        score_norm: c_g, the largest l2 norm of a score.
        curvature_norm: c_H, the largest Frobenius norm of a curvature.
        shares: division of the squared norm.
    """

    scores: int
    width: int
    score_norm: float
    curvature_norm: float
    shares: Shares

    @property
    def entries(self) -> int:
        """Length of a curvature's triangle."""
        return self.width * (self.width + 1) // 2

    @property
    def length(self) -> int:
        """Length of a vector; the spread has room in it only if it is sent."""
        return (
            self.scores + self.entries + (self.scores * (self.scores + 1) // 2 if self.shares.spread else 0)
        )

    @cached_property
    def scales(self) -> tuple[float, float, float]:
        """Factors by which score, curvature and spread are multiplied."""
        return (
            math.sqrt(self.shares.gradient) / self.score_norm,
            math.sqrt(self.shares.curvature) / self.curvature_norm,
            math.sqrt(self.shares.spread) / self.score_norm**2,
        )

    def encode(
        self, score: Float64[np.ndarray, "m g"], curvature: Float64[np.ndarray, "m k"]
    ) -> Float64[np.ndarray, "m length"]:
        """Return the vectors of m contributions.

        Args:
            score: (m, g) their scores.
            curvature: (m, k) triangles of their curvatures (:func:`triangle`).
        """
        of_gradient, of_curvature, of_spread = self.scales
        parts = [score * of_gradient, curvature * of_curvature]
        if self.shares.spread:
            parts.append(triangle(score[:, :, None] * score[:, None, :]) * of_spread)
        return np.concatenate(parts, axis=1)

    def decode(self, vector: Float64[np.ndarray, " length"], noise_std: float) -> ScoreSums:
        """Return the sums in a released vector.

        Args:
            vector: the noisy sum of the contributions' vectors.
            noise_std: standard deviation of its noise, per number.
        """
        g, entries, (gradient, curvature, spread) = self.scores, self.entries, self.scales
        return ScoreSums(
            gradient=vector[:g] / gradient if gradient else np.zeros(g),
            curvature=matrix(vector[g : g + entries], self.width) / curvature
            if curvature
            else np.zeros((self.width, self.width)),
            spread=matrix(vector[g + entries :], g) / spread if spread else None,
            gradient_sd=noise_std / gradient if gradient else 0.0,
            curvature_sd=noise_std / curvature if curvature else 0.0,
            spread_sd=noise_std / spread if spread else 0.0,
        )


def triangle(matrices: Float64[np.ndarray, "n d d"]) -> Float64[np.ndarray, "n k"]:
    """Return upper triangles with the off-diagonal times sqrt 2: their l2 norm is the Frobenius norm."""
    first, second = np.triu_indices(matrices.shape[1])
    found: np.ndarray = matrices[:, first, second] * np.where(first == second, 1.0, math.sqrt(2))
    return found


def matrix(entries: Float64[np.ndarray, " k"], size: int) -> Float64[np.ndarray, "d d"]:
    """Return the symmetric matrix of its triangle."""
    first, second = np.triu_indices(size)
    found = np.zeros((size, size))
    found[first, second] = entries / np.where(first == second, 1.0, math.sqrt(2))
    found[second, first] = found[first, second]
    return found
