"""Choice of model and method for an experiment on tables that names neither: as fedveil.train, from public facts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.errors import ConfigError, DataError
from fedveil.run.config.experiment import parse
from fedveil.run.config.recommended import RECOMMENDED
from fedveil.run.config.study import load_study
from fedveil.run.config.task_choice import complete_for_table, describe_choice, training_epsilon
from fedveil.run.setup import prepare
from tests.commands import output

SCHEMA = """
n_users = {users}
user = "who"
{more}
[target]
kind = {target}
[features]
age = {{ kind = "number", lower = 0, upper = 100 }}
ward = {{ kind = "category", categories = ["a", "b"] }}
"""
TWO = '"label"\ncolumn = "sick"\nclasses = ["no", "yes"]'
TARGETS = {
    "two classes": TWO,
    "three classes": '"label"\ncolumn = "sick"\nclasses = ["no", "yes", "maybe"]',
    "bounded": '"number"\ncolumn = "days"\nlower = 0\nupper = 10',
    "count": '"number"\ncolumn = "days"\ncount = true\nlower = 0\nupper = 10',
    "unbounded": '"number"\ncolumn = "days"',
    "labels": '"labels"\ncolumns = ["sick", "old"]',
    "numbers": '"numbers"\ncolumns = ["days", "stays"]',
    "survival": '"survival"\ntime = "days"\nevent = "died"',
    "followed": '"survival"\ntime = "days"\nevent = "died"\nhorizon = 90',
}


def document(
    folder: Path, target: str = TWO, users: int = 400, more: str = "", **changes: Any
) -> dict[str, Any]:
    """Write a schema, and return the smallest document of an experiment on two tables."""
    (folder / "schema.toml").write_text(SCHEMA.format(users=users, target=target, more=more))
    table = {"schema_file": "schema.toml", "files": ["a.csv", "b.csv"]}
    return {"name": "try", "data": {"table": table}, "privacy": {"epsilon": 2.0}} | changes


def write_tables(folder: Path, users: int) -> None:
    random = np.random.default_rng(1)
    for name in ("a", "b"):
        lines = ["who,age,ward,sick"]
        for who in range(users):
            age = random.integers(0, 100)
            lines.append(f"{who},{age},{'ab'[who % 2]},{'yes' if age > 50 else 'no'}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("target", "users", "model", "method", "rounds"),
    [
        ("two classes", 400, "whitened-linear", "newton", 12),
        ("two classes", 3750, "boosted-trees", "boosted-trees", 31),
        ("three classes", 3750, "whitened-linear", "newton", 12),
        ("bounded", 400, "whitened-linear", "newton", 12),
        ("count", 400, "whitened-rates", "newton", 24),
        ("unbounded", 400, "linear", None, None),
        ("labels", 400, "linear", None, None),
        ("numbers", 400, "linear", None, None),
        ("followed", 400, "whitened-hazards", "newton", 12),
    ],
)
def test_the_schema_and_epsilon_decide(
    target: str, users: int, model: str, method: str | None, rounds: int | None, tmp_path: Path
) -> None:
    """No table exists here: nothing but the schema can be read."""
    found, chosen = complete_for_table(document(tmp_path, TARGETS[target], users), tmp_path)
    assert chosen is not None
    assert (found["model"]["name"], found.get("method", {}).get("name")) == (model, method)
    assert found.get("rounds") == rounds
    assert found.get("protection") == (None if method is None else {"name": "secure-aggregation"})


def file_of(folder: Path, more: str = "") -> str:
    """Write the smallest experiment of a file, and return its path."""
    path = folder / "try.toml"
    table = 'name = "try"\n[data.table]\nschema_file = "schema.toml"\nfiles = ["a.csv", "b.csv"]\n'
    path.write_text(f"{more}\n{table}[privacy]\nepsilon = 2.0\n")
    return str(path)


def test_a_file_and_python_choose_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path, 40)
    document(tmp_path, users=400)
    study = load_study(file_of(tmp_path))
    people = fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv", tmp_path / "b.csv"])
    result = fv.train(people, epsilon=2, name="try", folder=tmp_path / "runs")
    assert study.choices == (f"try: {capsys.readouterr().out.splitlines()[0]}",)
    (from_file,), from_python = study.experiments, parse(tomllib.loads(result.settings), "test")
    for key in ("rounds", "method", "protection", "server", "local"):
        assert getattr(from_file, key) == getattr(from_python, key), key
    # One logit for two classes: two would double the parameters, and with them the noise.
    for key in ("name", "loss", "start"):
        assert getattr(from_file.model, key) == getattr(from_python.model, key), key
    checked = fv.check(people, epsilon=2)
    assert checked.rows[0]["parameters"] == prepare(from_file).task.dimension
    assert checked.rows[0]["epsilon"] == pytest.approx(result.statement.epsilon)


def test_survival_without_a_horizon_is_refused_before_a_table_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target: survival needs the public time"):
        complete_for_table(document(tmp_path, TARGETS["survival"]), tmp_path)


def test_survival_with_a_horizon_takes_newton_steps_in_a_file_and_in_python(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    for name in ("a", "b"):
        lines = ["who,age,ward,days,died"]
        for who in range(60):
            age = random.integers(0, 100)
            days = min(90, 1 + int(random.exponential(9000 / (20 + age))))
            lines.append(f"{who},{age},{'ab'[who % 2]},{days},{int(days < 90)}")
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    document(tmp_path, TARGETS["followed"], 100)
    (from_file,) = load_study(file_of(tmp_path)).experiments
    people = fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv", tmp_path / "b.csv"])
    result = fv.train(people, epsilon=2, name="try", folder=tmp_path / "runs")
    from_python = parse(tomllib.loads(result.settings), "test")
    assert from_file.model.name == from_python.model.name == "whitened-hazards"
    assert (from_file.method, from_file.rounds) == (from_python.method, from_python.rounds)
    # The method takes the schema's horizon; another one is a key of its own.
    assert from_file.method.get("horizon") is None
    assert result.statement.epsilon <= 2


def test_a_file_without_a_model_is_trained_to_its_report(tmp_path: Path) -> None:
    """Trees, as the number of declared users asks: parameters are stored, and the report draws them."""
    write_tables(tmp_path, 40)
    document(tmp_path, users=3750)
    file = file_of(tmp_path, "rounds = 2")
    choice = "try: model boosted-trees, method boosted-trees: 3,750 users x epsilon 2 = 7,500 reaches 7,500"
    assert choice in output("check", file)
    printed = output("run", file, "--runs", tmp_path / "runs")
    assert choice in printed
    assert "One tree of the model" in (tmp_path / "runs" / "try" / "report.html").read_text()


def test_an_edited_schema_names_no_feature_of_an_earlier_model(tmp_path: Path) -> None:
    """Of as many features, but another meaning: neither a report nor a bundle reads the model by it."""
    write_tables(tmp_path, 40)
    document(tmp_path)
    output("run", file_of(tmp_path, "rounds = 2"), "--runs", tmp_path / "runs")
    folder, schema = tmp_path / "runs" / "try", tmp_path / "schema.toml"
    assert "Partial dependence on age" in (folder / "report.html").read_text()
    written = schema.read_text()
    schema.write_text(written.replace("upper = 100", "upper = 50"))
    output("report", folder)
    page = (folder / "report.html").read_text()
    assert "Partial dependence on feature 0" in page
    assert "Partial dependence on age" not in page
    with pytest.raises(ConfigError, match=r"schema\.toml: another schema than that of the run"):
        output("bundle", folder, "-o", tmp_path / "model.zip")
    schema.write_text(written)
    output("bundle", folder, "-o", tmp_path / "model.zip")


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "fedavg"}},
        {"local": {"learning_rate": 0.1}},
        {"server": {"learning_rate": 1.0}},
        {"model": {"name": "mlp"}},
        {"model": {"initial": "begin.safetensors"}},
        {"privacy": {}},
        {"privacy": {"epsilon": "2"}},
        {"privacy": {"epsilon": True}},
        {"data": {"name": "digits"}},
        {"data": {"table": "schema.toml"}},
        {"data": {"table": {"files": ["a.csv"]}}},
    ],
)
def test_a_document_that_decides_for_itself_stays_as_it_is(changes: dict[str, Any], tmp_path: Path) -> None:
    asked = document(tmp_path) | changes
    assert complete_for_table(asked, tmp_path) == (asked, None)


@pytest.mark.parametrize("target", ["two classes", "unbounded"])
def test_institutions_name_their_file_of_main_silos_and_leave_the_rest_to_the_rule(
    target: str, tmp_path: Path
) -> None:
    power = {"main_silos": "ab" * 32}
    asked = document(tmp_path, TARGETS[target], method={"power": power})
    found, chosen = complete_for_table(asked, tmp_path)
    assert chosen is not None
    assert found["method"]["power"] == power
    assert found["method"]["name"] == (chosen.method or "uldp-avg-w")
    assert found["method"]["noise_multiplier"] == "calibrated"
    assert found["model"]["name"] == chosen.model
    parsed = parse(found, "test")
    assert (parsed.rounds, parsed.model.loss is None) == (chosen.rounds, False)
    assert parsed.protection.name == "secure-aggregation"


def test_metrics_rounds_and_protection_of_a_document_stay(tmp_path: Path) -> None:
    own = {"model": {"metrics": ["auc"]}, "rounds": 3, "protection": {"name": "none"}}
    found, _ = complete_for_table(document(tmp_path, **own), tmp_path)
    assert (found["rounds"], found["protection"]) == (3, {"name": "none"})
    assert found["model"] == {"name": "whitened-linear", "loss": "binary_cross_entropy", "metrics": ["auc"]}


def test_a_part_of_a_budget_counts_as_its_part(tmp_path: Path) -> None:
    """sqrt(.25) of epsilon 2 times 3,750 users is below what trees need."""
    asked = document(tmp_path, users=3750, privacy={"epsilon": 2.0, "share": 0.25})
    found, chosen = complete_for_table(asked, tmp_path)
    assert chosen is not None
    assert found["method"]["name"] == "newton"
    assert "3,750 users x epsilon 1 = 3,750" in chosen.reason


def test_silos_of_a_column_are_counted_by_the_schema(tmp_path: Path) -> None:
    one = {"data": {"table": {"schema_file": "schema.toml", "files": ["a.csv"]}}}
    found, _ = complete_for_table(document(tmp_path) | one, tmp_path)
    assert "protection" not in found
    listed = 'silo = "place"\nsilos = ["x", "y"]'
    found, _ = complete_for_table(document(tmp_path, more=listed) | one, tmp_path)
    assert found["protection"] == {"name": "secure-aggregation"}


def test_a_schema_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    asked = document(tmp_path)
    (tmp_path / "schema.toml").write_text("n_users = 1")
    with pytest.raises(DataError, match=r"schema\.toml"):
        complete_for_table(asked, tmp_path)


def test_a_declared_count_takes_poisson_regression_and_another_number_is_told_of_it(tmp_path: Path) -> None:
    found, chosen = complete_for_table(document(tmp_path, TARGETS["count"]), tmp_path)
    assert (found["model"]["loss"], found["method"]["cap"]) == ("poisson", 10)
    assert chosen is not None
    assert "count = true" not in str(chosen)
    assert parse(found, "test").rounds == 24
    _, other = complete_for_table(document(tmp_path, TARGETS["bounded"]), tmp_path)
    assert "declare count = true" in str(other)


@pytest.mark.parametrize("bounds", ["", "lower = 1\nupper = 9", "lower = 0\nupper = 9.5"])
def test_a_count_has_a_public_largest_count(bounds: str, tmp_path: Path) -> None:
    target = f'"number"\ncolumn = "days"\ncount = true\n{bounds}'
    with pytest.raises(DataError, match="count: give lower = 0 and upper"):
        complete_for_table(document(tmp_path, target), tmp_path)


def test_a_fraction_is_no_count(tmp_path: Path) -> None:
    document(tmp_path, TARGETS["count"])
    (tmp_path / "a.csv").write_text("who,age,ward,days\n1,3,a,2\n2,4,b,2.5\n")
    with pytest.raises(DataError, match=r"a\.csv.*'days'.*the target is a count"):
        fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv"])


@pytest.mark.parametrize("name", ["private-weighting", "partial-encryption"])
def test_the_rule_chooses_what_the_asked_protection_can_run(name: str, tmp_path: Path) -> None:
    found, chosen = complete_for_table(document(tmp_path, protection={"name": name}), tmp_path)
    assert chosen is not None
    assert chosen.method is None
    parsed = parse(found, "test")
    assert (parsed.model.name, parsed.protection.name) == ("linear", name)
    assert parsed.method.get("power") == (1 if name == "private-weighting" else "linked")


def test_private_weighting_alone_is_ready_to_run_and_the_statement_names_the_choice(tmp_path: Path) -> None:
    write_tables(tmp_path, 20)
    document(tmp_path, users=400)
    path = file_of(tmp_path)
    Path(path).write_text(f'{Path(path).read_text()}[protection]\nname = "private-weighting"\n')
    (experiment,) = load_study(path).experiments
    assert prepare(experiment).epsilon_after(30) == pytest.approx(2, rel=1e-2)
    people = fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv", tmp_path / "b.csv"])
    result = fv.train(people, epsilon=2, rounds=12, folder=tmp_path / "runs")
    assert any("are those that a rule of public facts takes" in note for note in result.statement.notes)
    assert fv.resume(result.folder, people).rounds == 12
    other = fv.train(people, epsilon=2, rounds=2, folder=tmp_path / "runs")
    assert not any("a rule of public facts" in note for note in other.statement.notes)


def test_other_releases_leave_less_epsilon_to_the_rule(tmp_path: Path) -> None:
    assert training_epsilon(2.0, {"preprocessing": {}, "evaluation": {}}) == pytest.approx(2 * 0.83**0.5)
    asked = document(tmp_path, users=3750, evaluation={})
    assert complete_for_table(asked, tmp_path)[0]["method"]["name"] == "newton"


def test_a_named_method_takes_the_rounds_of_the_rule(tmp_path: Path) -> None:
    for method, rounds in (
        ({"name": "newton"}, 12),
        ({"name": "newton", "cap": 9}, 24),
        ({"name": "boosted-trees"}, 31),
    ):
        asked = document(tmp_path, method=method | {"noise_multiplier": "calibrated"})
        assert parse(asked, "test").rounds == rounds


def test_survival_under_another_protection_keeps_the_refusal_and_names_what_the_loss_needs(
    tmp_path: Path,
) -> None:
    asked = {"protection": {"name": "private-weighting"}}
    with pytest.raises(ConfigError, match="target: survival needs the public time"):
        complete_for_table(document(tmp_path, TARGETS["survival"], **asked), tmp_path)
    found, chosen = complete_for_table(document(tmp_path, TARGETS["followed"], **asked), tmp_path)
    assert (found["model"]["name"], found["model"]["loss"], "method" in found) == ("linear", "cox", False)
    assert "users with one record each teach it nothing" in str(chosen)


def test_a_model_of_survival_without_a_horizon_gets_no_sentence_of_the_rule(tmp_path: Path) -> None:
    """The rule refuses this schema; a run that names its own model is described without it."""
    given = document(tmp_path, TARGETS["survival"], model={"name": "linear"}, rounds=1)
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("who,age,ward,days,died\n1,30,a,2,1\n2,40,b,3,0\n")
    people = fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv", tmp_path / "b.csv"])
    experiment = parse(RECOMMENDED.complete(given), "test")
    assert describe_choice(experiment, people) is None


def test_settings_of_python_leave_the_same_epsilon_to_the_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tables(tmp_path, 20)
    document(tmp_path, users=3750)
    people = fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv", tmp_path / "b.csv"])
    for settings, method in (
        ({}, "boosted-trees"),
        ({"evaluation": {}}, "newton"),
        ({"protection": {"name": "private-weighting"}}, "recommended"),
    ):
        fv.check(people, epsilon=2, settings=settings)
        assert f", method {method}: " in capsys.readouterr().out, settings


@pytest.mark.parametrize(
    ("model", "method", "rounds"), [("boosted-trees", "boosted-trees", 31), ("whitened-linear", "newton", 12)]
)
def test_a_model_that_one_method_trains_takes_that_method(
    model: str, method: str, rounds: int, tmp_path: Path
) -> None:
    """Local training of 960 trees would take hours, and teach them nothing."""
    write_tables(tmp_path, 40)
    asked = document(tmp_path, users=100, model={"name": model, "loss": "binary_cross_entropy"})
    from_file = parse(asked, "test")
    people = fv.tables(tmp_path / "schema.toml", [tmp_path / "a.csv", tmp_path / "b.csv"])
    result = fv.train(model, people, epsilon=2, name="try", folder=tmp_path / "runs")
    from_python = parse(tomllib.loads(result.settings), "test")
    for found in (from_file, from_python):
        assert (found.method.name, found.method.get("power"), found.rounds) == (method, "linked", rounds)
        assert found.protection.name == "secure-aggregation"
    assert result.statement.epsilon == pytest.approx(2, rel=1e-2)
