"""Newton steps for linear models: the oracle, one user's reach, who is there, and a run through every layer."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

import fedveil as fv
from fedveil.data.records import Affine, Population, Records
from fedveil.data.schema import Schema
from fedveil.errors import CompositionError, ConfigError, ModelError
from fedveil.methods.central_gaussian import CentralGaussian
from fedveil.methods.derive import derive, sensitivity
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.newton import expected_length, newton
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_sgd
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.audit import canary_scores
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from fedveil.run.training_run import continue_run, run
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.newton import LinearFamily, LocalNewton
from fedveil.training.newton_steps import NewtonSteps
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.server.denoise import JamesStein
from fedveil.training.server.optimizers import ServerSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from tests.federation_world import World, asked, in_one_process, population
from tests.runs import Silent, files, same_model

INPUTS, SILOS = 4, 3
KINDS = {
    "logistic": ("binary_cross_entropy", 2, 1),
    "softmax": ("cross_entropy", 3, 3),
    "linear": ("squared_error", None, 1),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def family(kind: str, length: float = 1.7) -> LinearFamily:
    classes = KINDS[kind][1]
    return LinearFamily(
        inputs=INPUTS, classes=classes, record_length=length, residual=None if classes else 0.8
    )


def task(kind: str) -> Task:
    loss, _, outputs = KINDS[kind]
    model = build_model(
        "linear", input_shape=(INPUTS,), n_outputs=outputs, randomness=ExperimentRandomness(0)
    )
    return Task(model=model, loss=load_loss(loss))


def targets(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    classes = KINDS[kind][1]
    if classes is None:
        return (3 * rng.normal(size=n)).astype(np.float32)
    return rng.integers(0, classes, n)


def records(kind: str, n: int = 40, users: int = 6, seed: int = 0, scale: float = 2.0) -> Records:
    rng = np.random.default_rng(seed)
    return Records(
        features=(scale * rng.normal(size=(n, INPUTS))).astype(np.float32),
        targets=targets(kind, n, rng),
        silo=rng.integers(0, SILOS, n).astype(np.int32),
        user=rng.integers(0, users, n).astype(np.int32),
    )


def job_of(kind: str, held: Records, model: torch.Tensor, weights: Weights = Weights.UNIFORM) -> TrainJob:
    groups = held.by_silo_user()
    cohort = Cohort.from_records(
        held, groups=groups, n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )
    everybody = torch.arange(len(groups))
    found = weights.for_groups(groups, SILOS, 10)
    return TrainJob(model, cohort, everybody, found, Clip(norm=1.0), ExperimentRandomness(0), ("round", 1))


def sums(kind: str, held: Records, number: int, weights: Weights = Weights.UNIFORM) -> np.ndarray:
    """The sums of all silos in a round, at a model that is not zero."""
    described = task(kind)
    model = described.initial()
    trainer = RecordSumsTrainer(task=described, local=LocalNewton(family=family(kind))).at_round(number)
    return trainer.sums(job_of(kind, held, model, weights)).total.numpy()


def one_vector(kind: str, x: np.ndarray, y: Any, theta: np.ndarray, number: int) -> np.ndarray:
    """The oracle: the vector of one record, number by number."""
    bounds = family(kind)
    outputs, z = KINDS[kind][2], [*(float(one) for one in x), 1.0]
    length = math.sqrt(sum(one * one for one in z))
    weight = min(1.0, bounds.record_length / length) ** 2
    if number == 1:
        upper = []
        for i, first in enumerate(z):
            for j in range(i, len(z)):
                upper.append(
                    weight * first * z[j] * (1 if i == j else math.sqrt(2)) / bounds.record_length**2
                )
        return np.array([0.0] * (outputs * len(z)) + upper)
    slopes, intercepts = theta[: outputs * INPUTS].reshape(outputs, INPUTS), theta[outputs * INPUTS :]
    f = [
        sum(float(w) * one for w, one in zip(slopes[k], x, strict=True)) + intercepts[k]
        for k in range(outputs)
    ]
    if kind == "logistic":
        residual = [float(y) - 1 / (1 + math.exp(-f[0]))]
    elif kind == "softmax":
        whole = sum(math.exp(one) for one in f)
        residual = [(1.0 if y == k else 0.0) - math.exp(one) / whole for k, one in enumerate(f)]
    else:
        residual = [float(y) - f[0]]
    bound = bounds.residual_norm(outputs)
    short = min(1.0, bound / math.sqrt(sum(one * one for one in residual)))
    pulled = [weight * short * one / (bounds.record_length * bound) for one in residual]
    moments = [0.0] * (len(z) * (len(z) + 1) // 2)
    return np.array([r * one for r in pulled for one in x] + pulled + moments)


@every_kind
@pytest.mark.parametrize("number", [1, 2])
def test_sums_are_those_of_the_plain_loop(kind: str, number: int) -> None:
    held, theta = records(kind), task(kind).initial().double().numpy()
    expected = np.zeros((SILOS, LocalNewton(family=family(kind)).message_length(len(theta))))
    groups = held.by_silo_user()
    for pair in range(len(groups)):
        own = groups.members(pair)
        vectors = [one_vector(kind, held.features[i], held.targets[i], theta, number) for i in own]
        expected[groups.silo[pair]] += np.mean(vectors, axis=0) / SILOS
    # A contribution is cut to the grid of Clip(1): 2^-18 a coordinate.
    assert np.abs(sums(kind, held, number) - expected).max() < len(groups) * 2.0**-17


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    number=st.sampled_from([1, 2, 7]),
    scale=st.sampled_from([1e-30, 0.01, 1.0, 50.0, 1e18]),
    seed=st.integers(0, 10**6),
    weights=st.sampled_from([Weights.UNIFORM, Weights.EQUAL, Weights.BY_RECORDS, Weights.MAIN]),
    alike=st.booleans(),
)
def test_a_user_in_every_silo_moves_a_sum_by_1_at_most(
    kind: str, number: int, scale: float, seed: int, weights: Weights, alike: bool
) -> None:
    """One user has most records, in every silo, duplicates included, of any size; the rest of the sum stays."""
    rng = np.random.default_rng(seed)
    held = records(kind, n=30, users=4, seed=seed)
    mine = rng.random(30) < 0.7
    features = np.where(mine[:, None], held.features * np.float32(scale), held.features)
    if alike:
        features[mine] = features[mine][:1] if mine.any() else features[mine]
    held = replace(held, features=features, user=np.where(mine, 9, held.user).astype(np.int32))
    rest = held.select(np.flatnonzero(~mine))
    moved = sums(kind, held, number, weights).sum(axis=0) - sums(kind, rest, number, weights).sum(axis=0)
    assert np.linalg.norm(moved) <= 1.0


@every_kind
@pytest.mark.parametrize("number", [1, 2])
def test_the_longest_records_reach_the_bound(kind: str, number: int) -> None:
    """Noise is not larger than one user needs: a record that the model gets wrong moves the sum by almost 1."""
    held = records(kind, n=1, users=1)
    wrong = held.targets if KINDS[kind][1] is None else held.targets * 0 + (KINDS[kind][1] or 0) - 1
    held = replace(
        held,
        features=np.full((1, INPUTS), -math.sqrt((1.7**2 - 1) / INPUTS), dtype=np.float32),
        targets=wrong,
    )
    if KINDS[kind][1] is None:
        held = replace(held, targets=np.full(1, 1e6, dtype=np.float32))
    assert np.linalg.norm(sums(kind, held, number, Weights.MAIN)) > (0.5 if kind == "softmax" else 0.999)


@every_kind
@pytest.mark.parametrize("number", [1, 2])
def test_a_contribution_is_the_same_whoever_else_is_there(kind: str, number: int) -> None:
    held = records(kind, n=300, users=60)
    rest = held.select(np.flatnonzero(held.user != 7))
    alone = held.select(np.flatnonzero(held.user == 7))
    whole = sums(kind, held, number)
    assert np.array_equal(whole, sums(kind, rest, number) + sums(kind, alone, number))


def test_a_contribution_of_many_records_is_summed_in_blocks_of_its_own() -> None:
    held = replace(records("logistic", n=5000, users=1), silo=np.zeros(5000, dtype=np.int32))
    wide = np.repeat(held.features, 1, axis=1)
    held = replace(held, features=wide)
    few = records("logistic", n=50, users=1)
    shifted = replace(few, user=(few.user + 1).astype(np.int32))
    both = Records(
        **{
            name: np.concatenate([getattr(held, name), getattr(shifted, name)])
            for name in ("features", "targets", "silo", "user")
        }
    )
    for number in (1, 2):
        assert np.array_equal(
            sums("logistic", both, number), sums("logistic", held, number) + sums("logistic", shifted, number)
        )


def test_a_record_that_is_not_finite_takes_its_contribution_out() -> None:
    held = records("linear")
    wrong = held.targets.copy()
    wrong[held.user == 2] = np.inf
    rest = held.select(np.flatnonzero(held.user != 2))
    object.__setattr__(held, "targets", wrong)  # Records refuse it
    assert np.array_equal(sums("linear", held, 2), sums("linear", rest, 2))


@every_kind
def test_the_servers_step_is_that_of_the_formula(kind: str) -> None:
    bounds, d = family(kind), task(kind).dimension
    outputs, width = KINDS[kind][2], INPUTS + 1
    rng = np.random.default_rng(3)
    server = NewtonSteps(family=bounds, ridge=0.7).at_noise(0.01)
    length = d + width * (width + 1) // 2
    first, second = rng.normal(size=length), rng.normal(size=length)
    zero, state = server.step(torch.ones(d), torch.from_numpy(first), server.init(torch.ones(d)))
    assert not zero.any()
    theta = rng.normal(size=d).astype(np.float32)
    after, _ = server.step(torch.from_numpy(theta), torch.from_numpy(second), state)
    moments = np.zeros((width, width))
    place = d
    for i in range(width):
        for j in range(i, width):
            moments[i, j] = moments[j, i] = (
                first[place] * bounds.record_length**2 / (1 if i == j else math.sqrt(2))
            )
            place += 1
    values, vectors = np.linalg.eigh(moments)
    slope, norm = bounds.slope(outputs), bounds.record_length * bounds.residual_norm(outputs)
    floor = 0.7 * (slope * 0.01 * bounds.record_length**2 * math.sqrt(width) + 0.01 * norm)
    inverse = vectors @ np.diag(1 / np.maximum(slope * values, floor)) @ vectors.T
    for k in range(outputs):
        places = [*range(k * INPUTS, (k + 1) * INPUTS), outputs * INPUTS + k]
        expected = theta[places] + inverse @ (second[places] * norm)
        assert after.numpy()[places] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def people(n: int = 400, seed: int = 2, **changes: Any) -> Population:
    rng = np.random.default_rng(seed)
    features = rng.uniform(-1, 1, size=(n, 3)).astype(np.float32)
    score = features @ np.array([2.0, -1.0, 0.5]) + 0.3
    given: dict[str, Any] = {
        "user": np.arange(n) % 150,
        "silo": rng.integers(0, SILOS, n),
        "n_users": 150,
        "silos": [0, 1, 2],
        "task": "classification",
        "classes": [0, 1],
    } | changes
    labels = (rng.random(n) < 1 / (1 + np.exp(-score))).astype(int)
    return fv.population(features, given.pop("targets", labels), **given)


def test_without_noise_the_steps_end_at_the_regression(tmp_path: Path) -> None:
    """Residuals are not cut and users weigh 1 each, so that weighted logistic regression is the solution."""
    held = people()
    free = fv.newton(noise_multiplier=0.0, record_length=3.0, residual=2.0)
    found = fv.train(
        "linear",
        held,
        method=free,
        rounds=30,
        folder=tmp_path,
        settings={"server": {"average": {"name": "last"}}},
    )
    groups, users = held.train.by_silo_user(), held.train
    weights = Weights.MAIN.for_population(groups, held).numpy()
    of_record = np.zeros(len(users))
    for pair in range(len(groups)):
        of_record[groups.members(pair)] = weights[pair] / groups.size[pair]
    exact = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(
        users.features, users.targets, sample_weight=of_record
    )
    layer = next(one for one in found.model.modules() if isinstance(one, torch.nn.Linear))
    # Two outputs: the log-odds are their difference.
    slopes, intercepts = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    assert slopes[1] - slopes[0] == pytest.approx(exact.coef_[0], abs=2e-3)
    assert intercepts[1] - intercepts[0] == pytest.approx(exact.intercept_[0], abs=2e-3)


def test_the_guarantee_is_that_of_a_gaussian_sum() -> None:
    facts = PublicFacts(n_silos=SILOS, n_users=150, dimension=14)
    method = newton(inputs=3, classes=2, schema=None, target_range=None, noise_multiplier=2.0, power=0.0)
    guarantee = derive(method, facts)
    assert sensitivity(method, facts) == 1.0
    assert guarantee.event == GaussianEvent(noise_multiplier=2.0)
    uniform = replace(method, weights=Weights.UNIFORM, protection=SecureAggregation())
    assert derive(uniform, facts).event_for(Role.SERVER) == GaussianEvent(noise_multiplier=2.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"denoiser": JamesStein()}, "a denoiser estimates a mean update"),
        ({"server": ServerSgd(1.0)}, "ServerSgd steps by the mean of updates"),
        ({"protection": PartialEncryption(ratio=0.5)}, "partial encryption divides an update"),
        ({"channel": CentralGaussian(noise_multiplier=1.0, scale=1.0), "noise_decay": 0.5}, "noise_decay"),
    ],
)
def test_stages_of_updates_are_refused(changes: dict[str, Any], reason: str) -> None:
    method = newton(inputs=3, classes=2, schema=None, target_range=None, noise_multiplier=2.0)
    with pytest.raises(CompositionError, match=reason):
        replace(method, **changes)


def test_newton_steps_of_updates_are_refused() -> None:
    method = newton(inputs=3, classes=2, schema=None, target_range=None, noise_multiplier=2.0)
    updates = uldp_sgd(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(CompositionError, match="steps by the mean of scores and curvatures"):
        replace(updates, server=method.server)


@pytest.mark.parametrize(
    ("model", "more", "error", "reason"),
    [
        ("mlp", {}, ModelError, "one linear layer"),
        (torch.nn.Linear(3, 1, bias=False), {}, ModelError, "with an intercept"),
        ("linear", {"loss": "focal"}, ModelError, "focal has no Newton step"),
        ("linear", {"server": fv.Sgd(1.0)}, CompositionError, "ServerSgd steps by the mean of updates"),
        ("linear", {"settings": {"trainer": {"processes": 2}}}, ConfigError, "processes"),
    ],
)
def test_what_newton_cannot_train_is_refused_before_a_charge(
    model: Any, more: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        fv.train(model, people(), method=fv.newton(), epsilon=2, rounds=3, folder=tmp_path, **more)
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_a_number_to_predict_needs_a_public_bound(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers: dict[str, Any] = {"task": "regression", "classes": None, "targets": rng.uniform(0, 8, 400)}
    with pytest.raises(ConfigError, match="newton: the residuals of a number to predict need a public bound"):
        fv.train("linear", people(**numbers), method=fv.newton(), epsilon=2, rounds=3, folder=tmp_path)
    declared = people(**numbers, target_range=(0.0, 8.0))
    found = fv.train("linear", declared, method=fv.newton(), epsilon=20, rounds=8, folder=tmp_path)
    assert found.predict(np.zeros((1, 3), dtype=np.float32))[0] == pytest.approx(4.0, abs=1.0)


def test_the_length_of_a_record_follows_from_the_schema() -> None:
    schema = Schema.model_validate(
        {
            "n_users": 10,
            "user": "id",
            "target": {"kind": "label", "column": "y", "classes": ["0", "1"]},
            "features": {
                "age": {"kind": "number", "lower": 0, "upper": 100, "missing": "indicator"},
                "sex": {"kind": "category", "categories": ["f", "m"]},
                "ward": {"kind": "category", "categories": ["a", "b", "c"]},
            },
        }
    )
    assert expected_length(schema, schema.width) == pytest.approx(math.sqrt(1 + 2 + 1 / 3))
    assert expected_length(None, 6) == pytest.approx(math.sqrt(3))


def newton_of(**changes: Any) -> Any:
    method = {"name": "newton", "clip": None, "noise_multiplier": 3.0, "power": 1.0}
    return asked(**{"local": None, "method": method, **changes})


@pytest.mark.parametrize("protection", ["none", "secure-aggregation"])
def test_between_institutions_it_is_the_run_in_one_process(protection: str, tmp_path: Path) -> None:
    world = World(tmp_path, newton_of(protection={"name": protection}), population())
    world.play()
    world.assert_as_in_one_process()


def test_masks_change_no_bit_and_a_resumed_run_neither(tmp_path: Path) -> None:
    held = population()
    plain = in_one_process(newton_of(), held, tmp_path / "plain")
    masked = in_one_process(newton_of(protection={"name": "secure-aggregation"}), held, tmp_path / "masked")
    with pytest.raises(KeyboardInterrupt):
        run(prepare(newton_of(), FixedPopulation(held)), tmp_path / "stopped", Silent(interrupt_after=2))
    stopped = next((tmp_path / "stopped").iterdir())
    continue_run(RunFolder.open(stopped)[0], prepare(newton_of(), FixedPopulation(held)), Silent())
    assert same_model(files(plain)[1], files(masked)[1])
    assert same_model(files(plain)[1], files(stopped)[1])
    assert files(plain)[0] == files(stopped)[0]


def test_private_weights_give_the_model_of_open_weights_nearly(tmp_path: Path) -> None:
    held = population()
    hidden = prepare(newton_of(protection={"name": "private-weighting", "n_max": 20}), FixedPopulation(held))
    assert hidden.length == 4 + 10


def test_an_audit_attacks_the_released_sums(tmp_path: Path) -> None:
    """Without noise the attack tells who is in; with the noise of a small epsilon it does not."""
    held = population(users=6)
    scores = {}
    for noise in (1e-3, 100.0):
        method = {
            "name": "newton",
            "clip": None,
            "noise_multiplier": noise,
            "power": 1.0,
        }
        prepared = prepare(asked(local=None, method=method), FixedPopulation(held))
        coins, found = canary_scores(prepared, 6, PrivacyRandomness(5), 4)
        scores[noise] = found[coins].mean() - found[~coins].mean() if 0 < coins.sum() < 6 else math.nan
    assert scores[1e-3] > 0.1
    assert abs(scores[100.0]) < 0.01


def test_more_budget_gives_a_better_model(tmp_path: Path) -> None:
    test = people(seed=9, n=1000)
    found = []
    for epsilon in (0.05, 8.0):
        trained = fv.train(
            "linear",
            people(n=1200),
            method=fv.newton(),
            epsilon=epsilon,
            rounds=10,
            folder=tmp_path,
            name=f"e{epsilon:g}".replace(".", "-"),
            settings={"privacy": {"insecure_seed": 3}},
        )
        right = trained.predict(test.train.features) == test.train.targets
        found.append(right.mean())
    assert all(one < other for one, other in pairwise(found))
