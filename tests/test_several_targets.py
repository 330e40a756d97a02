"""Several labels or numbers of a record: losses, metrics, arrays, tables, estimators, bundles, federations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
)
from torch import nn

import fedveil as fv
from fedveil.bundle.manifest import BundleError, Manifest
from fedveil.data.records import Population, Records
from fedveil.data.schema import parse_schema
from fedveil.errors import ConfigError, DataError, ModelError
from fedveil.methods.method import CompositionError
from fedveil.sklearn import MultiLabelClassifier, Regressor
from fedveil.training.losses import LOSSES
from fedveil.training.metrics import load_metrics
from tests.federation_world import World, asked, in_one_process
from tests.runs import files, json_lines, same_model

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(-1, 1, size=(240, 3)).astype(np.float32)
USER = RANDOM.integers(0, 40, 240)
LABELS = (X @ RANDOM.normal(size=(3, 3)) > 0).astype(np.int64)
NUMBERS = (X @ RANDOM.normal(size=(3, 2))).astype(np.float32)
NAMES = ("fever", "cough", "rash")
WHO = {"user": USER, "silo": USER % 2, "n_users": 40, "silos": [0, 1], "test_share": 0.2}
TRAINED = {
    "method": fv.uldp_avg_w(clip=2.0, epochs=20, local_learning_rate=1.0),
    "rounds": 20,
    "epsilon": 200.0,
}
KINDS: dict[str, tuple[str, Any]] = {
    "labels": ("multi-label", pd.DataFrame(LABELS, columns=NAMES)),
    "numbers": ("multi-output", NUMBERS),
}


def held(kind: str, **changes: Any) -> Population:
    task, targets = KINDS[kind]
    return fv.population(X, **{"targets": targets, "task": task} | WHO | changes)


def train(folder: Path, people: Population, model: Any = "linear", **changes: Any) -> fv.Result:
    return fv.train(model, people, **TRAINED | {"server": fv.Sgd(2.0), "folder": folder} | changes)


def last_test(result: fv.Result) -> dict[str, Any]:
    found: dict[str, Any] = json_lines(result.folder / "metrics.jsonl")[-1]["test"]
    return found


# --- losses and metrics against their definitions ---------------------------------------------------------------------


def test_the_loss_of_labels_is_the_mean_of_the_logistic_losses() -> None:
    loss, outputs = LOSSES["multi_label_cross_entropy"], torch.randn(7, 3, dtype=torch.float64)
    targets = (torch.rand(7, 3) > 0.5).float()
    each = [
        LOSSES["binary_cross_entropy"].records(outputs[:, [c]], targets[:, c], torch.ones(7))
        for c in range(3)
    ]
    torch.testing.assert_close(loss.records(outputs, targets, torch.ones(7)), torch.stack(each).mean(0))
    slopes = loss.slopes(outputs.mT[None], targets[None], torch.ones(1, 7, dtype=torch.bool))
    given = outputs.clone().requires_grad_()
    loss.records(given, targets, torch.ones(7)).sum().backward()
    torch.testing.assert_close(slopes[0].mT, given.grad)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("auc", lambda y, z, w: roc_auc_score(y, z, sample_weight=w)),
        ("average_precision", lambda y, z, w: average_precision_score(y, z, sample_weight=w)),
        ("f1", lambda y, z, w: f1_score(y, z > 0, sample_weight=w)),
        ("accuracy", lambda y, z, w: accuracy_score(y, z > 0, sample_weight=w)),
    ],
)
def test_a_metric_of_labels_is_that_of_each_and_their_mean(name: str, oracle: Callable[..., float]) -> None:
    outputs, weight = RANDOM.normal(size=(50, 3)).astype(np.float32), RANDOM.integers(1, 4, 50)
    targets, wanted = LABELS[:50].astype(np.float32), []
    found = load_metrics(name, LOSSES["multi_label_cross_entropy"], "multi-label", NAMES)
    assert list(found) == [name, *(f"{name}[{one}]" for one in NAMES)]
    for place, label in enumerate(NAMES):
        wanted.append(oracle(targets[:, place], outputs[:, place], weight))
        given = (torch.from_numpy(one) for one in (outputs, targets, weight))
        assert found[f"{name}[{label}]"](*given) == pytest.approx(wanted[-1])
    given = (torch.from_numpy(one) for one in (outputs, targets, weight))
    assert found[name](*given) == pytest.approx(np.mean(wanted))


@pytest.mark.parametrize(("name", "oracle"), [("r2", r2_score), ("mae", mean_absolute_error)])
def test_a_metric_of_numbers_is_that_of_each_and_their_mean(name: str, oracle: Callable[..., float]) -> None:
    outputs = NUMBERS + RANDOM.normal(size=NUMBERS.shape).astype(np.float32)
    found = load_metrics(name, LOSSES["squared_error"], "multi-output", ("0", "1"))
    given = torch.from_numpy(outputs), torch.from_numpy(NUMBERS)
    assert found[name](*given, None) == pytest.approx(oracle(NUMBERS, outputs))
    assert found[f"{name}[1]"](*given, None) == pytest.approx(oracle(NUMBERS[:, 1], outputs[:, 1]))


def test_the_mean_is_not_defined_where_that_of_one_label_is_not() -> None:
    found = load_metrics("auc", LOSSES["multi_label_cross_entropy"], "multi-label", ("a", "b"))
    outputs, targets = torch.randn(4, 2), torch.tensor([[1.0, 0], [0, 0], [1, 0], [0, 0]])
    assert np.isnan(found["auc"](outputs, targets, None))
    assert np.isnan(found["auc[b]"](outputs, targets, None))
    assert not np.isnan(found["auc[a]"](outputs, targets, None))


def test_subset_accuracy_counts_records_all_of_whose_labels_are_predicted() -> None:
    (subset,) = load_metrics(
        "subset_accuracy", LOSSES["multi_label_cross_entropy"], "multi-label", NAMES
    ).values()
    outputs = torch.from_numpy(RANDOM.normal(size=(240, 3)))
    right = accuracy_score(LABELS, outputs.numpy() > 0)
    assert subset(outputs, torch.from_numpy(LABELS).float(), None) == pytest.approx(right)


def test_metrics_of_many_targets_are_not_listed_one_by_one() -> None:
    names = tuple(map(str, range(21)))
    assert list(load_metrics("r2", LOSSES["squared_error"], "multi-output", names)) == ["r2"]


# --- training, prediction, bundles ------------------------------------------------------------------------------------


def test_labels_train_predict_report_and_bundle(tmp_path: Path) -> None:
    result = train(tmp_path / "run", held("labels"))
    last = last_test(result)
    assert list(last)[:4] == ["auc", "auc[fever]", "auc[cough]", "auc[rash]"]
    assert last["auc"] > 0.9
    assert last["auc"] == pytest.approx(np.mean([last[f"auc[{name}]"] for name in NAMES]))
    assert result.baseline["auc[fever]"] == 0.5
    chances, predicted = result.predict_proba(X), result.predict(X)
    assert chances.shape == predicted.shape == (240, 3)
    assert ((chances > 0.5) == (predicted == 1)).all()
    assert (predicted == LABELS).mean() > 0.85
    page = result.report().read_text()
    assert "AUC[fever]" in page
    bundle = fv.load(result.save(tmp_path / "bundle"))
    assert bundle.manifest.targets == NAMES
    np.testing.assert_array_equal(bundle.predict(X), predicted)
    pd.DataFrame(X).to_csv(tmp_path / "new.csv", index=False, header=["a", "b", "c"])
    with pytest.warns(
        UserWarning,
        match="trained without column names; the columns of these records are taken by their places",
    ):
        table = bundle.predict_table(tmp_path / "new.csv")
    assert table.column_names == [
        f"{what}_{name}" for what in ("prediction", "probability") for name in NAMES
    ]
    np.testing.assert_allclose(table["probability_rash"].to_numpy(), chances[:, 2], rtol=1e-6)


def test_numbers_train_predict_and_bundle(tmp_path: Path) -> None:
    result = train(tmp_path / "run", held("numbers"), nn.Linear(3, 2))
    last = last_test(result)
    assert last["r2"] > 0.8
    assert list(last) == ["r2", "r2[0]", "r2[1]", "mae", "mae[0]", "mae[1]", "loss"]
    assert result.baseline["r2[1]"] == pytest.approx(0.0, abs=1e-6)
    bundle = fv.load(result.save(tmp_path / "bundle"), nn.Linear(3, 2))
    np.testing.assert_array_equal(bundle.predict(X), result.predict(X))
    assert r2_score(NUMBERS, result.predict(X)) > 0.8
    with pytest.raises(ConfigError, match="this model is for multi-output"):
        result.predict_proba(X)


def test_the_bound_of_a_user_does_not_depend_on_the_number_of_targets(tmp_path: Path) -> None:
    """The update is clipped whatever it was computed from, so epsilon is that of one label."""
    several = train(tmp_path / "several", held("labels"), rounds=2)
    one = train(
        tmp_path / "one",
        held("labels", targets=LABELS[:, 0], task="classification", classes=[0, 1]),
        rounds=2,
    )
    assert several.statement.epsilon == pytest.approx(one.statement.epsilon, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", ["gram", "vmap"])
def test_the_fast_trainers_are_the_plain_loop(kind: str, trainer: str, tmp_path: Path) -> None:
    """Updates of all pairs, without noise: a method of no privacy."""
    given: dict[str, Any] = {
        "method": fv.fedavg(epochs=3, local_learning_rate=0.3),
        "epsilon": None,
        "rounds": 2,
    }
    models = [
        train(tmp_path / name, held(kind), **given, server=None, settings={"trainer": {"name": name}}).model
        for name in ("loop", trainer)
    ]
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_columns_of_a_frame_are_named_and_a_public_test_is_read_alike() -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(who=USER, where=USER % 2)
    frame = frame.assign(**dict(zip(NAMES, LABELS.T, strict=True)))
    people = fv.population(
        frame, features=["a", "b", "c"], targets=list(NAMES), user="who", silo="where",
        n_users=40, silos=[0, 1], task="multi-label", test=frame.iloc[:4].assign(a=0.5),
    )  # fmt: skip
    assert people.target_names == NAMES
    np.testing.assert_array_equal(people.train.targets, LABELS)
    np.testing.assert_array_equal(people.test_targets, LABELS[:4])


# --- tables -----------------------------------------------------------------------------------------------------------

SCHEMA = """
n_users = 40
user = "who"
silo = "where"
silos = ["0", "1"]

