"""The papers' convergence bounds beside measured runs on problems whose constants are known.

The problems are separable: f_j(w) = sum over i of phi(w_i - c_ji), with three choices of phi,

=============  =================  ========================  ==================================
phi(x)         smoothness beta    |phi'| at most            f is
=============  =================  ========================  ==================================
x^2 / 2        1                  |x|                       1-strongly convex
ln cosh x      1                  1                         convex
x^2 / (1+x^2)  2                  3 sqrt(3) / 8             not convex
=============  =================  ========================  ==================================

with centres c_j that lie in pairs m + d, m - d around m, so that w = m minimises the mean of the convex ones. phi' is
beta-Lipschitz, so the mean of ||grad f_j - grad f||^2 is at most beta^2 times that of ||c_j - m||^2, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from reproduction.results import Values

Vector = Float64[np.ndarray, "..."]
_SPREAD: Final = 0.3
_ROUNDS: Final = (30, 500, 3000)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """phi, its derivative, and its constants."""

    value: Callable[[Vector], Vector]
    slope: Callable[[Vector], Vector]
    smoothness: float
    steepest: float


QUADRATIC: Final = Shape(value=lambda x: x**2 / 2, slope=lambda x: x, smoothness=1.0, steepest=math.inf)
LOG_COSH: Final = Shape(
    value=lambda x: np.logaddexp(x, -x) - math.log(2), slope=np.tanh, smoothness=1.0, steepest=1.0
)
BOUNDED: Final = Shape(
    value=lambda x: x**2 / (1 + x**2),
    slope=lambda x: 2 * x / (1 + x**2) ** 2,
    smoothness=2.0,
    steepest=3 * math.sqrt(3) / 8,
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """N functions around a common minimum at distance ``start`` from w = 0 in every coordinate."""

    shape: Shape
    centres: Float64[np.ndarray, "n d"]
    minimum: Float64[np.ndarray, " d"]

    @classmethod
    def draw(cls, shape: Shape, n: int, size: int, drawn: np.random.Generator, *, start: float) -> Problem:
        """Draw the centres."""
        minimum = start * np.sin(np.arange(size) * 2 * np.pi / size)
        offsets = _SPREAD * drawn.standard_normal((n // 2, size))
        return cls(shape=shape, centres=minimum + np.concatenate((offsets, -offsets)), minimum=minimum)

    def value(self, w: Vector) -> float:
        """Return f(w), the mean of all f_j."""
        return float(self.shape.value(w - self.centres).sum(1).mean())

    def gradient(self, w: Vector) -> Vector:
        """Return the gradient of f."""
        return np.asarray(self.shape.slope(w - self.centres).mean(0))

    @property
    def spread(self) -> float:
        """An upper bound of the mean of ||grad f_j - grad f||^2, at every w."""
        distance = ((self.centres - self.minimum) ** 2).sum(1).mean()
        return float(self.shape.smoothness**2 * distance)


# --- DP-Fed-LS, Theorems 4 to 6 -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ls:
    """What the theorems of DP-Fed-LS speak of: N clients, S a round, K local steps, T rounds, noise nu_1, sigma."""

    clients: int = 100
    cohort: int = 20
    steps: int = 5
    size: int = 100
    noise: float = 0.5
    jitter: float = 0.1
    smoothing: float = 0.0
    rounds: int = 100

    @property
    def eigenvalues(self) -> Vector:
        """Lambda_i, of the inverse of A_sigma, in the order of the Fourier transform."""
        return 1 / (1 + 2 * self.smoothing * (1 - np.cos(2 * np.pi * np.arange(self.size) / self.size)))

    def inverse(self, vector: Vector, power: float = 1.0) -> Vector:
        """Return A_sigma^(-power) v."""
        return np.asarray(np.fft.ifft(np.fft.fft(vector) * self.eigenvalues**power).real)

    def norm(self, vector: Vector, power: float = 1.0) -> float:
        """Return <v, A_sigma^(-power) v>."""
        return float(vector @ self.inverse(vector, power))


def ls_strongly_convex(seed: int) -> Iterator[tuple[str, Values]]:
    """Theorem 4: the error of the weighted mean of the models."""
    yield from _ls(seed, QUADRATIC, theorem_4)


def ls_convex(seed: int) -> Iterator[tuple[str, Values]]:
    """Theorem 5: the error of the mean of the models."""
    yield from _ls(seed, LOG_COSH, theorem_5)


def ls_not_convex(seed: int) -> Iterator[tuple[str, Values]]:
    """Theorem 6: the mean squared gradient in the norm of A_sigma^-1."""
    yield from _ls(seed, BOUNDED, theorem_6)


def _ls(
    seed: int, shape: Shape, theorem: Callable[[Problem, Ls, float], tuple[float, float]]
) -> Iterator[tuple[str, Values]]:
    for smoothing in (0.0, 1.0, 3.0):
        for rounds in _ROUNDS:
            ls = Ls(smoothing=smoothing, rounds=rounds)
            drawn = np.random.default_rng((seed, int(smoothing), rounds))
            problem = Problem.draw(shape, ls.clients, ls.size, drawn, start=2.0)
            lipschitz = lipschitz_constant(problem, ls)
            bound, step = theorem(problem, ls, lipschitz)
            if shape is QUADRATIC and rounds * float(ls.eigenvalues.min()) * step * ls.steps < 1:
                continue  # Theorem 4 asks for T >= 1 / (mu_sigma eta K)
            measured, clipped = _play_ls(problem, ls, lipschitz, step, drawn)
            nothing = (
                problem.value(np.zeros(ls.size)) - problem.value(problem.minimum)
                if shape is not BOUNDED
                else ls.norm(problem.gradient(np.zeros(ls.size)))
            )
            yield (
                f"sigma {smoothing:g}, T = {rounds}",
                {"measured": measured, "bound": bound, "at the start": nothing, "clipped": clipped},
            )


def lipschitz_constant(problem: Problem, ls: Ls) -> float:
    """Return L: no stochastic gradient is longer; for the quadratic within the ball that the start spans."""
    steepest = problem.shape.steepest
    jitter = ls.jitter * math.sqrt(ls.size)
    if math.isfinite(steepest):
        return steepest * math.sqrt(ls.size) + jitter
    return float(1.5 * np.linalg.norm(problem.centres, axis=1).max()) + jitter


def _variance(problem: Problem, ls: Ls, lipschitz: float, dimension: float) -> tuple[float, float, float]:
    """Return H_sigma, varsigma^2(sigma) and G^2; eta_g is sqrt(S)."""
    gradient = problem.spread
    stochastic = ls.jitter**2 * float(ls.eigenvalues.sum())
    share = 1 - ls.cohort / ls.clients
    h = (
        2 / (ls.cohort * ls.steps) * stochastic
        + 4 / ls.cohort * share * gradient
        + (lipschitz * ls.noise / ls.cohort) ** 2 * dimension
    )
    return h, stochastic, gradient


def theorem_4(problem: Problem, ls: Ls, lipschitz: float) -> tuple[float, float]:
    least = float(ls.eigenvalues.min())
    dimension = float(ls.eigenvalues.sum())
    h, _, _ = _variance(problem, ls, lipschitz, dimension)
    distance = ls.norm(problem.minimum, -1)
    step = min(
        2 * math.log(max(math.e, least**2 * ls.rounds * distance / h)) / (least * ls.steps * ls.rounds),
        least / (16 * ls.steps),
    )
    start = 3 * least * math.exp(-least * step * ls.steps * ls.rounds / 2) * distance
    return start + _common_terms(problem, ls, lipschitz, step), step


def theorem_5(problem: Problem, ls: Ls, lipschitz: float) -> tuple[float, float]:
    h, _, gradient = _variance(problem, ls, lipschitz, float(ls.eigenvalues.sum()))
    distance = ls.norm(problem.minimum, -1)
    step = min(
        math.sqrt(distance / (h * ls.rounds * ls.steps**2)),
        (distance / (24 * gradient * ls.rounds * ls.steps**3)) ** (1 / 3),
        float(ls.eigenvalues.min()) / (16 * ls.steps),
    )
    start = 2 * distance / (step * ls.rounds * ls.steps)
    return start + _common_terms(problem, ls, lipschitz, step), step


def _common_terms(problem: Problem, ls: Ls, lipschitz: float, step: float) -> float:
    """Return E_var + E_dp + E_hete of Theorems 4 and 5; beta = 1, B = 1 and eta_g = sqrt(S)."""
    dimension = float(ls.eigenvalues.sum())
    _, stochastic, gradient = _variance(problem, ls, lipschitz, dimension)
    share = 1 - ls.cohort / ls.clients
    return (
        4 * step * stochastic / ls.cohort
        + 2 * step * dimension * ls.steps * (lipschitz * ls.noise / ls.cohort) ** 2
        + 24 * (step * ls.steps) ** 2 * gradient
        + 8 * step * share * ls.steps / ls.cohort * gradient
    )


def theorem_6(problem: Problem, ls: Ls, lipschitz: float) -> tuple[float, float]:
    beta, dimension = problem.shape.smoothness, float((ls.eigenvalues**2).sum())
    h, stochastic, gradient = _variance(problem, ls, lipschitz, dimension)
    gap = problem.value(np.zeros(ls.size))  # f is nowhere negative
    step = min(
        math.sqrt(gap / (h * ls.rounds * beta * ls.steps**2)),
        (gap / (32 * beta**2 * gradient * ls.rounds * ls.steps**3)) ** (1 / 3),
        float(ls.eigenvalues.min()) / (16 * ls.steps * beta),
    )
    share = 1 - ls.cohort / ls.clients
    bound = (
        8 * gap / (step * ls.rounds * ls.steps)
        + 8 * step * beta * stochastic / ls.cohort
        + 4 * step * dimension * ls.steps * beta * (lipschitz * ls.noise / ls.cohort) ** 2
        + 32 * (beta * step * ls.steps) ** 2 * gradient
        + 16 * step * share * beta * ls.steps / ls.cohort * gradient
    )
    return bound, step


def _play_ls(
    problem: Problem, ls: Ls, lipschitz: float, step: float, drawn: np.random.Generator
) -> tuple[float, float]:
    """Play Algorithm 1; return what the theorem bounds and the share of local steps that were clipped."""
    server = math.sqrt(ls.cohort)
    local = step / server
    limit = local * ls.steps * lipschitz
    decay = 1 - float(ls.eigenvalues.min()) * step * ls.steps / 2
    w, mean, total, gradients, clipped = np.zeros(ls.size), np.zeros(ls.size), 0.0, 0.0, 0
    strongly = problem.shape is QUADRATIC
    for number in range(ls.rounds + 1):
        weight = decay ** (ls.rounds - number) if strongly else 1.0
        mean, total = mean + weight * w, total + weight
        if problem.shape is BOUNDED:
            gradients += ls.norm(problem.gradient(w))
        who = drawn.choice(ls.clients, ls.cohort, replace=False)
        moved = np.zeros((ls.cohort, ls.size))
        for _ in range(ls.steps):
            jitter = ls.jitter * drawn.choice((-1.0, 1.0), moved.shape)
            moved -= local * (problem.shape.slope(w + moved - problem.centres[who]) + jitter)
            length = np.linalg.norm(moved, axis=1, keepdims=True)
            clipped += int((length > limit * (1 + 1e-9)).sum())
            moved /= np.maximum(1, length / limit)
        noise = limit * ls.noise * drawn.standard_normal(ls.size)
        w = w + server / ls.cohort * ls.inverse(moved.sum(0) + noise)
    share = clipped / ((ls.rounds + 1) * ls.cohort * ls.steps)
    if problem.shape is BOUNDED:
        return gradients / (ls.rounds + 1), share
    return problem.value(mean / total) - problem.value(problem.minimum), share
