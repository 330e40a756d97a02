"""The noise-to-travel ratio: its formula, the rules that read it, and that nothing else is read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.crypto.ckks import CkksParameters
from fedveil.errors import CompositionError, ConfigError, ModelError
from fedveil.methods.fedavg import fedavg
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.noise_ratio import noise_to_displacement, rate_by_rule, step_by_rule
from fedveil.methods.uldp import uldp_avg_w
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.run.planning import Plan, noise_ratio_rows, ratio_rows, read_over
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from fedveil.training.server.denoise import ByRule, Laplacian, NoDenoiser
from fedveil.training.steps import LocalSgd
from tests.runs import experiment

LOCAL = LocalSgd(learning_rate=0.1, epochs=1)
PUBLIC = PublicFacts(n_silos=5, n_users=100, dimension=650)


@pytest.mark.parametrize(("clip", "more"), [(1.0, 1.0), (0.1, 1.0), (AdaptiveClip(), math.sqrt(1 + 1 / 16))])
@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_the_ratio_is_that_of_its_formula(clip: Any, more: float, rate: float) -> None:
    """sqrt(d / T) z / (q |U|); without sampling sqrt(d) / (|U| mu). An adaptive clip pays for its mark."""
    method = uldp_avg_w(local=LOCAL, clip=clip, noise_multiplier=5.0, user_sampling_rate=rate)
    found = noise_to_displacement(method, PUBLIC, 30)
    assert found == pytest.approx(more * math.sqrt(650 / 30) * 5.0 / (rate * 100), rel=1e-12)
    if rate == 1:
        assert found == pytest.approx(more * math.sqrt(650) / (100 * math.sqrt(30) / 5.0), rel=1e-12)


def test_the_rule_proposes_long_steps_where_there_is_little_noise() -> None:
    assert [step_by_rule(ratio) for ratio in (0.0, 0.01, 0.25 / 3, 0.25, 1.0)] == [3, 3, 3, 1, 0.25]
    method = uldp_avg_w(local=LOCAL, clip=1.0, noise_multiplier=5.0)
    eta = 0.25 / noise_to_displacement(method, PUBLIC, 30)
    assert rate_by_rule(method, PUBLIC, 30) == pytest.approx(eta)


def test_a_rate_by_rule_needs_noise_of_known_size() -> None:
    with pytest.raises(CompositionError, match="not the update of one user: give a number"):
        rate_by_rule(fedavg(local=LOCAL), PUBLIC, 30)
    with pytest.raises(CompositionError, match="nothing to compare: give a number"):
        rate_by_rule(uldp_avg_w(local=LOCAL, clip=1.0, noise_multiplier=0.0), PUBLIC, 30)


def by_rule(**changes: Any) -> Any:
    return experiment(
        method=changes, server={"learning_rate": "by-rule", "denoiser": {"name": "by-rule"}}, rounds=30
    )


@pytest.mark.parametrize(("multiplier", "denoiser"), [(1.0, NoDenoiser()), (100.0, NoDenoiser())])
def test_neighbouring_data_get_the_same_rate_and_denoiser(multiplier: float, denoiser: Any) -> None:
    whole = prepare(by_rule(noise_multiplier=multiplier))
    train = whole.population.train
    fewer = replace(whole.population, train=train.select(np.flatnonzero(train.user != train.user[0])))
    other = prepare(by_rule(noise_multiplier=multiplier), FixedPopulation(fewer))
    assert whole.method == other.method
    assert whole.method.denoiser == denoiser
    facts = PublicFacts(n_silos=3, n_users=20, dimension=650)
    assert whole.method.server.learning_rate == rate_by_rule(whole.method, facts, 30)


def test_images_are_smoothed_more_and_an_unresolved_rule_estimates_nothing() -> None:
    large = ByRule().resolve(lambda: 0.6, (1, 28, 28))
    assert large == Laplacian(smoothing=1.0)
    assert ByRule().resolve(lambda: 0.4, (1, 28, 28)) == NoDenoiser()
    with pytest.raises(CompositionError, match="resolved once the noise"):
        ByRule().estimate(torch.zeros(3), 1.0, [(3,)])


def test_calibrated_noise_comes_first_and_the_rate_follows_it() -> None:
    found = prepare(
        experiment(
            method={"noise_multiplier": "calibrated"},
            server={"learning_rate": "by-rule"},
            privacy={"epsilon": 2.0},
            rounds=30,
        )
    )
    facts = PublicFacts(n_silos=3, n_users=20, dimension=650)
    assert found.method.server.learning_rate == rate_by_rule(found.method, facts, 30)
    assert found.epsilon_after(30) == pytest.approx(2.0, rel=2e-3)


def test_a_start_at_zero_is_for_one_layer() -> None:
    assert not prepare(experiment(model={"start": "zeros"})).task.initial().any()
    with pytest.raises(ModelError, match="hidden units that start at zero stay alike"):
        prepare(experiment(model={"name": "mlp", "start": "zeros"}))


# --- plans and sweeps ---------------------------------------------------------------------------------------------

PLAN = Plan(
    n_users=100,
    n_silos=5,
    rounds=None,
    noise_multipliers=(5.0,),
    sampling_rates=(1.0, 0.5),
    delta=1e-5,
    epsilon=4.87,
    group_sizes=(),
    records_per_silo=50,
    batch_size=10,
    epochs=5,
    colluding_silos=0,
    accountant="rdp",
)


def test_rounds_are_compared_at_one_epsilon() -> None:
    rows = noise_ratio_rows(PLAN, 650, [10, 40]).rows
    everyone = [row for row in rows if row["sampling_rate"] == 1]
    assert [row["rounds"] for row in everyone] == [10, 40]
    ten, forty = everyone
    assert forty["noise_multiplier"] == pytest.approx(2 * ten["noise_multiplier"], rel=3e-3)
    assert forty["rho"] == pytest.approx(ten["rho"], rel=3e-3)
    assert forty["noise"] == pytest.approx(forty["way"] * forty["rho"])
    smoothed = Laplacian(smoothing=1.0).estimate(
        torch.randn(650, generator=torch.Generator().manual_seed(0)), 1.0, [(650,)]
    )
    left = float(smoothed.square().mean().sqrt())
    assert forty["noise_smoothed"] / forty["noise"] == pytest.approx(left, rel=0.1)
    assert [row["smoothed_by_rule"] for row in rows] == [row["rho"] >= 0.5 for row in rows]
    assert forty["mebibytes_up"] == pytest.approx(4 * ten["mebibytes_up"])
    assert all(one["rho"] > ten["rho"] for one in rows if one["sampling_rate"] == 0.5)


def test_rounds_make_up_for_the_cap_on_steps_and_weights_for_what_they_shorten() -> None:
    ten, forty = (row for row in noise_ratio_rows(PLAN, 4, [10, 40]).rows if row["sampling_rate"] == 1)
    assert ten["step"] == 3.0
    assert ten["rounds_by_rule"] == round(0.25 * 10 / (3 * ten["rho"])) > 10
    assert forty["rounds_by_rule"] == pytest.approx(4 * ten["rounds_by_rule"], abs=2)
    assert ten["rho_uniform"] == pytest.approx(5 * ten["rho"])
    assert ten["rho_by_records"] == pytest.approx(5**0.5 * ten["rho"])


def test_what_is_encrypted_has_no_noise_and_costs_bytes() -> None:
    none, half, all_ = ratio_rows(5, 8192, [0.0, 0.5, 1.0])
    assert [row["error_left"] for row in (none, half, all_)] == [1.0, 0.5, 0.0]
    ckks = CkksParameters(silos=5)
    for key, length in (("mebibytes_up", ckks.fresh_bytes), ("mebibytes_down", ckks.sum_bytes)):
        sent = [5 * 8 * 8192, 5 * (length + 8 * 4096), 5 * 2 * length]
        assert [row[key] * 2**20 for row in (none, half, all_)] == pytest.approx(sent)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        ratio_rows(5, 100, [1.5])


@pytest.mark.parametrize("text", ["clip=1,2", "rounds=a", "rounds=", "ratio=x"])
def test_a_plan_over_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected rounds=T"):
        read_over(text)


def test_a_plan_over_rounds_needs_an_epsilon() -> None:
    with pytest.raises(ConfigError, match="give --epsilon"):
        noise_ratio_rows(replace(PLAN, epsilon=None, rounds=5), 650, [5])
