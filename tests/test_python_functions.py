"""Functions that the commands call too: plan, check, stats, infer, sweep, compare, spent and audit."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedveil as fv
from fedveil.api.frame import Frame
from fedveil.api.result import columns_of
from fedveil.errors import ConfigError, RunFolderError
from fedveil.privacy.ledger import read_entries
from fedveil.run.folder.shown import METRICS
from tests.commands import as_json
from tests.test_python import METHOD, network, people, train

SCHEMA = """
n_users = 400
user = "patient"
silos = ["north", "south"]
[target]
kind = "label"
column = "sick"
classes = ["0", "1"]
[features]
age = { kind = "number", lower = 0, upper = 100 }
ward = { kind = "category", categories = ["x", "y"] }
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "schema.toml").write_text(SCHEMA)
    random = np.random.default_rng(0)
    for at, silo in enumerate(("north", "south")):
        lines = ["patient,sick,age,ward"]
        lines += [
            f"p{2 * row + at},{int(age > 50)},{age},{'xy'[row % 2]}"
            for row, age in enumerate(random.integers(0, 101, 200))
        ]
        (folder / f"{silo}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def hospitals(tables: Path) -> fv.Population:
    return fv.tables(tables / "schema.toml", [tables / "north.csv", tables / "south.csv"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[fv.Result]:
    folder = tmp_path_factory.mktemp("runs")
    return [train(folder, name=f"run-seed{seed}", seed=seed) for seed in (0, 1)]


# --- frames ----------------------------------------------------------------------------------------------------------


def test_a_frame_is_rows_a_table_and_a_data_frame() -> None:
    found = fv.Frame(rows=({"rounds": 1, "epsilon": 0.5}, {"rounds": 2, "epsilon": None}), notes=("told",))
    assert (len(found), found[1]["rounds"], [row["rounds"] for row in found]) == (2, 2, [1, 2])
    assert repr(found) == "Frame(2 rows: rounds, epsilon)"
    assert found.to_frame().to_dict("list")["rounds"] == [1, 2]
    assert found.to_arrow().to_pylist() == [dict(row) for row in found]
    assert "0.50" in str(found)
    assert str(found).endswith("told")
    assert "\x1b" not in str(found)


def test_a_frame_shows_text_of_files_as_text() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    found = fv.Frame(rows=({hostile: hostile},), title=hostile, notes=(hostile,))
    assert "<script" not in found._repr_html_()
    assert "\x1b" not in found._repr_html_() + str(found)


# --- plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_that_of_the_command() -> None:
    found = fv.plan(n_users=50, n_silos=5, rounds=20, epsilon=3, group_sizes=2, records_per_silo=200)
    told = as_json(
        "plan", "--users", "50", "--rounds", "20", "--epsilon", "3", "--group", "2", "--records", "200"
    )
    assert json.loads(json.dumps(found.to_json())) == told
    assert {row["rounds"] for row in found.shown} == {20}
    over = fv.plan(n_users=np.int64(100), n_silos=5, epsilon=4.87, parameters=650, over={"rounds": [10]})
    assert over[0]["rho"] == pytest.approx(0.23, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epsilom": 1}, "plan: no argument 'epsilom'.*did you mean 'epsilon'"),
        ({"n_users": 0}, "plan: n_users must be a whole number >= 1"),
        ({"epsilon": "2"}, "plan: epsilon must be a number"),
        ({"sampling_rates": "all"}, "plan: sampling_rates must be a number or a list"),
        ({"over": {"epsilon": [1]}}, "plan: over must be"),
        ({"over": {"rounds": "10"}, "epsilon": 1}, "plan: over must be"),
        ({"over": {"rounds": [1.5]}, "epsilon": 1}, "plan: over must be a whole number"),
        ({"rounds": 5, "epsilon": 1, "noise_multipliers": [2.0]}, "takes two of epsilon, rounds and sigma"),
    ],
)
def test_a_wrong_plan_names_the_argument(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fv.plan(**{"n_users": 50, "n_silos": 5} | changes)


# --- check -----------------------------------------------------------------------------------------------------------


def test_a_check_says_what_the_run_will_guarantee_and_leaves_nothing(
    tmp_path: Path, runs: list[fv.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = fv.check(
        network(), people(), method=fv.uldp_avg_w(**METHOD), rounds=2, server=fv.Sgd(5.0), delta=1e-3
    )
    assert found[0]["epsilon"] == pytest.approx(runs[0].statement.epsilon)
    assert (found[0]["users"], found[0]["parameters"]) == (20, 26)
    assert repr(found).startswith("CheckFrame(PRIVATE, 1 rows")
    assert 'name = "uldp-avg-w"' in found.settings
    assert list(tmp_path.iterdir()) == []


def test_a_plan_with_parameters_shows_rho_where_a_contribution_is_one_users() -> None:
    found = fv.plan(n_users=100, n_silos=5, rounds=20, noise_multipliers=[5.0], parameters=650)
    ratios = {str(row["method"]): row["rho"] for row in found if row["rounds"] == 20}
    pairs = ratios.pop("uldp-sgd, uldp-avg, uldp-avg-w")
    assert pairs == pytest.approx((650 / 20) ** 0.5 * 5 / 100)  # sqrt(d / T) z / |U|
    assert ratios
    assert set(ratios.values()) == {None}
    assert found.lines[0].startswith("rho is the norm of the noise")
    without = fv.plan(n_users=100, n_silos=5, rounds=20, noise_multipliers=[5.0])
    assert "rho" not in without.columns
    assert not any(line.startswith("rho") for line in without.lines)


def test_a_check_of_tables_tells_their_owner_what_was_found(hospitals: fv.Population) -> None:
    found = fv.check("linear", hospitals, method=fv.uldp_avg_w(clip=1.0), epsilon=1.0, rounds=2)
    assert "all silos: 400 records of 400 people, 400 declared" in found.lines
    assert found[0]["epsilon"] <= 1.0


def test_a_wrong_check_is_refused_as_training_is() -> None:
    with pytest.raises(ConfigError, match=r"fedveil.check: no argument 'epsilom'.*did you mean 'epsilon'"):
        fv.check(network(), people(), method=fv.uldp_avg_w(**METHOD), rounds=2, epsilom=1)
    with pytest.raises(ConfigError, match="budget"):
        fv.check(network(), people(), method=fv.uldp_avg_w(clip=1.0), rounds=2, epsilon=1.0, budget=2)


# --- stats, infer ----------------------------------------------------------------------------------------------------

REQUEST = {"silos": "uniform", "by": ["ward"], "release": {"age": {"show": ["count", "mean"]}}}


def test_statistics_are_planned_released_and_not_paid_twice(hospitals: fv.Population, tmp_path: Path) -> None:
    planned = fv.stats(hospitals, REQUEST, epsilon=4.0, plan=True, folder=tmp_path)
    assert planned.epsilon == pytest.approx(4.0, rel=1e-2)
    assert not list(tmp_path.iterdir())
    found = fv.stats(hospitals, REQUEST, epsilon=4.0, folder=tmp_path)
    assert isinstance(found.statement, fv.Statement)
    assert found.statement.epsilon == pytest.approx(planned.epsilon)
    counts = {row["group"]: row for row in found if row["figure"] == "with a value"}
    for ward in ("x", "y"):  # 200 people in each; six standard deviations of the noise
        noise = (counts[ward]["high_here"] - counts[ward]["low_here"]) / 3.92
        assert abs(counts[ward]["estimate"] - 200) < 6 * noise
    assert "differential privacy" in str(found)
    assert len(read_entries(found.folder / "ledger.jsonl")) == 1
    with pytest.raises(ConfigError, match="has every requested cell"):
        fv.stats(hospitals, REQUEST, epsilon=4.0, folder=tmp_path)
    assert found.report().exists()
    ((title, table),) = found.tables
    assert title == "age"
    assert len(table) == len(found)
    assert [row["group"] for row in table[:3]] == ["all", "x", "y"]
    assert len({row["figure"] for row in table[:3]}) == 1
    written = pd.read_csv(found.write_csv(tmp_path / "found.csv"))
    pd.testing.assert_frame_equal(
        written.fillna(""), found.to_frame().astype(object).fillna(""), check_dtype=False
    )


def test_a_csv_file_runs_no_formula(tmp_path: Path) -> None:
    path = Frame(rows=({"group": "=1+1", "low": -1.5}, {"group": "a\nb"})).write_csv(tmp_path / "rows.csv")
    assert path.read_text() == "group,low\n'=1+1,-1.5\na b,\n"
    with pytest.raises(ConfigError, match=r"none.rows\.csv cannot be written"):
        Frame(rows=({"group": "x"},)).write_csv(tmp_path / "none" / "rows.csv")


def test_a_regression_takes_a_formula(hospitals: fv.Population, tmp_path: Path) -> None:
    planned = fv.infer(hospitals, "sick ~ age", family="logistic", silos="uniform", epsilon=8.0, plan=True)
    assert [row["coefficient"] for row in planned] == ["intercept", "age"]
    found = fv.infer(hospitals, "~ age", family="logistic", silos="uniform", epsilon=8.0, folder=tmp_path)
    assert found.fitted.family.columns == ("sick",)
    assert found.statement.epsilon == pytest.approx(planned.epsilon)
    assert len(found) in (0, 2)
    assert repr(found).startswith("EffectFrame(")
    assert "n: at most" in str(found)


@pytest.mark.parametrize("formula", ["sick", "sick ~", "sick ~ age +", "a ~ b ~ c"])
def test_a_formula_of_another_form_is_refused(formula: str, hospitals: fv.Population) -> None:
    with pytest.raises(ConfigError, match="expected 'target ~ feature"):
        fv.infer(hospitals, formula, family="logistic", epsilon=1.0)


def test_a_wrong_request_is_refused_before_anything_is_charged(
    hospitals: fv.Population, tmp_path: Path
) -> None:
    for call, told in (
        (
            lambda: fv.stats(people(), REQUEST, epsilon=1.0, folder=tmp_path),
            "bounds and categories are needed",
        ),
        (lambda: fv.stats(hospitals, {"release": {}}, epsilon=1.0, folder=tmp_path), "statistics.release"),
        (lambda: fv.stats(hospitals, REQUEST, epsilon=-1.0, folder=tmp_path), "epsilon"),
        (lambda: fv.infer(hospitals, "~ height", family="logistic", epsilon=1.0), "'height' is no feature"),
        (lambda: fv.infer(hospitals, family="cox", epsilon=1.0), "family"),
        (lambda: fv.stats(hospitals, REQUEST, epsilon=1.0, settings="none"), "settings: tables by name"),
    ):
        with pytest.raises(ConfigError, match=told):
            call()
    assert not list(tmp_path.iterdir())


# --- sweep, compare, spent, audit ------------------------------------------------------------------------------------


def test_a_sweep_counts_all_its_runs_and_goes_on(tmp_path: Path) -> None:
    given: dict[str, Any] = {"method": fv.uldp_avg_w(**METHOD), "delta": 1e-3, "folder": tmp_path}
    found = fv.sweep(network(), people(), {"rounds": [1, 2], "method.clip": [0.5]}, **given)
    assert [(row["run"], row["rounds"]) for row in found] == [
        ("run-rounds_1_method.clip_0.5", 1),
        ("run-rounds_2_method.clip_0.5", 2),
    ]
    alone = [row["epsilon"] for row in found]
    assert max(alone) < found.spent["epsilon"] < sum(alone)
    assert found.notes == (found.spent["told"],)
    before = (tmp_path / "run-rounds_2_method.clip_0.5" / "ledger.jsonl").read_bytes()
    again = fv.sweep(network(), people(), {"rounds": [1, 2], "method.clip": [0.5]}, **given)
    assert (tmp_path / "run-rounds_2_method.clip_0.5" / "ledger.jsonl").read_bytes() == before
    assert again.spent["epsilon"] == found.spent["epsilon"]
    assert found.write(tmp_path / "page.html", "rounds").exists()
    with pytest.raises(ConfigError, match="holds another experiment"):
        fv.sweep(network(), people(), {"rounds": [1], "method.clip": [0.5]}, **given | {"delta": 1e-4})


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ({}, "grid must have values by key"),
        ({"seed": [1]}, "the sweep sets names and seeds"),
        ({"rounds": 5}, "rounds needs a list of values"),
        ({"rounds": []}, "rounds has no value"),
        ({"rounds": [1, 1]}, "two points would both be the run"),
        ({"rouns": [1]}, "no argument 'rouns'"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_trains(grid: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        fv.sweep(
            network(), people(), grid, method=fv.uldp_avg_w(**METHOD), **{"rounds": 2} | {}, folder=tmp_path
        )
    assert not list(tmp_path.iterdir())


def test_results_and_their_folders_compare_alike(runs: list[fv.Result]) -> None:
    found = fv.compare(*runs)
    assert (len(found), found[0]["seeds"]) == (1, 2)
    assert found[0]["accuracy"] == pytest.approx(np.mean([run.metrics["accuracy"] for run in runs]))
    parent = fv.compare(runs[0].folder.parent)
    assert parent.to_json() == found.to_json()
    with pytest.raises(RunFolderError, match="nothing to compare"):
        fv.compare()
    with pytest.raises(ConfigError, match="a result or a run folder is needed, not int"):
        fv.compare(3)


def test_runs_cost_more_together(runs: list[fv.Result]) -> None:
    found = fv.spent(*runs, runs[0])
    assert [row["epsilon"] for row in found] == [run.statement.epsilon for run in runs]
    assert runs[0].statement.epsilon < found.epsilon < 2 * runs[0].statement.epsilon
    assert found.notes[0].startswith("together: each user is protected with epsilon")


def test_a_result_is_audited_with_the_objects_that_it_began_with(runs: list[fv.Result]) -> None:
    found = fv.audit(runs[0], canaries=0)
    assert 0 <= found.inference.low <= found[0]["value"] <= found.inference.high <= 1
    assert (found.bound, found.is_refuted) == (None, False)
    assert (runs[0].folder / "audit.json").exists()
    assert repr(found).startswith("AuditFrame(PRIVATE")
    with pytest.raises(ConfigError, match="session:"):
        fv.audit(runs[0].folder, canaries=0)


# --- results ---------------------------------------------------------------------------------------------------------


def test_the_history_has_public_columns_alone(runs: list[fv.Result], tmp_path: Path) -> None:
    held_out = train(tmp_path, held=people(test=None))
    public, private = held_out.history, held_out.history_private()
    assert [row["round"] for row in public] == [0, 1, 2]
    assert public[-1]["epsilon"] == pytest.approx(held_out.statement.epsilon)
    assert not {"accuracy", "seconds", "contributions", "norm_0.5", "bytes_up"} & set(public.columns)
    assert {"accuracy", "seconds", "contributions", "clipped"} <= set(private.columns)
    assert "PRIVATE" in repr(private)
    assert "PRIVATE" in str(private)
    assert "PRIVATE" in private._repr_html_()
    assert "accuracy" in runs[0].history.columns  # the test table is public


def test_a_field_that_nobody_classified_is_private(runs: list[fv.Result], tmp_path: Path) -> None:
    row = json.loads((runs[0].folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(METRICS) >= set(row)
    told = {"round": 1, "head_count": 7}
    assert dict(columns_of(told)) == {"round": 1}
    assert dict(columns_of(told, private=True)) == told


def test_a_result_in_a_notebook_says_what_covers_its_metrics(runs: list[fv.Result], tmp_path: Path) -> None:
    held_out = train(tmp_path, held=people(test=None))
    for shown in (held_out._repr_html_(), str(held_out)):
        assert "exact, not covered by the guarantee" in shown
    for shown in (runs[0]._repr_html_(), str(runs[0])):
        assert "measured on public test records" in shown
        assert "whether any one person" in html.unescape(shown)


def test_a_statement_is_summed_up_in_three_sentences(runs: list[fv.Result]) -> None:
    statement = runs[0].statement
    claim, parties, rest = statement.summary().splitlines()
    assert claim == (
        "Against readers of the released models, one user (all of the user's records, in every silo) is protected with "
        "epsilon 4.85 at delta 0.001."
    )
    assert "the server" in parties
    assert f"{len(statement.uncovered)} items are not covered" in rest
    assert "<script" not in statement._repr_html_()
