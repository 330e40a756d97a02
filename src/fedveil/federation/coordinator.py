"""The coordinator of a federation: writes letters, reads the answers, and never needs to know how they travel.

    session:  Hello -> Here, Terms -> Join (-> steps of a protocol's setup)
    round:    charge -> Task -> vectors, or steps of a protocol -> sum -> model -> release (checkpoint on disk)

:meth:`CoordinatorParty.messages` returns what still waits for an answer, so a carrier that lost something sends it
again: silos repeat their answers. A restarted coordinator opens the run folder and begins another session; it goes on
with the round that was not released, for the same users and from the same model, under the charge in the ledger.

Where the protocol recovers, :meth:`CoordinatorParty.drop_missing` leaves silent silos behind. A round begun again
then is another release: charged again, for users drawn anew. A silo that is heard again is in the next session. The
run ends after ``MOST_ATTEMPTS`` such attempts at one round: a silo that dies in each would spend what all have left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic

from fedveil.crypto.key_agreement import RUN_BYTES, RoundId
from fedveil.errors import IntegrityError, ModelError
from fedveil.federation.audit.run_record import RunRecord, known_before
from fedveil.federation.errors import RefusalError
from fedveil.federation.exchange import (
    MOST_LEFT,
    Answers,
    DroppedSilos,
    Exchange,
    ReplyKind,
    by_silo,
    check_lengths,
    check_models_agree,
    longest_answer,
    opening_messages,
)
from fedveil.federation.grammar import Conversation, Grammar, ends_session, is_in_progress
from fedveil.federation.ledger_heads import NONE, SeenHeads
from fedveil.federation.session_admission import new_nonce, session_name, session_run
from fedveil.federation.session_plan import CoordinatorRounds, EndingT
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.transcript_binding import (
    exchange_context,
    inconsistent_silos,
    request_signatures,
    round_context,
    session_context,
    terms_context,
    with_totals,
)
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.messages import SERVER
from fedveil.protocols.protocol import Outgoing, ProtocolSpec, ServerProtocol
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import (
    Declined,
    Goodbye,
    Hello,
    ProtocolMessage,
    Ready,
    RequestSignatures,
    RoundTask,
    SessionMessage,
    Terms,
    single_message,
)


class CoordinatorParty(Generic[EndingT]):
    """The coordinator's state machine for one run, or for one part of it.

    Args:
        rounds: what is played, as the run folder has it.
        offered: the document that silos are sent.
        record: what the parties sign of the run.
        heads: the ends of the silos' ledgers, over all runs.

    Attributes:
        run: 16 bytes that no other run has.
        outcome: how the run ended, once it has.
        refused: why a silo has ended it, if one has.
        farewells: the last letters of a run that has ended: they free the silos for another one, and may be lost.
        longest_answer: bytes that a letter of a silo may have.

    Raises:
        ProtocolError: a letter of its protocol would be longer than any party reads.
        RunFolderError: a damaged folder.
    """

    def __init__(
        self,
        *,
        rounds: CoordinatorRounds[EndingT],
        offered: str,
        record: RunRecord,
        heads: SeenHeads,
    ) -> None:
        self._rounds, self._plan, self._offered = rounds, rounds.plan, offered
        self._membership, self._identity = record.membership, record.identity
        self.run, self._record, self._heads = record.run, record, heads
        self._agreement: ProtocolSpec[Any, Any] = self._plan.protocol_spec
        check_lengths(self._agreement, self._plan, offered)
        self.longest_answer = longest_answer(self._agreement, self._plan.n_users)
        self._session, self._number = b"", 0
        self._session_run = bytes(RUN_BYTES)
        self._talks: dict[int, Conversation] = {}
        self._ahead: dict[int, list[SessionMessage]] = {}
        self._exchange: Exchange | None = None
        self._absent = DroppedSilos()
        self.farewells: list[tuple[int, bytes]] = []
        self.outcome: EndingT | None = None
        self.refused: Code | None = None
        self._begin_session()

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return self.outcome is not None

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        try:
            self._heads.keep()
        finally:
            self._rounds.close()

    def messages(self) -> list[tuple[int, bytes]]:
        """Return the letters that still wait for an answer, as pairs of silo and bytes.

        Among them is the last one to every silo that was left behind: an answer to it shows that it is back.
        """
        if self._exchange is None:
            return []
        waiting = [(silo, self._exchange.messages[silo]) for silo in self._exchange.missing]
        return waiting + self._absent.messages()

    @property
    def awaited_silos(self) -> tuple[int, ...]:
        """The silos without whose answers the run does not go on."""
        return () if self._exchange is None else self._exchange.missing

    def drop_missing(self, silent: tuple[int, ...]) -> tuple[str, ...]:
        """Go on without silos that are awaited, where the protocol allows it; return their names.

        Where too few would be left, but enough with those that are back meanwhile, the round is begun again with them.
        """
        exchange, least = self._exchange, self._agreement.quorum
        if exchange is None or not silent:
            return ()
        if self._leave(silent):
            self._proceed()
        elif len(self._present) - len(silent) + self._absent.n_returned >= least and self._absent.n_returned:
            for silo in silent:
                self._absent.leave(silo, exchange)
            self._begin_session()
        else:
            return ()
        return tuple(self._membership.silos[silo] for silo in silent)

    def receive(self, silo: int, data: bytes) -> ReplyKind:  # noqa: C901 - one case for each kind of message
        """Read a silo's letter; return what it was. What belongs to an exchange that is over is passed over in silence.

        Args:
            silo: who sent it, as the carrier says.
            data: the letter.

        Raises:
            ProtocolError: no letter of this silo, or one that says what it must not; nothing changes.
            RunFolderError: the disk is full; the run goes on when the folder is opened again.
        """
        if not 0 <= silo < len(self._membership.silos):
            raise ProtocolError(f"there are {len(self._membership.silos)} silos in the federation", silo=silo)
        by, largest = self._membership.roster[silo], self.longest_answer
        letter = SignedMessage.open(data, sender=silo, identity=by, recipient=SERVER, largest=largest)
        exchange, name = self._exchange, self._membership.silos[silo]
        if letter.run != self.run:
            return ReplyKind.NOTHING
        if exchange is None:
            last = (letter.session, letter.number) == (self._session, self._number)
            if last and self._record.agree(silo, letter.parts):
                with suppress(IntegrityError):  # one that has gone back is refused when a session begins
                    self._heads.hear({name: letter.head})
            return ReplyKind.NOTHING
        if is_in_progress(letter.parts):
            return ReplyKind.SIGN if exchange.awaits(silo, letter) else ReplyKind.NOTHING
        if silo in self._absent:
            self._absent.note_answer(silo, letter)
        if silo in self._absent or not exchange.awaits(silo, letter):
            return ReplyKind.NOTHING
        if ends_session(letter.parts):
            return self._end(silo, letter)
        try:
            if exchange.hellos:
                raise RefusalError(Code.SHAPE)
            self._talks[silo].answer(letter.parts)
            self._heads.hear({name: letter.head})  # now: a crash before the others answer must not forget it
            exchange.check_head(name, letter)
        except RefusalError:
            self.stop(f"silo {name}: sent {Code.SHAPE.template}")
        except IntegrityError as error:
            self.stop(str(error))
        else:
            exchange.answers[silo], exchange.heads[name] = letter.parts, letter.head
            self._proceed()
        return ReplyKind.ANSWER

    def _end(self, silo: int, letter: SignedMessage) -> ReplyKind:
        """Read that a silo refuses, which ends the run, or that it is there and in no session: one begins."""
        (part,), name = letter.parts, self._membership.silos[silo]
        if isinstance(part, Declined):
            self.refused = part.why.code
            self.stop(f"silo {name} refuses ({part.why.code.cause}): {part.why.sentence}")
            return ReplyKind.ANSWER
        assert isinstance(part, Ready)
        if self._exchange is not None and self._exchange.hellos:
            if part.busy:  # the question stands, and is asked again
                return ReplyKind.NOTHING
            self._exchange.answers[silo] = letter.parts
            self._proceed()
            return ReplyKind.ANSWER
        if self._absent.leaves_again(silo):
            self.stop(f"silo {name} left {MOST_LEFT} sessions of this run in which no round ended")
        elif self._leave((silo,)):
            self._absent.note_answer(silo, letter)
            self._proceed()
        else:
            self._begin_session()
        return ReplyKind.ANSWER

    def stop(self, reason: str) -> None:
        """End the run with the model it has; the folder can be resumed."""
        self._exchange = None
        self.outcome = self._rounds.conclude(reason or None, has_model=self._agreement.result_at_server)
        closing = self._rounds.closing()
        last = {silo: [*closing, Goodbye()] for silo in self._present}
        if closing and self._ahead:  # what the run states has a session of its own, which nobody joins
            last = {silo: [*self._ahead[silo], *parts] for silo, parts in last.items()}
        self._number += 1
        self.farewells = [(silo, self._sealed(silo, parts)) for silo, parts in last.items()]

    def _proceed(self) -> None:
        """Read the answers once all of an exchange are in."""
        exchange = self._exchange
        if exchange is None or exchange.missing:
            return
        self._heads.keep()
        try:
            exchange.then(dict(sorted(exchange.answers.items())))
        except (IntegrityError, ModelError, ProtocolError) as error:
            self.stop(str(error))

    def _leave(self, silos: tuple[int, ...]) -> bool:
        """Leave silos of the exchange behind, if the protocol can go on without them; return whether it can."""
        exchange = self._exchange
        if exchange is None or not silos or len(exchange.messages) - len(silos) < self._agreement.quorum:
            return False
        for silo in silos:
            self._absent.leave(silo, exchange)
        return True

    def _begin_session(self) -> None:
        """Ask the silos for nonces."""
        self._absent.readmit()
        self._ahead, self._number, self._session = {}, -1, new_nonce()
        self._send({silo: [Hello()] for silo in self._present}, self._offer, knocks=True)

    def _offer(self, answers: Answers) -> None:
        """Propose the run to the silos that are there."""
        nonces = tuple((silo, single_message(parts, Ready, silo).nonce) for silo, parts in answers.items())
        terms = Terms(
            membership=self._membership.digest,
            head=NONE,
            opened=self._session,
            nonces=nonces,
            experiment=self._offered,
        )
        self._record.propose(terms)
        self._session = session_name(self.run, self._session, nonces)
        phase = self._plan.phase
        self._agreed = terms_context(terms, phase)
        self._session_run = session_run(self._session, self._agreed)
        self._server: ServerProtocol[Any] = self._agreement.server(self._session_run)
        self._context = session_context(self._session, self._agreed)
        self._server.bind(self._context)
        shapes = self._agreement.exchanges
        self._talks = {
            silo: Conversation(Grammar.from_plan(self._plan, shapes(silo))) for silo in self._present
        }
        opening: list[SessionMessage] = [] if phase is None else [phase]
        names = self._membership.silos
        heads = {silo: self._heads.last(names[silo]) for silo in self._present}
        self._ahead = {silo: [replace(terms, head=head), *opening] for silo, head in heads.items()}
        if (stopped := self._stopped()) is not None:
            self.stop(stopped)
        else:
            self._ask(self._ahead, self._joined)

    def _stopped(self) -> str | None:
        """Return why no round follows, "" where none is left; None if one does."""
        rounds = self._rounds
        return rounds.stop_reason(self._agreement.repeatable) if rounds.has_rounds_left else ""

    @property
    def _present(self) -> tuple[int, ...]:
        """The silos that were not left behind."""
        return tuple(silo for silo in range(len(self._membership.silos)) if silo not in self._absent)

    def _joined(self, answers: Answers) -> None:
        users = self._plan.n_users if self._plan.method.shows_counts else None
        self._ahead = opening_messages(answers, len(self._membership.silos), users)
        self._set_up(answers)

    def _set_up(self, answers: Answers) -> None:
        outgoing = self._route(answers)
        if self._server.ready:
            self._begin_round(outgoing)
        else:
            self._ask(by_silo(outgoing), self._set_up)

    def _begin_round(self, before: Outgoing) -> None:
        """Begin the next round, if there is one; ``before`` is what silos must read first."""
        ahead, self._ahead = self._ahead, {}
        if (stopped := self._stopped()) is not None:
            self.stop(stopped)
            return
        rounds = self._rounds
        draw, number = rounds.begin(self._agreement.repeatable), rounds.number
        round_id = RoundId(run=self._session_run, round=number, attempt=0)
        start, kinds = rounds.start, self._plan.method.kinds
        told = {
            silo: [*draw.messages_for(silo, kinds, start), RoundTask(round=number)] for silo in self._present
        }
        self._agreed = with_totals(self._agreed, ahead.get(self._present[0], []))
        first = told[self._present[0]]
        self._asked = round_context(self._context, self._agreed, first)
        self._told, self._place = known_before(first, self._plan.phase), 0
        self._server.bind(self._asked)
        relays = by_silo([*before, *self._server.begin(round_id, self._present, draw.users)])
        before_task = {silo: [*ahead.get(silo, []), *relays.get(silo, [])] for silo in told}
        self._ask({silo: [*before_task[silo], *parts] for silo, parts in told.items()}, self._collect)

    def _collect(self, answers: Answers) -> None:
        exchange, signatures = self._exchange, request_signatures(answers)
        assert exchange is not None
        context = exchange_context(self._asked, self._place)
        if apart := inconsistent_silos(self._membership.roster, context, signatures):
            raise ProtocolError("was asked something else than this coordinator asked", silo=apart[0])
        self._place += 1
        outgoing = self._route(answers)
        if outgoing:
            shown: list[SessionMessage] = [RequestSignatures(signatures=signatures)] if signatures else []
            self._ask({silo: [*shown, *parts] for silo, parts in by_silo(outgoing).items()}, self._collect)
            return
        part = "" if self._plan.phase is None else self._plan.phase.name
        self._record.see((part, self._rounds.number), (self._asked, self._told), answers, exchange.heads)
        if self._agreement.result_at_server:
            total = self._agreement.decode_sum(self._server.result())
            self._rounds.release(total, self._server.n_summed)
        else:
            check_models_agree(answers)
            self._rounds.pass_on(self._server.n_summed)
        self._absent.round_ended()
        if self._absent.n_returned and self._rounds.has_rounds_left:
            self._begin_session()
        else:
            self._begin_round([])

    def _ask(self, parts: dict[int, list[SessionMessage]], then: Callable[[Answers], None]) -> None:
        for silo, content in parts.items():
            self._talks[silo].ask(content)
        self._send(parts, then)

    def _send(
        self, parts: dict[int, list[SessionMessage]], then: Callable[[Answers], None], *, knocks: bool = False
    ) -> None:
        self._number += 1
        letters = {silo: self._sealed(silo, content) for silo, content in sorted(parts.items())}
        self._exchange = Exchange(
            session=self._session, number=self._number, messages=letters, then=then, hellos=knocks
        )

    def _sealed(self, silo: int, parts: list[SessionMessage]) -> bytes:
        return SignedMessage(
            run=self.run,
            session=self._session,
            number=self._number,
            sender=SERVER,
            recipient=silo,
            parts=tuple(parts),
        ).seal(self._identity)

    def _route(self, answers: Answers) -> Outgoing:
        """Hand the silos' messages to the protocol; return those that follow, without the silos that sent none."""
        outgoing = [
            follow
            for silo, parts in answers.items()
            for part in parts
            if isinstance(part, ProtocolMessage)
            for follow in self._server.receive(silo, part.message)
        ]
        if self._server.missing and self._server.has_quorum:
            outgoing += self._server.proceed()
        return outgoing
