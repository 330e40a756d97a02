"""Audits: they find what is there, and claim nothing that is not."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from fedveil.errors import ConfigError, PrivacyError, RunFolderError
from fedveil.privacy.audit import canary_bound, lowest_epsilon, membership, refutation
from fedveil.randomness import PrivacyRandomness
from fedveil.run.audit import audit, canary_scores, infer_membership
from fedveil.run.config.experiment import merge, parse
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.simulation import play_round
from fedveil.run.training_run import resume, run
from tests.commands import as_json, output
from tests.test_report import rewrite


def brute_auc(members: np.ndarray, others: np.ndarray) -> float:
    return float(np.mean((members[:, None] > others) + 0.5 * (members[:, None] == others)))


def test_auc_counts_pairs_and_ties() -> None:
    random = np.random.default_rng(1)
    members, others = random.integers(0, 6, 40).astype(float), random.integers(0, 5, 70).astype(float)
    assert membership(members, others).auc == pytest.approx(brute_auc(members, others))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random, truth = np.random.default_rng(2), stats.norm.cdf(0.5 / math.sqrt(2))
    hits = 0
    for _ in range(1000):
        found = membership(random.normal(0.5, 1, 60), random.normal(0, 1, 80), confidence=0.9)
        hits += found.low <= truth <= found.high
    assert stats.binomtest(hits, 1000, 0.9).pvalue > 1e-6
    assert stats.binomtest(hits, 1000, 0.95).pvalue < 1e-3


@pytest.mark.parametrize(("n", "k", "truth"), [(3, 3, 0.8), (10, 10, 0.95), (30, 30, 0.99), (20, 300, 0.95)])
def test_the_interval_covers_few_records_and_areas_near_1(n: int, k: int, truth: float) -> None:
    """DeLong's covers 67, 72, 75 and 84 % here: without an overlap it says that the area is 1, and nothing else."""
    random, shift = np.random.default_rng(3), math.sqrt(2) * stats.norm.ppf(truth)
    found = [membership(random.normal(shift, 1, n), random.normal(0, 1, k)) for _ in range(200)]
    assert sum(one.low <= truth <= one.high for one in found) >= 188
    apart = membership(np.arange(n) + 9.0, 0.0 - np.arange(k))
    assert apart.low < 1 - 1 / (n + k)
    assert membership(0.0 - np.arange(n), np.arange(k) + 9.0).high == pytest.approx(1 - apart.low)


def test_true_positive_rates_let_no_more_than_the_rate_pass() -> None:
    others = np.arange(1000.0)
    members = np.array([998.5, 997.5, 989.5, 988.5])
    rates = dict(membership(members, others).true_positive_rates)
    assert rates == {0.001: 0.25, 0.01: 0.75}


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_pure_privacy_is_refuted_as_rarely_as_the_confidence_says(
    epsilon: float,
) -> None:
    """Randomised response is the worst case of pure DP: the bound may exceed its epsilon in 5% of the audits."""
    random = np.random.default_rng(3)
    likely = 1 / (1 + math.exp(-epsilon))
    wrong = 0
    for _ in range(600):
        included = random.integers(0, 2, 100).astype(bool)
        answers = np.where(random.random(100) < likely, included, ~included)
        scores = answers + 0.1 * random.random(100)
        found = canary_bound(scores, included, delta=0.0)
        wrong += found.epsilon > epsilon + 1e-5
    assert stats.binomtest(wrong, 600, 0.05, "greater").pvalue > 1e-6


def test_certainty_is_worth_much_and_delta_makes_it_worth_less() -> None:
    included = np.arange(400) < 200
    scores = -np.arange(400.0)
    strong = canary_bound(scores, included, delta=0.0)
    assert (strong.right, strong.guesses) == (200, 200)
    assert strong.epsilon == pytest.approx(-math.log(0.05 ** (-1 / 200) - 1), rel=1e-4)
    assert canary_bound(scores, included, delta=1e-4).epsilon < strong.epsilon
    assert canary_bound(-scores, included, delta=0.0).epsilon == 0.0


def test_the_chance_of_right_guesses_falls_with_their_number_and_grows_with_epsilon() -> None:
    by_right = [refutation(1.0, canaries=100, guesses=50, right=v, delta=1e-4) for v in range(51)]
    assert by_right[0] == 1.0
    assert all(a >= b - 1e-12 for a, b in pairwise(by_right[35:]))
    by_epsilon = [refutation(e, canaries=100, guesses=50, right=45, delta=1e-4) for e in (0.0, 0.5, 1.0, 3.0)]
    assert by_epsilon == sorted(by_epsilon)
    assert lowest_epsilon(canaries=100, guesses=50, right=25, delta=1e-5, confidence=0.95) == 0.0


