"""Define the metrics on test records, by name or import path.

==================  ==========================================================  ============================
metric              value                                                       NaN if
==================  ==========================================================  ============================
accuracy            share of records whose class is predicted                   no record
balanced_accuracy   mean over the classes present of the share predicted        fewer than two classes
auc                 P(score of a positive > score of a negative), ties 1/2      fewer than two classes
c_index             share of comparable pairs that the scores order, ties 1/2   no comparable pair
f1                  2 TP / (2 TP + FP + FN) of class 1 of two                   no record is or is predicted class 1
f1_macro            mean of f1 over the classes that occur or are predicted     no record
precision           TP / (TP + FP) of class 1 of two                            no record is predicted class 1
recall              TP / (TP + FN) of class 1 of two                            no record of class 1
specificity         TN / (TN + FP) of class 1 of two                            no record of class 0
average_precision   sum of (R_i - R_(i-1)) P_i over falling scores              no record of class 1
brier               mean squared distance of probabilities from the class       no record
mcc                 correlation of predicted and true classes (Matthews)        one class is all targets or predictions
top_K_accuracy      share of records whose class is among K largest outputs     no record
mae                 mean |output - target|                                      no record
rmse                square root of mean (output - target)^2                     no record
r2                  1 - sum (output - target)^2 / sum (target - mean)^2         all targets equal
loss                mean of the loss's terms                                    no record
==================  ==========================================================  ============================

Of k labels or k numbers of a record (tasks multi-label and multi-output), every metric that compares one target is the
mean over the targets, and stands beside the metric of each target, ``auc[fever]``, for up to 20 targets. It is NaN if
that of one target is. ``subset_accuracy`` is the share of records all of whose labels are predicted.

Every metric takes outputs (n, k), targets (n, ...) and optional weights (n,). A record of weight v counts as v equal
records. All sums are float64. A NaN in the outputs gives NaN, because a diverged model has no accuracy.

For two classes, the balanced accuracy is the area under the ROC curve of hard decisions. ULDP-FL reports this number
as "accuracy" for Creditcard.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from fedveil.config_keys import is_finite, is_number, plain
from fedveil.data.column_files import GrowingColumn, column_folder
from fedveil.errors import ConfigError, ModelError
from fedveil.sanitize import sanitize
from fedveil.training.losses import Loss, Metric, TaskKind
from fedveil.user_code import import_object

Outputs: TypeAlias = Float[Tensor, "n k"]
Targets: TypeAlias = Shaped[Tensor, "n"]
Weights: TypeAlias = Shaped[Tensor, "n"] | None
"""Weights of the records; None: all 1."""


def accuracy(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return the weighted share of records whose predicted class is the target.

    The predicted class is the largest of k outputs (the first of equal ones). For one output, a logit, it is 1 if the
    logit is above 0.
    """
    if _has_nan(outputs):
        return math.nan
    return _mean(lambda output, target: _classes(output) == _array(target), outputs, targets, weights)


def balanced_accuracy(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return the mean, over the classes present, of the weighted share of correctly predicted records.

    Classes are predicted as in :func:`accuracy`. NaN if fewer than two classes are present.
    """
    confusion = _confusion(outputs, targets, weights)
    if confusion is None:
        return math.nan
    right, total = np.diag(confusion), confusion.sum(axis=1)
    present = total > 0
    return float((right[present] / total[present]).mean()) if present.sum() > 1 else math.nan


def auc(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return the area under the ROC curve: P(score of a positive > score of a negative) + P(equal) / 2.

    The score is the logit, or the difference of the two logits. O(n log n). NaN if one class is absent.

    Raises:
        ModelError: more than two outputs.
    """
    if outputs.shape[1] > 2:
        raise ModelError(f"auc compares two classes; the model has {outputs.shape[1]} outputs")
    if _has_nan(outputs):
        return math.nan
    negatives = _RankedScores(outputs, targets, weights, positive=False)
    concordant = positives = 0.0
    for score, weight in _scores(outputs, targets, weights, positive=True):
        # The mean of both counts an equal score with weight 1/2.
        below, at_most = negatives.masses(score)
        concordant += float(weight @ (below + at_most)) / 2
        positives += float(weight.sum())
    return _ratio(concordant, positives * negatives.total)


def score_of(outputs: Float[Tensor, "n k"]) -> Float[Tensor, "n"]:
    """Return the score of class 1 of two classes: the logit, or the difference of the two logits."""
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]


