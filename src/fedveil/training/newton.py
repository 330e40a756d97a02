"""Newton steps for linear models: the bounded score and curvature of every record.

The model is f = theta z with z = W (x, 1) and a public basis W that it holds beside theta. With record r = (x, y), the
mean m(f) of y, and B, c public:

    a = min(1, B / |z|)^2                weight of a long record
    psi = a clip(y - m(f), c) z'         score; |psi| <= B c
    H = a z z'                           second moments; ||H||_F <= B^2

because a |z| <= B and a |z|^2 <= B^2 for every z. Rounds 1 and 2 release H and set the basis, in which later rounds
release psi: directions in which records differ little get lengths like the others, and less noise
(:mod:`fedveil.training.newton`). B of the first round is declared; a basis that was set has B = 1. A contribution
is the mean over its records of one vector that holds both parts, scaled to l2 norm at most 1
(:mod:`fedveil.statistics.inference.equation`). A user's weights over the silos sum to at most 1, so one user, with all
records in all silos, changes the sum by at most 1. docs/theory/newton.md.

==============  ====================  ==================  ===========
model           m(f)                  c by rule           s
==============  ====================  ==================  ===========
logistic        1 / (1 + e^-f)        1/2                 1/4
softmax, K      e^f_k / sum_j e^f_j   sqrt(1 - 1/K)       1/2
linear          f                     declared            1
counts          E[min(Y, cap)]        cap                 max m'
survival        see HazardFamily      1                   hazard c
==============  ====================  ==================  ===========

Counts and survival take residuals and their bounds from the regressions of ``fedveil infer``
(:mod:`fedveil.statistics.inference.families`).

s is the largest slope of m. c by rule is the length of a residual at theta = 0. Later residuals are shorter, but for
records that the model gets wrong, whose pull it limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float64
from scipy.special import expit
from torch import Tensor, nn

from fedveil.config_keys import Positive
from fedveil.errors import ModelError
from fedveil.statistics.inference.equation import ScoreCode, ScoreSums, Shares, triangle
from fedveil.statistics.inference.families import REACH, PiecewiseExponential, Poisson
from fedveil.training.losses import (
    BinaryCrossEntropy,
    Cox,
    CrossEntropy,
    Loss,
    PoissonDeviance,
    SquaredError,
)
from fedveil.training.record_sums import RecordBatch, RecordSums, RecordVectors
from fedveil.training.server.optimizers import Model, Optimizer, State
from fedveil.training.task import Task

# --- local sums ---

SUMS: Final = "scores and curvatures"
"""Kind of the sums, for the server's step."""
MOMENT_ROUNDS: Final = 2
"""Rounds that release second moments and set the basis; all later rounds release scores."""
INTERVALS: Final = 4
"""Number of intervals of equal length with a baseline hazard each, up to the horizon."""
_HAZARD: Final = 0.6
"""c: a record is followed until its cumulative hazard reaches it, as in ``fedveil infer``."""
_BASELINE: Final = 0.5
"""kappa, the scale of events and hazards by interval beside the score."""


class WhitenedLinear(nn.Module):
    """Linear model of (x, 1) in a basis: f = weight basis (x, 1).

    Attributes:
        basis: (d, d) rows of the basis, d = p + 1; the unit matrix at the start.
        weight: (k, d) coefficients in the basis; the method newton replaces those of the start.

    Args:
        inputs: p.
        outputs: k.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.eye(inputs + 1))
        self.weight = nn.Parameter(torch.empty(outputs, inputs + 1).uniform_(-0.1, 0.1))

    def forward(self, features: Tensor) -> Tensor:
        """Return (n, k) outputs for (n, ...) features."""
        weight, bias = self.coefficients()
        return nn.functional.linear(features.flatten(1), weight, bias)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return the (k, p) coefficients of the features, and the (k,) intercepts."""
        whole = self.weight @ self.basis
        return whole[:, :-1], whole[:, -1]


class WhitenedRates(WhitenedLinear):
    """Mean count e^f of a linear model in a basis."""

    def forward(self, features: Tensor) -> Tensor:
        """Return (n, k) mean counts for (n, ...) features."""
        return super().forward(features).clamp(-REACH, REACH).exp()


