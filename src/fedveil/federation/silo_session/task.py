"""What a silo does in a session beside talking: it weighs, charges and gives, each as what is played asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor

from fedveil.federation.errors import RefusalError
from fedveil.federation.session_plan import RoundStartState, SessionPlan
from fedveil.federation.silo_session.statement_check import SiloCharges
from fedveil.federation.store import RoundRecord, Tensors
from fedveil.privacy.events import Event
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Finalize
from fedveil.run.rounds.client_inputs import ChannelInputs


class SiloTask(ABC):
    """A silo's work in a session.

    Attributes:
        plan: what is played.
        whole: what the silo's ledger would count of the whole run.
        rounds: how many charges that is.
    """

    plan: SessionPlan
    whole: Event
    rounds: int

    @abstractmethod
    def event(self, number: int, *, again: bool) -> Event:
        """Return what the silo's own ledger is charged with for a round, which may have been charged before.

        Raises:
            RefusalError: the round would not be what its guarantee speaks of.
        """

    @abstractmethod
    def workload(
        self,
        number: int,
        start: RoundStartState,
        drawn: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> ChannelInputs:
        """Return what the silo gives to a round, as the protocol takes it; it has been charged.

        Args:
            number: of the round, from 1.
            start: of the round.
            drawn: (|U|,) who of its users takes part; None: all of them, or nobody is told.
            before: what :meth:`state_after` returned.
        """

    def scores(self) -> Int64[np.ndarray, " users"]:
        """Return what weighs every user's records here, where weights are by records in the open."""
        raise RefusalError(Code.SHAPE)

    def compute_weights(self, totals: Int64[np.ndarray, " users"]) -> None:
        """Take the weights that follow from what the scores of every user sum to over all silos."""
        raise RefusalError(Code.SHAPE)

    @abstractmethod
    def check_statement(self, closing: Finalize, own: SiloCharges) -> None:
        """Return if the run, which ends in this session, states what its terms give.

        Args:
            closing: what the coordinator says at the end.
            own: what the silo's ledger shows of the run.

        Raises:
            RefusalError: another statement.
        """

    def state_after(self, last: RoundRecord | None) -> Tensors:
        """Return what a silo itself has to know of the rounds before the next one; nothing where it is told all.

        Args:
            last: the round that it gave something to before, with what this returned ahead of it and how it began.

        Raises:
            RefusalError: the next round does not go on from that one.
        """
        return {}

    def step(self, record: RoundRecord, result: Any) -> tuple[Tensors, dict[str, Tensor]]:
        """Make the server's step, where the silos alone have the models; return what to keep, and the model."""
        raise RefusalError(Code.SHAPE)
