"""Correlated noise: what a user's stream moves, by brute force and elsewhere; the ledger; runs, refusals, resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.data.records import Affine, Records
from fedveil.errors import CompositionError, ConfigError, PrivacyError
from fedveil.methods.capabilities import memory_of
from fedveil.methods.contributions import SiloContribution
from fedveil.methods.correlated import (
    CorrelatedNoise,
    CorrelatedShares,
    best_coefficients,
    decoded_error,
    squared_sensitivity,
    strengths,
)
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg, uldp_avg_w, uldp_sgd_w
from fedveil.methods.weights import Weights
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.claims import Role
from fedveil.privacy.events import ComposedEvent, Event, GaussianEvent, NoGuarantee, split_grid_loss
from fedveil.privacy.sampling import Everyone, PoissonUsers, Scheduled
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.rounds.round_context import RoundContext, SumHistory, TrainingSetup
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.server.denoise import Laplacian
from fedveil.training.steps import LocalGradient, LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort
from fedveil.training.vectorized import VmapTrainer
from tests.pins.jax_privacy_cases import CASES, FILE
from tests.runs import Silent, experiment, files, same_model
from tests.slow_cases import slow_only

LOCAL = LocalSgd(learning_rate=0.5, epochs=1, batch_size=2)
TASK = Task(
    model=build_model("linear", input_shape=(2,), n_outputs=2, randomness=ExperimentRandomness(0)),
    loss=load_loss("cross_entropy"),
)
CODES = ((1.0,), (1.0, 0.5), (1.0, 1.0, 1.0), (1.0, 0.671875, 0.578125, 0.515625))


def encoder(code: Sequence[float], rounds: int) -> np.ndarray:
    """C as a matrix."""
    found = np.zeros((rounds, rounds))
    for j, c in enumerate(code[:rounds]):
        found += np.diag(np.full(rounds - j, c), -j)
    return found


def schedules(rounds: int, period: int) -> Iterator[tuple[int, ...]]:
    """Every set of rounds that are at least b apart, from 0."""
    for first in range(rounds):
        yield (first,)
        for more in schedules(rounds - first - period, period):
            yield (first, *(first + period + one for one in more))


@cache
def brute_force(code: tuple[float, ...], rounds: int, period: int) -> float:
    """The most that a stream can move, squared: C'C is not negative, so equal updates in every round are worst."""
    gram = encoder(code, rounds).T @ encoder(code, rounds)
    return max(float(gram[np.ix_(rows, rows)].sum()) for rows in schedules(rounds, period))


# --- how far a stream moves what is sent --------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_the_sensitivity_is_that_of_the_worst_pattern_at_every_stop(code: tuple[float, ...]) -> None:
    for period in range(len(code), 6):
        for rounds in range(1, 11):
            found = squared_sensitivity(code, period, rounds)
            assert found == pytest.approx(brute_force(code, rounds, period), rel=1e-12)


def test_another_library_says_the_same_of_forty_codes() -> None:
    """jax_privacy's closed form for Toeplitz codes and its dynamic program for banded ones (tests/pins)."""
    cases = json.loads(FILE.read_text())
    assert len(cases) == CASES
    for case in cases:
        found = squared_sensitivity(case["coefficients"], case["period"], case["rounds"])
        assert found == pytest.approx(case["toeplitz"], rel=1e-12)
        assert found == pytest.approx(case["banded"], rel=1e-12)


