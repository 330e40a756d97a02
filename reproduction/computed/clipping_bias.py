"""Remark 4 of ULDP-FL, measured: the clipping bias of Theorem 6 and the weight that lands on records, by round.

The remark chooses weights that make the term

    sum over silos s and users u of |w_su C_su - mean of w C|,      C_su = C / max(C, ||Delta_su||),

small. A pair without records has Delta = 0 and C_su = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.setup import prepare
from reproduction.results import Values

_ROUNDS: Final = 10
_SHOWN: Final = (1, 10)
_CASES: Final = {
    "HeartDisease, 50 users": ("figure-6-heart-disease", "users50-zipf"),
    "HeartDisease, 200 users": ("figure-6-heart-disease", "users200-zipf"),
    "Creditcard, 1,000 users": ("figure-4-creditcard", "users1000-zipf"),
}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Records of all (silo, user) pairs that have some, of a logistic regression.

    Attributes:
        features: (pairs, longest, p) features with a constant; zeros beyond a pair's records.
        labels: (pairs, longest) 0 or 1.
        there: (pairs, longest) which entries are records.
        user: (pairs,) index of the pair's user.
        users: number of users that have records.
        silos: number of silos.
    """

    features: Float64[np.ndarray, "pairs longest p"]
    labels: Float64[np.ndarray, "pairs longest"]
    there: Bool[np.ndarray, "pairs longest"]
    user: Int64[np.ndarray, " pairs"]
    users: int
    silos: int

    def updates(
        self, model: Float64[np.ndarray, " p"], rate: float, steps: int
    ) -> Float64[np.ndarray, "pairs p"]:
        """Return each pair's update after full-batch steps from ``model``."""
        local = np.repeat(model[None], len(self.features), axis=0)
        count = self.there.sum(axis=1, keepdims=True)
        for _ in range(steps):
            logits = np.einsum("nrp,np->nr", self.features, local)
            slopes = np.where(self.there, 1 / (1 + np.exp(-logits)) - self.labels, 0.0) / count
            local -= rate * np.einsum("nr,nrp->np", slopes, self.features)
        return local - model  # type: ignore[no-any-return]

    def weights(self, *, by_records: bool) -> Float64[np.ndarray, " pairs"]:
        """Return w: 1 / |S|, or a pair's share of its user's records (equation 3)."""
        if not by_records:
            return np.full(len(self.user), 1 / self.silos)
        count = self.there.sum(axis=1).astype(np.float64)
        return count / np.bincount(self.user, weights=count, minlength=self.users)[self.user]  # type: ignore[no-any-return]


def clipping_bias(seed: int) -> Iterator[tuple[str, Values]]:
    """Zipf allocation, published local steps and clip, full batches, no noise, a logistic regression."""
    for name, (preset, scenario) in _CASES.items():
        pairs, rate, steps, clip = _read(preset, scenario, seed)
        for by_records in (False, True):
            weights = pairs.weights(by_records=by_records)
            model = np.zeros(pairs.features.shape[2])
            values: Values = {"weight on records": float(weights.sum() / pairs.users)}
            for number in range(1, _ROUNDS + 1):
                updates = pairs.updates(model, rate, steps)
                kept = clip / np.maximum(clip, np.linalg.norm(updates, axis=1))
                if number in _SHOWN:
                    values[f"bias, round {number}"] = _bias(pairs, weights, kept, by_records=by_records)
                    values[f"unclipped bias, round {number}"] = _bias(
                        pairs, weights, np.ones_like(kept), by_records=by_records
                    )
                model = model + (weights * kept) @ updates / pairs.users
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


def _read(preset: str, scenario: str, seed: int) -> tuple[Pairs, float, int, float]:
    laid_over = ({"seed": seed, "model": {"name": "linear"}},)
    chosen = Selection(scenarios=(scenario,), variants=("uldp-avg-w",), overrides=laid_over)
    (document,) = study_documents(preset, chosen)
    people = prepare(parse(document, "clipping bias")).population
    train = people.train
    features = np.asarray(train.features, dtype=np.float64).reshape(len(train.user), -1)
    features = np.append(features, np.ones((len(features), 1)), axis=1)
    keys = np.asarray(train.silo, dtype=np.int64) * people.n_users + train.user
    _, pair, count = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(pair, kind="stable")
    place = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
    there = np.arange(count.max()) < count[:, None]
    padded, labels = np.zeros((*there.shape, features.shape[1])), np.zeros(there.shape)
    padded[pair[order], place] = features[order]
    labels[pair[order], place] = np.asarray(train.targets, dtype=np.float64).reshape(-1)[order]
    _, user = np.unique(np.sort(np.unique(keys)) % people.n_users, return_inverse=True)
    local = document["local"]
    pairs = Pairs(
        features=padded,
        labels=labels,
        there=there,
        user=user,
        users=int(user.max()) + 1,
        silos=people.n_silos,
    )
    return pairs, local["learning_rate"], local["epochs"], document["method"]["clip"]
