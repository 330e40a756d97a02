"""A run under private weighting: the plain weighted sum, what it states, what it refuses before any training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.errors import CompositionError, ConfigError, FedveilError, ProtocolError
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.message_encoding import Sender
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.claims import Reveals
from fedveil.privacy.events import GaussianEvent, PoissonSampledEvent, split_distance
from fedveil.protocols.driver import Transcript
from fedveil.protocols.weighting.plan import WeightingPlan, rounded_sensitivity
from fedveil.protocols.weighting.protocol_spec import PrivateWeightingSpec
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.process_group import split_trainer
from fedveil.run.rounds.client_inputs import CohortInputs
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import resume, run
from fedveil.training.trainer import TrainJob
from tests.federation_world import small_keys
from tests.opened_parties import parties_of
from tests.runs import Silent, files, json_lines, same_model
from tests.slow_cases import slow_only
from tests.synthetic import serve_hospitals

QUICK = {"name": "private-weighting", "n_max": 400, "key_bits": 2048}
SAMPLED = {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0, "user_sampling_rate": 0.5}


OWN_KEYS = ("[heart-disease]", "[unpacked]")
"""Tests with the keys that are asked for; the others have shorter ones, in which the same numbers fit."""


@pytest.fixture(autouse=True)
def _made_up_hospitals(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    serve_hospitals(tmp_path_factory.mktemp("made_up"), monkeypatch)
    if not request.node.name.endswith(OWN_KEYS):
        small_keys(monkeypatch, 1024)


def asked(**changes: Any) -> Experiment:
    """Return a run on HeartDisease (14 parameters, 4 silos) with whole tables replaced."""
    document = {
        "name": "weighted",
        "rounds": 2,
        "data": {"name": "heart_disease", "n_users": 12},
        "local": {"learning_rate": 0.1, "epochs": 2, "batch_size": 4},
        "trainer": {"name": "loop"},
        "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0},
        "server": {"learning_rate": 2.5},
        "protection": QUICK,
        "privacy": {"insecure_seed": 11},
    } | changes
    return parse(document, "test")


def played(prepared: Prepared, drawn: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of the first round, as the server learns it."""
    assert isinstance(prepared.protocol_spec, PrivateWeightingSpec)
    parties = parties_of(prepared, PrivacyRandomness.insecure(11))
    work = parties.workload(turn_of(prepared))
    work.begin(0)
    silos = tuple(range(prepared.population.n_silos))
    return prepared.protocol_spec.decode_sum(parties.driver.play((1, 0), silos, drawn, work.client_input)[0])


def turn_of(prepared: Prepared) -> RoundContext:
    """Return the first round."""
    return RoundContext(
        setting=prepared.setting,
        model=prepared.task.initial(),
        round_number=1,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.insecure(11),
    )


