"""Newton steps for linear models: the oracle, one user's reach, who is there, and a run through every layer."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

import fedveil as fv
from fedveil.bundle.export import export_onnx, export_torch
from fedveil.bundle.manifest import BundleError
from fedveil.data.records import Affine, Population, Records
from fedveil.data.schema import Schema
from fedveil.errors import CompositionError, ConfigError, FedveilError, ModelError
from fedveil.methods.derive import derive, sensitivity
from fedveil.methods.dp_fed_ls import CentralGaussian
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
from fedveil.sklearn import CoxRegressor, Regressor
from fedveil.training.losses import load_loss
from fedveil.training.newton import (
    CountFamily,
    HazardFamily,
    LinearFamily,
    LocalNewton,
    NewtonSteps,
    WhitenedLinear,
    whitening,
)
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.server.denoise import JamesStein
from fedveil.training.server.optimizers import ServerSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from tests.federation_world import TESTING, World, asked, in_one_process, population
from tests.runs import Silent, files, same_model

INPUTS, SILOS = 4, 3
KINDS = {
    "logistic": ("binary_cross_entropy", 2, 1),
    "softmax": ("cross_entropy", 3, 3),
    "linear": ("squared_error", None, 1),
    "counts": ("poisson", None, 1),
    "survival": ("cox", None, 1),
}
CAP, HORIZON = 6, 4.0
every_kind = pytest.mark.parametrize("kind", KINDS)


def family(kind: str, length: float = 1.7) -> LinearFamily:
    classes = KINDS[kind][1]
    if kind == "counts":
        return CountFamily(inputs=INPUTS, record_length=length, center=0.2, cap=CAP)
    if kind == "survival":
        return HazardFamily(inputs=INPUTS, record_length=length, center=-1.5, horizon=HORIZON, rate=0.2)
    return LinearFamily(
        inputs=INPUTS, classes=classes, record_length=length, residual=None if classes else 0.8
    )


def task(kind: str) -> Task:
    loss, _, outputs = KINDS[kind]
    model = family(kind).model(INPUTS, outputs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.5, generator=generator)
    return Task(model=model, loss=load_loss(loss))


def targets(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    classes = KINDS[kind][1]
    if kind == "counts":
        return rng.poisson(3.0, size=n).astype(np.float32)
    if kind == "survival":
        events = rng.random(n) < 0.6
        return np.stack((events, rng.exponential(3.0, size=n)), axis=1).astype(np.float32)
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


def sums(
    kind: str,
    held: Records,
    number: int,
    weights: Weights = Weights.UNIFORM,
    start: torch.Tensor | None = None,
) -> np.ndarray:
    """The sums of all silos in a round, in a basis and at coefficients that are not those of the start."""
    described = task(kind)
    model = described.initial() if start is None else start
    trainer = RecordSumsTrainer(task=described, local=LocalNewton(family=family(kind))).at_round(number)
    return trainer.sums(job_of(kind, held, model, weights)).total.numpy()


def followed_by_hand(y: Any, log_hazards: list[float]) -> tuple[list[float], list[float]]:
    """The event of one record by interval, and the hazard through which it is followed until that adds up to 0.6."""
    happened, time = float(y[0]), float(y[1])
    events, followed, whole = [0.0] * 4, [0.0] * 4, 0.0
    for j, log_hazard in enumerate(log_hazards):
        begin, end = HORIZON * j / 4, HORIZON * (j + 1) / 4
        hazard = max(0.0, min(time, end) - begin) * math.exp(min(max(log_hazard, -30.0), 30.0))
        followed[j] = min(hazard, max(0.0, 0.6 - whole))
        whole += hazard
    if happened and time <= HORIZON and whole <= 0.6:
        events[max(0, math.ceil(time / (HORIZON / 4)) - 1)] = 1.0
    return events, followed


def one_vector(kind: str, x: np.ndarray, y: Any, theta: np.ndarray, number: int) -> np.ndarray:
    """The oracle: the vector of one record, number by number."""
    bounds = family(kind)
    outputs, width, extended = KINDS[kind][2], INPUTS + 1, [*(float(one) for one in x), 1.0]
    z = [sum(theta[i * width + j] * extended[j] for j in range(width)) for i in range(width)]
    longest = bounds.record_length if number == 1 else 1.0
    weight = min(1.0, longest / math.sqrt(sum(one * one for one in z))) ** 2
    if number <= 2:
        upper = []
        for i, first in enumerate(z):
            for j in range(i, len(z)):
                upper.append(weight * first * z[j] * (1 if i == j else math.sqrt(2)) / longest**2)
        return np.array([0.0] * (outputs * len(z) + (8 if kind == "survival" else 0)) + upper)
    after = width * (width + outputs)
    slopes = theta[width * width : after].reshape(outputs, width)
    f = [sum(float(w) * one for w, one in zip(slopes[k], z, strict=True)) for k in range(outputs)]
    moments = [0.0] * (len(z) * (len(z) + 1) // 2)
    if kind == "survival":
        events, followed = followed_by_hand(y, [f[0] + float(one) for one in theta[after:]])
        pull = sum(events) - sum(followed)
        scores = [*(pull * one for one in z), *(0.5 * one for one in [*events, *followed])]
        return np.array([weight * one / math.sqrt(1.25) for one in scores] + moments)
    if kind == "counts":
        mean = math.exp(f[0])
        law = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(CAP)]
        expected = sum(k * one for k, one in enumerate(law)) + CAP * (1 - sum(law))
        residual = [min(float(y), CAP) - expected]
    elif kind == "logistic":
        residual = [float(y) - 1 / (1 + math.exp(-f[0]))]
    elif kind == "softmax":
        whole = sum(math.exp(one) for one in f)
        residual = [(1.0 if y == k else 0.0) - math.exp(one) / whole for k, one in enumerate(f)]
    else:
        residual = [float(y) - f[0]]
    bound = bounds.residual_norm(outputs)
    short = min(1.0, bound / max(math.sqrt(sum(one * one for one in residual)), 1e-300))
    pulled = [weight * short * one / bound for one in residual]
    return np.array([r * one for r in pulled for one in z] + moments)


@every_kind
@pytest.mark.parametrize("number", [1, 2, 3])
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
    number=st.sampled_from([1, 2, 3, 7]),
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
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_longest_records_reach_the_bound(kind: str, number: int) -> None:
    """Noise is not larger than one user needs: a record as long as B, at the start, moves the sum by almost 1."""
    held, outputs, width = records(kind, n=1, users=1), KINDS[kind][2], INPUTS + 1
    longest = 1.7 if number == 1 else 1.0
    x = math.sqrt(((longest / 0.4) ** 2 - 1) / INPUTS)
    held = replace(held, features=np.full((1, INPUTS), x, dtype=np.float32))
    slopes = torch.zeros(outputs * width)
    if kind == "survival":
        # An event after almost no hazard.
        held = replace(held, targets=np.array([[1, 1e-6]], dtype=np.float32))
    elif KINDS[kind][1] is None:
        held = replace(held, targets=np.full(1, 1e6, dtype=np.float32))
    if kind == "counts":
        slopes[-1] = -20.0 / 0.4  # the mean is 0
    start = torch.cat((0.4 * torch.eye(width).flatten(), slopes, torch.zeros(family(kind).baseline)))
    assert np.linalg.norm(sums(kind, held, number, Weights.MAIN, start)) > 0.999


@every_kind
@pytest.mark.parametrize("number", [1, 2, 3])
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
    for number in (1, 2, 3):
        assert np.array_equal(
            sums("logistic", both, number), sums("logistic", held, number) + sums("logistic", shifted, number)
        )


def test_a_record_that_is_not_finite_takes_its_contribution_out() -> None:
    held = records("linear")
    wrong = held.targets.copy()
    wrong[held.user == 2] = np.inf
    rest = held.select(np.flatnonzero(held.user != 2))
    object.__setattr__(held, "targets", wrong)  # Records refuse it
    assert np.array_equal(sums("linear", held, 3), sums("linear", rest, 3))


def test_a_basis_makes_second_moments_equal_where_they_exceed_the_noise() -> None:
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    moments = rotation @ np.diag([2.0, 0.5, 1e-3]) @ rotation.T
    found, squared = whitening(moments, 0.1)
    floor = 0.1 * math.sqrt(3)
    inside = np.linalg.eigvalsh(found @ moments @ found.T) * squared
    assert sorted(inside) == pytest.approx([1e-3 / floor, 1.0, 1.0])
    # The mean square of a length is the trace; 1.3 of its root is 1 in the basis.
    assert np.trace(found @ moments @ found.T) == pytest.approx(1 / 1.3**2)
    # Noise alone may be released, too, and then no direction has a length that records cannot have.
    nothing, least = whitening(np.diag([-1.0, -2.0, -3.0]), 0.1)
    assert nothing == pytest.approx(np.eye(3) / math.sqrt(floor * least))
    assert least == pytest.approx(1.3**2 * 0.1)
    assert np.isfinite(whitening(np.zeros((3, 3)), 0.0)[0]).all()


@every_kind
def test_the_servers_step_is_that_of_the_formula(kind: str) -> None:
    bounds, d = replace(family(kind), center=0.7), task(kind).dimension
    outputs, width = KINDS[kind][2], INPUTS + 1
    rng = np.random.default_rng(3)
    server = NewtonSteps(family=bounds, ridge=0.7).at_noise(0.01)
    basis = rng.normal(size=(width, width))
    baseline = bounds.baseline
    start = rng.normal(size=outputs * width + baseline)
    start = np.concatenate((basis.ravel(), start)).astype(np.float32)
    x = rng.normal(size=(6, width - 1)).astype(np.float32)
    model, state = torch.from_numpy(start), server.init(torch.from_numpy(start))
    squared = math.nan
    for number in (1, 2):
        released = rng.normal(size=outputs * width + 2 * baseline + width * (width + 1) // 2)
        longest = bounds.record_length if number == 1 else 1.0
        moments = np.zeros((width, width))
        place = outputs * width + 2 * baseline
        for i in range(width):
            for j in range(i, width):
                entry = released[place] * longest**2 / (1 if i == j else math.sqrt(2))
                moments[i, j] = moments[j, i] = entry
                place += 1
        moved, squared = whitening(moments, 0.01 * longest**2)
        expected = moved @ model[: width * width].numpy().reshape(width, width)
        model, state = server.step(model, torch.from_numpy(released), state)
        assert model[: width * width].numpy().reshape(width, width) == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        )
        shown = task(kind).model
        torch.nn.utils.vector_to_parameters(model, shown.parameters())
        found = shown(torch.from_numpy(x)).detach().numpy()
        assert found == pytest.approx(math.exp(0.7) if kind == "counts" else 0.7, abs=2e-3)
        assert not model[len(model) - baseline :].any()
    released = rng.normal(size=len(released)) * 0.1
    after, _ = server.step(model, torch.from_numpy(released), state)
    slope, norm = bounds.slope(outputs), bounds.residual_norm(outputs)
    scale = math.sqrt(1.25) if kind == "survival" else norm
    rate = 1 / max(slope / squared, 2 * 0.7 * slope * 0.01 * scale / norm)
    moves = (after - model).numpy()
    assert not moves[: width * width].any()
    assert moves[width * width : len(moves) - baseline] == pytest.approx(
        released[: outputs * width] * scale * rate, rel=1e-3, abs=1e-4
    )
    if baseline:
        floor = 2 * 0.01 * scale / 0.5 + 1e-9
        events, followed = np.maximum(released[outputs * width :][:8].reshape(2, 4) * scale / 0.5, 0) + floor
        logs = [math.log(e / h) for e, h in zip(events, followed, strict=True)]
        level = sum(h * one for h, one in zip(followed, logs, strict=True)) / sum(followed)
        assert moves[-4:] == pytest.approx([min(max(one - level, -1), 1) for one in logs], abs=1e-5)
    assert d == len(after)


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
        "whitened-linear",
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
    # A record longer than B = 1 in the basis weighs less, whatever its label.
    basis = found.model.basis.detach().double().numpy()
    z = np.concatenate((users.features, np.ones((len(users), 1))), axis=1) @ basis.T
    of_record *= np.minimum(1.0, 1 / (z * z).sum(axis=1))
    exact = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(
        users.features, users.targets, sample_weight=of_record
    )
    slopes, intercepts = (one.detach().numpy() for one in found.model.coefficients())
    # Two outputs: the log-odds are their difference.
    assert slopes[1] - slopes[0] == pytest.approx(exact.coef_[0], abs=2e-3)
    assert intercepts[1] - intercepts[0] == pytest.approx(exact.intercept_[0], abs=2e-3)


def composed(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "inputs": 3,
        "classes": 2,
        "task": "classification",
        "schema": None,
        "target_range": None,
        "noise_multiplier": 2.0,
    }
    return newton(**given | changes)


def test_the_guarantee_is_that_of_a_gaussian_sum() -> None:
    facts = PublicFacts(n_silos=SILOS, n_users=150, dimension=14)
    method = newton(
        inputs=3,
        classes=2,
        task="classification",
        schema=None,
        target_range=None,
        noise_multiplier=2.0,
        power=0.0,
    )
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
    method = composed()
    with pytest.raises(CompositionError, match=reason):
        replace(method, **changes)


def test_newton_steps_of_updates_are_refused() -> None:
    method = composed()
    updates = uldp_sgd(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(CompositionError, match="steps by the mean of scores and curvatures"):
        replace(updates, server=method.server)


@pytest.mark.parametrize(
    ("model", "more", "error", "reason"),
    [
        ("mlp", {}, ModelError, "whitened-linear"),
        (torch.nn.Linear(3, 1), {}, ModelError, "whitened-linear"),
        (WhitenedLinear(4, 1), {}, ModelError, "shape|whitened-linear|features"),
        ("whitened-linear", {"loss": "focal"}, ModelError, "loss focal; it takes its own form"),
        (
            "whitened-linear",
            {"server": fv.Sgd(1.0)},
            CompositionError,
            "ServerSgd steps by the mean of updates",
        ),
        ("whitened-linear", {"settings": {"trainer": {"processes": 2}}}, ConfigError, "processes"),
    ],
)
def test_what_newton_cannot_train_is_refused_before_a_charge(
    model: Any, more: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        fv.train(model, people(), method=fv.newton(), epsilon=2, rounds=3, folder=tmp_path, **more)
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_another_model_is_refused_before_noise_is_found_for_it(tmp_path: Path) -> None:
    """No noise reaches this epsilon: whoever looked for it first would say so instead."""
    for model, reason in (("whitened-linear", "epsilon"), ("mlp", "whitened-linear")):
        with pytest.raises(FedveilError, match=reason):
            fv.train(model, people(), method=fv.newton(), epsilon=1e-9, rounds=3, folder=tmp_path)


def test_a_number_to_predict_needs_a_public_bound(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers: dict[str, Any] = {"task": "regression", "classes": None, "targets": rng.uniform(0, 8, 400)}
    with pytest.raises(ConfigError, match="newton: the residuals of a number to predict need a public bound"):
        fv.train(
            "whitened-linear", people(**numbers), method=fv.newton(), epsilon=2, rounds=3, folder=tmp_path
        )
    declared = people(**numbers, target_range=(0.0, 8.0))
    found = fv.train("whitened-linear", declared, method=fv.newton(), epsilon=20, rounds=8, folder=tmp_path)
    assert found.predict(np.zeros((1, 3), dtype=np.float32))[0] == pytest.approx(4.0, abs=1.0)


def test_a_mean_far_from_the_middle_of_the_range_is_reached(tmp_path: Path) -> None:
    """The models of the first three rounds, still near the middle, would keep 8 % of their weight in the average."""
    random = np.random.default_rng(0)
    inputs, n_users = random.uniform(-1, 1, (1000, 3)), 1000
    counts = np.minimum(random.poisson(2.0, n_users), 20).astype(float)
    ids = [f"u{number}" for number in range(n_users)]
    people = fv.population(
        inputs,
        counts,
        user=ids,
        silo=["a", "b"] * (n_users // 2),
        n_users=n_users,
        task="regression",
        target_range=(0.0, 20.0),
        test=(inputs + 1e-3, counts),
    )
    result = fv.train(
        "whitened-linear",
        people,
        method=fv.newton(),
        rounds=12,
        epsilon=8,
        metrics=["mae"],
        folder=tmp_path,
    )
    predicted = result.model(torch.from_numpy(inputs).float()).detach().numpy()
    assert abs(float(predicted.mean()) - float(counts.mean())) < 0.3


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


OTHERS = {
    "counts": ("whitened-rates", "poisson", {"cap": 8}),
    "survival": ("whitened-hazards", "cox", {"horizon": 4.0}),
}
every_other = pytest.mark.parametrize("kind", OTHERS)


class StopAfter(fv.Callback):
    """Interrupt a run after a round, as a user would."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        if round.number == self.number:
            raise KeyboardInterrupt
        return None


