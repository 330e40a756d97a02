"""Define the losses that training minimises, over the records of one batch, by name or import path.

A loss receives a batch as outputs (b, k), targets (b, ...) and a mask (b,). Zeros of the mask mark rows that pad the
batch; a padding row may hold any output. The loss is the mean over the records with mask 1, and 0 if there are none:

    L(outputs, targets, mask) = sum_i mask_i loss_i / max(1, sum_i mask_i)

All losses work under ``torch.func.vmap`` and ``torch.func.grad``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias, cast, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional

from fedveil.data.column_checks import CHUNK
from fedveil.errors import ConfigError, DataError, ModelError
from fedveil.user_code import import_object

TaskKind: TypeAlias = Literal["classification", "multi-label", "regression", "multi-output", "survival"]
RecordFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Mask: TypeAlias = Shaped[Tensor, "b"]
Terms: TypeAlias = Float[Tensor, "b"]
"""The term loss_i of each record."""
Present: TypeAlias = Bool[Tensor, "g b"]
Slopes: TypeAlias = Float[Tensor, "g k b"]
"""Gradient with respect to every output of every record of g batches, class by class."""
_ENTRY = 2
"""Column of the entry in survival targets that have one."""


@runtime_checkable
class Metric(Protocol):
    """A measurement on test records; :mod:`fedveil.training.metrics` holds the built-in ones."""

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> float:
        """Return the metric of outputs (n, k) for targets (n, ...), counting record i ``weights[i]`` times.

        NaN means that the metric is not defined for these records (only one class, no comparable pair) or that an
        output is NaN.
        """
        ...


class Loss(ABC):
    """A loss over the records of a batch: the masked mean of the module docstring.

    Attributes:
        name: its name or import path in an experiment.
        tasks: the kinds of task that it supports.
        separable: whether the term of a record depends on the output of that record alone (False for Cox).
        takes_float64: whether it is measured in float64; a third-party loss may hold float32 weights and is then
            measured in float32, as in training.
    """

    name: str
    tasks: frozenset[TaskKind]
    separable: bool = True
    takes_float64: bool = False

    def curvature(self, outputs: int) -> float | None:
        """Return c, the curvature of a record's term by an output at a zero start; None if it is not known.

        The rule of local learning rates uses it (:mod:`fedveil.run.config.recommended`).

        Args:
            outputs: k, number of outputs of a record.
        """
        return None

    @property
    def in_closed_form(self) -> bool:
        """Return whether :meth:`slopes` is a formula of this class and does not need ``torch.func``."""
        return type(self).slopes is not Loss.slopes

    @property
    def by_row(self) -> bool:
        """Return whether rows of several contributions may be passed in one call of :meth:`slopes`.

        True only for the formulas of this module, which treat each row separately by inspection. A third-party
        function may look at other rows for a few values only, and so pass every trial.
        """
        return self.separable and self.in_closed_form and type(self).__module__ == __name__

    @abstractmethod
    def records(
        self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b *target"], mask: Mask
    ) -> Terms:
        """Return the term of each record; a padding row has a finite term if its output is finite."""

    def slopes(self, outputs: Slopes, targets: Shaped[Tensor, "g b *target"], present: Present) -> Slopes:
        """Return the gradient of the SUM of terms of each of g batches with respect to its outputs.

        Outputs are laid out class by class, so that operations over classes run along contiguous records. Rows that
        are not ``present`` get finite values without meaning. This default works for any loss, by ``torch.func``:
        vmap shows :meth:`records` one batch at a time, so no row of one contribution meets a row of another.
        """

        def total(outputs: Tensor, targets: Tensor, present: Tensor) -> Tensor:
            return torch.where(present, self.records(outputs.mT, targets, present), 0).sum()

        slopes: Tensor = torch.func.vmap(torch.func.grad(total))(outputs, targets, present)
        return torch.where(present.unsqueeze(-2), slopes, 0)

    @abstractmethod
    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Refuse targets that this loss cannot compare with ``n_outputs`` outputs.

        Raises:
            DataError: a wrong dtype or shape, or a value outside the loss's domain (the error gives its row, not
                the value).
            ModelError: the model has a number of outputs that this loss cannot use.
        """

    def check_task(self, task: TaskKind) -> None:
        """Refuse a task of another kind.

        Raises:
            ConfigError: the loss does not support this kind of task; the error lists the losses that do.
        """
        if task not in self.tasks:
            fitting = ", ".join(sorted(name for name, loss in LOSSES.items() if task in loss.tasks))
            raise ConfigError(f"loss {self.name} is not for a {task} task; use one of: {fitting}")

    def __call__(
        self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b *target"], mask: Mask
    ) -> Float[Tensor, ""]:
        """Return the mean term over the records whose mask is 1; 0 if there are none."""
        present = mask.to(torch.bool)
        # Padding rows may hold NaN or infinity. 0 * NaN is NaN in a gradient, so outputs are replaced before the loss
        # and terms after it.
        safe = torch.where(present.unsqueeze(-1), outputs, torch.zeros_like(outputs))
        terms = self.records(safe, targets, mask)
        count = present.sum().clamp(min=1).to(outputs.dtype)
        return torch.where(present, terms, torch.zeros_like(terms)).sum() / count