def c_index(outputs: Float[Tensor, "n 1"], targets: Float[Tensor, "n k"], weights: Weights = None) -> float:
    """Return Harrell's concordance index of risk scores for (event, time) or (event, time, entry) targets.

    Records i, j are comparable if i has an event and j outlives i: time_i < time_j, or time_i = time_j with j
    censored. A comparable pair is concordant if score_i > score_j, because a higher risk score means an earlier event
    (a score is a negated survival time). It counts one half if the scores are equal. Records of weights v and w make
    v w pairs. With late entry, j must also have entered before time_i. O(n log^2 n). NaN if no pair is comparable.

    Reference: F. E. Harrell et al., "Evaluating the yield of medical tests", JAMA 247(18), 1982.
    """
    if bool(outputs.isnan().any()):
        return math.nan
    score, weight = _array(outputs[:, 0]), _weights(targets, weights)
    event, time = _array(targets[:, 0]) == 1, _array(targets[:, 1])
    comparable, concordant = _comparable_pairs(score, weight, event, time)
    if targets.shape[1] > 2:
        # An entry at or after time_i implies a longer time: such pairs are counted above, and subtracted here. Each
        # entry stands as a censored record without an event of its own, sorted after the events of its time.
        both = np.concatenate
        pairs, agreeing = _comparable_pairs(
            both((score, score)),
            both((weight, weight)),
            both((event, np.zeros_like(event))),
            both((time, _array(targets[:, 2]))),
            partner=both((np.zeros_like(weight), weight)),
        )
        comparable, concordant = comparable - pairs, concordant - agreeing
    return _ratio(concordant, comparable)


def _comparable_pairs(
    score: Shaped[np.ndarray, "n"],
    weight: Float64[np.ndarray, "n"],
    event: Bool[np.ndarray, "n"],
    time: Shaped[np.ndarray, "n"],
    partner: Float64[np.ndarray, "n"] | None = None,
) -> tuple[float, float]:
    """Return the total weight of the pairs of an event and a record that outlives it, and of the concordant ones.

    Args:
        score, weight, event, time: of every record.
        partner: weight of a record as the one that outlives; None: ``weight``.
    """
    partner = weight if partner is None else partner
    # Sort by time, events before censored records: the comparable partners of an event are all records after its tied
    # events. Tied events are not comparable. They are sorted by score, so only their pairs of equal scores were
    # counted; these are subtracted below (`tied`).
    order = np.lexsort((score, ~event, time))
    score, weight, event, time, partner = (values[order] for values in (score, weight, event, time, partner))
    _, rank = np.unique(score, return_inverse=True)
    dying = weight * event
    after = np.concatenate((np.cumsum(partner[::-1])[::-1], [0.0]))
    tied_events = np.searchsorted(time[event], time, side="right") - np.searchsorted(time[event], time)
    comparable = float(dying @ after[np.searchsorted(time, time) + tied_events])
    below, equal = _pairs_by_rank(dying, partner, rank.astype(np.int64))
    tied = _tied_pairs(np.where(event, partner, 0.0), time, rank)
    return comparable, below + (equal - tied) / 2


def mae(outputs: Float[Tensor, "n 1"], targets: Shaped[Tensor, "n"], weights: Weights = None) -> float:
    """Return the weighted mean of |output - target|, in the unit of the targets."""
    return _mean(lambda output, target: np.abs(_errors(output, target)), outputs, targets, weights)


_ROUNDING: Final = 1e-9
"""Size below which an explained share is a rounding error of 0, as that of the mean of the targets is."""