class WhitenedHazards(WhitenedLinear):
    """Log hazard of a linear model in a basis, relative to a baseline that it holds beside.

    Attributes:
        baseline: (4,) log hazards of the intervals, up to a constant; no prediction depends on them.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.baseline = nn.Parameter(torch.zeros(INTERVALS))


def whitened_rates(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """Build a model of mean counts: e^f with f linear in a basis."""
    return WhitenedRates(math.prod(input_shape), n_outputs)


def whitened_hazards(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """Build a proportional hazards model whose log hazard is linear in a basis."""
    return WhitenedHazards(math.prod(input_shape), n_outputs)


def whitened_linear(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """Build a linear model in a basis, of the flattened features."""
    return WhitenedLinear(math.prod(input_shape), n_outputs)


@dataclass(frozen=True, kw_only=True)
class LinearFamily:
    """The public bounds of a linear model's scores and curvatures.

    Attributes:
        inputs: p, the number of features.
        classes: K; None for a number to predict.
        record_length: B of the first round.
        residual: c; of classes None for the rule.
        center: f before the first step: of a number to predict the middle of its declared range.
        model, losses, needs: form of the model, losses that it may have, and both in words.
        baseline: number of parameters after the coefficients.
    """

    model: ClassVar[type[WhitenedLinear]] = WhitenedLinear
    losses: ClassVar[tuple[type[Loss], ...]] = (BinaryCrossEntropy, CrossEntropy, SquaredError)
    needs: ClassVar[str] = (
        "model.name = 'whitened-linear' with the loss binary_cross_entropy, cross_entropy or squared_error without "
        "class weights"
    )
    baseline: ClassVar[int] = 0

    inputs: int
    classes: int | None = None
    record_length: float
    residual: float | None = None
    center: float = 0.0

    @property
    def width(self) -> int:
        """Length of z = (x, 1)."""
        return self.inputs + 1

    def outputs(self, dimension: int) -> int:
        """Return the number of outputs of a model of ``dimension`` parameters; 1 for a model of another form.

        Such a model is refused once it is built (:func:`check_linear`); until then its noise is calibrated.
        """
        return max(1, (dimension - self.baseline) // self.width - self.width)

    def residual_norm(self, outputs: int) -> float:
        """Return c, the bound of the l2 norm of a residual."""
        if self.residual is not None:
            return self.residual
        assert self.classes is not None, "the method's builder asks for it"
        return 0.5 if outputs == 1 else math.sqrt(1 - 1 / self.classes)

    def score_norm(self, outputs: int, length: float) -> float:
        """Return the bound of a score, for records of length at most ``length``."""
        return length * self.residual_norm(outputs)

    def slope(self, outputs: int) -> float:
        """Return s, the largest slope of the mean."""
        if self.classes is None:
            return 1.0
        return 0.25 if outputs == 1 else 0.5

    def length(self, round_number: int) -> float:
        """Return B of a round."""
        return self.record_length if round_number == 1 else 1.0

    def code(self, dimension: int, round_number: int) -> ScoreCode:
        """Return the layout of the vectors of a round: curvatures in the first two, scores in all others."""
        outputs, length = self.outputs(dimension), self.length(round_number)
        moments = round_number <= MOMENT_ROUNDS
        return ScoreCode(
            scores=outputs * self.width + 2 * self.baseline,
            width=self.width,
            score_norm=self.score_norm(outputs, length),
            curvature_norm=length**2,
            shares=Shares(gradient=0.0 if moments else 1.0, curvature=1.0 if moments else 0.0),
        )

    def split(
        self, model: Float64[np.ndarray, " d"]
    ) -> tuple[Float64[np.ndarray, "w w"], Float64[np.ndarray, "k w"], Float64[np.ndarray, " j"]]:
        """Return the basis, the coefficients and the baseline in a model's vector, as views."""
        n, end = self.width, len(model) - self.baseline
        return model[: n * n].reshape(n, n), model[n * n : end].reshape(-1, n), model[end:]

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
            expected = np.zeros_like(predictors)
            expected[np.arange(len(targets)), targets] = 1.0
        else:
            expected = targets.reshape(predictors.shape).astype(np.float64)
        residual = expected - self.means(predictors)
        # An infinite number becomes NaN here, and its contribution zero.
        length = np.sqrt((residual * residual).sum(axis=1))
        with np.errstate(invalid="ignore"):
            factor = np.minimum(1.0, self.residual_norm(outputs) / np.maximum(length, 1e-300))
            return np.asarray(residual * factor[:, None])

    def score_parts(
        self,
        predictors: Float64[np.ndarray, "n k"],
        targets: np.ndarray,
        baseline: Float64[np.ndarray, " j"],
    ) -> tuple[Float64[np.ndarray, "n k"], Float64[np.ndarray, "n m"]]:
        """Return the residuals, which multiply z, and the numbers that a score has beside them."""
        return self.residuals(predictors, targets), np.zeros((len(predictors), 0))

    def baseline_step(self, sums: Float64[np.ndarray, " m"], sd: float) -> Float64[np.ndarray, " j"]:
        """Return how the baseline moves after released sums of the numbers beside the scores, with noise ``sd``."""
        return np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class CountFamily(LinearFamily):
    """Poisson regression of counts up to a cap: residuals min(y, cap) - E[min(Y, cap)] for Y ~ Poisson(e^f).

    Both terms lie in [0, cap], so |residual| <= cap.

    Attributes:
        cap: public; larger counts are taken for it, on both sides of the equation.
    """

    model: ClassVar[type[WhitenedLinear]] = WhitenedRates
    losses: ClassVar[tuple[type[Loss], ...]] = (PoissonDeviance,)
    needs: ClassVar[str] = "for counts (method.cap) model.name = 'whitened-rates' with the loss poisson"

    cap: int

    @cached_property
    def law(self) -> Poisson:
        """The regression of ``fedveil infer``."""
        return Poisson(column="target", cap=self.cap)

    def residual_norm(self, outputs: int) -> float:
        return float(self.cap)

    def slope(self, outputs: int) -> float:
        return self.law.largest

    def residuals(
        self, predictors: Float64[np.ndarray, "n k"], targets: np.ndarray
    ) -> Float64[np.ndarray, "n k"]:
        counts = np.maximum(targets.reshape(-1).astype(np.float64), 0.0)
        residual, _ = self.law.residual(counts, np.clip(predictors[:, 0], -REACH, REACH))
        return np.asarray(residual[:, None])


