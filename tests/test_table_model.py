"""Choice of a table's model by public facts: from Python, from TOML and between institutions."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.data.records import Population
from fedveil.errors import ConfigError
from fedveil.run.config.study import Selection, load_study
from fedveil.run.config.table_model import TableFacts, choose_table_model, training_epsilon
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from tests.runs import Silent, files, same_model
from tests.test_recommended import people

TABLE = TableFacts(
    task="classification", classes=2, n_users=5000, columns=7, scaled=True, bounded=False, epsilon=2.0
)


@pytest.mark.parametrize(
    ("changes", "method", "reason"),
    [
        ({}, "boosted-trees", "5,000 users x epsilon 2 = 10,000 reaches 7,500"),
        ({"columns": 10}, "boosted-trees", "reaches 10,000"),
        ({"columns": 11}, "newton", "10,000 is below 11,000"),
        ({"n_users": 3749}, "newton", "7,498 is below 7,500"),
        ({"n_users": 3750}, "boosted-trees", "7,500 reaches 7,500"),
        ({"scaled": False}, "newton", "no schema scales the features"),
        ({"classes": 3}, "newton", "3 classes"),
        ({"classes": 11}, None, "up to 10 classes"),
        ({"task": "regression", "classes": None}, None, "no declared bounds"),
        ({"task": "regression", "classes": None, "bounded": True}, "newton", "a number was predicted"),
        ({"task": "survival", "classes": None}, None, "newton needs a declared horizon"),
    ],
)
def test_public_facts_choose_the_model_of_a_table(
    changes: dict[str, Any], method: str | None, reason: str
) -> None:
    found = choose_table_model(replace(TABLE, **changes))
    assert found.method == method
    models = {"newton": "whitened-linear", "boosted-trees": "boosted-trees", None: "linear"}
    assert found.model == models[method]
    assert found.rounds == {"newton": 12, "boosted-trees": 31, None: 30}[method]
    assert reason in found.reason


def table(folder: Path, n_users: int, seed: int = 0) -> Population:
    """Return 30 records of a population of ``n_users``, read by a schema; the rest of the people have none."""
    folder.mkdir()
    rows = np.random.default_rng(seed).uniform(0, 1, (30, 2)).round(3)
    for silo, held in (("north", rows[:18]), ("south", rows[18:])):
        lines = [f"{silo}{i},{a},{int(b > 0.5)}" for i, (a, b) in enumerate(held)]
        (folder / f"{silo}.csv").write_text("\n".join(["patient,a,ill", *lines]) + "\n")
    (folder / "schema.toml").write_text(
        f'n_users = {n_users}\nuser = "patient"\n[target]\nkind = "label"\ncolumn = "ill"\nclasses = ["0", "1"]\n'
        '[features.a]\nkind = "number"\nlower = 0\nupper = 1\n'
    )
    return fv.tables(folder / "schema.toml", [folder / "north.csv", folder / "south.csv"])


def test_a_table_alone_is_trained_by_the_model_of_its_public_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other records and fewer of them, of as many declared users, get the same model and the same settings."""
    chosen = []
    for place, seed in (("one", 0), ("other", 5)):
        held = table(tmp_path / place, 10_000, seed)
        if place == "other":
            held = replace(held, train=held.train.select(np.arange(3)))
        result = fv.check(held, epsilon=2, rounds=2)
        assert result.rows[0]["epsilon"] == pytest.approx(2, rel=1e-3)
        document = tomllib.loads(result.settings)
        chosen.append(
            (capsys.readouterr().out, {key: document[key] for key in ("method", "model", "rounds")})
        )
        assert document["protection"]["name"] == "secure-aggregation"
    said, settings = chosen[0]
    assert said == (
        "model boosted-trees, method boosted-trees: 10,000 users x epsilon 2 = 20,000 reaches 7,500, from which on "
        "trees are taken for 1 columns\n"
    )
    assert (settings["method"]["name"], settings["method"]["power"]) == ("boosted-trees", "linked")
    assert chosen[1] == chosen[0]


