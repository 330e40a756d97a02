"""Scores of two classes: what is released of them, first to place the bins, then to count labels in them.

=========  ==========================================================================  ================================
release    a record is                                                                 decoded to
=========  ==========================================================================  ================================
first      the prefix code of its score's bin among those of the log-odds from -8 to 8  edges of equal mass, public then
second     the unit vector of its (label, bin), once for all people, once a partition  every figure of ``binary``
=========  ==========================================================================  ================================

Bins of equal width fail for rare classes: nearly all positives would share a bin. Records of one person are averaged
and weighted over silos as in any release (docs/theory/statistics.md), so each release moves by at most 1 with her.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.population.columns import ColumnTable, State
from fedveil.statistics.blocks import Block, OneHot
from fedveil.statistics.cells import UNREADABLE, Bins, Everybody, Partition
from fedveil.statistics.layout import Layout
from fedveil.statistics.rising import isotonic_regression
from fedveil.statistics.strategy import Strategy

SCORE: Final = "the score"
LABEL: Final = "the label"
"""Columns of the table of held-out records; a column of a schema that has such a name is refused."""
THRESHOLD: Final = 0.0
"""The log-odds above which class 1 is predicted."""
_WIDE: Final = tuple(0.125 * step for step in range(1, 65))
_NARROW: Final = tuple(0.125 / 2**step for step in range(8, 0, -1))
_RISING: Final = (*_NARROW, *_WIDE)
FINE: Final = (*(-edge for edge in reversed(_RISING)), 0.0, *_RISING)
"""Edges of the bins of the first release: log-odds in steps of 1/8 up to 8, and by halves close to the threshold, where
the scores of models lie that noise keeps small."""

_BINNING: Final = 0.1
"""The area under the curve of B bins of equal mass errs by about -.3 / B^2 before its ties are corrected, and by less
than a third of that afterwards."""
_NOISE: Final = 0.29
"""Standard deviation of the area by noise: about .29 sqrt(B) sigma sqrt(1/n1^2 + 1/n0^2)."""


@dataclass(frozen=True)
class LabelledBins(Partition):
    """Label and bin of a score at once; a record whose score is no number has a cell of its own.

    A bin holds the scores above the edge before it, up to its own edge: a score on the threshold predicts class 0.

    Attributes:
        edges: (B,) ascending; there are B + 1 bins. Equal edges leave bins between them empty.
    """

    edges: tuple[float, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Score and label."""
        return (SCORE, LABEL)

    @property
    def bins(self) -> int:
        """How many bins a label has."""
        return len(self.edges) + 1

    @property
    def size(self) -> int:
        """The bins of both labels, and the cell of scores that are no numbers."""
        return 2 * self.bins + 1

    @property
    def labels(self) -> tuple[str, ...]:
        """Label and bin."""
        found = [f"{label}, bin {place}" for label in (0, 1) for place in range(self.bins)]
        return (*found, UNREADABLE)

    def of(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        """Return the cell of every record."""
        scores, labels = table.numbers(SCORE), table.places(LABEL)
        place = np.searchsorted(np.array(self.edges), scores.values, side="left")
        readable = (scores.state == State.VALID) & (labels.state == State.VALID)
        return np.where(readable, labels.values * self.bins + place, 2 * self.bins).astype(np.int64)


def first_layout() -> Layout:
    """Return the layout of the first release: the scores of all people, of both classes together."""
    cells = OneHot(Bins(SCORE, FINE))
    strategy = Strategy("prefix", cells.ordered, cells.width - cells.ordered)
    return Layout(
        (Block(release="scores", part="cells", encoder=cells, groups=Everybody(), strategy=strategy),)
    )


def second_layout(edges: tuple[float, ...], partitions: Mapping[str, Partition]) -> Layout:
    """Return the layout of the second release: labels by bins, of all people and within every partition.

    Args:
        edges: (B,) of the bins.
        partitions: of people into groups, by name.
    """
    cells = OneHot(LabelledBins(edges))
    return Layout(
        tuple(
            Block(
                release=name,
                part="cells",
                encoder=cells,
                groups=groups,
                strategy=Strategy("flat", 0, cells.width),
            )
            for name, groups in {"all": Everybody(), **partitions}.items()
        )
    )


def predicted_error(bins: int, noise_std: float, people: float) -> float:
    """Return the standard deviation of the area under the curve by noise, for two classes of equal size.

    Args:
        bins: B.
        noise_std: of a cell, in people.
        people: how many are tested.
    """
    return _NOISE * math.sqrt(bins) * noise_std * math.sqrt(2.0) * 2 / people


def enough_bins(bins: int, noise_std: float, people: float) -> bool:
    """Whether what binning loses after its correction is below a quarter of the predicted noise."""
    return _BINNING / bins**2 < predicted_error(bins, noise_std, people) / 4


def equal_mass_edges(cells: Float64[np.ndarray, " cells"], bins: int) -> tuple[float, ...]:
    """Return B edges: B - 1 between bins of equal mass, and the threshold, in order.

    Args:
        cells: decoded cells of the first release: bins, missing, unreadable.
        bins: B.
    """
    shares = _shares(cells)
    levels = np.linspace(0, 1, bins + 1)[1:-1]
    rising = shares[:-1] + 1e-12 * np.arange(len(FINE))
    inner = np.interp(levels, rising, np.array(FINE))
    return tuple(sorted((*inner.tolist(), THRESHOLD)))


def probabilities(
    cells: Float64[np.ndarray, " cells"], edges: tuple[float, ...]
) -> tuple[Float64[np.ndarray, " bins"], Float64[np.ndarray, " bins"]]:
    """Return what the mean of a predicted probability, and of its square, is in every bin, by the first release.

    Within a fine bin scores are taken for even; in a bin without mass for the middle of its edges.
    """
    steps = 16
    outer = np.concatenate(([FINE[0] - 2.0], FINE, [FINE[-1] + 2.0]))
    within = (np.arange(steps) + 0.5) / steps
    points = (outer[:-1, None] + np.diff(outer)[:, None] * within).ravel()
    mass = np.repeat(np.diff(_shares(cells), prepend=0.0) / steps, steps) + 1e-12
    place = np.searchsorted(np.array(edges), points, side="left")
    p = 1 / (1 + np.exp(-points))
    total = np.bincount(place, weights=mass, minlength=len(edges) + 1)
    first = np.bincount(place, weights=mass * p, minlength=len(edges) + 1)
    second = np.bincount(place, weights=mass * p**2, minlength=len(edges) + 1)
    bounds = np.concatenate(([outer[0]], edges, [outer[-1]]))
    middle = 1 / (1 + np.exp(-(bounds[:-1] + bounds[1:]) / 2))
    there = total > 0
    whole = np.where(there, total, 1.0)
    return np.where(there, first / whole, middle), np.where(there, second / whole, middle**2)


def _shares(cells: Float64[np.ndarray, " cells"]) -> Float64[np.ndarray, " fine"]:
    """Return the isotonic distribution function at the ends of the fine bins; even where there is no mass."""
    ordered = cells[: len(FINE) + 1]
    total = float(ordered.sum())
    if total <= 0:
        return np.linspace(0, 1, len(FINE) + 2)[1:]
    found = isotonic_regression(np.cumsum(ordered) / total, y_min=0.0, y_max=1.0)
    found[-1] = 1.0
    return found
