"""One half of a message under partial encryption: its bound, its noise, and the whole numbers that it travels as."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from fedveil.crypto.ckks import CkksParameters
from fedveil.privacy.bounds import Bound
from fedveil.privacy.noise.discrete_gaussian import DiscreteGaussian
from fedveil.privacy.noise.on_grid import NOISE_REACH, grid_law
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True)
class PartEncoding:
    """What is done to the numbers of one half of a message.

    Attributes:
        bound: l2 bound that is enforced on the half by itself; None where the whole message was bounded, or nothing is.
        noise_std: standard deviation of its noise, in the unit of the update; 0 for none.
        noise_grid: the grid of what the noise is added to, a power of two.
        finest: the noise's grid is no finer, where sums have no room for it; a power of two, or 0.
        largest: the largest absolute value of a number before the noise. A longer number is cut to it: no update is too
            long to be sent, since a refusal would tell the server of it.
    """

    bound: Bound | None = None
    noise_std: float = 0.0
    noise_grid: float = 1.0
    finest: float = 0.0
    largest: float = 1.0

    @property
    def law(self) -> DiscreteGaussian | None:
        """The law of its noise; None without."""
        return grid_law(self.noise_std, self.noise_grid, self.finest) if self.noise_std else None

    @property
    def grid(self) -> float:
        """The step of its whole numbers, a power of two, in the unit of the update."""
        return self.noise_grid if self.law is None else self.law.grid

    @property
    def limit(self) -> int:
        """The largest absolute value of one of its whole numbers."""
        return math.ceil((self.largest + NOISE_REACH * self.noise_std) / self.grid)

    def units(
        self, values: Float64[np.ndarray, " n"], privacy: PrivacyRandomness, *path: str | int
    ) -> Int64[np.ndarray, " n"]:
        """Return the half as whole numbers of its grid: bounded, with noise of this path."""
        if len(values) == 0:
            return np.zeros(0, dtype=np.int64)
        if self.bound is not None:
            row = torch.from_numpy(values.astype(np.float32))[None]
            weight = torch.ones(1, dtype=torch.float64)
            values = self.bound.quantize_(row, self.bound.norms(row), weight)[0].double().numpy()
            values = values * self.bound.grid
        values = np.clip(values, -self.largest, self.largest)
        if self.law is not None:
            values = values + self.law.sample((len(values),), privacy.stream(*path))
        return np.rint(values / self.grid).astype(np.int64)


def finest_grid_step(std: float, largest: float, silos: int) -> float:
    """Return the finest step with which encrypted sums have room for numbers with noise.

    Args:
        std: of the noise of one number.
        largest: the largest absolute value of a number before the noise.
        silos: how many ciphertexts are added up.

    Raises:
        CryptoError: so many silos that no useful sum fits.
    """
    return (largest + NOISE_REACH * std) / CkksParameters(silos=silos).limit


WHOLE_NUMBERS: Final = PartEncoding(largest=2.0**52)
"""Numbers that are whole as they are, with no noise."""
