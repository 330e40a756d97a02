"""Warn before training, from public facts, where a run has too few people, or a loss that teaches it nothing."""

from __future__ import annotations

import math
from typing import Any, Final

from fedveil.errors import LargeDeltaWarning, PrivacyError, TooFewPeopleWarning
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import sum_noise_std
from fedveil.methods.noise_ratio import SCALE, noise_ratio
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Adjacency, GaussianEvent
from fedveil.privacy.statement import show_epsilon
from fedveil.run.setup import Prepared

_DELTA_SHARE: Final = 10
"""A delta of 1 / (10 |U|) or more gives a warning."""


def people_warnings(prepared: Prepared) -> tuple[Warning, ...]:
    """Return the warnings about a run, computed from public numbers only.

    Let rho = sqrt(d) / (|U| mu) be the noise-to-travel ratio, for d parameters and a run of Gaussian strength mu. Noise
    is a large part of the model if rho > 1/4, and most of it if rho > 1. Each of the three remedies (more people, a
    larger epsilon, a smaller model) gives rho = 1/4 by itself.
    """
    epsilon = prepared.epsilon_after(prepared.experiment.rounds)
    if not math.isfinite(epsilon):
        return ()
    found = [_few_people(prepared, epsilon), _large_delta(prepared), _lone_records(prepared)]
    return tuple(one for one in found if one is not None)


def _large_delta(prepared: Prepared) -> Warning | None:
    users, delta = prepared.population.n_users, prepared.experiment.privacy.delta
    if delta < 1 / (_DELTA_SHARE * users):
        return None
    return LargeDeltaWarning(
        f"delta = {delta:g} allows to publish the records of {delta * users:.2g} of {users} people in expectation; "
        f"take a delta below {1 / (_DELTA_SHARE * users):.2g}"
    )


def _lone_records(prepared: Prepared) -> Warning | None:
    """Return a warning if a loss compares records, and a contribution holds those of one user in one silo."""
    method: Any = prepared.method
    loss = prepared.task.loss
    if loss.separable or method.local.sums_records or method.contribution.per not in ("pair", "record"):
        return None
    return UserWarning(
        f"the loss {loss.name} compares records with each other, and one contribution holds those of one user in one "
        "silo: a user with a single record there moves nothing. The method newton with a horizon (target.horizon in "
        "the schema, model whitened-hazards) compares no records"
    )


def noise_ratio_of(prepared: Prepared) -> float | None:
    """Return rho of a run (:func:`fedveil.methods.noise_ratio.noise_ratio`), from public numbers only."""
    people = prepared.population
    public = PublicFacts(n_silos=people.n_silos, n_users=people.n_users, dimension=prepared.task.dimension)
    return noise_ratio(prepared.method, public, prepared.experiment.rounds)


def _few_people(prepared: Prepared, epsilon: float) -> Warning | None:
    ratio, people, dimension = noise_ratio_of(prepared), prepared.population, prepared.task.dimension
    if ratio is None or ratio <= SCALE:
        return None
    remedies = [f"{math.ceil(people.n_users * ratio / SCALE)} people"]
    if (more := _epsilon_at(prepared, ratio)) is not None:
        remedies.append(f"epsilon {show_epsilon(more)}")
    remedies.append(f"a model of {max(1, math.floor(dimension * (SCALE / ratio) ** 2))} parameters")
    which = ", or ".join(remedies)
    mostly = " The model will be mostly noise; no clip and no rate changes that." if ratio > 1 else ""
    return TooFewPeopleWarning(
        f"{people.n_users} people, {dimension} parameters, epsilon {show_epsilon(epsilon)}: noise is {ratio:.2g} of "
        f"the largest possible movement of the model. {SCALE:g} needs {which}.{mostly}"
    )


def _epsilon_at(prepared: Prepared, ratio: float) -> float | None:
    """Return the epsilon at which the ratio is SCALE; None if users are sampled, whose epsilon is another function."""
    method, rounds = prepared.method, prepared.experiment.rounds
    noise = sum_noise_std(method, prepared.population.n_silos)
    if (
        method.sampler.rate < 1
        or method.sampler.adjacency is not Adjacency.ADD_OR_REMOVE_ONE
        or noise is None
    ):
        return None
    release = GaussianEvent(noise_multiplier=noise / method.bound.norm / math.sqrt(rounds) * SCALE / ratio)
    try:
        return make_accountant("pld").epsilon(release, prepared.experiment.privacy.delta)
    except PrivacyError:  # more than the accountant counts
        return None
