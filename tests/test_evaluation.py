"""Private evaluation: figures of noisy counts against exact ones, and test metrics inside of a run's budget."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

import fedveil as fv
from fedveil.bundle.card import CARD
from fedveil.bundle.writing import bundle_run
from fedveil.errors import FedveilError, IntegrityError, RunFolderError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.randomness import PrivacyRandomness
from fedveil.report.page import write_report
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.evaluation import attach_scores, outputs_of
from fedveil.run.releases.release import noisy_sum
from fedveil.run.setup import Prepared
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import continue_run, resume, run
from fedveil.statistics.evaluation.binary import (
    LabelledBins,
    ScoreCounts,
    auc,
    brier,
    enough_bins,
    observed_minus_predicted,
)
from fedveil.statistics.evaluation.counts import (
    FINE,
    accuracy,
    balanced_accuracy,
    equal_mass_edges,
    probabilities,
    variance_of_means,
)
from fedveil.statistics.evaluation.evaluator import ScoreBins
from fedveil.statistics.evaluation.result import FILE, ReleasedEvaluation, read_evaluated
from fedveil.statistics.local_vectors import LocalStatistic, silo_sums
from fedveil.statistics.result import NoisySums
from fedveil.statistics.strategy import Strategy
from tests.hospitals import FILES, prepared_run, write_tables
from tests.runs import Silent, json_lines

Z = 4.9
CODE = Strategy("prefix", len(FINE) + 1, 2)
TRUE_AUC = float(norm.cdf(1.2 / math.sqrt(2)))


def people(rng: np.random.Generator, n: int, prevalence: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and calibrated log-odds of a binormal score whose area under the curve is TRUE_AUC."""
    labels = (rng.random(n) < prevalence).astype(np.int64)
    scores = 1.2 * (rng.normal(size=n) + 1.2 * labels) - 0.72 + math.log(prevalence / (1 - prevalence))
    return labels, scores


def released(
    rng: np.random.Generator, labels: np.ndarray, scores: np.ndarray, sd: float, bins: int
) -> ScoreCounts:
    """Return what both releases make of one record a person; sd is the noise of the whole evaluation's budget."""
    fine = np.zeros(CODE.width)
    np.add.at(fine, np.searchsorted(FINE, scores, side="right"), 1)
    noisy = CODE.matrix @ fine + sd / math.sqrt(0.15) * rng.normal(size=CODE.n_sent)
    edges = equal_mass_edges(CODE.decoder @ noisy, bins, 0.0)
    cells = np.zeros((2, len(edges) + 1))
    np.add.at(cells, (labels, np.searchsorted(edges, scores, side="left")), 1)
    second = sd / math.sqrt(0.85)
    return ScoreCounts(
        cells=cells + second * rng.normal(size=cells.shape),
        variance=second**2,
        edges=edges,
        people_per_unit=1.0,
    )


def simulated(reps: int, n: int, sd: float, stated: float = 1.0) -> tuple[np.ndarray, float, float]:
    """Return errors of the area under the curve, and how often its intervals hold the sample's and the population's.

    Args:
        reps: simulations.
        n: people in each.
        sd: of the noise.
        stated: what the noise is said to be, in parts of what it is.
    """
    rng = np.random.default_rng(0)
    bins = next(b for b in range(8, 33) if enough_bins(b, sd / math.sqrt(0.85), n) or b == 32)
    errors, here, there = [], 0, 0
    for _ in range(reps):
        labels, scores = people(rng, n)
        counts = released(rng, labels, scores, sd, bins)
        found = auc(replace(counts, variance=counts.variance * stated**2))
        assert found is not None
        exact, interval = float(roc_auc_score(labels, scores)), found.interval
        errors.append(found.value - exact)
        here += (interval.low_here or 0) <= exact <= (interval.high_here or 1)
        there += (interval.low or 0) <= TRUE_AUC <= (interval.high or 1)
    return np.array(errors), here / reps, there / reps


