"""Plan of one session, known to all its parties, and the interface of the coordinator's rounds.

A run consists of rounds of training, releases of statistics, or both in sequence. Every part has its own sessions of
one kind: rounds of one method under one protocol. Coordinator and silo therefore run the same code for every part.
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
    """Content of a session, as all its parties know it.

    Attributes:
        method: the composition of stages.
        protocol_spec: public parameters of the protocol; a silo's contains its own counts.
        rounds: number of rounds.
        n_users: |U|.
        dimension: number of parameters of the model that the silos receive; 0 for a release without a model.
        privacy: the party's own source of noise.
        phase: the part of the run; None: the run is training without releases.
    """

    method: Method
    protocol_spec: ProtocolSpec[Any, Any]
    rounds: int
    n_users: int
    dimension: int
    privacy: PrivacyRandomness
    phase: RunPart | None = None

    def sends(self) -> tuple[Sent, ...]:
        """Return every message of a session with its receivers.

        The `RunPart` counts as sent to silos. The guarantees of earlier releases cover the released numbers in it.
        """
        return (*self.method.sends(), *(() if self.phase is None else (Sent(RunPart, Role.SILO),)))


MODEL: Final = "model"
UNIT: Final = "unit"
"""Names, in a silo's record of a round, of the round's model and of the unit of its messages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundStartState:
    """State at the start of a round, as sent to the silos; computed from earlier releases only.

    Attributes:
        model: (d,) float32 model; d = 0 for a release without a model.
        clip: C_t; None if the clip is constant.
    """

    model: Float32[np.ndarray, " d"]
    clip: float | None = None

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors that a silo persists: the model, and the unit of the messages."""
        return {MODEL: self.model, UNIT: np.array([1.0 if self.clip is None else self.clip])}


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleDraw:
    """Sample of the users in one attempt at a round.

    Attributes:
        users: (|U|,) the sampled users; None if all users take part, or if no party knows the sample.
        commitment: SHA-256 of a random number and the sample. It shows that a repeated attempt has the same sample.
    """

    users: Bool[np.ndarray, " users"] | None = None
    commitment: bytes = b""

    def messages_for(self, silo: int, kinds: frozenset[type], start: RoundStartState) -> list[SessionMessage]:
        """Return the messages to a silo ahead of its task: sample (as far as disclosed), clip and model.

        Args:
            silo: number of the silo.
            kinds: kinds of messages that the method sends.
            start: state at the start of the round.
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
        """Reason of an early end; None if the part is complete."""
        ...


EndingT = TypeVar("EndingT", bound=Ending, covariant=True)


class CoordinatorRounds(Protocol[EndingT]):
    """Rounds of a session in the coordinator's run folder: charged, sampled and released, in this order."""

    @property
    def plan(self) -> SessionPlan:
        """Plan of the session."""
        ...

    @property
    def number(self) -> int:
        """Number of the next round, from 1."""
        ...

    @property
    def has_rounds_left(self) -> bool:
        """Whether a round remains."""
        ...

    @property
    def start(self) -> RoundStartState:
        """State at the start of the next round, as sent to the silos."""
        ...

    def stop_reason(self, repeats: bool) -> str | None:
        """Return why an attempt at the round may not begin; None if it may.

        Args:
            repeats: whether a repeated attempt is the same release; else it costs another charge.
        """
        ...

    def begin(self, repeats: bool) -> SampleDraw:
        """Charge an attempt at the round if a charge is due, and sample the users."""
        ...

    def release(self, total: Float64[np.ndarray, " d"], summed: int) -> None:
        """Persist the result of a sum over ``summed`` silos.

        The round counts as released after this call, and not before.
        """
        ...

    def pass_on(self, summed: int) -> None:
        """Persist the end of a round whose model only the silos have."""
        ...

    def closing(self) -> list[SessionMessage]:
        """Return the messages that the silos sign once the part is concluded; empty if the run continues."""
        ...

    def conclude(self, reason: str | None, *, has_model: bool) -> EndingT:
        """Write the final files of the part, and close."""
        ...

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        ...