def in_the_clear(prepared: Prepared, drawn: np.ndarray | None = None) -> np.ndarray:
    """The oracle: updates in float32, everything after them in float64 and in one line."""
    setting, method = prepared.setting, prepared.method
    groups, n_silos = setting.cohort.groups, setting.cohort.n_silos
    everyone = torch.arange(len(groups))
    updates = setting.trainer.sums(
        TrainJob(
            prepared.task.initial(),
            setting.cohort.per_contribution(everyone),
            everyone,
            torch.ones(len(groups), dtype=torch.float64),
            Unbounded(),
            ExperimentRandomness(0),
            ("round", 1),
        ),
    ).total.numpy()
    counted = np.minimum(groups.size, method.protection.n_max // n_silos)
    weights = counted / np.bincount(groups.user, weights=counted)[groups.user]
    if drawn is not None:
        weights = weights * drawn[groups.user]
    bound, lengths = method.bound, np.linalg.norm(updates, axis=1)
    clipped = updates * np.minimum(1, bound.longest / lengths)[:, None] / bound.unit
    if isinstance(bound, AdaptiveClip):
        marks = bound.share * np.where(lengths <= bound.unit, 1 - bound.quantile, -bound.quantile)
        clipped = np.column_stack([clipped, marks])
    noise = [
        method.channel.send(
            np.zeros(prepared.length),
            Sender(
                number=silo,
                senders=n_silos,
                round=1,
                grid=method.bound.grid,
                privacy=PrivacyRandomness.insecure(11),
            ),
        ).numbers
        for silo in range(n_silos)
    ]
    return weights @ clipped + np.sum(noise, axis=0)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """The folder of the run as it is asked for, which is played once."""
    return cache(lambda: run(prepare(asked()), tmp_path_factory.mktemp("seeded"), Silent()).folder)


def tolerance(prepared: Prepared) -> float:
    """(|U| + |S|) P, P being the step of the contributions."""
    return (prepared.population.n_users + prepared.population.n_silos) * prepared.method.bound.grid


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": {"name": "uldp-avg-w", "clip": {"start": 0.2}, "noise_multiplier": 5.0}},
        {"protection": {**QUICK, "n_max": 8}},
        {"method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 0.0}},
        *slow_only(
            [
                {"trainer": {"name": "vmap"}},
                {
                    "data": {"name": "digits", "n_users": 2, "n_silos": 2},
                    "model": {"name": "linear"},
                    "local": {"learning_rate": 0.1, "epochs": 2, "batch_size": 64},
                    "protection": {**QUICK, "n_max": 200},
                },
                {
                    "data": {"name": "heart_disease", "n_users": 4},
                    "protection": {**QUICK, "n_max": 2000, "key_bits": 3072},
                },
            ]
        ),
    ],
    ids=["heart-disease", "adaptive", "more-than-count", "no-noise", "vmap", "digits", "unpacked"],
)
def test_the_server_learns_the_plain_weighted_sum(changes: dict[str, Any]) -> None:
    prepared = prepare(asked(**changes))
    found, expected = played(prepared), in_the_clear(prepared)
    assert np.abs(found - expected).max() <= tolerance(prepared)
    assert np.abs(found - found.mean()).max() > tolerance(prepared)


