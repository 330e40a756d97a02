"""Define a loss that weights the term of a record by its class, for rare classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.training.losses import Loss, Mask, Present, Slopes, Terms


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
        if len(weights) != n_classes or not all(math.isfinite(one) and one > 0 for one in weights):
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
        """Whether the base loss treats each row separately; the weight depends on its own row alone."""
        return self._base.by_row

    def check_targets(self, targets: Shaped[Tensor, "n *target"], n_outputs: int) -> None:
        self._base.check_targets(targets, n_outputs)

    def _of(self, targets: Shaped[Tensor, "*g b"], outputs: Tensor) -> Float[Tensor, "*g b"]:
        return self._weights.to(device=outputs.device, dtype=outputs.dtype)[targets.long()]
