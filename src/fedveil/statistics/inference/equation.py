"""The local step of a regression: a person's score and curvature at one public theta, and the spread of that score.

For pair (s, u) with records i of weights 1 / n_su (or another convex combination)

    psi_su = mean of a_i psi_i,    H_su = mean of a_i H_i,    S_su = psi_su psi_su'.

Norms are convex, so a person's mean is no longer than a record; and ||S_su|| = ||psi_su||^2. They are sent as one
vector of norm at most 1 (:mod:`fedveil.statistics.inference.scores`).

**Clusters.** What a person adds to g is sum_s w_s psi_su, whose square has products between silos that nobody may see.
With sum_s w_s <= 1 it is at most sum_s w_s S_su in the order of positive semidefinite matrices (convexity of squares),
and is equal to it for a person in one silo. So S is the spread of g over people, and records of a person are clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float64
from scipy import sparse
from torch import Tensor

from fedveil.data.columns import ColumnTable
from fedveil.statistics.inference.design import Design
from fedveil.statistics.inference.families import Family
from fedveil.statistics.inference.scores import ScoreCode, Shares, triangle
from fedveil.statistics.local_vectors import PersonVector

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Sums of one release over all people, at its theta, with white noise.

    Attributes:
        theta: (d,) where.
        gradient: (d,) g.
        curvature: (d, d) H, symmetric.
        spread: (d, d) S, symmetric; None where it was not sent.
        gradient_sd: of the noise on every number of g.
        curvature_sd: of the noise on a diagonal entry of H; on another it is 1 / sqrt 2 of that.
        spread_sd: the same of S; 0 where it was not sent.
        leading: how many of the coefficients come before those of the covariates.
        stopped: whether records are followed up to a hazard under theta, which moves with theta.
        levels: of every category column, the coefficients of its categories but the reference.
    """

    theta: Float64[np.ndarray, " d"]
    gradient: Float64[np.ndarray, " d"]
    curvature: Float64[np.ndarray, "d d"]
    spread: Float64[np.ndarray, "d d"] | None
    gradient_sd: float
    curvature_sd: float
    spread_sd: float = 0.0
    leading: int = 1
    stopped: bool = False
    levels: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Equation(PersonVector):
    """The vectors of one release of a regression.

    Attributes:
        family: what r and v are.
        design: what x is.
        bound: B >= 1.
        theta: where, public.
        shares: of the release.
    """

    family: Family
    design: Design
    bound: float
    theta: tuple[float, ...]
    shares: Shares

    @property
    def read(self) -> tuple[str, ...]:
        """Return the columns of target and covariates."""
        return (*self.family.columns, *self.design.columns)

    @property
    def width(self) -> int:
        """Return the number of coefficients."""
        return len(self.theta)

    @property
    def length(self) -> int:
        """Return d numbers of g, d (d + 1) / 2 of H, and as many of S where it is sent."""
        return self.code.length

    @cached_property
    def code(self) -> ScoreCode:
        """Layout and scales of the vectors."""
        return ScoreCode(
            scores=self.width,
            width=self.width,
            score_norm=self.family.score_norm(self.bound),
            curvature_norm=self.family.curvature_norm(self.bound),
            shares=self.shares,
        )

    @property
    def scales(self) -> tuple[float, float, float]:
        """Return the factors by which g, H and S are multiplied before they are sent."""
        return self.code.scales

    def vectors(
        self, table: ColumnTable, mixed: sparse.csr_array
    ) -> Iterator[tuple[slice, Float64[Tensor, "m d"]]]:
        """Yield the vectors of all pairs; a record without all of its values adds zeros."""
        covariates, complete = self.design.covariates(table)
        target, known = self.family.target(table)
        complete &= known
        longest = int(np.diff(mixed.indptr).max(initial=1))
        rows = max(1, _CHUNK_ELEMENTS // (longest * self.width**2))
        for first in range(0, mixed.shape[0], rows):
            some = slice(first, min(mixed.shape[0], first + rows))
            part = mixed[some]
            taken = part.indices
            score, curvature = self._weighted(covariates[taken], target[taken], complete[taken])
            shape = (part.shape[0], len(taken))
            mean = sparse.csr_array((part.data, np.arange(len(taken)), part.indptr), shape=shape)
            yield some, torch.from_numpy(self.code.encode(mean @ score, mean @ curvature))

    def sums(self, vector: Float64[np.ndarray, " length"], noise_std: float) -> Sums:
        """Return what a released sum says.

        Args:
            vector: the noisy sum.
            noise_std: of its noise, per number.
        """
        found = self.code.decode(vector, noise_std)
        return Sums(
            theta=np.array(self.theta),
            gradient=found.gradient,
            curvature=found.curvature,
            spread=found.spread,
            gradient_sd=found.gradient_sd,
            curvature_sd=found.curvature_sd,
            spread_sd=found.spread_sd,
            leading=len(self.family.leading),
            stopped=self.family.stopped,
            levels=self._levels,
        )

    @property
    def _levels(self) -> tuple[tuple[int, ...], ...]:
        leading = len(self.family.leading)
        return tuple(tuple(leading + place for place in levels) for levels in self.design.levels)

    def _weighted(
        self,
        covariates: Float64[np.ndarray, "n p"],
        target: Float64[np.ndarray, "n t"],
        complete: np.ndarray,
    ) -> tuple[Float64[np.ndarray, "n d"], Float64[np.ndarray, "n k"]]:
        """Return every record's bounded score, and the triangle of its bounded curvature."""
        weight = np.minimum(1.0, self.bound**2 / (1 + (covariates**2).sum(axis=1))) * complete
        score, curvature = self.family.terms(covariates, target, np.array(self.theta))
        return score * weight[:, None], triangle(curvature) * weight[:, None]
