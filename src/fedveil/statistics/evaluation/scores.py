"""Scores of held-out people: the release that places the bins of the next one.

A record is the prefix code of the bin of its score, of all people and all targets together. It decodes to edges of
equal mass, which are public then. Bins of equal width fail for rare classes: nearly all positives would share a bin.
Records of one person are averaged and weighted over silos as in any release (docs/theory/statistics.md), so a
person moves it by at most 1.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.statistics.blocks import Block, OneHot
from fedveil.statistics.cells import Bins
from fedveil.statistics.evaluation.evaluator import SCORE, ScoreBins
from fedveil.statistics.isotonic import isotonic_regression
from fedveil.statistics.layout import Layout

_WIDE: Final = tuple(0.125 * step for step in range(1, 65))
_NARROW: Final = tuple(0.125 / 2**step for step in range(8, 0, -1))
_RISING: Final = (*_NARROW, *_WIDE)
FINE: Final = (*(-edge for edge in reversed(_RISING)), 0.0, *_RISING)
"""Edges of the bins of the first release: log-odds or log-hazards in steps of 1/8 up to 8, and by halves close to 0,
where the scores of models lie that noise keeps small."""
_STEPS: Final = 16
"""Points of a fine bin."""
_OUTER: Final = np.concatenate(([FINE[0] - 2.0], FINE, [FINE[-1] + 2.0]))


def first_layout() -> Layout:
    """Return the layout of the first release: the scores of all people."""
    return Layout((Block(release="scores", part="cells", encoder=OneHot(Bins(SCORE, FINE)), kind="prefix"),))


def equal_mass_edges(cells: Float64[np.ndarray, " cells"], bins: int, *fixed: float) -> tuple[float, ...]:
    """Return the B - 1 edges between bins of equal mass, and others that are fixed, in order.

    Args:
        cells: decoded cells of the first release: bins, missing, unreadable.
        bins: B.
        fixed: edges beside those.
    """
    shares = _shares(cells)
    levels = np.linspace(0, 1, bins + 1)[1:-1]
    rising = shares[:-1] + 1e-12 * np.arange(len(FINE))
    inner = np.interp(levels, rising, np.array(FINE))
    return tuple(sorted((*inner.tolist(), *fixed)))


def probabilities(
    cells: Float64[np.ndarray, " cells"], edges: tuple[float, ...]
) -> tuple[Float64[np.ndarray, " bins"], Float64[np.ndarray, " bins"]]:
    """Return what the mean of a predicted probability, and of its square, is in every bin, by the first release.

    Within a fine bin scores are taken for even; in a bin without mass for the middle of its edges.
    """
    p, mass, place = _points(cells, edges)
    total = np.bincount(place, weights=mass, minlength=len(edges) + 1)
    first = np.bincount(place, weights=mass * p, minlength=len(edges) + 1)
    second = np.bincount(place, weights=mass * p**2, minlength=len(edges) + 1)
    bounds = np.concatenate((_OUTER[:1], edges, _OUTER[-1:]))
    middle = 1 / (1 + np.exp(-(bounds[:-1] + bounds[1:]) / 2))
    there = total > 0
    whole = np.where(there, total, 1.0)
    return np.where(there, first / whole, middle), np.where(there, second / whole, middle**2)


def variance_of_means(placed: ScoreBins, people: Float64[np.ndarray, " bins"]) -> float:
    """Return the variance by the first release's noise of sum_b people_b p_b, p_b the mean probability of a bin.

    Args:
        placed: the bins, and the first release with its covariance.
        people: of every bin, as the second release counts them.
    """
    if placed.covariance is None:
        return 0.0
    p, mass, place = _points(placed.cells, placed.edges)
    total = np.bincount(place, weights=mass, minlength=len(people))
    means = np.bincount(place, weights=mass * p, minlength=len(people)) / np.maximum(total, 1e-300)
    fine, everybody = len(FINE) + 1, max(float(placed.cells[: len(FINE) + 1].sum()), 1.0)
    weight = np.clip(people, 0, None) / np.maximum(total, 1 / everybody) / everybody
    gradient = (weight[place] * (p - means[place])).reshape(fine, _STEPS).mean(axis=1)
    return float(gradient @ placed.covariance[:fine, :fine] @ gradient)


def _points(
    cells: Float64[np.ndarray, " cells"], edges: tuple[float, ...]
) -> tuple[Float64[np.ndarray, " points"], Float64[np.ndarray, " points"], Int64[np.ndarray, " points"]]:
    """Return probability, mass and bin of points that lie evenly in the fine bins."""
    within = (np.arange(_STEPS) + 0.5) / _STEPS
    points = (_OUTER[:-1, None] + np.diff(_OUTER)[:, None] * within).ravel()
    mass = np.repeat(np.diff(_shares(cells), prepend=0.0) / _STEPS, _STEPS) + 1e-12
    place: np.ndarray = np.searchsorted(np.array(edges), points, side="left")
    return 1 / (1 + np.exp(-points)), mass, place


def _shares(cells: Float64[np.ndarray, " cells"]) -> Float64[np.ndarray, " fine"]:
    """Return the isotonic distribution function at the ends of the fine bins; even where there is no mass."""
    ordered = cells[: len(FINE) + 1]
    total = float(ordered.sum())
    if total <= 0:
        return np.linspace(0, 1, len(FINE) + 2)[1:]
    found = isotonic_regression(np.cumsum(ordered) / total, y_min=0.0, y_max=1.0)
    found[-1] = 1.0
    return found
