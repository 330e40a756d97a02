"""Interface of a silo's task in a session: the parts that differ between training and releases."""

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
    """Work of a silo in a session.

    Attributes:
        plan: plan of the session.
        whole: event of the whole run in the silo's ledger.
        rounds: number of charges in ``whole``.
    """

    plan: SessionPlan
    whole: Event
    rounds: int

    @abstractmethod
    def event(self, number: int, *, again: bool) -> Event:
        """Return the event that the silo's ledger is charged with for a round.

        Args:
            number: number of the round, from 1.
            again: whether the round was charged before.

        Raises:
            RefusalError: the round would differ from the one that its guarantee describes.
        """

    @abstractmethod
    def workload(
        self,
        number: int,
        start: RoundStartState,
        drawn: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> ChannelInputs:
        """Return the silo's inputs to a round that has been charged, in the form of the protocol.

        Args:
            number: number of the round, from 1.
            start: state at the start of the round.
            drawn: (|U|,) the sampled users; None: all users, or the sample is unknown.
            before: result of :meth:`state_after`.
        """

    def scores(self) -> Int64[np.ndarray, " users"]:
        """Return the scores of the users' records in this silo, (|U|,) int64, for public weights by records."""
        raise RefusalError(Code.SHAPE)

    def compute_weights(self, totals: Int64[np.ndarray, " users"]) -> None:
        """Compute the weights from the users' total scores over all silos, (|U|,) int64."""
        raise RefusalError(Code.SHAPE)

    @abstractmethod
    def check_statement(self, closing: Finalize, own: SiloCharges) -> None:
        """Check that the statement of a run that ends in this session is the one that its terms give.

        Args:
            closing: the coordinator's message with the statement.
            own: charges of the run in the silo's ledger.

        Raises:
            RefusalError: the statement differs.
        """

    def state_after(self, last: RoundRecord | None) -> Tensors:
        """Return the state that the silo must carry into the next round.

        It is empty if the coordinator sends all of the state.

        Args:
            last: record of the silo's last contribution, including the state that this method returned for it.

        Raises:
            RefusalError: the next round does not continue from the last one.
        """
        return {}

    def step(self, record: RoundRecord, result: Any) -> tuple[Tensors, dict[str, Tensor]]:
        """Make the server's step, if only silos have the models; return the state to persist, and the model."""
        raise RefusalError(Code.SHAPE)