# --- figures ------------------------------------------------------------------------------------------------------


def test_without_noise_figures_are_those_of_the_records() -> None:
    """The area to what 30 bins lose; accuracy and balanced accuracy exactly, because the threshold is an edge."""
    labels, scores = people(np.random.default_rng(1), 4000, 0.3)
    counts = replace(released(np.random.default_rng(1), labels, scores, 1e-6, 30), variance=1e-12)
    found = auc(counts)
    assert found is not None
    assert found.value == pytest.approx(roc_auc_score(labels, scores), abs=5e-4)
    predicted = scores > 0
    shares = [float((predicted[labels == c] == c).mean()) for c in (0, 1)]
    for figure, exact in (
        (accuracy, float((predicted == labels).mean())),
        (balanced_accuracy, np.mean(shares)),
    ):
        value = figure(counts)
        assert value is not None
        assert value.value == pytest.approx(exact, abs=1e-6)


def test_correcting_ties_removes_most_of_what_binning_loses() -> None:
    labels, scores = people(np.random.default_rng(2), 200_000)
    counts = replace(released(np.random.default_rng(2), labels, scores, 1e-6, 8), variance=1e-12)
    (h0, h1), exact = counts.cells, roc_auc_score(labels, scores)
    plain = float(h1 @ (np.cumsum(h0) - h0 / 2)) / (h0.sum() * h1.sum())
    found = auc(counts)
    assert found is not None
    assert exact - plain > 0.002
    assert abs(found.value - exact) < 0.25 * (exact - plain)


def test_the_area_and_its_intervals_at_the_goal() -> None:
    """2,000 people, epsilon .5: 60 simulations here, 300 in the slow twin, which holds the figures themselves."""
    errors, here, there = simulated(60, 2000, 7.03)
    assert np.abs(errors).mean() < 0.0100 + Z * np.abs(errors).std() / math.sqrt(60)
    assert abs(errors.mean()) < Z * errors.std() / math.sqrt(60)
    for share in (here, there):
        assert share > 0.95 - Z * math.sqrt(0.95 * 0.05 / 60)
    assert simulated(60, 2000, 7.03, stated=0.4)[1] < 0.8


@pytest.mark.slow
def test_the_area_and_its_intervals_over_300_simulations() -> None:
    errors, here, there = simulated(300, 2000, 7.03)
    assert np.abs(errors).mean() <= 0.0100
    for share in (here, there):
        assert 0.93 - 0.013 <= share <= 0.97 + 0.013


def test_a_class_of_too_few_people_has_no_figures() -> None:
    counts = released(np.random.default_rng(3), *people(np.random.default_rng(3), 2000, 0.02), 7.0, 10)
    assert not counts.enough
    assert auc(counts) is None


def test_scores_that_bins_do_not_tell_apart_have_no_area() -> None:
    """All within a thousandth of each other, far from the threshold: ties would pull any area to one half."""
    labels, scores = people(np.random.default_rng(6), 3000)
    close = released(np.random.default_rng(6), labels, 5.3 + 1e-4 * scores, 1.0, 10)
    assert auc(close) is None
    assert accuracy(close) is not None
    near = auc(released(np.random.default_rng(6), labels, 0.01 * scores, 1.0, 10))
    assert near is not None
    assert near.value == pytest.approx(roc_auc_score(labels, scores), abs=0.02)


def test_gradients_are_those_of_differences() -> None:
    """What one person in a cell changes, by moving every cell a little; the correction of ties aside."""
    counts = released(np.random.default_rng(4), *people(np.random.default_rng(4), 3000), 1.0, 9)
    for figure in (accuracy, balanced_accuracy):
        base, step, squares = figure(counts), 1e-3, 0.0
        assert base is not None
        for place in np.ndindex(counts.cells.shape):
            moved = counts.cells.copy()
            moved[place] += step
            other = figure(replace(counts, cells=moved))
            assert other is not None
            squares += ((other.value - base.value) / step) ** 2
        assert base.noise == pytest.approx(counts.variance * squares, rel=1e-4)


