"""Newton steps for linear models: the bounded score and curvature of every record.

With record r = (x, y), z = (x, 1), a linear predictor f = theta z, the mean m(f) of y and B, c public:

    a = min(1, B / |z|)^2                weight of a long record
    psi = a clip(y - m(f), c) z'         score; |psi| <= B c
    H = a z z'                           second moments; ||H||_F <= B^2

because a |z| <= B and a |z|^2 <= B^2 for every z. The curvature of the loss at any theta is at most s H, s the largest
slope of m. A contribution is the mean over its records of one vector that holds both parts, scaled to l2 norm at most 1
(:mod:`fedveil.statistics.inference.scores`). A user's weights over the silos sum to at most 1, so one user, with all
records in all silos, changes the sum by at most 1. docs/theory/newton.md.

==============  ====================  ==================  ===========
model           m(f)                  c by rule           s
==============  ====================  ==================  ===========
logistic        1 / (1 + e^-f)        1/2                 1/4
softmax, K      e^f_k / sum_j e^f_j   sqrt(1 - 1/K)       1/2
linear          f                     declared            1
==============  ====================  ==================  ===========

c by rule is the length of a residual at theta = 0. Later residuals are shorter, but for records that the model gets
wrong, whose pull it limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64
from scipy.special import expit

from fedveil.errors import ModelError
from fedveil.statistics.inference.scores import ScoreCode, Shares, triangle
from fedveil.training.gram.layout import linear_layer
from fedveil.training.losses import BinaryCrossEntropy, CrossEntropy, SquaredError
from fedveil.training.record_sums import RecordBatch, RecordSums, RecordVectors
from fedveil.training.task import Task

SUMS: Final = "scores and curvatures"
"""Kind of the sums, for the server's step."""
_LOSSES: Final = (BinaryCrossEntropy, CrossEntropy, SquaredError)