def test_more_bands_than_the_period_move_more_than_the_formula_and_are_refused() -> None:
    code, period, rounds = (1.0, 0.875, 0.75, 0.625, 0.5, 0.5), 2, 9
    diagonal = sum(sum(c * c for c in code[: rounds - first]) for first in range(0, rounds, period))
    assert brute_force(code, rounds, period) > 1.5 * diagonal
    with pytest.raises(PrivacyError, match="the user's rounds overlap"):
        squared_sensitivity(code, period, rounds)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ((0.5, 0.25), "the first must be 1"),
        ((), "the first must be 1"),
        ((1.0, -0.5), "not negative"),
        ((1.0, 0.25, 0.5), "that fall"),
        ((1.0, 0.3), "multiples of 2"),
        ((1.0, math.nan), "that fall"),
    ],
)
def test_codes_that_the_theory_does_not_have_are_refused(code: tuple[float, ...], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        strengths(code, 4)


@pytest.mark.parametrize("code", CODES)
def test_schedules_of_the_silos_need_not_agree_but_weights_must_stay(code: tuple[float, ...]) -> None:
    """Streams of random silos on schedules of their own, driven towards the worst: never above s_T, and near it."""
    random, period, rounds, silos = np.random.default_rng(2), 4, 9, 3
    matrix, every = encoder(code, rounds), list(schedules(rounds, period))
    gram, found = matrix.T @ matrix, 0.0
    for _ in range(200):
        weights = random.dirichlet(np.ones(silos) * 0.3)
        streams, allowed = np.zeros((silos, rounds, 2)), np.zeros((silos, rounds, 1))
        for s in range(silos):
            allowed[s, list(every[random.integers(len(every))])] = 1
        streams = random.normal(size=streams.shape) * allowed
        for _ in range(10):  # towards the gradient of the squared length, row by row in the unit ball
            streams = allowed * (gram @ np.tensordot(weights, streams, 1))
            length = np.linalg.norm(streams, axis=2, keepdims=True)
            streams /= np.where(length > 0, length, 1)
        found = max(found, float(np.linalg.norm(matrix @ np.tensordot(weights, streams, 1)) ** 2))
    most = squared_sensitivity(code, period, rounds)
    assert 0.97 * most < found <= most * (1 + 1e-12)


def test_weights_that_follow_who_is_there_would_break_the_bound() -> None:
    """Two silos on different schedules, each with a user's whole weight in its rounds: the user is in every round."""
    matrix, every_round = encoder((1.0, 0.5), 9), np.ones((9, 1))
    assert np.linalg.norm(matrix @ every_round) ** 2 > 2 * squared_sensitivity((1.0, 0.5), 2, 9)


# --- which code ---------------------------------------------------------------------------------------------------


def test_the_code_that_is_found_is_near_the_best_and_far_from_independent_noise() -> None:
    """T = 100, b = 5: 1.138 times the noise of everyone in every round, where independent noise has 2.24 times."""
    found = best_coefficients(100, 5, 5)
    assert found == pytest.approx((1.0, 0.678, 0.580, 0.516, 0.454), abs=0.01)
    everyone = decoded_error((1.0,), 100) * 10

    def against(code: Sequence[float]) -> float:
        return decoded_error(code, 100) * math.sqrt(squared_sensitivity(code, 5, 100)) * 5 / everyone

    assert against(found) == pytest.approx(1.138, abs=0.001)
    assert against((1.0,)) == pytest.approx(math.sqrt(5), rel=1e-9)
    assert best_coefficients(None, 3, 3) == (1.0, 0.5, 0.375)
    assert best_coefficients(100, 5, 1) == (1.0,)


def test_the_noise_of_the_model_is_that_of_the_inverse() -> None:
    code, rounds = (1.0, 0.5, 0.375), 12
    sums = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(encoder(code, rounds))
    assert decoded_error(code, rounds) == pytest.approx(math.sqrt((sums**2).sum() / rounds), rel=1e-12)


# --- what is claimed and charged ----------------------------------------------------------------------------------

STREAM = CorrelatedNoise(period=4)
FACTS = PublicFacts(n_silos=3, n_users=12, dimension=11)


def method_of(**changes: Any) -> Method:
    keys = {"local": LOCAL, "clip": 0.7, "noise_multiplier": 5.0, "correlated": STREAM, "rounds": 12}
    return uldp_avg_w(**{**keys, **changes})


def multiplier(charged: Event) -> float:
    event = split_grid_loss(charged)[0]
    assert isinstance(event, GaussianEvent)
    return event.noise_multiplier


def test_the_rounds_of_a_ledger_compose_to_the_stream_at_every_stop() -> None:
    guarantee = derive(method_of(), FACTS)
    channel: Any = method_of().channel
    spent = 0.0
    for number in range(1, 31):
        event = guarantee.event_at_round(guarantee.event, number)
        if split_grid_loss(event)[0] != ComposedEvent(events=()):
            spent += multiplier(event) ** -2
        squared = brute_force(channel.coefficients, number, 4) if number <= 10 else None
        squared = squared_sensitivity(channel.coefficients, 4, number) if squared is None else squared
        assert spent == pytest.approx(squared / 25, rel=1e-12)
        assert multiplier(guarantee.after_rounds(guarantee.event, number)) ** -2 == pytest.approx(
            spent, rel=1e-12
        )


def test_a_round_that_is_played_again_is_charged_as_one_more_participation() -> None:
    guarantee = derive(method_of(), FACTS)
    assert multiplier(guarantee.event_at_round(guarantee.event, 4, again=True)) == 5.0
    assert multiplier(guarantee.after_rounds(guarantee.event, 1, again=2)) == pytest.approx(5 / math.sqrt(3))


def test_independent_noise_on_a_schedule_is_parallel_composition() -> None:
    guarantee = derive(method_of(correlated=CorrelatedNoise(period=4, bands=1)), FACTS)
    charged = (guarantee.event_at_round(guarantee.event, number) for number in range(1, 7))
    events = [split_grid_loss(event)[0] for event in charged]
    assert [event == ComposedEvent(events=()) for event in events] == [False, True, True, True, False, True]
    assert multiplier(guarantee.after_rounds(guarantee.event, 6)) == pytest.approx(5 / math.sqrt(2))


def test_what_is_claimed_of_a_run_is_the_formula_written_down_again() -> None:
    """Readers: sigma / s_T. The server without masks: one share against all of a user in that silo."""
    z, rounds = 5.0, 12
    method = method_of(clip=AdaptiveClip(), noise_multiplier=z)
    guarantee = derive(replace(method, weights=Weights.MAIN, protection=SecureAggregation()), FACTS)
    code: Any = method.channel
    s = math.sqrt(3 * sum(c * c for c in code.coefficients))
    mu = s / z
    for role in (Role.READER, Role.SERVER):
        if not isinstance(guarantee.event_for(role), NoGuarantee):
            found = epsilon(guarantee.after_rounds(guarantee.event_for(role), rounds), 1e-5)
            assert found == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-9)
    uniform = derive(uldp_avg(local=LOCAL, clip=0.7, noise_multiplier=z, correlated=STREAM, rounds=12), FACTS)
    server = multiplier(uniform.after_rounds(uniform.event_for(Role.SERVER), rounds))
    assert server == pytest.approx(
        z / s, rel=1e-9
    )  # share / sqrt(S) over messages that move by C / sqrt(S) each
    assert uniform.event_for(Role.SILO) == derive(
        uldp_avg(local=LOCAL, clip=0.7, noise_multiplier=z), FACTS
    ).event_for(Role.SILO)


