"""Forty wrong uses in Python, in files and on the command line: each is refused with its argument and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import table
from sklearn.exceptions import NotFittedError
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError, DataError, ModelError
from fedveil.sklearn import Classifier
from tests.commands import ended

X, Y, USER = np.eye(3).repeat(20, 0), np.arange(60) % 2, np.arange(60) % 20


def people(**changes: Any) -> Any:
    given = {"data": X, "targets": Y, "user": USER, "silo": USER % 2, "n_users": 20, "task": "classification"}
    return fv.population(**given | {"classes": [0, 1], "silos": [0, 1]} | changes)


def train(folder: Path, model: Any = "linear", **changes: Any) -> Any:
    method = fv.uldp_avg_w(clip=0.5, epochs=1)
    return fv.train(
        model, people(), **{"method": method, "epsilon": 2.0, "rounds": 1, "folder": folder} | changes
    )


SCHEMA = """
n_users = 20
user = "patient"
silos = ["north", "south"]
target = { kind = "label", column = "sick", classes = ["0", "1"] }
features.age = { kind = "number", lower = 0, upper = 120 }
"""
TOML = """
rounds = 1
data = { name = "digits", n_users = 20, n_silos = 2 }
privacy = { epsilon = 2 }
"""


def hospitals(folder: Path, schema: str = SCHEMA, **columns: Any) -> Any:
    """Return the population of two tables in memory."""
    (folder / "schema.toml").write_text(schema)
    rows = {"patient": USER[:10], "age": np.arange(10) + 50, "sick": Y[:10]} | columns
    north = table({name: np.asarray(one) for name, one in rows.items()})
    return fv.tables(folder / "schema.toml", {"north": north, "south": north})


MISTAKES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a start that does not exist": (
        lambda path: train(path, start="zero"),
        ConfigError,
        "start: must be one of seed, zeros, zero-output, not 'zero'; did you mean 'zero",
    ),
    "a class of a local algorithm": (
        lambda path: train(path, local=fv.FedProx),
        ConfigError,
        r"local: FedProx is a class; hand over an algorithm of it: FedProx\(...\)",
    ),
    "processes that are a truth value": (
        lambda path: train(path, processes=True),
        ConfigError,
        "fedveil.train: processes must be a whole number >= 1, not True",
    ),
    "no process": (
        lambda path: train(path, processes=0),
        ConfigError,
        "processes must be a whole number >= 1, not 0",
    ),
    "a model of double precision": (
        lambda path: train(path, nn.Linear(3, 2).double()),
        ModelError,
        r"parameter weight is torch.float64; .*float32: call float\(\)",
    ),
    "labels as columns of 0 and 1": (
        lambda _: people(targets=np.eye(2)[Y]),
        DataError,
        r"targets: one class label a record is needed, but the shape is \(60, 2\); .*argmax\(axis=1\)",
    ),
    "labels in a column": (
        lambda _: people(targets=Y[:, None]),
        DataError,
        r"reshape\(-1\) flattens \(n, 1\)",
    ),
    "classes in a set": (
        lambda _: people(classes={0, 1}),
        ConfigError,
        "classes is a set, which has no order; list them",
    ),
    "a keyword that does not exist": (
        lambda path: train(path, epsilom=2.0),
        ConfigError,
        "fedveil.train: no argument 'epsilom'; there are: .*did you mean 'epsilon'",
    ),
    "a keyword of records that does not exist": (
        lambda _: people(n_user=20),
        ConfigError,
        "fedveil.population: no argument 'n_user'; there are: .*did you mean 'n_users'",
    ),
    "a slip in a needed argument of a plan": (
        lambda _: fv.plan(n_user=300, n_silos=2, epsilon=2),
        ConfigError,
        "n_users: needed; .*'n_user' is no argument; did you mean 'n_users'",
    ),
    "neither epsilon nor method": (
        lambda path: train(path, method=None, epsilon=None),
        ConfigError,
        r"epsilon.*(epsilon=2|epsilon = 2)",
    ),
    "a name in place of a method": (
        lambda path: train(path, method="uldp-avg"),
        ConfigError,
        r"method: a method is needed, such as fedveil.uldp_avg_w\(clip=0.5\)",
    ),
    "a method without its keys": (
        lambda _: fv.dp_fed_ls(),
        ConfigError,
        "method dp-fed-ls: clip: is required, for instance clip = 1.0; smoothing: is required, for instance",
    ),
    "a method that does not exist": (
        lambda _: fv.method("uldp-avgw"),
        ConfigError,
        "no method 'uldp-avgw'; there are: .*did you mean 'uldp-avg-w'",
    ),
    "an old name of a rate": (
        lambda _: fv.uldp_avg_w(clip=0.5, learning_rate=0.1),
        ConfigError,
        "no parameter 'learning_rate'.*local_learning_rate, and the server's rate is server_learning_rate",
    ),
    "a slip in a parameter": (
        lambda _: fv.uldp_avg(clp=1.0),
        ConfigError,
        "method uldp-avg: no parameter 'clp'; known here: .*did you mean 'clip'",
    ),
    "a negative clip": (
        lambda _: fv.uldp_avg_w(clip=-1.0),
        ConfigError,
        "method uldp-avg-w: clip: must be > 0, not -1.0",
    ),
    "a model that does not exist": (
        lambda path: train(path, "lineer"),
        ConfigError,
        "no model named 'lineer'; use one of .*did you mean 'linear'",
    ),
    "a class in place of a model": (
        lambda path: train(path, nn.Linear),
        ConfigError,
        r"model: Linear is a class; hand over a model of it: Linear\(...\)",
    ),
    "a frame in place of people": (
        lambda path: fv.train("linear", X, epsilon=2, folder=path / "runs"),
        ConfigError,
        "people.*population.*ndarray",
    ),
    "a delta that protects nobody": (
        lambda path: train(path, delta=0.5),
        ConfigError,
        r"delta = 0.5.*(1 / 20|0\.05)",
    ),
    "no users": (lambda _: people(user=None), ConfigError, "population: user is required: for every record"),
    "a label that is not declared": (
        lambda _: people(classes=[0, 2]),
        DataError,
        "targets.*classes",
    ),
    "a missing feature": (
        lambda _: people(data=np.where(np.arange(60)[:, None] == 7, np.nan, X)),
        DataError,
        "features, row 7.*(fill|finite|missing)",
    ),
    "fewer users declared than there are": (
        lambda _: people(n_users=5),
        DataError,
        "n_users.*(5|all)",
    ),
    "private test metrics of too few": (
        lambda path: fv.check("linear", hospitals(path.parent), epsilon=1, settings={"evaluation": {}}),
        ConfigError,
        r"4 people are held out.*Each of these suffices: .*people \(n_users of the schema\) = \d+",
    ),
    "silos that only the records name": (
        lambda path: fv.infer(
            hospitals(
                path.parent,
                SCHEMA.replace('silos = ["north", "south"]', 'silo = "place"'),
                place=["a", "b"] * 5,
            ),
            family="logistic",
            epsilon=5,
        ),
        ConfigError,
        r"declare silos, all of them: silos = \['north', 'south'\]",
    ),
    "a regression of arrays": (
        lambda _: fv.infer(people(), "y ~ x", family="logistic", epsilon=2),
        ConfigError,
        r"read tables by a schema, from files or from memory: fedveil.tables\('schema.toml'",
    ),
    "a column that the table lacks": (
        lambda path: hospitals(path.parent, SCHEMA.replace("features.age", "features.agee")),
        DataError,
        "agee.*did you mean 'age'",
    ),
    "a class that the schema does not declare": (
        lambda path: hospitals(path.parent, sick=np.arange(10) % 3),
        DataError,
        "north.*record 3.*sick",
    ),
    "more folds than users": (
        lambda path: fv.cross_validate("linear", people(), folds=21, epsilon=2, folder=path),
        ConfigError,
        "fedveil.cross_validate: folds must be at most the 20 users, not 21",
    ),
    "bounds that are one number": (
        lambda _: people(targets=X[:, 0], classes=None, task="regression", target_range=(0.0, 5e-324)),
        ConfigError,
        "target_range: lower and upper are the same number in float32; declare bounds further apart",
    ),
    "bounds beyond all numbers": (
        lambda _: people(targets=X[:, 0], classes=None, task="regression", target_range=(-1e300, 1e300)),
        ConfigError,
        "target_range: lower and upper must be numbers of at most 3.4e38",
    ),
    "a horizon in another unit": (
        lambda path: train(path, method=fv.newton(horizon=5e-324)),
        ConfigError,
        "method newton: horizon: must be >= 1e-09, not 5e-324",
    ),
    "a prediction before a fit": (
        lambda _: Classifier(epsilon=2, n_users=20).predict(X),
        NotFittedError,
        "not fitted yet",
    ),
}


FILES: dict[str, tuple[str, str]] = {
    "a key that does not exist": ("rouns = 3", "rouns: no such key; known here: .*did you mean 'rounds'"),
    "a method without its tables": (
        "method.name = 'uldp-group'",
        "method.clip: is required, for instance clip = 1.0; method.noise_multiplier: is required, for instance "
        "noise_multiplier = 'calibrated'.*method.group_size: is required.*give .local. with a learning_rate",
    ),
    "newton without its noise": (
        "method.name = 'newton'",
        "method.noise_multiplier: is required, for instance noise_multiplier = 'calibrated'",
    ),
    "text for a number": ("seed = 'one'", "seed: must be a whole number, not 'one'"),
    "a truth value for a number": ("server.learning_rate = true", "server.learning_rate.*true"),
    "a key of another method": (
        "method = { name = 'uldp-avg', clip = 1.0, noise_multiplier = 5.0, group_size = 2 }",
        "method.group_size: no such key; known here: .*it belongs to name = 'uldp-group'",
    ),
    "an average that does not exist": (
        "server.average.name = 'emma'",
        "no average 'emma'.*did you mean 'ema'",
    ),
    "private metrics of a catalogue data set": ("evaluation = {}", "evaluation: is of records .*data.table"),
    "a slip in epsilon": (
        "privacy.epsilom = 2",
        "give .privacy. with epsilon = 2 .*privacy.epsilom: no such key; did you mean 'epsilon'",
    ),
    "a slip in a table": ("privaci.epsilon = 2", "privaci: no such key; did you mean 'privacy'"),
    "no TOML": ("rounds = = 3", "wrong.toml"),
}

COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "a preset that does not exist": (("run", "digit"), "digit.*did you mean 'digits'"),
    "an option without a value": (("run", "digits", "--set", "rounds"), "--set rounds: expected KEY=VALUE"),
    "a variant that does not exist": (("run", "digits", "--variant", "nowt"), "variant.*nowt"),
    "no such command": (("trian",), "trian.*train|No such command|no command"),
    "a folder that is no run": (("report", "."), "experiment.toml is missing: a run folder holds"),
    "an axis without values": (("sweep", "digits", "--over", "rounds"), "--over rounds"),
    "a data set that does not exist": (("data", "digit"), "no data set 'digit'; .*did you mean 'digits'"),
    "a table as a schema": (("check-data", "wrong.toml", "wrong.toml"), "wrong.toml"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_wrong_file_is_told_with_its_key(mistake: str, tmp_path: Path) -> None:
    wrong, said = FILES[mistake]
    key = wrong.partition(" ")[0].partition(".")[0].replace("privaci", "privacy")
    lines = "\n".join(line for line in TOML.splitlines() if not line.startswith(key))
    (tmp_path / "wrong.toml").write_text(f"{wrong}\n{lines}")
    assert re.search(said, ended("check", str(tmp_path / "wrong.toml")).mistake)


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_command_is_told_with_its_option(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text("rounds = = 3")
    words, said = COMMANDS[mistake]
    assert re.search(said, ended(*words).mistake)
    assert not (tmp_path / "runs").exists()


def test_forty_wrong_uses_are_tried() -> None:
    assert len(MISTAKES) + len(FILES) + len(COMMANDS) >= 40


def test_what_suffices_for_private_metrics_does_suffice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        fv.check("linear", hospitals(tmp_path), epsilon=1, settings={"evaluation": {}})
    (users,) = re.findall(r"people \(n_users of the schema\) = (\d+)", str(refused.value))

    def check(n_users: float) -> Any:
        people = hospitals(tmp_path, SCHEMA.replace("n_users = 20", f"n_users = {n_users:.0f}"))
        return fv.check("linear", people, epsilon=1, settings={"evaluation": {}})

    assert 0.09 < check(int(users))[0]["noise of test metric (sd)"] <= 0.1
    with pytest.raises(ConfigError, match="Each of these suffices"):
        check(0.9 * int(users))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_is_told_with_what_would_be_right(mistake: str, tmp_path: Path) -> None:
    wrong, kind, said = MISTAKES[mistake]
    with pytest.raises(kind, match=said):
        wrong(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("model", "method"),
    [("whitened-linear", fv.newton), ("linear", partial(fv.uldp_avg_w, clip=0.5, power="main"))],
)
def test_a_server_that_nothing_bounds_is_told_with_what_bounds_it(model: str, method: Any) -> None:
    (row,) = fv.check(model, people(), method=method(), epsilon=2)
    assert row["to server"] is None
    assert "method.power = 'linked' and protection.name = 'secure-aggregation'" in row["warnings"][-1]
    linked = method(power="linked")
    (row,) = fv.check(model, people(), method=linked, epsilon=2, protection="secure-aggregation")
    assert row["to server"] == row["epsilon"]
    assert not any("server" in one for one in row["warnings"])


def test_a_bounded_server_is_not_warned_of() -> None:
    (row,) = fv.check("linear", people(), method=fv.uldp_avg(clip=0.5), epsilon=2)
    assert row["to server"] is not None
    assert not any("server" in one for one in row["warnings"])