@dataclass(frozen=True, kw_only=True)
class LinearFamily:
    """The public bounds of a linear model's scores and curvatures.

    Attributes:
        inputs: p, the number of features.
        classes: K; None for a number to predict.
        record_length: B.
        residual: c; of classes None for the rule.
    """

    inputs: int
    classes: int | None
    record_length: float
    residual: float | None

    @property
    def width(self) -> int:
        """Length of z = (x, 1)."""
        return self.inputs + 1

    def outputs(self, dimension: int) -> int:
        """Return the number of outputs of a model of ``dimension`` parameters."""
        return dimension // self.width

    def residual_norm(self, outputs: int) -> float:
        """Return c, the bound of the l2 norm of a residual."""
        if self.residual is not None:
            return self.residual
        assert self.classes is not None, "the method's builder asks for it"
        return 0.5 if outputs == 1 else math.sqrt(1 - 1 / self.classes)

    def slope(self, outputs: int) -> float:
        """Return s, the largest slope of the mean."""
        if self.classes is None:
            return 1.0
        return 0.25 if outputs == 1 else 0.5

    def code(self, dimension: int, round_number: int) -> ScoreCode:
        """Return the layout of the vectors of a round: curvatures in the first, scores in all others."""
        outputs = self.outputs(dimension)
        first = round_number == 1
        return ScoreCode(
            scores=outputs * self.width,
            width=self.width,
            score_norm=self.record_length * self.residual_norm(outputs),
            curvature_norm=self.record_length**2,
            shares=Shares(gradient=0.0 if first else 1.0, curvature=1.0 if first else 0.0),
        )

    def means(self, predictors: Float64[np.ndarray, "n k"]) -> Float64[np.ndarray, "n k"]:
        """Return m(f) of n records."""
        if self.classes is None:
            return predictors
        if predictors.shape[1] == 1:
            return np.asarray(expit(predictors))
        powers = np.exp(predictors - predictors.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def residuals(
        self, predictors: Float64[np.ndarray, "n k"], targets: np.ndarray
    ) -> Float64[np.ndarray, "n k"]:
        """Return y - m(f), shortened to norm c."""
        outputs = predictors.shape[1]
        if self.classes is not None and outputs > 1:
            wanted = np.zeros_like(predictors)
            wanted[np.arange(len(targets)), targets] = 1.0
        else:
            wanted = targets.reshape(predictors.shape).astype(np.float64)
        found = wanted - self.means(predictors)
        # An infinite number becomes NaN here, and its contribution zero.
        length = np.sqrt((found * found).sum(axis=1))
        with np.errstate(invalid="ignore"):
            factor = np.minimum(1.0, self.residual_norm(outputs) / np.maximum(length, 1e-300))
            return np.asarray(found * factor[:, None])


@dataclass(frozen=True, kw_only=True)
class LocalNewton(RecordSums):
    """Scores and curvatures of a linear model's records.

    Attributes:
        family: the public bounds.
    """

    sends: ClassVar[str] = SUMS

    family: LinearFamily

    def message_length(self, dimension: int) -> int:
        return self.family.code(dimension, 1).length

    def vectors(self, task: Task, kept: dict[str, Any] | None = None) -> RecordVectors:
        check_linear(task, self.family)
        return _NewtonVectors(self.family, task.dimension, self.round_number)


class _NewtonVectors(RecordVectors):
    """Vectors of records, in the layout of a model's parameters: weights output by output, then all intercepts."""

    def __init__(self, family: LinearFamily, dimension: int, round_number: int) -> None:
        self._family, self._code = family, family.code(dimension, round_number)
        self._outputs, self._first = family.outputs(dimension), round_number == 1
        self.length = self._code.length
        self.width = self.length if self._first else self._code.scores

    def sums(self, start: Float64[np.ndarray, " d"], batch: RecordBatch) -> Float64[np.ndarray, "m width"]:
        rows = self._rows(start, batch.features, batch.targets)
        return np.asarray(np.add.reduceat(rows, batch.first, axis=0))

    def _rows(
        self, start: Float64[np.ndarray, " d"], features: Float64[np.ndarray, "n p"], targets: np.ndarray
    ) -> Float64[np.ndarray, "n width"]:
        """Return the vectors of n records."""
        n, family, code = len(features), self._family, self._code
        squared = 1.0 + (features * features).sum(axis=1)
        weight = np.minimum(1.0, family.record_length**2 / squared)
        if self._first:
            z = np.concatenate((features, np.ones((n, 1))), axis=1)
            moments = triangle(z[:, :, None] * z[:, None, :]) * weight[:, None]
            return code.encode(np.zeros((n, code.scores)), moments)
        inputs, outputs = family.inputs, self._outputs
        slopes, intercepts = start[: outputs * inputs].reshape(outputs, inputs), start[outputs * inputs :]
        # A matrix product may round a row by its neighbours; products and sums by row do not.
        predictors = np.stack([(features * one).sum(axis=1) for one in slopes], axis=1) + intercepts
        residual = family.residuals(predictors, targets) * weight[:, None]
        of_slopes = (residual[:, :, None] * features[:, None, :]).reshape(n, -1)
        return np.concatenate((of_slopes, residual), axis=1) * code.scales[0]


def check_linear(task: Task, family: LinearFamily) -> None:
    """Check that a task is a linear model with an intercept and one of the losses of this module.

    Raises:
        ModelError: names what is needed.
    """
    layer = linear_layer(task.model)
    if layer is None or layer.bias is None or layer.in_features != family.inputs:
        raise ModelError(
            "method newton: it steps models of one linear layer with an intercept (model.name = 'linear'); take "
            "uldp-avg-w for other models"
        )
    if type(task.loss) not in _LOSSES:
        raise ModelError(
            f"method newton: the loss {task.loss.name} has no Newton step here; take binary_cross_entropy, "
            "cross_entropy or squared_error without class weights, or another method (uldp-avg-w)"
        )
