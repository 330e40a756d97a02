"""Methods over a channel whose compression error is the noise: its law, what a run writes, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import CompositionError, ConfigError
from fedveil.methods.derive import derive
from fedveil.methods.dp_fed_ls import dp_fed
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method, sum_noise_std
from fedveil.methods.named_channels import LayeredShares
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.uldp import uldp_avg_w, uldp_group
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.claims import Role
from fedveil.privacy.events import NoGuarantee
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from fedveil.training.steps import LocalSgd
from tests.messages import received, sender
from tests.runs import Silent, files, same_model

SILOS, CLIP, SIGMA = 3, 0.7, 5.0
LOCAL = LocalSgd(learning_rate=0.5, epochs=1, batch_size=2)


def additive(colluding: int = 0) -> Method:
    return uldp_avg_w(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, colluding_silos=colluding)


def layered(lattice: str | None = None, colluding: int = 0) -> Method:
    method = additive(colluding)
    assert isinstance(method.channel, GaussianShares)
    return replace(method, channel=LayeredShares(shares=method.channel, lattice=lattice))


def sums(d: int, size: float) -> np.ndarray:
    """Return the silos' sums, of unequal sizes: most parameters small, some at many times the noise."""
    random = np.random.default_rng(1)
    values = random.normal(0, size, (SILOS, d)) * np.array([[0.1], [1.0], [3.0]])
    values[:, ::1000] *= 50
    return values


def summed(method: Method, totals: np.ndarray, privacy: PrivacyRandomness, silos: int = SILOS) -> np.ndarray:
    return np.sum(
        [
            received(method.channel, totals[silo], sender(privacy, silo, senders=SILOS))
            for silo in range(silos)
        ],
        axis=0,
    )


# --- the law --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lattice", [None, "Z1"])
@pytest.mark.parametrize("colluding", [0, 1])
def test_uldp_avg_w_over_the_channel_has_the_noise_of_uldp_avg_w(lattice: str | None, colluding: int) -> None:
    """The honest silos' noise is N(0, sigma^2 C^2); a scale 2% off is rejected."""
    d = 150_000
    totals = sums(d, 0.1 * CLIP)
    honest = SILOS - colluding
    method = layered(lattice, colluding)
    noise = summed(method, totals, PrivacyRandomness.insecure(3), honest) - totals[:honest].sum(axis=0)
    std = SIGMA * CLIP
    assert stats.kstest(noise, "norm", args=(0, std)).pvalue > 1e-6
    sixth = 6 * np.sqrt(2 / d)  # six standard deviations of the mean square
    assert abs(np.mean((noise / std) ** 2) - 1) < sixth
    for wrong in (0.98, 1.02):
        assert abs(np.mean((noise / (wrong * std)) ** 2) - 1) > sixth
    correlation = np.corrcoef(noise, totals[:honest].sum(axis=0))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(d)
    expected = sum_noise_std(additive(colluding), SILOS)
    assert sum_noise_std(method, SILOS) == expected == pytest.approx(std * np.sqrt(SILOS / honest))


def test_every_message_has_a_key_of_its_own_and_a_seed_repeats_it() -> None:
    totals = np.zeros((SILOS, 500))
    once = summed(layered(), totals, PrivacyRandomness.insecure(3), 1)
    np.testing.assert_array_equal(once, summed(layered(), totals, PrivacyRandomness.insecure(3), 1))
    at = sender(PrivacyRandomness.system(), senders=SILOS)
    first, again = (received(layered().channel, totals[0], at) for _ in range(2))
    assert not np.isclose(first, again).any()


def test_a_message_is_far_shorter_than_float32_and_above_the_information_limit() -> None:
    totals = sums(50_000, 0.02 * CLIP)
    cost = layered().channel.send(totals[0], sender(PrivacyRandomness.insecure(0), senders=SILOS)).cost
    assert cost is not None
    assert cost.limit is not None
    bits = 8 * cost.bytes / len(totals[0])
    assert cost.limit < bits < 32 / 100


def test_a_sum_that_is_too_long_for_its_noise_is_cut_and_not_refused() -> None:
    """Whether all users of a silo agree is private: a round that ends because of it would tell."""
    at, channel = sender(PrivacyRandomness.insecure(0), senders=SILOS), layered().channel
    std = channel.message_std(SILOS)
    noise = received(channel, np.r_[np.full(5, 1e12), np.full(5, -1e12)], at) / std - np.repeat(
        [2.0**30, -(2.0**30)], 5
    )
    assert 0 < np.abs(noise).max() < 10


# --- what is derived ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colluding", [0, 1])
def test_the_event_is_that_of_the_additive_method_and_the_server_is_trusted(colluding: int) -> None:
    federation = PublicFacts(n_silos=SILOS, n_users=6)
    plain, over = derive(additive(colluding), federation), derive(layered(colluding=colluding), federation)
    assert over.event == plain.event
    assert over.event_for(Role.SILO) == plain.event_for(Role.SILO)
    assert isinstance(over.event_for(Role.SERVER), NoGuarantee)
    assert "encrypted" in over.uncovered[0]
    assert over.grid_loss == 0


# --- what is refused ------------------------------------------------------------------------------------------


