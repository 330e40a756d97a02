"""Clients' messages: the law of their noise end to end, neighbours, what is claimed, what is refused, whole runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy import stats

from fedveil.data.records import Groups
from fedveil.errors import CompositionError, ConfigError
from fedveil.methods.cepam import cepam_gaussian, cepam_laplace, fl, fl_gaussian, fl_gaussian_sdq, fl_laplace
from fedveil.methods.client_messages import (
    ClientMessages,
    Dithered,
    Form,
    Layered,
    NoiseName,
    Numbers,
)
from fedveil.methods.derive import derive
from fedveil.methods.dp_fed_ls import CentralGaussian, dp_fed_ls
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.named_channels import through_messages
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.privacy.events import GaussianEvent, LaplaceEvent, NoGuarantee, SampledWithoutReplacementEvent
from fedveil.privacy.sampling import Everyone, PoissonUsers, UniformClients
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import merge, parse
from fedveil.run.rounds.client_inputs import PerClientInputs
from fedveil.run.rounds.round_context import RoundContext, TrainingSetup
from fedveil.run.setup import prepare
from fedveil.run.simulation import SimulatedParties
from fedveil.run.training_run import resume, run
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.steps import LocalSgd
from fedveil.training.trainer import TrainJob
from fedveil.training.vectorized import VmapTrainer
from tests.messages import received, sender
from tests.runs import Silent, files, same_model
from tests.slow_cases import slow_only
from tests.training import cohort_of, task_of

CLIENTS, CLIP, Z = 4, 0.7, 0.3
LOCAL = LocalSgd(learning_rate=0.5, epochs=1, steps=3, batch_size=1)
FEDERATION = PublicFacts(n_silos=CLIENTS, n_users=CLIENTS, silo_records=(1666,) * CLIENTS)


def channel(noise: NoiseName, form: Form, bound: float | None = CLIP) -> ClientMessages:
    return ClientMessages(senders=CLIENTS, noise=noise, noise_multiplier=Z, bound=bound, form=form)


def updates(d: int, grid: float) -> np.ndarray:
    """Unequal clients: one of zeros, one small, one with outliers, one constant; multiples of the grid."""
    random = np.random.default_rng(1)
    rows = random.normal(0, 1, (CLIENTS, d)) * np.array([[0.0], [1e-3], [0.05], [0.0]]) * CLIP
    rows[2, ::1000] *= 50
    rows[3] = 0.2 * CLIP
    return np.asarray(np.trunc(rows / grid) * grid)


def errors(one: ClientMessages, rows: np.ndarray, grid: float) -> np.ndarray:
    """Return what every client's decoded message differs from the client's update by."""
    privacy = PrivacyRandomness.insecure(5)
    senders = (sender(privacy, client, senders=CLIENTS, grid=grid, round=2) for client in range(CLIENTS))
    return np.array([received(one, row, at) - row for row, at in zip(rows, senders, strict=True)])


# --- the law --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [Layered(), *slow_only([Layered(lattice="Z1"), Layered(lattice="Z3"), Numbers()])], ids=str
)
def test_gaussian_messages_have_their_law_and_so_has_their_sum(form: Form) -> None:
    """The error of each client is N(0, (z C)^2), that of the sum N(0, K (z C)^2); 4% more or less is rejected."""
    d, grid = 150_000, Clip(norm=CLIP).grid
    one, rows = channel("gaussian", form), updates(d, grid)
    noise, total_std = errors(one, rows, grid), one.noise_std(CLIENTS, CLIENTS)
    std = Z * CLIP
    assert total_std == pytest.approx(std * math.sqrt(CLIENTS))
    for error in noise:
        assert stats.kstest(error, "norm", args=(0, std)).pvalue > 1e-7
    for wrong in (0.96, 1.04):
        assert stats.kstest(noise.sum(0), "norm", args=(0, wrong * total_std)).pvalue < 1e-6
    assert stats.kstest(noise.sum(0), "norm", args=(0, total_std)).pvalue > 1e-7
    assert abs(np.corrcoef(noise[2], rows[2])[0, 1]) < 6 / math.sqrt(d)
    assert np.abs(np.corrcoef(noise) - np.eye(CLIENTS)).max() < 6 / math.sqrt(d)


@pytest.mark.parametrize("form", [Layered(), *slow_only([Numbers()])], ids=str)
def test_laplace_messages_have_their_law(form: Form) -> None:
    d, grid = 100_000, ClipL1(norm=CLIP).grid
    one, rows = channel("laplace", form), updates(d, grid)
    noise = errors(one, rows, grid)
    for error in noise:
        assert stats.kstest(error, "laplace", args=(0, Z * CLIP)).pvalue > 1e-7
    pooled = noise.ravel()
    for wrong in (0.96, 1.04):
        assert stats.kstest(pooled, "laplace", args=(0, wrong * Z * CLIP)).pvalue < 1e-6
    assert one.noise_std(CLIENTS, CLIENTS) == pytest.approx(Z * CLIP * math.sqrt(2 * CLIENTS))


def test_dither_adds_its_uniform_error_to_the_noise() -> None:
    grid, step = Clip(norm=CLIP).grid, 2.0
    one, rows = channel("gaussian", Dithered(step=step)), updates(200_000, grid)
    pooled = errors(one, rows, grid).ravel()
    std = Z * CLIP * math.sqrt(1 + step**2 / 12)
    assert one.noise_std(CLIENTS, CLIENTS) == pytest.approx(std * math.sqrt(CLIENTS))
    assert abs(np.mean(pooled**2) / std**2 - 1) < 6 * math.sqrt(2 / pooled.size)


def test_noise_of_an_updates_own_norm_is_measured_in_it() -> None:
    """scale = "norm": the error has std z ||X||, another for every client; an update of zeros sends nothing."""
    rows = updates(50_000, Clip(norm=CLIP).grid)
    one = channel("gaussian", Layered(), bound=None)
    noise = errors(one, rows, 1.0)
    assert not noise[0].any()
    for row, error in zip(rows[1:], noise[1:], strict=True):
        assert stats.kstest(error, "norm", args=(0, Z * np.linalg.norm(row))).pvalue > 1e-6
    assert one.noise_std(CLIENTS, CLIENTS) is None


def test_clients_messages_through_the_channel_carry_the_noise_of_a_trusted_server() -> None:
    """DP-Fed-LS over LRSUQ: m shares of z C / sqrt(m) sum to the central N(0, (z C)^2 I)."""
    central = CentralGaussian(noise_multiplier=1.5, scale=CLIP)
    sampler = UniformClients(population=9, sample=CLIENTS)
    one = through_messages(central, sampler, 9, Layered())
    grid = Clip(norm=CLIP).grid
    noise = errors(one, updates(150_000, grid), grid).sum(0)
    assert one.noise_std(CLIENTS, CLIENTS) == pytest.approx(central.std)
    assert stats.kstest(noise, "norm", args=(0, central.std)).pvalue > 1e-6
    for wrong in (0.96, 1.04):
        assert stats.kstest(noise, "norm", args=(0, wrong * central.std)).pvalue < 1e-6


# --- neighbours -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Clip, ClipL1])
@pytest.mark.parametrize("left_out", [0, 1, 3])
def test_a_clients_records_come_and_go_behind_the_same_noise(
    kind: type[Clip | ClipL1], left_out: int
) -> None:
    """A client without records still sends; all other messages stay bit for bit, and that one moves by C."""
    task = task_of("mlp")
    compose = fl_laplace if kind is ClipL1 else fl_gaussian
    local = LocalSgd(learning_rate=3.0, epochs=1)
    method = compose(local=local, n_users=4, noise_multiplier=Z, clip=CLIP)

    def sent(without: int | None) -> tuple[np.ndarray, int, np.ndarray]:
        cohort = cohort_of([6, 5, 4, 3], n_silos=4)
        size = np.where(np.arange(4) == without, 0, cohort.groups.size)
        cohort = replace(cohort, groups=replace(cohort.groups, size=size))
        setting = TrainingSetup(
            method=method,
            trainer=LoopTrainer(task=task, local=local),
            cohort=cohort,
            weights=torch.ones(4, dtype=torch.float64),
            n_users=4,
            shapes=tuple(tuple(shape) for shape in task.layout.shapes),
        )
        turn = RoundContext(
            setting=setting,
            model=task.initial(),
            round_number=1,
            experiment=ExperimentRandomness(0),
            privacy=PrivacyRandomness.insecure(3),
        )
        work = PerClientInputs(turn, SimulatedParties.in_the_open(setting).protocol_spec)
        work.begin(0)
        total, count = SimulatedParties.in_the_open(setting).driver.play(
            (1, 0), work.senders((0, 1, 2, 3)), work.drawn, work.client_input
        )
        apart = turn.job(torch.arange(4), method.bound).per_contribution()
        return total, count, turn.trainer.sums(apart).total.numpy()

    aggregate, count, rows = sent(None)
    order = 1 if kind is ClipL1 else 2
    assert (np.linalg.norm(rows, ord=order, axis=1) <= CLIP).all()
    assert np.linalg.norm(rows, ord=order, axis=1).max() > 0.99 * CLIP
    without, count_without, _ = sent(left_out)
    assert count == count_without == 4
    moved = np.linalg.norm(aggregate - without, ord=order)
    assert 0 < moved <= CLIP * (1 + 1e-12)


@pytest.mark.parametrize("parts", [[0.5, 0.5], [0.1, 0.9], [0.25, 0.25, 0.5], [0.05] * 20])
@pytest.mark.parametrize("total", [0.1, 1.0, 6.0])
def test_laplace_noise_on_many_coordinates_loses_no_more_than_on_one(
    parts: list[float], total: float
) -> None:
    """The hockey-stick divergence of a vector move of l1 length a is at most 1 - e^((epsilon - a)/2)."""
    random = np.random.default_rng(0)
    draws = 200_000
    loss = np.zeros(draws)
    for part in parts:
        z = random.laplace(size=draws)
        loss += np.abs(z - part * total) - np.abs(z)
    for epsilon in np.linspace(0, 0.99 * total, 7):
        lost = np.maximum(1 - np.exp(epsilon - loss), 0)
        worst = 1 - math.exp((epsilon - total) / 2)
        assert lost.mean() <= worst + 6 * lost.std() / math.sqrt(draws)


@pytest.mark.parametrize("trainer", [VmapTrainer, GramTrainer])
def test_every_trainer_gives_each_client_her_own_update(trainer: type[VmapTrainer | GramTrainer]) -> None:
    """Clients trained apart, some left out, in an order of their own: row by row what the loop gives."""
    task, cohort = task_of("linear"), cohort_of([6, 5, 0, 3, 4], n_silos=1)
    local, members = LocalSgd(learning_rate=0.3, epochs=2, batch_size=2), torch.tensor([4, 0, 3])

    def rows(one: LoopTrainer | VmapTrainer | GramTrainer) -> np.ndarray:
        ones, place = torch.ones(len(members), dtype=torch.float64), (ExperimentRandomness(0), ("round", 1))
        job = TrainJob(task.initial(), cohort, members, ones, Unbounded(), *place)
        return one.sums(job.per_contribution()).total.numpy()

    expected = rows(LoopTrainer(task=task, local=local))
    np.testing.assert_allclose(rows(trainer(task=task, local=local)), expected, atol=1e-6)
    assert np.abs(expected).max(1).min() > 1e-3


# --- what is derived ------------------------------------------------------------------------------------------


def test_events_of_a_round() -> None:
    gaussian = derive(cepam_gaussian(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP), FEDERATION)
    laplace = derive(cepam_laplace(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP), FEDERATION)
    assert gaussian.event == GaussianEvent(noise_multiplier=Z * math.sqrt(CLIENTS))
    assert laplace.event == LaplaceEvent(noise_multiplier=Z)
    assert gaussian.unit == laplace.unit == "client"
    for guarantee in (gaussian, laplace):
        assert isinstance(guarantee.views[0].event, NoGuarantee)
        assert guarantee.published == ()
        assert guarantee.grid_loss == 0
    assert gaussian.views[1].event == GaussianEvent(noise_multiplier=Z * math.sqrt(CLIENTS - 1))


def test_noise_as_numbers_guarantees_the_same_and_something_against_the_server() -> None:
    over = derive(cepam_gaussian(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP), FEDERATION)
    for method in (
        fl_gaussian(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP),
        fl_gaussian_sdq(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP, step=1.0),
    ):
        plain = derive(method, FEDERATION)
        assert plain.event == over.event
        assert plain.views[0].event == GaussianEvent(noise_multiplier=Z)
        assert 0 < plain.grid_loss < 1e-13
    laplace = derive(fl_laplace(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP), FEDERATION)
    assert laplace.views[0].event == LaplaceEvent(noise_multiplier=Z)
    assert 0 < laplace.grid_loss < 1e-8


def test_the_published_scale_claims_nothing_and_shows_the_published_profile() -> None:
    local = replace(LOCAL, steps=15)
    federation = PublicFacts(n_silos=30, n_users=30, silo_records=(1666,) * 10 + (1667,) * 20)
    gaussian = derive(cepam_gaussian(local=local, n_users=30, noise_multiplier=0.1, scale="norm"), federation)
    assert isinstance(gaussian.event, NoGuarantee)
    assert "norm" in gaussian.event.reason
    (profile,) = gaussian.published
    assert profile.epsilon(80, 1e-5) == pytest.approx(1.45, abs=1e-3)
    assert "delta = 0.00969" in profile.name
    assert "one round" in profile.gap
    assert "1 / 1666" in profile.gap
    laplace = derive(cepam_laplace(local=local, n_users=30, noise_multiplier=0.1, scale="norm"), federation)
    (profile,) = laplace.published
    assert profile.epsilon(80, 1e-5) == pytest.approx(4995.3, abs=0.1)
    assert "1 / 1666" not in profile.gap
    whole_batches = replace(LOCAL, batch_size=10)
    other = cepam_gaussian(local=whole_batches, n_users=30, noise_multiplier=0.1, scale="norm")
    assert derive(other, federation).published == ()


# --- public weights -------------------------------------------------------------------------------------------


def test_the_model_is_the_mean_of_the_clients_by_their_public_weights(tmp_path: Path) -> None:
    """sum_k w_k X_k is linear in w: what 5 more parts of the first client add is half of what 10 more add."""
    moved = []
    for first in (1.0, 6.0, 11.0):
        weights = [first, *(9 * [1.0])]
        asked = document(rounds=1) | {"name": f"first{first:g}", "method": {"name": "fl", "weights": weights}}
        played = prepare(parse(asked, "test"))
        assert played.method.divisor(10, 10) == pytest.approx(sum(weights) / first)
        folder = run(played, tmp_path, Silent()).folder
        model = np.concatenate([part.ravel() for part in load_file(folder / "model.safetensors").values()])
        moved.append(sum(weights) * (model - played.task.initial().numpy()))
    assert np.abs(moved[1] - moved[0]).max() > 1e-3
    np.testing.assert_allclose(moved[2] - moved[0], 2 * (moved[1] - moved[0]), atol=1e-4)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (8.0, 1e-9, 3.0, 8.0)])
def test_no_weight_lets_a_client_move_the_sum_by_more_than_the_clip(weights: tuple[float, ...]) -> None:
    """Claims are those of equal weights, and a class that returns larger weights cannot move more."""
    keys: dict[str, Any] = {"local": LOCAL, "n_users": CLIENTS, "noise_multiplier": Z, "clip": CLIP}
    for build in (cepam_gaussian, cepam_laplace, fl_gaussian):
        method, equal = build(**keys, weights=weights), build(**keys)
        assert derive(method, FEDERATION).event == derive(equal, FEDERATION).event
        said = [text for text in derive(method, FEDERATION).uncovered if "clients' weights" in text]
        assert len(said) == 1
        number = np.arange(CLIENTS)
        own = number.astype(np.int32)
        groups = Groups(order=number, start=number, size=np.ones_like(number), silo=own, user=own)
        found = method.contribution.limit_weights(
            5 * method.weights.for_groups(groups, CLIENTS, CLIENTS), groups, CLIENTS, method.weights
        )
        assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_weights_that_are_private_or_not_those_of_all_clients_are_refused() -> None:
    for weights, said in (
        ("records", "record counts are private"),
        ([1.0, 0.0], "must be > 0"),
        ([], "needs 1 or more"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(document(method={"weights": weights}), "test")
    with pytest.raises(CompositionError, match="2 weights for 10 clients"):
        prepare(parse(document(method={"weights": [1.0, 2.0]}), "test"))
    weighted = Weights.of_clients((1.0, 2.0, 3.0, 4.0))
    method = cepam_gaussian(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP)
    with pytest.raises(CompositionError, match="all take part"):
        replace(method, weights=weighted, sampler=UniformClients(population=9, sample=CLIENTS))
    with pytest.raises(CompositionError, match="above 0 and at most 1"):
        replace(method, weights=replace(weighted, clients=(1.0, 1.0, 1.0, 1.5)))


# --- what is refused ------------------------------------------------------------------------------------------


def test_what_cannot_combine_is_refused_with_the_reason() -> None:
    method = cepam_gaussian(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, clip=CLIP)
    with pytest.raises(CompositionError, match="leaves it nothing to compress"):
        cepam_gaussian(local=LOCAL, n_users=CLIENTS, noise_multiplier=0.0, clip=CLIP)
    with pytest.raises(CompositionError, match=r"give method\.clip"):
        cepam_laplace(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z)
    with pytest.raises(CompositionError, match="clips nothing"):
        cepam_laplace(local=LOCAL, n_users=CLIENTS, noise_multiplier=Z, scale="norm", clip=1.0)
    with pytest.raises(CompositionError, match="noise needs Clip with"):
        replace(method, bound=ClipL1(norm=CLIP))
    with pytest.raises(CompositionError, match="noise is measured in"):
        replace(method, bound=Unbounded())
    with pytest.raises(CompositionError, match="noise is measured in"):
        replace(method, bound=Clip(norm=2 * CLIP))
    with pytest.raises(CompositionError, match="must be fixed"):
        replace(method, sampler=PoissonUsers(rate=0.5))
    with pytest.raises(CompositionError, match="noise is that of 4"):
        replace(method, sampler=UniformClients(population=9, sample=3))
    clients = dp_fed_ls(local=LOCAL, n_users=9, clip=CLIP, noise_multiplier=Z, smoothing=1.0)
    with pytest.raises(CompositionError, match="Gaussian, which needs an l2 bound"):
        replace(clients, bound=ClipL1(norm=CLIP))
    with pytest.raises(CompositionError, match="Poisson sampling draws"):
        through_messages(
            CentralGaussian(noise_multiplier=1.0, scale=1.0), PoissonUsers(rate=0.5), 9, Layered()
        )
    everyone = through_messages(CentralGaussian(noise_multiplier=1.0, scale=1.0), Everyone(), 9, Layered())
    assert everyone.senders == 9


# --- runs -----------------------------------------------------------------------------------------------------


def document(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "try",
        "rounds": 2,
        "data": {"name": "digits", "n_users": 10, "allocation": {"law": "clients"}},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1, "epochs": 1, "steps": 4, "batch_size": 1},
        "method": {"name": "cepam-gaussian", "clip": 0.5, "noise_multiplier": 0.3},
    }
    return merge(base, changes)


NOISY = {"clip": 0.5, "noise_multiplier": 0.3}
RUNS = {
    "cepam-gaussian": NOISY,
    "cepam-laplace": NOISY,
    "fl": {},
    "fl-sdq": {"clip": 0.5, "step": 0.5},
    "fl-gaussian": NOISY,
    "fl-laplace": NOISY,
    "fl-gaussian-sdq": NOISY | {"step": 1.0},
    "fl-laplace-sdq": NOISY | {"step": 1.0},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_method_of_the_paper_runs_and_counts_its_bits(name: str, tmp_path: Path) -> None:
    outcome = run(
        prepare(parse(document() | {"method": {"name": name} | RUNS[name]}, "test")), tmp_path, Silent()
    )
    statement = json.loads((outcome.folder / "privacy.json").read_text())
    assert statement["unit"] == "client"
    assert (statement["epsilon"] is None) == (name in ("fl", "fl-sdq"))
    communication_cost = outcome.row["communication_cost"]
    assert communication_cost["float32_bytes"] == 10 * 4 * 650
    if name in ("fl", "fl-gaussian", "fl-laplace"):
        assert communication_cost["bits_per_parameter"] == 32
    else:
        assert communication_cost["bits_per_parameter"] < 5
    layered = name.startswith("cepam")
    assert ("ChaCha20" in statement["randomness"]) == layered
    assert (communication_cost["limit"] is None) != layered
    assert (communication_cost["acceptance"] is None) != layered
    assert outcome.row["contributions"] == 10


def test_the_published_scale_runs_and_its_statement_says_that_it_guarantees_nothing(tmp_path: Path) -> None:
    method = {"name": "cepam-gaussian", "noise_multiplier": 0.1, "scale": "norm", "lattice": "Z2"}
    seeded = document(privacy={"insecure_seed": 11})  # the share that is accepted has a spread of its own
    outcome = run(prepare(parse(seeded | {"method": method}, "test")), tmp_path, Silent())
    assert outcome.statement.epsilon is None
    assert "norm" in outcome.statement.reasons[0]
    assert any(sentence.startswith("As published, Theorem 12") for sentence in outcome.statement.sentences())
    assert any("the records of the smallest client" in text for text in outcome.statement.uncovered)
    assert outcome.row["communication_cost"]["acceptance"] == pytest.approx(math.pi / 4, abs=0.02)


@pytest.mark.parametrize("method", ["dp-fed", "dp-fed-ls"])
def test_dp_fed_runs_over_the_channel_at_the_same_epsilon(method: str, tmp_path: Path) -> None:
    sampled = {"name": method, "clip": 0.5, "noise_multiplier": 1.0, "client_sampling": "uniform"}
    sampled |= {"client_sampling_rate": 0.5} | ({"smoothing": 1.0} if method == "dp-fed-ls" else {})
    asked = document() | {"method": sampled, "channel": {"name": "lrsuq"}}
    over = run(prepare(parse(asked, "test")), tmp_path, Silent())
    plain = prepare(parse(document() | {"method": sampled}, "test"))
    assert isinstance(plain.guarantee.event, SampledWithoutReplacementEvent)
    assert over.statement.epsilon == pytest.approx(plain.epsilon_after(2), rel=1e-6)
    assert over.row["communication_cost"]["float32_bytes"] == 5 * 4 * 650
    assert over.row["communication_cost"]["bits_per_parameter"] < 3
    poisson = asked | {"method": sampled | {"client_sampling": "poisson"}}
    with pytest.raises(CompositionError, match="client_sampling = 'uniform'"):
        prepare(parse(poisson, "test"))


def test_an_interrupted_run_resumes_to_the_same_model(tmp_path: Path) -> None:
    seeded = parse(document(privacy={"insecure_seed": 11}, rounds=3), "test")
    whole = files(run(prepare(seeded), tmp_path, Silent()).folder)
    with pytest.raises(KeyboardInterrupt):
        run(prepare(seeded), tmp_path / "cut", Silent(interrupt_after=1))
    resumed = files(resume(tmp_path / "cut" / "try", Silent()).folder)
    assert same_model(resumed[1], whole[1])


def test_calibration_finds_the_noise_of_a_target() -> None:
    asked = document(method={"noise_multiplier": "calibrated"}, privacy={"epsilon": 2.0}, rounds=5)
    prepared = prepare(parse(asked, "test"))
    assert prepared.epsilon_after(5) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("rounds", [100, 200])
def test_calibrated_noise_meets_its_target_as_the_run_states_it(rounds: int) -> None:
    """The grid of the noise included: a budget of the same epsilon lets the last round be played."""
    asked = document(
        method={"name": "fl-laplace", "noise_multiplier": "calibrated"},
        data={"n_users": 20},
        local={"steps": None},
        privacy={"epsilon": 8.0, "budget": 8.0},
        rounds=rounds,
    )
    prepared = prepare(parse(asked, "test"))
    assert 7.9 < prepared.epsilon_after(rounds) <= 8.0
    assert prepared.over_budget(rounds, ()) is None


@pytest.mark.parametrize("make", [fl_laplace, cepam_laplace])
def test_noise_that_falls_must_be_gaussian(make: Any) -> None:
    method = make(local=LocalSgd(learning_rate=0.1, epochs=1), n_users=10, noise_multiplier=5.0, clip=1.0)
    with pytest.raises(CompositionError, match="Gaussian noise"):
        replace(method, noise_decay=0.8)


def test_keys_of_other_methods_are_refused() -> None:
    with pytest.raises(ConfigError, match="method\\.lattice: no such key"):
        parse(document(method={"name": "cepam-laplace", "lattice": "Z1"}), "test")
    with pytest.raises(ConfigError, match=r"test: method\.step: is required"):
        parse(document() | {"method": {"name": "fl-sdq", "clip": 1.0}}, "test")
    with pytest.raises(ConfigError, match="epochs must be 1"):
        prepare(parse(document(local={"epochs": 2}), "test"))


def test_plain_averaging_is_that_of_fedavg(tmp_path: Path) -> None:
    """FL with every client is FedAVG over as many silos."""
    method = fl(local=LOCAL, n_users=CLIENTS)
    assert method.divisor(CLIENTS, CLIENTS) == CLIENTS
    assert isinstance(derive(method, FEDERATION).event, NoGuarantee)
    outcome = run(prepare(parse(document() | {"method": {"name": "fl"}}, "test")), tmp_path, Silent())
    asked = document() | {"method": {"name": "fedavg"}, "name": "other"}
    other = run(prepare(parse(asked, "test")), tmp_path, Silent())
    assert outcome.row["test"]["loss"] == pytest.approx(other.row["test"]["loss"], rel=0.2)
