"""A server optimizer with state: what it remembers is saved with every checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.config_keys import Fraction, Positive
from fedveil.training.server.optimizers import Optimizer, State


@dataclass(frozen=True, kw_only=True)
class SignMomentum(Optimizer):
    """Steps by the signs of a moving average: u <- (1 - rate) u + rate mean, x <- x + learning_rate sign(u).

    Attributes:
        learning_rate: length of a step in every coordinate.
        rate: weight of the newest mean.
    """

    learning_rate: Positive
    rate: Fraction = 0.1

    def init(self, model: Tensor) -> State:
        """Return u = 0."""
        return {"average": torch.zeros(len(model), dtype=torch.float64)}

    def step(self, model: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the next model and average."""
        average = (1 - self.rate) * state["average"] + self.rate * mean
        return (model.double() + self.learning_rate * average.sign()).float(), {"average": average}