@dataclass(frozen=True, kw_only=True)
class HazardFamily(LinearFamily):
    """Proportional hazards with a baseline that is constant in each of four intervals up to a horizon.

    A record has an event e_j in at most one interval j and is followed through hazards h_j that add up to at most
    c = 0.6, where it is stopped (:class:`fedveil.statistics.inference.families.PiecewiseExponential`). With the
    martingale M = sum_j (e_j - h_j) its score is a (M z, kappa e, kappa h), kappa = 1/2. The squared norm is convex in
    h, so it is largest at a corner of the simplex sum h <= c: at h = 0 it is |z|^2 + kappa^2, and at h = c e_k at most
    (1 - c)^2 |z|^2 + kappa^2 (1 + c^2), which is less because kappa, c <= 1 and |z| <= B = 1 scales a. So
    |score| <= sqrt(B^2 + kappa^2). With late entry a record is followed from its entry on: its hazards are in the same
    simplex, so the bound is the same.

    Attributes:
        horizon: public time at which follow-up ends.
        rate: a public guess at events per unit of time.
    """

    model: ClassVar[type[WhitenedLinear]] = WhitenedHazards
    losses: ClassVar[tuple[type[Loss], ...]] = (Cox,)
    needs: ClassVar[str] = "for survival (method.horizon) model.name = 'whitened-hazards' with the loss cox"
    baseline: ClassVar[int] = INTERVALS

    horizon: float
    rate: float

    @cached_property
    def law(self) -> PiecewiseExponential:
        """The regression of ``fedveil infer``."""
        grid = tuple(np.linspace(0.0, self.horizon, INTERVALS + 1).tolist())
        return PiecewiseExponential(time="time", event="event", grid=grid, rate=self.rate, hazard=_HAZARD)

    def residual_norm(self, outputs: int) -> float:
        return 1.0

    def score_norm(self, outputs: int, length: float) -> float:
        return math.hypot(length, _BASELINE)

    def slope(self, outputs: int) -> float:
        return _HAZARD

    def score_parts(
        self,
        predictors: Float64[np.ndarray, "n k"],
        targets: np.ndarray,
        baseline: Float64[np.ndarray, " j"],
    ) -> tuple[Float64[np.ndarray, "n k"], Float64[np.ndarray, "n m"]]:
        swapped = np.concatenate((targets[:, 1::-1], targets[:, 2:]), axis=1).astype(np.float64)
        events, followed = self.law.follow(swapped, predictors + baseline)
        martingale = (events - followed).sum(axis=1, keepdims=True)
        return martingale, _BASELINE * np.concatenate((events, followed), axis=1)

    def baseline_step(self, sums: Float64[np.ndarray, " m"], sd: float) -> Float64[np.ndarray, " j"]:
        """Return log(events / hazards) by interval, less its mean: the intercept carries the level.

        Both have two standard deviations of their noise added, so that an interval without people does not move.
        """
        events, followed = np.maximum(sums.reshape(2, -1) / _BASELINE, 0.0) + (2 * sd / _BASELINE + 1e-9)
        moved = np.log(events / followed)
        return np.asarray(np.clip(moved - followed @ moved / followed.sum(), -1.0, 1.0))


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

    def vectors(self, task: Task, cache: dict[str, Any] | None = None) -> RecordVectors:
        check_linear(task, self.family)
        return _NewtonVectors(self.family, task.dimension, self.round_number)


