"""The local step of a regression: a person's score and curvature at one public theta, and the spread of that score.

For pair (s, u) with records i of weights 1 / n_su (or another convex combination)

    psi_su = mean of a_i psi_i,    H_su = mean of a_i H_i,    S_su = psi_su psi_su'.

Norms are convex, so a person's mean is no longer than a record; and ||S_su|| = ||psi_su||^2. They are sent as one
vector of l2 norm at most 1. Training by Newton steps (``newton``) releases the same sums. With |psi| <= c_g,
||H||_F <= c_H and S = psi psi', the vector is

    ( sqrt(q_g) psi / c_g,   sqrt(q_H) H / c_H,   sqrt(q_S) S / c_g^2 ),     q_g + q_H + q_S = 1.

Matrices are sent as upper triangles with the off-diagonal entries times sqrt 2, so that the l2 norm of a triangle is
the Frobenius norm. Hence the vector's norm is at most sqrt(q_g + q_H + q_S) = 1. A part with share 0 is not sent.

**Clusters.** What a person adds to g is sum_s w_s psi_su, whose square has products between silos that nobody may see.
With sum_s w_s <= 1 it is at most sum_s w_s S_su in the order of positive semidefinite matrices (convexity of squares),
and is equal to it for a person in one silo. So S is the spread of g over people, and records of a person are clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float64, Int64
from scipy import sparse
from torch import Tensor

from fedveil.data.columns import ColumnTable
from fedveil.statistics.inference.design import Design
from fedveil.statistics.inference.families import Family
from fedveil.statistics.local_vectors import PersonVector

# --- scores and curvatures as one vector ---


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
    entries: np.ndarray = matrices[:, first, second] * np.where(first == second, 1.0, math.sqrt(2))
    return entries


def matrix(entries: Float64[np.ndarray, " k"], size: int) -> Float64[np.ndarray, "d d"]:
    """Return the symmetric matrix of its triangle."""
    first, second = np.triu_indices(size)
    symmetric = np.zeros((size, size))
    symmetric[first, second] = entries / np.where(first == second, 1.0, math.sqrt(2))
    symmetric[second, first] = symmetric[first, second]
    return symmetric


# --- the local step ---

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Sums of one release over all people, at its theta, with white noise.

    Attributes:
        theta: (d,) where.
        gradient: (d,) g.
        curvature: (d, d) H, symmetric.
        spread: (d, d) S, symmetric; None where it was not sent.
        gradient_sd: standard deviation of the noise on every number of g.
        curvature_sd: standard deviation of the noise on a diagonal entry of H; on another it is 1 / sqrt 2 of that.
        spread_sd: the same of S; 0 where it was not sent.
        leading: how many of the coefficients come before those of the covariates.
        stopped: whether records are followed up to a hazard under theta, which moves with theta.
        levels: for every category column, the coefficients of its categories except the reference category.
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
        shares: shares of the release.
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
        target, present = self.family.target(table)
        complete &= present
        most = max(1, _CHUNK_ELEMENTS // self.width**2)
        for chunk in _runs(np.diff(mixed.indptr), most):
            part = mixed[chunk]
            score = np.zeros((part.shape[0], self.width))
            curvature = np.zeros((part.shape[0], self.code.entries))
            # One turn, unless a single pair has more records: its blocks follow from its own number of records.
            for begin in range(0, len(part.indices), most):
                places = slice(begin, begin + most)
                records = part.indices[places]
                of_records = self._weighted(covariates[records], target[records], complete[records])
                starts, shape = np.clip(part.indptr - begin, 0, len(records)), (part.shape[0], len(records))
                mean = sparse.csr_array((part.data[places], np.arange(len(records)), starts), shape=shape)
                score += mean @ of_records[0]
                curvature += mean @ of_records[1]
            yield chunk, torch.from_numpy(self.code.encode(score, curvature))

    def sums(self, vector: Float64[np.ndarray, " length"], noise_std: float) -> Sums:
        """Return what a released sum says.

        Args:
            vector: the noisy sum.
            noise_std: standard deviation of its noise, per number.
        """
        decoded = self.code.decode(vector, noise_std)
        return Sums(
            theta=np.array(self.theta),
            gradient=decoded.gradient,
            curvature=decoded.curvature,
            spread=decoded.spread,
            gradient_sd=decoded.gradient_sd,
            curvature_sd=decoded.curvature_sd,
            spread_sd=decoded.spread_sd,
            leading=len(self.family.leading),
            stopped=self.family.stopped,
            levels=self._levels,
        )

    @property
    def _levels(self) -> tuple[tuple[int, ...], ...]:
        leading = len(self.family.leading)
        return tuple(tuple(leading + index for index in levels) for levels in self.design.levels)

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


def _runs(sizes: Int64[np.ndarray, " m"], most: int) -> Iterator[slice]:
    """Yield runs of pairs that have ``most`` records together, or are one pair."""
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield slice(first, last)
        first = last
