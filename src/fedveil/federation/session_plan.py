"""What a session plays, as all its parties know it, and what a coordinator keeps of it.

A run is rounds of training, releases of statistics, or both in a row; every part of it has sessions of its own, of one
kind: rounds of one method, under one agreement. So neither the coordinator nor a silo asks what is played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Float64

from fedveil.methods.method import Method
from fedveil.privacy.claims import Role, Sent
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.session_messages import (
    GlobalModel,
    RoundClip,
    RunPart,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
)
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionPlan:
    """What a session plays, as all its parties know it.

    Attributes:
        method: the composition.
        agreed: what the parties agree on; a silo's has its own counts.
        rounds: how many there are.
        n_users: |U|.
        dimension: parameters of the model that silos are sent; 0 where a release reads none.
        privacy: the party's own source of noise.
        phase: which part of a run it is; None: all of one that trains and does nothing else.
    """

    method: Method
    protocol_spec: ProtocolSpec[Any, Any]
    rounds: int
    n_users: int
    dimension: int
    privacy: PrivacyRandomness
    phase: RunPart | None = None

    def sends(self) -> tuple[Sent, ...]:
        """Return every message of a session, and who reads it.

        What a phase tells of earlier releases is what their own guarantees are about.
        """
        return (*self.method.sends(), *(() if self.phase is None else (Sent(RunPart, Role.SILO),)))


MODEL: Final = "model"
UNIT: Final = "unit"
"""The names of a round's model, and of the unit of its messages, in what a silo keeps of the round."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundStartState:
    """What silos are told that a round begins with: all of it follows what was released before.

    Attributes:
        model: (d,) the model; of no parameters where a release reads none.
        clip: C_t; None where the clip does not move.
    """

    model: Float32[np.ndarray, " d"]
    clip: float | None = None

    def tensors(self) -> dict[str, np.ndarray]:
        """Return what a silo keeps of it: the model, and the unit of the messages."""
        return {MODEL: self.model, UNIT: np.array([1.0 if self.clip is None else self.clip])}


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleDraw:
    """Who takes part in an attempt at a round.

    Attributes:
        users: (|U|,) who does; None where everybody does, or where nobody knows.
        commitment: SHA-256 of a random number and of the users: an attempt that is asked for again is the same.
    """

    users: Bool[np.ndarray, " users"] | None = None
    commitment: bytes = b""

    def messages_for(self, silo: int, kinds: frozenset[type], start: RoundStartState) -> list[SessionMessage]:
        """Return what a silo is told ahead of its task: who takes part, as far as it is told, and the start.

        Args:
            silo: the silo.
            kinds: what the method sends.
            start: of the round.
        """
        found: dict[type[SessionMessage], Callable[[], SessionMessage]] = {}
        if (users := self.users) is not None:
            found = {
                SamplingCommitment: lambda: SamplingCommitment(commitment=self.commitment),
                SampledFlag: lambda: SampledFlag(drawn=bool(users[silo])),
                SampledUsers: lambda: SampledUsers(users=users),
            }
        if (clip := start.clip) is not None:
            found[RoundClip] = lambda: RoundClip(length=clip)
        found[GlobalModel] = lambda: GlobalModel(values=start.model)
        return [build() for kind, build in found.items() if kind in kinds]


EVERYBODY = SampleDraw()


class Ending(Protocol):
    """How a part of a run ended."""

    @property
    def stopped(self) -> str | None:
        """Why it ended early; None if it did not."""
        ...


EndingT = TypeVar("EndingT", bound=Ending, covariant=True)


class CoordinatorRounds(Protocol[EndingT]):
    """The rounds of a session as the coordinator's folder has them: charged, drawn and released, in this order."""

    @property
    def plan(self) -> SessionPlan:
        """What is played."""
        ...

    @property
    def number(self) -> int:
        """The round to play, from 1."""
        ...

    @property
    def has_rounds_left(self) -> bool:
        """Whether there is a round to play."""
        ...

    @property
    def start(self) -> RoundStartState:
        """What silos are told that the round begins with."""
        ...

    def stop_reason(self, repeats: bool) -> str | None:
        """Return why an attempt at the round may not begin, None if it may.

        Args:
            repeats: whether an attempt that is asked for again is the same release; else it costs another charge.
        """
        ...

    def begin(self, repeats: bool) -> SampleDraw:
        """Charge an attempt at the round where it is due, and draw who takes part."""
        ...

    def release(self, total: Float64[np.ndarray, " d"], summed: int) -> None:
        """Put on the disk what follows from a sum of so many silos: then, and not before, it counts as released."""
        ...

    def pass_on(self, summed: int) -> None:
        """Put on the disk that a round has ended whose model the silos alone have."""
        ...

    def closing(self) -> list[SessionMessage]:
        """Return what silos are asked to sign once it is concluded; nothing where the run can go on."""
        ...

    def conclude(self, reason: str | None, *, has_model: bool) -> EndingT:
        """Write what is left behind, and close."""
        ...

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        ...