def test_a_quotient_is_that_of_the_cells_and_divides_by_no_noise() -> None:
    cells = np.array([[40.0, 10.0], [20.0, 30.0]])
    counts = ScoreCounts(cells=cells, variance=1e-12, edges=(0.0,), people_per_unit=1.0)
    ones, positive = np.ones((2, 2)), np.array([[0.0, 0.0], [1.0, 1.0]])
    found = counts.quotient(positive, ones)
    assert found is not None
    assert found.estimate == pytest.approx(0.5)
    assert found.high is not None
    assert (found.high - found.estimate) / 1.96 == pytest.approx(math.sqrt(0.25 / 100), rel=0.02)
    assert replace(counts, variance=1e4).quotient(positive, ones) is None


def test_scores_on_the_threshold_predict_class_0_and_nothing_is_lost() -> None:
    cells = LabelledBins((-1.0, 0.0, 0.0, 2.0))
    assert cells.size == 11
    assert len(set(cells.labels)) == 11
    counts = ScoreCounts(cells=np.zeros((2, 5)), variance=1.0, edges=cells.edges, people_per_unit=1.0)
    assert counts.predicted_classes.tolist() == [0, 0, 0, 1, 1]
    assert np.searchsorted(cells.edges, [-9, 0.0, 1e-9], side="left").tolist() == [0, 1, 3]


def test_probabilities_of_bins_are_those_of_their_scores() -> None:
    _, scores = people(np.random.default_rng(5), 50_000)
    fine = np.zeros(CODE.width)
    np.add.at(fine, np.searchsorted(FINE, scores, side="right"), 1)
    edges = equal_mass_edges(fine, 10, 0.0)
    mean, square = probabilities(fine, edges)
    place, p = np.searchsorted(edges, scores, side="left"), 1 / (1 + np.exp(-scores))
    for bin_ in range(len(edges) + 1):
        if (place == bin_).any():
            assert mean[bin_] == pytest.approx(p[place == bin_].mean(), abs=0.01)
            assert square[bin_] == pytest.approx((p[place == bin_] ** 2).mean(), abs=0.01)


def test_the_area_of_these_people_holds_where_noise_is_small_beside_what_bins_leave_untold() -> None:
    """Without noise the order within a bin is what is unknown; an interval of the noise alone would hold nothing."""
    hits = 0
    for seed in range(40):
        labels, scores = people(np.random.default_rng(seed), 4000)
        found = auc(replace(released(np.random.default_rng(seed), labels, scores, 1e-6, 12), variance=1e-12))
        assert found is not None
        low, high = found.interval.low_here, found.interval.high_here
        assert low is not None
        assert high is not None
        hits += low <= roc_auc_score(labels, scores) <= high
        assert high - low < 0.01
    assert hits >= 32


def test_the_order_of_a_persons_pairs_is_one_order() -> None:
    """The same people in five silos with the same scores: five times the pairs, and no more orders."""
    labels, scores = people(np.random.default_rng(3), 4000)
    counts = replace(released(np.random.default_rng(3), labels, scores, 1e-6, 12), variance=1e-12)
    once = auc(counts)
    pairs = auc(replace(counts, cells=5 * counts.cells, people_per_unit=5.0))
    assert once is not None
    assert pairs is not None
    assert pairs.value == pytest.approx(once.value)
    assert pairs.noise == pytest.approx(once.noise, rel=0.02)


def placed_by(
    rng: np.random.Generator, scores: np.ndarray, sd: float, bins: int
) -> tuple[ScoreBins, np.ndarray]:
    """Return the bins that a first release places, and its cells without noise."""
    fine = np.zeros(CODE.width)
    np.add.at(fine, np.searchsorted(FINE, scores, side="right"), 1)
    cells = CODE.decoder @ (CODE.matrix @ fine + sd * rng.normal(size=CODE.n_sent))
    edges = equal_mass_edges(cells, bins, 0.0)
    return ScoreBins(edges=edges, cells=cells, covariance=sd**2 * CODE.covariance), fine


