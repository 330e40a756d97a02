"""A denoiser: an estimate of the mean that lies under the noise."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedveil.config_keys import Fraction
from fedveil.training.server.denoise import Denoiser, Shapes


@dataclass(frozen=True, kw_only=True)
class Shrink(Denoiser):
    """Multiplies the mean by a factor.

    Attributes:
        factor: what is left of it.
    """

    factor: Fraction = 0.5
    needs_noise_std: ClassVar[bool] = False

    def estimate(self, noisy: Tensor, noise_std: float, shapes: Shapes) -> Tensor:
        """Return the shorter mean."""
        return noisy * self.factor