# --- one user moves the whole numbers that are sent by at most the claim ------------------------------------------


def sent(method: Method, records: Records, models: list[torch.Tensor], units: list[float]) -> np.ndarray:
    """What all silos together send in rounds that begin with these models, noise left out: (T, d)."""
    groups = records.by_silo_user()
    cohort = Cohort.from_records(
        records, groups=groups, n_silos=3, scale=Affine(), device=torch.device("cpu")
    )
    weights, past, found = method.weights.for_groups(groups, 3, 6), [], []
    for number, (start, unit) in enumerate(zip(models, units, strict=True), start=1):
        now = replace(method, bound=method.bound.measured_in(unit))
        turn = RoundContext(
            setting=TrainingSetup(
                method=now,
                trainer=VmapTrainer(task=TASK, local=LocalGradient()),
                cohort=cohort,
                weights=weights,
                n_users=6,
                shapes=(),
            ),
            model=start,
            round_number=number,
            experiment=ExperimentRandomness(1),
            privacy=PrivacyRandomness.insecure(1),
        )
        job = turn.sum_job(None)
        past = [turn.trainer.sums(job).with_clip_marks(job).total, *past][: memory_of(now.channel) + 1]
        found.append(sum(now.channel.encode_sums([one[silo].numpy() for one in past]) for silo in range(3)))
    return np.array(found)