def test_the_brier_score_holds_wherever_scores_lie_in_their_bins() -> None:
    """2,000 people at epsilon 1: probabilities of a bin's classes differ, and of bins they are known with noise."""
    rng, hits, noise = np.random.default_rng(6), 0, 3.6
    for _ in range(50):
        labels = (rng.random(2000) < 0.5).astype(np.int64)
        scores = 3 * (rng.normal(size=2000) + 3 * labels - 1.5)
        placed, _ = placed_by(rng, scores, noise / math.sqrt(0.15), 10)
        second = noise / math.sqrt(0.85)
        cells = second * rng.normal(size=(2, len(placed.edges) + 1))
        np.add.at(cells, (labels, np.searchsorted(placed.edges, scores, side="left")), 1)
        counts = ScoreCounts(cells=cells, variance=second**2, edges=placed.edges, people_per_unit=1.0)
        found, exact = brier(counts, placed), float(((labels - 1 / (1 + np.exp(-scores))) ** 2).mean())
        assert found is not None
        assert found.low_here is not None
        assert found.high_here is not None
        hits += found.low_here <= exact <= found.high_here
    assert hits >= 48


def test_what_is_predicted_has_the_noise_of_the_release_that_placed_the_bins() -> None:
    scores = people(np.random.default_rng(7), 200_000)[1]
    placed, fine = placed_by(np.random.default_rng(7), scores, 2.0, 9)
    counted = np.random.default_rng(8).uniform(50, 100, len(placed.edges) + 1)

    def predicted(cells: np.ndarray) -> float:
        return float(counted @ probabilities(cells, placed.edges)[0])

    cells, gradient = fine + 1.0, np.zeros(len(FINE) + 1)
    for place in range(len(gradient)):
        moved = cells.copy()
        moved[place] += 1e-3
        gradient[place] = (predicted(moved) - predicted(cells)) / 1e-3
    assert placed.covariance is not None
    of_fine = placed.covariance[: len(gradient), : len(gradient)]
    found = variance_of_means(replace(placed, cells=cells), counted)
    assert found == pytest.approx(gradient @ of_fine @ gradient, rel=1e-3)
    counts = ScoreCounts(
        cells=np.stack((counted, counted)), variance=1.0, edges=placed.edges, people_per_unit=1.0
    )
    with_it = observed_minus_predicted(counts, placed)
    without = observed_minus_predicted(counts, replace(placed, covariance=None))
    assert with_it is not None
    assert without is not None
    assert (with_it.low_here or 0) < (without.low_here or 0)


# --- a run --------------------------------------------------------------------------------------------------------

SCHEMA = """
n_users = {users}
user = "who"
silos = ["north", "south", "west"]
[target]
kind = "label"
column = "sick"
classes = ["0", "1"]
[features]
age = {{ kind = "number", lower = 0, upper = 100 }}
ward = {{ kind = "category", categories = ["x", "y"] }}
"""
PEOPLE = 900


def tables(
    folder: Path, *, people: int = PEOPLE, without: int | None = None, changed: int | None = None
) -> None:
    """Write three hospitals' tables; every fourth person is in two of them."""
    rng = np.random.default_rng(0)
    (folder / "schema.toml").write_text(SCHEMA.format(users=people))
    lines: dict[str, list[str]] = {name: [] for name in FILES}
    for who in range(people):
        age = rng.uniform(0, 100)
        ward, sick = "xy"[rng.integers(2)], int(rng.random() < 1 / (1 + math.exp(-0.08 * (age - 50))))
        if who == changed:
            age, sick = 100 - age, 1 - sick
        for place, name in enumerate(lines):
            if who != without and (who % 3 == place or (who % 4 == 0 and (who + 1) % 3 == place)):
                lines[name] += [f"p{who},{age:.2f},{ward},{sick}"] * (1 + who % 2)
    write_tables(folder, "who,age,ward,sick", lines)