def r2(outputs: Float[Tensor, "n 1"], targets: Shaped[Tensor, "n"], weights: Weights = None) -> float:
    """Return the explained share of the targets' variance: 1 for exact outputs, 0 for the targets' mean.

    It is below 0 for a model that is worse than the mean. NaN if all targets are equal or no record has weight.
    """
    mean = _mean(lambda _, target: _array(target).astype(np.float64), outputs, targets, weights)
    wrong = _mean(lambda output, target: _errors(output, target) ** 2, outputs, targets, weights)
    spread = _mean(
        lambda _, target: (_array(target).astype(np.float64) - mean) ** 2, outputs, targets, weights
    )
    explained = 1 - _ratio(wrong, spread)
    return 0.0 if abs(explained) < _ROUNDING else explained


def _tied_pairs(weight: Float64[np.ndarray, "n"], *keys: Shaped[np.ndarray, "n"]) -> float:
    """Return sum_{i < j, all keys equal} weight_i weight_j."""
    _, group = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    total = np.bincount(group, weights=weight)
    return float((total @ total - weight @ weight) / 2)


def _pairs_by_rank(
    first: Float64[np.ndarray, "n"], second: Float64[np.ndarray, "n"], rank: Int64[np.ndarray, "n"]
) -> tuple[float, float]:
    """Return sum first_i second_j over i < j with rank_j < rank_i, and over i < j with rank_j = rank_i.

    The binary numbers of two positions i < j differ in one highest bit b, where i has 0 and j has 1. For every b, the
    positions that agree above b form a block. The pairs of a block follow from cumulative sums over the block sorted
    by rank.
    """
    below = equal = 0.0
    by_rank = np.argsort(rank, kind="stable")
    for bit in range(max(len(rank) - 1, 0).bit_length()):
        block = by_rank[np.argsort(by_rank >> (bit + 1), kind="stable")]
        right = (block >> bit) & 1 == 1
        gain = np.where(right, second[block], 0.0)
        before = np.concatenate(([0.0], np.cumsum(gain)))
        group = block >> (bit + 1)
        start = np.searchsorted(group, group, side="left")
        key = group * (int(rank.max()) + 1) + rank[block]
        run_start, run_end = (np.searchsorted(key, key, side=side) for side in ("left", "right"))
        left = np.where(right, 0.0, first[block])
        below += float(left @ (before[run_start] - before[start]))
        equal += float(left @ (before[run_end] - before[run_start]))
    return below, equal