@pytest.mark.parametrize("seed", [*slow_only([0, 3]), 1, 2])
def test_one_user_moves_what_is_sent_by_at_most_the_claim(seed: int) -> None:
    """Several silos, updates with NaN and of any length, any clip; the models are those that were released."""
    random, rounds = np.random.default_rng(seed), 7
    n, size = 24, [1.0, 3e38, 1e-3, 1.0][seed]
    records = Records(
        features=(random.uniform(-1, 1, (n, 2)) * size).astype(np.float32),
        targets=random.integers(0, 2, n),
        silo=random.integers(0, 3, n).astype(np.int32),
        user=np.sort(random.integers(0, 6, n)).astype(np.int32),
    )
    clip: Any = AdaptiveClip() if seed % 2 else 0.7
    power = 1.0 if seed < 2 else "main"
    method = method_of(clip=clip, power=power, rounds=rounds, correlated=CorrelatedNoise(period=3))
    models = [torch.from_numpy(random.normal(size=6).astype(np.float32)) for _ in range(rounds)]
    units = [float(np.exp(2 * random.normal())) for _ in range(rounds)]
    whole = sent(method, records, models, units)
    grid, channel = method.bound.grid / 64, method.channel
    assert isinstance(channel, CorrelatedShares)
    assert np.array_equal(whole / grid, np.trunc(whole / grid))
    most, found = squared_sensitivity(channel.coefficients, 3, rounds) * method.bound.norm**2, 0.0
    for user in np.unique(records.user):
        others = records.select(np.flatnonzero(records.user != user))
        moved = whole - sent(method, others, models, units)
        found = max(found, float((moved**2).sum()))
        at_round = (moved**2).sum(axis=1).cumsum()
        stops = [squared_sensitivity(channel.coefficients, 3, t + 1) for t in range(rounds)]
        assert (at_round <= np.array(stops) * method.bound.norm**2 * (1 + 1e-12)).all()
    assert 0.02 * most < found <= most


# --- runs ---------------------------------------------------------------------------------------------------------


def asked(**changes: Any) -> Experiment:
    method = {"correlated": {"period": 3}} | changes.pop("method", {})
    server = {"learning_rate": 1.0} | changes.pop("server", {})
    document = experiment(method=method, server=server, rounds=7, **changes).model_dump(
        mode="json", exclude_none=True
    )
    return parse(document | {"evaluate_every": 7}, "test")


RUNS: dict[str, dict[str, Any]] = {
    "open": {},
    "masked, main silo, clip that moves": {
        "method": {"clip": {"start": 0.05}, "power": "main"},
        "protection": {"name": "secure-aggregation"},
        "server": {"average": {"name": "ema", "beta": 0.8}},
    },
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_a_run_that_was_killed_ends_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    """What a silo sent before is trained again, from the models of the checkpoint."""
    if "clip" in changes.get("method", {}):
        changes = {**changes, "method": {**changes["method"], "clip": None} | changes["method"]}
    whole = run(prepare(asked(**changes)), tmp_path / "whole", Silent())
    for stop in (2, 5):
        at = tmp_path / f"cut-{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(prepare(asked(**changes)), at, Silent(interrupt_after=stop))
        again = resume(at / "try", Silent())
        assert same_model(files(whole.folder)[1], files(again.folder)[1])
        assert files(whole.folder)[0] == files(again.folder)[0]


def test_what_was_sent_before_is_in_no_file_of_the_run(tmp_path: Path) -> None:
    prepared = prepare(asked())
    kept: list[np.ndarray] = []
    keep = SumHistory.keep

    def watched(self: SumHistory, turn: RoundContext, sums: torch.Tensor) -> None:
        kept.append(sums.numpy())
        keep(self, turn, sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SumHistory, "keep", watched)
        done = run(prepared, tmp_path, Silent())
    written = b"".join(path.read_bytes() for path in done.folder.rglob("*") if path.is_file())
    assert len(kept) == 7
    for sums in kept:
        for row in sums:
            largest = row[np.argmax(np.abs(row))]
            assert np.float64(largest).tobytes() not in written
            assert np.float32(largest).tobytes() not in written


def test_without_noise_the_models_are_those_of_sums_that_are_not_encoded(tmp_path: Path) -> None:
    found = []
    for bands in (3, 1):
        method = {"noise_multiplier": 0.0, "correlated": {"period": 3, "bands": bands}}
        found.append(files(run(prepare(asked(method=method)), tmp_path / str(bands), Silent()).folder)[1])
    for name, value in found[0].items():
        np.testing.assert_allclose(value, found[1][name], rtol=1e-4, atol=1e-6)


def test_masks_change_no_bit_and_the_statement_is_the_stream_s(tmp_path: Path) -> None:
    secure = {"privacy": {"insecure_seed": None, "delta": 1e-5}}
    plain = run(prepare(asked(channel={"name": "additive", "word_bits": 16})), tmp_path / "open", Silent())
    masked = run(prepare(asked(protection={"name": "secure-aggregation"})), tmp_path / "masked", Silent())
    assert same_model(files(plain.folder)[1], files(masked.folder)[1])
    stated = run(prepare(asked(**secure)), tmp_path / "stated", Silent()).statement
    channel: Any = prepare(asked()).method.channel
    mu = math.sqrt(squared_sensitivity(channel.coefficients, 3, 7)) / 5.0
    assert stated.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)