def prepared_in(folder: Path, **changes: Any) -> Prepared:
    """Prepare a run over the tables of a folder."""
    base = {
        "rounds": 3,
        "data": {"table": {"test_share": 0.5}},
        "privacy": {"epsilon": 8.0},
        "evaluation": {"by": ["silo"]},
        "budget": {"evaluation": 0.3},
    }
    return prepared_run(folder, base, changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Outcome]:
    """Return a run with an evaluation."""
    folder = tmp_path_factory.mktemp("evaluated")
    tables(folder)
    prepared = prepared_in(folder)
    return prepared, run(prepared, folder / "runs", Silent())


def test_training_and_evaluation_spend_what_was_declared(world: tuple[Prepared, Outcome]) -> None:
    """One ledger: its events compose to the declared epsilon; shares are shares of mu^2."""
    prepared, outcome = world
    entries = read_entries(outcome.folder / "ledger.jsonl")
    assert [entry.run for entry in entries] == ["hospitals"] * 3 + ["hospitals/eval/1", "hospitals/eval/2"]
    assert outcome.statement.epsilon == pytest.approx(8.0, abs=1e-3)
    assert outcome.statement.epsilon <= 8.0
    strengths = []
    for entry in entries:
        noise = split_grid_loss(entry.event)[0]
        assert isinstance(noise, GaussianEvent)
        strengths.append(noise.noise_multiplier**-2)
    total = math.fsum(strengths)
    assert gaussian_epsilon(math.sqrt(total), 1e-5) == pytest.approx(8.0, abs=1e-3)
    assert sum(strengths[3:]) / total == pytest.approx(0.3, abs=1e-3)
    assert strengths[3] / strengths[4] == pytest.approx(0.15 / 0.85)
    for view in outcome.statement.trust:
        assert view.epsilon is not None
        assert view.epsilon > prepared.epsilon_with(view.role, 3, ()) + 0.5
        assert view.epsilon == pytest.approx(prepared.epsilon_with(view.role, 3, prepared.side_releases))
        (seen,) = {one.sees for one in prepared.side_releases[0].guarantee.views if one.role == view.role}
        assert view.sees.endswith(f"of the releases beside the rounds: {seen}")
        assert "the statistics" in seen


def test_metrics_are_noisy_and_nothing_exact_is_kept(world: tuple[Prepared, Outcome]) -> None:
    prepared, outcome = world
    rows = json_lines(outcome.folder / "metrics.jsonl")
    assert json.loads((outcome.folder / "diagnostics.json").read_text())["baseline"] == {}
    assert [row["test"] for row in rows] == [None] * 4
    assert not any("metrics on the test records" in line for line in outcome.statement.uncovered)
    assert any("hospitals/eval/2" in line for line in outcome.statement.mechanisms)
    assert outcome.statement.released == "models and statistics"
    assert outcome.evaluated is not None
    found = {row.figure: row.interval for row in outcome.evaluated.rows if row.group == "all"}
    checkpoint = RunFolder(outcome.folder).read_checkpoint()
    assert checkpoint is not None
    scores = outputs_of(prepared.task, prepared.population, checkpoint.model)
    exact = float(roc_auc_score(prepared.population.test_targets, scores))
    area = found["auc"]
    assert area is not None
    assert area.low_here is not None
    assert 0 < abs(area.estimate - exact) < Z * (area.estimate - area.low_here) / 1.96 + 0.03
    groups = {row.group for row in outcome.evaluated.rows}
    assert groups == {"all", "silo = north", "silo = south", "silo = west"}
    page = write_report(outcome.folder).read_text()
    assert 'id="evaluation"' in page


