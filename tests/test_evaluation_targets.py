"""Test metrics of more than two classes, of numbers and of survival: figures against exact ones, and runs with them."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.evaluation_targets import (
    CASES,
    CLASSES,
    HORIZONS,
    Released,
    coverage,
    of_amounts,
    of_classes,
    of_lifetimes,
    of_people,
    value,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    mean_absolute_error,
    r2_score,
    recall_score,
    roc_auc_score,
    root_mean_squared_error,
)

import fedveil as fv
from fedveil.console import outcome_table
from fedveil.errors import FedveilError
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.privacy.ledger import read_entries
from fedveil.report.page import write_report
from fedveil.run.config.experiment import merge, parse
from fedveil.run.releases.evaluation import attach_scores, outputs_of
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import resume, run
from fedveil.statistics.blocks import Layout
from fedveil.statistics.cells import Everybody, Silos
from fedveil.statistics.evaluation.amounts import Amounts
from fedveil.statistics.evaluation.binary import TwoClasses
from fedveil.statistics.evaluation.evaluator import Evaluator
from fedveil.statistics.evaluation.lifetimes import ExitCells, ExitCounts, Lifetimes
from fedveil.statistics.evaluation.result import (
    Classes,
    ConfusionCells,
    EvaluationRequest,
    read_evaluated,
)
from fedveil.statistics.intervals import Interval
from fedveil.statistics.local_vectors import LocalStatistic, silo_sums
from fedveil.training.metrics import c_index
from tests.doc_examples import BLOCKS
from tests.hospitals import table_in, write_tables
from tests.runs import Silent
from tests.slow_cases import slow_only

Z = 4.9
GRID = 2.0**-29


# --- figures ------------------------------------------------------------------------------------------------------


def test_without_noise_the_confusion_is_that_of_the_records() -> None:
    outputs, targets = of_classes(np.random.default_rng(1), 2000)
    found = Released(Classes(CLASSES), outputs, targets).noisy(1e-9, np.random.default_rng(0))
    predicted = outputs.argmax(axis=1)
    recalls = recall_score(targets, predicted, average=None)
    assert value(found, "accuracy") == pytest.approx((predicted == targets).mean(), abs=1e-7)
    assert value(found, "balanced accuracy") == pytest.approx(recalls.mean(), abs=1e-7)
    assert value(found, "majority baseline") == pytest.approx((targets == 0).mean(), abs=1e-7)
    for name, recall in zip(CLASSES, recalls, strict=True):
        assert value(found, f"recall {name}") == pytest.approx(recall, abs=1e-7)


def test_without_noise_errors_are_those_of_the_records() -> None:
    outputs, targets = of_amounts(np.random.default_rng(1), 2000)
    outputs[7], targets[9] = np.nan, 100.0  # one unreadable, one on a bound
    there = ~np.isnan(outputs[:, 0])
    evaluator = Amounts(0.0, 100.0, 100.0)
    found = Released(evaluator, outputs, targets).noisy(1e-9, np.random.default_rng(0))
    exact = targets[there], outputs[there, 0]
    assert value(found, "mae") == pytest.approx(mean_absolute_error(*exact), rel=1e-7)
    assert value(found, "rmse") == pytest.approx(root_mean_squared_error(*exact), rel=1e-7)
    assert value(found, "r2") == pytest.approx(r2_score(*exact), rel=1e-7)
    assert value(found, "rmse of the mean of all targets") == pytest.approx(exact[0].std(), rel=1e-7)


def test_errors_out_of_what_is_declared_are_counted() -> None:
    outputs = np.array([[0.0], [0.0], [50.0], [20.0]] * 50)
    targets = np.array([5.0, 60.0, 50.0, 20.0] * 50)
    found = Released(Amounts(0.0, 100.0, 10.0), outputs, targets).noisy(1e-9, np.random.default_rng(0))
    assert value(found, "share of errors above max_standard_error") == pytest.approx(0.25)
    assert value(found, "mae") == pytest.approx((5 + 10 + 0 + 0) / 4)


def test_without_noise_areas_by_horizons_and_the_index_are_those_of_the_records() -> None:
    """Without censoring the area is that of the labels by then; eight bins lose little, and so does the grid."""
    outputs, targets = of_lifetimes(np.random.default_rng(1), 6000, censored=False)
    found = Released(Lifetimes(HORIZONS, 8), outputs, targets).noisy(1e-9, np.random.default_rng(0))
    for time in HORIZONS:
        exact = roc_auc_score(targets[:, 1] <= time, outputs[:, 0])
        assert value(found, f"auc by {time:g}") == pytest.approx(exact, abs=0.003)
        assert value(found, f"events by {time:g}") == pytest.approx((targets[:, 1] <= time).sum(), abs=1e-4)
    cut = np.stack((targets[:, 1] <= 4, np.minimum(targets[:, 1], 4)), axis=1)
    exact = c_index(torch.from_numpy(outputs), torch.from_numpy(cut))
    assert value(found, "c_index") == pytest.approx(exact, abs=0.01)


def test_censoring_does_not_pull_the_areas() -> None:
    """Those of uncensored people are met by weights; without weights they would be missed."""
    whole, clear = of_lifetimes(np.random.default_rng(3), 60_000, censored=False)
    outputs, targets = of_lifetimes(np.random.default_rng(4), 60_000)
    evaluator = Lifetimes(HORIZONS, 8)
    found = Released(evaluator, outputs, targets).noisy(1e-9, np.random.default_rng(0))
    for time in HORIZONS:
        truth = roc_auc_score(clear[:, 1] <= time, whole[:, 0])
        assert value(found, f"auc by {time:g}") == pytest.approx(truth, abs=0.008)
    by, after = (targets[:, 0] == 1) & (targets[:, 1] <= 4), targets[:, 1] >= 4
    plain = roc_auc_score(by[by | after], outputs[by | after, 0])
    assert abs(plain - roc_auc_score(clear[:, 1] <= 4, whole[:, 0])) > 0.002


def test_a_prediction_that_is_no_class_is_unreadable() -> None:
    """A model may have more outputs than there are classes; it must not count in the next class's row."""
    outputs = np.array([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [np.nan, 0.0, 0.0, 0.0]])
    cells = ConfusionCells(CLASSES)
    place = cells.assign(of_people(Classes(CLASSES).columns(outputs, np.array([0, 0, 0])), 3))
    assert [cells.labels[one] for one in place] == ["a taken for b", "unreadable", "unreadable"]


