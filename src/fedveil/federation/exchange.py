"""Exchanges of the coordinator: messages in flight to the silos, their answers, and the dropped silos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from fedveil.errors import IntegrityError, ProtocolError
from fedveil.federation.ledger_heads import heads_for
from fedveil.federation.session_plan import SessionPlan
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.transport.interface import LARGEST_MESSAGE, LARGEST_OPENING
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
"""Most sessions that a silo may leave between two rounds; each restart of its process leaves one."""

_FRAME_BYTES: Final = 1 << 16
"""Upper bound in bytes on the terms of a run without the document, for the largest federation."""


class ReplyKind(Enum):
    """Meaning of a silo's message to the coordinator: nothing awaited, a keep-alive, or an answer.

    A `Ready` message that reports another run counts as NOTHING: the caller that waits applies its own timeout.
    """

    NOTHING = "nothing"
    SIGN = "sign"
    ANSWER = "answer"


_ANSWER_BYTES: Final = 1 << 18
"""Upper bound in bytes on a silo's message without protocol messages and counts.

The message holds a signed head of every silo's ledger, 96 bytes each.
"""

Answers = dict[int, tuple[SessionMessage, ...]]
"""Answers of the silos in one exchange, by silo number."""


def check_models_agree(answers: Answers, silos: Sequence[str]) -> None:
    """Check that every silo has the same next model.

    Args:
        answers: answers of a round.
        silos: names, by number.

    Raises:
        ProtocolError: names a silo that differs from the model of more than half of the silos. Without a majority,
            names two silos that differ.
    """
    tags = {silo: single_message(parts, ModelStored, silo).tag for silo, parts in answers.items()}
    ((common, having),) = Counter(tags.values()).most_common(1)
    outliers = [silo for silo, tag in tags.items() if tag != common]
    if not outliers:
        return
    if 2 * having > len(tags):
        raise ProtocolError(
            "ends the round with another model or optimiser's state than most silos", silo=outliers[0]
        )
    first = next(silo for silo, tag in tags.items() if tag == common)
    raise ProtocolError(
        f"silos {silos[first]} and {silos[outliers[0]]} end the round with different models or optimisers' states"
    )


def opening_messages(answers: Answers, silos: int, users: int | None) -> dict[int, list[SessionMessage]]:
    """Return the messages to each silo ahead of the first round: peers' ledger heads, and user totals.

    Args:
        answers: answers of the silos to the terms.
        silos: number of silos in the federation.
        users: number of users, if the silos counted their records; else None.

    Raises:
        ProtocolError: a silo reports another number of silos or users, or too many records; names the silo.
    """
    heads_of_silo = {silo: single_message(parts, Join, silo).heads for silo, parts in answers.items()}
    for silo, heads in heads_of_silo.items():
        if len(heads) != silos:
            raise ProtocolError(f"sent ledger heads of {len(heads)} silos instead of {silos}", silo=silo)
    totals = () if users is None else (UserTotals(counts=_totals(answers, users)),)
    return {silo: [heads_for(silo, heads_of_silo), *totals] for silo in heads_of_silo}


def _totals(answers: Answers, users: int) -> Int64[np.ndarray, " users"]:
    """Return the number of records of every user over all silos, (|U|,) int64."""
    counts = {silo: single_message(parts, UserCounts, silo).counts for silo, parts in answers.items()}
    for silo, own in counts.items():
        if len(own) != users:
            raise ProtocolError(f"counts records of {len(own)} users instead of {users}", silo=silo)
    # Each count is at most LARGEST_SCORE = 2^32 - 1, so the int64 sum over at most 1000 silos cannot overflow.
    totals: Int64[np.ndarray, " users"] = np.sum(list(counts.values()), axis=0)
    if (totals > LARGEST_SCORE).any():
        most = max(counts, key=lambda silo: int(counts[silo].max()))
        raise ProtocolError(f"counts more records of a user than {LARGEST_SCORE} over all silos", silo=most)
    return totals


def by_silo(outgoing: Outgoing) -> dict[int, list[SessionMessage]]:
    """Group a protocol's messages by their receiving silo, wrapped as session messages."""
    messages: dict[int, list[SessionMessage]] = {}
    for silo, message in outgoing:
        messages.setdefault(silo, []).append(ProtocolMessage(message=message))
    return messages


