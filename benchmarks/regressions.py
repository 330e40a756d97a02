"""Made-up people for regressions, with known coefficients; and releases of their sums with central noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from scipy.stats import norm, poisson

from fedveil.data.columns import ColumnTable, Numbers, Places
from fedveil.data.schema import Schema
from fedveil.methods.weights import Weights
from fedveil.statistics.inference.request import Inference
from fedveil.statistics.inference.result import FittedRegression
from fedveil.statistics.result import NoisySum

SILOS = ("a", "b", "c", "d", "e")
THETA = np.array([-0.5, 0.8, -0.6, 0.4, 0, 0, 0.3, -0.2])
BETA = np.array([0.5, -0.4, 0.3, 0, 0.2])
_REQUEST: TypeAdapter[Inference] = TypeAdapter(Inference)
_TARGETS: dict[str, dict[str, Any]] = {
    "logistic": {"kind": "label", "column": "y", "classes": ("0", "1")},
    "linear": {"kind": "number", "column": "y"},
    "poisson": {"kind": "number", "column": "y"},
    "survival": {"kind": "survival", "time": "t", "event": "y"},
}


@dataclass(frozen=True)
class Made:
    """A regression before its first release, the records of its people, and what is true of them."""

    fitted: FittedRegression
    table: ColumnTable
    truth: np.ndarray


def asked(family: str, n_users: int, covariates: int, **keys: Any) -> FittedRegression:
    """Return a regression on numbers between -3 and 3, without any release."""
    features = {f"x{place}": {"kind": "number", "lower": -3, "upper": 3} for place in range(covariates)}
    schema = Schema.model_validate(
        {
            "n_users": n_users,
            "user": "who",
            "silos": SILOS,
            "target": _TARGETS[family],
            "features": features,
        }
    )
    return FittedRegression(
        name="made",
        request=_REQUEST.validate_python({"family": family} | keys),
        schema=schema,
        silos=SILOS,
    )


def table_of(user: np.ndarray, silo: np.ndarray, x: np.ndarray, target: dict[str, np.ndarray]) -> ColumnTable:
    """Return the table of records without a missing cell."""
    valid = np.zeros(len(user), dtype=np.int8)
    columns: dict[str, Numbers | Places] = {
        f"x{place}": Numbers(values=x[:, place], state=valid) for place in range(x.shape[1])
    }
    for name, values in target.items():
        whole = values.dtype.kind == "i"
        columns[name] = (Places if whole else Numbers)(values=values, state=valid)
    return ColumnTable(
        columns=columns,
        silo=silo.astype(np.int32),
        user=user.astype(np.int32),
        n_users=int(user.max()) + 1,
        silo_names=SILOS,
    )


def made(family: str, n_users: int, overlap: float, rng: np.random.Generator, **keys: Any) -> Made:
    """Return people with 1 + Poisson(2) records each (survival: 1 or 2) whose targets are correlated by .4.

    Args:
        family: which.
        n_users: how many people.
        overlap: share of them with records in two of five silos.
        rng: what they are drawn from.
        keys: of the request.
    """
    if family == "survival":
        return _survival(n_users, overlap, rng, **keys)
    count = 1 + rng.poisson(2.0, n_users)
    user = np.repeat(np.arange(n_users), count)
    home, away = rng.integers(0, 5, n_users), rng.integers(1, 5, n_users)
    elsewhere = (rng.random(n_users) < overlap)[user] & (rng.random(len(user)) < 0.5)
    silo = (home[user] + elsewhere * away[user]) % 5
    base = rng.normal(size=(n_users, 7))
    x = np.clip(0.6 * base[user] + 0.8 * rng.normal(size=(len(user), 7)), -2.5, 2.5)
    theta = THETA if family != "poisson" else np.array([-0.7, 0.4, -0.3, 0.2, 0, 0, 0.2, -0.2])
    predictor = theta[0] + x @ theta[1:]
    error = np.sqrt(0.4) * rng.normal(size=n_users)[user] + np.sqrt(0.6) * rng.normal(size=len(user))
    if family == "linear":
        y = predictor + error
    elif family == "poisson":
        y = poisson.ppf(norm.cdf(error), np.exp(predictor))
    else:
        y = (norm.cdf(error) < 1 / (1 + np.exp(-predictor))).astype(np.int64)
    return Made(asked(family, n_users, 7, **keys), table_of(user, silo, x, {"y": y}), theta)


def _survival(n_users: int, overlap: float, rng: np.random.Generator, **keys: Any) -> Made:
    beta = BETA[: keys.pop("covariates", 3)]
    grid = np.array(keys["grid"])
    two = rng.random(n_users) < overlap
    user = np.repeat(np.arange(n_users), 1 + two)
    first = np.concatenate(([True], np.diff(user) > 0))
    x = np.clip(rng.normal(size=(n_users, len(beta))), -2.5, 2.5)
    rate = 0.1 * np.exp(x @ beta)
    time = rng.exponential(size=n_users) / rate
    censored = np.minimum(grid[-1], 1 + grid[-1] * rng.random(len(user)))
    observed = np.minimum(time[user], censored)
    home = rng.integers(0, 5, n_users)
    silo = np.where(first, home[user], (home[user] + 1) % 5)
    target = {"t": observed, "y": (time[user] <= censored).astype(np.int64)}
    truth = np.concatenate((np.full(len(grid) - 1, np.log(0.1)), beta))
    return Made(asked("survival", n_users, len(beta), **keys), table_of(user, silo, x[user], target), truth)


def exact_sum(fitted: FittedRegression, table: ColumnTable, place: int) -> np.ndarray:
    """Return a release's sum over all people without noise."""
    step = fitted.equation(place)
    weights = Weights.BY_RECORDS.for_groups(table.pairs(), len(SILOS), table.n_users).numpy()
    records, _, mixed = step.pairs(table)
    found = np.zeros(step.length)
    for some, vectors in step.vectors(records, mixed):
        found += weights[some] @ vectors.numpy()
    return found


def released(one: Made, mu: float, rng: np.random.Generator) -> FittedRegression:
    """Return the regression with all releases: exact sums plus noise that costs mu^2 in all; none if mu is infinite."""
    fitted = one.fitted
    for place, part in enumerate(fitted.parts):
        std = part.multiplier(1 / mu)
        exact = exact_sum(fitted, one.table, place)
        noisy = exact + std * rng.normal(size=len(exact))
        fitted = fitted.with_release(NoisySum(noisy, std))
    return fitted
