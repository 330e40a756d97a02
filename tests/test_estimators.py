"""Estimators with scikit-learn's conventions, the budget that their copies share, and cross-validation by users."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy.optimize import brentq
from sklearn.base import clone
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import fedveil as fv
from fedveil.api.budget import Charge, joint_epsilon
from fedveil.data.splits import fold_of_user
from fedveil.errors import BudgetError, ConfigError, DataError, RunFolderError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import atoms, compose
from fedveil.privacy.ledger import read_entries
from fedveil.sklearn import Classifier, CoxRegressor, Regressor

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(-1, 1, size=(200, 3))
Y = np.where(X[:, 0] > 0, "sick", "well")
USER = RANDOM.integers(0, 50, 200)
SILO = USER % 2
TRAINED: dict[str, Any] = {
    "method": fv.uldp_avg_w(clip=0.5, epochs=3),
    "rounds": 2,
    "n_users": 50,
    "silos": [0, 1],
}
LABELLED = TRAINED | {"classes": ["sick", "well"]}


def fitted(estimator: Any = Classifier, y: Any = Y, **changes: Any) -> Any:
    own = LABELLED if estimator is Classifier else TRAINED
    return estimator(**own | {"epsilon": 50.0} | changes).fit(X, y, user=USER, silo=SILO)


# --- fit and predict -------------------------------------------------------------------------------------------------


def test_a_classifier_predicts_its_labels() -> None:
    found = fitted(rounds=10, method=fv.uldp_avg_w(clip=2.0, epochs=20), server=fv.Sgd(2.0))
    assert found.score(X, Y) > 0.8
    assert found.classes_.tolist() == ["sick", "well"]
    assert found.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(200))
    assert ((found.decision_function(X) > 0) == (found.predict(X) == "well")).all()
    assert found.predict_proba(X) == pytest.approx(
        found.result_.predict_proba(X.astype(np.float32)), abs=1e-6
    )
    assert found.epsilon_ == found.statement_.epsilon <= 50.0


def test_a_regressor_scales_by_its_declared_range() -> None:
    wanted = 1000 + 80 * X[:, 0] + 15 * X[:, 1]
    found = fitted(
        Regressor,
        wanted,
        target_range=(900, 1100),
        rounds=10,
        method=fv.uldp_avg_w(clip=2.0, epochs=20),
        server=fv.Sgd(2.0),
    )
    assert found.score(X, wanted) == pytest.approx(r2_score(wanted, found.predict(X)))
    assert found.score(X, wanted) > 0.5
    with pytest.raises(ConfigError, match=r"y, row \d+: the target is outside of target_range, 900 to 1000"):
        fitted(Regressor, wanted, target_range=(900, 1000))


@pytest.mark.parametrize("upper", [0.1, 0.3, 1000.1])
def test_a_target_at_its_bound_is_within_it(upper: float) -> None:
    """The nearest float32 of .1 is above .1."""
    wanted = np.where(X[:, 0] > 0, upper, upper - 1e-3)
    found = fitted(Regressor, wanted, target_range=(upper - 1e-3, upper))
    assert np.isfinite(found.predict(X)).all()


class Unreadable:
    """An object whose conversion fails with words of its own."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("aged 93")


@pytest.mark.parametrize("entry", [[1.0, 2.0], Unreadable(), "aged 93", None])
def test_a_target_that_is_no_number_is_named_by_its_row_alone(entry: Any) -> None:
    wanted = [*X[:3, 0].tolist(), entry, *X[4:, 0].tolist()]
    with pytest.raises(DataError, match="row 3") as raised:
        fitted(Regressor, wanted, target_range=(-1, 1))
    assert "93" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:user ids of this fit")
def test_silos_are_told_as_counted_wherever_they_are_read_from_records() -> None:
    """Whether all records lie in a silo called 0 decided between two statements."""
    counted = "The silos are those that have records"
    asked = LABELLED | {"epsilon": 50.0, "silos": None}
    for silo, told in ((np.zeros(200, dtype=int), True), (SILO, True), (None, False)):
        found = Classifier(**asked).fit(X, Y, user=USER, silo=silo)
        assert any(one.startswith(counted) for one in found.statement_.notes) == told


