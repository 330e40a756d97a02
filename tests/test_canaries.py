"""Canary audits of every method, three rounds each: what an attack finds stays below the statement, as noise makes it.

One run a method with every canary left out with probability 1/2 (:mod:`fedveil.run.audit`), at a stated epsilon that
the same attack would refute if the noise were left out; seeds are fixed.
"""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.privacy.audit import canary_bound
from fedveil.randomness import PrivacyRandomness
from fedveil.registry import names
from fedveil.run.audit import canary_scores
from fedveil.run.config.experiment import merge, parse
from fedveil.run.setup import prepare

CANARIES, ROUNDS, DELTA = 160, 3, 1e-5
PAIRS = {"n_silos": 3, "allocation": {"law": "zipf"}}
CLIENTS = {"allocation": {"law": "clients"}}
LOCAL = {"learning_rate": 0.1, "epochs": 2, "batch_size": 8}

AUDITED: dict[str, dict[str, Any]] = {
    "uldp-sgd-w": {"data": PAIRS, "method": {"noise_multiplier": 12.0, "power": "main"}},
    "uldp-sgd-w, correlated": {
        "data": PAIRS,
        "method": {
            "name": "uldp-sgd-w",
            "noise_multiplier": 12.0,
            "power": "main",
            "correlated": {"period": 2},
        },
    },
    "uldp-avg-w": {
        "data": PAIRS,
        "local": LOCAL,
        "method": {"noise_multiplier": 12.0, "power": "main", "clip": {"start": 0.1}},
    },
    "uldp-sgd": {"data": PAIRS, "method": {"noise_multiplier": 12.0}},
    "uldp-avg": {"data": PAIRS, "local": LOCAL, "method": {"noise_multiplier": 12.0}},
    "uldp-naive": {"data": PAIRS, "local": LOCAL, "method": {"noise_multiplier": 40.0}},
    "uldp-group": {"data": PAIRS, "local": LOCAL, "method": {"noise_multiplier": 12.0, "group_size": 4}},
    "dp-fed": {
        "data": CLIENTS,
        "local": LOCAL,
        "method": {"noise_multiplier": 8.0, "client_sampling_rate": 0.5},
    },
    "dp-fed-ls": {
        "data": CLIENTS,
        "local": LOCAL,
        "method": {"noise_multiplier": 30.0, "smoothing": 0.05, "client_sampling_rate": 1.0},
    },
    "cepam-gaussian": {"data": CLIENTS, "local": LOCAL, "method": {"noise_multiplier": 0.8}},
    "cepam-laplace": {
        "data": CLIENTS,
        "local": LOCAL,
        "method": {"noise_multiplier": 40.0},
        "trainer": {"name": "vmap"},
    },
    "fl-gaussian": {"data": CLIENTS, "local": LOCAL, "method": {"noise_multiplier": 0.8}},
    "fl-laplace": {
        "data": CLIENTS,
        "local": LOCAL,
        "method": {"noise_multiplier": 40.0},
        "trainer": {"name": "vmap"},
    },
    "dp-fedavg": {"data": CLIENTS, "local": LOCAL, "method": {"noise_multiplier": 0.8}},
    "varying-dp": {"data": CLIENTS, "local": LOCAL, "method": {"noise_multiplier": 0.8}},
}
FAST = ("uldp-sgd-w", "uldp-sgd-w, correlated")

ELSEWHERE = {
    "fedavg": "no guarantee",
    "fl": "no guarantee",
    "fl-sdq": "no guarantee",
    "ckks-fedavg": "no guarantee to readers of the models",
    "serial": "no guarantee to readers of the models without noise under encryption",
    "paraaegis": "no guarantee to readers of the models without noise under encryption",
    "stevens": "stated above all that so few canaries can show",
    "fl-gaussian-sdq": "the messages of fl-gaussian, coded",
    "fl-laplace-sdq": "the messages of fl-laplace, coded",
    "newton": "canaries are updates of the model; tests/test_newton.py attacks the bound of its sums",
    "boosted-trees": "canaries are updates of the model; tests/test_boosted_trees.py attacks the bound of its sums",
}


def found(name: str, noise: float) -> tuple[float, float]:
    """The stated epsilon of a method, and what an attack shows of it with its noise times a factor."""
    asked = AUDITED[name]
    document = merge(
        {
            "name": "audited",
            "rounds": ROUNDS,
            "data": {"name": "digits", "n_users": 200, "seed": 0},
            "model": {"name": "linear"},
            "privacy": {"insecure_seed": 3, "delta": DELTA},
            "method": {"name": name.partition(",")[0]},
        },
        asked,
    )
    document["method"].setdefault("clip", 0.5)
    stated = prepare(parse(document, name)).epsilon_after(ROUNDS)
    document["method"]["noise_multiplier"] *= noise
    played = prepare(parse(document, name))
    privacy = PrivacyRandomness.insecure(7)
    coins, scores = canary_scores(played, CANARIES, privacy, ROUNDS)
    return stated, canary_bound(scores, coins, delta=DELTA).epsilon


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in AUDITED]
)
def test_what_an_attack_finds_stays_below_the_statement_and_rises_above_it_without_noise(name: str) -> None:
    stated, held = found(name, 1.0)
    assert held < stated
    stated, bare = found(
        name, 1e-4 / AUDITED[name]["method"]["noise_multiplier"]
    )  # the least that decays too
    assert bare > stated, "the attack is too weak to say anything"


def test_every_method_is_audited_or_has_a_reason_why_not() -> None:
    asked = {name.partition(",")[0] for name in AUDITED}
    assert asked | set(ELSEWHERE) == set(names("methods"))
    assert not asked & set(ELSEWHERE)
