"""Which letters a session of a run has: for every state the one shape of each side's letter, and no other.

    session = knock, opening, setup exchanges of the protection, rounds, over; or knock, closing
    round   = task -> answer, exchanges of the protection: each shows first that all were asked the same, and where
              their ledgers ended when they answered; the last answer of a round ends with the silo's signature of it

Claim: whatever a party that signs its letters sends, and whenever, a silo and the coordinator read a part only where
the experiment's method has a use for it: totals where weights are by records and silos tell their counts, once a
session; a commitment to drawn users under private weighting alone; and so on. Enforced by :class:`Conversation`, which
both sides keep for every session: a letter is matched **whole** before any part of it takes effect, and a letter of
another shape changes nothing. ``tests/test_federation_grammar.py`` sends every kind, alone and in pairs, in every
state.

The shapes come from the stages' own declarations: the protocol's :class:`~fedveil.protocols.exchanges.Exchanges`,
and what the method lists of its messages (:meth:`~fedveil.methods.method.Method.sends`). A kind that the method does
not list is neither taken nor sent, whatever a protocol declares: the statement is a fold over that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fedveil.federation.errors import RefusalError
from fedveil.federation.session_plan import SessionPlan
from fedveil.privacy.claims import Role
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.exchanges import Exchanges, ExchangeStep, Kind, Shape, message_shape
from fedveil.protocols.refusals import Code
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
"""The letters that propose a run, or a part of one that is more than training."""

CLOSINGS: Final[tuple[Shape, ...]] = tuple((*opening, Finalize, Goodbye) for opening in OPENINGS)
"""The letters that show what a run states which has nothing left to play: no silo joins it, and each may sign."""

ENDINGS: Final[tuple[Shape, ...]] = ((Declined,), (Ready,))
"""What a silo may answer to any letter; the session is over then."""

SIGNS: Final[tuple[Shape, ...]] = ((InProgress,),)
"""What a silo may say until its answer is ready: it changes nothing."""

OUTSIDE: Final[tuple[Shape, ...]] = ((Hello,), (Goodbye,), (Finalize, Goodbye))
"""What the coordinator may say at any time: the question for a nonce, and that the session is over, with or without
what the run states."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The letters between the coordinator and one silo, for one session of a run.

    Attributes:
        opening: the run is proposed, the silo joins.
        totals: whether the silo is told all users' totals before its first round.
        task: a task, and what stands before it in its letter: who takes part, the clip where it moves, the model.
        protocol: the exchanges of the protection.
        rounds: how many the run has.
        to_silo: the kinds that the method lists for a silo.
        to_server: those for the server.
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
        """Return the letters of a session with a silo, between which and the server these messages pass."""
        method = plan.method
        to_silo, to_server = (
            frozenset(one.kind for one in plan.sends() if one.to & role) for role in (Role.SILO, Role.SERVER)
        )
        return cls(
            opening=ExchangeStep(
                OPENINGS[plan.phase is not None],
                (Join, *((UserCounts,) if method.shows_counts else ()), *exchanges.joined),
            ),
            totals=method.shows_counts,
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
        """Return the exchanges of a round, which may be the first of its session.

        Raises:
            RefusalError: the run has no such round.
        """
        if not 1 <= number <= self.rounds:
            raise RefusalError(Code.NO_SUCH_ROUND, self.rounds)
        before: Shape = (
            (LedgerHeads, *((UserTotals,) if self.totals else ()), *self.protocol.first) if first else ()
        )
        answer, following = self.protocol.played(number)
        steps = ExchangeStep((*before, *self.protocol.begin, *self.task), answer), *following
        return tuple(
            ExchangeStep(  # what all were asked, and where their ledgers end, is shown to all before the next exchange
                (*((RequestSignatures,) if place else ()), *step.requests),
                (*step.replies, Attestation if step is steps[-1] else RequestSignature),
            )
            for place, step in enumerate(steps)
        )


class Conversation:
    """What coordinator and silo have said in a session, as far as it decides what may be said next.

    Args:
        grammar: of the session.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._ahead: tuple[ExchangeStep, ...] = (grammar.opening, *grammar.protocol.setup)
        self._rounds = self._number = self._next = 0
        self._asked: tuple[ExchangeStep, ...] = ()

    def ask(self, parts: Sequence[SessionMessage]) -> None:
        """Take a letter of the coordinator; until it is answered, another one may stand in its place.

        Raises:
            RefusalError: another shape than the one that is due, or a round that the run lacks; nothing changes.
        """
        ahead = self._ahead or self._round(parts)
        if _shape(parts) != ahead[0].requests or not _listed(parts, self._grammar.to_silo):
            raise RefusalError(Code.SHAPE)
        self._asked = ahead
        self._next = next((part.round for part in parts if isinstance(part, RoundTask)), self._next)

    def answer(self, parts: Sequence[SessionMessage]) -> None:
        """Take the silo's answer to the letter before it, and go on.

        Raises:
            RefusalError: another shape than the one that is due; nothing changes.
        """
        due = self._asked and _shape(parts) == self._asked[0].replies
        if not due or not _listed(parts, self._grammar.to_server):
            raise RefusalError(Code.SHAPE)
        self._rounds += not self._ahead
        self._number = self._next
        self._ahead, self._asked = self._asked[1:], ()

    @property
    def begins(self) -> bool:
        """Whether the letter that was taken last begins a round."""
        return bool(self._asked) and not self._ahead

    @property
    def signs(self) -> bool:
        """Whether the answer to the letter that was taken last ends with a signature of what it asks."""
        return bool(self._asked) and RequestSignature in self._asked[0].replies

    @property
    def attests(self) -> bool:
        """Whether the answer to the letter that was taken last ends a round, and so with a signature of it."""
        return bool(self._asked) and Attestation in self._asked[0].replies

    @property
    def underway(self) -> bool:
        """Whether rounds have begun, and the last one of the run has not ended."""
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
    """Return whether a method lists what a letter is made of, and a relay if there is one."""
    return kinds.issuperset(_shape(parts)) and kinds.issuperset(type(part) for part in parts)


def is_proposal(parts: Sequence[SessionMessage]) -> bool:
    """Return whether a letter proposes a run, or its end; what else it may be is then for its grammar to say.

    Raises:
        RefusalError: it does so among parts that no proposal has.
    """
    if not any(isinstance(part, Terms) for part in parts):
        return False
    if _shape(parts) not in (*OPENINGS, *CLOSINGS):
        raise RefusalError(Code.SHAPE)
    return True


def ends_session(parts: Sequence[SessionMessage]) -> bool:
    """Return whether a silo's answer ends its session: a refusal, or that it is in none; and nothing beside it."""
    return tuple(type(part) for part in parts) in ENDINGS


def is_in_progress(parts: Sequence[SessionMessage]) -> bool:
    """Return whether a silo says that it is at work, and nothing beside it: the answer comes when it is asked again."""
    return tuple(type(part) for part in parts) in SIGNS


def out_of_session_kind(parts: Sequence[SessionMessage]) -> Kind | None:
    """Return the kind of a letter of the coordinator that stands outside the grammar of a session, None for others."""
    kinds = tuple(type(part) for part in parts)
    return kinds[0] if kinds in OUTSIDE else None
