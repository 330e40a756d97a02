"""Weights: how contributions enter the sum of their silo."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.population.records import Groups
from fedveil.privacy.claims import Role, Sent
from fedveil.protection.parts import Counts, Totals


class Weights(Enum):
    """The weight of a contribution in its silo's sum. For pairs, the weights of one user sum to at most 1.

    ONE: w = 1 (FedAVG, ULDP-NAIVE, DP-Fed: the server divides by the number of silos or of clients).
    UNIFORM: w_{s,u} = 1/|S| (ULDP-AVG); the share of a silo where the user has no record is lost.
    BY_RECORDS: w_{s,u} = n_{s,u}/N_u (ULDP-AVG-w).
    EQUAL: w_{s,u} = 1/(silos where the user has a record): BY_RECORDS with one record in each.
    """

    ONE = "1"
    UNIFORM = "1/|S|"
    BY_RECORDS = "n_su/N_u"
    EQUAL = "1/(silos of the user)"

    @property
    def by_records(self) -> bool:
        """Whether a weight depends on what its user has elsewhere: how many records, or whether there are any."""
        return self in (Weights.BY_RECORDS, Weights.EQUAL)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse pairs whose weights do not sum to at most 1, and weights of pairs for anything else."""
        pairs = method.contribution.per == "pair"
        if pairs and self is Weights.ONE:
            yield (
                "with weight 1 a user's influence grows with the number of silos she appears in; weights of a user "
                "must sum to at most 1 over the silos (uniform or by records)"
            )
        if not pairs and self is not Weights.ONE:
            yield f"weights {self.value} are those of (silo, user) pairs"

    def sends(self) -> tuple[Sent, ...]:
        """Return the messages by which silos learn the weights in the open: counts go up, totals come back."""
        if not self.by_records:
            return ()
        return Sent(Counts, Role.SERVER), Sent(Totals, Role.SILO)

    def of(self, groups: Groups, n_silos: int, n_users: int) -> Float64[Tensor, " m"]:
        """Return the weight of each contribution."""
        if self is Weights.ONE:
            return torch.ones(len(groups.size), dtype=torch.float64)
        if self is Weights.UNIFORM:
            return torch.full((len(groups.size),), 1.0 / n_silos, dtype=torch.float64)
        counts = np.ones(len(groups)) if self is Weights.EQUAL else groups.size
        totals = np.bincount(groups.user, weights=counts, minlength=n_users)
        return torch.from_numpy(counts / totals[groups.user])
