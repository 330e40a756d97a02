"""Plan of one session, known to all its parties, and the names of sessions.

A run consists of rounds of training, releases of statistics, or both in sequence. Every part has its own sessions of
one kind: rounds of one method under one protocol. Coordinator and silo therefore run the same code for every part.

Session names from nonces of both sides, so that no message of one session is valid in another.

    coordinator                                        silo
    Hello, under a nonce of its own            ->
                                               <-      Ready(nonce)
    Terms, with the nonces of all silos asked  ->      joins, if its own nonce is among them; draws another nonce

Claim: messages of earlier sessions and runs, in any order and at any time, change nothing at a silo and end nothing
at the coordinator. This holds across restarts of either side, without a persisted counter. Conditions: both sides
draw 16 random bytes. Enforced by :func:`session_name`, which both sides compute, and :meth:`SessionAdmission.admits`.
``tests/test_federation_sessions.py`` mixes every message of earlier runs into others.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.methods.method import Method
from fedveil.privacy.claims import Role, Sent
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.session_messages import (
    NONCE_BYTES,
    Nonces,
    Ready,
    RunPart,
    Terms,
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


# --- names of sessions ---


LEASE_SECONDS: Final = 600.0
"""Seconds for which a silo stays reserved for a run with rounds in progress, after its last message."""


def new_nonce() -> bytes:
    """Return 16 new random bytes."""
    return os.urandom(NONCE_BYTES)


def session_name(run: bytes, opened: bytes, nonces: Nonces) -> bytes:
    """Return the 16 bytes that name a session of a run.

    Args:
        run: 16 bytes, the run.
        opened: nonce of the coordinator.
        nonces: nonces of the silos that were asked, with their numbers.
    """
    # Fixed widths: no two lists of (silo, nonce) give the same bytes.
    encoded = b"".join(silo.to_bytes(2, "big") + nonce for silo, nonce in nonces)
    return hashlib.sha256(b"fedveil/3/session name" + run + opened + encoded).digest()[:NONCE_BYTES]


def session_run(session: bytes, agreed: bytes) -> bytes:
    """Return the 16 bytes that identify a session inside a protocol, derived from the proposed terms.

    The terms enter as T (:func:`~.transcript_binding.terms_context`). Silos that received different terms derive
    different identifiers: no silo accepts the other's keys, and their masks do not cancel.
    """
    return hashlib.sha256(b"fedveil/3/session" + session + agreed).digest()[:RUN_BYTES]


class SessionAdmission:
    """Replies of a silo to messages outside its session, and its decision to begin one.

    Args:
        clock: seconds since any moment; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._nonce = clock, new_nonce()
        self._run = b""
        self._until = 0.0

    def ready_message(self, run: bytes) -> Ready:
        """Return the `Ready` reply for a run: the nonce, and the seconds for which another run has the silo."""
        seconds_left = 0.0 if run == self._run else self._until - self._clock()
        return Ready(nonce=self._nonce, busy=max(0, round(seconds_left)))

    def admits(self, silo: int, run: bytes, session: bytes, terms: Terms) -> bool:
        """Return whether terms begin a session.

        The terms must name the silo's current nonce, and no other run may reserve the silo.
        """
        named = session_name(run, terms.opened, terms.nonces) == session
        return named and dict(terms.nonces).get(silo) == self._nonce and not self.ready_message(run).busy

    def admit(self) -> None:
        """Replace the nonce after a session has begun under it."""
        self._nonce = new_nonce()

    def keep(self, run: bytes, *, busy: bool) -> None:
        """Note a message of the session; if rounds are in progress (``busy``), reserve the silo for the run."""
        self._run, self._until = run, self._clock() + LEASE_SECONDS if busy else 0.0
