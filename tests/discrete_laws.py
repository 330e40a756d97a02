"""Noise on a grid as it is defined: probabilities in proportion to the continuous density, which no sampler reads."""

import math
from typing import Any

import numpy as np
from scipy import stats

from fedveil.privacy.noise import DiscreteGaussian, DiscreteLaplace

Law = DiscreteGaussian | DiscreteLaplace


def continuous(law: Law) -> Any:
    """The continuous law that has the same parameter."""
    return stats.norm(scale=law.std) if isinstance(law, DiscreteGaussian) else stats.laplace(scale=law.scale)


def table(law: Law) -> np.ndarray:
    """All whole numbers of grid units that have a probability which float64 can tell from 0."""
    reach = math.ceil((40 if isinstance(law, DiscreteGaussian) else 740) * continuous(law).std() / law.grid)
    return np.arange(-reach, reach + 1)


def pmf(law: Law, units: np.ndarray) -> np.ndarray:
    """P(k), where few enough whole numbers have one."""
    density = continuous(law).pdf
    return density(units * law.grid) / density(table(law) * law.grid).sum()


def variance(law: Law) -> float:
    """Of a value: summed for a coarse law, the continuous one's where the grid is a millionth of it."""
    if law.grid < 1e-3:
        return float(continuous(law).var())
    units = table(law)
    return float((pmf(law, units) * (units * law.grid) ** 2).sum())
