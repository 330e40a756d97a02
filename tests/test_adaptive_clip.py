"""Adaptive clipping: one release of updates and marks, bounded in whole numbers, and a clip that follows a quantile."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.records import Affine, Records
from fedveil.errors import CompositionError, ConfigError, FedveilError
from fedveil.methods.contributions import SiloContribution
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import begin_state, sum_noise_std
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.uldp import uldp_avg_w, uldp_sgd_w
from fedveil.methods.weights import Weights
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.audit import canary_bound
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.registry import names
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import prepare
from fedveil.run.simulation import play_round
from fedveil.run.training_run import resume, run
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.vectorized import VmapTrainer
from tests.messages import sender
from tests.opened_parties import parties_of
from tests.runs import Silent, experiment, files, same_model
from tests.slow_cases import slow_only

LOCAL = LocalSgd(learning_rate=0.5, epochs=2, batch_size=2)
SILOS, USERS = 3, 6


def asked(**changes: Any) -> Experiment:
    changes["method"] = {"clip": None} | changes.get("method", {})
    changes["server"] = {"learning_rate": 1.0} | changes.get("server", {})
    document = experiment(**changes).model_dump(mode="json", exclude_none=True)
    return parse(document, "test")


# --- one user moves what is stored by at most the claim -----------------------------------------------------------


def stored(bound: AdaptiveClip, deltas: torch.Tensor, weights: torch.Tensor) -> list[list[Fraction]]:
    """What a user's pairs add to the sums: whole numbers of the grid, as exact fractions."""
    norms = bound.norms(deltas)
    units = bound.quantize_(deltas.clone(), norms, weights)
    marks = bound.marks(norms, weights) / bound.grid
    whole = torch.cat([units.double(), marks], dim=1)
    assert torch.equal(whole, whole.trunc())
    return [[Fraction(int(value)) * Fraction(bound.grid) for value in row] for row in whole.tolist()]


def worst(bound: AdaptiveClip, users: int, seed: int) -> float:
    """The largest squared length of a user's sum over all silos, in squares of the unit norm."""
    random, found = np.random.default_rng(seed), 0.0
    for _ in range(users):
        silos, d = int(random.integers(1, 7)), int(random.integers(1, 5))
        weights = random.dirichlet(np.full(silos, random.choice([0.1, 1.0, 10.0])))
        now = bound.measured_in(float(np.exp(4 * random.normal()).clip(1e-11, 1e11)))
        base = random.normal(size=d) + np.zeros((silos, d))
        spread = random.choice([0.0, 0.1, 1.0]) * random.normal(size=(silos, d))
        rows = torch.from_numpy(
            ((base + spread) * now.unit * np.exp(2 * random.normal(size=(silos, 1)))).astype(np.float32)
        )
        rows[random.random((silos, d)) < 0.01] = math.nan
        total = [sum(column) for column in zip(*stored(now, rows, torch.from_numpy(weights)), strict=True)]
        found = max(found, float(sum(value * value for value in total)))
    return found


@pytest.mark.parametrize(("quantile", "share"), [(0.5, 0.5), (0.5, 1.0), (0.2, 0.3), (0.9, 0.7)])
def test_one_user_moves_the_stored_numbers_by_at_most_the_claim(quantile: float, share: float) -> None:
    bound = AdaptiveClip(quantile=quantile, share=share)
    found = worst(bound, 500, seed=1)
    m = max(quantile, 1 - quantile)
    assert bound.norm == pytest.approx(math.sqrt(1 + share**2 * m**2))
    assert found <= bound.norm**2
    assert found > 0.97 * bound.norm**2, "a claim a few percent smaller would be wrong"


@cache
def linear() -> Task:
    """Return a task over two features, which training leaves as it was."""
    model = build_model("linear", input_shape=(2,), n_outputs=2, randomness=ExperimentRandomness(0))
    return Task(model=model, loss=load_loss("cross_entropy"))


