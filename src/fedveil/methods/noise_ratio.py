"""Compute the noise-to-travel ratio of a run from public numbers, and the rules that use it.

With all users in every round and updates of length at most C, T rounds with the server's rate eta move a model by at
most eta T C. The noise that they leave in the model has the norm eta C sqrt(d T) z / (q |U|). The quotient

    rho = sqrt(d / T) z / (q |U|)

is the noise-to-travel ratio. Under Gaussian noise without sampling it is sqrt(d) / (|U| mu), mu = sqrt(T) / z. So at
one epsilon it depends on neither T nor z. It is a function of public numbers, so a choice by this ratio has no
privacy cost. docs/theory/noise-to-travel.md.
"""

from __future__ import annotations

import math
from typing import Final

from fedveil.errors import CompositionError
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method, sum_noise_std

MOST: Final = 3.0
"""Longest step that the rule proposes, in mean updates."""
SCALE: Final = 0.25
"""Product of rho and the proposed step. MOST and SCALE were chosen on digits and TcgaBrca."""
RHO_NOTE: Final = (
    "rho is the norm of the noise in the trained model, divided by the largest distance that all users together can "
    f"move it; a run warns above {SCALE:g}, with three remedies, and above 1 the model is mostly noise. Where users' "
    "weights are not all in one silo, it can be up to |S| times as large."
)
"""Meaning of rho, for tables that show it."""


def noise_to_displacement(method: Method, public: PublicFacts, rounds: int) -> float:
    """Return rho of a run; infinite if updates are not bounded.

    Args:
        method: the method with its noise; if the noise decays, rho is that of a run with the first round's noise.
        public: |S|, |U| and d.
        rounds: T.

    Raises:
        CompositionError: noise of unknown size.
    """
    noise = sum_noise_std(method, public.n_silos)
    if noise is None or public.dimension is None:
        raise CompositionError(
            f"{method.name}: the noise-to-travel ratio needs one size of the noise on the sums, which is not known here"
        )
    if not method.bound.bounded:
        return 0.0 if noise == 0 else math.inf
    length = method.bound.longest / method.bound.unit
    # noise / length = z, so this is rho = sqrt(d / T) z / (q |U|); public weights of clients shorten the sum.
    contributions = method.sampler.rate * public.n_users * method.weights.mean
    return math.sqrt(public.dimension / rounds) * noise / (length * contributions)


def noise_ratio(method: Method, public: PublicFacts, rounds: int) -> float | None:
    """Return rho where it has a value, else None.

    It has none if contributions are not those of single users, if updates have no bound, and without noise or with
    noise of unknown size.
    """
    if not method.contribution.by_user or not method.bound.bounded:
        return None
    try:
        ratio = noise_to_displacement(method, public, rounds)
    except CompositionError:
        return None
    return ratio if 0 < ratio < math.inf else None


def step_by_rule(ratio: float) -> float:
    """Return eta = min(3, 0.25 / rho), the server's step in mean updates of a user.

    >>> step_by_rule(0.05), step_by_rule(0.5)
    (3.0, 0.5)
    """
    return MOST if ratio == 0 else min(MOST, SCALE / ratio)


def rounds_by_rule(rounds: int, ratio: float) -> int:
    """Return the number of rounds that cover 0.25 T / rho mean updates in total.

    This is T, or more if the rule's step is capped at 3. At one epsilon, without sampling, rho is the same for every
    T; so is the noise that these rounds leave, 0.25 T C.

    >>> rounds_by_rule(30, 0.24), rounds_by_rule(30, 0.025)
    (30, 100)
    """
    return rounds if ratio == 0 else max(rounds, round(rounds * SCALE / (MOST * ratio)))


def rate_by_rule(method: Method, public: PublicFacts, rounds: int) -> float:
    """Return the server's learning rate by :func:`step_by_rule`.

    Raises:
        CompositionError: noise of unknown size, or none, or updates that are not those of single users.
    """
    if not method.contribution.by_user:
        raise CompositionError(
            f"{method.name}: server.learning_rate = 'by-rule' is in mean updates of a user, and a contribution of this "
            "method is not the update of one user: give a number"
        )
    ratio = noise_to_displacement(method, public, rounds)
    if not 0 < ratio < math.inf:
        raise CompositionError(
            f"{method.name}: server.learning_rate = 'by-rule' compares the noise with the largest displacement by "
            "users; without noise, or without a clip, it has nothing to compare: give a number"
        )
    return step_by_rule(ratio)