def test_exits_at_a_horizon_have_happened_or_go_on() -> None:
    evaluator, cells = Lifetimes((1.0, 2.0), 2), ExitCells((1.0, 2.0), (0.0,))
    targets = np.array([[1, 1.0], [0, 1.0], [1, 1.5], [0, 2.0], [1, 2.0], [1, 2.5], [0, 0.5]])
    outputs = np.array([[1.0], [-1.0], [1.0], [1.0], [0.0], [np.nan], [-1.0]])
    place = cells.assign(of_people(evaluator.columns(outputs, targets), 7))
    assert [cells.labels[one] for one in place] == [
        "event by 1, bin 1",
        "censored by 2, bin 0",
        "event by 2, bin 1",
        "beyond, bin 1",
        "event by 2, bin 0",
        "unreadable",
        "censored by 1, bin 0",
    ]
    assert cells.size == len(cells.labels) == 11


def test_an_area_has_the_gradient_of_two_classes_where_nobody_is_censored() -> None:
    """One horizon, everybody followed: the same table as of two classes, and the same variances."""
    from fedveil.statistics.evaluation.binary import ScoreCounts, auc, untold_orders

    rng = np.random.default_rng(2)
    cells = np.zeros((3, 6))
    cells[1], cells[2] = rng.uniform(20, 60, 6), rng.uniform(20, 60, 6)
    one = ExitCounts(cells=cells, variance=4.0, people_per_unit=1.0).area(0)
    other = auc(ScoreCounts(cells=cells[[2, 1]], variance=4.0, people_per_unit=1.0, edges=(0.0,) * 5))
    assert one is not None
    assert other is not None
    assert one.value == pytest.approx(other.value)
    assert one.people == pytest.approx(other.people, rel=1e-6)
    # the weights of censoring are 1, and yet noise in the censored counts moves them
    untold = untold_orders(cells[[2, 1]]) + (0.05 / 6**2) ** 2
    assert other.noise - untold < one.noise < 2 * (other.noise - untold)


