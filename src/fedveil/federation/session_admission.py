"""How a session gets its name: from nonces of both sides, so that no letter of another session is one of it.

    coordinator                                        silo
    Hello, under a nonce of its own            ->
                                               <-      Here(nonce)
    Terms, with the nonces of all silos asked  ->      joins, if its own nonce is among them; draws another nonce

Claim: whatever letters of earlier sessions and runs come, and whenever, they change nothing at a silo and end nothing
at the coordinator: not after a restart of either, and with no counter that would have to survive one. Conditions: both
sides draw 16 random bytes. Enforced by :func:`session_name`, which both compute, and :meth:`SessionAdmission.admits`.
``tests/test_federation_sessions.py`` mixes every letter of earlier runs into others.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Final

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.protocols.session_messages import NONCE_BYTES, Nonces, Ready, Terms

LEASE_SECONDS: Final = 600.0
"""For how long a silo that has begun a round is kept for its run, after the last letter of it."""


def new_nonce() -> bytes:
    """Return 16 bytes that nobody has seen."""
    return os.urandom(NONCE_BYTES)


def session_name(run: bytes, opened: bytes, nonces: Nonces) -> bytes:
    """Return the 16 bytes that name a session of a run.

    Args:
        run: 16 bytes, the run.
        opened: the coordinator's nonce.
        nonces: those of the silos that are asked, by their numbers.
    """
    asked = b"".join(silo.to_bytes(2, "big") + nonce for silo, nonce in nonces)
    return hashlib.sha256(b"fedveil/3/session name" + run + opened + asked).digest()[:NONCE_BYTES]


def session_run(session: bytes, agreed: bytes) -> bytes:
    """Return the 16 bytes that stand for a session in a protocol, on what was proposed
    (:func:`~.transcript_binding.terms_context`).

    Silos that were told other terms name another session: no key of one is taken by another, and no masks cancel.
    """
    return hashlib.sha256(b"fedveil/3/session" + session + agreed).digest()[:RUN_BYTES]


class SessionAdmission:
    """What a silo says to who is not of its session, and whom it lets begin one."""

    def __init__(self) -> None:
        self._nonce = new_nonce()
        self._run = b""
        self._until = 0.0

    def ready_message(self, run: bytes) -> Ready:
        """Return the word that the silo is there, for a run: its nonce, and for how long another run has it."""
        left = 0.0 if run == self._run else self._until - time.monotonic()
        return Ready(nonce=self._nonce, busy=max(0, round(left)))

    def admits(self, silo: int, run: bytes, session: bytes, terms: Terms) -> bool:
        """Return whether terms begin a session: they bring the silo's present nonce, and no other run has it."""
        named = session_name(run, terms.opened, terms.nonces) == session
        return named and dict(terms.nonces).get(silo) == self._nonce and not self.ready_message(run).busy

    def admit(self) -> None:
        """Use the nonce up: a session has begun under it."""
        self._nonce = new_nonce()

    def keep(self, run: bytes, *, busy: bool) -> None:
        """Note a letter of the session: in the middle of its rounds (``busy``) the silo is the run's for a while."""
        self._run, self._until = run, time.monotonic() + LEASE_SECONDS if busy else 0.0
