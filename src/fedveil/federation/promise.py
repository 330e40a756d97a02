"""What a silo charges its users a round, and the weights that this charge was computed for: one value, never apart.

Claim: a silo trains a round only with the weights of which its guarantee speaks: exactly 1/|S| where they are uniform,
1 where they are one, 1 or 0 by the file of main silos that the run names (0 without it), n_su / N_u in [0, 1] from the
totals of this session where they are by records. Enforced by :meth:`Promise.of_round`, which is the one way to the
event that is charged, before anything is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedveil.engine.rounds.setting import Setting
from fedveil.engine.setup import Prepared
from fedveil.federation.errors import RefusalError
from fedveil.methods.claims import Guarantee
from fedveil.population.records import Groups
from fedveil.privacy.events import Event
from fedveil.protection.errors import OwnRecordsError
from fedveil.protection.refusals import Code


@dataclass(frozen=True, kw_only=True, eq=False)
class Promise:
    """The guarantee of a run, as one silo charges it.

    Attributes:
        guarantee: of the method.
        event: of it, what the silo's own ledger counts of a round.
        weights: (m,) of the silo's contributions, for which both hold; None until all users' totals are known.
    """

    guarantee: Guarantee
    event: Event
    weights: Float64[Tensor, " m"] | None

    @classmethod
    def of(cls, prepared: Prepared, event: Event) -> Promise:
        """Return the promise of an experiment, from the method's declaration and no silo's counts."""
        weights, method, population = None, prepared.method, prepared.population
        if not method.shows_counts:
            weights = method.weigh(prepared.setting.cohort.groups, population)
        return cls(guarantee=prepared.guarantee, event=event, weights=weights)

    def by_records(
        self, groups: Groups, scores: Int64[np.ndarray, " m"], totals: Int64[np.ndarray, " users"]
    ) -> Promise:
        """Return the promise for weights m_su / M_u: of records, or of another whole score.

        Args:
            groups: the silo's contributions.
            scores: (m,) of each of them.
            totals: (|U|,) M_u, what the scores of every user sum to over all silos.

        Raises:
            OwnRecordsError: a weight above 1.
        """
        held = totals[groups.user]
        if (held < scores).any():
            raise OwnRecordsError("a user has fewer records over all silos than in this one")
        return replace(self, weights=torch.from_numpy(scores / held))

    def of_round(self, setting: Setting, number: int, *, again: bool) -> Event:
        """Return what a round is charged as, if it is trained with the weights of this promise.

        Args:
            setting: with which it is trained.
            number: of the round.
            again: whether it was charged before.

        Raises:
            RefusalError: other weights, or none yet.
        """
        if self.weights is None or not torch.equal(setting.weights, self.weights):
            raise RefusalError(Code.WEIGHTS)
        return self.guarantee.of_round(self.event, number, again=again)
