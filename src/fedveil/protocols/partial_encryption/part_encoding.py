"""Encode one part of a message under partial encryption: bound, noise, and grid units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from fedveil.crypto.ckks import CkksParameters
from fedveil.privacy.bounds import Bound
from fedveil.privacy.noise.law import NOISE_REACH, DiscreteGaussian, grid_law
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True)
class PartEncoding:
    """Bound, noise and grid of one part of a message (in the clear, or encrypted).

    Attributes:
        bound: l2 bound that is enforced on this part separately; None if the whole message was bounded, or if no
            bound applies.
        noise_std: standard deviation of the noise, in the unit of the update; 0 for no noise.
        noise_grid: grid of the values to which the noise is added, a power of two, in the unit of the update.
        finest: lower limit for the step of the noise's grid, if sums cannot hold finer steps; a power of two, or 0.
        largest: largest absolute value of a number before the noise. A larger number is clipped to it rather than
            refused, because a refusal would disclose the number's size to the server.
    """

    bound: Bound | None = None
    noise_std: float = 0.0
    noise_grid: float = 1.0
    finest: float = 0.0
    largest: float = 1.0

    @property
    def law(self) -> DiscreteGaussian | None:
        """Distribution of the noise; None if the part has no noise."""
        return grid_law(self.noise_std, self.noise_grid, self.finest) if self.noise_std else None

    @property
    def grid(self) -> float:
        """Step of the integers, a power of two, in the unit of the update."""
        return self.noise_grid if self.law is None else self.law.grid

    @property
    def limit(self) -> int:
        """Largest absolute value of an integer of this part, noise included, in grid units."""
        return math.ceil((self.largest + NOISE_REACH * self.noise_std) / self.grid)

    def units(
        self, values: Float64[np.ndarray, " n"], privacy: PrivacyRandomness, *path: str | int
    ) -> Int64[np.ndarray, " n"]:
        """Bound the part, add its noise and round it to its grid.

        Args:
            values: (n,) numbers of the part, in the unit of the update.
            privacy: source of the noise.
            path: name of the noise stream.

        Returns:
            (n,) int64 in grid units.
        """
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
    """Return the finest grid step with which the encrypted sum can hold numbers with their noise.

    Args:
        std: standard deviation of the noise of one number.
        largest: largest absolute value of a number before the noise.
        silos: number of ciphertexts in the sum.

    Raises:
        CryptoError: so many silos that no useful sum fits.
    """
    return (largest + NOISE_REACH * std) / CkksParameters(silos=silos).limit


WHOLE_NUMBERS: Final = PartEncoding(largest=2.0**52)
"""Encoding of numbers that are integers already, without bound and noise."""
