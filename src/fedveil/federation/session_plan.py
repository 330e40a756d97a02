"""Plan of one session, known to all its parties.

A run consists of rounds of training, releases of statistics, or both in sequence. Every part has its own sessions of
one kind: rounds of one method under one protocol. Coordinator and silo therefore run the same code for every part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from fedveil.methods.method import Method
from fedveil.privacy.claims import Role, Sent
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.session_messages import (
    RunPart,
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