[target]
TARGET

[features]
a = { kind = "number", lower = -1, upper = 1 }
b = { kind = "number", lower = -1, upper = 1 }
c = { kind = "number", lower = -1, upper = 1 }
"""
LABEL_COLUMNS = 'kind = "labels"\ncolumns = ["fever", "cough", "rash"]'
NUMBER_COLUMNS = (
    'kind = "numbers"\ncolumns = ["low", "high"]\nlower = [-9, -1]\nupper = [9, 1]\noutside = "clip"'
)


def write_table(folder: Path, target: str, **cells: Any) -> tuple[Path, Path]:
    (folder / "schema.toml").write_text(SCHEMA.replace("TARGET", target))
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(who=USER, where=USER % 2)
    frame = frame.assign(**dict(zip(NAMES, LABELS.T, strict=True)), low=NUMBERS[:, 0], high=2 * NUMBERS[:, 1])
    for column, value in cells.items():
        frame[column] = frame[column].astype(object)
        frame.loc[3, column] = value
    frame.to_csv(folder / "table.csv", index=False)
    return folder / "schema.toml", folder / "table.csv"


def test_labels_of_a_table_are_read_by_a_run_and_its_bundle(tmp_path: Path) -> None:
    schema, table = write_table(tmp_path, LABEL_COLUMNS)
    people = fv.tables(schema, [table])
    assert (people.task, people.target_names) == ("multi-label", NAMES)
    assert set(map(tuple, people.train.targets.tolist())) <= set(map(tuple, LABELS.tolist()))
    result = train(tmp_path / "run", people, rounds=3)
    bundle = fv.load(result.save(tmp_path / "model.zip"))
    found = bundle.predict_table(table, keep=["who"])
    assert found.column_names[:2] == ["who", "prediction_fever"]
    np.testing.assert_array_equal(found["prediction_cough"].to_numpy(), result.predict(X)[:, 1])


def test_numbers_of_a_table_are_clipped_to_the_bounds_of_their_own_column(tmp_path: Path) -> None:
    schema, table = write_table(tmp_path, NUMBER_COLUMNS)
    people = fv.tables(schema, [table], test_share=0.1)
    assert people.task == "multi-output"
    found = np.concatenate([people.train.targets, people.test_targets])
    wanted = np.column_stack([NUMBERS[:, 0], np.clip(2 * NUMBERS[:, 1], -1, 1)])
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(wanted, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("target", "cells", "said"),
    [
        (LABEL_COLUMNS, {"cough": ""}, "record 4.*'cough'.*the label is missing"),
        (LABEL_COLUMNS, {"rash": 2}, "record 4.*'rash'.*the label must be 0 or 1"),
        (NUMBER_COLUMNS, {"high": "NA"}, "record 4.*'high'.*the target is missing"),
        (NUMBER_COLUMNS.replace("clip", "error"), {"high": 7, "low": 0}, "'high'.*outside of its bounds, -1 to 1"),
        ('kind = "labels"\ncolumns = ["fever"]', {}, "target.*columns.*2"),
        ('kind = "labels"\ncolumns = ["fever", "fever"]', {}, "columns: a column is named twice"),
        ('kind = "numbers"\ncolumns = ["low", "high"]\nlower = [0]\nupper = [1]', {}, "lower: give 2 numbers"),
        ('kind = "numbers"\ncolumns = ["low", "high"]\nlower = [0, 0]', {}, "lower and upper go together"),
        ('kind = "numbers"\ncolumns = ["low", "high"]\noutside = "clip"', {}, "clipping needs bounds"),
        ('kind = "numbers"\ncolumns = ["low", "high"]\nlower = [0, 2]\nupper = [1, 1]', {}, "lower must be below"),
        ('kind = "labels"\ncolumns = ["fever", "a"]', {}, "column 'a' has two roles"),
    ],
)  # fmt: skip
def test_a_wrong_table_or_schema_is_refused_by_row_and_column(
    target: str, cells: dict[str, Any], said: str, tmp_path: Path
) -> None:
    schema, table = write_table(tmp_path, target, **cells)
    with pytest.raises(DataError, match=said):
        fv.tables(schema, [table])


def test_a_record_without_a_label_is_left_out_where_invalid_cells_are_counted(tmp_path: Path) -> None:
    schema, table = write_table(tmp_path, LABEL_COLUMNS, cough="")
    schema.write_text('invalid = "bin"\n' + schema.read_text())
    people = fv.tables(schema, [table])
    assert len(people.train) + len(people.test_targets) == 239


def test_a_list_of_targets_needs_its_kind() -> None:
    text = SCHEMA.replace("[target]\nTARGET", "").replace("n_users", 'target = ["fever", "cough"]\nn_users')
    with pytest.raises(DataError, match=r'target = \{ kind = "labels", columns'):
        parse_schema(text.encode(), "schema.toml")


# --- estimators -------------------------------------------------------------------------------------------------------

FIT = {"epsilon": 200.0, "n_users": 40, "silos": [0, 1]} | {
    key: value for key, value in TRAINED.items() if key != "epsilon"
}


def test_an_estimator_of_labels_predicts_and_scores_as_scikit_learn_does() -> None:
    model = clone(MultiLabelClassifier(**FIT, server=fv.Sgd(2.0)))
    found = model.fit(X, pd.DataFrame(LABELS, columns=NAMES), user=USER, silo=USER % 2)
    assert found.classes_.tolist() == list(NAMES)
    assert found.predict(X).shape == found.predict_proba(X).shape == (240, 3)
    assert ((found.decision_function(X) > 0) == (found.predict(X) == 1)).all()
    assert found.score(X, LABELS) == accuracy_score(LABELS, found.predict(X)) > 0.6


@pytest.mark.parametrize("ranges", [None, (-2000.0, 2000.0), ((-20.0, 20.0), (-2000.0, 2000.0))])
def test_a_regressor_of_several_numbers_scales_each_by_its_range(ranges: Any) -> None:
    unit = np.array(
        [1.0, 1.0] if ranges is None else [1000.0, 1000.0] if np.ndim(ranges) == 1 else [10.0, 1000.0]
    )
    targets = np.clip(unit * NUMBERS, -1.9 * unit, 1.9 * unit)
    model = Regressor(**FIT, target_range=ranges, server=fv.Sgd(2.0)).fit(
        X, targets, user=USER, silo=USER % 2
    )
    assert model.predict(X).shape == (240, 2)
    assert model.score(X, targets) > 0.7


def test_a_regressor_names_the_ranges_it_needs() -> None:
    with pytest.raises(ConfigError, match="one pair for all, or 2 pairs"):
        Regressor(**FIT, target_range=((0, 1), (0, 1), (0, 1))).fit(X, NUMBERS, user=USER)
    with pytest.raises(ConfigError, match="row 0: the target 0 is outside of target_range, 5 to 6"):
        Regressor(**FIT, target_range=((5, 6), (-9, 9))).fit(X, NUMBERS, user=USER)


# --- federations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "loss"), [("labels", "multi_label_cross_entropy"), ("numbers", "squared_error")]
)
def test_a_federation_trains_the_model_of_the_simulation(kind: str, loss: str, tmp_path: Path) -> None:
    people = held(kind)
    few = people.train.select(np.arange(40))
    people = replace(
        people, train=few, test_features=X[:9], test_targets=people.train.targets[:9], public_test=True
    )
    experiment = asked(model={"name": "linear", "loss": loss, "metrics": ["loss"]})
    world = World(tmp_path / "between", experiment, people)
    world.play()
    world.close()
    assert world.outcome.stopped is None
    inside = in_one_process(experiment, people, tmp_path / "inside")
    assert same_model(files(world.outcome.folder)[1], files(inside)[1])


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a missing label": (
        lambda _: held("labels", targets=np.where(np.arange(240)[:, None] == 5, np.nan, LABELS)),
        DataError,
        "targets, row 5",
    ),
    "a label of 2": (lambda _: held("labels", targets=2 * LABELS), DataError, "row .*every label must be 0 or 1"),
    "one label": (lambda _: held("labels", targets=LABELS[:, :1]), DataError, "two targets or .*='classification'"),
    "labels in one axis": (lambda _: held("labels", targets=LABELS[:, 0]), DataError, "shape is \\(240,\\)"),
    "one number": (lambda _: held("numbers", targets=NUMBERS[:, :1]), DataError, "task='regression' predicts one"),
    "several numbers of a regression": (lambda _: held("numbers", task="regression"), DataError, "task='multi-output'"),
    "classes of labels": (lambda _: held("labels", classes=[0, 1]), ConfigError, "classes belong to classification"),
    "a range of labels": (lambda _: held("labels", target_range=(0.0, 1.0)), ConfigError, "target_range belongs to"),
    "a number outside": (lambda _: held("numbers", target_range=(0.0, 0.1)), DataError, "row 0: .*target_range"),
    "a model of too few outputs": (
        lambda path: train(path, held("labels"), nn.Linear(3, 1)),
        ModelError,
        "1 outputs a record, but there are 3 targets",
    ),
    "the loss of one label": (
        lambda path: train(path, held("labels"), loss="binary_cross_entropy"),
        ConfigError,
        "multi-label task; use one of: multi_label_cross_entropy",
    ),
    "class weights": (
        lambda path: train(path, held("labels"), class_weight={0: 1.0, 1: 2.0}),
        ConfigError,
        "class_weight: one weight for each of no classes",
    ),
    "a metric of classes": (
        lambda path: train(path, held("labels"), metrics=["f1_macro"]),
        ConfigError,
        "metric f1_macro is not for a multi-label task; use one of: accuracy",
    ),
    "a metric of labels for numbers": (
        lambda path: train(path, held("numbers"), metrics=["subset_accuracy"]),
        ConfigError,
        "metric subset_accuracy is not for a multi-output task; use one of: loss, mae, r2, rmse",
    ),
    "newton": (
        lambda path: train(path, held("numbers"), "whitened-linear", method=fv.method("newton"), server=None),
        CompositionError,
        "method 'newton' predicts one class or one number of a record, not 2 targets; take uldp-avg-w",
    ),
    "trees": (
        lambda path: train(path, held("labels"), "boosted-trees", method=fv.method("boosted-trees"), server=None),
        CompositionError,
        "method 'boosted-trees' predicts one class",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_several_targets_is_refused(case: str, tmp_path: Path) -> None:
    wrong, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        wrong(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_release_of_metrics_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    schema, table = write_table(tmp_path, LABEL_COLUMNS)
    with pytest.raises(ConfigError, match=r"evaluation: no release measures 3 targets.*public table"):
        train(tmp_path / "run", fv.tables(schema, [table]), settings={"evaluation": {}})
    assert not (tmp_path / "run").exists()


def test_a_manifest_names_every_target_once(tmp_path: Path) -> None:
    path = train(tmp_path / "run", held("labels"), rounds=1).save(tmp_path / "bundle")
    text = (path / "bundle.json").read_text()
    for wrong in ('"cough"', '"rash"'):
        with pytest.raises(BundleError, match="targets: 3 different names are needed"):
            Manifest.from_bytes(text.replace('"fever"', wrong).encode())


def test_rows_of_both_tables_have_as_many_targets() -> None:
    records = Records(
        features=X,
        targets=LABELS.astype(np.float32),
        silo=np.zeros(240, np.int32),
        user=USER.astype(np.int32),
    )
    with pytest.raises(DataError, match="3 columns of targets to train on"):
        Population(
            name="p", train=records, test_features=X, test_targets=NUMBERS.round() % 2, n_users=40,
            silo_names=("a",), task="multi-label", target_names=NAMES,
        )  # fmt: skip
