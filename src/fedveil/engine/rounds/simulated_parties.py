"""The parties of a simulated run, all in this process: the driver that plays them, and what they contribute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.engine.rounds.past_sums import PastSums
from fedveil.engine.rounds.setting import Setting
from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import Workload, workload
from fedveil.methods.no_protection import open_sums
from fedveil.protection.driver import Driver
from fedveil.protection.protocol import Agreement
from fedveil.protection.transcript import Transcript


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedParties:
    """All parties of a run; their keys serve no other.

    Attributes:
        driver: plays the protocol; it lists every message where the method has a protection.
        initial: (d,) the model before the first round.
        past: the silos' own sums of the rounds before.
    """

    driver: Driver[Any, Any]
    initial: Float32[Tensor, " d"]
    past: PastSums = field(default_factory=PastSums)

    @property
    def agreed(self) -> Agreement[Any, Any]:
        """What they agree on."""
        return self.driver.agreement

    @property
    def transcript(self) -> Transcript | None:
        """What has passed between the parties; None where everything is in the open or sealed for the server."""
        return self.driver.transcript

    def workload(self, turn: Turn) -> Workload:
        """Return what the parties contribute to a round."""
        return workload(replace(turn, past=self.past), self.agreed, self.initial)

    @classmethod
    def in_the_open(cls, setting: Setting) -> SimulatedParties:
        """Return parties without a protection, whatever the method's: vectors as they are, or a channel's bytes sealed.

        Clients without messages of their own send one, the sum of all: exact sums on a grid make it the same bits.
        """
        clients = setting.n_users if setting.method.channel.by_clients else setting.cohort.n_silos
        dimension = sum(math.prod(shape) for shape in setting.shapes)
        length = dimension + setting.method.bound.extra
        agreed = open_sums(setting.method, clients=clients, length=length)
        return cls(driver=Driver(agreed), initial=torch.zeros(dimension))