class MeanLoss:
    """The weighted mean of a loss's terms over the records; for Cox, all records form one batch."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(
        self,
        outputs: Float[Tensor, "n k"],
        targets: Shaped[Tensor, "n *target"],
        weights: Weights = None,
    ) -> float:
        """Return sum_i weight_i loss_i / sum_i weight_i; NaN without records."""
        if self.loss.separable:
            return _mean(self._terms, outputs, targets, weights)
        weight = _weights(targets, weights)
        return _ratio(float(weight @ self._terms(outputs, targets)), float(weight.sum()))

    def _terms(self, outputs: Outputs, targets: Shaped[Tensor, "n *target"]) -> Float64[np.ndarray, "n"]:
        with torch.no_grad():
            present = torch.ones(len(targets), dtype=torch.bool, device=outputs.device)
            exact = outputs.double() if self.loss.takes_float64 else outputs.clone()
            # Copies, because a loss of other code may write to its arguments.
            return _array(self.loss.records(exact, targets.clone(), present)).astype(np.float64)


# --- counts of predicted and true classes -----------------------------------------------------------------------------
# Classes are predicted as in :func:`accuracy`: at a threshold of 1/2 for two classes. To choose another threshold on
# held-out records would be a release.


def _confusion(
    outputs: Float[Tensor, "n k"], targets: Shaped[Tensor, "n"], weights: Weights
) -> Float64[np.ndarray, "c c"] | None:
    """Return the weighted number of records by (true, predicted) class; None if an output is NaN."""
    if _has_nan(outputs):
        return None
    count = max(2, outputs.shape[1])
    confusion = np.zeros(count * count)
    for output, target, weight in _blocks(outputs, targets, weights):
        pairs = _array(target).astype(np.int64) * count + _classes(output)
        confusion += np.bincount(pairs, weights=weight, minlength=count * count)
    return confusion.reshape(count, count)


@dataclass(frozen=True)
class CountRatio:
    """Ratio of weighted counts of records of two classes; NaN if the denominator is 0.

    Attributes:
        name: the metric's name.
        part: numerator, as multiples of (TN, FP, FN, TP) of class 1.
        whole: denominator, likewise.
    """

    name: str
    part: tuple[int, int, int, int]
    whole: tuple[int, int, int, int]

    def __call__(self, outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
        """Return part / whole.

        Raises:
            ModelError: more than two outputs.
        """
        if outputs.shape[1] > 2:
            raise ModelError(f"{self.name} compares two classes; the model has {outputs.shape[1]} outputs")
        confusion = _confusion(outputs, targets, weights)
        if confusion is None:
            return math.nan
        return _ratio(float(confusion.ravel() @ self.part), float(confusion.ravel() @ self.whole))


f1 = CountRatio("f1", part=(0, 0, 0, 2), whole=(0, 1, 1, 2))
precision = CountRatio("precision", part=(0, 0, 0, 1), whole=(0, 1, 0, 1))
recall = CountRatio("recall", part=(0, 0, 0, 1), whole=(0, 0, 1, 1))
specificity = CountRatio("specificity", part=(1, 0, 0, 0), whole=(1, 1, 0, 0))


def f1_macro(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return the mean of the F1 scores of all classes that occur or are predicted."""
    confusion = _confusion(outputs, targets, weights)
    if confusion is None:
        return math.nan
    both = confusion.sum(axis=0) + confusion.sum(axis=1)
    present = both > 0
    return float((2 * np.diag(confusion)[present] / both[present]).mean()) if present.any() else math.nan