# --- what one person moves ---------------------------------------------------------------------------------------

ANY = st.floats(width=32) | st.sampled_from([0.0, 1.0, 2.0, -1.0])
RECORDS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(ANY, min_size=4, max_size=4), st.integers(0, 2)),
    min_size=1,
    max_size=8,
)
EVALUATORS: dict[str, Evaluator] = {
    "two classes": TwoClasses(8),
    "classes": Classes(CLASSES),
    "amounts": Amounts(-2.0, 50.0, 3.0),
    "lifetimes": Lifetimes(HORIZONS, 8),
}


def units_of(case: str, step: LocalStatistic, records: list[Any]) -> np.ndarray:
    """Return the sum over silos of people's vectors, in units of the grid."""
    evaluator = EVALUATORS[case]
    cells = np.array([cells for _, _, cells, _ in records], dtype=np.float64).reshape(-1, 4)
    label = np.array([label for *_, label in records], dtype=np.int64)
    width = {"two classes": 2, "classes": 4}.get(case, 1)  # one output more than there are classes
    targets = {
        "two classes": label % 2,
        "amounts": cells[:, 3],
        "lifetimes": np.stack((label % 2, np.abs(cells[:, 3])), axis=1),
    }.get(case, label)
    table = replace(
        of_people(evaluator.columns(cells[:, :width], targets), len(records)),
        silo=np.array([silo for _, silo, *_ in records], dtype=np.int32),
        user=np.array([user for user, *_ in records], dtype=np.int32),
        n_users=4,
        silo_names=("a", "b", "c"),
    )
    weights = Weights.BY_RECORDS.for_groups(table.pairs(), 3, 4)
    found: np.ndarray = silo_sums(step, table, weights, FixedVector(norm=1.0, step=GRID)).sum(axis=0) / GRID
    return found


@pytest.mark.parametrize("case", list(EVALUATORS))
@settings(max_examples=25, deadline=None)
@given(records=RECORDS)
def test_a_person_moves_the_stored_integers_by_the_norm_at_most(case: str, records: list[Any]) -> None:
    """In rational arithmetic, whatever outputs and targets are; every block by itself moves by its share."""
    evaluator = EVALUATORS[case]
    groups = {"all": Everybody(), "silo": Silos(("a", "b", "c"))}
    blocks = [
        one
        for name, some in groups.items()
        for one in evaluator.blocks(name, some, evaluator.placeholder_bins)
    ]
    step = LocalStatistic(layout=Layout(tuple(blocks)))
    whole = units_of(case, step, records)
    others = [one for one in records if one[0] != records[0][0]]
    moved = [int(one) for one in whole - (units_of(case, step, others) if others else 0)]
    assert Fraction(sum(one**2 for one in moved)) <= Fraction(1 / GRID) ** 2
    for slot in step.layout.slots:
        assert sum(one**2 for one in moved[slot.place]) <= slot.share * (1 + 1e-12) / GRID**2
        if slot.block.encoder.covers:
            assert sum(moved[slot.place]) * GRID / slot.scale == pytest.approx(1.0, abs=2**-20)


# --- coverage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [*(case for case in CASES if case != "lifetimes"), *slow_only(["lifetimes"])]
)
def test_intervals_hold(case: str) -> None:
    """A few simulations here, 300 in the slow twin; noise that is stated at 2/5 of what it is must not cover."""
    few = 40
    for here, there in coverage(case, few, 2000, 2.0).values():
        assert min(here, there) > 0.95 - Z * math.sqrt(0.95 * 0.05 / few)
    assert min(here for here, _ in coverage(case, few, 2000, 2.0, stated=0.4).values()) < 0.78


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_intervals_hold_over_300_simulations(case: str) -> None:
    for here, there in coverage(case, 300, 2000, 2.0).values():
        assert 0.92 <= here <= 0.98
        assert 0.92 <= there <= 1.0


@pytest.mark.parametrize("case", list(CASES))
def test_too_few_people_have_no_figures(case: str) -> None:
    evaluator, make, names = CASES[case]
    found = Released(evaluator, *make(np.random.default_rng(5), 60)).noisy(30.0, np.random.default_rng(0))
    assert [found[name] for name in names] == [None] * len(names)


