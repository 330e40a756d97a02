"""Metrics: against scikit-learn, lifelines and a count over all pairs; with weights, ties and degenerate
cases."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    f1_score,
    matthews_corrcoef,
    mean_absolute_error,
    precision_score,
    r2_score,
    recall_score,
    roc_auc_score,
    root_mean_squared_error,
    top_k_accuracy_score,
)
from torch import Tensor

from fedveil.data.column_files import FOLDER_VARIABLE
from fedveil.errors import ConfigError, ModelError
from fedveil.training.losses import load_loss
from fedveil.training.metrics import (
    METRICS,
    MeanLoss,
    TopAccuracy,
    accuracy,
    auc,
    average_precision,
    balanced_accuracy,
    brier,
    c_index,
    f1,
    f1_macro,
    load_metric,
    mae,
    mcc,
    measure,
    precision,
    r2,
    recall,
    rmse,
    specificity,
)


def draw(seed: int, count: int, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return coarse outputs (ties are common), labels and weights 1, 2, 3."""
    rng = np.random.default_rng(seed)
    classes = max(2, outputs)
    return (
        rng.integers(-3, 4, (count, outputs)).astype(np.float32),
        rng.integers(0, classes, count),
        rng.integers(1, 4, count).astype(np.float32),
    )


def tensors(*arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@given(
    seed=st.integers(0, 10_000), count=st.integers(2, 40), outputs=st.integers(1, 4), weighted=st.booleans()
)
def test_class_metrics_are_scikit_learns(seed: int, count: int, outputs: int, weighted: bool) -> None:
    scores, labels, weights = draw(seed, count, outputs)
    labels[:2] = [0, 1]
    predicted = (scores[:, 0] > 0).astype(int) if outputs == 1 else scores.argmax(1)
    sample_weight = weights if weighted else None
    arguments = (*tensors(scores, labels), torch.from_numpy(weights) if weighted else None)
    assert accuracy(*arguments) == pytest.approx(
        accuracy_score(labels, predicted, sample_weight=sample_weight)
    )
    recalls = [
        np.average(predicted[labels == c] == c, weights=weights[labels == c] if weighted else None)
        for c in np.unique(labels)
    ]
    assert balanced_accuracy(*arguments) == pytest.approx(np.mean(recalls))
    if outputs <= 2:
        score = scores[:, 0] if outputs == 1 else scores[:, 1] - scores[:, 0]
        assert auc(*arguments) == pytest.approx(roc_auc_score(labels, score, sample_weight=sample_weight))


def test_balanced_accuracy_is_the_area_under_hard_decisions() -> None:
    scores, labels, _ = draw(3, 200, 2)
    hard = scores.argmax(1)
    got = balanced_accuracy(*tensors(scores, labels), None)
    assert got == pytest.approx(roc_auc_score(labels, hard))
    assert got == pytest.approx(balanced_accuracy_score(labels, hard))


def survival(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, count), rng.integers(0, 9, count), rng.integers(0, 6, count)


@given(seed=st.integers(0, 100_000), count=st.integers(1, 60))
def test_c_index_is_lifelines(seed: int, count: int) -> None:
    from lifelines.utils import concordance_index

    event, time, score = survival(seed, count)
    outputs = torch.from_numpy(score).float()[:, None]
    got = c_index(outputs, torch.from_numpy(np.stack([event, time], 1)).float(), None)
    try:
        wanted = concordance_index(time, -score, event)
    except ZeroDivisionError:
        wanted = math.nan
    assert got == pytest.approx(wanted, nan_ok=True)


@given(seed=st.integers(0, 100_000), count=st.integers(1, 25))
def test_c_index_with_weights_counts_pairs_of_copies(seed: int, count: int) -> None:
    event, time, score = survival(seed, count)
    weight = np.random.default_rng(seed).random(count)
    concordant = comparable = 0.0
    for i in np.flatnonzero(event):
        for j in range(count):
            if time[i] < time[j] or (time[i] == time[j] and not event[j]):
                comparable += weight[i] * weight[j]
                concordant += (
                    weight[i] * weight[j] * (float(score[i] > score[j]) + 0.5 * (score[i] == score[j]))
                )
    outputs, targets = torch.from_numpy(score).float()[:, None], np.stack([event, time], 1).astype(np.float32)
    got = c_index(outputs, torch.from_numpy(targets), torch.from_numpy(weight))
    assert got == pytest.approx(concordant / comparable if comparable else math.nan, nan_ok=True)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 20))