@pytest.mark.filterwarnings("ignore:the loss cox compares records")
def test_survival_takes_pairs_and_the_arrays_of_scikit_survival() -> None:
    time, event = np.exp(-X[:, 0]), np.ones(200, dtype=bool)
    structured = np.array(list(zip(event, time, strict=True)), dtype=[("dead", "?"), ("days", "f8")])
    pairs = np.stack([event, time], axis=1)
    found = fitted(CoxRegressor, structured, rounds=5)
    assert found.score(X, structured) == found.score(X, pairs) > 0.6
    people = [
        fv.population(X, y, user=USER, silo=SILO, n_users=50, task="survival", silos=[0, 1])
        for y in (structured, pairs)
    ]
    assert np.array_equal(people[0].train.targets, people[1].train.targets)
    for kinds in (
        [("a", "f8"), ("b", "f8")],
        [("a", "?"), ("b", "?")],
        [("a", "?"), ("b", "f8"), ("c", "f8")],
    ):
        with pytest.raises(DataError, match="two fields: the event, of truth values, and the time"):
            fv.population(
                X, np.zeros(200, dtype=kinds), user=USER, silo=SILO, n_users=50, task="survival", silos=[0, 1]
            )


def test_bounds_scale_columns_and_are_checked() -> None:
    table = pd.DataFrame({"age": 50 + 50 * X[:, 0], "b": X[:, 1]})
    estimator = Classifier(**LABELLED, epsilon=1.0, bounds={"age": (0, 100)})
    found = estimator.fit(table, Y, user=USER, silo=SILO)
    assert found.feature_names_in_.tolist() == ["age", "b"]
    inner = found._scaled(np.array([[0, 7], [100, 7], [1000, 7]], dtype=np.float32))
    assert inner.tolist() == [[-1, 7], [1, 7], [1, 7]]
    with pytest.raises(DataError, match="with the feature names"):
        found.predict(table.rename(columns={"age": "AGE"}))
    for wrong, told in (
        ({"height": (0, 1)}, "there is no column 'height'; there are: 2 columns, none of them wanted"),
        ({"age": (1, 0)}, "bounds of 'age' must be"),
        ((0,), "bounds must be"),
    ):
        with pytest.raises(ConfigError, match=told):
            clone(estimator).set_params(bounds=wrong).fit(table, Y, user=USER, silo=SILO)


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        ({}, {"user": None}, "user is needed: the person to whom each record belongs"),
        ({"epsilon": None, "method": None}, {}, "epsilon is needed"),
        ({"n_users": None}, {}, "n_users is needed: the public number of all users"),
        ({"epsilon": fv.Budget(1.0), "delta": 1e-3}, {}, "delta: that of the budget counts"),
    ],
)
def test_a_fit_that_could_claim_too_much_is_refused(changes: Any, more: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Classifier(**LABELLED | {"epsilon": 1.0} | changes).fit(X, Y, **{"user": USER} | more)


def test_a_scaler_that_was_fitted_on_these_records_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="a scaler was fitted on these records") as said:
        Classifier(**LABELLED, epsilon=1.0).fit(StandardScaler().fit_transform(X), Y, user=USER)
    assert {one.filename for one in said} == {__file__}  # the caller's line, not one of fedveil
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Classifier(**LABELLED, epsilon=1.0).fit(X, Y, user=USER + 100)


def test_a_pickled_estimator_has_no_records() -> None:
    found = fitted()
    bits = pickle.dumps(found)
    assert X[:3].astype(np.float32).tobytes() in pickle.dumps(found.result_._people)
    assert X[:3].astype(np.float32).tobytes() not in bits
    assert (pickle.loads(bits).predict(X) == found.predict(X)).all()


# --- conventions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Classifier, Regressor, CoxRegressor])
def test_an_estimator_is_copied_by_its_arguments(kind: Any) -> None:
    module = torch.nn.Linear(3, 2)
    first = kind(module, epsilon=1.0, rounds=7, random_state=3)
    again = clone(first)
    assert again.get_params().keys() == first.get_params().keys()
    assert (again.epsilon, again.rounds, again.random_state) == (1.0, 7, 3)
    assert "rounds=7" in repr(first)


def test_a_pipeline_routes_users_and_silos() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        pipeline = make_pipeline(FunctionTransformer(), Classifier(**LABELLED, epsilon=1.0))
        pipeline.fit(X, Y, user=USER, silo=SILO)
    assert pipeline[-1].result_._people.n_silos == 2


# --- a budget --------------------------------------------------------------------------------------------------------