@pytest.mark.parametrize("case", list(CASES))
def test_the_predicted_error_is_near_what_noise_gives(case: str) -> None:
    """Within a factor of three: the plan knows neither classes nor errors nor events."""
    evaluator, make, _ = CASES[case]
    released, rng, n = (
        Released(evaluator, *make(np.random.default_rng(6), 2000)),
        np.random.default_rng(7),
        2000,
    )
    layout = Layout(evaluator.blocks("all", Everybody(), evaluator.placeholder_bins))
    variance = {slot.block.part: (2.0 / slot.scale) ** 2 for slot in layout.slots}
    predicted = evaluator.predicted_error(variance, n)
    name, unit = ("mae", 40.0) if case == "amounts" else (evaluator.measure, 1.0)
    found = np.std([value(released.noisy(2.0, rng), name) / unit for _ in range(30)])
    assert found / 3 < predicted < 3 * found


# --- runs ---------------------------------------------------------------------------------------------------------

SCHEMA = """
n_users = 600
user = "who"
silos = ["north", "south"]
[target]
{target}
[features]
age = {{ kind = "number", lower = 0, upper = 100 }}
ward = {{ kind = "category", categories = ["x", "y"] }}
"""
TARGETS = {
    "classes": 'kind = "label"\ncolumn = "grade"\nclasses = ["low", "middle", "high"]',
    "amounts": 'kind = "number"\ncolumn = "pressure"\nlower = 80\nupper = 150\noutside = "clip"',
    "lifetimes": 'kind = "survival"\ntime = "days"\nevent = "died"',
}
SECTIONS: dict[str, dict[str, Any]] = {
    "classes": {"by": ["ward"]},
    "amounts": {"by": ["silo"], "max_standard_error": 60},
    "lifetimes": {"horizons": [300, 600]},
}
PEOPLE = 600
SILOS = ("north", "south")


