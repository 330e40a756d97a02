"""Methods composed at random: without one user, the sums that the server gets move by at most what is claimed of a run.

Both populations are played from the same models and states, those of a run on the whole one, so that what differs is
what one user moves. Sums are compared before their noise; over the rounds of a run their moves, in standard deviations
of that noise, are at most the multiplier of the round's event and the strengths allow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedveil.data.records import Population, Records
from fedveil.errors import FedveilError
from fedveil.methods.correlated import CorrelatedShares
from fedveil.methods.method import begin_state
from fedveil.privacy.events import GaussianEvent, PoissonSampledEvent
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.rounds.client_inputs import make_round_inputs
from fedveil.run.rounds.round_context import RoundContext, SumHistory
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import SimulatedParties, play_round

SILOS, USERS, FEATURES = 3, 5, 4
OF_PAIRS = ("uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w", "uldp-naive")
OF_CLIENTS = ("dp-fed", "fl-gaussian", "dp-fedavg", "varying-dp")


class Dice:
    """Choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def often(self, chance: float) -> bool:
        return bool(self.random.random() < chance)


def asked(dice: Dice) -> dict[str, Any]:
    """An experiment of stages that may or may not go together."""
    clip = float(10.0 ** dice.random.uniform(-2, 1))
    method: dict[str, Any] = {
        "name": dice.one_of(*OF_PAIRS, *OF_CLIENTS),
        "clip": clip,
        "noise_multiplier": 2.0,
    }
    local = {"learning_rate": float(10.0 ** dice.random.uniform(-2, 3)), "epochs": dice.one_of(1, 2, 3)}
    local |= {"batch_size": dice.one_of(1, 2, 4, 16)} if dice.often(0.7) else {}
    local |= {"momentum": 0.9} if dice.often(0.3) else {}
    document = {
        "name": "try",
        "rounds": 3,
        "seed": int(dice.random.integers(1000)),
        "data": {"name": "digits", "n_users": USERS, "n_silos": SILOS},
        "model": {"name": dice.one_of("linear", "mlp"), "loss": dice.one_of("cross_entropy", "focal")},
        "trainer": {"name": dice.one_of("auto", "loop", "vmap")},
        "server": {"learning_rate": 0.1, "optimizer": {"name": dice.one_of("sgd", "fedadam")}},
        "privacy": {"insecure_seed": 1, "colluding_silos": dice.one_of(0, 0, 1)},
        "method": method,
        "local": local,
    }
    if method["name"].startswith(("uldp-sgd", "uldp-avg")):
        period = dice.one_of(0, 0, 1, 2, 3)
        method |= (
            {"correlated": {"period": period}} if period else {"user_sampling_rate": dice.one_of(0.5, 1.0)}
        )
        method |= {"clip": {"start": clip, "most": 10 * clip}} if dice.often(0.3) else {}
        method |= {"power": dice.one_of(0, 1, 2.5, "main")} if method["name"].endswith("-w") else {}
    if method["name"].startswith("uldp-sgd"):
        del document["local"]
    return document


def people(dice: Dice, clients: bool) -> Records:
    """A few users with few and many records, some of them huge, and keys that are not their numbers."""
    n = int(dice.random.integers(6, 40))
    silo = np.r_[np.arange(SILOS), dice.random.integers(0, SILOS, n)].astype(np.int32)
    user = silo if clients else dice.random.integers(0, USERS, len(silo)).astype(np.int32)
    features = dice.random.normal(size=(len(silo), FEATURES)).astype(np.float32)
    features[dice.random.random(len(silo)) < 0.1] *= np.float32(dice.one_of(0.0, 1e-30, 1e10, 1e30))
    key = dice.random.integers(0, 2**62, USERS)[user]
    targets = dice.random.integers(0, 3, len(silo))
    return Records(features=features, targets=targets, silo=silo, user=user, key=key)


def prepared(document: dict[str, Any], records: Records, users: int) -> Prepared:
    population = Population(
        name="some",
        train=records,
        test_features=records.features[:0],
        test_targets=records.targets[:0],
        n_users=users,
        silo_names=tuple(f"silo{number}" for number in range(SILOS)),
        task="classification",
        n_classes=3,
    )
    return prepare(parse(document, "test"), FixedPopulation(population))


def summed(turn: RoundContext, past: SumHistory, parties: SimulatedParties) -> np.ndarray:
    """The sum of what all send, before their noise."""
    work = make_round_inputs(replace(turn, past=past), parties.protocol_spec, parties.initial)
    work.begin(0)
    senders = work.senders(tuple(range(parties.protocol_spec.clients)))
    found: np.ndarray = np.sum([work.unprotected_sum(sender) for sender in senders], axis=0)
    return found


def moved(seed: int) -> float | None:
    """What one user moves all sums of a run by, over what is claimed; None for stages that do not go together."""
    dice = Dice(seed)
    document = asked(dice)
    clients = document["method"]["name"] in OF_CLIENTS
    records, users = people(dice, clients), SILOS if clients else USERS
    gone = dice.one_of(*np.unique(records.user).tolist())
    try:
        whole = prepared(document, records, users)
    except FedveilError:
        return None
    less = prepared(document, records.select(np.flatnonzero(records.user != gone)), users)
    guarantee, method, privacy = whole.guarantee, whole.method, PrivacyRandomness.insecure(seed)
    event = guarantee.event.event if isinstance(guarantee.event, PoissonSampledEvent) else guarantee.event
    assert isinstance(event, GaussianEvent)
    parties, pasts = SimulatedParties.in_the_open(whole.setting), (SumHistory(), SumHistory())
    model, state = whole.task.initial(), begin_state(method, whole.task.initial())
    square = claimed = 0.0
    for number in range(1, whole.experiment.rounds + 1):
        turns = [one.round_context(number, model, state, privacy) for one in (whole, less)]
        full, short = (summed(turn, past, parties) for turn, past in zip(turns, pasts, strict=True))
        channel = turns[0].method.channel
        std = channel.noise_std(SILOS, SILOS)
        if isinstance(channel, CorrelatedShares):
            std = channel.share_std(SILOS) * math.sqrt(SILOS)
        assert std
        square += float(np.linalg.norm(full - short) / std) ** 2
        claimed += guarantee.strength(number) / event.noise_multiplier**2
        assert square <= claimed * (1 + 1e-9), document
        model, state, _ = play_round(replace(turns[0], past=parties.past), parties)
    return math.sqrt(square / claimed)


def check(seeds: range) -> float:
    """Play the runs of these seeds, of which there are some; return the largest move."""
    found = [one for one in map(moved, seeds) if one is not None]
    assert len(found) > len(seeds) / 4
    return max(found)


def test_no_user_moves_the_sums_of_a_composition_farther_than_claimed() -> None:
    check(range(5))


@pytest.mark.slow
def test_no_user_moves_the_sums_of_any_of_many_compositions_farther_than_claimed() -> None:
    """Some come near to the claim, so that one that is a few percent too small would be noticed."""
    assert check(range(5, 110)) > 0.98