def mcc(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return Matthews' correlation of predicted and true classes; NaN if one class is all targets or predictions.

    Reference: J. Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient", 2004.
    """
    confusion = _confusion(outputs, targets, weights)
    if confusion is None:
        return math.nan
    true, predicted, whole = confusion.sum(axis=1), confusion.sum(axis=0), float(confusion.sum())
    spread = (whole**2 - float(true @ true)) * (whole**2 - float(predicted @ predicted))
    return _ratio(whole * float(np.trace(confusion)) - float(true @ predicted), math.sqrt(max(spread, 0.0)))


def average_precision(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return the area under the precision-recall curve by steps; equal scores are one step. NaN without class 1.

    Raises:
        ModelError: more than two outputs.
    """
    if outputs.shape[1] > 2:
        raise ModelError(f"average_precision compares two classes; the model has {outputs.shape[1]} outputs")
    if _has_nan(outputs):
        return math.nan
    negatives, positives = (
        _RankedScores(outputs, targets, weights, positive=positive) for positive in (False, True)
    )
    precision_sum = 0.0
    for score, weight in _scores(outputs, targets, weights, positive=True):
        # The precision at the step of a positive record: of the records whose score is at least its own.
        true, false = (scores.total - scores.masses(score)[0] for scores in (positives, negatives))
        precision_sum += float(weight @ (true / np.where(weight > 0, true + false, 1.0)))
    return _ratio(precision_sum, positives.total)


def brier(outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
    """Return the weighted mean of (p - y)^2 for two classes, and of its sum over the classes for more."""
    return _mean(_distances, outputs, targets, weights)


def _distances(outputs: Outputs, targets: Targets) -> Float64[np.ndarray, "n"]:
    """Return the squared distance of every record's probabilities from its class."""
    logits = outputs.double()
    if logits.shape[1] <= 2:
        return _array((torch.sigmoid(score_of(logits)) - targets) ** 2)
    truth = torch.nn.functional.one_hot(targets.long(), logits.shape[1])
    return _array(((torch.softmax(logits, dim=1) - truth) ** 2).sum(dim=1))


@dataclass(frozen=True)
class TopAccuracy:
    """Share of records whose class is among the ``most`` largest outputs; of equal outputs the first come first."""

    most: int

    def __call__(self, outputs: Outputs, targets: Targets, weights: Weights = None) -> float:
        """Return the weighted share; NaN without records.

        Raises:
            ModelError: the model has fewer outputs than ``most``.
        """
        if not len(targets) or _has_nan(outputs):
            return math.nan
        if outputs.shape[1] < self.most:
            raise ModelError(f"top_{self.most}_accuracy: the model has {outputs.shape[1]} outputs")
        return _mean(self._hits, outputs, targets, weights)

    def _hits(self, outputs: Outputs, targets: Targets) -> Bool[np.ndarray, "n"]:
        labels = targets.long()[:, None]
        own = outputs.gather(1, labels)
        earlier = torch.arange(outputs.shape[1], device=outputs.device)[None] < labels
        before = ((outputs > own) | ((outputs == own) & earlier)).sum(dim=1)
        return _array(before < self.most)


def rmse(outputs: Float[Tensor, "n 1"], targets: Shaped[Tensor, "n"], weights: Weights = None) -> float:
    """Return the square root of the weighted mean of (output - target)^2, in the unit of the targets."""
    return math.sqrt(_mean(lambda output, target: _errors(output, target) ** 2, outputs, targets, weights))


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": accuracy,
        "balanced_accuracy": balanced_accuracy,
        "auc": auc,
        "average_precision": average_precision,
        "brier": brier,
        "f1": f1,
        "f1_macro": f1_macro,
        "precision": precision,
        "recall": recall,
        "specificity": specificity,
        "mcc": mcc,
        "top_2_accuracy": TopAccuracy(2),
        "top_3_accuracy": TopAccuracy(3),
        "top_5_accuracy": TopAccuracy(5),
        "c_index": c_index,
        "mae": mae,
        "rmse": rmse,
        "r2": r2,
    }
)


METRIC_NAMES: Final = (*METRICS, "loss", "subset_accuracy")
"""Names of the built-in metrics in an experiment."""


def load_metric(name: str, loss: Loss) -> Metric:
    """Return a built-in metric by name, or a user's metric by import path ``package.module:function``.

    Args:
        name: one of ``METRIC_NAMES``, or the import path of (outputs, targets, weights) -> float.
        loss: the loss that the metric ``"loss"`` measures.

    Raises:
        ConfigError: no metric of this name or path, or an object that is not callable.
    """
    if name == "loss":
        return MeanLoss(loss)
    if name in METRICS:
        return METRICS[name]
    imported = import_object(name, "metric", METRIC_NAMES)
    if not callable(imported):
        raise ConfigError(f"metric {name} is a {type(imported).__name__}; it must be a function")
    return check_metric(name, cast(Metric, imported))


# --- several targets of a record -------------------------------------------------------------------------------------

_OF_TARGETS: Final[Mapping[TaskKind, frozenset[str]]] = {
    "multi-label": frozenset(
        {
            "accuracy",
            "balanced_accuracy",
            "auc",
            "average_precision",
            "brier",
            "f1",
            "precision",
            "recall",
            "specificity",
            "mcc",
        }
    ),
    "multi-output": frozenset({"mae", "rmse", "r2"}),
}
"""Metrics of one target, by task."""
_MOST_NAMED: Final = 20


def subset_accuracy(
    outputs: Float[Tensor, "n k"], targets: Shaped[Tensor, "n k"], weights: Weights = None
) -> float:
    """Return the weighted share of records all of whose labels are predicted: 1 where the logit is above 0."""
    if _has_nan(outputs):
        return math.nan
    return _mean(
        lambda output, target: _array(((output > 0) == (target == 1)).all(1)), outputs, targets, weights
    )