def test_a_bundle_holds_the_released_metrics_with_their_intervals(
    world: tuple[Prepared, Outcome], tmp_path: Path
) -> None:
    _, outcome = world
    manifest = fv.load(bundle_run(outcome.folder, tmp_path / "bundle")).manifest
    assert outcome.evaluated is not None
    area = outcome.evaluated.headline["auc"]
    assert area is not None
    found = manifest.metrics["auc"]
    assert manifest.test == "released"
    assert (found.estimate, found.low, found.high) == (area.estimate, area.low, area.high)
    assert "95 % interval" in (tmp_path / "bundle" / CARD).read_text()


def test_an_evaluation_is_read_again_and_damage_is_noticed(
    world: tuple[Prepared, Outcome], tmp_path: Path
) -> None:
    _, outcome = world
    found = read_evaluated(outcome.folder)
    assert found is not None
    assert outcome.evaluated is not None
    assert found.to_json() == outcome.evaluated.to_json()
    document = found.to_json()
    for broken in (
        {"schema_version": 9},
        {"releases": document["releases"][:1]},
        {"releases": [document["releases"][0], {"noise_std": 1.0, "vector": [1.0]}]},
        {"releases": [document["releases"][0], document["releases"][1] | {"noise_std": -1.0}]},
        {"request": document["request"] | {"by": ["age"]}},
        {"request": document["request"] | {"silos": "some"}},
    ):
        with pytest.raises(RunFolderError, match=r"evaluation\.json"):
            ReleasedEvaluation.from_json(document | broken, tmp_path / FILE)


def test_a_run_is_evaluated_once_for_a_charge(world: tuple[Prepared, Outcome], tmp_path: Path) -> None:
    """Complete, it stays as it is; killed after the charge or lost, it is made with fresh noise and charged again."""
    prepared, whole = world
    outcome = replace(whole, folder=Path(shutil.copytree(whole.folder, tmp_path / whole.folder.name)))
    charges, made = len(read_entries(outcome.folder / "ledger.jsonl")), len(prepared.releases_after_training)
    before = (outcome.folder / FILE).read_bytes()
    again = resume(outcome.folder, Silent())
    assert (outcome.folder / FILE).read_bytes() == before
    (outcome.folder / FILE).unlink()
    again = resume(outcome.folder, Silent())
    assert again.evaluated is not None
    assert (outcome.folder / FILE).read_bytes() != before
    assert len(read_entries(outcome.folder / "ledger.jsonl")) == charges + made
    assert again.statement.epsilon is not None
    assert outcome.statement.epsilon is not None
    assert again.statement.epsilon > outcome.statement.epsilon
    assert "charged 2 times" in " ".join(again.statement.mechanisms)


def test_no_charge_that_was_stated_is_lost_with_an_older_ledger(
    world: tuple[Prepared, Outcome], tmp_path: Path
) -> None:
    """No checkpoint has the head of a ledger after the last round: an older copy gave the same people less epsilon."""
    _, whole = world
    folder = Path(shutil.copytree(whole.folder, tmp_path / whole.folder.name))
    older = (folder / "ledger.jsonl").read_bytes()
    (folder / FILE).unlink()
    resume(folder, Silent())  # the evaluation is made and charged again
    stated, later = (folder / "privacy.json").read_bytes(), (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(older)
    for _ in range(2):  # the lock of the ledger is given back
        with pytest.raises(IntegrityError, match=r"ledger\.jsonl lacks charges that privacy\.json counts"):
            resume(folder, Silent())
    assert (folder / "privacy.json").read_bytes() == stated
    (folder / "ledger.jsonl").write_bytes(later)
    assert json.loads(stated) == resume(folder, Silent()).statement.to_json()


@pytest.mark.parametrize("event", [{}, {"type": "gaussian"}, None, {"type": "unheard-of"}])
def test_a_run_whose_statement_has_no_event_is_not_resumed(
    event: Any, world: tuple[Prepared, Outcome], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(world[1].folder, tmp_path / "damaged"))
    document = json.loads((folder / "privacy.json").read_text())
    (folder / "privacy.json").write_text(json.dumps(document | {"event": event}))
    with pytest.raises(RunFolderError, match=r"privacy\.json is damaged"):
        resume(folder, Silent())


def test_an_evaluation_is_never_charged_above_the_budget(
    world: tuple[Prepared, Outcome], tmp_path: Path
) -> None:
    """Not for the first time either: what was charged before may have taken its room."""
    prepared, whole = world
    folder = Path(shutil.copytree(whole.folder, tmp_path / whole.folder.name))
    (folder / FILE).unlink()
    (folder / "privacy.json").unlink()
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[: whole.rounds]))
    needed = prepared.epsilon_with(Role.READER, whole.rounds, prepared.side_releases)
    privacy = prepared.experiment.privacy.model_copy(update={"budget": needed * 0.999})
    poor = replace(prepared, experiment=prepared.experiment.model_copy(update={"privacy": privacy}))
    outcome = continue_run(RunFolder(folder), poor, Silent())
    assert outcome.stopped is not None
    assert "eval/1 and what is due after it would bring epsilon to" in outcome.stopped
    assert len(read_entries(ledger)) == whole.rounds
    assert not (folder / FILE).exists()


