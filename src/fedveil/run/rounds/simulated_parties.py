"""The parties of a simulated run, all in this process: the driver that plays them, and what they contribute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

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
    """All parties of a run; their keys serve no other.

    Attributes:
        driver: plays the protocol; it lists every message where the method has a protection.
        initial: (d,) the model before the first round.
        past: the silos' own sums of the rounds before.
    """

    driver: LocalDriver[Any, Any]
    initial: Float32[Tensor, " d"]
    past: SumHistory = field(default_factory=SumHistory)

    @property
    def protocol_spec(self) -> ProtocolSpec[Any, Any]:
        """What they agree on."""
        return self.driver.agreement

    @property
    def transcript(self) -> Transcript | None:
        """What has passed between the parties; None where everything is in the open or sealed for the server."""
        return self.driver.transcript

    def workload(self, turn: RoundContext) -> RoundInputs:
        """Return what the parties contribute to a round."""
        return make_round_inputs(replace(turn, past=self.past), self.protocol_spec, self.initial)

    @classmethod
    def in_the_open(cls, setting: TrainingSetup) -> SimulatedParties:
        """Return parties without a protection, whatever the method's: vectors as they are, or a channel's bytes sealed.

        Clients without messages of their own send one, the sum of all: exact sums on a grid make it the same bits.
        """
        clients = setting.n_users if setting.method.channel.by_clients else setting.cohort.n_silos
        dimension = sum(math.prod(shape) for shape in setting.shapes)
        length = dimension + setting.method.bound.extra
        agreed = open_sums(setting.method, clients=clients, length=length)
        return cls(driver=LocalDriver(agreed), initial=torch.zeros(dimension))