def test_the_loss_metric_is_the_weighted_mean(seed: int, count: int) -> None:
    scores, labels, weights = draw(seed, count, 3)
    outputs, targets, weight = tensors(scores, labels, weights)
    copies = torch.repeat_interleave(torch.arange(count), weight.long())
    loss = load_loss("cross_entropy")
    wanted = loss(outputs[copies], targets[copies], torch.ones(len(copies)))
    assert MeanLoss(loss)(outputs, targets, weight) == pytest.approx(float(wanted), rel=1e-5)


@given(seed=st.integers(0, 10_000), count=st.integers(2, 40))
def test_metrics_of_numbers_are_scikit_learns(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    wanted, found, weight = (random.normal(size=count).astype(np.float32) for _ in range(3))
    weight = np.abs(weight)
    outputs, targets, weights = tensors(found[:, None], wanted, weight)
    for metric, theirs in ((mae, mean_absolute_error), (r2, r2_score)):
        ours = metric(outputs, targets, weights)
        assert ours == pytest.approx(theirs(wanted, found, sample_weight=weight), rel=1e-5, abs=1e-6)
    assert math.isnan(r2(outputs, torch.full((count,), 3.0), None))


@pytest.mark.parametrize("name", ["balanced_accuracy", "auc"])
def test_one_class_alone_gives_nan(name: str) -> None:
    assert math.isnan(METRICS[name](torch.randn(4, 1), torch.ones(4), None))


@pytest.mark.parametrize("targets", [[[0.0, 1.0], [0.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0]]])
def test_no_comparable_pair_gives_nan(targets: list[list[float]]) -> None:
    assert math.isnan(c_index(torch.zeros(len(targets), 1), torch.tensor(targets), None))


@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_diverged_model_has_no_metric(name: str) -> None:
    targets = torch.tensor([[1.0, 1.0], [0.0, 2.0]]) if name == "c_index" else torch.tensor([0, 1])
    assert math.isnan(METRICS[name](torch.tensor([[0.0], [math.nan]]), targets, None))


@pytest.mark.parametrize("name", sorted(METRICS))
def test_no_record_has_no_metric(name: str) -> None:
    targets = torch.zeros(0, 2) if name == "c_index" else torch.zeros(0)
    assert math.isnan(METRICS[name](torch.zeros(0, 1), targets, None))


def test_auc_is_for_two_classes() -> None:
    with pytest.raises(ModelError, match="the model has 3 outputs"):
        auc(torch.zeros(2, 3), torch.tensor([0, 1]), None)


def positives(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> float:
    """A metric of a user's own."""
    return float((outputs > 0).sum())


def test_metrics_load_by_name_and_by_import_path() -> None:
    loss = load_loss("cox")
    assert load_metric("c_index", loss) is c_index
    assert isinstance(load_metric("loss", loss), MeanLoss)
    assert load_metric(f"{__name__}:positives", loss)(torch.ones(3, 1), torch.ones(3), None) == 3
    with pytest.raises(ConfigError, match="no metric named 'f2'; use one of accuracy"):
        load_metric("f2", loss)
    with pytest.raises(ConfigError, match="it must be a function"):
        load_metric("math:pi", loss)


# --- counts of classes, probabilities and ranks -----------------------------------------------------------------------


def oracle(call, undefined: bool) -> float:
    """What scikit-learn says; NaN where the figure is not defined, for which it gives 0."""
    return math.nan if undefined else float(call())


@given(
    seed=st.integers(0, 10_000), count=st.integers(1, 30), outputs=st.integers(1, 2), weighted=st.booleans()
)
def test_metrics_of_two_classes_are_scikit_learns(
    seed: int, count: int, outputs: int, weighted: bool
) -> None:
    scores, labels, weights = draw(seed, count, outputs)
    weight = weights if weighted else np.ones(count, np.float32)
    score = scores[:, 0] if outputs == 1 else scores[:, 1] - scores[:, 0]
    predicted = (score > 0).astype(int)
    given = (*tensors(scores, labels), torch.from_numpy(weights) if weighted else None)
    sw: dict = {"sample_weight": weight}
    no_positive, no_predicted = not labels.any(), not predicted.any()
    p = 1 / (1 + np.exp(-score.astype(float)))
    two: dict = {"labels": [0, 1], "pos_label": 1, "zero_division": 0}
    for metric, call, undefined in (
        (f1, lambda: f1_score(labels, predicted, **two, **sw), no_positive and no_predicted),
        (precision, lambda: precision_score(labels, predicted, **two, **sw), no_predicted),
        (recall, lambda: recall_score(labels, predicted, **two, **sw), no_positive),
        (specificity, lambda: recall_score(1 - labels, 1 - predicted, **two, **sw), bool(labels.all())),
        (average_precision, lambda: average_precision_score(labels, score, **sw), no_positive),
        (brier, lambda: weight @ (p - labels) ** 2 / weight.sum(), False),
    ):
        wanted = oracle(call, undefined)
        assert metric(*given) == pytest.approx(wanted, rel=1e-5, nan_ok=True), metric


@given(
    seed=st.integers(0, 10_000), count=st.integers(1, 30), outputs=st.integers(2, 5), weighted=st.booleans()
)
def test_metrics_of_several_classes_are_scikit_learns(
    seed: int, count: int, outputs: int, weighted: bool
) -> None:
    scores, labels, weights = draw(seed, count, outputs)
    predicted = scores.argmax(1)
    sw: dict = {"sample_weight": weights if weighted else None}
    given = (*tensors(scores, labels), torch.from_numpy(weights) if weighted else None)
    assert f1_macro(*given) == pytest.approx(
        f1_score(labels, predicted, average="macro", zero_division=0, **sw)
    )
    one_class = len(set(labels)) == 1 or len(set(predicted)) == 1
    wanted = oracle(lambda: matthews_corrcoef(labels, predicted, **sw), one_class)
    assert mcc(*given) == pytest.approx(wanted, abs=1e-6, nan_ok=True)
    apart = scores + np.random.default_rng(seed).random(scores.shape).astype(np.float32) / 2
    for most in range(1, outputs):
        given = (*tensors(apart, labels), given[2])
        if outputs > 2:
            wanted = top_k_accuracy_score(labels, apart, k=most, labels=range(outputs), **sw)
            assert TopAccuracy(most)(*given) == pytest.approx(wanted)


def test_of_equal_outputs_the_first_come_first() -> None:
    scores = np.array([[1, 1, 1, 0]], np.float32)
    for label, least in ((0, 1), (1, 2), (2, 3), (3, 4)):
        found = [TopAccuracy(most)(*tensors(scores, np.array([label]))) for most in (1, 2, 3, 4)]
        assert found == [float(most >= least) for most in (1, 2, 3, 4)]
    assert TopAccuracy(1)(*tensors(scores, np.array([0]))) == accuracy(*tensors(scores, np.array([0])))


def test_probabilities_of_several_classes_and_numbers_are_scikit_learns() -> None:
    scores, labels, weights = draw(3, 40, 4)
    p = np.exp(scores.astype(float)) / np.exp(scores.astype(float)).sum(axis=1, keepdims=True)
    wanted = brier_score_loss(labels, p, sample_weight=weights, labels=range(4), scale_by_half=False)
    assert brier(*tensors(scores, labels, weights)) == pytest.approx(wanted)
    truth = labels.astype(np.float32)
    wanted = root_mean_squared_error(truth, scores[:, 0], sample_weight=weights)
    assert rmse(*tensors(scores[:, :1], truth, weights)) == pytest.approx(wanted)


def test_what_has_no_record_or_no_number_is_undefined() -> None:
    none = tensors(np.zeros((0, 2), np.float32), np.zeros(0, np.int64))
    lost = tensors(np.array([[np.nan, 0]], np.float32), np.array([1]))
    for name in ("f1", "f1_macro", "precision", "recall", "specificity", "mcc", "average_precision", "brier"):
        assert math.isnan(METRICS[name](*none)), name
        assert math.isnan(METRICS[name](*lost)), name
    assert math.isnan(METRICS["top_2_accuracy"](*none))
    assert math.isnan(METRICS["rmse"](*tensors(np.zeros((0, 1), np.float32), np.zeros(0, np.float32))))
    for name in ("f1", "precision", "recall", "specificity", "average_precision"):
        with pytest.raises(ModelError, match="compares two classes; the model has 3 outputs"):
            METRICS[name](*tensors(np.zeros((1, 3), np.float32), np.array([1])))
    with pytest.raises(ModelError, match="top_5_accuracy: the model has 3 outputs"):
        METRICS["top_5_accuracy"](*tensors(np.zeros((1, 3), np.float32), np.array([1])))


RIGHT = tensors(np.array([[2.0, 0.0], [2.0, 0.0]], np.float32), np.array([0, 1]))


@pytest.mark.parametrize("value", [None, "0.5", True, 1j, np.ones(3), [0.5]])
def test_a_metric_that_returns_no_number_is_named_without_the_value(value: object) -> None:
    """A truth value ended the run after its charge, when its line of metrics was read."""
    with pytest.raises(
        ModelError, match=rf"^metric mine must return a number, not a value of {type(value).__name__}$"
    ):
        measure({"mine": lambda outputs, targets, weights: value}, *RIGHT)  # type: ignore[dict-item, return-value]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.tensor(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (1, 1.0),
        (math.inf, None),
        (math.nan, None),
        (10**400, None),
    ],
)
def test_numbers_of_other_libraries_are_numbers_and_what_json_has_no_number_for_is_none(
    value: float, shown: float | None
) -> None:
    assert measure({"mine": lambda outputs, targets, weights: value}, *RIGHT) == {"mine": shown}


