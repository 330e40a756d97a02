"""DP-Fed-LS, Corollary 1 and the lower part of Table 1: the rounds to an accuracy, beside Theorems 4 to 6.

With S clients a round, K local steps, tau = S / N, noise nu_1 and smoothing sigma, Corollary 1 needs for an error e

==================  ================  ===============  =================  ==============  ==================
f is                curvature         gradients        noise              drift           sampling
==================  ================  ===============  =================  ==============  ==================
strongly convex     (1+4s) b B^2 / m  v / (m K S e)    d L^2 n / (m S^2)  sqrt(b) G / m   (1-t) G^2 / (m S)
times                                                  1 / e              1 / sqrt(e)     1 / e
convex              (1+4s) b B^2 D    v D / (K S)      d D L^2 n / S^2    sqrt(b) D G     (1-t) D G^2 / S
times               1 / e             1 / e^2          1 / e^2            1 / e^1.5       1 / e^2
not convex          (1+4s) b B^2 F    v b F / (K S)    d' F L^2 n b/S^2   b F G           (1-t) F b G^2 / S
times               1 / e             1 / e^2          1 / e^2            1 / e^1.5       1 / e^2
==================  ================  ===============  =================  ==============  ==================

rounds up to a constant (and logarithms, if strongly convex), with b = beta, m = mu_sigma, s = sigma, t = tau,
n = nu_1^2, v = varsigma^2(sigma), d = d_sigma, d' = the sum of squared eigenvalues, D = D_sigma, F = F_0.

Table 1 has the same terms without b, D and F. Three of its exponents are not those of the corollary: L for L^2 in the
noise (strongly convex), e^(2/3) for e^(3/2) in the drift and s^2 for s in the curvature (both not convex). The theorems
have the corollary's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from reproduction.computed.convergence import (
    BOUNDED,
    LOG_COSH,
    QUADRATIC,
    Ls,
    Problem,
    Shape,
    lipschitz_constant,
    theorem_4,
    theorem_5,
    theorem_6,
)
from reproduction.results import Values

Form = Literal["strongly convex", "convex", "not convex"]
Theorem = Callable[[Problem, Ls, float], tuple[float, float]]
"""Returns the bound after the rounds of ``ls``, and the step size, from the problem and its Lipschitz constant."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of f: beta, B, G^2, L, varsigma^2(sigma), and D_sigma (convex) or F_0 (not convex)."""

    smoothness: float = 1.0
    dissimilarity: float = 1.0
    spread: float
    lipschitz: float
    variance: float
    distance: float = 1.0


def corollary_1(form: Form, ls: Ls, constants: Constants, error: float) -> dict[str, float]:
    """Return the five terms of Corollary 1, in rounds up to a constant; mu is 1, so mu_sigma is the least eigenvalue.

    Args:
        form: what f is.
        ls: clients, cohort, steps, smoothing and noise nu_1.
        constants: of f.
        error: the error to reach, of f(w) (convex) or of the squared gradient in the norm of A_sigma^-1.
    """
    beta, share = constants.smoothness, 1 - ls.cohort / ls.clients
    squared = form == "not convex"
    effective = float((ls.eigenvalues ** (2 if squared else 1)).sum())
    terms = {
        "curvature": (1 + 4 * ls.smoothing) * beta * constants.dissimilarity**2 / error,
        "gradients": constants.variance / (ls.steps * ls.cohort * error**2),
        "noise": effective * (constants.lipschitz * ls.noise / ls.cohort) ** 2 / error**2,
        "drift": math.sqrt(beta * constants.spread) / error**1.5,
        "sampling": share * constants.spread / (ls.cohort * error**2),
    }
    if form == "strongly convex":
        return {name: term * error / float(ls.eigenvalues.min()) for name, term in terms.items()}
    if squared:
        for name, power in {"gradients": 1.0, "noise": 1.0, "drift": 0.5, "sampling": 1.0}.items():
            terms[name] *= beta**power
    return {name: term * constants.distance for name, term in terms.items()}


def theorem_3_rounds(*, epsilon: float, delta: float, clients: int, cohort: int, lipschitz: float) -> float:
    """Return T = epsilon^2 N^2 / (C_0 L^2 S ln(1/delta)) of Theorem 3 at lambda = 1/2, where C_0 = 84.

    It is equation 6 at nu_1 = sqrt(S) / L, where ln(1/delta) >= epsilon.
    """
    split = 0.5
    constant = 14 / split * (1 + 1 / (1 - split))
    return (epsilon * clients / lipschitz) ** 2 / (constant * cohort * math.log(1 / delta))


_FORMS: Final[dict[Form, tuple[Shape, Theorem]]] = {
    "strongly convex": (QUADRATIC, theorem_4),
    "convex": (LOG_COSH, theorem_5),
    "not convex": (BOUNDED, theorem_6),
}


def ls_corollary_1(_seed: int) -> Iterator[tuple[str, Values]]:
    """Yield the rounds to an error by the corollary without its constant, and by the theorem behind it."""
    for form, (shape, theorem) in _FORMS.items():
        for smoothing in (0.0, 1.0, 3.0):
            ls = Ls(smoothing=smoothing)
            problem = Problem.draw(shape, ls.clients, ls.size, np.random.default_rng(0), start=2.0)
            lipschitz = lipschitz_constant(problem, ls)
            constants = Constants(
                smoothness=shape.smoothness,
                spread=problem.spread,
                lipschitz=lipschitz,
                variance=ls.jitter**2 * float(ls.eigenvalues.sum()),
                distance=problem.value(np.zeros(ls.size))
                if form == "not convex"
                else ls.norm(problem.minimum, -1),
            )
            for error in (1.0, 0.1, 0.01):
                terms = corollary_1(form, ls, constants, error)
                needed = least_rounds(theorem, problem, ls, lipschitz, error)
                yield (
                    f"{form}, sigma {smoothing:g}, error {error:g}",
                    {
                        "ratio": needed / sum(terms.values()),
                        "rounds by the theorem": float(needed),
                        "noise": terms["noise"] / sum(terms.values()),
                    },
                )


def least_rounds(theorem: Theorem, problem: Problem, ls: Ls, lipschitz: float, error: float) -> int:
    """Return the least T from which on the theorem's bound is at most ``error``, to one part in a thousand."""

    def suffices(rounds: int) -> bool:
        return theorem(problem, replace(ls, rounds=rounds), lipschitz)[0] <= error

    high = 1
    while not suffices(high):
        high *= 2
    low = high // 2
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
