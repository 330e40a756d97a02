"""The parties of a simulated run, all in this process: the driver that plays them, and what they contribute."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.engine.rounds.agreed import Agreed, OpenRange
from fedveil.engine.rounds.past_sums import PastSums
from fedveil.engine.rounds.setting import Setting
from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import Workload
from fedveil.protection.driver import Driver
from fedveil.protection.transcript import Transcript
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True, eq=False)
class Parties:
    """All parties of a run; their keys serve no other.

    Attributes:
        driver: plays the protocol; it lists every message where the method has a protection.
        workload: what the parties contribute to a round.
    """

    driver: Driver[Any, Any]
    workload: Callable[[Turn], Workload]

    @property
    def transcript(self) -> Transcript | None:
        """What has passed between the parties; None where everything is in the open or sealed for the server."""
        return self.driver.transcript

    @classmethod
    def of(
        cls,
        agreed: Agreed,
        initial: Float32[Tensor, " d"],
        privacy: PrivacyRandomness,
        kinds: Collection[type] | None = None,
        transcript: Transcript | None = None,
    ) -> Parties:
        """Return the parties of a run.

        Args:
            agreed: what they agree on.
            initial: (d,) the model before the first round.
            privacy: of all of them.
            kinds: the messages that the method lists; None: any.
            transcript: where every message is listed; None lists none.
        """
        driver, past = Driver(agreed.protocol(privacy), transcript, kinds), PastSums()
        return cls(driver=driver, workload=lambda turn: agreed.workload(replace(turn, past=past), initial))

    @classmethod
    def in_the_open(cls, setting: Setting) -> Parties:
        """Return parties without a protection, whatever the method's: vectors as they are, or a channel's bytes sealed.

        Clients without messages of their own send one, the sum of all: exact sums on a grid make it the same bits.
        """
        clients = setting.n_users if setting.method.channel.by_clients else setting.cohort.n_silos
        length = sum(math.prod(shape) for shape in setting.shapes) + setting.method.bound.extra
        agreed = OpenRange(method=setting.method, clients=clients, length=length)
        return cls.of(agreed, torch.zeros(length), PrivacyRandomness.system())