def tables(folder: Path, case: str, without: int | None = None) -> None:
    """Write two hospitals' tables; every fifth person is in both."""
    rng = np.random.default_rng(0)
    (folder / "schema.toml").write_text(SCHEMA.format(target=TARGETS[case]))
    lines: dict[str, list[str]] = {name: [] for name in SILOS}
    for who in range(PEOPLE):
        age = rng.uniform(0, 100)
        grade = ("low", "middle", "high")[int(np.clip((age + 20 * rng.normal()) // 34, 0, 2))]
        days = rng.exponential(900 * math.exp(-0.02 * (age - 50)))
        seen = rng.uniform(200, 1200)
        cells = f"{age:.1f},{'xy'[rng.integers(2)]},{grade},{90 + age / 2 + 8 * rng.normal():.0f}"
        cells += f",{min(days, seen):.0f},{int(days <= seen)}"
        for place, name in enumerate(lines):
            if who != without and (who % 2 == place or who % 5 == 0):
                lines[name].append(f"p{who},{cells}")
    write_tables(folder, "who,age,ward,grade,pressure,days,died", lines)


def prepared_in(folder: Path, case: str, **changes: Any) -> Prepared:
    """Prepare a run over the tables of a folder."""
    base = {
        "name": "study",
        "rounds": 2,
        "data": table_in(folder, SILOS, test_share=0.5),
        "local": {"learning_rate": 0.1},
        "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": "calibrated"},
        "privacy": {"epsilon": 30.0},
        "evaluation": SECTIONS[case],
        "budget": {"evaluation": 0.5},
    }
    return prepare(parse(merge(base, changes), "test"))


@pytest.fixture(scope="module", params=list(TARGETS))
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Prepared, Outcome]:
    """Return a run with an evaluation, of each target."""
    folder = tmp_path_factory.mktemp("evaluated")
    tables(folder, request.param)
    prepared = prepared_in(folder, request.param)
    return request.param, folder, prepared, run(prepared, folder / "runs", Silent())


def test_a_run_releases_its_metrics_within_the_declared_epsilon(
    world: tuple[str, Path, Prepared, Outcome],
) -> None:
    case, _, prepared, outcome = world
    releases = ["study/eval/1", "study/eval/2"] if case == "lifetimes" else ["study/eval/1"]
    assert [entry.run for entry in read_entries(outcome.folder / "ledger.jsonl")] == ["study"] * 2 + releases
    assert outcome.statement.epsilon == pytest.approx(30.0, abs=0.01)
    assert outcome.statement.epsilon <= 30.0
    assert any(releases[-1] in line for line in outcome.statement.mechanisms)
    found = outcome.evaluated
    assert found is not None
    assert prepared.evaluation is not None
    assert set(found.headline) == set(prepared.evaluation.request.evaluator.headline)
    assert None not in found.headline.values()
    assert {row.group for row in found.rows} == {
        "classes": {"all", "ward = x", "ward = y", "ward = missing or undeclared"},
        "amounts": {"all", "silo = north", "silo = south"},
        "lifetimes": {"all"},
    }[case]
    again = read_evaluated(outcome.folder)
    assert again is not None
    assert again.to_json() == found.to_json()
    page = write_report(outcome.folder).read_text()
    assert 'id="evaluation"' in page
    assert ("by horizon" in page) == (case == "lifetimes")


def test_a_released_figure_stands_beside_its_interval_and_an_open_end_is_called_open(
    world: tuple[str, Path, Prepared, Outcome],
) -> None:
    """Of a variance that is lost in its noise, R^2 has an estimate and nothing bounds it from below."""
    _, _, _, outcome = world
    open_below = Interval(estimate=0.5, low=None, high=0.75, low_here=None, high_here=0.7, privacy=1.0)
    for interval, told in ((open_below, "0.5 (open .. 0.75)"), (None, "-")):
        shown: Any = SimpleNamespace(headline={"r2": interval})
        (_, metric, *_) = outcome_table([replace(outcome, evaluated=shown)]).columns
        assert (metric.header, *metric.cells) == ("test r2", told)


def test_a_person_moves_the_last_release_by_one_and_decides_nothing(
    world: tuple[str, Path, Prepared, Outcome], tmp_path: Path
) -> None:
    case, _, prepared, _ = world
    tables(tmp_path, case, without=0)
    other, sums = prepared_in(tmp_path, case), []
    assert other.evaluation is not None
    assert prepared.evaluation is not None
    assert other.evaluation.request == prepared.evaluation.request
    assert other.evaluation.error == prepared.evaluation.error
    for one in (prepared, other):
        outputs = outputs_of(one.task, one.population, one.task.initial() + 0.5)
        table = attach_scores(prepared.evaluation.request, one.experiment, one.population, outputs)
        release = prepared.evaluation.releases[-1]
        weights = release.method.weights.for_groups(table.pairs(), 2, PEOPLE)
        sums.append(silo_sums(release.step, table, weights, release.method.bound).sum(0))  # type: ignore[arg-type]
    assert np.linalg.norm(sums[0] - sums[1]) <= 1.0


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("classes", {"evaluation": {"bins": 9}}, "evaluation.bins: the schema's target is of classes"),
        ("classes", {"evaluation": {"horizons": [3]}}, "evaluation.horizons: the schema's target"),
        ("classes", {"privacy": {"epsilon": 0.5}}, "whose balanced accuracy would have noise"),
        ("amounts", {"evaluation": {"max_standard_error": 0}}, "max_standard_error"),
        ("amounts", {"evaluation": {"bins": 9}}, "is of numbers"),
        ("amounts", {"privacy": {"epsilon": 0.2}}, "mae / max_standard_error"),
        ("lifetimes", {"evaluation": {"horizons": []}}, "give the times by which events are predicted"),
        ("lifetimes", {"evaluation": {"horizons": [300, 300]}}, "must be ascending"),
        ("lifetimes", {"evaluation": {"horizons": [0]}}, "horizons"),
        (
            "lifetimes",
            {"evaluation": {"max_standard_error": 1}},
            "evaluation.max_standard_error: the schema's target is",
        ),
        ("lifetimes", {"privacy": {"epsilon": 0.5}}, "whose c_index would have noise"),
    ],
)
def test_what_a_target_does_not_have_is_refused(
    tmp_path: Path, case: str, changes: dict[str, Any], words: str
) -> None:
    tables(tmp_path, case)
    with pytest.raises(FedveilError) as caught:
        prepared_in(tmp_path, case, **changes)
    assert words in str(caught.value)


