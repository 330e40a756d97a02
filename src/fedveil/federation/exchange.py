"""What is under way between coordinator and silos: the letters of one exchange, and those to silos left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from fedveil.errors import IntegrityError
from fedveil.federation.ledger_heads import heads_for
from fedveil.federation.limits import LARGEST_LETTER, LARGEST_OPENING
from fedveil.federation.session_plan import SessionPlan
from fedveil.federation.signed_message import SignedMessage
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.protocol import Outgoing, ProtocolSpec
from fedveil.protocols.session_messages import (
    LARGEST_SCORE,
    Declined,
    Join,
    ModelStored,
    ProtocolMessage,
    RequestSignature,
    SessionMessage,
    UserCounts,
    UserTotals,
    single_message,
)

MOST_LEFT: Final = 100
"""How many sessions a silo may leave between two rounds: its process may end at any time, but not for ever."""

_FRAME_BYTES: Final = 1 << 16
"""More than the terms of a run have beside its document, for all silos that a federation may have."""


class ReplyKind(Enum):
    """What a letter of a silo is to the coordinator: nothing that it waits for, a sign of life, or an answer.

    The word of a silo that another run has it is nothing: who waits for it counts its own patience.
    """

    NOTHING = "nothing"
    SIGN = "sign"
    ANSWER = "answer"


_ANSWER_BYTES: Final = 1 << 18
"""More than a silo's letter has beside messages of the protocol, and counts; a head of every silo's ledger takes 96."""

Answers = dict[int, tuple[SessionMessage, ...]]
"""What every silo of an exchange has answered."""


def check_models_agree(answers: Answers) -> None:
    """Return if every silo has the same next model.

    Raises:
        ProtocolError: names a silo that has another than most, where more than half have one; else two that differ.
    """
    tags = {silo: single_message(parts, ModelStored, silo).tag for silo, parts in answers.items()}
    ((common, having),) = Counter(tags.values()).most_common(1)
    others = [silo for silo, tag in tags.items() if tag != common]
    if not others:
        return
    if 2 * having > len(tags):
        raise ProtocolError(
            "ends the round with another model or optimiser's state than most silos", silo=others[0]
        )
    first = next(silo for silo, tag in tags.items() if tag == common)
    raise ProtocolError(
        f"silos {first} and {others[0]} end the round with different models or optimisers' states"
    )


def opening_messages(answers: Answers, silos: int, users: int | None) -> dict[int, list[SessionMessage]]:
    """Return what every silo is told ahead of the first round, of what all said when they joined.

    Args:
        answers: with which they joined.
        silos: how many there are in the federation.
        users: how many there are, where silos counted their records; else None.

    Raises:
        ProtocolError: names a silo that speaks of another number of silos or users, or of too many records.
    """
    said = {silo: single_message(parts, Join, silo).heads for silo, parts in answers.items()}
    for silo, heads in said.items():
        if len(heads) != silos:
            raise ProtocolError(f"speaks of the ledgers of {len(heads)} silos instead of {silos}", silo=silo)
    totals = () if users is None else (UserTotals(counts=_totals(answers, users)),)
    return {silo: [heads_for(silo, said), *totals] for silo in said}


def _totals(answers: Answers, users: int) -> Int64[np.ndarray, " users"]:
    """Return how many records every user has over all silos."""
    counts = {silo: single_message(parts, UserCounts, silo).counts for silo, parts in answers.items()}
    for silo, own in counts.items():
        if len(own) != users:
            raise ProtocolError(f"counts records of {len(own)} users instead of {users}", silo=silo)
    totals: Int64[np.ndarray, " users"] = np.sum(list(counts.values()), axis=0)
    if (totals > LARGEST_SCORE).any():
        most = max(counts, key=lambda silo: int(counts[silo].max()))
        raise ProtocolError(f"counts more records of a user than {LARGEST_SCORE} over all silos", silo=most)
    return totals


def by_silo(outgoing: Outgoing) -> dict[int, list[SessionMessage]]:
    """Return a protocol's messages as parts, by the silo that they go to."""
    messages: dict[int, list[SessionMessage]] = {}
    for silo, message in outgoing:
        messages.setdefault(silo, []).append(ProtocolMessage(message=message))
    return messages


