"""Bound how often an attacker guesses right, from a privacy statement: epsilon in words that need no epsilon.

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
from functools import lru_cache

from fedveil.errors import PrivacyError
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Adjacency, Event
from fedveil.privacy.statement import Statement


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
