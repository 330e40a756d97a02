"""Closed-form bounds of DP-Fed-LS: how much Gaussian noise T rounds of sampled clients need, on paper.

Liang, Wang, Gu, Osher and Yao, "Exploring private federated learning with Laplacian smoothing": Lemmas 2 and 3
bound the Renyi divergence of one round, Theorems 1 and 2 turn T of them into a noise level. With
x = (noise std / sensitivity)^2:

=========  =============  =============================  ============  ===================================
sampling   adjacency      sensitivity of the sum         x at least    one round at order alpha
=========  =============  =============================  ============  ===================================
uniform    replace-one    2 L (a client is exchanged)    2/3           3.5 tau^2 alpha / x    (Lemma 2)
poisson    add or remove  L                              5/9           2 tau^2 alpha / x      (Lemma 3)
=========  =============  =============================  ============  ===================================

both only for alpha - 1 <= (2/3) x ln(1 / (alpha tau (1 + x))). Outside its domain a bound is refused (or infinite),
never extrapolated. These bounds are loose: the accountants of :mod:`fedveil.privacy.accounting` need far less noise
for the same epsilon, and are what a statement reports. docs/theory/closed-forms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.errors import BudgetError, PrivacyError

Sampling: TypeAlias = Literal["uniform", "poisson"]

_POINTS, _REFINEMENTS = 4_000, 3


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """What differs between the two samplings."""

    sensitivity: float
    factor: float
    least: float
    theorem: str


_CONSTANTS: Final[dict[Sampling, _Constants]] = {
    "uniform": _Constants(sensitivity=2.0, factor=3.5, least=2 / 3, theorem="Theorem 1"),
    "poisson": _Constants(sensitivity=1.0, factor=2.0, least=5 / 9, theorem="Theorem 2"),
}


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Noise that a theorem shows to be enough.

    Attributes:
        noise_std: nu, the standard deviation of the noise on the sum, same unit as the bound L.
        split: lambda in (0, 1), the share of epsilon that pays for the Renyi divergence.
        order: alpha, the Renyi order of the proof.
    """

    noise_std: float
    split: float
    order: float


