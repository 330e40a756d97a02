"""Figure 3 of CEPAM as its own Theorem 12 accounts for it: the least noise that meets a claim of one round."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scipy.optimize import brentq

from fedveil.privacy.published_bounds import gaussian_profile
from reproduction.results import Values

_CLIENTS, _STEPS, _RECORDS = 30, 15, 1666
_MOST = 1000.0


def figure_3(seed: int) -> Iterator[tuple[str, Values]]:
    """The least sigma at gamma 1 for the epsilons and deltas of the figure, and delta as sigma tends to 0."""
    for delta, epsilons in ((0.01, (1, 2, 3, 4, 5, 6, 7, 8, 9)), (0.015, (1, 2, 3, 4, 5))):
        for epsilon in epsilons:
            without = _delta(1e-6, epsilon)
            least = 0.0
            if without > delta:
                least = brentq(lambda std, e=epsilon, d=delta: _delta(std, e) - d, 1e-6, _MOST, xtol=1e-12)
            yield (
                f"delta {delta:g}, epsilon {epsilon}",
                {"least sigma": float(least), "delta without noise": without},
            )


def _delta(std: float, epsilon: float) -> float:
    """Return the published delta at the published epsilon of one round."""
    drawn = -math.expm1(_STEPS * math.log1p(-1 / _RECORDS))
    base = math.log1p(math.expm1(epsilon) / drawn)
    found = gaussian_profile(
        clients=_CLIENTS, steps=_STEPS, records=_RECORDS, std=std, gamma=1.0, base_epsilon=base
    )
    return found.delta