def test_a_run_from_python_pays_for_its_metrics_as_the_commands_do(tmp_path: Path) -> None:
    tables(tmp_path, "amounts")
    files = [tmp_path / "north.csv", tmp_path / "south.csv"]
    held = fv.tables(tmp_path / "schema.toml", files, test_share=0.5)
    result = fv.train(
        "linear",
        held,
        method=fv.uldp_avg(clip=1.0, local_learning_rate=0.1),
        epsilon=30.0,
        rounds=1,
        name="study",
        folder=tmp_path / "python",
        settings={"evaluation": SECTIONS["amounts"], "budget": {"evaluation": 0.5}},
    )
    assert result.evaluated is not None
    command = prepared_in(tmp_path, "amounts").evaluation
    assert command is not None
    assert result.evaluated.request == command.request
    released = {name: one and one.estimate for name, one in result.evaluated.headline.items()}
    assert result.metrics == released
    assert set(released) == {"mae", "rmse", "r2"}
    assert [entry.run for entry in read_entries(result.folder / "ledger.jsonl")] == ["study", "study/eval/1"]
    assert result.statement.epsilon == pytest.approx(30.0, abs=0.01)
    moved = fv.tables(tmp_path / "schema.toml", files, test_share=0.25)
    with pytest.raises(
        FedveilError, match=r"began with another data\.table\.test_share: 0\.5, and now it is 0\.25"
    ):
        fv.resume(result.folder, "linear", moved)
    assert fv.resume(result.folder, "linear", held).metrics == result.metrics


class Killed(fv.Callback):
    """The process ends after the first round; the exception stands for a signal."""

    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        raise KeyboardInterrupt


def test_the_command_goes_on_with_a_run_over_tables_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where model, loss and metrics have names; from any folder, for the run's folder names the tables in full."""
    tables(tmp_path, "amounts")
    monkeypatch.chdir(tmp_path)
    held = fv.tables("schema.toml", ["north.csv", "south.csv"], seed=3)
    method = fv.uldp_avg(clip=1.0, local_learning_rate=0.1)
    for name, loss in (("named", None), ("own", lambda outputs, targets: (outputs[:, 0] - targets) ** 2)):
        with pytest.raises(KeyboardInterrupt):
            fv.train(
                "linear",
                held,
                method=method,
                epsilon=30.0,
                rounds=2,
                name=name,
                loss=loss,
                callbacks=[Killed()],
            )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    outcome = resume(Path("../runs/named"), Silent())
    assert outcome.rounds == 2
    assert [entry.round for entry in read_entries(tmp_path / "runs" / "named" / "ledger.jsonl")] == [1, 2]
    assert outcome.statement.epsilon == pytest.approx(30.0, abs=0.01)
    with pytest.raises(
        FedveilError, match=r"model\.loss: .* handed over in a Python session.*fedveil\.resume"
    ):
        resume(Path("../runs/own"), Silent())


def test_a_target_without_declared_bounds_is_not_evaluated(tmp_path: Path) -> None:
    tables(tmp_path, "amounts")
    path = tmp_path / "schema.toml"
    path.write_text(path.read_text().replace('lower = 80\nupper = 150\noutside = "clip"', ""))
    with pytest.raises(FedveilError, match=r"give the bounds of the target, target\.lower and target\.upper"):
        prepared_in(tmp_path, "amounts")


@pytest.mark.parametrize(("place", "case"), [(1, "amounts"), (2, "lifetimes")])
def test_the_sections_of_the_page_are_planned(place: int, case: str, tmp_path: Path) -> None:
    tables(tmp_path, case)
    section = tomllib.loads(BLOCKS[f"docs/how-to/evaluate-privately.md:{place}"].text)["evaluation"]
    prepared = prepared_in(tmp_path, case, evaluation=section)
    assert prepared.evaluation is not None
    assert prepared.evaluation.error < 0.1


def test_an_evaluation_of_before_has_all_it_needs() -> None:
    """A file that was written when there were two classes alone reads as it did."""
    asked = {
        "schema_": {
            "n_users": 9,
            "user": "who",
            "target": {"kind": "label", "column": "sick", "classes": ["0", "1"]},
            "features": {"age": {"kind": "number", "lower": 0, "upper": 9}},
        },
        "silo_names": ["a", "b"],
        "silos": "equal",
        "by": [],
        "bins": 9,
    }
    assert [layout.length for layout in EvaluationRequest.model_validate(asked).layouts] == [148, 21]
