"""One half of a message under partial encryption: its bound, its noise, and the whole numbers that it travels as."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from fedveil.privacy.bounds import Bound
from fedveil.privacy.noise.on_grid import NOISE_REACH, grid_gaussian, grid_law
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True)
class Half:
    """What is done to the numbers of one half of a message.

    Attributes:
        bound: l2 bound that is enforced on the half by itself; None where the whole message was bounded, or nothing is.
        noise_std: standard deviation of its noise, in the unit of the update; 0 for none.
        noise_grid: the grid of what the noise is added to, a power of two.
        largest: the largest absolute value of a number before the noise. A longer number is cut to it: no update is too
            long to be sent, since a refusal would tell the server of it.
    """

    bound: Bound | None = None
    noise_std: float = 0.0
    noise_grid: float = 1.0
    largest: float = 1.0

    @property
    def grid(self) -> float:
        """The step of its whole numbers, a power of two, in the unit of the update."""
        return grid_law(self.noise_std, self.noise_grid).grid if self.noise_std else self.noise_grid

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
        if self.noise_std:
            source = privacy.stream(*path)
            values = values + grid_gaussian(len(values), self.noise_std, self.noise_grid, source)
        return np.rint(values / self.grid).astype(np.int64)


WHOLE_NUMBERS: Final = Half(largest=2.0**52)
"""Numbers that are whole as they are, with no noise."""
