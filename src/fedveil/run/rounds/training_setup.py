"""Hold a method applied to a population: everything that stays the same from round to round."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor

from fedveil.methods.method import Method
from fedveil.training.trainer import Cohort, Trainer


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSetup:
    """A method applied to a population, the same for every round.

    Attributes:
        method: the composition, as in round 1.
        trainer: executes the method's local training.
        cohort: all contributions with their records.
        weights: (m,) float64 weights of the contributions in their silos' sums.
        n_users: |U|.
        shapes: shapes of the model's parameters.
    """

    method: Method
    trainer: Trainer
    cohort: Cohort
    weights: Float64[Tensor, " m"]
    n_users: int
    shapes: tuple[tuple[int, ...], ...]
