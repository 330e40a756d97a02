"""Quantiles from noisy cumulative counts: where the distribution function crosses q, and a band around it.

With C_j the people up to edge x_j and V all people with a value, T_j = C_j - q V is linear in the cells: its noise is
exact, and at the quantile the choice of people adds V q (1 - q) at most. The interval holds all x between the edge
before the first j with T_j + z sd_j >= 0 and the edge after the last with T_j - z sd_j < 0. It is wrong on one side
only if T at ONE edge beside the quantile is off by z sd, so it covers 95 % whatever the other edges do; ends are edges,
so it is no narrower than a bin.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.intervals import NORMAL_95, Interval, interval_between, share
from fedveil.statistics.isotonic import isotonic_regression


def cumulative(
    values: Float64[np.ndarray, " B"], covariance: Float64[np.ndarray, "B B"], level: float
) -> tuple[Float64[np.ndarray, " B"], Float64[np.ndarray, " B"]]:
    """Return T_j = C_j - level V at every edge after a cell, with its variance by the noise."""
    size = len(values)
    weights = np.tril(np.ones((size, size))) - level
    return weights @ values, np.einsum("jk,kl,jl->j", weights, covariance, weights)


def quantile(
    values: Float64[np.ndarray, " B"],
    covariance: Float64[np.ndarray, "B B"],
    edges: tuple[float, ...],
    level: float,
    people_per_unit: float,
) -> Interval | None:
    """Return a quantile with its interval; None where nobody is left to have one.

    Args:
        values: (B + 2,) ordered cells: below, bins, above.
        covariance: of their noise.
        edges: (B + 1,) of the bins.
        level: q in (0, 1).
        people_per_unit: how much more than one unit one person may add to a count (|S| for person-silo pairs).

    Returns:
        The interval; an end is None where the quantile may lie outside the declared bounds. Where the estimate does,
        it is the bound that it lies beyond.
    """
    total = float(values.sum())
    if total <= 0:
        return None
    distance, noise = (part[:-1] for part in cumulative(values, covariance, level))
    people = people_per_unit * total * level * (1 - level)
    ends, here = (_ends(distance, np.sqrt(noise + own), edges) for own in (people, 0.0))
    shares = isotonic_regression(np.cumsum(values) / total, y_min=0.0, y_max=1.0)
    place = int(np.argmin(np.abs(distance)))
    estimate, beyond = _interpolated(shares[:-1], edges, level)
    return replace(interval_between(estimate, ends, here, share(float(noise[place]), people)), beyond=beyond)


def _ends(
    distance: Float64[np.ndarray, " E"], sd: Float64[np.ndarray, " E"], edges: tuple[float, ...]
) -> tuple[float | None, float | None]:
    """Return the edges around all crossings that cannot be ruled out."""
    possible = np.flatnonzero(distance + NORMAL_95 * sd >= 0)
    first = int(possible[0]) if len(possible) else len(edges)
    below = np.flatnonzero(distance - NORMAL_95 * sd < 0)
    last = int(below[-1]) if len(below) else -1
    return (edges[first - 1] if first > 0 else None), (edges[last + 1] if last + 1 < len(edges) else None)


def _interpolated(
    shares: Float64[np.ndarray, " E"], edges: tuple[float, ...], level: float
) -> tuple[float, Literal["below", "above"] | None]:
    """Return where the isotonic distribution function reaches a level, linear within bins; outside, which bound."""
    place = int(np.searchsorted(shares, level, side="left"))
    if place == 0:
        return edges[0], "below" if shares[0] > level else None
    if place == len(edges):
        return edges[-1], "above"
    before, after = float(shares[place - 1]), float(shares[place])
    within = 0.5 if math.isclose(before, after) else (level - before) / (after - before)
    return edges[place - 1] + within * (edges[place] - edges[place - 1]), None
