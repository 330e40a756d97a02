"""Figure S9 of DP-Fed-LS: how noise falls with epsilon by its theorems and by the accountants, as regression lines.

The paper does not print the range of epsilon. Here it begins where the theorem first admits any noise and ends at three
times that; points are even in log epsilon, and a line is fitted to log noise by least squares, as the caption says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from fedveil.errors import BudgetError
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import GaussianEvent, PoissonSampledEvent, SelfComposedEvent
from fedveil.privacy.published_bounds import Sampling, theorem_noise
from fedveil.privacy.sampling import published_epsilon
from reproduction.results import Values

_RATE: Final = 0.05
_POINTS, _REACH = 15, 3.0
_CLOSE: Final = 1.0005
_SETTINGS: Final = ((30, 500), (200, 2000), (1000, 2000))
_PANELS: Final[tuple[tuple[Sampling, str], ...]] = (("uniform", "abc"), ("poisson", "def"))
Falling = Callable[[float], float]


def figure_s9_lines(seed: int) -> Iterator[tuple[str, Values]]:
    """All six panels: slope and intercept of log noise over log epsilon; noise in units of the clip."""
    for sampling, letters in _PANELS:
        for letter, (rounds, clients) in zip(letters, _SETTINGS, strict=True):
            yield from _panel(f"{letter}, {sampling}, T={rounds}, N={clients}", sampling, rounds, clients)


def _panel(name: str, sampling: Sampling, rounds: int, clients: int) -> Iterator[tuple[str, Values]]:
    delta = clients**-1.1

    def theorem(epsilon: float) -> float:
        try:
            found = theorem_noise(sampling, rate=_RATE, clip=1.0, rounds=rounds, epsilon=epsilon, delta=delta)
        except BudgetError:
            return math.inf
        return found.noise_std

    def spent(noise: float) -> float:
        """Return epsilon by the paper's accountant, which takes the clip for the sensitivity."""
        if sampling == "uniform":
            return published_epsilon(_RATE, noise, rounds, delta)
        release = PoissonSampledEvent(rate=_RATE, event=GaussianEvent(noise_multiplier=noise))
        return make_accountant("rdp-2017").epsilon(SelfComposedEvent(event=release, count=rounds), delta)

    least = least_argument(theorem, math.inf, 0.5, 500.0)
    epsilons = np.geomspace(least, _REACH * least, _POINTS)
    needed = [least_argument(spent, float(epsilon), 0.2, 200.0) for epsilon in epsilons]
    for curve, noises in (
        ("theorem", [theorem(float(epsilon)) for epsilon in epsilons]),
        ("accountant", needed),
    ):
        slope, intercept = np.polyfit(np.log(epsilons), np.log(noises), 1)
        yield (
            f"{name}: {curve}",
            {"slope": float(slope), "intercept": float(intercept), "least epsilon": least},
        )


def least_argument(falling: Falling, limit: float, low: float, high: float) -> float:
    """Return, within one in 2,000, where a falling function first is at most a limit; below it if that is infinite."""
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        value = falling(middle)
        low, high = (low, middle) if value <= limit and value < math.inf else (middle, high)
    return high