def test_what_the_channel_cannot_serve_is_refused_with_the_reason() -> None:
    channel = layered().channel
    with pytest.raises(CompositionError, match="compression error is its noise"):
        LayeredShares(shares=GaussianShares(noise_multiplier=0.0, scale=1.0))
    with pytest.raises(CompositionError, match="clip bound"):
        replace(layered(), bound=Unbounded())
    clients = dp_fed(local=LOCAL, n_users=6, clip=CLIP, noise_multiplier=SIGMA)
    with pytest.raises(CompositionError, match="clients have no silo"):
        replace(clients, channel=channel)
    with pytest.raises(CompositionError, match="decodes one by one"):
        replace(layered(), protection=SecureAggregation())
    records = uldp_group(local=LOCAL, clip=CLIP, noise_multiplier=SIGMA, group_size=2)
    with pytest.raises(CompositionError, match="noise inside the silos"):
        replace(records, channel=channel)


def experiment(**changes: Any) -> Experiment:
    base = {
        "name": "try",
        "rounds": 2,
        "data": {"name": "digits", "n_users": 20, "n_silos": 3},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1, "epochs": 1, "batch_size": 8},
        "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0},
        "server": {"learning_rate": 20 / 3},
        "channel": {"name": "lrsuq"},
    }
    return parse(merge(base, changes), "test")


@pytest.mark.parametrize("name", ["fedavg", "uldp-group"])
def test_methods_without_shares_of_noise_are_refused_over_the_channel(name: str) -> None:
    document = experiment().model_dump(exclude_none=True)
    document["method"] = {"name": name}
    if name == "uldp-group":
        document["method"] |= {"clip": 0.5, "noise_multiplier": 5.0, "group_size": 2}
    with pytest.raises(CompositionError, match="neither silos nor the server add any"):
        prepare(parse(document, "test"))


def test_a_channel_without_noise_or_a_lattice_without_a_channel_is_refused() -> None:
    with pytest.raises(CompositionError, match="compression error is its noise"):
        prepare(experiment(method={"noise_multiplier": 0.0}))
    with pytest.raises(ConfigError, match="it belongs to name = 'lrsuq'"):
        experiment(channel={"name": "additive", "lattice": "E8"})
    with pytest.raises(ConfigError, match=r"channel\.lattice"):
        experiment(channel={"lattice": "F4"})


# --- a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        {"name": "uldp-naive", "clip": 0.5, "noise_multiplier": 5.0},
        {"name": "uldp-sgd", "clip": 0.5, "noise_multiplier": 5.0},
        {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0},
        {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0, "user_sampling_rate": 0.5},
    ],
    ids=lambda method: method["name"],
)
def test_methods_with_shares_run_over_the_channel(method: dict[str, Any], tmp_path: Path) -> None:
    document = experiment().model_dump(exclude_none=True) | {"method": method}
    if method["name"] == "uldp-sgd":
        del document["local"]
    outcome = run(prepare(parse(document, "test")), tmp_path, Silent())
    _, model, rows = files(outcome.folder)
    parameters = sum(value.size for value in model.values())
    assert "communication_cost" not in rows[0]
    for row in rows[1:]:
        communication_cost = row["communication_cost"]
        assert communication_cost["float32_bytes"] == 3 * 4 * parameters
        assert communication_cost["bits_per_parameter"] == 8 * row["bytes_up"] / (3 * parameters)
        assert communication_cost["ratio"] == pytest.approx(
            communication_cost["bits_per_parameter"] / communication_cost["limit"]
        )
        assert row["bytes_up"] * 5 < communication_cost["float32_bytes"]
    statement = json.loads((outcome.folder / "privacy.json").read_text())
    assert statement["epsilon"] == rows[-1]["epsilon"] > 0
    assert statement["trust"][0]["epsilon"] is None
    assert "LRSUQ" in statement["mechanisms"][0]
    assert "ChaCha20" in statement["randomness"]


def test_the_information_limit_is_taken_where_a_round_is_evaluated(tmp_path: Path) -> None:
    watcher = Silent()
    run(prepare(experiment(rounds=3, evaluate_every=2)), tmp_path, watcher)
    costs = [row["communication_cost"] for row in watcher.rows if row["round"]]
    assert [cost["limit"] is None for cost in costs] == [True, False, False]
    assert [cost["ratio"] is None for cost in costs] == [True, False, False]
    assert all(cost["acceptance"] > 0 and cost["bits_per_parameter"] > 0 for cost in costs)


def test_a_lattice_of_ones_own_runs(tmp_path: Path) -> None:
    outcome = run(prepare(experiment(channel={"lattice": "Z3"}, rounds=1)), tmp_path, Silent())
    assert outcome.row["communication_cost"]["bits_per_parameter"] > 0.5


def test_an_interrupted_run_over_the_channel_resumes_to_the_same_model(tmp_path: Path) -> None:
    seeded = experiment(privacy={"insecure_seed": 11})
    whole = files(run(prepare(seeded), tmp_path, Silent()).folder)
    with pytest.raises(KeyboardInterrupt):
        run(prepare(seeded), tmp_path / "cut", Silent(interrupt_after=1))
    resumed = files(resume(tmp_path / "cut" / "try", Silent()).folder)
    assert same_model(resumed[1], whole[1])
    assert [row.get("communication_cost") for row in resumed[2]] == [
        row.get("communication_cost") for row in whole[2]
    ]


def test_calibration_finds_the_same_noise_over_the_channel() -> None:
    wanted = {"method": {"noise_multiplier": "calibrated"}, "privacy": {"epsilon": 2.0}}
    over = prepare(experiment(**wanted)).method
    plain = prepare(experiment(**wanted, channel={"name": "additive"})).method
    assert sum_noise_std(over, SILOS) == sum_noise_std(plain, SILOS)
