"""The first half page of a report: figures that hold, and no exact figure of private records without its mark."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr
from sklearn.metrics import confusion_matrix, roc_auc_score, roc_curve

from fedveil.errors import ConfigError, PrivacyError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.audit import attack_accuracy, membership_bound
from fedveil.privacy.events import ComposedEvent, GaussianEvent, GridEvent, SelfComposedEvent
from fedveil.privacy.statement import Statement
from fedveil.report.page import report_page, write_report
from fedveil.report.run_data import NOT_COVERED, load_run
from fedveil.report.summary import PUBLIC, summarise
from fedveil.run.releases.records import calibration_bins, confusion, roc_points
from tests.report_folders import statement, write_run


def gaussian(noise_multiplier: float, rounds: int, accountant: str = "pld") -> Statement:
    """A statement of Gaussian releases."""
    epsilon = gaussian_epsilon(math.sqrt(rounds) / noise_multiplier, 1e-5)
    said = Statement.from_json(statement(epsilon=epsilon))
    event = SelfComposedEvent(event=GaussianEvent(noise_multiplier=noise_multiplier), count=rounds)
    return replace(said, event=event, accountant=accountant, epsilons=((accountant, epsilon),))


@pytest.mark.parametrize(("noise_multiplier", "rounds"), [(1.0, 1), (5.0, 30), (20.0, 30)])
def test_the_best_attack_on_gaussian_noise_is_right_as_often_as_the_bound_says(
    noise_multiplier: float, rounds: int
) -> None:
    """Which of N(0, 1) and N(mu, 1) a coin chose: the threshold mu / 2 is optimal, and right with Phi(mu / 2)."""
    mu = math.sqrt(rounds) / noise_multiplier
    bound = attack_accuracy(gaussian(noise_multiplier, rounds))
    assert bound == pytest.approx(float(ndtr(mu / 2)), rel=1e-9)
    draws = np.random.default_rng(0).normal(size=200_000)
    truth = np.arange(len(draws)) % 2
    right = np.mean((draws + mu * truth > mu / 2) == truth)
    assert abs(right - bound) < 5 * 0.5 / math.sqrt(len(draws))


def test_the_grid_of_the_noise_hardly_moves_the_bound_of_an_attack() -> None:
    plain = gaussian(1.0, 1)
    said = replace(plain, event=ComposedEvent(events=(plain.event, GridEvent(loss=1e-9))))
    assert attack_accuracy(said) == pytest.approx(attack_accuracy(plain), abs=1e-8)


def test_the_bound_of_epsilon_alone_stands_where_the_event_has_no_number() -> None:
    said = replace(gaussian(1.0, 4), accountant="unknown")
    assert said.epsilon is not None
    odds = math.exp(said.epsilon)
    assert attack_accuracy(said) == pytest.approx((odds + said.delta) / (1 + odds))
    assert attack_accuracy(Statement.from_json(statement(epsilon=None))) is None


def test_a_member_is_not_recognised_more_surely_than_its_bound_says() -> None:
    """Random pairs of laws: Bayes' rule against prior + epsilon / 4 + delta, with the exact delta of every epsilon."""
    random = np.random.default_rng(5)
    closest = 1.0
    for _ in range(300):
        size = int(random.integers(2, 6))
        with_unit, without = random.dirichlet(np.full(size, 0.5)), random.dirichlet(np.full(size, 0.5))
        mix = random.uniform()
        with_unit = mix * without + (1 - mix) * with_unit
        prior, epsilon = random.uniform(0.01, 0.99), random.uniform(0, 2)
        delta = max(1e-15, float(np.maximum(with_unit - math.exp(epsilon) * without, 0).sum()))
        posterior = prior * with_unit / (prior * with_unit + (1 - prior) * without)
        said = replace(gaussian(1.0, 4), accountant="unknown", epsilon=epsilon, delta=delta)
        bound = membership_bound(said, prior)
        assert bound is not None
        mean = float(with_unit @ posterior)
        odds = math.exp(epsilon) * prior / (1 - prior)
        assert mean <= (odds + delta) / (1 + odds) + 1e-12
        assert (odds + delta) / (1 + odds) <= bound + 1e-12
        closest = min(closest, bound - mean)
    assert closest < 0.05  # c = 1: a bound far from what is attained would prove nothing
    assert membership_bound(Statement.from_json(statement(epsilon=None))) is None
    with pytest.raises(PrivacyError, match="prior = 2"):
        membership_bound(said, 2.0)


def test_the_linear_bound_of_membership_is_the_tangent_of_the_one_by_epsilon() -> None:
    said = replace(gaussian(1.0, 4), accountant="unknown")
    for epsilon in (0.01, 0.5, 3.0):
        small = replace(said, epsilon=epsilon, delta=1e-15)
        by_epsilon, linear = attack_accuracy(small), membership_bound(small)
        assert by_epsilon is not None
        assert linear is not None
        assert by_epsilon <= linear
        assert epsilon > 0.1 or linear - by_epsilon < 1e-6


def test_the_share_of_right_guesses_is_rounded_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = load_run(folder)
    for multiplier, verb, share in (
        (20.0, "hides well", 51),
        (1.0, "hides", 70),
        (0.5, "only partly hides", 85),
    ):
        said = summarise(replace(run, statement=gaussian(multiplier, 1)))
        assert f"This model {verb} whether" in said.claim
        exact = 100 * float(ndtr(0.5 / multiplier))
        assert math.ceil(exact) == share
        assert f"at most {share} times in 100 " in said.claim
    said = summarise(replace(run, statement=gaussian(0.1, 1)))
    assert said.claim.endswith("guesses right practically always.")
    assert said.tone == "weak"