def test_a_model_that_was_evaluated_is_not_trained_on(tmp_path: Path) -> None:
    from fedveil.run.loop import StopTraining

    class Once(Silent):
        def on_round_end(self, row: dict[str, Any]) -> None:
            if row["round"] == 1:
                raise StopTraining("enough")

    tables(tmp_path)
    outcome = run(prepared_in(tmp_path), tmp_path / "runs", Once())
    assert outcome.evaluated is not None
    assert outcome.evaluated.round == 1
    on = resume(outcome.folder, Silent())
    assert on.rounds == 1
    assert on.stopped is not None
    assert "was evaluated" in on.stopped
    assert any("a callback stopped it" in line for line in outcome.statement.uncovered)
    assert on.statement.uncovered == outcome.statement.uncovered  # who resumes a run takes nothing back


def test_one_record_is_one_noisy_count(world: tuple[Prepared, Outcome], tmp_path: Path) -> None:
    """The same noise over the records of a person turned around: figures move by one share, never by a metric."""
    folder = tmp_path
    for who in range(4, 40):
        tables(folder, changed=who)
        prepared = prepared_in(folder)
        tested = prepared.population.test_rows
        assert tested is not None
        if len(tested):
            break
    prepared, _ = world
    asked, evaluation = prepared.evaluation.request, prepared.evaluation  # type: ignore[union-attr]
    assert evaluation is not None
    sums = {}
    for name, one in (("all", prepared), ("changed", prepared_in(folder))):
        model = prepared.task.initial() + 0.3
        table = attach_scores(
            asked, one.experiment, one.population, outputs_of(one.task, one.population, model)
        )
        step, method = evaluation.releases[1].step, evaluation.releases[1].method
        sums[name] = silo_sums(
            step, table, method.weights.for_groups(table.pairs(), 3, PEOPLE), method.bound
        ).sum(0)  # type: ignore[arg-type]
    moved = float(np.linalg.norm(sums["all"] - sums["changed"]))
    assert moved <= 2 + 1e-9  # taken away, and put back otherwise


def test_neighbours_are_planned_alike_and_a_person_moves_each_release_by_one_at_most(tmp_path: Path) -> None:
    found, vectors = [], []
    for without in (None, 0):
        tables(tmp_path, without=without)
        prepared = prepared_in(tmp_path, protection={"name": "none"})
        evaluation = prepared.evaluation
        assert evaluation is not None
        found.append((evaluation.request, evaluation.error, [one.guarantee for one in evaluation.releases]))
        scores = outputs_of(prepared.task, prepared.population, prepared.task.initial() + 0.5)
        table = attach_scores(evaluation.request, prepared.experiment, prepared.population, scores)
        steps = [LocalStatistic(layout=one.step.layout) for one in evaluation.releases]
        vectors.append(
            [
                silo_sums(
                    step, table, one.method.weights.for_groups(table.pairs(), 3, PEOPLE), one.method.bound
                ).sum(0)  # type: ignore[arg-type]
                for step, one in zip(steps, evaluation.releases, strict=True)
            ]
        )
    assert found[0] == found[1]
    for one, other in zip(*vectors, strict=True):
        assert np.linalg.norm(one - other) <= 1.0


