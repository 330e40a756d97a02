"""Grammar of a session: for every state, the one allowed shape of each side's message.

    session = Hello, opening, setup exchanges of the protection, rounds, Goodbye; or Hello, closing
    round   = task -> answer, then exchanges of the protection

Each exchange after the first of a round begins with the silos' signatures. They show that all silos received the same
request, and where their ledgers ended when they answered. The last answer of a round ends with the silo's signature
of the round.

Claim: whatever a signing party sends, and at any time, a silo and the coordinator read a part only if the
experiment's method uses it. Examples: totals are read once a session, if weights are by records and silos disclose
their counts. A commitment to sampled users is read under private weighting alone. Enforced by :class:`Conversation`,
which both sides keep for every session. A message is matched **whole** before any part of it takes effect. A message
of another shape changes nothing. ``tests/test_federation_grammar.py`` sends every kind, alone and in pairs, in every
state.

The shapes come from the stages' own declarations: the protocol's :class:`~fedveil.protocols.protocol.Exchanges`,
and the method's list of its messages (:meth:`~fedveil.methods.method.Method.sends`). A kind outside that list is
neither accepted nor sent, even if a protocol declares it, because the statement is computed from that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fedveil.errors import ProtocolError
from fedveil.federation.session_plan import SessionPlan
from fedveil.methods.method import shows_counts
from fedveil.privacy.claims import Role
from fedveil.protocols.protocol import Exchanges, ExchangeStep, Kind, Shape, message_shape
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import (
    Attestation,
    Declined,
    Finalize,
    GlobalModel,
    Goodbye,
    Hello,
    InProgress,
    Join,
    LedgerHeads,
    Ready,
    RequestSignature,
    RequestSignatures,
    RoundClip,
    RoundTask,
    RunPart,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    Terms,
    UserCounts,
    UserTotals,
)

OPENINGS: Final[tuple[Shape, Shape]] = ((Terms,), (Terms, RunPart))
"""Shapes of the messages that propose a run, or a part of a run with releases."""

CLOSINGS: Final[tuple[Shape, ...]] = tuple((*opening, Finalize, Goodbye) for opening in OPENINGS)
"""Shapes of the messages that show a complete run's statement: no silo joins, each may sign."""

ENDINGS: Final[tuple[Shape, ...]] = ((Declined,), (Ready,))
"""Shapes of a silo's answers that end the session; allowed at any time."""

SIGNS: Final[tuple[Shape, ...]] = ((InProgress,),)
"""Shapes of a silo's keep-alive before its answer is ready; it changes no state."""

OUTSIDE: Final[tuple[Shape, ...]] = ((Hello,), (Goodbye,), (Finalize, Goodbye))
"""Shapes that the coordinator may send at any time.

`Hello` requests a nonce. `Goodbye` ends the session, with or without the statement to sign.
"""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Shapes of the messages between the coordinator and one silo, for one session of a run.

    Attributes:
        opening: the exchange in which the run is proposed and the silo joins.
        totals: whether the silo receives all users' totals before its first round.
        task: the task and the parts before it in its message: sample, clip if it varies, model.
        protocol: exchanges of the protection.
        rounds: number of rounds of the run.
        to_silo: kinds that the method lists for a silo.
        to_server: kinds that the method lists for the server.
    """

    opening: ExchangeStep
    totals: bool
    task: Shape
    protocol: Exchanges
    rounds: int
    to_silo: frozenset[Kind]
    to_server: frozenset[Kind]

    @classmethod
    def from_plan(cls, plan: SessionPlan, exchanges: Exchanges) -> Grammar:
        """Derive the grammar of a session from its plan and from the protocol's exchanges with one silo."""
        method = plan.method
        to_silo, to_server = (
            frozenset(message.kind for message in plan.sends() if message.to & role)
            for role in (Role.SILO, Role.SERVER)
        )
        return cls(
            opening=ExchangeStep(
                OPENINGS[plan.phase is not None],
                (Join, *((UserCounts,) if shows_counts(method) else ()), *exchanges.on_join),
            ),
            totals=shows_counts(method),
            task=tuple(
                kind
                for kind in (SamplingCommitment, SampledUsers, SampledFlag, RoundClip, GlobalModel, RoundTask)
                if kind in to_silo
            ),
            protocol=exchanges,
            rounds=plan.rounds,
            to_silo=to_silo,
            to_server=to_server,
        )

    def round(self, number: int, *, first: bool) -> tuple[ExchangeStep, ...]:
        """Return the exchanges of a round. ``first``: the round is the first of its session.

        Raises:
            RefusalError: the run has no round of this number.
        """
        if not 1 <= number <= self.rounds:
            raise RefusalError(Code.NO_SUCH_ROUND, self.rounds)
        before: Shape = (
            (LedgerHeads, *((UserTotals,) if self.totals else ()), *self.protocol.session_start)
            if first
            else ()
        )
        # The peers' heads and the totals come once a session, ahead of its first round.
        answer, following = self.protocol.answers(number)
        steps = ExchangeStep((*before, *self.protocol.round_start, *self.task), answer), *following
        return tuple(
            ExchangeStep(  # signed requests and ledger heads, shown to all silos before the next exchange
                (*((RequestSignatures,) if index else ()), *step.requests),
                (*step.replies, Attestation if step is steps[-1] else RequestSignature),
            )
            for index, step in enumerate(steps)
        )