def test_copies_share_a_budget_and_stay_within_it() -> None:
    budget = fv.Budget(3.0, fits=3)
    estimator = Classifier(**LABELLED, epsilon=budget)
    assert clone(estimator).epsilon is copy.deepcopy(budget) is copy.copy(budget) is budget
    with sklearn.config_context(enable_metadata_routing=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cross_validate(
            estimator,
            X,
            Y,
            cv=GroupKFold(3).split(X, Y, USER),
            params={"user": USER, "silo": SILO},
            return_estimator=True,
            error_score="raise",
        )
    mine = [one.epsilon_ for one in found["estimator"]]
    assert len(set(mine)) == 1
    # Three equal Gaussian fits: the whole budget, and not more.
    folders = [one.folder_ for one in found["estimator"]]
    assert 2.95 < fv.spent(*folders).epsilon <= 3.0
    assert budget.used == 3
    with pytest.raises(BudgetError, match="is for 3 fits, and all are spent"):
        clone(estimator).fit(X, Y, user=USER, silo=SILO)


def test_a_fit_under_sampled_users_gets_what_keeps_all_within_the_budget(tmp_path: Path) -> None:
    """Such a fit's epsilon does not follow from a Gaussian's: the composed events decide."""
    budget = fv.Budget(2.0, fits=3)
    method = fv.uldp_avg_w(clip=0.5, epochs=1, user_sampling_rate=0.3)
    folders = [
        Classifier(**LABELLED | {"method": method}, epsilon=budget, folder=tmp_path)
        .fit(X, Y, user=USER, silo=SILO)
        .folder_
        for _ in range(3)
    ]
    assert 1.0 < fv.spent(*folders).epsilon <= 2.0


def test_what_a_fit_spent_beyond_its_plan_is_taken_from_those_that_are_left() -> None:
    budget = fv.Budget(2.0, fits=2)
    first = Classifier(**LABELLED, epsilon=budget).fit(X, Y, user=USER, silo=SILO)
    charge = Charge(event=first.statement_.event, protects=("user", "add-or-remove-one"))
    more = compose(Counter({one: count + 1 for one, count in atoms(charge.event).items()}))
    budget.settle(charge, replace(first.statement_, event=more))  # one of two rounds was played twice
    second = Classifier(**LABELLED, epsilon=budget).fit(X, Y, user=USER, silo=SILO)
    assert budget.used == 2
    assert second.epsilon_ < 0.75 * first.epsilon_
    accountant = make_accountant("pld", first.statement_.adjacency)
    charges = [replace(charge, event=one) for one in (more, second.statement_.event)]
    assert 1.8 < joint_epsilon(charges, accountant, 1e-5) <= 2.0


def test_a_fit_that_repeats_attempts_stops_within_the_budget() -> None:
    """Without all silos an attempt fails after its sum may have been opened, and its charge is spent."""
    budget = fv.Budget(2.0)
    lossy = {"name": "secure-aggregation", "on_dropout": "retry", "dropout_rate": 0.4}
    changes: Any = {"silos": [0, 1, 2], "rounds": 4, "settings": {"protection": lossy}}
    found = Classifier(**LABELLED | changes, epsilon=budget).fit(X, Y, user=USER, silo=USER % 3)
    assert found.result_.rounds < 4
    assert len(read_entries(found.folder_ / "ledger.jsonl")) > found.result_.rounds
    assert 1.9 < found.epsilon_ <= 2.0


def test_noise_from_a_known_seed_is_within_no_budget(tmp_path: Path) -> None:
    known: Any = {"method": TRAINED["method"], "rounds": 2, "settings": {"privacy": {"insecure_seed": 7}}}
    with pytest.raises(BudgetError, match="known seed"):
        Classifier(**LABELLED | known, epsilon=fv.Budget(2.0), folder=tmp_path).fit(
            X, Y, user=USER, silo=SILO
        )
    with pytest.raises(BudgetError, match="known seed"):
        fv.cross_validate("linear", people(), folds=3, epsilon=2.0, folder=tmp_path, **known)
    assert not list(tmp_path.iterdir())


def test_fits_under_a_known_seed_cost_without_bound_together() -> None:
    known = {"epsilon": 1.0, "settings": {"privacy": {"insecure_seed": 7}}}
    fitted(**known)
    with pytest.warns(UserWarning, match="together they cost epsilon infinite") as said:
        fitted(**known)
    assert {one.filename for one in said} == {__file__}  # the caller's line, not one of fedveil


SECRET = "secret"  # a cell that no error may repeat
REFUSED: dict[str, tuple[Any, str]] = {
    "text": (np.array([[1.0, SECRET], [2.0, 3.0]] * 4, dtype=object), "row 0, feature 1"),
    "texts": ([[1.0, 2.0], [3.0, SECRET]] * 4, "row 1: the values are text, not numbers"),
    "categories": (pd.DataFrame({"a": pd.Categorical([SECRET] * 8), "b": range(8)}), "column 'a', row 0"),
    "one axis": (np.arange(8) + 888.25, "one row a record"),
    "three axes": (np.full((8, 2, 2), 888.25), r"the shape is \(8, 2, 2\)"),
    "complex": (np.full((8, 2), 888.25j), "complex128, not numbers"),
    "one number": (888.25, "one entry a record"),
    "huge": (np.array([[10**400, 888]] * 8, dtype=object), "row 0, feature 0"),
    "nothing": (None, "one entry a record"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_features_that_scikit_learn_refuses_are_named_without_a_value(kind: str) -> None:
    given, told = REFUSED[kind]
    model = Classifier(epsilon=2.0, n_users=100, classes=[0, 1])
    with pytest.raises(DataError, match=told) as refused:
        model.fit(given, [0, 1] * 4, user=np.arange(8))
    chain = [refused.value, refused.value.__cause__, refused.value.__context__]
    assert not any(SECRET in repr(one) or "888" in repr(one) for one in chain)


def test_records_to_predict_of_another_width_or_with_text_are_refused_without_a_value() -> None:
    model = fitted()
    for given in (np.full((2, 5), 888.25), [[1.0, 2.0, SECRET]]):
        with pytest.raises(DataError, match="Classifier: X") as refused:
            model.predict(given)
        assert SECRET not in str(refused.value)
        assert "888" not in str(refused.value)


def test_a_fit_that_is_refused_is_not_charged_and_one_that_fails_is() -> None:
    budget = fv.Budget(2.0, fits=2)
    with pytest.raises(DataError):
        Classifier(**LABELLED, epsilon=budget).fit(X, ["other"] * 200, user=USER, silo=SILO)
    assert budget.used == 0
    with pytest.raises(RunFolderError):
        Classifier(**LABELLED, epsilon=budget, folder="/dev/null/runs").fit(X, Y, user=USER, silo=SILO)
    assert budget.used == 1


def test_a_method_without_noise_and_fits_of_two_kinds_are_refused() -> None:
    with pytest.raises((BudgetError, ConfigError)):
        Classifier(**LABELLED | {"method": fv.fedavg()}, epsilon=fv.Budget(2.0)).fit(X, Y, user=USER)
    budget = fv.Budget(2.0, fits=2)
    Classifier(**LABELLED, epsilon=budget).fit(X, Y, user=USER, silo=SILO)
    other = LABELLED | {"method": fv.dp_fed(clip=0.5), "silos": range(50)}
    with pytest.raises(BudgetError, match="another unit, or compare other neighbouring"):
        Classifier(**other, epsilon=budget).fit(X, Y, user=USER, silo=USER)


def test_a_budget_leaves_the_process_with_its_file_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a budget with a file"):
        pickle.dumps(Classifier(epsilon=fv.Budget(2.0)))
    budget = fv.Budget(2.0, fits=3, file=tmp_path / "budget")
    other = pickle.loads(pickle.dumps(budget))
    estimators = [Classifier(**LABELLED, epsilon=one) for one in (budget, other, budget, other)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(one.fit, X, Y, user=USER, silo=SILO) for one in estimators]
        failed = [one.exception() for one in futures if one.exception() is not None]
    assert [type(one) for one in failed] == [BudgetError]
    assert budget.used == other.used == fv.Budget(2.0, fits=3, file=tmp_path / "budget").used == 3
    with pytest.raises(ConfigError, match="was begun with other numbers"):
        fv.Budget(4.0, fits=3, file=tmp_path / "budget")
    with (tmp_path / "budget").open("ab") as stream:
        stream.write(b'{"event": ')
    with pytest.raises(RunFolderError, match="its last line is not complete, and may be a charge"):
        budget.used  # noqa: B018


def test_a_budget_whose_file_is_gone_or_replaced_admits_no_fit(tmp_path: Path) -> None:
    file = tmp_path / "budget.jsonl"
    budget = fv.Budget(2.0, fits=2, file=file)
    bits, before = pickle.dumps(budget), file.read_bytes()
    fitted(epsilon=budget)
    for put_back in (None, before):
        file.unlink() if put_back is None else file.write_bytes(put_back)
        with pytest.raises(RunFolderError, match="charges that this process has seen are missing"):
            fitted(epsilon=budget)
        file.unlink()
        with pytest.raises(RunFolderError, match="is missing, and with it the spent budget"):
            pickle.loads(bits)


def test_a_forked_process_cannot_spend_a_budget_without_a_file() -> None:
    budget = fv.Budget(2.0)
    child = os.fork()
    if not child:
        try:
            assert budget.used == 0
        except ConfigError as error:
            os._exit(7 if "forked process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    "given", [{"epsilon": 0}, {"epsilon": "2"}, {"epsilon": 1, "fits": 0}, {"epsilon": 1, "delta": 0}]
)
def test_a_budget_of_other_numbers_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"fedveil\.Budget: "):
        fv.Budget(**given)


def test_the_share_of_a_fit_is_that_of_a_gaussian() -> None:
    budget = fv.Budget(3.0, fits=4)
    mu = brentq(lambda mu: gaussian_epsilon(mu, 1e-5) - budget.each, 0.01, 2)
    assert gaussian_epsilon(2 * mu, 1e-5) == pytest.approx(3.0, rel=1e-3)


def test_a_second_fit_on_the_same_people_says_what_both_cost() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = fitted(epsilon=1.0)
        others = Classifier(**LABELLED, epsilon=1.0).fit(X, Y, user=USER + 1000, silo=SILO)
    with pytest.warns(
        UserWarning, match="were in 1 earlier fits of this process: together they cost epsilon 1.4"
    ):
        second = fitted(epsilon=1.0)
    assert others.epsilon_ is not None
    assert fv.spent(first.folder_, second.folder_).epsilon == pytest.approx(1.46, abs=0.03)


# --- cross-validation by users ---------------------------------------------------------------------------------------


def people() -> fv.Population:
    return fv.population(
        X, Y, user=USER, silo=SILO, n_users=50, task="classification", classes=["sick", "well"], silos=[0, 1]
    )


def test_folds_of_users_stay_within_one_epsilon(tmp_path: Path) -> None:
    held = people()
    found = fv.cross_validate(
        "linear", held, folds=3, epsilon=2.0, rounds=2, method=TRAINED["method"], folder=tmp_path
    )
    assert 1.95 < found.epsilon <= 2.0
    assert len(found) == len(found.results) == 3
    tested = [one._people for one in found.results]
    assert sum(len(one.test_targets) for one in tested) == len(held.train)
    assert all(len(one.test_targets) + len(one.train) == len(held.train) for one in tested)
    trained = [set(one.train.user.tolist()) for one in tested]
    everyone = set(held.train.user.tolist())
    for user in everyone:  # each is in all folds but one
        assert sum(user in one for one in trained) == 2
    assert "PRIVATE" in repr(found)
    assert found.mean["accuracy"] == pytest.approx(np.mean([row["accuracy"] for row in found]))
    # Two fits compose to the stated figure.
    assert fv.spent(*found.results[:2]).epsilon == pytest.approx(found.epsilon, rel=1e-3)
    assert len(read_entries(found.results[0].folder / "ledger.jsonl")) == 2


def test_the_fold_of_a_user_depends_on_no_other_user() -> None:
    keys = RANDOM.integers(0, 2**62, 500)
    folds = fold_of_user(keys, 4, 7)
    assert np.array_equal(fold_of_user(keys[100:], 4, 7), folds[100:])
    assert (np.bincount(folds, minlength=4) > 80).all()  # of 125 expected: five standard deviations


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"folds": 1}, "folds must be a whole number >= 2"),
        ({"method": fv.fedavg()}, "adds no noise"),
        ({"rouns": 2}, "no argument 'rouns'"),
        ({"epsilon": -1}, "epsilon must be a number above 0"),
    ],
)
def test_wrong_folds_are_refused_before_anything_trains(changes: Any, told: str, tmp_path: Path) -> None:
    given = {"epsilon": 2.0, "rounds": 2, "method": TRAINED["method"], "folder": tmp_path}
    with pytest.raises(ConfigError, match=told):
        fv.cross_validate("linear", people(), **given | changes)
    assert not list(tmp_path.iterdir())