@dataclass(frozen=True)
class MetricOfTarget:
    """A metric of one of several targets."""

    metric: Metric
    column: int

    def __call__(
        self,
        outputs: Float[Tensor, "n k"],
        targets: Shaped[Tensor, "n k"],
        weights: Weights = None,
    ) -> float:
        """Return the metric of the target's own outputs."""
        own = slice(self.column, self.column + 1)
        return self.metric(outputs[:, own], targets[:, self.column], weights)


@dataclass(frozen=True)
class MeanOfTargets:
    """The mean of a metric over all targets; NaN if it is not defined for one of them."""

    metric: Metric

    def __call__(
        self,
        outputs: Float[Tensor, "n k"],
        targets: Shaped[Tensor, "n k"],
        weights: Weights = None,
    ) -> float:
        """Return (1/k) sum_c metric_c."""
        values = [
            MetricOfTarget(self.metric, index)(outputs, targets, weights) for index in range(targets.shape[1])
        ]
        return math.fsum(values) / len(values)


def load_metrics(name: str, loss: Loss, task: TaskKind, targets: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics that a name stands for, by their names in reports.

    Args:
        name: as of :func:`load_metric`.
        loss: the loss that the metric ``"loss"`` measures.
        task: kind of the targets.
        targets: names of several targets of a record; empty for a task of one target.

    Raises:
        ConfigError: as :func:`load_metric`; or a metric of one target that does not fit the task.
    """
    fitting = _OF_TARGETS.get(task, frozenset())
    if name == "subset_accuracy" and task == "multi-label":
        return {name: subset_accuracy}
    if name == "subset_accuracy" or (fitting and name in METRICS and name not in fitting):
        allowed = (
            sorted({*fitting, "loss"}) if fitting else [other for other in METRIC_NAMES if other != name]
        )
        raise ConfigError(f"metric {name} is not for a {task} task; use one of: {', '.join(allowed)}")
    metric = load_metric(name, loss)
    if name not in fitting:
        return {name: metric}
    each = enumerate(targets) if len(targets) <= _MOST_NAMED else ()
    return {name: MeanOfTargets(metric)} | {
        f"{name}[{sanitize(target)}]": MetricOfTarget(metric, index) for index, target in each
    }


def check_metric(name: str, metric: Metric) -> Metric:
    """Return a third-party metric if it takes the arguments of a metric.

    Raises:
        ConfigError: it takes other arguments.
    """
    try:
        inspect.signature(metric).bind(None, None, None)
    except ValueError:
        return metric  # the callable (a C function, say) has no signature to inspect
    except TypeError as error:
        raise ConfigError(
            f"metric {name}: it is called with (outputs, targets, weights), and it does not take them: {error}"
        ) from None
    return metric


def measure(
    metrics: Mapping[str, Metric],
    outputs: Float[Tensor, "n k"],
    targets: Shaped[Tensor, "n *target"],
    weights: Weights = None,
) -> dict[str, float | None]:
    """Return the value of every metric; None where it is not a finite number.

    A metric of other code gets copies of its own: what it writes to them changes no other metric and no later round.

    Raises:
        ModelError: a metric returns no real number; names it and the type, and no value.
    """
    values: dict[str, float | None] = {}
    for name, metric in metrics.items():
        arguments = (outputs, targets, weights)
        if getattr(metric, "__module__", None) != __name__:
            arguments = outputs.clone(), targets.clone(), None if weights is None else weights.clone()
        value = plain(metric(*arguments))
        if not is_number(value):
            raise ModelError(f"metric {name} must return a number, not a value of {type(value).__name__}")
        values[name] = float(value) if is_finite(value) else None
    return values


# --- records of a metric, some at a time --------------------------------------------------------------------------
# Test records may be more than fit into memory, as the training records of their tables are.

_BLOCK: Final = 1 << 17  # records that a metric computes with at a time


def _blocks(
    outputs: Outputs, targets: Shaped[Tensor, "n *target"], weights: Weights
) -> Iterator[tuple[Outputs, Shaped[Tensor, "b *target"], Float64[np.ndarray, "b"]]]:
    """Yield outputs, targets and weights of some records at a time."""
    for begin in range(0, len(targets), _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        weight = _weights(targets[rows], None if weights is None else weights[rows])
        yield outputs[rows], targets[rows], weight


def _mean(
    term: Callable[[Outputs, Shaped[Tensor, "b *target"]], Shaped[np.ndarray, "b"]],
    outputs: Outputs,
    targets: Shaped[Tensor, "n *target"],
    weights: Weights,
) -> float:
    """Return the weighted mean of a term of each record; NaN without records."""
    total = whole = 0.0
    for output, target, weight in _blocks(outputs, targets, weights):
        total += float(weight @ term(output, target))
        whole += float(weight.sum())
    return _ratio(total, whole)


def _has_nan(outputs: Outputs) -> bool:
    return any(bool(output.isnan().any()) for output in torch.split(outputs, _BLOCK))


def _errors(outputs: Outputs, targets: Targets) -> Float64[np.ndarray, "n"]:
    errors: Float64[np.ndarray, "n"] = _array(outputs[:, 0]).astype(np.float64) - _array(targets)
    return errors


def _scores(
    outputs: Outputs, targets: Targets, weights: Weights, *, positive: bool
) -> Iterator[tuple[Shaped[np.ndarray, "b"], Float64[np.ndarray, "b"]]]:
    """Yield scores and weights of the records of class 1, or of those of class 0, some at a time."""
    for output, target, weight in _blocks(outputs, targets, weights):
        own = (_array(target) == 1) == positive
        score = _array(score_of(output))[own]
        order = np.argsort(score)  # sorted scores are found faster
        yield score[order], weight[own][order]


class _RankedScores:
    """Weights of the records of one class by their score.

    Without weights of records it keeps the sorted scores alone, in a file if tables are kept in files.

    Args:
        outputs: outputs of one or two classes.
        targets: the classes.
        weights: weights of the records.
        positive: whether the class is 1.

    Attributes:
        total: weight of all records of the class.
    """

    def __init__(self, outputs: Outputs, targets: Targets, weights: Weights, *, positive: bool) -> None:
        none = _array(score_of(outputs[:0]))
        self._below: Float64[np.ndarray, "n"] | None = None
        if weights is None:
            with GrowingColumn(column_folder()) as column:
                column.append(none)
                for score, _ in _scores(outputs, targets, None, positive=positive):
                    column.append(score)
                self._score = column.sorted_array()
            self.total = float(len(self._score))
            return
        score, weight = map(
            np.concatenate,
            zip((none, np.zeros(0)), *_scores(outputs, targets, weights, positive=positive), strict=True),
        )
        order = np.argsort(score, kind="stable")
        self._score, self._below = score[order], np.append(0.0, np.cumsum(weight[order]))
        self.total = float(self._below[-1])

    def masses(
        self, score: Shaped[np.ndarray, "b"]
    ) -> tuple[Shaped[np.ndarray, "b"], Shaped[np.ndarray, "b"]]:
        """Return the weight of the records with a score below each of these, and of those with at most it."""
        below, at_most = (np.searchsorted(self._score, score, side) for side in ("left", "right"))
        return (below, at_most) if self._below is None else (self._below[below], self._below[at_most])


def _classes(outputs: Float[Tensor, "n k"]) -> Int64[np.ndarray, "n"]:
    """Return the predicted class of each record."""
    chosen = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return _array(chosen).astype(np.int64)


def _weights(targets: Shaped[Tensor, "n *target"], weights: Weights) -> Float64[np.ndarray, "n"]:
    return np.ones(len(targets)) if weights is None else _array(weights).astype(np.float64)


def _array(values: Shaped[Tensor, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    return values.detach().cpu().numpy()


def _ratio(part: float, denominator: float) -> float:
    return part / denominator if denominator else math.nan
