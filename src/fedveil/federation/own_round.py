"""What a silo of a federation computes of a round by itself: its training, its bound, its noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64

from fedveil.engine.setup import Prepared, privacy_randomness
from fedveil.engine.silo_side import SiloMessage, client_message, local_sums, members_of, silo_message
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.contributions import ClientContribution
from fedveil.protection.parts import DrawnUsers, Model, OwnDraw, Part, Task
from fedveil.protection.wire import Writer
from fedveil.randomness import ExperimentRandomness

_P = TypeVar("_P", bound=Part)


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a silo is asked for in a round.

    Attributes:
        round: counts from 1.
        model: (d,) float32, the global model to train from; empty where silos keep their own.
        drawn: (|U|,) who of the silo's users takes part, as far as it was told; None: everybody, or nobody is told.
    """

    round: int
    model: Float32[np.ndarray, " d"]
    drawn: Bool[np.ndarray, " users"] | None = None

    @classmethod
    def of(cls, task: Task, told: Told, silo: int, n_users: int) -> Asked:
        """Return what the parts of a letter ask of a silo."""
        model, drawn = told.get(Model), None
        if (all_users := told.get(DrawnUsers)) is not None:
            drawn = all_users.users
        elif (own := told.get(OwnDraw)) is not None:
            drawn = np.zeros(n_users, dtype=np.bool_)
            drawn[silo] = own.drawn
        values = np.zeros(0, dtype=np.float32) if model is None else model.values
        return cls(round=task.round, model=values, drawn=drawn)


class Told:
    """What a silo was told before the task of a round: at most one part of each kind."""

    def __init__(self) -> None:
        self._parts: dict[type[Part], Part] = {}

    def add(self, part: Part) -> None:
        """Keep a part until the task: one of each kind, as the grammar of letters has them."""
        self._parts[type(part)] = part

    def get(self, kind: type[_P]) -> _P | None:
        """Return the part of a kind; None if there was none."""
        found = self._parts.get(kind)
        assert found is None or isinstance(found, kind)
        return found

    def encode(self) -> bytes:
        """Return the bytes of all of it, by kind."""
        ordered = sorted(self._parts.values(), key=lambda part: part.kind)
        return b"".join(Writer().number(part.kind, 1).block(part.encode()).bytes() for part in ordered)


@dataclass(frozen=True, kw_only=True)
class OwnRound:
    """One silo's part of a round, before any protocol.

    Attributes:
        prepared: the experiment as the silo holds it.
        silo: its number.
        attempt: how often the round was charged before; every attempt has noise of its own.
    """

    prepared: Prepared
    silo: int
    attempt: int = 0

    def total(self, task: Asked) -> Float64[np.ndarray, " d"]:
        """Train, and return the silo's bounded, weighted sum; it carries no noise."""
        setting = self.prepared.setting
        groups, clients = setting.cohort.groups, isinstance(setting.method.contribution, ClientContribution)
        together = clients and setting.cohort.n_silos == 1  # in one process their updates are summed at once
        own = (groups.user if together else groups.silo) == self.silo
        members = members_of(groups, task.drawn)
        members = members[torch.from_numpy(own)[members]]
        experiment = ExperimentRandomness(self.prepared.experiment.seed)
        sums = local_sums(setting, torch.from_numpy(task.model), members, task.round, experiment)
        total: np.ndarray = sums.total[0 if together else self.silo].cpu().numpy()
        return total

    def message(self, task: Asked) -> SiloMessage:
        """Train, and return what the method's channel makes of the sum, or of the client's update."""
        setting, privacy = self.prepared.setting, privacy_randomness(self.prepared.experiment)
        setting = replace(setting, method=setting.method.at_round(task.round))
        if isinstance(setting.method.channel, ClientMessages):
            return client_message(
                setting,
                torch.from_numpy(task.model),
                client=self.silo,
                round_number=task.round,
                experiment=ExperimentRandomness(self.prepared.experiment.seed),
                privacy=privacy,
            )
        return silo_message(
            setting.method,
            self.total(task),
            n_silos=setting.cohort.n_silos,
            silo=self.silo,
            round_number=task.round,
            privacy=privacy,
            attempt=self.attempt,
        )