@pytest.mark.slow
def test_the_server_learns_the_plain_weighted_sum_of_real_hospitals(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    prepared = prepare(asked(data={"name": "heart_disease", "n_users": 12, "folder": str(data_folder)}))
    assert prepared.population.records_per_silo().tolist() == [199, 172, 30, 85]
    assert np.abs(played(prepared) - in_the_clear(prepared)).max() <= tolerance(prepared)


def test_the_server_learns_the_sum_over_the_users_it_drew() -> None:
    prepared = prepare(asked(method=SAMPLED))
    drawn = np.arange(prepared.population.n_users) % 3 == 0
    found, expected = played(prepared, drawn), in_the_clear(prepared, drawn)
    assert np.abs(found - expected).max() <= tolerance(prepared)
    assert np.abs(found - in_the_clear(prepared)).max() > tolerance(prepared)


def test_under_oblivious_transfer_somebody_is_drawn_whom_nobody_knows() -> None:
    method = {**SAMPLED, "noise_multiplier": 0.0}
    prepared = prepare(asked(method=method, protection={**QUICK, "private_sampling": True}))
    users = prepared.population.n_users
    alone = np.stack([in_the_clear(prepared, np.arange(users) == user) for user in range(users)])
    found = played(prepared)
    coins, *_ = np.linalg.lstsq(alone.T, found, rcond=None)
    np.testing.assert_allclose(coins, coins.round(), atol=0.05)
    assert set(coins.round()) <= {0.0, 1.0}


@pytest.mark.slow
def test_ring_lwe_gives_the_same_sum() -> None:
    pytest.importorskip("tenseal")
    few = {"name": "heart_disease", "n_users": 4}
    prepared = prepare(
        asked(data=few, protection={"name": "private-weighting", "n_max": 200, "cipher": "rlwe"})
    )
    assert np.abs(played(prepared) - in_the_clear(prepared)).max() <= tolerance(prepared)


@pytest.mark.parametrize("trainer", ["loop", "vmap", "gram"])
def test_contributions_handed_out_one_by_one_are_those_that_a_silo_adds_up(trainer: str) -> None:
    prepared = prepare(asked(trainer={"name": trainer}, protection={"name": "none"}))
    setting, start, random = prepared.setting, prepared.task.initial(), ExperimentRandomness(0)
    turn = RoundContext(
        setting=setting,
        model=start,
        round_number=1,
        experiment=random,
        privacy=PrivacyRandomness.insecure(0),
    )
    training = CohortInputs(turn, prepared.protocol_spec)
    everyone = torch.arange(len(setting.cohort.groups))
    ones = torch.ones(len(everyone), dtype=torch.float64)
    sums = setting.trainer.sums(
        TrainJob(start, setting.cohort, everyone, ones, setting.method.bound, random, ("round", 1))
    )
    grid = setting.method.bound.grid
    for silo in range(setting.cohort.n_silos):
        rows = training.contributions(silo)
        np.testing.assert_array_equal(rows / grid, np.round(rows / grid))
        assert np.linalg.norm(rows, axis=1).max() <= setting.method.bound.norm
        rounding = grid * len(rows) if trainer == "gram" else grid * 2 * (trainer == "vmap")
        np.testing.assert_allclose(rows.sum(0), sums.total[silo].numpy(), rtol=0, atol=rounding)
    torch.testing.assert_close(training._norms, sums.norms, rtol=1e-5, atol=0)


def test_one_silos_contributions_are_sent_before_the_nexts_are_trained() -> None:
    prepared = prepare(asked())
    assert isinstance(prepared.protocol_spec, PrivateWeightingSpec)
    parties = parties_of(prepared, PrivacyRandomness.insecure(11), Transcript())
    work = parties.workload(turn_of(prepared))
    work.begin(0)
    sent, silos = [], tuple(range(prepared.population.n_silos))

    def watched(silo: int) -> Any:
        assert parties.transcript is not None
        purposes = [line.purpose for line in parties.transcript.lines]
        sent.append(purposes.count("an encrypted masked sum"))
        return work.client_input(silo)

    parties.driver.play((1, 0), silos, None, watched)
    assert sent == list(range(prepared.population.n_silos))


# --- whole runs -------------------------------------------------------------------------------------------------


def test_a_run_ends_where_the_plain_run_ends(seeded: Callable[[], Path], tmp_path: Path) -> None:
    plain = run(prepare(asked(protection={"name": "none"})), tmp_path, Silent())
    prepared = prepare(asked())
    users, silos = prepared.population.n_users, prepared.population.n_silos
    step = 10.0 / (users * silos) * 2 * users * silos * prepared.method.bound.grid
    after, before = files(seeded())[1], files(plain.folder)[1]
    for name, values in after.items():
        np.testing.assert_allclose(values, before[name], rtol=0, atol=3 * step)


def test_an_interrupted_run_goes_on_under_new_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(prepare(asked()), tmp_path, Silent(interrupt_after=1), transcript=True)
    outcome = resume(tmp_path / "weighted", Silent())
    assert outcome.rounds == 2
    assert len(files(outcome.folder)[0]) == 2
    lines = json_lines(outcome.folder / "transcript.jsonl")
    keys = [line for line in lines if line["purpose"] == "the server's public encryption key"]
    silos = 4
    assert len(keys) == 2 * silos
    sums = [line for line in lines if line["purpose"] == "an encrypted masked sum"]
    assert [line["round"] for line in sums] == [1] * silos + [2] * silos
    assert len({line["bytes"] for line in sums}) == 1
    up = sum(line["bytes"] for line in lines if line["round"] == 2 and line["recipient"] == "server")
    assert outcome.row["bytes_up"] == up


def test_a_seeded_run_repeats_itself_bit_for_bit(seeded: Callable[[], Path], tmp_path: Path) -> None:
    again = run(prepare(asked()), tmp_path, Silent())
    assert same_model(files(seeded())[1], files(again.folder)[1])


def test_secure_runs_differ_from_each_other(tmp_path: Path) -> None:
    one, two = (files(run(prepare(asked(privacy={})), tmp_path, Silent()).folder)[1] for _ in range(2))
    assert not same_model(one, two)


# --- what is stated ---------------------------------------------------------------------------------------------


def test_the_account_includes_the_rounding_of_the_sum() -> None:
    prepared = prepare(asked())
    channel, agreed = prepared.method.channel, prepared.protocol_spec
    assert isinstance(channel, GaussianShares)
    assert isinstance(agreed, PrivateWeightingSpec)
    moved = rounded_sensitivity(0.5, agreed.plan.length, agreed.grid)
    assert moved == 0.5 + math.sqrt(14) * agreed.grid
    event = prepared.guarantee.event
    assert isinstance(event, GaussianEvent)
    assert event.noise_multiplier == pytest.approx(5.0 * 0.5 / moved, rel=1e-15)
    assert event.noise_multiplier < 5.0


def test_a_calibrated_run_stays_within_its_epsilon_with_the_rounding() -> None:
    method = {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": "calibrated"}
    prepared = prepare(asked(method=method, privacy={"epsilon": 3.0}))
    assert 2.9 < prepared.epsilon_after(2) <= 3.0


@pytest.mark.parametrize("private", [False, True])
def test_the_statement_says_who_learns_what(private: bool) -> None:
    protection = {**QUICK, "private_sampling": private}
    guarantee = prepare(asked(method=SAMPLED, protection=protection)).guarantee
    server, silo, both = guarantee.views
    assert ("who was sampled" in server.sees) is not private
    assert isinstance(split_distance(server.event)[0], PoissonSampledEvent) is private
    assert isinstance(
        silo.event, GaussianEvent
    )  # who stays and weighs more elsewhere is not hidden by sampling
    assert Reveals.COUNTS.value not in silo.sees
    assert Reveals.DRAWN.value not in silo.sees
    assert Reveals.SUM.value in server.sees
    assert Reveals.MESSAGE.value not in server.sees
    assert Reveals.COUNTS.value in both.sees
    assert guarantee.uncovered[-1].startswith("the server and one silo learn which users have a record")
    assert any("rounded to a grid" in line for line in guarantee.mechanisms)


# --- what is refused, before any training -----------------------------------------------------------------------


def test_nothing_says_that_a_user_has_more_records_than_count() -> None:
    """N_max is public, and refusing somebody who has more would tell whoever chooses it how many records that is."""
    prepared = prepare(asked(protection={**QUICK, "n_max": 8}))
    assert prepared.setting.cohort.groups.size.max() > 2
    assert "each silo counts at most 2 records of a user" in " ".join(prepared.guarantee.mechanisms)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        (
            {"method": {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0}},
            CompositionError,
            "n_su / N_u",
        ),
        ({"method": {"name": "fedavg"}}, CompositionError, "n_su / N_u"),
        ({"channel": {"name": "lrsuq"}}, CompositionError, "decodes one by one"),
        ({"protection": {**QUICK, "private_sampling": True}}, CompositionError, "not such a number"),
        (
            {
                "method": {**SAMPLED, "user_sampling_rate": 0.3141},
                "protection": {**QUICK, "private_sampling": True},
            },
            CompositionError,
            "the nearest is",
        ),
        (
            {
                "method": {
                    **SAMPLED,
                    "user_sampling_rate": 0.333333333333,
                },  # below what oblivious transfer draws
                "protection": {**QUICK, "private_sampling": True},
            },
            CompositionError,
            "the nearest is 1/3",
        ),
        ({"protection": {**QUICK, "n_max": 3}}, ProtocolError, "n_max must be at least 4"),
        ({"protection": {**QUICK, "n_max": 4000}}, ProtocolError, "a Paillier key of 2048 bits offers"),
        ({"protection": {**QUICK, "n_max": 10**6}}, ProtocolError, "take a lower n_max"),
        (
            {"protection": {"name": "private-weighting", "cipher": "rlwe"}},
            ProtocolError,
            "cap the records per user",
        ),
        ({"trainer": {"processes": 2}}, ConfigError, "one by one"),
    ],
)
def test_what_cannot_run_is_refused_before_training(
    changes: dict[str, Any], error: type[FedveilError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        prepare(asked(**changes))


@pytest.mark.parametrize(
    ("protection", "reason"),
    [
        (
            {"name": "none", "n_max": 3},
            "protection.n_max: no such key; .*belongs to name = 'private-weighting'",
        ),
        ({"name": "secure-aggregation", "cipher": "rlwe"}, "protection.cipher: no such key; .*it belongs to"),
        ({"name": "private-weighting", "cipher": "rlwe", "key_bits": 2048}, "rlwe chooses its ring"),
        ({"name": "private-weighting", "key_bits": 1024}, "key_bits"),
    ],
)
def test_keys_that_do_not_belong_are_refused(protection: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        asked(protection=protection)


def test_several_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="runs in one process"):
        split_trainer(prepare(asked()))


def test_a_silo_checks_its_own_counts() -> None:
    plan = WeightingPlan(silos=2, users=3, length=1, largest_count=6, norm_limit=1, noise_limit=0)
    plan.check_counts(np.array([0, 3, 3]), 1)
    for counts in ([0, 4, 0], [-1, 0, 0], [1, 1]):
        with pytest.raises(ProtocolError, match="silo 1: "):
            plan.check_counts(np.array(counts), 1)