class Conversation:
    """State of a session: the part of its history that decides which message may come next.

    Args:
        grammar: grammar of the session.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._ahead: tuple[ExchangeStep, ...] = (grammar.opening, *grammar.protocol.setup)
        self._rounds = self._number = self._next = 0
        self._asked: tuple[ExchangeStep, ...] = ()

    def ask(self, parts: Sequence[SessionMessage]) -> None:
        """Accept a message of the coordinator; until it is answered, another message may replace it.

        Raises:
            RefusalError: the shape is not the expected one, or the run lacks the round; nothing changes.
        """
        steps = self._ahead or self._round(parts)
        if _shape(parts) != steps[0].requests or not _listed(parts, self._grammar.to_silo):
            raise RefusalError(Code.SHAPE)
        self._asked = steps
        self._next = next((part.round for part in parts if isinstance(part, RoundTask)), self._next)

    def answer(self, parts: Sequence[SessionMessage]) -> None:
        """Accept the silo's answer to the last message, and advance.

        Raises:
            RefusalError: the shape is not the expected one; nothing changes.
        """
        due = self._asked and _shape(parts) == self._asked[0].replies
        if not due or not _listed(parts, self._grammar.to_server):
            raise RefusalError(Code.SHAPE)
        # ask() leaves _ahead empty at the start of a round: the exchanges of the round enter _ahead with the first
        # answer.
        self._rounds += not self._ahead
        self._number = self._next
        self._ahead, self._asked = self._asked[1:], ()

    @property
    def begins(self) -> bool:
        """Return whether the last accepted message begins a round."""
        return bool(self._asked) and not self._ahead

    @property
    def signs(self) -> bool:
        """Return whether the answer to the last accepted message ends with a signature of the request."""
        return bool(self._asked) and RequestSignature in self._asked[0].replies

    @property
    def attests(self) -> bool:
        """Return whether the answer to the last accepted message ends a round, and so with a signature of the round."""
        return bool(self._asked) and Attestation in self._asked[0].replies

    @property
    def underway(self) -> bool:
        """Return whether rounds have begun, and the last round of the run has not ended."""
        return bool(self._rounds) and (bool(self._ahead) or self._number < self._grammar.rounds)

    def _round(self, parts: Sequence[SessionMessage]) -> tuple[ExchangeStep, ...]:
        task = next((part for part in parts if isinstance(part, RoundTask)), None)
        if task is None:
            raise RefusalError(Code.SHAPE)
        return self._grammar.round(task.round, first=not self._rounds)


def _shape(parts: Sequence[SessionMessage]) -> Shape:
    try:
        return message_shape(parts)
    except ProtocolError:
        raise RefusalError(Code.SHAPE) from None


def _listed(parts: Sequence[SessionMessage], kinds: frozenset[Kind]) -> bool:
    """Return whether the method lists every part of a message, including the relay of a protocol message."""
    return kinds.issuperset(_shape(parts)) and kinds.issuperset(type(part) for part in parts)


def is_proposal(parts: Sequence[SessionMessage]) -> bool:
    """Return whether a message proposes a run, or its end; the grammar judges all other messages.

    Raises:
        RefusalError: the message contains `Terms` in a shape that no proposal has.
    """
    if not any(isinstance(part, Terms) for part in parts):
        return False
    if _shape(parts) not in (*OPENINGS, *CLOSINGS):
        raise RefusalError(Code.SHAPE)
    return True


def ends_session(parts: Sequence[SessionMessage]) -> bool:
    """Return whether a silo's answer ends its session: exactly a refusal, or exactly a `Ready`."""
    return tuple(type(part) for part in parts) in ENDINGS


def is_in_progress(parts: Sequence[SessionMessage]) -> bool:
    """Return whether a silo's message is exactly a keep-alive.

    The answer comes when the coordinator sends the request again.
    """
    return tuple(type(part) for part in parts) in SIGNS


def out_of_session_kind(parts: Sequence[SessionMessage]) -> Kind | None:
    """Return the kind of a coordinator's message outside the session grammar; None for other messages."""
    kinds = tuple(type(part) for part in parts)
    return kinds[0] if kinds in OUTSIDE else None
