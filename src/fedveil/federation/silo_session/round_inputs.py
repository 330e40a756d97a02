"""Instructions that a silo received ahead of a round's task, and the round context derived from them."""

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
from fedveil.methods.method import with_clip
from fedveil.protocols.field_codecs import Writer
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import (
    GlobalModel,
    RoundClip,
    SampledFlag,
    SampledUsers,
    SessionMessage,
)
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import Prepared

_P = TypeVar("_P", bound=SessionMessage)


class RoundInstructions:
    """Parts that a silo received ahead of the task of a round: at most one part of each kind."""

    def __init__(self) -> None:
        self._parts: dict[type[SessionMessage], SessionMessage] = {}

    def add(self, part: SessionMessage) -> None:
        """Store a part until the task arrives; the grammar admits one part of each kind."""
        self._parts[type(part)] = part

    def get(self, kind: type[_P]) -> _P | None:
        """Return the part of a kind; None if none was received."""
        found = self._parts.get(kind)
        assert found is None or isinstance(found, kind)
        return found

    def encode(self) -> bytes:
        """Return the bytes of all parts, in the order of their kinds."""
        ordered = sorted(self._parts.values(), key=lambda part: part.kind)
        return b"".join(Writer().number(part.kind, 1).block(part.encode()).bytes() for part in ordered)

    def sampled_users(self, plan: SessionPlan, silo: int) -> Bool[np.ndarray, " users"] | None:
        """Return the sampled users as far as disclosed, (|U|,) bool; None if all, or if undisclosed.

        Raises:
            RefusalError: the sample has another number of users.
        """
        users = plan.n_users
        if plan.method.contribution.drawn_alone:  # a silo that is one client learns only its own flag
            mask, own = np.zeros(users, dtype=np.bool_), self.get(SampledFlag)
            mask[silo] = own is None or own.drawn
            return mask
        sampled = self.get(SampledUsers)
        if sampled is not None and len(sampled.users) != users:
            raise RefusalError(Code.USERS, len(sampled.users), users)
        return None if sampled is None else sampled.users

    def start(
        self, plan: SessionPlan, number: int, own: Float32[np.ndarray, " d"] | None = None
    ) -> RoundStartState:
        """Return the state at the start of the round; ``own`` is the model, if only the silos have it.

        The guarantee depends on neither model nor clip. Updates are measured in units of the clip, and the bound in
        these units is constant.

        Raises:
            RefusalError: the model has another length, or the clip cannot occur in this round.
        """
        model, clip = self.get(GlobalModel), self.get(RoundClip)
        if model is not None and len(model.values) != plan.dimension:
            raise RefusalError(Code.PARAMETERS, len(model.values), plan.dimension)
        if clip is not None and not plan.method.bound.possible(clip.length, number):
            shown = clip.length if math.isfinite(clip.length) else 0.0
            raise RefusalError(Code.CLIP_MOVED, shown, number)
        values = own if model is None else model.values
        assert values is not None, "a message with a task has the model, unless the silos have it"
        return RoundStartState(model=values, clip=None if clip is None else clip.length)


@dataclass(frozen=True, kw_only=True)
class SiloRoundContext(RoundContext):
    """Round context of one silo, with the sample that the silo received.

    Attributes:
        instructions: (|U|,) the sampled users; None: all users, or the sample is unknown.
    """

    instructions: Bool[np.ndarray, " users"] | None

    @classmethod
    def from_instructions(
        cls,
        prepared: Prepared,
        number: int,
        start: RoundStartState,
        sampled: Bool[np.ndarray, " users"] | None,
        privacy: PrivacyRandomness,
    ) -> SiloRoundContext:
        """Create the context of a round from the silo's instructions.

        Args:
            prepared: the experiment as the silo holds it.
            number: number of the round, from 1.
            start: model and clip of the round.
            sampled: (|U|,) the sampled users.
            privacy: randomness of the silo.
        """
        method = prepared.method if start.clip is None else with_clip(prepared.method, start.clip)
        return cls(
            setting=replace(prepared.setting, method=method),
            model=as_tensor(start.model),
            round_number=number,
            experiment=ExperimentRandomness(prepared.experiment.seed),
            privacy=privacy,
            measured=False,
            instructions=sampled,
        )

    def draw(self, attempt: int) -> Bool[np.ndarray, " users"] | None:
        """Return the sampled users that the silo received; it samples nothing itself."""
        return self.instructions


def as_tensor(values: np.ndarray) -> Tensor:
    """Copy an array into a tensor: an array that views a received message is read-only."""
    return torch.from_numpy(values.copy())
