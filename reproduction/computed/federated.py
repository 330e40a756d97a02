"""Convergence bounds of ULDP-FL, ParaAegis and CEPAM beside measured runs, on the problems of ``convergence``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from reproduction.computed.convergence import LOG_COSH, QUADRATIC, Problem
from reproduction.results import Values


@dataclass(frozen=True, kw_only=True)
class Uldp:
    """What Theorem 6 of ULDP-FL speaks of; pairs are (silo, user), weights 1 / |S|, full-batch local steps."""

    silos: int = 5
    users: int = 20
    steps: int = 5
    size: int = 20
    rounds: int = 200
    clip: float
    noise: float
    alike: bool

    @property
    def local(self) -> float:
        """eta_l, a fifth below 1 / (sqrt(30) Q L), L = 1."""
        return 0.8 / (math.sqrt(30) * self.steps)

    @property
    def server(self) -> float:
        """eta_g, the largest with eta_g eta_l <= 1 / (3 Q L alpha), alpha <= 1 / |S|."""
        return self.silos / (3 * self.steps * self.local)

    @property
    def constant(self) -> float:
        """c, just below 1/2 - 15 Q^2 L^2 eta_l^2."""
        return 0.999 * (0.5 - 15 * (self.steps * self.local) ** 2)


def uldp_theorem_6(seed: int) -> Iterator[tuple[str, Values]]:
    """The mean squared gradient of ULDP-AVG beside the bound as printed, and with its first term as its proof has it.

    Line (17) of the proof divides f(x_0) by the mean weight, which is at least C_low / |S|; that puts |S| into the
    numerator of the first term, where (18) and the theorem print it in the denominator.
    """
    cases = {
        "all pairs alike, nothing clipped, no noise": Uldp(clip=math.inf, noise=0.0, alike=True),
        "nothing clipped, no noise": Uldp(clip=math.inf, noise=0.0, alike=False),
        "clipped, no noise": Uldp(clip=0.3, noise=0.0, alike=False),
        "clipped, sigma 5": Uldp(clip=0.3, noise=5.0, alike=False),
    }
    for name, case in cases.items():
        drawn = np.random.default_rng(seed)
        problem = Problem.draw(LOG_COSH, case.silos * case.users, case.size, drawn, start=2.0)
        if case.alike:
            problem = Problem(
                shape=LOG_COSH,
                centres=np.broadcast_to(problem.minimum, problem.centres.shape),
                minimum=problem.minimum,
            )
        found = _play_uldp(problem, case, drawn)
        for printed in (True, False):
            yield (
                f"{name}; {'as printed' if printed else 'first term as in line (17)'}",
                {
                    "measured": found["measured"],
                    "bound": _uldp_bound(problem, case, found, printed=printed),
                    "at the start": found["at the start"],
                    "clipping terms": found["clipping terms"],
                },
            )


def _play_uldp(problem: Problem, case: Uldp, drawn: np.random.Generator) -> dict[str, float]:
    """Play ULDP-AVG; return the mean squared gradient and what the bound needs of the run."""
    pairs = case.silos * case.users
    limit = math.sqrt(case.size)  # G: no gradient is longer
    x, squares, first, second, lowest, highest = np.zeros(case.size), 0.0, 0.0, 0.0, 1.0, 0.0
    for _ in range(case.rounds):
        squares += float(problem.gradient(x) @ problem.gradient(x))
        moved = np.zeros((pairs, case.size))
        for _ in range(case.steps):
            moved -= case.local * problem.shape.slope(x + moved - problem.centres)
        length = np.linalg.norm(moved, axis=1)
        factor = np.minimum(1.0, case.clip / length) if math.isfinite(case.clip) else np.ones(pairs)
        lowest, highest = min(lowest, factor.min()), max(highest, factor.max())
        weights = factor / case.silos
        first += float(np.abs(weights - weights.mean()).sum())
        second += float(((weights - weights.mean()) ** 2).sum())
        noise = np.zeros(case.size)
        if case.noise:
            noise = case.noise * case.clip * drawn.standard_normal(case.size)
        x = x + case.server / pairs * ((weights[:, None] * moved).sum(0) + noise)
    start = problem.gradient(np.zeros(case.size))
    shared = limit**2 / (case.constant * lowest * case.users * case.rounds)
    return {
        "measured": squares / case.rounds,
        "at the start": float(start @ start),
        "lowest": lowest,
        "highest": highest,
        "clipping terms": shared * (first + 1.5 * case.server * case.local * case.steps * second),
    }


def _uldp_bound(problem: Problem, case: Uldp, found: dict[str, float], *, printed: bool) -> float:
    """Return the right side of (5); sigma_l = 0, L = 1, and f* = f(minimum) is the least value."""
    c, steps = case.constant, case.steps
    gap = (
        problem.value(np.zeros(case.size)) / found["lowest"]
        - problem.value(problem.minimum) / found["highest"]
    )
    silos = 1 / case.silos if printed else case.silos
    descent = silos * gap / (c * case.rounds * case.server * case.local * steps)
    uneven = 5 / (2 * c) * steps * case.local**2 * 6 * steps * problem_heterogeneity(problem)
    noise = 0.0
    if case.noise:
        noise = case.server * (case.noise * case.clip) ** 2 * case.size
        noise /= 2 * c * found["lowest"] * case.local * steps * case.silos * case.users**2
    return descent + uneven + noise + found["clipping terms"]


def problem_heterogeneity(problem: Problem) -> float:
    """Return sigma_g^2: no ||grad f_su - grad f||^2 is larger, at any x (tanh is 1-Lipschitz)."""
    gap = np.abs(problem.centres[:, None] - problem.centres[None]).mean(1)
    return float((gap**2).sum(1).max())


def paraaegis_theorem_1(seed: int) -> Iterator[tuple[str, Values]]:
    """Where the mean squared gradient settles, by the encrypted share r, beside (1 - r) of where it settles for r = 0.

    The theorem's constants are not given, so it cannot be evaluated; that its last two terms fall as 1 - r can. The
    largest r d coordinates of the clients' votes are sent whole, the rest is clipped and noised.
    """
    clients, size, rounds, step, clip, noise = 10, 200, 400, 0.2, 0.5, 0.05
    settled: dict[float, float] = {}
    for share in (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9):
        drawn = np.random.default_rng(seed)
        problem = Problem.draw(QUADRATIC, clients, size, drawn, start=2.0)
        w, found = np.zeros(size), []
        for number in range(rounds):
            gradient = problem.gradient(w)
            if number >= rounds // 2:
                found.append(float(gradient @ gradient))
            moved = -step * (w - problem.centres)
            chosen = _voted(moved, round(share * size))
            rest = np.where(chosen, 0.0, moved)
            length = np.linalg.norm(rest, axis=1, keepdims=True)
            rest = rest / np.maximum(1, length / clip)
            rest += np.where(chosen, 0.0, noise * drawn.standard_normal(rest.shape))
            w = w + (np.where(chosen, moved, 0.0) + rest).mean(0)
        settled[share] = float(np.mean(found))
        yield f"r = {share:g}", {"measured": settled[share], "bound": (1 - share) * settled[0.0]}


def _voted(moved: Float64[np.ndarray, "n d"], count: int) -> np.ndarray:
    """Return the coordinates with most votes, each client voting for its largest."""
    if count == 0:
        return np.zeros(moved.shape[1], dtype=bool)
    votes = np.zeros(moved.shape[1])
    for own in np.argsort(-np.abs(moved), axis=1)[:, :count]:
        votes[own] += 1
    chosen = np.zeros(moved.shape[1], dtype=bool)
    chosen[np.argsort(-votes, kind="stable")[:count]] = True
    return chosen


def cepam_theorem_16(seed: int) -> Iterator[tuple[str, Values]]:
    """The error of CEPAM beside Theorem 16, for quadratics (L = C = 1).

    theta_k, which bounds a gradient everywhere, cannot exist for a strongly convex function on the whole space; the
    longest gradient of the run stands for it, which is the most favourable reading.
    """
    clients, size, steps, scale = 10, 20, 5, 0.1
    offset = steps * 4.0
    for gamma in (0.3, 1.0, 3.0):
        for rounds in (10, 100, 1000):
            drawn = np.random.default_rng((seed, rounds, round(10 * gamma)))
            problem = Problem.draw(QUADRATIC, clients, size, drawn, start=2.0)
            w, longest = np.zeros(size), 0.0
            for number in range(rounds):
                local = np.broadcast_to(w, problem.centres.shape).copy()
                for inner in range(steps):
                    gradient = local - problem.centres + 0.1 * drawn.choice((-1.0, 1.0), local.shape)
                    longest = max(longest, float((gradient**2).sum(1).max()))
                    local -= steps / (number * steps + inner + offset) * gradient
                moved = local - w
                spread = scale / gamma * np.linalg.norm(moved, axis=1, keepdims=True)
                w = w + (moved + spread * drawn.standard_normal(moved.shape)).mean(0)
            uneven = problem.value(problem.minimum)
            total = (
                6 * uneven
                + (4 * size * gamma**-2 * steps**2 * scale**2 + 1) * longest / clients
                + 8 * (steps - 1) ** 2 * longest
            )
            distance = float(np.linalg.norm(problem.minimum))
            bound = max(total * steps**2 / (steps - 1), offset * distance) / (2 * (rounds * steps + offset))
            yield (
                f"gamma {gamma:g}, {rounds} rounds",
                {
                    "measured": problem.value(w) - uneven,
                    "bound": bound,
                    "at the start": problem.value(np.zeros(size)) - uneven,
                },
            )
