"""A local algorithm: the direction of a local step, in place of the gradient."""

from dataclasses import dataclass

from torch import Tensor

from fedveil.config_keys import Positive
from fedveil.training.local_algorithms import LocalAlgorithm


@dataclass(frozen=True, kw_only=True)
class Normalised(LocalAlgorithm):
    """Steps of one length, whatever the gradient's: g / max(||g||, least).

    Attributes:
        least: length below which a gradient is not lengthened.
    """

    least: Positive = 1e-3

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        """Return the direction of every row."""
        return gradient / gradient.norm(dim=1, keepdim=True).clamp(min=self.least)
