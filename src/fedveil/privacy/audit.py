"""Test privacy claims by attack: membership inference, and a lower bound on epsilon from one run.

* Membership inference (Yeom et al. 2018): the attack calls a record a member if the model's loss on the record is
  low. The result is the area under the ROC curve with a confidence interval (DeLong et al. 1988, and Newcombe 2006),
  and the true positive rate at small false positive rates (Carlini et al. 2022), for an attacker that must hardly
  ever be wrong.
* One-run audit (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run"): each of m canary
  units is included with probability 1/2. The auditor guesses r of these coins and is right v times. If training were
  (epsilon, delta)-DP, the number of right guesses would be about Binomial(r, e^eps / (1 + e^eps)) at most. A larger
  number refutes small epsilons at a stated confidence.

Not claimed: that an epsilon is right. A lower bound refutes a claim or fails to refute it; it never proves the claim.
docs/theory/audit.md.

Bound how often an attacker guesses right, from a privacy statement: epsilon in words that need no epsilon.

**Claim.** An attacker who sees everything that the statement counts as released, knows all other data, and is to tell
two neighbouring data sets apart of which a fair coin chose one, is right with probability at most

    (1 + delta(0)) / 2,    and at most    (e^epsilon + delta) / (1 + e^epsilon).

**Proof.** With error rates a and b the attacker is right with probability 1 - (a + b) / 2. The smallest a + b is
1 - TV, and the total variation distance TV is at most delta(0), the delta at epsilon = 0. By (epsilon, delta),
e^epsilon a + b and a + e^epsilon b are at least 1 - delta, so a + b >= 2 (1 - delta) / (1 + e^epsilon).

The same bounds hold for the mean probability, after Bayes' rule, that the data set with the unit was used, where it
was: with P and Q the two laws of the release and p = dP / (dP + dQ), E_P p + E_Q p = 1, E_P p - E_Q p <= TV, and
E_P p <= e^epsilon E_Q p + delta. Of a unit that is in with probability r they make E_P p <= (o + delta) / (1 + o),
o = e^epsilon r / (1 - r), and since the logistic function has a slope of at most 1/4,

    E_P p - r <= c epsilon / 4 + delta,    c = 1,

which DP-Fed-LS, section 6.4, quotes from Sablayrolles et al. (2019). It is never the smallest of the three.

The first bound is far smaller for Gaussian noise: epsilon 5 at delta 1e-5 is .74 by the first and .994 by the second.
``tests/test_summary.py`` plays the best attack on a Gaussian release against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64
from scipy.optimize import brentq

from fedveil.errors import PrivacyError
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Adjacency, Event
from fedveil.privacy.statement import Statement

FALSE_POSITIVE_RATES: Final = (0.001, 0.01)
_HIGHEST_EPSILON: Final = 100.0
_BESIDE: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Result of a membership inference attack: how well its scores separate members from non-members.

    Attributes:
        auc: probability that a random member scores higher than a random non-member (ties count half).
        low, high: ends of the two-sided confidence interval of ``auc``.
        confidence: confidence level of that interval.
        true_positive_rates: (false positive rate, true positive rate) pairs; the threshold lets at most that share of
            the non-members pass.
        members, non_members: number of scores of each kind.
    """

    auc: float
    low: float
    high: float
    confidence: float
    true_positive_rates: tuple[tuple[float, float], ...]
    members: int
    non_members: int


def unlike_records(inference_high: float) -> str | None:
    """Return a warning if the area under the ROC curve is significantly below one half; otherwise None.

    A model's loss on training records is no larger than on other records of the same distribution. If it is larger,
    the test records have another distribution, and the attack compares two populations instead of members and
    non-members.

    Args:
        inference_high: upper end of the confidence interval of the area.
    """
    if inference_high >= 0.5:
        return None
    return (
        "The model's loss is larger on its training records than on the test records, so these differ from each other "
        "(in people, time, place or preprocessing, or by easier labels). The attack then compares two populations: it "
        "shows neither that members can be recognised nor that they cannot. Test with records drawn as the training "
        "records were."
    )


