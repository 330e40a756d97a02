"""Remark 4 of ULDP-FL, measured: the clipping bias of Theorem 6 and the weight that lands on records, by round.

The remark chooses weights that make the term

    sum over silos s and users u of |w_su C_su - mean of w C|,      C_su = C / max(C, ||Delta_su||),

small. A pair without records has Delta = 0 and C_su = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.setup import prepare
from reproduction.results import Values

_ROUNDS: Final = 10
_FIGURE_4: Final = {"method": {"clip": 0.1}}
_CASES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "HeartDisease, 50 users": ("figure-6-heart-disease", "users50-zipf", {}),
    "HeartDisease, 200 users": ("figure-6-heart-disease", "users200-zipf", {}),
    "Creditcard, 5 silos": ("figure-8-weighting-creditcard", "silos5-zipf", _FIGURE_4),
    "Creditcard, 20 silos": ("figure-8-weighting-creditcard", "silos20-zipf", _FIGURE_4),
    "Creditcard, 50 silos": ("figure-8-weighting-creditcard", "silos50-zipf", _FIGURE_4),
}
"""By name: preset, scenario, and what is laid over the preset (Creditcard: the clip of Figure 4)."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Records of all (silo, user) pairs that have some, pair by pair, of a logistic regression.

    Attributes:
        features: (records, p) features with a constant.
        labels: (records,) 0 or 1.
        pair: (records,) index of the record's pair, in rising order.
        user: (pairs,) index of the pair's user.
        users: number of users that have records.
        silos: number of silos.
    """

    features: Float64[np.ndarray, "records p"]
    labels: Float64[np.ndarray, " records"]
    pair: Int64[np.ndarray, " records"]
    user: Int64[np.ndarray, " pairs"]
    users: int
    silos: int

    @property
    def count(self) -> Float64[np.ndarray, " pairs"]:
        """Number of records of each pair."""
        return np.bincount(self.pair).astype(np.float64)

    def updates(
        self, model: Float64[np.ndarray, " p"], rate: float, steps: int
    ) -> Float64[np.ndarray, "pairs p"]:
        """Return each pair's update after full-batch steps from ``model``."""
        local, count = np.repeat(model[None], len(self.user), axis=0), self.count[:, None]
        first = np.searchsorted(self.pair, np.arange(len(self.user)))
        for _ in range(steps):
            logits = np.einsum("rp,rp->r", self.features, local[self.pair])
            slopes = 1 / (1 + np.exp(-logits)) - self.labels
            local -= rate * np.add.reduceat(slopes[:, None] * self.features, first, axis=0) / count
        return np.asarray(local - model)

    def weights(self, *, by_records: bool) -> Float64[np.ndarray, " pairs"]:
        """Return w: 1 / |S|, or a pair's share of its user's records (equation 3)."""
        if not by_records:
            return np.full(len(self.user), 1 / self.silos)
        of_user = np.bincount(self.user, weights=self.count, minlength=self.users)
        return np.asarray(self.count / of_user[self.user])


def clipping_bias(seed: int) -> Iterator[tuple[str, Values]]:
    """Zipf allocation, published local steps and clip, full batches, no noise, a logistic regression."""
    for name, (preset, scenario, changes) in _CASES.items():
        document, pairs = _read(preset, scenario, changes | {"seed": seed, "model": {"name": "linear"}})
        local, clip = document["local"], document["method"]["clip"]
        for by_records in (False, True):
            weights = pairs.weights(by_records=by_records)
            model = np.zeros(pairs.features.shape[1])
            values: Values = {"weight on records": float(weights.sum() / pairs.users)}
            values["unclipped bias"] = _bias(pairs, weights, np.ones(len(weights)), by_records=by_records)
            for number in range(1, _ROUNDS + 1):
                updates = pairs.updates(model, local["learning_rate"], local["epochs"])
                kept = clip / np.maximum(clip, np.linalg.norm(updates, axis=1))
                values[f"bias, round {number}"] = _bias(pairs, weights, kept, by_records=by_records)
                values[f"clipped pairs, round {number}"] = float((kept < 1).mean())
                model = model + document["server"]["learning_rate"] * (weights * kept) @ updates / pairs.users
            yield f"{name}, {'by records' if by_records else '1 / |S|'}", values


def _bias(
    pairs: Pairs,
    weights: Float64[np.ndarray, " pairs"],
    kept: Float64[np.ndarray, " pairs"],
    *,
    by_records: bool,
) -> float:
    """Return the sum over all |S| |U| pairs; those without records weigh 1 / |S|, or 0 by records."""
    empty = pairs.silos * pairs.users - len(weights)
    alpha = np.concatenate([weights * kept, np.full(empty, 0.0 if by_records else 1 / pairs.silos)])
    return float(np.abs(alpha - alpha.mean()).sum())


def _read(preset: str, scenario: str, changes: dict[str, Any]) -> tuple[dict[str, Any], Pairs]:
    chosen = Selection(scenarios=(scenario,), variants=("uldp-avg-w",), overrides=(changes,))
    (document,) = study_documents(preset, chosen)
    people = prepare(parse(document, "clipping bias")).population
    train = people.train
    keys = np.asarray(train.silo, dtype=np.int64) * people.n_users + train.user
    order = np.argsort(keys, kind="stable")
    known, pair = np.unique(keys[order], return_inverse=True)
    _, user = np.unique(known % people.n_users, return_inverse=True)
    features = np.asarray(train.features, dtype=np.float64).reshape(len(order), -1)[order]
    pairs = Pairs(
        features=np.append(features, np.ones((len(order), 1)), axis=1),
        labels=np.asarray(train.targets, dtype=np.float64).reshape(-1)[order],
        pair=pair,
        user=user,
        users=int(user.max()) + 1,
        silos=people.n_silos,
    )
    return document, pairs