def test_nothing_guaranteed_is_said_first(tmp_path: Path) -> None:
    said = summarise(load_run(write_run(tmp_path / "run", epsilon=None)))
    assert said.claim.startswith("Nothing is guaranteed to any person: contributions are not clipped")
    assert said.tone == "none"
    large = replace(gaussian(5.0, 1), units=1000, delta=0.5)
    said = summarise(replace(load_run(tmp_path / "run"), statement=large))
    assert (said.claim, said.tone) == ("No single person is protected: δ is not below 1 / 1000.", "none")


def test_a_metric_is_marked_unless_the_run_recorded_that_its_test_is_public(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    assert summarise(load_run(folder)).coverage == NOT_COVERED
    page = report_page(load_run(folder))
    assert page.count(NOT_COVERED) >= 4  # the summary, its remark, the result, each curve
    (folder / "public_test.json").write_text(json.dumps({"schema_version": 1, "records": 40}))
    run = load_run(folder)
    assert summarise(run).coverage == PUBLIC
    assert NOT_COVERED not in report_page(run)


def test_a_result_stands_beside_the_constant_answer_and_beside_no_privacy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    found = json.loads((folder / "diagnostics.json").read_text())
    (folder / "diagnostics.json").write_text(json.dumps(found | {"baseline": {"accuracy": 0.2, "loss": 2.3}}))
    free = write_run(tmp_path / "free", rounds=3, epsilon=None, best=0.95)
    said = summarise(load_run(folder), without_privacy=load_run(free))
    assert [one.label for one in said.reached] == [
        "This model",
        "Constant baseline",
        f"Without privacy ({NOT_COVERED})",
    ]
    assert said.reached[1].value == 0.2
    assert said.reached[2].value > said.reached[0].value
    assert "Without privacy" in write_report(folder, without_privacy=free).read_text()


def test_a_notebook_shows_the_bars_of_the_report(tmp_path: Path) -> None:
    said = summarise(load_run(write_run(tmp_path / "run", rounds=3)))
    shown = said._repr_html_()
    assert shown.count("<svg") == len(said.reached) > 0
    assert f'width="{100 * said.reached[0].value:.2f}"' in shown
    beyond = replace(said, reached=(replace(said.reached[0], value=-0.4), *said.reached[1:]))
    assert "<svg" not in beyond._repr_html_()


def test_only_a_run_without_privacy_on_the_same_data_is_put_beside(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", rounds=1))
    with pytest.raises(
        ConfigError, match=r"this run has a guarantee \(epsilon 2.50\); give a run without one"
    ):
        summarise(run, without_privacy=run)
    other = write_run(tmp_path / "o", rounds=1, epsilon=None, settings="[data]\nname = 'digits'\n")
    with pytest.raises(ConfigError, match=r"\[data\] of its experiment.toml differs"):
        summarise(run, without_privacy=load_run(other))


def test_a_summary_has_no_private_figure_but_the_marked_metric(tmp_path: Path) -> None:
    """Other diagnostics and other private fields of the rounds change no word of it."""
    folder = write_run(tmp_path / "run", rounds=3)
    before = str(summarise(load_run(folder)))
    found = json.loads((folder / "diagnostics.json").read_text())
    found |= {"records_per_silo": [9, 9, 9, 9, 9], "silo_names": ["a", "b", "c", "d", "e"]}
    found["records_per_user"] |= {"users_with_records": 3}
    (folder / "diagnostics.json").write_text(json.dumps(found))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row |= {"contributions": 7, "seconds": 99.0, "norms": [5.0] * 7, "clipped": 1.0, "nonfinite": 4}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert str(summarise(load_run(folder))) == before


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_curves_on_public_records_agree_with_scikit_learn(weighted: bool, ties: bool) -> None:
    rng = np.random.default_rng(3)
    targets = rng.integers(0, 2, 150)
    score = np.clip(rng.normal(0.4 + 0.2 * targets, 0.2), 0, 1)
    score = score.round(1) if ties else score
    weight = rng.uniform(0.1, 3, 150) if weighted else np.ones(150)
    false, true, _ = roc_curve(targets, score, sample_weight=weight, drop_intermediate=False)
    np.testing.assert_allclose(roc_points(score, targets, weight), np.column_stack((false, true)), atol=1e-12)
    probabilities = np.column_stack((1 - score, score))
    predicted = probabilities.argmax(axis=1)
    np.testing.assert_allclose(
        confusion(probabilities, targets, weight), confusion_matrix(targets, predicted, sample_weight=weight)
    )
    bins = calibration_bins(score, targets, weight)
    assert sum(one["weight"] for one in bins) == pytest.approx(weight.sum())
    for one in bins:
        inside = np.minimum((score * 10).astype(int), 9) == min(int(one["predicted"] * 10 + 1e-9), 9)
        assert one["observed"] == pytest.approx(np.average(targets[inside], weights=weight[inside]))


def test_long_curves_are_thinned_and_keep_their_area() -> None:
    rng = np.random.default_rng(4)
    targets = rng.integers(0, 2, 5000)
    score = 1 / (1 + np.exp(-rng.normal(targets, 1)))
    points = roc_points(score, targets, np.ones(5000))
    assert len(points) == 200
    assert np.trapezoid(points[:, 1], points[:, 0]) == pytest.approx(roc_auc_score(targets, score), abs=2e-3)
    assert not len(roc_points(score, np.ones(5000, dtype=int), np.ones(5000)))