class _NewtonVectors(RecordVectors):
    """Vectors of records: the triangle of moments after room for scores, or scores output by output."""

    def __init__(self, family: LinearFamily, dimension: int, round_number: int) -> None:
        self._family, self._code = family, family.code(dimension, round_number)
        self._moments, self._squared = round_number <= MOMENT_ROUNDS, family.length(round_number) ** 2
        self.length = self._code.length
        self.width = self.length if self._moments else self._code.scores

    def sums(self, start: Float64[np.ndarray, " d"], batch: RecordBatch) -> Float64[np.ndarray, "m width"]:
        rows = self._rows(start, batch.features, batch.targets)
        return np.asarray(np.add.reduceat(rows, batch.first, axis=0))

    def _rows(
        self, start: Float64[np.ndarray, " d"], features: Float64[np.ndarray, "n p"], targets: np.ndarray
    ) -> Float64[np.ndarray, "n width"]:
        """Return the vectors of n records."""
        n, (basis, slopes, baseline) = len(features), self._family.split(start)
        # A matrix product may round a row by its neighbours; products and sums by row do not.
        z = np.stack([(features * row[:-1]).sum(axis=1) + row[-1] for row in basis], axis=1)
        weight = np.minimum(1.0, self._squared / np.maximum((z * z).sum(axis=1), 1e-300))
        if self._moments:
            moments = triangle(z[:, :, None] * z[:, None, :]) * weight[:, None]
            return self._code.encode(np.zeros((n, self._code.scores)), moments)
        predictors = np.stack([(z * slope).sum(axis=1) for slope in slopes], axis=1)
        residual, beside = self._family.score_parts(predictors, targets, baseline)
        scores = (residual[:, :, None] * z[:, None, :]).reshape(n, -1)
        return np.asarray(np.concatenate((scores, beside), axis=1) * weight[:, None] * self._code.scales[0])


def check_linear(task: Task, family: LinearFamily) -> None:
    """Check that a task is a linear model in a basis, with one of the losses of this module.

    Raises:
        ModelError: names what is needed.
    """
    model = task.model
    fits = type(model) is family.model and len(model.basis) == family.width
    if not fits or type(task.loss) not in family.losses:
        raise ModelError(
            f"method newton: the model is {type(model).__name__} and the loss {task.loss.name}; it takes its own form "
            f"of a linear model: {family.needs}. uldp-avg-w takes other models and losses"
        )