def test_nobodys_score_is_rounded_by_others(tmp_path: Path) -> None:
    tables(tmp_path)
    prepared = prepared_in(tmp_path)
    model = prepared.task.initial() + 0.25
    whole = outputs_of(prepared.task, prepared.population, model)
    test = prepared.population
    for rows in ([3], [3, 5, 8], list(range(0, len(whole), 7))):
        part = replace(
            test, test_features=test.test_features[rows], test_targets=test.test_targets[rows], test_rows=None
        )
        assert np.array_equal(outputs_of(prepared.task, part, model), whole[rows])


def test_people_are_counted_under_private_weighting(tmp_path: Path) -> None:
    """With weights over silos a person in two of them counts 1, and the masked sum is that of the clear one."""
    tables(tmp_path, people=40)
    prepared = prepared_in(
        tmp_path,
        privacy={"epsilon": 200.0},
        method={"name": "uldp-avg-w"},
        protection={"name": "private-weighting", "cipher": "rlwe", "n_max": 12},
        evaluation={"by": [], "bins": 8},
    )
    evaluation = prepared.evaluation
    assert evaluation is not None
    assert evaluation.request.unit == 1.0
    scores = outputs_of(prepared.task, prepared.population, prepared.task.initial() + 0.5)
    table = attach_scores(evaluation.request, prepared.experiment, prepared.population, scores)
    sums: NoisySums = ()
    while len(sums) < len(evaluation.releases):
        sums = (*sums, noisy_sum(evaluation.release(sums), table, PrivacyRandomness.insecure(1)))
    found = evaluation.combine_releases(prepared.experiment.name, 2, sums)
    counted, present = found.rows[0], len(np.unique(table.user))
    assert counted.figure == "people"
    assert counted.interval is not None
    assert counted.interval.low_here is not None
    assert (
        abs(counted.interval.estimate - present)
        < Z * (counted.interval.estimate - counted.interval.low_here) / 1.96
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": {"epsilon": 0.2}}, "privacy.epsilon = "),
        (
            {"method": {"noise_multiplier": 5.0}, "privacy": {"epsilon": None}},
            "noise_multiplier = 'calibrated'",
        ),
        ({"evaluation": {"by": ["age"]}}, "'age' is a number"),
        ({"evaluation": {"by": ["silo", "silo"]}}, "named twice"),
        ({"evaluation": {"by": ["silo", "ward", "sick"]}}, "at most 2"),
        ({"evaluation": {"bins": 4}}, "8"),
        ({"evaluation": {"silos": "records"}}, "counts people"),
        ({"evaluation": {"metrics": ["auc"]}}, "no such key"),
        ({"evaluation": None}, "give one of them too"),
        ({"budget": {"evaluation": 1.0}}, "must be < 1"),
        ({"data": {"table": {"test_file": "north.csv", "test_share": None}}}, "need no noise"),
        ({"method": {"name": "dp-fed"}, "protection": {"name": "none"}}, "no epsilon covers both"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tables(tmp_path)
    with pytest.raises(FedveilError) as caught:
        prepared_in(tmp_path, **changes)
    assert words in str(caught.value)


def test_a_party_without_a_line_is_promised_nothing(world: tuple[Prepared, Outcome]) -> None:
    prepared, _ = world
    with_all = Role.READER | Role.SERVER
    assert prepared.side_releases[0].event_for(with_all).type == "no_guarantee"