def totals(trainer: Any, bound: AdaptiveClip, weights: Weights, records: Records) -> np.ndarray:
    groups = records.by_silo_user()
    cohort = Cohort.from_records(
        records, groups=groups, n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )
    job = TrainJob(
        trainer.task.initial(),
        cohort,
        torch.arange(len(groups)),
        weights.for_groups(groups, SILOS, USERS),
        bound,
        ExperimentRandomness(1),
        ("round", 1),
    )
    return trainer.sums(job).with_clip_marks(job).total.sum(0).numpy()


@pytest.mark.parametrize("kind", [GramTrainer, *slow_only([LoopTrainer, VmapTrainer])])
@settings(max_examples=12)
@given(data=st.data())
def test_one_user_moves_the_sum_of_every_trainer_by_at_most_the_claim(kind: Any, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size = data.draw(st.sampled_from([1e-3, 1.0, 1e18, 3e38]))
    n = 24
    records = Records(
        features=(random.uniform(-1, 1, (n, 2)) * size).astype(np.float32),
        targets=random.integers(0, 2, n),
        silo=random.integers(0, SILOS, n).astype(np.int32),
        user=np.sort(random.integers(0, USERS, n)).astype(np.int32),
    )
    trainer = kind(task=linear(), local=LOCAL)
    bound = AdaptiveClip(start=data.draw(st.sampled_from([1e-6, 0.3, 1e6])))
    weights = data.draw(st.sampled_from([Weights.UNIFORM, Weights.BY_RECORDS, Weights.MAIN]))
    whole = totals(trainer, bound, weights, records)
    assert len(whole) == trainer.task.dimension + 1
    assert np.array_equal(whole / bound.grid, np.trunc(whole / bound.grid))
    for user in np.unique(records.user):
        others = records.select(np.flatnonzero(records.user != user))
        if len(others):
            moved = whole - totals(trainer, bound, weights, others)
            assert np.linalg.norm(moved) <= bound.norm


# --- the course of the clip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [1e-3, 1e3])
def test_the_clip_finds_the_quantile_of_the_lengths_and_zero_updates_abstain(
    quantile: float, start: float
) -> None:
    lengths = torch.from_numpy(np.random.default_rng(2).lognormal(size=1000))
    with_zeros = torch.cat([lengths, torch.zeros(5000, dtype=torch.float64)])
    bound, weights = AdaptiveClip(start=start, quantile=quantile), torch.ones(6000, dtype=torch.float64)
    state = bound.init()
    for _ in range(400):
        marks = bound.at_state(state).marks(with_zeros, weights).sum(0)
        state = bound.next_state(marks, 1000.0, state)
    found = float((lengths <= bound.at_state(state).unit).double().mean())
    assert found == pytest.approx(quantile, abs=0.02)


def test_marks_say_longer_of_what_is_not_finite_and_nothing_of_zero() -> None:
    bound = AdaptiveClip(start=1.0, quantile=0.25, share=0.5)
    norms = torch.tensor([0.0, 0.5, 1.0, 1.5, math.nan], dtype=torch.float64)
    marks = bound.marks(norms, torch.ones(5, dtype=torch.float64))[:, 0]
    assert marks.tolist() == [0.0, 0.375, 0.375, -0.125, -0.125]


def test_the_clip_stays_between_its_limits_whatever_the_noise_says() -> None:
    bound = AdaptiveClip(start=1.0, least=0.5, most=2.0)
    for value, end in ((1e9, 0.5), (-1e9, 2.0)):
        moved = bound.next_state(torch.tensor([value]).double(), 10.0, bound.init())
        assert float(moved["norm"]) == end
        assert int(moved["round"]) == 1


# --- what is claimed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantile", "share"), [(0.5, 0.5), (0.2, 1.0)])
def test_a_round_is_one_gaussian_release_of_the_multiplier_that_is_given(
    quantile: float, share: float
) -> None:
    """The formula of Andrew et al. (2021) written down again: 1 / z^2 = 1 / z_D^2 + (m / s_b)^2, s_b = z_D / kappa."""
    z, m = 4.0, max(quantile, 1 - quantile)
    method = uldp_avg_w(local=LOCAL, clip=AdaptiveClip(quantile=quantile, share=share), noise_multiplier=z)
    guarantee = derive(method, PublicFacts(n_silos=SILOS, n_users=USERS, dimension=11))
    assert isinstance(guarantee.event, GaussianEvent)
    assert guarantee.event.noise_multiplier == pytest.approx(z, rel=1e-12)
    z_d = sum_noise_std(method, SILOS)
    assert z_d is not None
    s_b = z_d / share
    assert 1 / math.sqrt(z_d**-2 + (m / s_b) ** 2) == pytest.approx(z, rel=1e-12)
    plain = derive(
        uldp_avg_w(local=LOCAL, clip=0.7, noise_multiplier=z), PublicFacts(n_silos=SILOS, n_users=USERS)
    )
    for role in (Role.READER, Role.SERVER, Role.SILO):
        assert type(guarantee.event_for(role)) is type(plain.event_for(role))


def test_an_attack_on_the_marks_is_held_by_the_statement_and_finds_marks_without_noise() -> None:
    """Canaries that come or go, three rounds each: guesses from the released mark alone."""
    trials, rounds, z, delta = 600, 3, 2.0, 1e-5
    method = uldp_avg_w(local=LOCAL, clip=AdaptiveClip(share=1.0), noise_multiplier=z)
    channel, bound = method.channel, method.bound
    stated = make_accountant("pld").epsilon(GaussianEvent(noise_multiplier=z / math.sqrt(rounds)), delta)
    privacy = PrivacyRandomness.insecure(5)
    coins = np.random.default_rng(3).random(trials) < 0.5
    held, bare = np.zeros(trials), np.zeros(trials)
    for trial, there in enumerate(coins):
        mark = np.array([0.5 * there])
        for number in range(rounds):
            at = sender(privacy, trial, grid=bound.grid, round=number)
            held[trial] += channel.send(mark, at).numbers[0]
            bare[trial] += mark[0]
    assert canary_bound(held, coins, delta=delta).epsilon < stated
    assert canary_bound(bare, coins, delta=delta).epsilon > stated


# --- runs ---------------------------------------------------------------------------------------------------------

ADAPTIVE = {"clip": {"start": 0.05, "quantile": 0.5, "share": 0.5}}
RUNS: dict[str, dict[str, Any]] = {
    "open": {"method": ADAPTIVE},
    "main silo, masked": {
        "method": {**ADAPTIVE, "power": "main"},
        "protection": {"name": "secure-aggregation"},
    },
    "sampled, lrsuq": {
        "method": {**ADAPTIVE, "user_sampling_rate": 0.5},
        "channel": {"name": "lrsuq"},
    },
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_a_run_that_was_killed_ends_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = run(prepare(asked(**changes)), tmp_path / "whole", Silent())
    with pytest.raises(KeyboardInterrupt):
        run(prepare(asked(**changes)), tmp_path / "cut", Silent(interrupt_after=2))
    again = resume(tmp_path / "cut" / "try", Silent())
    assert same_model(files(whole.folder)[1], files(again.folder)[1])
    courses = [[row["clip"] for row in files(at.folder)[2][1:]] for at in (whole, again)]
    assert courses[0] == courses[1]
    assert courses[0][0] == 0.05
    assert len(set(courses[0])) == len(courses[0]), "the clip moves in every round"


def test_masks_change_no_bit() -> None:
    """The first round's sum of d + 1 numbers is the same vector with and without masks."""
    found = []
    short = {"channel": {"name": "additive", "word_bits": 16}}
    for protection in (short, {"protection": {"name": "secure-aggregation"}}):
        prepared = prepare(asked(method=ADAPTIVE, rounds=1, **protection))
        parties = parties_of(prepared, PrivacyRandomness.insecure(11))
        turn = RoundContext(
            setting=prepared.setting,
            model=prepared.task.initial(),
            state=begin_state(prepared.method, prepared.task.initial()),
            round_number=1,
            experiment=ExperimentRandomness(0),
            privacy=PrivacyRandomness.insecure(11),
        )
        model, state, _ = play_round(turn, parties)
        found.append((model, state["clip.norm"]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# --- every protection and channel ---------------------------------------------------------------------------------

PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "secure-aggregation": {"protection": {"name": "secure-aggregation"}},
    "recovery": {
        "method": {"name": "uldp-avg"},
        "protection": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1},
    },
    "private-weighting": {"protection": {"name": "private-weighting", "n_max": 30}},
    "rlwe": {"protection": {"name": "private-weighting", "n_max": 30, "cipher": "rlwe"}},
    "partial-encryption": {"protection": {"name": "partial-encryption"}},
}
CODED = "messages that the server decodes one by one"
REFUSED = {
    "secure-aggregation over lrsuq": CODED,
    "recovery over lrsuq": CODED,
    "private-weighting over lrsuq": CODED,
    "rlwe over lrsuq": CODED,
    "partial-encryption over lrsuq": CODED,
    "partial-encryption over additive": "makes two of an update",
}
"""Every cell that is refused, with the reason, which is the clip's in the last alone; all others play."""


@pytest.mark.parametrize("channel", names("channels"))
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_it_plays_under_every_protection_and_channel_that_it_can_go_with(
    protection: str, channel: str, tmp_path: Path
) -> None:
    """The statement's event is that of the multiplier, and every round moves the clip.

    Under private weighting it is played below, and by ``tests/test_federation_weighting.py``: ciphers are expensive.
    """
    changes = merge({"method": ADAPTIVE, "channel": {"name": channel}, "rounds": 2}, PROTECTIONS[protection])
    reason = REFUSED.get(f"{protection} over {channel}")
    if reason is not None:
        with pytest.raises(FedveilError, match=reason):
            prepare(asked(**changes))
        return
    prepared = prepare(asked(**changes))
    event = prepared.guarantee.event
    assert isinstance(event, GaussianEvent)
    assert event.noise_multiplier == pytest.approx(5.0, rel=1e-6)  # private weighting rounds contributions up
    if not prepared.method.protection.weighs:
        course = [row["clip"] for row in files(run(prepared, tmp_path, Silent()).folder)[2][1:]]
        assert len(set(course)) == 2


@pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe")
def test_under_the_ring_cipher_the_clip_takes_the_course_that_it_takes_in_the_open(tmp_path: Path) -> None:
    """Noise of one seed: what differs is the rounding of weighted contributions, up to the grid of the cipher."""
    same = {"method": ADAPTIVE, "rounds": 3, "privacy": {"insecure_seed": 3}}

    def course(protection: str) -> list[float]:
        played = run(prepare(asked(**merge(same, PROTECTIONS[protection]))), tmp_path / protection, Silent())
        return [row["clip"] for row in files(played.folder)[2]]

    ring, in_the_open = course("rlwe"), course("none")
    assert len(set(in_the_open)) == 3
    assert ring == pytest.approx(in_the_open, rel=1e-3)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"contribution": SiloContribution(), "weights": Weights.ONE}, "one mark per"),
        ({"noise_decay": 0.9}, "second schedule"),
        ({"protection": PartialEncryption(ratio=0.5)}, "makes two of an update"),
    ],
)
def test_what_has_no_place_beside_it_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    method = uldp_avg_w(local=LOCAL, clip=AdaptiveClip(), noise_multiplier=5.0)
    with pytest.raises(CompositionError, match=reason):
        replace(method, **changes)


def test_gradients_need_a_longest_clip() -> None:
    with pytest.raises(CompositionError, match=r"give clip\.most"):
        uldp_sgd_w(clip=AdaptiveClip(), noise_multiplier=5.0)
    assert uldp_sgd_w(clip=AdaptiveClip(most=1.0), noise_multiplier=5.0).bound.most == 1.0


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ({"start": 0.0}, r"method\.clip\.start: must be >= "),
        ({"quantile": 1.0}, r"method\.clip\.quantile: must be < 1"),
        ({"shares": 0.5}, r"method\.clip\.shares: "),
        (-1.0, r"method\.clip: must be > 0"),
    ],
)
def test_a_mistake_is_refused_when_the_experiment_is_read(clip: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(method={"clip": clip})