class CrossEntropy(Loss):
    """Softmax cross-entropy for classes 0..k-1: loss_i = log sum_c exp(z_ic) - z_iy."""

    name = "cross_entropy"
    tasks: frozenset[TaskKind] = frozenset({"classification"})
    takes_float64 = True

    def curvature(self, outputs: int) -> float | None:
        """Return p (1 - p) at p = 1/k: (k - 1) / k^2."""
        return (outputs - 1) / outputs**2

    def records(self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b"], mask: Mask) -> Terms:
        """Return -log softmax(z_i)[y_i] for each record."""
        return functional.cross_entropy(outputs, targets, reduction="none")

    def slopes(self, outputs: Slopes, targets: Shaped[Tensor, "g b"], present: Present) -> Slopes:
        """Return softmax(z_i) - e_{y_i}."""
        slopes = torch.softmax(outputs, -2)
        own = targets.unsqueeze(-2)
        return slopes.scatter_add_(-2, own, slopes.new_full((), -1.0).expand_as(own))

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept int64 labels 0..k-1, k >= 2."""
        if n_outputs < 2:
            raise ModelError(
                "cross_entropy needs an output per class; for a single output use binary_cross_entropy"
            )
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise DataError(f"cross_entropy needs one int64 label per record, not {_described(targets)}")
        _refuse_rows(
            targets,
            lambda labels: (labels < 0) | (labels >= n_outputs),
            f"the label is not in 0..{n_outputs - 1}",
        )


class BinaryCrossEntropy(Loss):
    """Logistic loss of one output z (a logit, no sigmoid before it), y in {0, 1}: log(1 + e^z) - y z."""

    name = "binary_cross_entropy"
    tasks: frozenset[TaskKind] = frozenset({"classification"})
    takes_float64 = True

    def curvature(self, outputs: int) -> float | None:
        """Return the largest curvature of the logistic loss."""
        return 0.25

    def records(self, outputs: Float[Tensor, "b 1"], targets: Shaped[Tensor, "b"], mask: Mask) -> Terms:
        """Return softplus(z_i) - y_i z_i for each record, without overflow."""
        return functional.binary_cross_entropy_with_logits(
            outputs[..., 0], targets.to(outputs.dtype), reduction="none"
        )

    def slopes(
        self, outputs: Float[Tensor, "g 1 b"], targets: Shaped[Tensor, "g b"], present: Present
    ) -> Float[Tensor, "g 1 b"]:
        """Return sigmoid(z_i) - y_i."""
        return torch.sigmoid(outputs).sub_(targets.unsqueeze(-2))

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept labels 0 and 1 for a model of one output."""
        if n_outputs != 1:
            raise ModelError(f"binary_cross_entropy needs one output, a logit; the model has {n_outputs}")
        if targets.ndim != 1:
            raise DataError(f"binary_cross_entropy needs one label per record, not {_described(targets)}")
        _refuse_rows(targets, lambda labels: (labels != 0) & (labels != 1), "the label is neither 0 nor 1")


class MultiLabelCrossEntropy(Loss):
    """Mean over k labels of the logistic loss of each: loss_i = (1/k) sum_c log(1 + e^{z_ic}) - y_ic z_ic.

    y_ic is 1 if record i has label c, else 0; a record may have several labels or none. Outputs are logits, without a
    sigmoid before the loss.
    """

    name = "multi_label_cross_entropy"
    tasks: frozenset[TaskKind] = frozenset({"multi-label"})
    takes_float64 = True

    def curvature(self, outputs: int) -> float | None:
        """Return the largest curvature of a logistic loss, divided by the k labels of the mean."""
        return 0.25 / outputs

    def records(self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b k"], mask: Mask) -> Terms:
        """Return the mean of softplus(z_ic) - y_ic z_ic over the labels of each record."""
        return functional.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction="none"
        ).mean(-1)

    def slopes(self, outputs: Slopes, targets: Shaped[Tensor, "g b k"], present: Present) -> Slopes:
        """Return (1/k) (sigmoid(z_ic) - y_ic)."""
        return torch.sigmoid(outputs).sub_(targets.mT).div_(outputs.shape[-2])

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept (n, k) of 0 and 1 for a model of k outputs."""
        if targets.ndim != 2:
            raise DataError(
                f"multi_label_cross_entropy needs one 0 or 1 for each label of a record, not {_described(targets)}"
            )
        if targets.shape[1] != n_outputs:
            raise ModelError(
                f"multi_label_cross_entropy needs one output for each of {targets.shape[1]} labels, a logit; the model "
                f"has {n_outputs}"
            )
        _refuse_rows(
            targets, lambda labels: ((labels != 0) & (labels != 1)).any(-1), "a label is neither 0 nor 1"
        )


class Focal(Loss):
    """Focal loss with gamma = 2, for rare classes: loss_i = -(1 - p_iy)^2 log p_iy, p_i = softmax(z_i).

    A well predicted record has a small weight, so the many records of a frequent class do not dominate the few of a
    rare class. A single output z stands for the two outputs (0, z).

    Reference: T.-Y. Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.
    """

    name = "focal"
    tasks: frozenset[TaskKind] = frozenset({"classification"})
    takes_float64 = True

    def records(self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b"], mask: Mask) -> Terms:
        """Return -(1 - p)^2 log p of the true class of each record."""
        both = functional.pad(outputs, (1, 0)) if outputs.shape[-1] == 1 else outputs
        own = -functional.cross_entropy(both, targets.long(), reduction="none")
        return -(1 - own.exp()).square() * own

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept int64 labels 0..k-1, or 0 and 1 for a single output."""
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise DataError(f"focal needs one int64 label per record, not {_described(targets)}")
        last = max(n_outputs, 2) - 1
        _refuse_rows(targets, lambda labels: (labels < 0) | (labels > last), f"the label is not in 0..{last}")


class SquaredError(Loss):
    """Squared error, mean over the k outputs: loss_i = (1/k) sum_c (z_ic - y_ic)^2."""

    name = "squared_error"
    tasks: frozenset[TaskKind] = frozenset({"regression", "multi-output"})
    takes_float64 = True

    def curvature(self, outputs: int) -> float | None:
        """Return 2 / k."""
        return 2.0 / outputs

    def records(
        self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b *target"], mask: Mask
    ) -> Terms:
        """Return the mean squared difference of each record."""
        return (outputs - targets.reshape(outputs.shape)).square().mean(-1)

    def slopes(self, outputs: Slopes, targets: Shaped[Tensor, "g b *target"], present: Present) -> Slopes:
        """Return (2/k) (z_i - y_i)."""
        expected = targets.reshape(outputs.mT.shape).mT
        return (outputs - expected).mul_(2 / outputs.shape[-2])

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept one finite number per output."""
        numbers = targets[0].numel() if len(targets) else n_outputs
        if not targets.is_floating_point() or numbers != n_outputs:
            raise DataError(
                f"squared_error needs {n_outputs} floating-point numbers per record, not {_described(targets)}"
            )
        _refuse_rows(
            targets,
            lambda rows: ~torch.isfinite(rows).reshape(-1, n_outputs).all(-1),
            "the target is not finite",
        )


class PoissonDeviance(Loss):
    """Poisson's negative log likelihood of counts y, up to a constant: loss_i = m_i - y_i log m_i.

    The output m_i is the MEAN, not its logarithm: take a model whose outputs are positive, such as ``whitened-rates``.
    Means below 1e-30 count as 1e-30.
    """

    name = "poisson"
    tasks: frozenset[TaskKind] = frozenset({"regression"})
    takes_float64 = True

    def records(
        self, outputs: Float[Tensor, "b 1"], targets: Shaped[Tensor, "b *target"], mask: Mask
    ) -> Terms:
        """Return the term of each record."""
        mean = outputs[:, 0].clamp_min(1e-30)
        return mean - targets.reshape(mean.shape) * mean.log()

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept one whole number of at least 0 per record, for a model of one output."""
        if n_outputs != 1:
            raise ModelError(f"poisson needs one output, a mean count; the model has {n_outputs}")
        if not targets.is_floating_point() or targets[:1].numel() > 1:
            raise DataError(f"poisson needs one floating-point number per record, not {_described(targets)}")
        _refuse_rows(
            targets.reshape(-1),
            lambda counts: ~torch.isfinite(counts) | (counts < 0) | (counts != counts.round()),
            "the target is no count: a whole number of at least 0",
        )


class Cox(Loss):
    """Negative log partial likelihood of Cox's model, averaged over all records (not over the events).

    With one score s per record, sorted by time, longest first (ties in the order of the batch):

        loss_0 = 0,    loss_i = event_i log sum_{j <= i} exp(s_j - s_i)

    The prefix j <= i is the risk set at the event of record i. Of records with tied times, only those sorted before i
    count, as in FLamby's Fed-TCGA-BRCA baseline. A batch of one record has gradient 0. The cost is O(b log b). The
    loss is finite for every finite score, because sums of exponentials are accumulated as logarithms.

    With late entry, a third column of the targets, the risk set also requires entry_j < time_i: a record counts only
    once it is under observation. The cost is then O(b^2), because such sets are no prefixes.

    Targets: (b, 2), event (1 or 0) and time; or (b, 3) with the entry, before the time.
    Reference: D. R. Cox, "Regression models and life-tables", J. R. Stat. Soc. B 34(2), 1972.
    """

    name = "cox"
    tasks: frozenset[TaskKind] = frozenset({"survival"})
    takes_float64 = True
    separable = False

    def curvature(self, outputs: int) -> float | None:
        """Return 1/2, which was chosen on TcgaBrca; a score's curvature depends on the risk sets."""
        return 0.5

    def records(self, outputs: Float[Tensor, "b 1"], targets: Float[Tensor, "b k"], mask: Mask) -> Terms:
        """Return the terms in the order of the batch; no risk set contains a padding row."""
        present = mask.to(torch.bool)
        event, time = targets[..., 0].to(outputs.dtype), targets[..., 1]
        order = _longest_first(time, present)
        scores = _centred(outputs[..., 0], present)
        if targets.shape[-1] > _ENTRY:
            at_risk = torch.where(_risk_sets(targets, order, present), scores.unsqueeze(-2), -torch.inf)
            terms = torch.logsumexp(at_risk, -1) - scores
            return torch.where(present, event * terms, torch.zeros_like(terms))
        # A_i = log sum_{j <= i} exp(s_j), over positions sorted by time, longest first.
        at_risk = torch.logcumsumexp(scores.gather(-1, order), -1)
        terms = at_risk.gather(-1, order.argsort(-1)) - scores
        return torch.where(present, event * terms, torch.zeros_like(terms))

    def slopes(
        self, outputs: Float[Tensor, "g 1 b"], targets: Float[Tensor, "g b k"], present: Present
    ) -> Float[Tensor, "g 1 b"]:
        """Return the gradient of the sum of terms with respect to the scores, in closed form without late entry.

            d/ds_i = sum_{l >= i} event_l exp(s_i - A_l) - event_i,    A_l = log sum_{j <= l} exp(s_j)

        Positions are sorted as in the class docstring. No exponent is positive, because A_l >= s_i for l >= i. Rows
        that are not ``present`` get 0.
        """
        if targets.shape[-1] > _ENTRY:
            return super().slopes(outputs, targets, present)
        event = torch.where(present, targets[..., 0].to(outputs.dtype), 0)
        order = _longest_first(targets[..., 1], present)
        scores = _centred(outputs[:, 0], present).gather(-1, order)
        event = event.gather(-1, order)
        at_risk = torch.logcumsumexp(scores, -1)
        # later_i = log sum_{l >= i} event_l exp(-A_l): a cumulative sum from the end; log(0) = -inf drops censored
        # records.
        later = torch.logcumsumexp((event.log() - at_risk).flip(-1), -1).flip(-1)
        slopes = torch.zeros_like(scores).scatter_(-1, order, torch.exp(scores + later) - event)
        return torch.where(present, slopes, 0).unsqueeze(-2)

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept (event, time) or (event, time, entry), event 0 or 1, finite times, for a model of one output."""
        if n_outputs != 1:
            raise ModelError(f"cox needs one output, a log hazard; the model has {n_outputs}")
        if not targets.is_floating_point() or targets.shape[1:] not in ((_ENTRY,), (_ENTRY + 1,)):
            raise DataError(
                "cox needs (event, time) per record, two floats, or (event, time, entry), not "
                f"{_described(targets)}"
            )
        event, times = targets[:, 0], targets[:, 1:]
        _refuse_rows(event, lambda events: (events != 0) & (events != 1), "the event is neither 0 nor 1")
        _refuse_rows(times, lambda rows: ~torch.isfinite(rows).all(-1), "the time is not finite")
        _refuse_rows(times, lambda rows: rows[:, -1] > rows[:, 0], "the entry is not before the time")


class RecordLoss(Loss):
    """A user's function of the outputs and targets of a batch that returns one term per record.

    Args:
        name: its name in reports.
        function: ``function(outputs: (b, k), targets: (b, ...)) -> (b,)``; term i may depend on row i alone, and
            it must work under ``torch.func.vmap``.
    """

    tasks: frozenset[TaskKind] = frozenset(get_args(TaskKind))

    def __init__(self, name: str, function: RecordFunction) -> None:
        self.name = name
        self._function = function

    def records(
        self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b *target"], mask: Mask
    ) -> Terms:
        """Return the terms of the function.

        Raises:
            ModelError: the terms are not one floating-point number per record.
        """
        terms = self._function(outputs, targets)
        if not isinstance(terms, Tensor) or terms.shape != mask.shape or not terms.is_floating_point():
            description = _described(terms) if isinstance(terms, Tensor) else type(terms).__name__
            raise ModelError(
                f"loss {self.name} must return one floating-point term per record, not {description}"
            )
        return terms

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        """Accept all targets, because only the function knows its domain."""


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            *(CrossEntropy(), BinaryCrossEntropy(), MultiLabelCrossEntropy()),
            *(Focal(), SquaredError(), PoissonDeviance(), Cox()),
        )
    }
)


def load_loss(name: str) -> Loss:
    """Return a built-in loss by its name, or a user's loss by its import path ``package.module:function``.

    The path may name a :class:`Loss`, or a function of (outputs, targets) that returns one term per record.

    Raises:
        ConfigError: no loss of this name, no module or attribute at this path, or an object that is not callable;
            the error lists the known names.

    >>> load_loss("cox").name
    'cox'
    """
    if name in LOSSES:
        return LOSSES[name]
    imported = import_object(name, "loss", LOSSES)
    if isinstance(imported, Loss):
        return imported
    if not callable(imported):
        raise ConfigError(f"loss {name} is a {type(imported).__name__}; it must be a Loss or a function")
    return RecordLoss(name, cast(RecordFunction, imported))


def _longest_first(time: Float[Tensor, "*g b"], present: Bool[Tensor, "*g b"]) -> Shaped[Tensor, "*g b"]:
    """Return the positions by descending time, ties in the given order, absent rows last."""
    return torch.where(present, time, -torch.inf).sort(dim=-1, stable=True, descending=True).indices


def _risk_sets(
    targets: Float[Tensor, "*g b 3"], order: Shaped[Tensor, "*g b"], present: Bool[Tensor, "*g b"]
) -> Bool[Tensor, "*g b b"]:
    """Return whether record j (column) is in the risk set of record i (row), under late entry.

    j is i, or j is sorted before i and entered before i's time. A row that is not present has itself alone.
    """
    time, entry, rank = targets[..., 1], targets[..., _ENTRY], order.argsort(-1)
    outlives = rank.unsqueeze(-2) < rank.unsqueeze(-1)
    entered = entry.unsqueeze(-2) < time.unsqueeze(-1)
    itself = rank.unsqueeze(-2) == rank.unsqueeze(-1)
    return (outlives & entered & present.unsqueeze(-2)) | itself


def _centred(scores: Float[Tensor, "*g b"], present: Bool[Tensor, "*g b"]) -> Float[Tensor, "*g b"]:
    """Subtract the largest present score from all scores.

    Cox's loss does not change, and accumulated values stay small.
    """
    lowest = torch.finfo(scores.dtype).min
    return scores - torch.where(present, scores.detach(), lowest).amax(-1, keepdim=True)


def _described(targets: Tensor) -> str:
    return f"{targets.dtype} of shape {tuple(targets.shape)}"


def _refuse_rows(
    targets: Shaped[Tensor, "n *target"],
    is_wrong: Callable[[Shaped[Tensor, "b *target"]], Bool[Tensor, "b"]],
    why: str,
) -> None:
    """Raise a DataError that names the first wrong row, and not the number of wrong rows."""
    for begin in range(0, len(targets), CHUNK):
        wrong = is_wrong(targets[begin : begin + CHUNK])
        if bool(wrong.any()):
            raise DataError(f"row {begin + int(wrong.nonzero()[0, 0])}: {why}")


# --- class weights ------------------------------------------------------------------------------------------
# Define a loss that weights the term of a record by its class, for rare classes.


class ClassWeighted(Loss):
    """Classification loss with DECLARED class weights: loss_i = weights[y_i] * base_i.

    The loss of a batch is the mean of its terms, as for the base loss.

    The weights are public. Weights that are counted from records would reveal how many records each class has. An
    unweighted loss has all weights 1. For a class with known share p among k classes, 1 / (k p) is usual. The bound
    of a contribution is enforced afterwards, so weights change no guarantee.

    Args:
        base: the loss.
        weights: one positive number per class, in the order of the classes.
        n_classes: k; None if the targets are not classes.

    Raises:
        ConfigError: a number of weights other than k, a weight that is not positive, or a loss that is not for
            classes.
    """

    def __init__(self, base: Loss, weights: Sequence[float], n_classes: int | None) -> None:
        if n_classes is None or "classification" not in base.tasks:
            raise ConfigError("model.class_weights: only a classification has classes; remove them")
        if len(weights) != n_classes or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ConfigError(
                f"model.class_weights: there are {n_classes} classes; give as many positive numbers, in their order"
            )
        self.name, self.tasks, self.separable = base.name, base.tasks, base.separable
        self.takes_float64 = base.takes_float64
        self._base, self._weights = base, torch.tensor(weights, dtype=torch.float64)

    def records(self, outputs: Float[Tensor, "b k"], targets: Shaped[Tensor, "b"], mask: Mask) -> Terms:
        """Return the weighted term of each record."""
        return self._of(targets, outputs) * self._base.records(outputs, targets, mask)

    def slopes(self, outputs: Slopes, targets: Shaped[Tensor, "g b"], present: Present) -> Slopes:
        return self._base.slopes(outputs, targets, present) * self._of(targets, outputs).unsqueeze(-2)

    def curvature(self, outputs: int) -> float | None:
        """Return the base loss's curvature times the largest weight."""
        base = self._base.curvature(outputs)
        return None if base is None else base * float(self._weights.max())

    @property
    def in_closed_form(self) -> bool:
        return self._base.in_closed_form

    @property
    def by_row(self) -> bool:
        """Return whether the base loss treats each row separately; the weight depends on its own row alone."""
        return self._base.by_row

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        self._base.check_targets(targets, n_outputs)

    def _of(self, targets: Shaped[Tensor, "*g b"], outputs: Tensor) -> Float[Tensor, "*g b"]:
        return self._weights.to(device=outputs.device, dtype=outputs.dtype)[targets.long()]
