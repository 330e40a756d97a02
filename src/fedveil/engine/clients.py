"""The training of clients that send messages of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.local.trainer import Cohort, Progress, Trainer
from fedveil.privacy.bounds import Bound
from fedveil.randomness import ExperimentRandomness


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientTraining:
    """How clients train in a round: all that does not depend on who was drawn."""

    trainer: Trainer
    cohort: Cohort
    bound: Bound
    model: Float32[Tensor, " d"]
    round_number: int
    experiment: ExperimentRandomness
    progress: Progress | None = None

    def updates(
        self, members: Int64[Tensor, " m"]
    ) -> tuple[Float64[np.ndarray, "m d"], Float64[Tensor, " m"]]:
        """Return the bounded update of each member, and its norm before clipping."""
        sums = self.trainer.sums(
            self.model,
            self.cohort.apart(members),
            members,
            torch.ones(len(members), dtype=torch.float64),
            self.bound,
            self.experiment,
            ("round", self.round_number),
        )
        return sums.total.cpu().numpy(), sums.norms.cpu()