def others(kind: str, n: int = 600, seed: int = 2) -> Population:
    """Return people whose mean count, or whose hazard, is e^score."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(-1, 1, size=(n, 3)).astype(np.float32)
    score = features @ np.array([1.0, -0.5, 0.2]) - (0.0 if kind == "counts" else 1.5)
    if kind == "counts":
        targets = rng.poisson(np.exp(score)).astype(np.float32)
    else:
        time, end = rng.exponential(np.exp(-score)) + 1e-3, rng.uniform(1, 4, size=n)
        targets = np.stack((time < end, np.minimum(time, end)), axis=1).astype(np.float32)
    return fv.population(
        features,
        targets,
        user=np.arange(n),
        silo=rng.integers(0, SILOS, n),
        n_users=n,
        silos=[0, 1, 2],
        task="regression" if kind == "counts" else "survival",
    )


@every_other
def test_without_noise_counts_and_survival_end_at_their_regression(kind: str, tmp_path: Path) -> None:
    held, (model, loss, keys) = others(kind), OTHERS[kind]
    found = fv.train(
        model,
        held,
        method=fv.newton(noise_multiplier=0.0, record_length=3.0, **keys),
        rounds=60,
        loss=loss,
        folder=tmp_path,
        settings={"server": {"average": {"name": "last"}}},
    )
    law = found.model
    method = composed(task=held.task, classes=None, **keys)
    theta = torch.nn.utils.parameters_to_vector(law.parameters()).detach()
    # The estimating equation, from which a step without noise moves no more.
    trainer = RecordSumsTrainer(task=Task(model=law, loss=load_loss(loss)), local=method.local).at_round(3)
    groups = held.train.by_silo_user()
    cohort = Cohort.from_records(
        held.train, groups=groups, n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )
    weights = Weights.MAIN.for_groups(groups, SILOS, 600)
    job = TrainJob(
        theta,
        cohort,
        torch.arange(len(groups)),
        weights,
        Clip(norm=1.0),
        ExperimentRandomness(0),
        ("round", 3),
    )
    score = trainer.sums(job).total.numpy().sum(axis=0)[:4]
    assert np.abs(score).max() < 2e-3 * len(groups)
    slopes = law.coefficients()[0].detach().numpy()[0]
    assert slopes == pytest.approx([1.0, -0.5, 0.2], abs=0.3)
    shown = found.predict(np.zeros((1, 3), dtype=np.float32))
    assert shown == pytest.approx(1.0 if kind == "counts" else -1.5, abs=0.3)


def test_estimators_of_survival_and_of_counts_take_newton(tmp_path: Path) -> None:
    held = others("survival").train
    cox = CoxRegressor(
        "whitened-hazards",
        epsilon=8.0,
        n_users=600,
        method=fv.newton(horizon=4.0),
        rounds=12,
        folder=tmp_path,
        settings={"privacy": {"insecure_seed": 3}},
    )
    cox.fit(held.features, held.targets, user=held.user, silo=held.silo)
    assert cox.score(held.features, held.targets) > 0.65
    held = others("counts").train
    counts = Regressor(
        "whitened-rates",
        loss="poisson",
        epsilon=8.0,
        n_users=600,
        method=fv.newton(cap=6),
        rounds=24,
        folder=tmp_path,
        settings={"privacy": {"insecure_seed": 3}},
    )
    found = counts.fit(held.features, held.targets, user=held.user + 1000, silo=held.silo).predict(
        held.features
    )
    assert (found > 0).all()
    assert np.corrcoef(found, held.targets)[0, 1] > 0.3


@every_other
def test_counts_and_survival_pass_masks_and_institutions(kind: str, tmp_path: Path) -> None:
    model, loss, keys = OTHERS[kind]
    policy = TESTING.model_copy(update={"models": (model,)})
    held, made = population(), others(kind)
    held = replace(
        held,
        train=replace(held.train, targets=made.train.targets[: len(held.train)]),
        test_targets=made.train.targets[: len(held.test_targets)],
        task=made.task,
        n_classes=None,
    )
    given = newton_of(
        model={"name": model, "loss": loss},
        method={"name": "newton", "clip": None, "noise_multiplier": 3.0, "power": 1.0, **keys},
        protection={"name": "secure-aggregation"},
    )
    world = World(tmp_path, given, held, policy)
    world.play()
    world.assert_as_in_one_process()


@every_other
def test_a_model_of_counts_or_survival_is_resumed_saved_and_verified(kind: str, tmp_path: Path) -> None:
    held, (model, loss, keys) = others(kind, n=90), OTHERS[kind]
    given: dict[str, Any] = {
        "method": fv.newton(**keys), "epsilon": 8.0, "rounds": 4, "loss": loss,
        "settings": {"privacy": {"insecure_seed": 3}},
    }  # fmt: skip
    whole = fv.train(model, held, folder=tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        fv.train(model, held, folder=tmp_path / "stopped", callbacks=[StopAfter(2)], **given)
    stopped = next((tmp_path / "stopped").iterdir())
    resumed = fv.resume(stopped, model, held, loss=loss)
    assert same_model(files(whole.folder)[1], files(stopped)[1])
    assert files(whole.folder)[0] == files(stopped)[0]
    assert resumed.statement == whole.statement
    saved = whole.save(tmp_path / "saved")
    assert fv.verify(saved).holds
    read, new = fv.load(saved), np.random.default_rng(4).uniform(-1, 1, (20, 3)).astype(np.float32)
    assert np.array_equal(read.predict(new), whole.predict(new))
    assert np.ptp(read.predict(new)) > 0.01
    stored = torch.load(export_torch(read, tmp_path / "model.pt"), weights_only=True)
    assert all(torch.equal(stored[name], value) for name, value in read.model.state_dict().items())
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(export_onnx(read, tmp_path / "model.onnx")))
    for count in (1, 7):
        (shown,) = session.run(None, {"features": new[:count]})
        assert shown == pytest.approx(read.predictor.outputs(new[:count]), abs=1e-4)


class Doubled(WhitenedLinear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(features)


def test_a_subclass_is_not_written_as_the_layer_of_its_parent(tmp_path: Path) -> None:
    """It may compute something else. It is traced, or refused where PyTorch cannot trace it."""
    pytest.importorskip("onnx")
    runtime, model = pytest.importorskip("onnxruntime"), Doubled(3, 1).eval()
    shape = SimpleNamespace(input=SimpleNamespace(shape=(3,)))
    bundle: Any = SimpleNamespace(model=model, path=tmp_path, manifest=shape)
    new = np.random.default_rng(4).uniform(-1, 1, (7, 3)).astype(np.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(new)).numpy()
    try:
        session = runtime.InferenceSession(str(export_onnx(bundle, tmp_path / "model.onnx")))
        shown = session.run(None, {"features": new})[0]
    except BundleError:
        return
    assert shown == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "survival", "classes": None}, "survival needs the public time"),
        ({"cap": 5}, "method.cap is for counts"),
        ({"horizon": 5.0}, "method.horizon is for survival"),
        ({"rate": 5.0}, "method.rate is for counts"),
        ({"task": "regression", "classes": None, "cap": 5, "residual": 1.0}, "method.residual is not for"),
    ],
)
def test_keys_of_another_target_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        composed(**changes)


def newton_of(**changes: Any) -> Any:
    """Return the experiment, with messages that masks round as little as no masks do."""
    method = {"name": "newton", "clip": None, "noise_multiplier": 3.0, "power": 1.0}
    channel = {"name": "additive", "word_bits": 64}
    return asked(**{"local": None, "method": method, "channel": channel, **changes})


@pytest.mark.parametrize("protection", ["none", "secure-aggregation"])
def test_between_institutions_it_is_the_run_in_one_process(protection: str, tmp_path: Path) -> None:
    policy = TESTING.model_copy(update={"models": ("whitened-linear",)})
    world = World(tmp_path, newton_of(protection={"name": protection}), population(), policy)
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


def test_private_weighting_agrees_on_the_length_of_the_sums() -> None:
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
            "whitened-linear",
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


@pytest.mark.parametrize("method", ["uldp-avg-w", "newton"])
def test_a_loss_that_compares_a_users_own_records_is_told(method: str) -> None:
    """Cox's likelihood of one record is constant, so that a user with one record moves no model."""
    rng = np.random.default_rng(0)
    targets = np.stack([np.ones(60), rng.uniform(0.1, HORIZON, 60)], axis=1)
    people = fv.population(
        rng.uniform(-1, 1, (60, 2)),
        targets,
        user=np.arange(60),
        silo=np.arange(60) % 2,
        n_users=60,
        task="survival",
        silos=[0, 1],
    )
    model, own = ("whitened-hazards", fv.newton(horizon=HORIZON)) if method == "newton" else ("linear", None)
    said = [
        row
        for row in fv.check(model, people, method=own, epsilon=5.0).rows[0]["warnings"]
        if "compares" in row
    ]
    assert len(said) == (method != "newton")