@pytest.mark.parametrize(("n", "k"), [(1, 5), (5, 0)])
def test_too_little_to_compare_is_refused(n: int, k: int) -> None:
    with pytest.raises(PrivacyError, match="two of each"):
        membership(np.zeros(n), np.zeros(k))
    with pytest.raises(PrivacyError, match="at least 4"):
        canary_bound(np.zeros(3), np.zeros(3, dtype=bool), delta=0.0)
    with pytest.raises(PrivacyError, match="not a number"):
        membership(np.full(5, math.nan), np.zeros(5))


# --- audits of runs -------------------------------------------------------------------------------------------


def finished(folder: Path, **changes: Any) -> Path:
    base = {
        "name": "audited",
        "rounds": 6,
        "data": {"name": "digits", "n_users": 120, "allocation": {"law": "clients"}},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.5, "epochs": 3, "batch_size": 4},
        "method": {"name": "dp-fed", "clip": 1.0, "noise_multiplier": 3.0, "client_sampling_rate": 0.5},
        "privacy": {"delta": 1e-3},
    }
    return run(prepare(parse(merge(base, changes), "test")), folder, NullObserver()).folder


def test_a_private_run_stands_and_the_attack_is_near_chance(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    found = audit(folder, canaries=60)
    assert found.bound is not None
    assert found.claimed is not None
    assert not found.is_refuted
    assert found.inference.low < 0.56
    written = json.loads((folder / "audit.json").read_text())
    assert written["schema_version"] == 1
    assert written["unit"] == "client"
    assert written["bound"]["canaries"] == 60
    assert 0.5 < written["accuracy_bound"] <= written["membership_bound"] <= 1.0


@pytest.fixture(scope="module")
def noiseless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without noise, with large steps."""
    changes = {"noise_multiplier": 0.0, "client_sampling_rate": 1.0, "clip": 5.0}
    return finished(tmp_path_factory.mktemp("noiseless"), method=changes, rounds=5)


def test_training_without_noise_is_found_out(noiseless: Path, tmp_path: Path) -> None:
    """No noise, large steps: canaries that trained are recognised, and no finite claim would stand."""
    folder = copytree(noiseless, tmp_path / noiseless.name)
    found = audit(folder, canaries=120)
    assert found.claimed is None
    assert (found.accuracy_bound, found.membership_bound) == (None, None)
    assert found.bound is not None
    assert found.bound.epsilon > 1.0


def test_a_claim_below_the_bound_is_refuted(noiseless: Path, tmp_path: Path) -> None:
    folder = copytree(noiseless, tmp_path / noiseless.name)
    forged = finished(tmp_path / "other", rounds=1, method={"noise_multiplier": 40.0}) / "privacy.json"
    (folder / "privacy.json").write_text(forged.read_text())
    found = audit(folder, canaries=120)
    assert found.claimed is not None
    assert found.claimed < 0.3
    assert found.is_refuted
    assert json.loads((folder / "audit.json").read_text())["refuted"] is True


def test_records_that_differ_are_told_by_the_command(noiseless: Path, tmp_path: Path) -> None:
    """A model fitted to the test records and to wrong labels of the others: the command and its JSON say so."""
    folder = copytree(noiseless, tmp_path / noiseless.name)
    assert as_json("audit", str(folder), "--canaries", "0")["unlike_records"] is None
    _, experiment = RunFolder.open(folder)
    people = prepare(experiment).population
    both = np.concatenate((people.test_features, people.train.features))
    labels = np.concatenate((people.test_targets, (people.train.targets + 1) % 10))
    features = torch.from_numpy(people.scale.apply(both)).flatten(1)
    fitted = torch.nn.Linear(features.shape[1], people.n_classes or 0)
    steps = torch.optim.Adam(fitted.parameters(), lr=0.1)
    for _ in range(60):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(fitted(features), torch.from_numpy(labels)).backward()
        steps.step()
    stored = load_file(folder / "model.safetensors")
    by_shape = {tuple(value.shape): value.detach() for value in fitted.parameters()}
    save_file(
        {name: by_shape[tuple(value.shape)] for name, value in stored.items()}, folder / "model.safetensors"
    )
    told = as_json("audit", str(folder), "--canaries", "0")
    assert told["inference"]["high"] < 0.5
    assert "these differ from each other" in told["unlike_records"]
    assert "WARNING" in output("audit", str(folder), "--canaries", "0")


def test_users_of_several_silos_are_audited_as_users(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        data={"n_users": 40, "allocation": {"law": "zipf"}, "n_silos": 3},
        method={"name": "uldp-avg-w", "client_sampling_rate": None},
        rounds=2,
    )
    found = audit(folder, canaries=20)
    assert found.unit == "user"
    assert not found.is_refuted


def test_an_audit_plays_the_rounds_that_the_claim_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that its budget ended early claims less than all rounds cost, which an attack on all of them may show."""
    folder = finished(tmp_path, rounds=30, privacy={"budget": 1.5})
    played = len((folder / "metrics.jsonl").read_text().splitlines()) - 1
    assert 0 < played < 30
    play = Mock(side_effect=play_round)
    monkeypatch.setattr("fedveil.run.audit.play_round", play)
    audit(folder, canaries=20)
    assert [call.args[0].round_number for call in play.call_args_list] == list(range(1, played + 1))


def test_records_that_no_weight_lets_train_are_no_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of the main silo a user is not trained: counted as members these records there would hide what leaks."""
    prepared = prepare(
        parse(
            {
                "name": "main",
                "rounds": 1,
                "data": {"name": "digits", "n_users": 40, "n_silos": 3},
                "model": {"name": "linear"},
                "method": {"name": "uldp-sgd-w", "power": "main", "clip": 1.0, "noise_multiplier": 1.0},
            },
            "test",
        )
    )
    asked: list[np.ndarray] = []

    def losses(_: Any, __: Any, ___: Any, features: np.ndarray, ____: Any) -> np.ndarray:
        asked.append(features)
        return np.zeros(len(features))

    monkeypatch.setattr("fedveil.run.audit._losses", losses)
    infer_membership(prepared, prepared.task.initial())
    records = prepared.population.train
    counts = np.zeros((40, 3), dtype=np.int64)
    np.add.at(counts, (records.user, records.silo), 1)
    trained = {row.tobytes() for row in records.features[records.silo == counts.argmax(axis=1)[records.user]]}
    assert len(trained) < len(records.features)
    assert all(row.tobytes() in trained for row in asked[0])


def test_runs_that_cannot_be_audited_say_why(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        audit(tmp_path)
    folder = finished(tmp_path, rounds=1)
    with pytest.raises(ConfigError, match="120 users"):
        audit(folder, canaries=500)
    (folder / "model.safetensors").unlink()
    with pytest.raises(RunFolderError, match="fedveil resume"):
        audit(folder)


def test_users_without_records_are_canaries_too_so_that_no_refusal_counts_them(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        data={"n_users": 2000, "allocation": {"law": "zipf"}, "n_silos": 2},
        method={"name": "uldp-avg", "client_sampling_rate": None},
        privacy={"delta": 1e-4},
        rounds=1,
    )
    prepared = prepare(RunFolder.open(folder)[1])
    present = len(np.unique(prepared.population.train.user))
    assert present < 1900
    coins, scores = canary_scores(prepared, 1900, PrivacyRandomness.insecure(3), 1)
    assert len(coins) == len(scores) == 1900
    assert scores[:present].all()
    assert not scores[present:].any()
    with pytest.raises(ConfigError, match="2001 canaries, but only 2000 users; ask for") as refused:
        canary_scores(prepared, 2001, PrivacyRandomness.insecure(3), 1)
    assert str(present) not in str(refused.value)


def test_an_audit_that_could_leave_nothing_trains_nothing(
    noiseless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.run.audit.os.access", lambda path, mode: False)
    with pytest.raises(RunFolderError, match="nothing can be written; audit a copy") as refused:
        audit(noiseless)
    assert "resume" not in str(refused.value)


def test_an_audit_of_a_run_whose_members_are_unknown_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path, rounds=1)
    rewrite(folder / "diagnostics.json", records_sha256="0" * 64)  # a table that has changed since
    with pytest.raises(RunFolderError, match="restore the data"):
        audit(folder, canaries=0)
    (folder / "diagnostics.json").unlink()  # what a run between institutions leaves
    with pytest.raises(RunFolderError, match="which records were trained on is unknown"):
        audit(folder, canaries=0)


def test_a_run_does_not_go_on_with_other_records(tmp_path: Path) -> None:
    folder = finished(tmp_path, rounds=1)
    assert resume(folder, NullObserver()).rounds == 1
    rewrite(folder / "diagnostics.json", records_sha256="0" * 64)
    with pytest.raises(RunFolderError, match="restore the data"):
        resume(folder, NullObserver())
