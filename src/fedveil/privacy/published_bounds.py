"""Evaluate published closed-form bounds of DP-Fed-LS, ParaAegis and CEPAM for reproduction.

DP-Fed-LS (Liang, Wang, Gu, Osher and Yao, "Exploring private federated learning with Laplacian smoothing") gives the
Gaussian noise that T rounds of sampled clients need. Lemmas 2 and 3 bound the Renyi divergence of one round, and
Theorems 1 and 2 turn T rounds into a noise level. With x = (noise std / sensitivity)^2:

=========  =============  =============================  ============  ===================================
sampling   adjacency      sensitivity of the sum         x at least    one round at order alpha
=========  =============  =============================  ============  ===================================
uniform    replace-one    2 L (a client is exchanged)    2/3           3.5 tau^2 alpha / x    (Lemma 2)
poisson    add or remove  L                              5/9           2 tau^2 alpha / x      (Lemma 3)
=========  =============  =============================  ============  ===================================

Both lemmas hold only for alpha - 1 <= (2/3) x ln(1 / (alpha tau (1 + x))). Outside its domain a bound is refused (or
infinite), never extrapolated. These bounds are loose: the accountants of :mod:`fedveil.privacy.accounting` need much
less noise for the same epsilon, and statements report the accountants' figures. docs/theory/closed-forms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64
from scipy.special import gammaln, log_ndtr, ndtr

from fedveil.errors import BudgetError, PrivacyError

Sampling: TypeAlias = Literal["uniform", "poisson"]

_POINTS, _REFINEMENTS = 4_000, 3


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """Constants of the lemma and theorem for one kind of sampling."""

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
    """Noise that a theorem proves to be sufficient.

    Attributes:
        noise_std: nu, the standard deviation of the noise on the sum, same unit as the bound L.
        split: lambda in (0, 1), the share of epsilon that is spent on the Renyi divergence.
        order: alpha, the Renyi order of the proof.
    """

    noise_std: float
    split: float
    order: float


def round_rdp(sampling: Sampling, *, rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Renyi divergence of one round at one order, by Lemma 2 (uniform) or Lemma 3 (poisson).

    Args:
        sampling: selects the lemma.
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
        sampling: selects the theorem.
        rate: tau in (0, 1], the share of clients in a round.
        clip: L, bound of a client's update.
        rounds: T.
        epsilon, delta: the target.

    Raises:
        PrivacyError: an argument outside its range.
        BudgetError: no lambda admits any noise; the message names changes that would help.

    >>> round(theorem_noise("uniform", rate=0.05, clip=0.3, rounds=30, epsilon=6.0, delta=1000**-1.1).noise_std, 3)
    0.808
    """
    constants = _CONSTANTS[sampling]
    _check(rate, clip, rounds, delta)
    _check_target(epsilon)
    cost = _cost(constants, rate, rounds)

    def squares(split: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        share = math.log(1 / delta) / (1 - split)
        # x = nu^2 / sensitivity^2 from the theorem's equation, raised to the least x of the lemma.
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
    """Return the least epsilon that the theorem proves for this noise; infinity if it proves none.

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
        # The positive root of epsilon^2 = cost (share + epsilon).
        root = (cost + np.sqrt(cost**2 + 4 * cost * share)) / 2
        return np.asarray(np.where(_order_allowed(share / root + 1, square, rate), root, math.inf))

    return _least(epsilons)[1]


def theorem_rounds(
    sampling: Sampling, *, rate: float, clip: float, noise_std: float, epsilon: float, delta: float
) -> int:
    """Return the most rounds that equation 6 allows at a given noise; 0 if it allows none.

    T <= lambda epsilon^2 nu_1^2 / (14 tau^2 (ln(1/delta) / (1 - lambda) + epsilon)), nu_1 = nu / L, at the best
    admissible lambda (Corollary 1, with Theorem 1). For Poisson sampling Theorem 2 has 2 in place of 14.

    Raises:
        PrivacyError: an argument outside its range.

    >>> theorem_rounds("uniform", rate=0.05, clip=0.3, noise_std=0.8081, epsilon=6.0, delta=1000**-1.1)
    30
    """
    constants = _CONSTANTS[sampling]
    _check(rate, clip, 1, delta)
    _check_target(epsilon)
    square = (noise_std / (constants.sensitivity * clip)) ** 2
    if square < constants.least:
        return 0

    def fewer(split: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        share = math.log(1 / delta) / (1 - split)
        most = square * split * epsilon**2 / (_cost(constants, rate, 1) * (share + epsilon))
        return np.asarray(np.where(_order_allowed(share / epsilon + 1, square, rate), -most, 0.0))

    return math.floor(-min(0.0, _least(fewer)[1]) * (1 - 1e-12))


def _least(values: Callable[[Float64[np.ndarray, " n"]], Float64[np.ndarray, " n"]]) -> tuple[float, float]:
    """Return (lambda, least value) on a grid of (0, 1) that is refined around its best point."""
    low, high = 0.0, 1.0
    split, least = math.nan, math.inf
    for _ in range(_REFINEMENTS):
        grid = np.linspace(low, high, _POINTS + 2)[1:-1]
        grid_values = values(grid)
        best = int(np.argmin(grid_values))
        if grid_values[best] < least:
            split, least = float(grid[best]), float(grid_values[best])
        step = (high - low) / (_POINTS + 1)
        low, high = max(0.0, grid[best] - step), min(1.0, grid[best] + step)
    return split, least


def _cost(constants: _Constants, rate: float, rounds: int) -> float:
    """Return factor T tau^2: the Renyi divergence of all rounds is this times alpha / x."""
    return constants.factor * rounds * rate**2


def _order_allowed(
    orders: Float64[np.ndarray, " n"], square: Float64[np.ndarray, " n"] | float, rate: float
) -> Bool[np.ndarray, " n"]:
    """Return a mask of the orders with alpha - 1 <= (2/3) x ln(1 / (alpha tau (1 + x)))."""
    allowed: Bool[np.ndarray, " n"] = orders - 1 <= -2 / 3 * square * np.log(orders * rate * (1 + square))
    return allowed


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise PrivacyError(f"sampling rate = {rate}: must be above 0 and at most 1")


def _check_target(epsilon: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon = {epsilon}: a target must be positive and finite")


def _check(rate: float, clip: float, rounds: int, delta: float) -> None:
    _check_rate(rate)
    if not (math.isfinite(clip) and clip > 0):
        raise PrivacyError(f"clip = {clip}: must be positive and finite")
    if rounds < 1:
        raise PrivacyError(f"rounds = {rounds}: at least one is needed")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta}: must be above 0 and below 1")


def remark_1_noise(*, rounds: int, epsilon: float, delta: float, rate: float = 1.0) -> float:
    """Return sigma / sensitivity by Remark 1 of ParaAegis: sqrt(2 q T ln(1/delta)) / epsilon.

    The formula is its own inverse: with a noise multiplier in the place of epsilon it returns the epsilon. It is
    infinite at 0.

    Args:
        rounds: T.
        epsilon, delta: the target.
        rate: q, the share of clients in a round.

    >>> round(remark_1_noise(rounds=50, epsilon=1.0, delta=1e-5), 3)
    33.931
    """
    if not epsilon >= 0:
        raise PrivacyError(f"epsilon = {epsilon}: a target must not be negative")
    _check_rate(rate)
    return math.inf if epsilon == 0 else math.sqrt(2 * rate * rounds * math.log(1 / delta)) / epsilon


# --- closed form cepam ---------------------------------------------------------------------------------------------
# One-round privacy profiles of CEPAM: Lemma 9, Theorems 12 and 13, as printed in the paper.
#
# K clients of n records each take tau local steps, each on one record sampled with replacement. The server is
# trusted; the unit is a record, replaced by another. A record is sampled at all with p = 1 - (1 - 1/n)^tau, and a
# profile (epsilon~, delta~) of the noise alone becomes epsilon = ln(1 + p (e^epsilon~ - 1)). These figures are for
# reproduction. Not claimed: any guarantee. The paper scales its noise by the norm of the private update and sends
# this norm in the clear; the figures also cover one round only. Statements use :mod:`fedveil.privacy.accounting`.
# docs/theory/closed-forms.md.


@dataclass(frozen=True, kw_only=True)
class OneRoundProfile:
    """Published (epsilon, delta) of one round, for one record of n.

    Attributes:
        epsilon: epsilon of one round.
        delta: delta of one round, at most 1.
        records: n, records of a client.
    """

    epsilon: float
    delta: float
    records: int

    @property
    def meaningless(self) -> bool:
        """Return whether delta >= 1/n: a mechanism that publishes one of the n records may satisfy the claim."""
        return self.delta >= 1 / self.records


def gaussian_profile(
    *, clients: int, steps: int, records: int, std: float, gamma: float, base_epsilon: float
) -> OneRoundProfile:
    """Return the profile of CEPAM-Gaussian by Theorem 12.

    The mean of K decoded updates has noise std ``std / (gamma sqrt(K))``, times a norm.

    Args:
        clients: K.
        steps: tau, local steps on one record each.
        records: n, records of each client.
        std: sigma of LRSUQ.
        gamma: the factor by which a normalised update is stretched.
        base_epsilon: epsilon~ > 0 of the noise without sub-sampling.

    Raises:
        PrivacyError: an argument outside its domain.
    """
    _check_values(
        {
            "clients": clients,
            "steps": steps,
            "records": records,
            "std": std,
            "gamma": gamma,
            "base_epsilon": base_epsilon,
        }
    )
    shift = 2 * steps * gamma / (math.sqrt(clients) * std)
    delta = sampled_gaussian_delta(shift=shift, steps=steps, records=records, base_epsilon=base_epsilon)
    return OneRoundProfile(
        epsilon=amplified_epsilon(base_epsilon, steps=steps, records=records), delta=delta, records=records
    )


def laplace_profile(
    *, steps: int, records: int, b: float, gamma: float, base_epsilon: float
) -> OneRoundProfile:
    """Return the profile of CEPAM-Laplace by Theorem 13: delta = 0 if epsilon~ >= 2 tau gamma / b.

    The arguments are those of :func:`gaussian_profile`.

    Raises:
        PrivacyError: an argument outside its domain, or a base_epsilon that the theorem does not cover.
    """
    _check_values({"steps": steps, "records": records, "b": b, "gamma": gamma, "base_epsilon": base_epsilon})
    least = 2 * steps * gamma / b
    if base_epsilon < least:
        raise PrivacyError(
            f"base_epsilon = {base_epsilon:g}: Theorem 13 of CEPAM needs at least 2 tau gamma / b = {least:g}"
        )
    return OneRoundProfile(
        epsilon=amplified_epsilon(base_epsilon, steps=steps, records=records), delta=0.0, records=records
    )


def amplified_epsilon(base_epsilon: float, *, steps: int, records: int) -> float:
    """Return ln(1 + p (e^epsilon~ - 1)) with p = 1 - (1 - 1/n)^tau, for n >= 2."""
    _check_values({"steps": steps, "records": records, "base_epsilon": base_epsilon})
    missed = steps * math.log1p(-1 / records)
    return float(np.logaddexp(missed, math.log(-math.expm1(missed)) + base_epsilon))


def sampled_gaussian_delta(*, shift: float, steps: int, records: int, base_epsilon: float) -> float:
    """Return delta by Lemma 9: a Gaussian mechanism on tau of n records, sampled with replacement.

    delta = sum_j C(tau, j) n^-j (1 - 1/n)^(tau - j) (e^epsilon~ - 1) / (e^(epsilon~/j) - 1) delta_1(epsilon~/j),
    where delta_1 is the exact profile of one Gaussian release (Balle and Wang) and the fraction is group privacy for
    j copies of the record. As in the paper's figures, single terms of the sum over j are not capped.

    Args:
        shift: l2 sensitivity to one of the tau inputs over the noise's standard deviation.
        steps: tau.
        records: n, at least 2.
        base_epsilon: epsilon~ > 0.

    Returns:
        delta, at most 1.
    """
    _check_values({"shift": shift, "steps": steps, "records": records, "base_epsilon": base_epsilon})
    copies = np.arange(1, steps + 1)
    each = base_epsilon / copies
    chosen = gammaln(steps + 1) - gammaln(copies + 1) - gammaln(steps - copies + 1)
    drawn = chosen - copies * math.log(records) + (steps - copies) * math.log1p(-1 / records)
    # ln of (e^epsilon~ - 1) / (e^(epsilon~/j) - 1), written so that no exponential overflows.
    group = base_epsilon - each + np.log(-np.expm1(-base_epsilon)) - np.log(-np.expm1(-each))
    # delta_1(e) = Phi(shift/2 - e/shift) - e^e Phi(-shift/2 - e/shift) at e = epsilon~/j.
    near, far = shift / 2 - each / shift, -shift / 2 - each / shift
    profile = np.maximum(ndtr(near) - np.exp(each + log_ndtr(far)), 0.0)
    present = profile > 0
    terms = np.exp(np.minimum(drawn[present] + group[present] + np.log(profile[present]), 0.0))
    return float(min(1.0, terms.sum()))


def _check_values(values: Mapping[str, int | float]) -> None:
    for name, value in values.items():
        least = 2 if name == "records" else 1 if name in ("steps", "clients") else 0
        if not math.isfinite(value) or value < least or value == 0:
            requirement = f"at least {least}" if least else "above 0"
            raise PrivacyError(f"{name} = {value}: a finite number {requirement} is needed")