def test_noise_is_calibrated_for_the_stream() -> None:
    method = {"noise_multiplier": "calibrated"}
    prepared = prepare(asked(method=method, privacy={"insecure_seed": None, "epsilon": 2.0}))
    channel: Any = prepared.method.channel
    s = math.sqrt(squared_sensitivity(channel.coefficients, 3, 7))
    assert gaussian_epsilon(s / channel.noise_multiplier, 1e-5) == pytest.approx(2.0, rel=1e-3)


def test_what_a_reader_decodes_has_the_noise_of_the_inverse() -> None:
    """Decoding is linear: fed with the code of a sum, it gives that sum; fed with noise, C^-1 of it."""
    code = (1.0, 0.5, 0.25)
    channel = CorrelatedShares(noise_multiplier=1.0, scale=1.0, coefficients=code, period=3)
    noise = np.random.default_rng(4).normal(size=(8, 5))
    state, found = channel.init(torch.zeros(4), 5), []
    for row in noise:
        decoded, state = channel.decode_sum(row, state, torch.zeros(4), 1.0)
        found.append(decoded)
    np.testing.assert_allclose(found, np.linalg.inv(encoder(code, 8)) @ noise, rtol=1e-12, atol=1e-12)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampler": PoissonUsers(rate=0.5)}, "nothing keeps their rounds apart"),
        ({"sampler": Everyone()}, "nothing keeps their rounds apart"),
        ({"sampler": Scheduled(period=3)}, "charges every round in full"),
        ({"protection": PrivateWeighting()}, "never let it see"),
        ({"protection": SecureAggregation(on_dropout="recover", max_dropouts=1)}, "max_dropouts must be 0"),
        ({"denoiser": Laplacian(smoothing=1.0)}, "correlated over rounds: remove the denoiser"),
        ({"noise_decay": 0.9}, "falls by a factor"),
        ({"contribution": SiloContribution(), "weights": Weights.ONE}, "pairs on a schedule"),
        ({"denominator": "actual"}, "public share of the users"),
    ],
)
def test_what_would_break_the_stream_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        replace(method_of(), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": {"correlated": {"period": 3, "bands": 4}}}, "a user's rounds overlap in what is sent"),
        ({"method": {"correlated": {"period": 0}}}, r"method\.correlated\.period: must be >= 1"),
        ({"method": {"user_sampling_rate": 0.5}}, "leave user_sampling_rate at 1"),
        ({"channel": {"name": "lrsuq"}}, "sums of several rounds in one"),
        ({"server": {"learning_rate": "by-rule"}}, "one size of the noise"),
    ],
)
def test_a_mistake_in_an_experiment_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises((CompositionError, ConfigError), match=reason):
        prepare(asked(**changes))


def test_gradients_take_a_stream_too() -> None:
    found = uldp_sgd_w(clip=1.0, noise_multiplier=5.0, correlated=CorrelatedNoise(period=2), rounds=20)
    assert found.sampler == Scheduled(period=2)
    assert len(found.channel.strengths) == 2
