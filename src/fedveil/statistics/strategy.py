"""Strategies: which linear combinations of a histogram are sent, so that the figures asked for have little noise.

A record in cell k of a partition is the unit vector e_k. What is sent is A e_k, with a public matrix A; what is read is
D z with D the least-squares inverse of A. Noise of standard deviation sigma on every number sent becomes noise of
covariance sigma^2 (A'A)^-1 on the cells.

=========  ====================================  ===============================================================
kind       A on the ordered cells                for
=========  ====================================  ===============================================================
flat       I                                     single cells
prefix     S / ||S e_1||, S S = the lower        sums of leading cells: quantiles, risk sets; a sum of any length
           triangle of ones                      has noise of about sqrt(log B), not sqrt(B)
stacked    I above prefix, over sqrt(2)          both
=========  ====================================  ===============================================================

S is triangular and Toeplitz with the Taylor coefficients of (1 - x)^(-1/2), so its inverse is one too, with those of
(1 - x)^(1/2). Cells without an order (missing, unreadable) are sent flat beside them.

**Sensitivity.** One person's vector is a convex combination of columns of A (of records and silos). Norms are convex,
so the longest is a column: S's first, whose squared norm is the sum of all squared coefficients. Scaled by it, every
strategy has norm exactly 1. Reference for the square-root factorisation: Fichtenberger, Henzinger, Upadhyay,
"Constant matters" (ICML 2023); Henzinger, Upadhyay, Upadhyay (SODA 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Literal

import numpy as np
from jaxtyping import Float64
from scipy.linalg import block_diag, solve_triangular, toeplitz

from fedveil.errors import ConfigError

MOST_ORDERED: Final = 1026
"""Ordered cells of a strategy: 1,024 bins, and one below and one above them."""

Kind = Literal["flat", "prefix", "stacked"]


def prefix_coefficients(size: int) -> Float64[np.ndarray, "size"]:
    """Return the first Taylor coefficients of (1 - x)^(-1/2): binom(2k, k) / 4^k.

    >>> prefix_coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    k = np.arange(1, size)
    return np.concatenate(([1.0], np.cumprod((2 * k - 1) / (2 * k))))


def prefix_norm(size: int) -> float:
    """Return the l2 sensitivity of the prefix matrix before it is scaled: sqrt(sum of squared coefficients)."""
    return math.sqrt(math.fsum((prefix_coefficients(size) ** 2).tolist()))


@dataclass(frozen=True)
class Strategy:
    """A public matrix whose columns have l2 norm at most 1.

    Attributes:
        kind: what it is on the ordered cells.
        ordered: how many leading cells are in an order.
        free: how many cells follow that are in none; they are sent as they are.

    Raises:
        ConfigError: no cell, or more ordered cells than 1,024 bins have.
    """

    kind: Kind
    ordered: int
    free: int = 0
    sensitivity: ClassVar[float] = (
        1.0  # the largest l2 norm of a convex combination of columns, in closed form
    )

    def __post_init__(self) -> None:
        """Refuse what has no cell, and prefix codes that are larger than they were measured."""
        if self.width < 1:
            raise ConfigError("a strategy needs at least one cell")
        if self.kind != "flat" and not 1 <= self.ordered <= MOST_ORDERED:
            raise ConfigError(f"{self.ordered - 2} bins: quantiles take at most {MOST_ORDERED - 2}")

    @property
    def width(self) -> int:
        """Return the number of cells."""
        return self.ordered + self.free

    @property
    def n_sent(self) -> int:
        """Return the number of sent numbers."""
        return self.width + (self.ordered if self.kind == "stacked" else 0)

    @cached_property
    def matrix(self) -> Float64[np.ndarray, "sent width"]:
        """Return the (rows, cells) matrix A."""
        if self.kind == "flat":
            return np.eye(self.width)
        coefficients = prefix_coefficients(self.ordered)
        prefix = toeplitz(coefficients, np.zeros(self.ordered)) / prefix_norm(self.ordered)
        top = prefix if self.kind == "prefix" else np.vstack((np.eye(self.ordered), prefix)) / math.sqrt(2)
        return np.asarray(block_diag(top, np.eye(self.free)) if self.free else top)

    @cached_property
    def decoder(self) -> Float64[np.ndarray, "width sent"]:
        """D, the least-squares inverse of A: D A = I."""
        matrix = self.matrix
        if self.kind == "flat":
            return np.eye(self.width)
        if self.kind == "prefix":
            return np.asarray(solve_triangular(matrix, np.eye(self.width), lower=True))
        inverse: np.ndarray = np.linalg.solve(matrix.T @ matrix, matrix.T)
        return inverse

    @property
    def cell_noise(self) -> float:
        """Return the largest standard deviation of a cell, in units of the noise on a sent number."""
        return 1.0 if self.kind == "flat" else math.sqrt(float(np.diag(self.covariance).max()))

    @property
    def leading_noise(self) -> float:
        """Return the largest standard deviation of a sum of leading cells, in units of the noise; 0 if unordered."""
        return math.sqrt(largest_leading(self.covariance, self.ordered)) if self.ordered else 0.0

    @cached_property
    def covariance(self) -> Float64[np.ndarray, "width width"]:
        """D D', what unit noise on every number sent becomes on the cells."""
        if self.kind == "flat":
            return np.eye(self.width)
        covariance: np.ndarray = self.decoder @ self.decoder.T
        return covariance


def largest_leading(covariance: Float64[np.ndarray, "n n"], ordered: int) -> float:
    """Return the largest variance of a sum of leading cells, of so many in an order."""
    sums = covariance[:ordered, :ordered].cumsum(axis=0).cumsum(axis=1)
    return float(np.diag(sums).max())