def check_lengths(agreement: ProtocolSpec[Any, Any], plan: SessionPlan, offered: str) -> None:
    """Return if every letter of a session, beside a document that is offered, is one that a party reads.

    Raises:
        ProtocolError: one would be too long.
    """
    opening = len(offered.encode()) + len(b"" if plan.phase is None else plan.phase.encode())
    if opening + _FRAME_BYTES > LARGEST_OPENING:
        raise ProtocolError(
            f"a letter that begins this run would have {opening} bytes: fewer releases before it"
        )
    up, down = agreement.max_exchange_bytes
    longest = max(up, down + 4 * plan.dimension)
    if longest > LARGEST_LETTER:
        raise ProtocolError(
            f"a letter of this protocol would have {longest} bytes, above the limit of {LARGEST_LETTER}: fewer "
            "users or parameters, another cipher, or no private sampling"
        )


def longest_answer(agreement: ProtocolSpec[Any, Any], users: int) -> int:
    """Return bytes that a silo's letter may have: messages of the protocol, a count per user, heads of all ledgers."""
    up, _ = agreement.max_exchange_bytes
    return min(LARGEST_LETTER, up + 4 * users + _ANSWER_BYTES)


@dataclass(kw_only=True)
class Exchange:
    """One letter to each of some silos, and their answers.

    Attributes:
        session: its name.
        number: of the exchange in the session.
        letters: by silo.
        then: what follows once no answer is missing.
        knocks: whether it asks the silos for nonces.
        answers: those that have arrived.
        heads: of their senders' ledgers, by name.
    """

    session: bytes
    number: int
    messages: dict[int, bytes]
    then: Callable[[Answers], None]
    hellos: bool = False
    answers: Answers = field(default_factory=dict)
    heads: dict[str, bytes] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """The silos whose answers have not arrived."""
        return tuple(silo for silo in self.messages if silo not in self.answers)

    def awaits(self, silo: int, letter: SignedMessage) -> bool:
        """Return whether a letter of a silo is an answer that is missing here."""
        return (letter.session, letter.number) == (self.session, self.number) and silo in self.missing

    def check_head(self, silo: str, letter: SignedMessage) -> None:
        """Return if a silo's answer shows the other silos the end of its ledger that it shows the coordinator.

        Otherwise they could refuse what the coordinator does not see, and be taken for those that lie.

        Raises:
            IntegrityError: it shows them another one; names it.
        """
        shown = [part.signed[0] for part in letter.parts if isinstance(part, RequestSignature)]
        joined = (part.heads for part in letter.parts if isinstance(part, Join))
        shown += [head for heads in joined for head, _ in heads[letter.sender : letter.sender + 1]]
        if any(head != letter.head for head in shown):
            raise IntegrityError(
                f"silo {silo}: shows the other silos another end of its ledger than the coordinator"
            )


class DroppedSilos:
    """The silos that were left behind. The last letter to each goes on being sent: an answer shows that it is back."""

    def __init__(self) -> None:
        self._unanswered: dict[int, tuple[Exchange, bytes]] = {}
        self._silent: set[int] = set()
        self._back: set[int] = set()
        self._leavings: Counter[int] = Counter()

    def __contains__(self, silo: object) -> bool:
        """Return whether a silo was left behind, back or not."""
        return silo in self._unanswered

    def leave(self, silo: int, exchange: Exchange) -> None:
        """Leave a silo of an exchange behind."""
        self._unanswered[silo] = exchange, exchange.messages.pop(silo)
        self._silent.add(silo)

    def messages(self) -> list[tuple[int, bytes]]:
        """Return the letters to those that have not been heard."""
        return [(silo, self._unanswered[silo][1]) for silo in sorted(self._silent)]

    def note_answer(self, silo: int, letter: SignedMessage) -> None:
        """Note that a silo has answered its last letter; one that refuses to go on stays away."""
        exchange, _ = self._unanswered[silo]
        if silo in self._silent and (letter.session, letter.number) == (exchange.session, exchange.number):
            self._silent.discard(silo)
            if not any(isinstance(part, Declined) for part in letter.parts):
                self._back.add(silo)

    def leaves_again(self, silo: int) -> bool:
        """Note that a silo has left its session by itself; return whether it did so too often since the last round."""
        self._leavings[silo] += 1
        return self._leavings[silo] > MOST_LEFT

    def round_ended(self) -> None:
        """Note that sessions bear fruit."""
        self._leavings.clear()

    @property
    def n_returned(self) -> int:
        """How many are back, so that the next session has them."""
        return len(self._back)

    def readmit(self) -> None:
        """Forget those that are back: they are asked again like all others."""
        for silo in self._back:
            del self._unanswered[silo]
        self._back.clear()