def round_rdp(sampling: Sampling, *, rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Renyi divergence of one round at one order, by Lemma 2 (uniform) or Lemma 3 (poisson).

    Args:
        sampling: which lemma.
        rate: tau in (0, 1].
        noise_multiplier: noise std / sensitivity of the sum under the sampling's adjacency (2 L or L).
        order: alpha > 1.

    Raises:
        PrivacyError: an argument outside its range, or a point outside the lemma's domain.
    """
    constants = _CONSTANTS[sampling]
    _check_rate(rate)
    if not order > 1:
        raise PrivacyError(f"order = {order}: a Renyi order must be above 1")
    square = noise_multiplier**2
    if not (square >= constants.least and _order_allowed(np.array([order]), square, rate)[0]):
        raise PrivacyError(
            f"{sampling} sampling with rate {rate:g}, noise multiplier {noise_multiplier:g}, order {order:g} is "
            f"outside the lemma's domain (noise multiplier^2 >= {constants.least:.4g} and order - 1 <= 2/3 x ln(1 / "
            "(order rate (1 + x))), x the square); use the accountants, or more noise, a lower order, a lower rate"
        )
    return constants.factor * rate**2 * order / square


def theorem_noise(
    sampling: Sampling, *, rate: float, clip: float, rounds: int, epsilon: float, delta: float
) -> ClosedForm:
    """Return the least noise that Theorem 1 (uniform) or 2 (poisson) admits, over a grid of lambda.

    nu = (tau L / epsilon) sqrt((c T / lambda) (ln(1/delta) / (1 - lambda) + epsilon)), c = 14 or 2, at
    alpha = ln(1/delta) / ((1 - lambda) epsilon) + 1, where both side conditions hold.

    Args:
        sampling: which theorem.
        rate: tau in (0, 1], the share of clients in a round.
        clip: L, bound of a client's update.
        rounds: T.
        epsilon, delta: the target.

    Raises:
        PrivacyError: an argument outside its range.
        BudgetError: no lambda admits any noise; says what would have to change.

    >>> round(theorem_noise("uniform", rate=0.05, clip=0.3, rounds=30, epsilon=6.0, delta=1000**-1.1).noise_std, 3)
    0.808
    """
    constants = _CONSTANTS[sampling]
    _check(rate, clip, rounds, delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon = {epsilon}: a target must be positive and finite")
    cost = _cost(constants, rate, rounds)

    def squares(split: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        share = math.log(1 / delta) / (1 - split)
        square = np.maximum(cost / split * (share + epsilon) / epsilon**2, constants.least)
        admissible = _order_allowed(share / epsilon + 1, square, rate)
        return np.asarray(np.where(admissible, square, math.inf))

    split, square = _least(squares)
    if square == math.inf:
        raise BudgetError(
            f"{constants.theorem} of DP-Fed-LS reaches epsilon {epsilon:g} for no lambda (delta {delta:g}, "
            f"rate {rate:g}, {rounds} rounds): its side conditions on noise and Renyi order hold nowhere; sample "
            "fewer clients, or calibrate by an accountant (noise_multiplier = 'calibrated')"
        )
    return ClosedForm(
        noise_std=constants.sensitivity * clip * math.sqrt(square),
        split=split,
        order=math.log(1 / delta) / ((1 - split) * epsilon) + 1,
    )


def theorem_epsilon(
    sampling: Sampling, *, rate: float, clip: float, rounds: int, noise_std: float, delta: float
) -> float:
    """Return the least epsilon that the theorem shows for this noise; infinity where it shows none.

    For every lambda the theorem's equation is quadratic in epsilon; the side conditions are checked at its root.
    """
    constants = _CONSTANTS[sampling]
    _check(rate, clip, rounds, delta)
    square = (noise_std / (constants.sensitivity * clip)) ** 2
    if square < constants.least:
        return math.inf

    def epsilons(split: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        cost = _cost(constants, rate, rounds) / square / split
        share = math.log(1 / delta) / (1 - split)
        found = (cost + np.sqrt(cost**2 + 4 * cost * share)) / 2
        return np.asarray(np.where(_order_allowed(share / found + 1, square, rate), found, math.inf))

    return _least(epsilons)[1]


def _least(values: Callable[[Float64[np.ndarray, " n"]], Float64[np.ndarray, " n"]]) -> tuple[float, float]:
    """Return (lambda, value) where the values are least, on a grid of (0, 1) that is refined around its best point."""
    low, high = 0.0, 1.0
    split, least = math.nan, math.inf
    for _ in range(_REFINEMENTS):
        grid = np.linspace(low, high, _POINTS + 2)[1:-1]
        found = values(grid)
        best = int(np.argmin(found))
        if found[best] < least:
            split, least = float(grid[best]), float(found[best])
        step = (high - low) / (_POINTS + 1)
        low, high = max(0.0, grid[best] - step), min(1.0, grid[best] + step)
    return split, least


def _cost(constants: _Constants, rate: float, rounds: int) -> float:
    """Return factor T tau^2: the Renyi divergence of all rounds is this times alpha / x."""
    return constants.factor * rounds * rate**2


def _order_allowed(
    orders: Float64[np.ndarray, " n"], square: Float64[np.ndarray, " n"] | float, rate: float
) -> Bool[np.ndarray, " n"]:
    """Return where alpha - 1 <= (2/3) x ln(1 / (alpha tau (1 + x)))."""
    allowed: Bool[np.ndarray, " n"] = orders - 1 <= -2 / 3 * square * np.log(orders * rate * (1 + square))
    return allowed


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise PrivacyError(f"sampling rate = {rate}: must be above 0 and at most 1")


def _check(rate: float, clip: float, rounds: int, delta: float) -> None:
    _check_rate(rate)
    if not (math.isfinite(clip) and clip > 0):
        raise PrivacyError(f"clip = {clip}: must be positive and finite")
    if rounds < 1:
        raise PrivacyError(f"rounds = {rounds}: at least one is needed")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta}: must be above 0 and below 1")


def remark_1_noise(*, rounds: int, epsilon: float, delta: float) -> float:
    """Return sigma over the sensitivity by Remark 1 of ParaAegis for q = 1: sqrt(2 T ln(1/delta)) / epsilon.

    The formula is its own inverse: of a noise multiplier in the place of epsilon it returns the epsilon. Infinite at 0.

    >>> round(remark_1_noise(rounds=50, epsilon=1.0, delta=1e-5), 3)
    33.931
    """
    if not epsilon >= 0:
        raise PrivacyError(f"epsilon = {epsilon}: a target must not be negative")
    return math.inf if epsilon == 0 else math.sqrt(2 * rounds * math.log(1 / delta)) / epsilon