# --- steps of the server ---

_SINGULAR: Final = 1e-10
_LONGER: Final = 1.3
"""Ratio of the bound B to the root mean square of a record's length."""
_LEAST: Final = 0.1
"""Lower limit of the mean square length, whose noisy estimate may be too small or negative."""


@dataclass(frozen=True, kw_only=True)
class NewtonSteps(Optimizer):
    """Steps of a linear model from released curvatures and scores.

    The first two rounds release curvatures, set the basis and predict the family's center. Every later round releases
    scores at the model.

    Attributes:
        family: the public bounds of scores and curvatures.
        ridge: factor of the noise in a step.
        noise_std: standard deviation of the noise on every number of the mean.
    """

    reads: ClassVar[str] = SUMS

    family: LinearFamily
    ridge: Positive = 1.0
    noise_std: float = 0.0

    def at_noise(self, noise_std: float) -> NewtonSteps:
        return replace(self, noise_std=noise_std)

    def refuses(self, method: Any) -> Iterable[str]:
        yield from super().refuses(method)
        if not method.noise_known:
            yield "Newton steps weigh curvature against the noise, whose size is not known here"

    def init(self, model: Model) -> State:
        """Return the state before the first round: 0 rounds, and L^2 = 0 until a round of moments sets it."""
        return {
            "newton.round": torch.zeros((), dtype=torch.int64),
            "newton.length": torch.zeros((), dtype=torch.float64),
        }

    def step(self, model: Model, mean: Float64[Tensor, " length"], state: State) -> tuple[Model, State]:
        """Return the next model and state; ``mean`` is (length,) the mean of the round's vectors."""
        number, family = int(state["newton.round"]) + 1, self.family
        code = family.code(len(model), number)
        decoded = code.decode(mean.cpu().numpy(), self.noise_std)
        after = model.cpu().double().numpy().copy()
        basis, slopes, baseline = family.split(after)
        squared = state["newton.length"]
        if number <= MOMENT_ROUNDS:
            moved, length = whitening(decoded.curvature, decoded.curvature_sd)
            basis[:] = moved @ basis
            # Coefficients whose prediction is the center, whatever the features.
            slopes[:] = np.linalg.solve(basis.T, np.eye(family.width)[-1]) * family.center
            baseline[:] = 0.0
            squared = torch.tensor(length, dtype=torch.float64)
        else:
            gradient, beside = np.split(decoded.gradient, [slopes.size])
            slopes += gradient.reshape(slopes.shape) / self._steepness(slopes, float(squared), decoded)
            baseline += family.baseline_step(beside, decoded.gradient_sd)
        stepped = torch.from_numpy(after).float().to(model.device)
        return stepped, {"newton.round": torch.tensor(number), "newton.length": squared}

    def _steepness(self, slopes: np.ndarray, squared: float, sums: ScoreSums) -> float:
        """Return 1 / A, the divisor of a step along the scores."""
        slope, norm = self.family.slope(len(slopes)), self.family.residual_norm(len(slopes))
        return max(slope / squared, 2 * self.ridge * slope * sums.gradient_sd / norm)


def whitening(moments: Float64[np.ndarray, "n n"], sd: float) -> tuple[Float64[np.ndarray, "n n"], float]:
    """Return (n, n) the map to a basis with released second moments of at most 1 / L^2 in every direction, and L^2.

    Args:
        moments: (n, n) released second moments.
        sd: standard deviation of the noise on a diagonal entry.
    """
    values, vectors = np.linalg.eigh(moments)
    floor = max(sd * math.sqrt(len(moments)), _SINGULAR * float(values.max(initial=0.0)), 1e-300)
    floored = np.maximum(values, floor)
    squared = _LONGER**2 * max(_LEAST, float((values / floored).sum()))
    return (vectors / np.sqrt(floored)) @ vectors.T / math.sqrt(squared), squared
