"""DP-Fed and DP-Fed-LS end to end: sampling, noise, denominator, denoisers after any method, and the statement."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.errors import CompositionError, ConfigError, DataError, PrivacyError
from fedveil.methods.derive import derive
from fedveil.methods.dp_fed_ls import dp_fed, dp_fed_ls
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import sum_noise_std
from fedveil.methods.uldp import uldp_group
from fedveil.privacy.events import (
    Adjacency,
    GaussianEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
)
from fedveil.privacy.sampling import PoissonUsers
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.loop import NullObserver
from fedveil.run.rounds.round_context import RoundContext, TrainingSetup
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import play_round
from fedveil.run.training_run import run
from fedveil.training.server.denoise import JamesStein, SoftThreshold
from fedveil.training.steps import LocalSgd

LOCAL = LocalSgd(learning_rate=0.1, epochs=1, batch_size=4)
CLIENTS = PublicFacts(n_silos=40, n_users=40)


def experiment(**changes: Any) -> Experiment:
    base = {
        "name": "clients",
        "rounds": 3,
        "data": {"name": "digits", "n_users": 40, "allocation": {"law": "clients"}},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1, "epochs": 2, "batch_size": 8, "decay": 0.99},
        "method": {
            "name": "dp-fed-ls",
            "clip": 0.3,
            "noise_multiplier": 1.0,
            "client_sampling": "uniform",
            "client_sampling_rate": 0.25,
            "smoothing": 1.0,
        },
        "privacy": {"delta": 1e-3},
    }
    return parse(merge(base, changes), "test")


def first_turn(setting: TrainingSetup, start: torch.Tensor, seed: int) -> RoundContext:
    return RoundContext(
        setting=setting,
        model=start,
        round_number=1,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.insecure(seed),
    )


def one_round(prepared: Prepared, seed: int = 1) -> tuple[torch.Tensor, Any]:
    start = prepared.task.initial()
    model, _, shown = play_round(first_turn(prepared.setting, start, seed))
    return (model - start).double(), shown


@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_a_run_states_the_client_and_the_neighbours_of_its_sampling(sampling: str, tmp_path: Path) -> None:
    outcome = run(prepare(experiment(method={"client_sampling": sampling})), tmp_path, NullObserver())
    statement = json.loads((outcome.folder / "privacy.json").read_text())
    assert statement["unit"] == "client"
    assert statement["units"] == 40
    expected = {"uniform": "replace-one", "poisson": "add-or-remove-one"}[sampling]
    assert statement["adjacency"] == expected
    assert set(statement["epsilons"]) == {"pld", "rdp", "rdp-2017"}
    assert statement["epsilon"] <= statement["epsilons"]["rdp"] <= statement["epsilons"]["rdp-2017"]
    parties = {disclosure["role"]: disclosure["epsilon"] for disclosure in statement["trust"]}
    assert parties["server"] is None
    assert parties["sender"] >= statement["epsilon"]
    assert bool(statement["as_published"]) == (sampling == "uniform")
    assert any("Laplacian" in mechanism for mechanism in statement["mechanisms"])


def test_smoothing_costs_nothing_and_the_sampler_brings_the_event() -> None:
    def event(smoothing: float, **changes: Any) -> Any:
        method = dp_fed_ls(
            local=LOCAL, n_users=40, clip=0.3, noise_multiplier=2.0, smoothing=smoothing, **changes
        )
        return derive(method, CLIENTS)

    uniform = event(0.0, client_sampling="uniform", client_sampling_rate=0.1)
    assert uniform.event == SampledWithoutReplacementEvent(
        population=40, sample=4, event=GaussianEvent(noise_multiplier=2.0)
    )
    assert uniform.adjacency is Adjacency.REPLACE_ONE
    assert event(3.0, client_sampling="uniform", client_sampling_rate=0.1).event == uniform.event
    poisson = event(1.0, client_sampling="poisson", client_sampling_rate=0.1)
    assert poisson.event == PoissonSampledEvent(rate=0.1, event=GaussianEvent(noise_multiplier=2.0))
    assert poisson.adjacency is Adjacency.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_sample_trains_and_the_expectation_divides(seed: int) -> None:
    prepared = prepare(experiment(method={"noise_multiplier": 0.0, "smoothing": 0.0}))
    moved, shown = one_round(prepared, seed)
    assert shown.participants == 10
    assert float(moved.norm()) <= 0.3 * (1 + 1e-5)
    prepared = prepare(
        experiment(method={"noise_multiplier": 0.0, "smoothing": 0.0, "client_sampling": "poisson"})
    )
    assert prepared.method.divisor(40, 1) == 10.0
    moved, shown = one_round(prepared, seed)
    assert float(moved.norm()) <= shown.participants / 10 * 0.3 * (1 + 1e-5)


def test_the_actual_denominator_is_named_and_divides_by_who_was_drawn() -> None:
    changes = {"noise_multiplier": 0.0, "smoothing": 0.0, "client_sampling": "poisson"}
    expected, shown = one_round(prepare(experiment(method=changes)))
    actual, _ = one_round(prepare(experiment(method=changes | {"denominator": "actual"})))
    torch.testing.assert_close(actual, expected * 10 / shown.participants, rtol=1e-4, atol=1e-7)
    prepared = prepare(experiment(method={"client_sampling": "poisson", "denominator": "actual"}))
    assert any("denominator" in sentence for sentence in prepared.uncovered)


def test_a_round_that_draws_nobody_still_releases_its_noise() -> None:
    prepared = prepare(experiment(method={"client_sampling": "poisson"}))
    method = dataclasses.replace(prepared.method, sampler=PoissonUsers(rate=2.0**-65))
    setting = dataclasses.replace(prepared.setting, method=method)
    start = prepared.task.initial()
    model, _, shown = play_round(first_turn(setting, start, 1))
    assert (shown.participants, shown.contributions) == (0, 0)
    assert float((model - start).norm()) > 0


@pytest.mark.parametrize("trainer", ["loop", "vmap", "gram"])
def test_every_trainer_gives_the_same_round(trainer: str) -> None:
    changes = {"noise_multiplier": 0.0}
    oracle, _ = one_round(prepare(experiment(method=changes, trainer={"name": "loop"})))
    moved, _ = one_round(prepare(experiment(method=changes, trainer={"name": trainer})))
    torch.testing.assert_close(moved, oracle, rtol=1e-3, atol=1e-5)


def test_the_noise_of_the_mean_is_what_denoisers_are_told() -> None:
    """The released mean of a round without signal has the stated standard deviation, for every channel."""
    quiet = {"learning_rate": 1e-30, "decay": 1.0}
    client = experiment(local=quiet, method={"smoothing": 0.0, "noise_multiplier": 3.0})
    uldp = {
        "data": {"name": "digits", "n_users": 10, "n_silos": 4},
        "method": {"name": "uldp-avg", "clip": 0.3, "noise_multiplier": 3.0},
        "model": {"name": "linear"},
        "local": {"learning_rate": 1e-30},
    }
    document = {"name": "users", "rounds": 1} | uldp | {"privacy": {"colluding_silos": 1}}
    for prepared in (prepare(client), prepare(parse(document, "test"))):
        moved, _ = one_round(prepared)
        method, n_silos = prepared.method, prepared.setting.cohort.n_silos
        stated = sum_noise_std(method, n_silos) / method.divisor(prepared.population.n_users, n_silos)
        measured = float(moved.square().mean().sqrt())
        assert measured == pytest.approx(stated, rel=5.5 * math.sqrt(1 / (2 * len(moved))))
    assert isinstance(prepared.method.channel, GaussianShares)


@pytest.mark.parametrize("denoiser", ["laplacian", "james-stein", "soft-threshold"])
@pytest.mark.parametrize("method", ["uldp-avg", "uldp-naive", "dp-fed"])
def test_any_denoiser_follows_any_noisy_aggregate_at_the_same_price(denoiser: str, method: str) -> None:
    base: dict[str, Any] = {
        "name": "any",
        "rounds": 1,
        "data": {"name": "digits", "n_users": 20, "allocation": {"law": "clients"}},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1},
        "method": {"name": method, "clip": 0.3, "noise_multiplier": 3.0},
    }
    plain = prepare(parse(base, "test"))
    section = {"name": denoiser} | ({"smoothing": 2.0} if denoiser == "laplacian" else {})
    denoised = prepare(parse(base | {"server": {"denoiser": section}}, "test"))
    assert denoised.guarantee.event == plain.guarantee.event
    assert denoised.guarantee.adjacency is plain.guarantee.adjacency
    before, _ = one_round(plain)
    after, _ = one_round(denoised)
    assert float(after.norm()) < float(before.norm())


def test_the_theorem_is_asked_about_the_clients_that_are_drawn() -> None:
    """Uniform sampling draws round(tau N) of them: 2 of 30 where tau is .05."""
    found = dp_fed(
        local=LOCAL,
        n_users=30,
        clip=1.0,
        noise_multiplier=1.0,
        client_sampling="uniform",
        client_sampling_rate=0.05,
    ).closed_form
    assert found is not None
    assert found.rate == pytest.approx(2 / 30)


def test_the_closed_form_gives_the_papers_noise() -> None:
    document = experiment(
        rounds=30,
        data={"name": "digits", "n_users": 1000},
        method={"noise_multiplier": "closed-form", "client_sampling_rate": 0.05},
        privacy={"epsilon": 6.0, "delta": 1000**-1.1},
    )
    prepared = prepare(document)
    assert sum_noise_std(prepared.method, 1) == pytest.approx(0.8080, abs=1e-4)
    assert prepared.epsilon_after(30) < 2.3


def test_calibration_uses_the_samplers_own_adjacency() -> None:
    document = experiment(
        method={"noise_multiplier": "calibrated"}, privacy={"epsilon": 5.0, "accountant": "rdp"}
    )
    prepared = prepare(document)
    assert 4.99 < prepared.epsilon_after(3) <= 5.0


# --- what is refused ------------------------------------------------------------------------------------------


def test_users_in_several_silos_are_no_clients() -> None:
    with pytest.raises(DataError, match="clients"):
        prepare(experiment(data={"allocation": {"law": "zipf"}, "n_silos": 3}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"client_sampling_rate": 0.0}}, "client_sampling_rate"),
        ({"method": {"client_sampling_rate": 1.5}}, "client_sampling_rate"),
        ({"method": {"smoothing": -1.0}}, "smoothing"),
        ({"server": {"denoiser": {"name": "james-stein"}}}, r"^server\.denoiser: dp-fed-ls brings its own"),
        ({"method": {"noise_multiplier": "closed-form"}}, "privacy.epsilon"),
    ],
    ids=str,
)
def test_bad_configuration_names_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(experiment(**changes))


def test_a_cohort_of_nobody_is_refused() -> None:
    with pytest.raises(PrivacyError, match="cohort of 0 out of 40"):
        dp_fed(
            local=LOCAL,
            n_users=40,
            clip=1.0,
            noise_multiplier=1.0,
            client_sampling="uniform",
            client_sampling_rate=0.001,
        )


def test_what_clients_cannot_combine_with_is_refused() -> None:
    method = dp_fed(local=LOCAL, n_users=40, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(CompositionError, match="CentralGaussian"):
        dataclasses.replace(method, channel=GaussianShares(noise_multiplier=1.0, scale=1.0))
    group = uldp_group(local=LOCAL, clip=1.0, noise_multiplier=1.0, group_size=2)
    for denoiser in (JamesStein(), SoftThreshold()):
        with pytest.raises(CompositionError, match="size of the noise"):
            dataclasses.replace(group, denoiser=denoiser)
    with pytest.raises(CompositionError, match="mean over clients"):
        dataclasses.replace(group, denominator="actual")


def test_without_noise_nothing_is_guaranteed() -> None:
    method = dp_fed(local=LOCAL, n_users=40, clip=1.0, noise_multiplier=0.0)
    guarantee = derive(method, CLIENTS)
    assert isinstance(guarantee.event, NoGuarantee)
    assert guarantee.unit == "client"


def test_smoothing_zero_is_plain_dp_fed() -> None:
    plain = experiment().model_dump(exclude_none=True)
    plain["method"] = {key: value for key, value in plain["method"].items() if key != "smoothing"}
    plain["method"]["name"] = "dp-fed"
    one, _ = one_round(prepare(parse(plain, "test")))
    other, _ = one_round(prepare(experiment(method={"smoothing": 0.0})))
    assert np.array_equal(one.numpy(), other.numpy())
