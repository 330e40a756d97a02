"""What the server does with the mean update: x <- x + eta_g * mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.stage import Stage, duty


class Optimizer(Stage):
    """What the server does with the mean update; a frozen value."""

    @duty
    def step(self, model: Float32[Tensor, " d"], mean: Float64[Tensor, " d"]) -> Float32[Tensor, " d"]:
        """Return the next global model."""
        raise NotImplementedError


@dataclass(frozen=True)
class ServerSgd(Optimizer):
    """Plain step along the mean update, with the server's own learning rate eta_g."""

    learning_rate: float

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigError(f"method.learning_rate = {self.learning_rate}: must be above 0")

    def step(self, model: Float32[Tensor, " d"], mean: Float64[Tensor, " d"]) -> Float32[Tensor, " d"]:
        """Return the next global model; computed in float64, stored in float32."""
        return (model.to(torch.float64) + self.learning_rate * mean).to(torch.float32)
