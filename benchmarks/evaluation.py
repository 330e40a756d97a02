"""Evaluation and preprocessing under a budget: error and coverage of the AUC, and what refining a schema costs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from benchmarks.harness import Row, at_most
from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.schema import Number, Schema
from fedveil.statistics.evaluation.binary import ScoreCounts, auc, enough_bins
from fedveil.statistics.evaluation.counts import FINE, equal_mass_edges
from fedveil.statistics.preprocessing import PreprocessingRequest, refine_schema
from fedveil.statistics.strategy import Strategy

_CODE = Strategy("prefix", len(FINE) + 1, 2)
_MULTIPLIERS = {0.5: 7.03, 1.0: 3.73, 2.0: 1.99}
"""Noise multipliers of one Gaussian release at delta 1e-5, by epsilon."""
_SHARE = 0.07
_FACTOR = 1000.0


def rows(quick: bool) -> Iterator[Row]:
    """Measure both; quick takes a third of the simulations."""
    for people, epsilon, prevalence in (
        (2000, 0.5, 0.5),
        (2000, 1.0, 0.5),
        (2000, 0.5, 0.2),
        (5000, 1.0, 0.1),
    ):
        yield from _area(people, epsilon, prevalence, 100 if quick else 300)
    for name, users, most in (("heart_disease", 400, 0.005), ("creditcard", 4000, 0.015)):
        yield from _bounds(name, users, most, 8 if quick else 25)


def smallest() -> Iterator[Row]:
    """Simulate one area a few times, and split the smallest data set twice."""
    yield from _area(2000, 1.0, 0.5, 3)
    yield from _bounds("heart_disease", 20, 0.005, 2)


def _area(people: int, epsilon: float, prevalence: float, simulations: int) -> Iterator[Row]:
    """Mean error of the area under the curve, and how often intervals hold these people's and the population's."""
    rng, sd = np.random.default_rng(people), _MULTIPLIERS[epsilon]
    first, second = sd / math.sqrt(0.15), sd / math.sqrt(0.85)
    bins = next(b for b in range(8, 33) if enough_bins(b, second, people) or b == 32)
    truth, errors, here, there = float(norm.cdf(1.2 / math.sqrt(2))), [], 0, 0
    for _ in range(simulations):
        labels = (rng.random(people) < prevalence).astype(np.int64)
        scores = (
            1.2 * (rng.normal(size=people) + 1.2 * labels) - 0.72 + math.log(prevalence / (1 - prevalence))
        )
        fine = np.bincount(np.searchsorted(FINE, scores, side="right"), minlength=_CODE.width)
        edges = equal_mass_edges(
            _CODE.decoder @ (_CODE.matrix @ fine + first * rng.normal(size=_CODE.n_sent)), bins, 0.0
        )
        cells = np.zeros((2, len(edges) + 1))
        np.add.at(cells, (labels, np.searchsorted(edges, scores, side="left")), 1)
        noisy = cells + second * rng.normal(size=cells.shape)
        found = auc(ScoreCounts(cells=noisy, variance=second**2, edges=edges, people_per_unit=1.0))
        if found is None:
            continue
        exact, interval = float(roc_auc_score(labels, scores)), found.interval
        errors.append(abs(found.value - exact))
        here += (interval.low_here or 0) <= exact <= (interval.high_here or 1)
        there += (interval.low or 0) <= truth <= (interval.high or 1)
    case = f"AUC, {people} people, epsilon {epsilon:g}, share of class 1 {prevalence:g}"
    goal = (people, epsilon, prevalence) == (2000, 0.5, 0.5)
    error = float(np.mean(errors))
    yield (
        at_most(f"{case}: mean error", "AUC", error, 0.0100)
        if goal
        else Row(case=f"{case}: mean error", unit="AUC", ours=error)
    )
    spread = 1.96 * math.sqrt(0.95 * 0.05 / simulations)
    for name, held in (("these people", here), ("the population", there)):
        share = held / len(errors)
        yield Row(
            case=f"{case}: coverage, {name}", unit="share", ours=share, met=abs(share - 0.95) <= 0.02 + spread
        )


def _bounds(name: str, users: int, most: float, splits: int) -> Iterator[Row]:
    """AUC of a logistic regression by noisy gradients: bounds that are known, 1,000 times too wide, and refined."""
    population = load(name, allocation=Allocation(), n_users=users)
    x = population.train.features.reshape(len(population.train), -1).astype(np.float64)
    labels = population.train.targets.astype(np.float64)
    numeric = [place for place in range(x.shape[1]) if len(np.unique(x[:, place])) > 8]
    known = list(zip(x.min(axis=0).tolist(), (x.max(axis=0) + 1e-9).tolist(), strict=True))
    wide = list(known)
    for place in numeric:
        known[place], wide[place] = (-4.0, 4.0), (-4.0 * _FACTOR, 4.0 * _FACTOR)
    for epsilon in (1.0, 2.0):
        sd, found = _MULTIPLIERS[epsilon], {"known": [], "wide": [], "refined": []}
        for split in range(splits):
            rng = np.random.default_rng(split)
            order = rng.permutation(len(x))
            train, test = order[: int(0.8 * len(x))], order[int(0.8 * len(x)) :]
            bounds = list(wide)
            for place, one in zip(
                numeric, _refined(x[train][:, numeric], wide, numeric, sd, rng), strict=True
            ):
                bounds[place] = one
            for case, taken, share in (
                ("known", known, 1.0),
                ("wide", wide, 1.0),
                ("refined", bounds, 1 - _SHARE),
            ):
                low, high = np.array(taken).T
                scaled = 2 * (np.clip(x, low, high) - low) / (high - low) - 1
                weights = _trained(scaled[train], labels[train], sd / math.sqrt(share), rng)
                found[case].append(float(roc_auc_score(labels[test], _with_one(scaled[test]) @ weights)))
        mean = {case: float(np.mean(values)) for case, values in found.items()}
        lost = np.subtract(found["known"], found["refined"])
        label = f"{name}, {len(numeric)} numbers, epsilon {epsilon:g}"
        yield Row(case=f"{label}: AUC with known bounds", unit="AUC", ours=mean["known"])
        yield Row(case=f"{label}: AUC with bounds {_FACTOR:g} times too wide", unit="AUC", ours=mean["wide"])
        yield Row(case=f"{label}: AUC with refined bounds", unit="AUC", ours=mean["refined"])
        yield at_most(f"{label}: AUC lost by refining", "AUC", float(lost.mean()), most)
        error = float(lost.std(ddof=1)) / math.sqrt(splits)
        yield Row(case=f"{label}: standard error of what is lost", unit="AUC", ours=error)


def _refined(
    x: np.ndarray, wide: list[tuple[float, float]], numeric: list[int], sd: float, rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Return the bounds of a release with its share of the budget."""
    features = {
        f"x{place}": {"kind": "number", "lower": wide[place][0], "upper": wide[place][1]} for place in numeric
    }
    schema = Schema.model_validate(
        {"n_users": 1, "user": "who", "target": {"kind": "number", "column": "y"}, "features": features}
    )
    names = tuple(features)
    asked = PreprocessingRequest(
        schema_=schema, silo_names=("a",), silos="equal", bounds=names, impute=(), pool={}
    )
    vector, noise = np.zeros(asked.layout.length), sd / math.sqrt(_SHARE)
    for slot, values in zip(asked.layout.slots, x.T, strict=True):
        cells = np.bincount(
            np.searchsorted(asked.edges(slot.block.release), values, side="right"),
            minlength=slot.block.encoder.width,
        )
        vector[slot.place] = slot.scale * slot.block.strategy.matrix @ cells
    found = refine_schema(asked, vector + noise * rng.normal(size=len(vector)), noise)
    return [(one.lower, one.upper) for one in found.features.values() if isinstance(one, Number)]


def _with_one(x: np.ndarray) -> np.ndarray:
    return np.column_stack((np.ones(len(x)), x))


def _trained(x: np.ndarray, labels: np.ndarray, sd: float, rng: np.random.Generator) -> np.ndarray:
    """Return a logistic regression by 40 noisy sums of clipped gradients, one record a person."""
    x, steps = _with_one(x), 40
    weights = np.zeros(x.shape[1])
    for _ in range(steps):
        gradients = x * (labels - 1 / (1 + np.exp(-x @ weights)))[:, None]
        gradients *= np.minimum(1, 1 / np.maximum(np.linalg.norm(gradients, axis=1), 1e-9))[:, None]
        noise = sd * math.sqrt(steps) * rng.normal(size=len(weights))
        weights = weights + 3.0 * (gradients.sum(axis=0) + noise) / len(x)
    return np.asarray(weights)
