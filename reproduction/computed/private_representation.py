"""Poisson private representation of a Gaussian message: what the server's epsilon would be, and the bits.

The server sees K and the candidates Z_i ~ N(0, sigma^2 I); K = i with probability p_i proportional to
(T_i / r(Z_i))^-a, T_i arrivals of a Poisson process. With mu = ||x - x'|| / sigma and ln W_i = a mu N_i - a mu^2 / 2,
N_i normal, the loss (with T shown, which the server does not see) is L = ln sum_i p_i W_i - ln W_K, and

    D_q <= a^2 mu^2 max(q / 2, q - 1).

docs/theory/private-representation.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.privacy.accountant import gaussian_epsilon
from reproduction.results import Values

_ROUNDS, _DELTA, _A = 30, 1e-5, 1.25
_CASES: Final = {
    "30 clients": (30, 1.10),
    "30 clients, more noise": (30, 0.18),
    "1,000 clients": (1000, 1.05),
}
_LOCAL_DELTA, _DRAWS, _ARRIVALS, _BLOCK = 1e-3, 20_000, 300, 500


def server_epsilon(seed: int) -> Iterator[tuple[str, Values]]:
    """The server's epsilon after 30 rounds of one client's message of sensitivity mu, by protection; no chance."""
    for name, (clients, mu) in _CASES.items():
        yield (
            name,
            {
                "server, masks": gaussian_epsilon(math.sqrt(_ROUNDS / clients) * mu, _DELTA),
                "server, noise of the message": gaussian_epsilon(math.sqrt(_ROUNDS) * mu, _DELTA),
                "server, PPR by D_q": renyi_epsilon(_ROUNDS, _A * mu, _DELTA),
                "server, PPR by the paper": _ROUNDS * 2 * _A * gaussian_epsilon(mu, _DELTA / (2 * _ROUNDS)),
            },
        )


def renyi_epsilon(rounds: int, shift: float, delta: float) -> float:
    """Return the least epsilon of ``rounds`` releases with D_q <= shift^2 max(q / 2, q - 1)."""
    q = 1 + np.geomspace(1e-3, 1e3, 20_000)
    spent = rounds * shift**2 * np.maximum(q / 2, q - 1)
    return float((spent + np.log1p(-1 / q) - (math.log(delta) + np.log(q)) / (q - 1)).min())


def one_message(seed: int) -> Iterator[tuple[str, Values]]:
    """One message by simulation: epsilon at delta 1e-3 beside the noise alone, and the bits of K."""
    random = np.random.default_rng(seed)
    for a in (1.25, 1.5, 2.0):
        for mu in (0.3, 1.0):
            epsilon = _epsilon_of(losses(mu, a, random))
            same = _solve(partial(_excess_epsilon, epsilon), 20.0)
            index = np.log2(indices(mu, a, random)).mean()
            yield (
                f"a = {a:g}, mu = {mu:g}",
                {
                    "epsilon": epsilon,
                    "epsilon of the noise alone": gaussian_epsilon(mu, _LOCAL_DELTA),
                    "mu of a Gaussian of this epsilon, over mu": same / mu,
                    # Elias code of log2 K, with its own length.
                    "bits": float(index + math.log2(index + 1) + 2),
                },
            )


def losses(mu: float, a: float, random: np.random.Generator) -> Float64[np.ndarray, " draws"]:
    """Draw losses of the view (Z, T, K); arrivals beyond the 300th are replaced by their mean."""
    found = []
    for _ in range(_DRAWS // _BLOCK):
        arrivals = np.cumsum(random.exponential(size=(_BLOCK, _ARRIVALS)), axis=1)
        exponent = a * mu * random.normal(size=arrivals.shape)
        weight, ratio = arrivals**-a, np.exp(exponent - a * mu**2 / 2)
        beyond = arrivals[:, -1] ** (1 - a) / (a - 1)
        total = weight.sum(axis=1) + beyond
        moved = (weight * ratio).sum(axis=1) + beyond * math.exp((a * a - a) * mu**2 / 2)
        reached = np.cumsum(weight, axis=1) < (random.random(_BLOCK) * total)[:, None]
        chosen = reached.sum(axis=1)
        own = exponent[np.arange(_BLOCK), np.minimum(chosen, _ARRIVALS - 1)]
        own = np.where(chosen < _ARRIVALS, own, a * mu * random.normal(size=_BLOCK))
        found.append(np.log(moved / total) - own + a * mu**2 / 2)
    return np.concatenate(found)


def indices(mu: float, a: float, random: np.random.Generator) -> Float64[np.ndarray, " draws"]:
    """Draw K: the winner of an exponential race among 4,000 candidates, and a Pareto law beyond."""
    count, found = 4_000, []
    tail = math.log(count ** (1 - a) / (a - 1)) + a * (a - 1) * mu * mu / 2
    for _ in range(1_000):
        arrivals = np.cumsum(random.exponential(size=count))
        race = -a * np.log(arrivals) + a * (mu * random.normal(size=count) - mu * mu / 2)
        race += random.gumbel(size=count)
        late = tail + random.gumbel() > race.max()
        found.append(count * random.random() ** (-1 / (a - 1)) if late else 1.0 + race.argmax())
    return np.array(found)


def _excess_epsilon(epsilon: float, mu: float) -> float:
    return gaussian_epsilon(mu, _LOCAL_DELTA) - epsilon


def _epsilon_of(drawn: Float64[np.ndarray, " draws"]) -> float:
    def excess(epsilon: float) -> float:
        return _LOCAL_DELTA - float(np.maximum(0, -np.expm1(np.minimum(0, epsilon - drawn))).mean())

    return _solve(excess, 200.0)


def _solve(rising: Callable[[float], float], high: float) -> float:
    """Return the root of a rising function between 1e-6 and ``high``."""
    low = 1e-6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return high
