"""What a silo was told before the task of a round, and what the round then begins with for it alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from fedveil.federation.errors import RefusalError
from fedveil.federation.session_plan import RoundStartState, SessionPlan
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import (
    GlobalModel,
    RoundClip,
    SampledFlag,
    SampledUsers,
    SessionMessage,
)
from fedveil.protocols.wire import Writer
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import Prepared

_P = TypeVar("_P", bound=SessionMessage)


class RoundInstructions:
    """What a silo was told before the task of a round: at most one part of each kind."""

    def __init__(self) -> None:
        self._parts: dict[type[SessionMessage], SessionMessage] = {}

    def add(self, part: SessionMessage) -> None:
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

    def sampled_users(self, plan: SessionPlan, silo: int) -> Bool[np.ndarray, " users"] | None:
        """Return who of a silo's users takes part, as far as it was told; None: everybody, or nobody is told.

        Raises:
            RefusalError: a draw of another number of users.
        """
        users = plan.n_users
        if plan.method.contribution.drawn_alone:  # a silo that is one client knows of itself alone
            mask, own = np.zeros(users, dtype=np.bool_), self.get(SampledFlag)
            mask[silo] = own is None or own.drawn
            return mask
        told = self.get(SampledUsers)
        if told is not None and len(told.users) != users:
            raise RefusalError(Code.USERS, len(told.users), users)
        return None if told is None else told.users

    def start(
        self, plan: SessionPlan, number: int, own: Float32[np.ndarray, " d"] | None = None
    ) -> RoundStartState:
        """Return what the round of this number begins with; ``own`` is the model where the silos alone have it.

        No guarantee depends on either: an update is as long as the clip allows in units of the clip, whatever it is.

        Raises:
            RefusalError: a model of another length, or a clip that no course of it comes to.
        """
        model, clip = self.get(GlobalModel), self.get(RoundClip)
        if model is not None and len(model.values) != plan.dimension:
            raise RefusalError(Code.PARAMETERS, len(model.values), plan.dimension)
        if clip is not None and not plan.method.bound.possible(clip.length, number):
            shown = clip.length if math.isfinite(clip.length) else 0.0
            raise RefusalError(Code.CLIP_MOVED, shown, number)
        values = own if model is None else model.values
        assert values is not None, "a letter with a task has the model, unless the silos have it"
        return RoundStartState(model=values, clip=None if clip is None else clip.length)


@dataclass(frozen=True, kw_only=True)
class SiloRoundContext(RoundContext):
    """What a round begins with for one silo, which is told who takes part.

    Attributes:
        told: (|U|,) who of its users takes part; None: all of them, or nobody is told.
    """

    instructions: Bool[np.ndarray, " users"] | None

    @classmethod
    def from_instructions(
        cls,
        prepared: Prepared,
        number: int,
        start: RoundStartState,
        told: Bool[np.ndarray, " users"] | None,
        privacy: PrivacyRandomness,
    ) -> SiloRoundContext:
        """Return what a round begins with.

        Args:
            prepared: the experiment as the silo holds it.
            number: of the round, from 1.
            start: its model and clip.
            told: who takes part.
            privacy: the silo's own randomness.
        """
        method = prepared.method if start.clip is None else prepared.method.clipped_to(start.clip)
        return cls(
            setting=replace(prepared.setting, method=method),
            model=as_tensor(start.model),
            round_number=number,
            experiment=ExperimentRandomness(prepared.experiment.seed),
            privacy=privacy,
            measured=False,
            instructions=told,
        )

    def draw(self, attempt: int) -> Bool[np.ndarray, " users"] | None:
        """Return who takes part, as the silo was told."""
        return self.instructions


def as_tensor(values: np.ndarray) -> Tensor:
    """Return numbers as a tensor of its own: what was read of a letter cannot be written to."""
    return torch.from_numpy(values.copy())