@dataclass(frozen=True, kw_only=True)
class EpsilonBound:
    """Lower bound on epsilon that holds with probability at least ``confidence``, for all scores.

    Attributes:
        epsilon: the bound; 0 if the guesses refute no epsilon.
        delta: the delta of the claim that is tested.
        confidence: least probability, over the coins, that the true epsilon is at least the bound.
        canaries, guesses, right: m, r and v of the audit.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int


def membership(
    members: Float64[np.ndarray, " n"], non_members: Float64[np.ndarray, " k"], confidence: float = 0.95
) -> Membership:
    """Evaluate an attack that calls a record a member if its score is high.

    AUC = P(X > Y) + P(X = Y) / 2 for the score X of a member and Y of a non-member. The interval is the hull of two
    intervals. The first uses DeLong's variance, which is too small for few records and near AUC = 1 (it is 0 if the
    samples do not overlap). The second is Newcombe's: all areas theta within z standard deviations of the AUC, with
    the standard deviation at theta.

    Args:
        members: (n,) scores of members, n >= 2; the negative loss, for the loss-threshold attack.
        non_members: (k,) scores of non-members, k >= 2.
        confidence: confidence level of the interval.

    Raises:
        PrivacyError: fewer than two scores of either kind, or a score that is NaN.

    >>> membership(np.array([3.0, 2.0, 1.0]), np.array([0.0, -1.0, -2.0])).auc
    1.0
    """
    from scipy import stats

    n, k = len(members), len(non_members)
    if min(n, k) < 2:
        raise PrivacyError(
            f"membership inference compares members with non-members; it has {n} and {k}, and needs two of each"
        )
    both = np.concatenate((members, non_members))
    if np.isnan(both).any():
        raise PrivacyError("a score is not a number: the model's loss on some record is not finite")
    ranks = stats.rankdata(both)
    above = (ranks[:n] - stats.rankdata(members)) / k  # placement values: share of non-members below
    below = 1 - (ranks[n:] - stats.rankdata(non_members)) / n
    auc = min(1.0, float(above.mean()))
    deviation = math.sqrt(float(above.var(ddof=1)) / n + float(below.var(ddof=1)) / k)
    z = float(stats.norm.isf((1 - confidence) / 2))
    low, high = _possible_areas(auc, n, k, z)
    # The test below is strict (>), so members that tie with the threshold do not count as recognised.
    descending = np.sort(non_members)[::-1]
    rates = []
    for rate in FALSE_POSITIVE_RATES:
        threshold = descending[math.floor(rate * k)]  # at most this share of non-members exceeds it
        rates.append((rate, float((members > threshold).mean())))
    return Membership(
        auc=auc,
        low=max(0.0, min(low, auc - z * deviation)),
        high=min(1.0, max(high, auc + z * deviation)),
        confidence=confidence,
        true_positive_rates=tuple(rates),
        members=n,
        non_members=k,
    )


def _possible_areas(auc: float, n: int, k: int, z: float) -> tuple[float, float]:
    """Return the least and the largest theta with |auc - theta| <= z sd(theta).

    sd^2 = theta (1 - theta) (1 + N ((1 - theta) / (2 - theta) + theta / (1 + theta))) / (n k), N = (n + k) / 2 - 1:
    Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2" (Statistics
    in Medicine 25, 2006), method 5.
    """
    size_term = (n + k) / 2 - 1

    def beyond(theta: float) -> float:
        spread = 1 + size_term * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return abs(auc - theta) - z * math.sqrt(theta * (1 - theta) * spread / (n * k))

    # If auc is 0 or 1, theta = auc is a root as well (difference and variance are 0). The brackets for the other root
    # therefore start a relative 1e-9 away from auc.
    below, above = auc * (1 - _BESIDE), auc + (1 - auc) * _BESIDE
    low = float(brentq(beyond, 0.0, below)) if auc > 0 else 0.0
    high = float(brentq(beyond, above, 1.0)) if auc < 1 else 1.0
    return low, high


def canary_bound(
    scores: Float64[np.ndarray, " m"],
    included: Bool[np.ndarray, " m"],
    *,
    delta: float,
    confidence: float = 0.95,
) -> EpsilonBound:
    """Bound epsilon from below by guessing which canaries were included.

    The auditor guesses "included" for the quarter with the highest scores and "excluded" for the quarter with the
    lowest scores, and makes no guess for the others. The number of guesses is fixed before any score is seen, as the
    theorem requires.

    Args:
        scores: (m,) a high score indicates inclusion; any function of the released values and of the canaries' data.
        included: (m,) the coins, each fair and independent of everything else.
        delta: delta of the claim.
        confidence: confidence level of the bound.

    Raises:
        PrivacyError: fewer than 4 canaries, or a score that is NaN.
    """
    count = len(scores)
    if count < 4:
        raise PrivacyError(f"{count} canaries cannot bound anything; use at least 4, better some hundreds")
    if np.isnan(scores).any():
        raise PrivacyError(
            "the score of a canary is not a number: training diverged; lower the learning rates"
        )
    # A stable sort breaks ties by position, never by the coins: the guesses stay a function of the scores.
    order = np.argsort(-scores, kind="stable")
    each = count // 4
    right = int(included[order[:each]].sum() + (~included[order[count - each :]]).sum())
    epsilon = lowest_epsilon(
        canaries=count, guesses=2 * each, right=right, delta=delta, confidence=confidence
    )
    return EpsilonBound(
        epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        canaries=count,
        guesses=2 * each,
        right=right,
    )


@cache  # audits of many seeds ask for the same few numbers
def lowest_epsilon(*, canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return the least epsilon that ``right`` right guesses do not refute at this confidence.

    The bisection returns the lower end of its bracket, which is refuted; the result is at most 1e-6 too small, and at
    most 100.
    """
    if refutation(0.0, canaries=canaries, guesses=guesses, right=right, delta=delta) > 1 - confidence:
        return 0.0
    low, high = 0.0, _HIGHEST_EPSILON
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = refutation(middle, canaries=canaries, guesses=guesses, right=right, delta=delta)
        low, high = (middle, high) if refuted <= 1 - confidence else (low, middle)
    return low


