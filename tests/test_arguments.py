"""Calls of public functions whose arguments do not fit."""

from __future__ import annotations

import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import fedveil as fv
from fedveil.errors import CompositionError, ConfigError, FedveilError
from fedveil.sklearn import Classifier, CoxRegressor, MultiLabelClassifier, Regressor
from tests.shape_checks import look_at
from tests.test_recommended import people


@pytest.fixture(autouse=True)
def _unchecked() -> None:
    look_at(0, "unchecked")  # as in a program, where nothing checks the types of arguments


ESTIMATORS = (Classifier, CoxRegressor, MultiLabelClassifier, Regressor)
PUBLIC = [getattr(fv, name) for name in fv.__all__ if name not in ("FedveilError", "sklearn")]


class Quiet(fv.Callback):
    """A callback of a user, without arguments."""


class Patient(fv.EarlyStop):
    """A callback of a user, with the arguments of its base."""


@pytest.mark.parametrize(
    ("function", "args", "given", "said"),
    [
        (fv.train, (), {"epsilonn": 2}, r"fedveil.train: no argument 'epsilonn'; .* did you mean 'epsilon'"),
        (fv.train, (), {"epsilon": 2}, r"fedveil.train: model: needed; the arguments are: model, people"),
        (fv.plan, (), {}, r"fedveil.plan: n_users, n_silos: needed"),
        (fv.sweep, ("linear", None), {}, r"fedveil.sweep: grid: needed"),
        (fv.cross_validate, ("linear", None), {}, r"fedveil.cross_validate: epsilon: needed"),
        (fv.infer, (None, "a ~ b"), {"epsilon": 1}, r"fedveil.infer: family: needed"),
        (fv.stats, (None, {}), {"epsilon": 1, "delte": 1}, r"no argument 'delte'; .* did you mean 'delta'"),
        (fv.check, (None,), {"epsilonn": 1}, r"no argument 'epsilonn'; .* did you mean 'epsilon'"),
        (fv.audit, ("run", 3), {}, r"fedveil.audit: give arguments by name after run"),
        (fv.audit, ("run",), {"run": 3}, r"fedveil.audit: run: given twice"),
        (fv.spent, (), {"delte": 1}, r"fedveil.spent: no argument 'delte'"),
        (fv.FedProx, (), {}, r"fedveil.FedProx: mu: needed; the arguments are: mu"),
        (fv.FedProx, (0.1,), {}, r"fedveil.FedProx: give arguments by name, such as mu=..."),
        (
            fv.FedProx,
            (),
            {"mu": 0.1, "nu": 1},
            r"fedveil.FedProx: no argument 'nu'; there are: mu$",
        ),
        (fv.Adam, (), {}, r"fedveil.Adam: learning_rate: needed; the arguments are: learning_rate, beta1"),
        (
            fv.Yogi,
            (),
            {"learning_rate": 1, "bet1": 1},
            r"fedveil.Yogi: no argument 'bet1'; .* did you mean 'beta1'",
        ),
        (
            fv.Sgd,
            (),
            {"learningrate": 1},
            r"fedveil.Sgd: no argument 'learningrate'; .* did you mean 'learning_rate'",
        ),
        (fv.Budget, (), {}, r"fedveil.Budget: epsilon: needed"),
        (fv.Budget, (2, 3), {}, r"fedveil.Budget: give arguments by name after epsilon"),
        (fv.EarlyStop, ("auc",), {"patince": 1}, r"fedveil.EarlyStop: no argument 'patince'; .* 'patience'"),
        (fv.Progress, (1,), {}, r"fedveil.Progress: 1 arguments are too many; there are: none"),
        (fv.load, (), {}, r"fedveil.load: path: needed; the arguments are: path, model"),
        (fv.load, ("a", "b", "c"), {}, r"fedveil.load: 3 arguments are too many; there are: path, model"),
        (
            fv.verify,
            ("a",),
            {"trustd": ()},
            r"fedveil.verify: no argument 'trustd'; .* did you mean 'trusted'",
        ),
        (fv.method, (), {"clip": 1}, r"fedveil.method: name: needed"),
        (fv.uldp_avg, (0.5,), {}, r"fedveil.uldp_avg: give arguments by name"),
        (
            fv.Population,
            (),
            {"user": 1},
            r"no argument 'user'; .*fedveil.population and fedveil.tables make one",
        ),
        (Classifier, (), {"epsiln": 1}, r"fedveil.sklearn.Classifier: no argument 'epsiln'; .* 'epsilon'"),
        (CoxRegressor, (), {"classes": []}, r"fedveil.sklearn.CoxRegressor: no argument 'classes'"),
        (Quiet, ("x",), {}, r"^Quiet: 1 arguments are too many; there are: none"),
        (Patient, (), {"patience": 1}, r"^Patient: metric: needed"),
    ],
)
def test_a_call_that_does_not_fit_is_explained(function: Any, args: Any, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        function(*args, **given)


@pytest.mark.parametrize("public", [*PUBLIC, *ESTIMATORS], ids=lambda one: one.__name__)
def test_no_public_name_answers_a_slip_with_pythons_own_error(public: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: public(epsiln=1),
        lambda: public(*range(40)),
        lambda: public(1, epsiln=1),
    ]
    for call in calls:
        with pytest.raises(FedveilError) as refused:
            call()
        assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fv.Result:
    return fv.train(people(400), epsilon=3, rounds=2, folder=tmp_path_factory.mktemp("runs"))


def test_a_method_explains_its_arguments_under_the_name_of_its_class(
    trained: fv.Result, tmp_path: Path
) -> None:
    bundle = fv.load(trained.save(tmp_path / "model"))
    calls: dict[str, Callable[[], Any]] = {
        "Result.save: path: needed; the arguments are: path, about": lambda: trained.save(),
        "Result.report: no argument 'pth'; .* did you mean 'path'": lambda: trained.report(pth="x"),
        "Result.figures: folder: needed": lambda: trained.figures(),
        "Result.predict: features: needed": lambda: trained.predict(),
        "Bundle.predict_table: no argument 'kep'; .* 'keep'": lambda: bundle.predict_table("a.csv", kep=()),
        "Frame.write_csv: path: needed": lambda: trained.history.write_csv(),
    }
    for said, call in calls.items():
        with pytest.raises(ConfigError, match=f"^{said}"):
            call()


WRONG: dict[str, Any] = {
    "nothing": None,
    "text": "nowt",
    "no text": "",
    "a negative number": -1,
    "no number": math.nan,
    "no end": math.inf,
    "a fraction": 2.5,
    "a truth value": True,
    "no list": [],
    "a list": [math.nan],
    "a table": {},
    "an object": object(),
    "no frame": pd.DataFrame(),
    "a frame": pd.DataFrame({"a": ["x", "y"]}),
    "a square": np.full((2, 2), 7.5),
    "a function": len,
    "a class": dict,
    "bytes": b"x",
    "a date": np.datetime64("2020-01-01"),
    "a number beyond floats": 10**400,
    "a set": {1, 2},
}
X, Y, USER = np.eye(3).repeat(20, 0), np.arange(60) % 2, np.arange(60) % 20
RECORDS = {"data": X, "targets": Y, "user": USER, "silo": USER % 2, "n_users": 20, "task": "classification"}
CHECKED = {"model": "linear", "epsilon": 2.0, "method": fv.uldp_avg_w(clip=0.5, epochs=1), "rounds": 1}
GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "population": (fv.population, RECORDS | {"classes": [0, 1], "silos": [0, 1]}),
    "plan": (fv.plan, {"n_users": 100, "n_silos": 2, "epsilon": 2.0, "rounds": 3}),
    "check": (lambda **given: fv.check(**{"people": fv.population(**RECORDS)} | given), CHECKED),
    "budget": (fv.Budget, {"epsilon": 2.0, "fits": 2}),
    "adam": (fv.Adam, {"learning_rate": 0.1}),
    "sgd": (fv.Sgd, {"learning_rate": 0.1}),
    "prox": (fv.FedProx, {"mu": 0.1}),
    "stop": (fv.EarlyStop, {"metric": "accuracy"}),
    "verify": (fv.verify, {"path": "nowhere"}),
    "load": (fv.load, {"path": "nowhere"}),
    "uldp_avg": (fv.uldp_avg, {"clip": 0.5}),
    "Classifier": (
        lambda **given: Classifier(**given).fit(X, Y),
        {"epsilon": 2.0, "n_users": 20, "random_state": 0, "silos": [0, 1]},
    ),
}
MORE = {
    "check": inspect.signature(fv.train).parameters.keys() - {"folder", "callbacks"},
    "plan": {"parameters", "over", "noise_multipliers", "delta"},
    "Classifier": set(),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_wrong_value_is_refused_in_one_line_that_repeats_no_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, good = GOOD[name]
    known = MORE[name] if name in MORE else inspect.signature(function).parameters.keys()
    failed = []
    for key, (what, value) in product({*good, *known}, WRONG.items()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(**good | {key: value})
        except FedveilError as error:
            repeats = any(one in str(error) for one in ("\n", "Columns: []", "7.5"))
            failed += [f"{key}, {what}: {error}"] if repeats else []
        except Exception as error:
            failed.append(f"{key}, {what}: {type(error).__name__}: {error}")
    assert failed == []


def test_a_stage_takes_the_words_of_its_type_alone() -> None:
    with pytest.raises(
        CompositionError, match="schedule must be 'constant' or 'linear' or 'cosine', not 'linaer'; did"
    ):
        fv.Sgd(0.1, schedule="linaer")  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="nesterov must be True or False, not a value of int"):
        fv.Sgd(0.1, momentum=0.5, nesterov=1)  # type: ignore[arg-type]


def test_checked_classes_are_what_they_were() -> None:
    """Fields, signature, copies and subclasses of a class are those that it has without the check."""
    assert list(inspect.signature(fv.Adam).parameters)[:2] == ["learning_rate", "beta1"]
    assert replace(fv.Sgd(0.5), momentum=0.9) == fv.Sgd(0.5, momentum=0.9)
    assert clone(Regressor(epsilon=2.0, target_range=(0, 1))).get_params()["target_range"] == (0, 1)
    assert pickle.loads(pickle.dumps(fv.FedProx(mu=0.1))) == fv.FedProx(mu=0.1)
    assert Patient("auc", patience=3).patience == 3


def test_a_run_is_resumed_with_the_model_and_loss_that_its_folder_names(tmp_path: Path) -> None:
    """The rule takes one logit for two classes, which is not the loss of a call without one."""
    result = fv.train(people(400), epsilon=3, rounds=2, folder=tmp_path)
    assert fv.resume(result.folder, people(400)).rounds == 2
    with pytest.raises(ConfigError, match="people: the population is needed"):
        fv.resume(result.folder, "whitened-linear")