def test_arrays_alone_take_newton_steps_and_survival_the_recommended_settings(tmp_path: Path) -> None:
    found = fv.train(people(400), epsilon=3, rounds=3, protection="none", folder=tmp_path)
    document = tomllib.loads(found.settings)
    assert (document["method"]["name"], document["protection"]["name"]) == ("newton", "none")
    held = people(400)
    alive = np.stack([held.train.targets, 1.0 + held.train.user], axis=1).astype(np.float32)
    tested = np.array([[1, 2], [0, 3]], dtype=np.float32)
    lives = replace(
        held,
        task="survival",
        n_classes=None,
        classes=(),
        train=replace(held.train, targets=alive),
        test_features=held.test_features[:2],
        test_targets=tested,
        test_rows=None,
    )
    survival = fv.train(lives, epsilon=3, rounds=1, folder=tmp_path)
    assert tomllib.loads(survival.settings)["method"]["name"] == "uldp-avg-w"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "epsilon: needed"),
        ({"epsilon": 2, "method": fv.newton()}, "model: needed where method is given"),
        ({"epsilon": 2, "start": "zeros"}, "model: needed where start is given"),
    ],
)
def test_what_belongs_to_a_model_is_refused_without_one(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        fv.train(people(), folder=tmp_path / "none", **given)
    assert not (tmp_path / "none").exists()


def test_records_that_are_no_table_need_a_model() -> None:
    held = people()
    images = replace(
        held,
        train=replace(held.train, features=held.train.features.reshape(-1, 1, 3)),
        test_features=held.test_features.reshape(-1, 1, 3),
    )
    with pytest.raises(ConfigError, match=r"model: needed for records of shape \(1, 3\)"):
        fv.train(images, epsilon=2)
    with pytest.raises(ConfigError, match=r"people: a population is needed"):
        fv.train("linear", epsilon=2)


# --- from TOML ----------------------------------------------------------------------------------------------------


def written(folder: Path, n_users: int, more: str = "", *, files: bool = True) -> Path:
    """Write an experiment that names a table and a budget, and nothing else but ``more``."""
    held = table(folder, n_users)
    assert held.source is not None
    if not files:
        (folder / "north.csv").unlink()
        (folder / "south.csv").unlink()
    path = folder / "ill.toml"
    path.write_text(
        f'name = "ill"\n{more}\n[data.table]\nschema_file = "schema.toml"\nfiles = ["north.csv", "south.csv"]\n'
    )
    return path


def test_toml_without_a_model_is_the_run_of_python_without_one(tmp_path: Path) -> None:
    """The same settings, the same bits of the model and the same statement."""
    path = written(tmp_path / "one", 900, "privacy = { epsilon = 2, insecure_seed = 3 }")
    folder = path.parent
    people = fv.tables(folder / "schema.toml", [folder / "north.csv", folder / "south.csv"])
    result = fv.train(
        people, epsilon=2, name="ill", folder=tmp_path / "py", settings={"privacy": {"insecure_seed": 3}}
    )
    (experiment,) = load_study(str(path)).experiments
    prepared = prepare(experiment)
    outcome = run(prepared, tmp_path / "toml", Silent())
    assert same_model(files(outcome.folder)[1], files(result.folder)[1])
    for statement in (outcome.statement, result.statement):
        (choice,) = (note for note in statement.notes if "a rule of public facts takes" in note)
        assert choice.startswith("model whitened-linear, method newton and 12 rounds")
        assert "900 users x epsilon 2 = 1,800 is below 7,500" in choice
    assert (experiment.method.name, experiment.rounds) == ("newton", 12)


@pytest.mark.parametrize(
    ("n_users", "more", "expected"),
    [
        (900, "privacy.epsilon = 2", ("whitened-linear", "newton", 12)),
        (9_000, "privacy.epsilon = 2", ("boosted-trees", "boosted-trees", 31)),
        (9_000, "privacy = { epsilon = 2, share = 0.1 }", ("whitened-linear", "newton", 12)),
        (9_000, "rounds = 40\nprivacy.epsilon = 2", ("boosted-trees", "boosted-trees", 40)),
        (9_000, 'privacy.epsilon = 2\nmodel.metrics = ["auc"]', ("boosted-trees", "boosted-trees", 31)),
        (9_000, 'privacy.epsilon = 2\nmodel.name = "linear"', ("linear", "uldp-avg-w", 30)),
    ],
)
def test_no_record_is_read_for_the_choice(
    n_users: int, more: str, expected: tuple[str, str, int], tmp_path: Path
) -> None:
    path = written(tmp_path / "none", n_users, more, files=False)
    (found,) = load_study(str(path)).experiments
    assert (found.model.name, found.method.name, found.rounds) == expected
    assert found.protection.name == "secure-aggregation"
    # What a federation signs has the choice in it, and is read as it stands.
    again = tmp_path / "none" / "again.toml"
    again.write_text(found.to_toml())
    assert load_study(str(again)).experiments == (found,)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("local.epochs = 5", r"\[local\]"),
        ("server.learning_rate = 2.0", r"\[server\]"),
        ('model.start = "zeros"', r"model\.start"),
        ("method.clip = 1.0", r"method\.clip"),
    ],
)
def test_keys_of_a_model_need_its_name(more: str, key: str, tmp_path: Path) -> None:
    path = written(tmp_path / "one", 900, f"privacy.epsilon = 2\n{more}")
    with pytest.raises(ConfigError, match=f"{key} belongs to a model or a method"):
        load_study(str(path))


def test_a_sweep_over_epsilon_chooses_at_every_point(tmp_path: Path) -> None:
    path = written(tmp_path / "one", 9_000, "privacy.epsilon = 2")
    small = Selection(overrides=({"privacy": {"epsilon": 0.5}},))
    assert load_study(str(path), small).experiments[0].method.name == "newton"


def test_training_has_the_share_that_the_releases_leave() -> None:
    assert training_epsilon(3.0, {"evaluation": {}}) == pytest.approx(3 * 0.9**0.5)
    shared = {"privacy": {"share": 0.33}, "evaluation": {}, "budget": {"evaluation": 0.5}}
    assert training_epsilon(3.0, shared) == pytest.approx(3 * (0.33 * 0.5) ** 0.5)
    assert training_epsilon(3.0, {"budget": {"evaluation": 0.5}}) == 3.0
    assert training_epsilon(3.0, {"privacy": {"share": "half"}}) == 3.0