def refutation(epsilon: float, *, canaries: int, guesses: int, right: int, delta: float) -> float:
    """Bound from above the probability of ``right`` or more right guesses under (epsilon, delta)-DP.

    The bound is P(W >= v) + 2 m delta max_{i=1..v} P(v - i <= W < v) / i for W ~ Binomial(r, e^eps / (1 + e^eps))
    (Steinke et al. 2023, Theorem 5.2).
    """
    from scipy import stats

    likely = 1 / (1 + math.exp(-epsilon))
    chance = float(stats.binom.sf(right - 1, guesses, likely))
    if right == 0 or delta == 0:
        return min(1.0, chance)
    i = np.arange(1, right + 1)
    just_below = stats.binom.cdf(right - 1, guesses, likely) - stats.binom.cdf(right - 1 - i, guesses, likely)
    return min(1.0, chance + 2 * canaries * delta * float((just_below / i).max()))


# --- upper bound on every attack, from a statement ---


def attack_accuracy(statement: Statement) -> float | None:
    """Return the largest probability with which readers guess right; None if nothing is guaranteed.

    Both bounds of the module hold; the smaller one is returned. The first needs an accountant with a number at
    epsilon = 0; without one, the second stands alone.
    """
    if statement.epsilon is None:
        return None
    odds = math.exp(-statement.epsilon)
    by_epsilon = (1 + statement.delta * odds) / (1 + odds)
    try:
        distance = _distance(statement.accountant, statement.adjacency, statement.event)
    except (PrivacyError, ArithmeticError):
        return by_epsilon
    return min(by_epsilon, (1 + distance) / 2) if 0 <= distance <= 1 else by_epsilon


def membership_bound(statement: Statement, prior: float = 0.5) -> float | None:
    """Return the largest mean probability of membership of a member, prior + epsilon / 4 + delta; None: no guarantee.

    Args:
        statement: its unit is the member; the attacker knows all other data.
        prior: r, the probability that the unit is in, independent of all other data.

    Raises:
        PrivacyError: a prior outside [0, 1].
    """
    if not 0 <= prior <= 1:
        raise PrivacyError(f"prior = {prior}: a probability between 0 and 1 is needed")
    if statement.epsilon is None:
        return None
    return min(1.0, prior + statement.epsilon / 4 + statement.delta)


@lru_cache(maxsize=32)
def _distance(accountant: str, adjacency: Adjacency, event: Event) -> float:
    return make_accountant(accountant, adjacency).delta(event, 0.0)