def check_lengths(agreement: ProtocolSpec[Any, Any], plan: SessionPlan, offered: str) -> None:
    """Check that every message of a session fits the limits that all parties apply.

    Args:
        agreement: the protocol.
        plan: the session.
        offered: the document that the terms carry.

    Raises:
        ProtocolError: a message would be too long.
    """
    # The terms open a session, so a silo reads them under the limit for messages outside any session.
    opening = len(offered.encode()) + len(b"" if plan.phase is None else plan.phase.encode())
    if opening + _FRAME_BYTES > LARGEST_OPENING:
        raise ProtocolError(
            f"a message that begins this run would have {opening} bytes: fewer releases before it"
        )
    up, down = agreement.max_exchange_bytes
    # The model travels as float32, 4 bytes a parameter, in the same message as the protocol's part.
    longest = max(up, down + 4 * plan.dimension)
    if longest > LARGEST_MESSAGE:
        raise ProtocolError(
            f"a message of this protocol would have {longest} bytes, above the limit of {LARGEST_MESSAGE}: fewer "
            "users or parameters, another cipher, or no private sampling"
        )


def longest_answer(agreement: ProtocolSpec[Any, Any], users: int) -> int:
    """Return the largest size of a silo's message in bytes.

    It sums the protocol messages, a count per user (4 bytes each), and the ledger heads of all silos.
    """
    up, _ = agreement.max_exchange_bytes
    return min(LARGEST_MESSAGE, up + 4 * users + _ANSWER_BYTES)


@dataclass(kw_only=True)
class Exchange:
    """One message to each of some silos, and their answers.

    Attributes:
        session: name of the session.
        number: number of the exchange in the session.
        messages: encoded messages, by silo.
        on_complete: function that receives the answers once all have arrived.
        hellos: whether the exchange asks the silos for nonces.
        answers: answers that have arrived.
        heads: ledger heads of the senders, by silo name.
    """

    session: bytes
    number: int
    messages: dict[int, bytes]
    on_complete: Callable[[Answers], None]
    hellos: bool = False
    answers: Answers = field(default_factory=dict)
    heads: dict[str, bytes] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Silos whose answers have not arrived."""
        return tuple(silo for silo in self.messages if silo not in self.answers)

    def awaits(self, silo: int, message: SignedMessage) -> bool:
        """Return whether a silo's message is an answer that this exchange lacks."""
        return (message.session, message.number) == (self.session, self.number) and silo in self.missing

    def check_head(self, silo: str, message: SignedMessage) -> None:
        """Check that a silo's answer shows other silos the same ledger head as the coordinator.

        Without this check a silo could show its peers a false head. Peers would then refuse, and the coordinator,
        which does not see the head, would take the honest peers for the liars.

        Raises:
            IntegrityError: the heads differ; names the silo.
        """
        shown = [part.signed[0] for part in message.parts if isinstance(part, RequestSignature)]
        joins = (part.heads for part in message.parts if isinstance(part, Join))
        shown += [head for heads in joins for head, _ in heads[message.sender : message.sender + 1]]
        if any(head != message.head for head in shown):
            raise IntegrityError(
                f"silo {silo}: shows the other silos another ledger head than the coordinator"
            )


class DroppedSilos:
    """Silos that were dropped from the current session.

    The coordinator keeps sending the last message to each. An answer shows that the silo has returned.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, tuple[Exchange, bytes]] = {}
        self._silent: set[int] = set()
        self._back: set[int] = set()
        self._leavings: Counter[int] = Counter()

    def __contains__(self, silo: object) -> bool:
        """Return whether a silo was dropped, whether it has returned or not."""
        return silo in self._unanswered

    def leave(self, silo: int, exchange: Exchange) -> None:
        """Drop a silo from an exchange."""
        self._unanswered[silo] = exchange, exchange.messages.pop(silo)
        self._silent.add(silo)

    def messages(self) -> list[tuple[int, bytes]]:
        """Return the messages to the dropped silos that have not answered."""
        return [(silo, self._unanswered[silo][1]) for silo in sorted(self._silent)]

    def note_answer(self, silo: int, message: SignedMessage) -> None:
        """Note that a dropped silo has answered its last message; a silo that declines stays dropped."""
        exchange, _ = self._unanswered[silo]
        # Any older message is no sign of return: the silo may have sent it before it was dropped.
        if silo in self._silent and (message.session, message.number) == (exchange.session, exchange.number):
            self._silent.discard(silo)
            if not any(isinstance(part, Declined) for part in message.parts):
                self._back.add(silo)

    def leaves_again(self, silo: int) -> int:
        """Count that a silo left its session; return how often it did since the last round."""
        self._leavings[silo] += 1
        return self._leavings[silo]

    def round_ended(self) -> None:
        """Reset the counts, because a session has completed a round."""
        self._leavings.clear()

    @property
    def n_returned(self) -> int:
        """Number of silos that have returned and will join the next session."""
        return len(self._back)

    def readmit(self) -> None:
        """Readmit the returned silos: the next session includes them."""
        for silo in self._back:
            del self._unanswered[silo]
        self._back.clear()
