"""A protection as silo and coordinator of a federation use it: one object each a session, noisy sums in, their sum out.

    coordinator:  ready? -> begin(round) -> read(an exchange's messages) -> ... -> result
    silo:         announce -> receive -> (awaits_input) new_answer, kept -> contribute(what was kept) -> receive

The protocols count in whole numbers of grid steps and name their runs by 16 bytes; here are the vectors in the unit of
the update, and a session of a run. No key outlives its session, so a party that was restarted uses none twice.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.crypto.agreement import RUN_BYTES, RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.federation.errors import RefusalError
from fedveil.federation.own_round import Asked, OwnRound
from fedveil.federation.store import Answered
from fedveil.protection.parts import Part, Terms
from fedveil.protection.peers import Roster

Outgoing = list[tuple[int, bytes]]
"""Messages of the coordinator: recipient and bytes."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A silo in one session of a run, as a protocol needs to know it.

    Attributes:
        run: 16 bytes that name the session of the run in the protocol (:func:`session_run`).
        number: the silo's own.
        identity: its long-term key.
        roster: all silos' public identities.
    """

    run: bytes
    number: int
    identity: IdentityKey
    roster: Roster


class HiddenSum(ABC):
    """The coordinator's side of a protection, for one session."""

    least: int
    """The fewest silos of a sum; where it is below all of them, a round goes on without silos that vanish."""

    @property
    def ready(self) -> bool:
        """Whether the setup is complete, so that a round may begin."""
        return True

    @property
    @abstractmethod
    def largest(self) -> int:
        """How long a silo's letter may be."""

    @property
    def repeats(self) -> bool:
        """Whether a round that is asked for in another session has the same sum, and so costs nothing."""
        return True

    @property
    def shows_model(self) -> bool:
        """Whether the coordinator learns the sums and has the models; else the silos alone do."""
        return True

    @property
    @abstractmethod
    def summed(self) -> int:
        """How many silos the sum of the round is over."""

    @abstractmethod
    def begin(
        self, round_number: int, drawn: Bool[np.ndarray, " users"] | None, silos: tuple[int, ...]
    ) -> Outgoing:
        """Begin a round with silos that are there; each round of a session once."""

    @abstractmethod
    def receive(self, silo: int, message: bytes) -> Outgoing:
        """Read a silo's message; return those that follow."""

    def read(self, messages: Mapping[int, Sequence[bytes]]) -> Outgoing:
        """Read the messages of one exchange, by silo; return those that follow."""
        return [
            follow for silo, sent in messages.items() for one in sent for follow in self.receive(silo, one)
        ]

    @abstractmethod
    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the sum of the round, once no message is awaited any longer."""


class Player(Protocol):
    """A silo's state machine of a protocol."""

    def check_round(self, round_id: RoundId) -> None:
        """Return if this is the round and attempt that has begun here; else raise a ProtocolError."""


class HiddenShare(ABC):
    """A silo's side of a protection, for one session.

    Args:
        player: the silo in the protocol.
        run: 16 bytes that name the session.
    """

    def __init__(self, player: Player, run: bytes) -> None:
        self._player, self._run = player, run

    def check_round(self, round_number: int) -> None:
        """Return if a round is the one that the protocol has begun, once in the session.

        All silos of a sum have then put the same round into it. If each could be told another one, the kept sums of
        some beside a new one of another would show, against the round before, that one's own with little noise.

        Raises:
            ProtocolError: it is another one.
        """
        self._player.check_round(RoundId(run=self._run, round=round_number, attempt=0))

    @property
    def repeats(self) -> bool:
        """Whether a round that is asked for again is answered with the same content; else it is charged again."""
        return True

    @property
    def shown_model(self) -> bool:
        """Whether the coordinator gives the models."""
        return True

    @property
    def binding(self) -> bytes:
        """What a stored answer belongs to, besides the request."""
        return b""

    def follow(self, last: Answered | None, round_number: int) -> None:
        """Return if a round may follow the last one that was answered.

        Raises:
            RefusalError: rounds were left out, or the last one has not ended.
        """
        check_next(last, round_number)

    def announce(self) -> bytes | None:
        """Return the first message, None if the coordinator's comes first."""
        return None

    @property
    @abstractmethod
    def awaits_input(self) -> bool:
        """Whether :meth:`contribute` is due."""

    @abstractmethod
    def receive(self, message: bytes) -> list[bytes]:
        """Read a message of the coordinator; return the answers.

        Raises:
            RefusalError: a request that the silo does not grant.
            ProtocolError: a message that must not be accepted.
        """

    def new_answer(self, own: OwnRound, task: Asked, request: bytes) -> Answered:
        """Train and draw noise; return what is kept before anything of it leaves."""
        return Answered(round=task.round, request=request, vector=own.message(task).vector)

    @abstractmethod
    def contribute(self, answered: Answered) -> list[bytes]:
        """Return the messages that bring what was kept into the sum."""

    def learn(self) -> list[Part]:
        """Return what the silo says once it has learned a sum that the coordinator does not."""
        return []


def check_next(last: Answered | None, round_number: int) -> None:
    """Return if a round is the next after the last one that was answered.

    Raises:
        RefusalError: it is not.
    """
    done = 0 if last is None else last.round
    if round_number != done + 1:
        raise RefusalError("replay", f"round {round_number} does not follow round {done}, the last answered")


def session_run(run: bytes, session: int, terms: Terms) -> bytes:
    """Return the 16 bytes that name one session of a run in a protocol, on the terms that it was begun with.

    Silos that were told other terms name another session: no key of one is taken by another, and no masks cancel.
    """
    agreed = hashlib.sha256(terms.encode()).digest()
    named = b"fedveil/2/session" + run + session.to_bytes(4, "big") + agreed
    return hashlib.sha256(named).digest()[:RUN_BYTES]
