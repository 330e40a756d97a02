"""Simulate all parties of a run in this process: the protocol driver and the clients' inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.methods.capabilities import ClientSender
from fedveil.methods.method import message_length
from fedveil.methods.no_protection import open_sums
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.transcript import Transcript
from fedveil.run.rounds.client_inputs import RoundInputs, make_round_inputs
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.rounds.sum_history import SumHistory
from fedveil.run.rounds.training_setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedParties:
    """All parties of one run; their keys serve no other run.

    Attributes:
        driver: plays the protocol, and lists every message if the method has a protection.
        initial: (d,) the model before the first round.
        past: the silos' sums of earlier rounds.
    """

    driver: LocalDriver[Any, Any]
    initial: Float32[Tensor, " d"]
    past: SumHistory = field(default_factory=SumHistory)

    @property
    def protocol_spec(self) -> ProtocolSpec[Any, Any]:
        """The public parameters that all parties share."""
        return self.driver.agreement

    @property
    def transcript(self) -> Transcript | None:
        """The list of all protocol messages; None for plaintext sums and messages sealed for the server."""
        return self.driver.transcript

    def workload(self, turn: RoundContext) -> RoundInputs:
        """Return the inputs of all parties to a round."""
        return make_round_inputs(replace(turn, past=self.past), self.protocol_spec, self.initial)

    @classmethod
    def in_the_open(cls, setting: TrainingSetup) -> SimulatedParties:
        """Return parties without a protection, even if the method has one.

        They send plaintext vectors, or a channel's bytes sealed for the server. Clients without their own messages
        send one message, the sum of all clients. Sums on a grid are exact, so the result has the same bits as the
        protected sum.

        Args:
            setting: the method and population of the run.
        """
        clients = (
            setting.n_users if isinstance(setting.method.channel, ClientSender) else setting.cohort.n_silos
        )
        dimension = sum(math.prod(shape) for shape in setting.shapes)
        length = message_length(setting.method, dimension)
        agreed = open_sums(setting.method, clients=clients, length=length)
        return cls(driver=LocalDriver(agreed), initial=torch.zeros(dimension))