def test_a_metric_that_writes_to_its_arguments_changes_no_other() -> None:
    def writes(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> float:
        outputs.zero_(), targets.zero_()
        assert weights is not None
        weights.zero_()
        return 0.0

    outputs, targets = RIGHT
    given = outputs.clone(), targets.clone(), torch.tensor([1.0, 3.0])
    assert measure({"mine": writes, "accuracy": accuracy}, *given) == {"mine": 0.0, "accuracy": 0.25}
    assert given[0].equal(outputs)
    assert given[1].equal(targets)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_more_records_than_are_computed_at_a_time_agree_with_scikit_learn(weighted: bool) -> None:
    count = 2 * (1 << 17) + 5
    outputs, labels, drawn = draw(1, count, 1)
    outputs += np.random.default_rng(2).integers(0, 2000, (count, 1)) / 2048  # ties, and many scores
    weights = drawn if weighted else None
    score, given = outputs[:, 0].astype(np.float64), None if weights is None else torch.from_numpy(weights)
    found = {
        name: METRICS[name](torch.from_numpy(outputs), torch.from_numpy(labels), given)
        for name in ("accuracy", "balanced_accuracy", "auc", "average_precision", "brier", "mae", "r2")
    }
    wanted = {
        "accuracy": accuracy_score(labels, score > 0, sample_weight=weights),
        "balanced_accuracy": balanced_accuracy_score(labels, score > 0, sample_weight=weights),
        "auc": roc_auc_score(labels, score, sample_weight=weights),
        "average_precision": average_precision_score(labels, score, sample_weight=weights),
        "brier": brier_score_loss(labels, 1 / (1 + np.exp(-score)), sample_weight=weights),
        "mae": mean_absolute_error(labels, score, sample_weight=weights),
        "r2": r2_score(labels, score, sample_weight=weights),
    }
    assert found == pytest.approx(wanted, rel=1e-9)


def test_scores_are_ranked_in_a_file_if_tables_are_kept_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, labels, _ = draw(3, 1000, 1)
    given = torch.from_numpy(outputs), torch.from_numpy(labels)
    here = auc(*given), average_precision(*given)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert (auc(*given), average_precision(*given)) == here
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none is no folder"):
        auc(*given)
