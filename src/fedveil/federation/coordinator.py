"""State machine of the coordinator: creates messages and reads answers, whatever the transport.

    session:  Hello -> Ready, Terms -> Join (-> steps of a protocol's setup)
    round:    charge -> RoundTask -> vectors, or steps of a protocol -> sum -> model -> release (checkpoint on disk)

:meth:`CoordinatorParty.messages` returns all messages without an answer, so a transport that lost one sends it again:
silos repeat their answers. A restarted coordinator opens the run folder and begins another session. It resumes the
round that was not released, with the same users, the same model, and the existing charge.

If the protocol supports recovery, :meth:`CoordinatorParty.drop_missing` drops silent silos. A round that begins again
is then a new release: it is charged again, and its users are sampled anew. A dropped silo that answers joins the next
session. The run ends after ``MOST_ATTEMPTS`` attempts at one round: a silo that fails in each attempt would otherwise
spend the budget of all users.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Generic

import numpy as np
from jaxtyping import Bool

from fedveil.crypto.key_agreement import RUN_BYTES, RoundId
from fedveil.errors import FedveilError, IntegrityError, ModelError, ProtocolError, RunFolderError
from fedveil.federation.audit.run_record import RunRecord, known_before
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
from fedveil.federation.session_plan import RoundStartState, SessionPlan, new_nonce, session_name, session_run
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
from fedveil.files import parse_json, read_content, reading
from fedveil.methods.method import message_kinds, shows_counts
from fedveil.protocols.messages import SERVER
from fedveil.protocols.protocol import Outgoing, ProtocolSpec, ServerProtocol
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import (
    Declined,
    GlobalModel,
    Goodbye,
    Hello,
    ProtocolMessage,
    Ready,
    RequestSignatures,
    RoundClip,
    RoundTask,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    Signatures,
    Terms,
    single_message,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import EndingT, Part, Played, RunParts
from fedveil.run.rounds.retries import MOST_ATTEMPTS
from fedveil.run.rounds.round_context import draw_users

DRAWN: Final = "checkpoint/participants.json"
"""File in the run folder with the last sample."""

_SALT_BYTES: Final = 32


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
        builders: dict[type[SessionMessage], Callable[[], SessionMessage]] = {}
        if (users := self.users) is not None:
            builders = {
                SamplingCommitment: lambda: SamplingCommitment(commitment=self.commitment),
                SampledFlag: lambda: SampledFlag(drawn=bool(users[silo])),
                SampledUsers: lambda: SampledUsers(users=users),
            }
        if (clip := start.clip) is not None:
            builders[RoundClip] = lambda: RoundClip(length=clip)
        builders[GlobalModel] = lambda: GlobalModel(values=start.model)
        return [build() for kind, build in builders.items() if kind in kinds]


EVERYBODY = SampleDraw()


def draw_sample(folder: RunFolder, plan: SessionPlan, number: int, charge: int) -> SampleDraw:
    """Return the persisted sample of a round; draw and persist it if it is new.

    A charge that is amplified by sampling holds for one sample only: each charge has a sample of its own, and an
    attempt that is repeated under the same charge has the same sample.

    Args:
        folder: the run folder.
        plan: plan of the session.
        number: the round.
        charge: number of earlier charges of the round.

    Raises:
        RunFolderError: the file is damaged.
    """
    path, method = folder / DRAWN, plan.method
    if method.protection.draws_blindly or not method.draws:
        return EVERYBODY
    document = None
    if path.exists():
        document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
    with reading(path, RunFolderError):
        if document is None or (document["round"], document["attempt"]) != (number, charge):
            drawn = draw_users(method, plan.n_users, plan.privacy, number, charge)
            if drawn is None:
                return EVERYBODY
            # The salt hides the sample behind its commitment: without it, a silo could test guesses at the sample.
            bits, salt = np.packbits(drawn).tobytes().hex(), os.urandom(_SALT_BYTES).hex()
            document = {"round": number, "attempt": charge, "drawn": bits, "salt": salt}
            folder.write_json(DRAWN, document)
        packed, salted = bytes.fromhex(document["drawn"]), bytes.fromhex(document["salt"])
        if (len(packed), len(salted)) != (-(-plan.n_users // 8), _SALT_BYTES):
            raise ValueError
        drawn = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=plan.n_users).astype(np.bool_)
        return SampleDraw(users=drawn, commitment=hashlib.sha256(salted + packed).digest())


class CoordinatorParty(Generic[EndingT]):
    """State machine of the coordinator for one run, or for one part of a run.

    Args:
        run: all parts of the run.
        part: the part that this session plays, backed by the run folder.
        plan: plan of the session.
        offered: the document that the silos receive.
        record: record of the parties' signatures.
        heads: ledger heads of the silos, over all runs.

    Attributes:
        run: 16 bytes, unique to the run.
        outcome: how the run ended; None while it continues.
        refused: code of the silo's refusal that ended the run; None if no silo refused.
        refusals: each refusal, with the silo's name.
        farewells: last messages of an ended run. They free the silos for another run, and may be lost.
        longest_answer: largest size of a silo's message in bytes.
        most_left: how often a silo may leave its session between two rounds.

    Raises:
        ProtocolError: a message of the protocol would be longer than any party reads.
        RunFolderError: the folder is damaged.
    """

    most_left: ClassVar[int] = MOST_LEFT

    def __init__(
        self,
        *,
        run: RunParts[EndingT],
        part: Part,
        plan: SessionPlan,
        offered: str,
        record: RunRecord,
        heads: SeenHeads,
    ) -> None:
        self._run, self._part, self._plan, self._offered = run, part, plan, offered
        self._draw = EVERYBODY
        self._closing: list[SessionMessage] = []
        self._membership, self._identity = record.membership, record.identity
        self.run, self._record, self._heads = record.run, record, heads
        self._agreement: ProtocolSpec[Any, Any] = self._plan.protocol_spec
        check_lengths(self._agreement, self._plan, offered)
        self.longest_answer = longest_answer(self._agreement, self._plan.n_users)
        self._session, self._number = b"", 0
        self._session_run = bytes(RUN_BYTES)
        self._conversations: dict[int, Conversation] = {}
        self._unsent: dict[int, list[SessionMessage]] = {}  # parts that precede those of the next message
        self._exchange: Exchange | None = None
        self._absent = DroppedSilos()
        self.farewells: list[tuple[int, bytes]] = []
        self.outcome: EndingT | None = None
        self.refused: Code | None = None
        self.refusals: list[str] = []
        self._asks_policies = False
        self._begin_session()

    def only_ask_policies(self) -> None:
        """End when every silo has answered the terms: no round begins, and nobody is charged."""
        self._asks_policies = True

    @property
    def is_finished(self) -> bool:
        """Return whether the run has ended."""
        return self.outcome is not None

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        try:
            self._heads.keep()
        finally:
            self._run.close()

    def messages(self) -> list[tuple[int, bytes]]:
        """Return the messages that wait for an answer, as pairs of silo and bytes.

        They include the last message to every dropped silo: an answer shows that the silo has returned.
        """
        if self._exchange is None:
            return []
        waiting = [(silo, self._exchange.messages[silo]) for silo in self._exchange.missing]
        return waiting + self._absent.messages()

    @property
    def awaited_silos(self) -> tuple[int, ...]:
        """Silos whose answers the run needs before it proceeds."""
        return () if self._exchange is None else self._exchange.missing

    def drop_missing(self, silent: tuple[int, ...]) -> tuple[str, ...]:
        """Proceed without silent silos if the protocol allows it; return the names of the dropped silos.

        If too few silos would remain, but the returned ones restore the quorum, the round begins again with these.
        """
        exchange, least = self._exchange, self._agreement.quorum
        if exchange is None or not silent or self._asks_policies:
            return ()
        # First choice: the protocol recovers within the exchange. Second choice: a new session with the returned
        # silos.
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
        """Read a message of a silo and return its kind; messages of a finished exchange are ignored.

        Args:
            silo: number of the sender, as reported by the carrier.
            data: the encoded message.

        Raises:
            ProtocolError: the message is not from this silo, or its content is not allowed; nothing changes.
            RunFolderError: the disk is full; the run continues when the folder is opened again.
        """
        if not 0 <= silo < len(self._membership.silos):
            raise ProtocolError(f"there are {len(self._membership.silos)} silos in the federation", silo=silo)
        identity, largest = self._membership.roster[silo], self.longest_answer
        message = SignedMessage.open(data, sender=silo, identity=identity, recipient=SERVER, largest=largest)
        exchange, name = self._exchange, self._membership.silos[silo]
        if message.run != self.run:
            return ReplyKind.NOTHING
        if exchange is None:
            # After the end, only signatures of the end count.
            last = (message.session, message.number) == (self._session, self._number)
            if last and self._record.agree(silo, message.parts):
                with suppress(IntegrityError):  # an outdated ledger is refused in the next session
                    self._heads.hear({name: message.head})
            return ReplyKind.NOTHING
        if is_in_progress(message.parts):
            return ReplyKind.SIGN if exchange.awaits(silo, message) else ReplyKind.NOTHING
        if silo in self._absent:
            self._absent.note_answer(silo, message)
        if silo in self._absent or not exchange.awaits(silo, message):
            return ReplyKind.NOTHING
        if ends_session(message.parts):
            return self._end(silo, message)
        try:
            # A Hello is answered by Ready or Declined alone, which ends_session has handled.
            if exchange.hellos:
                raise RefusalError(Code.SHAPE)
            self._conversations[silo].answer(message.parts)
            self._heads.hear({name: message.head})  # now: a crash before the other answers must not lose it
            exchange.check_head(name, message)
        except RefusalError:
            self.stop(f"silo {name}: sent {Code.SHAPE.template}")
        except IntegrityError as error:
            self.stop(str(error))
        else:
            exchange.answers[silo], exchange.heads[name] = message.parts, message.head
            self._proceed()
        return ReplyKind.ANSWER

    def _end(self, silo: int, message: SignedMessage) -> ReplyKind:
        """Read a refusal, which ends the run, or a `Ready`, after which a new session begins."""
        (part,), name = message.parts, self._membership.silos[silo]
        if isinstance(part, Declined):
            self.refused = part.why.code
            sentence = part.why.describe(self._membership.silos)
            self.refusals.append(f"silo {name} refuses ({part.why.code.cause}): {sentence}")
            if self._asks_policies and self._exchange is not None:
                self._exchange.answers[silo] = message.parts
                self._proceed()
            else:
                self.stop(self.refusals[0])
            return ReplyKind.ANSWER
        # A Ready outside the Hello exchange means that the silo lost its session, for example by a restart.
        assert isinstance(part, Ready)
        if self._exchange is not None and self._exchange.hellos:
            if part.busy:  # the `Hello` is sent again
                return ReplyKind.NOTHING
            self._exchange.answers[silo] = message.parts
            self._proceed()
            return ReplyKind.ANSWER
        if self._absent.leaves_again(silo) > self.most_left:
            self.stop(f"silo {name} left {self.most_left} sessions of this run in which no round ended")
        elif self._leave((silo,)):
            self._absent.note_answer(silo, message)
            self._proceed()
        else:
            self._begin_session()
        return ReplyKind.ANSWER

    def stop(self, reason: str, *, between_rounds: bool = False) -> None:
        """End the part; the folder can be resumed.

        Args:
            reason: why the part ends early; empty if it is complete.
            between_rounds: whether no round is under way, so that the silos can sign the end of a whole run.
        """
        self._exchange = None
        self.outcome = self._run.conclude(reason or None)
        if between_rounds and self._run.is_whole:
            self._closing = self._record.close(*self._run.counts)
        self._run.close()
        closing = self._closing
        last = {silo: [*closing, Goodbye()] for silo in self._present}
        if closing and self._unsent:  # the statement has its own session, which no silo joins
            last = {silo: [*self._unsent[silo], *parts] for silo, parts in last.items()}
        self._number += 1
        self.farewells = [(silo, self._sealed(silo, parts)) for silo, parts in last.items()]

    def _proceed(self) -> None:
        """Pass the answers on once all answers of the exchange have arrived."""
        exchange = self._exchange
        if exchange is None or exchange.missing:
            return
        # Durable before any message that follows from these answers: a restarted coordinator must still know every
        # head.
        self._heads.keep()
        if self.refusals:
            self.stop("; ".join(self.refusals))
            return
        try:
            exchange.on_complete(dict(sorted(exchange.answers.items())))
        except (IntegrityError, ModelError, ProtocolError, RefusalError) as error:
            self.stop(self._sentence(error))

    def _sentence(self, error: FedveilError) -> str:
        """Return an error's text, with the name of the silo that caused it in place of its number."""
        if isinstance(error, ProtocolError) and error.silo is not None:
            return f"silo {self._membership.silos[error.silo]}: {error.reason}"
        return str(error)

    def _leave(self, silos: tuple[int, ...]) -> bool:
        """Drop silos of the exchange if a quorum remains; return whether it does."""
        exchange = self._exchange
        if exchange is None or not silos or len(exchange.messages) - len(silos) < self._agreement.quorum:
            return False
        for silo in silos:
            self._absent.leave(silo, exchange)
        return True

    def _begin_session(self) -> None:
        """Ask the silos for nonces."""
        self._absent.readmit()
        self._unsent, self._number, self._session = {}, -1, new_nonce()
        self._send({silo: [Hello()] for silo in self._present}, self._offer, hellos=True)

    def _offer(self, answers: Answers) -> None:
        """Propose the run to the silos that answered the `Hello`."""
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
        self._conversations = {
            silo: Conversation(Grammar.from_plan(self._plan, shapes(silo))) for silo in self._present
        }
        opening: list[SessionMessage] = [] if phase is None else [phase]
        names = self._membership.silos
        # Each silo receives the last head of its own ledger, so its terms differ; T (Terms.digest) does not cover the
        # head.
        heads = {silo: self._heads.last(names[silo]) for silo in self._present}
        self._unsent = {silo: [replace(terms, head=head), *opening] for silo, head in heads.items()}
        if (stopped := self._stopped()) is not None:
            self.stop(stopped, between_rounds=True)
        else:
            self._ask(self._unsent, self._joined)

    def _stopped(self) -> str | None:
        """Return why no round follows ("" if none is left); None if one does."""
        step = self._part.step
        if step is None:
            return self._part.stopped or ""
        reason = step.refusal()
        if reason is None and not self._agreement.repeatable and step.tries == MOST_ATTEMPTS:
            return (
                f"silos vanished in each of {MOST_ATTEMPTS} attempts at round {self._part.number}; resume when they "
                "stay"
            )
        return reason

    @property
    def _present(self) -> tuple[int, ...]:
        """Silos that were not dropped."""
        return tuple(silo for silo in range(len(self._membership.silos)) if silo not in self._absent)

    def _joined(self, answers: Answers) -> None:
        """Prepare ledger heads and totals for the first round, and start the protocol's setup."""
        if self._asks_policies:
            self.stop("every silo takes part")
            return
        users = self._plan.n_users if shows_counts(self._plan.method) else None
        self._unsent = opening_messages(answers, len(self._membership.silos), users)
        self._set_up(answers)

    def _set_up(self, answers: Answers) -> None:
        """Play one setup exchange of the protocol, or begin the first round if the setup is complete."""
        outgoing = self._route(answers)
        if self._server.ready:
            self._begin_round(outgoing)
        else:
            self._ask(by_silo(outgoing), self._set_up)

    def _begin_round(self, before: Outgoing) -> None:
        """Begin the next round if one is left. ``before``: protocol messages that the silos must read first."""
        unsent, self._unsent = self._unsent, {}
        if (stopped := self._stopped()) is not None:
            self.stop(stopped, between_rounds=True)
            return
        part, step = self._part, self._part.step
        assert step is not None
        # Charge before the first message of the round leaves: a crash in between leaves a charge without a message,
        # never a message without a charge.
        attempt, number = step.begin(), part.number
        self._draw = draw = draw_sample(self._record.folder, self._plan, number, attempt.charge)
        round_id = RoundId(run=self._session_run, round=number, attempt=0)
        model, clip = part.start()
        start, kinds = RoundStartState(model=model, clip=clip), message_kinds(self._plan.method)
        messages = {
            silo: [*draw.messages_for(silo, kinds, start), RoundTask(round=number)] for silo in self._present
        }
        # T' = H(T | totals); X = H("fedveil/3/bound round" | S | A): see transcript_binding. The parts for one silo
        # suffice, because only the parts that all silos receive alike enter A.
        self._agreed = with_totals(self._agreed, unsent.get(self._present[0], []))
        first = messages[self._present[0]]
        self._asked = round_context(self._context, self._agreed, first)
        self._told, self._place = known_before(first, self._plan.phase), 0
        self._server.bind(self._asked)
        relays = by_silo([*before, *self._server.begin(round_id, self._present, draw.users)])
        before_task = {silo: [*unsent.get(silo, []), *relays.get(silo, [])] for silo in messages}
        self._ask({silo: [*before_task[silo], *parts] for silo, parts in messages.items()}, self._collect)

    def check_requests(self, context: bytes, signatures: Signatures) -> None:
        """Check that every silo signed the request that this coordinator sent.

        Args:
            context: E, the digest of the exchange.
            signatures: signatures of the silos.

        Raises:
            ProtocolError: a silo received another request.
        """
        if inconsistent := inconsistent_silos(self._membership.roster, context, signatures):
            raise ProtocolError("signed another request than this coordinator sent", silo=inconsistent[0])

    def _collect(self, answers: Answers) -> None:
        """Check the signatures over E and route the protocol messages; finish the round if none follow."""
        exchange, signatures = self._exchange, request_signatures(answers)
        assert exchange is not None
        context = exchange_context(self._asked, self._place)
        self.check_requests(context, signatures)
        self._place += 1
        outgoing = self._route(answers)
        if outgoing:
            shown: list[SessionMessage] = [RequestSignatures(signatures=signatures)] if signatures else []
            self._ask({silo: [*shown, *parts] for silo, parts in by_silo(outgoing).items()}, self._collect)
            return
        part = "" if self._plan.phase is None else self._plan.phase.name
        # The round's signatures are verified before its sum is released: a round without them is never released.
        self._record.see((part, self._part.number), (self._asked, self._told), answers, exchange.heads)
        total = None
        if self._agreement.result_at_server:
            total = self._agreement.decode_sum(self._server.result())
        else:
            check_models_agree(answers, self._membership.silos)
        users = self._draw.users
        drawn = self._plan.n_users if users is None else int(users.sum())
        self._part.release(Played(total=total, summed=self._server.n_summed, n_sampled=drawn))
        self._absent.round_ended()
        # A returned silo can join only a new session: this one has dropped it.
        if self._absent.n_returned and self._part.step is not None:
            self._begin_session()
        else:
            self._begin_round([])

    def _ask(self, parts: dict[int, list[SessionMessage]], on_complete: Callable[[Answers], None]) -> None:
        """Send parts that the grammar of each silo's session expects."""
        for silo, content in parts.items():
            self._conversations[silo].ask(content)
        self._send(parts, on_complete)

    def _send(
        self,
        parts: dict[int, list[SessionMessage]],
        on_complete: Callable[[Answers], None],
        *,
        hellos: bool = False,
    ) -> None:
        """Sign one message per silo and start the next exchange."""
        self._number += 1
        messages = {silo: self._sealed(silo, content) for silo, content in sorted(parts.items())}
        self._exchange = Exchange(
            session=self._session,
            number=self._number,
            messages=messages,
            on_complete=on_complete,
            hellos=hellos,
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
        """Pass the silos' messages to the protocol; return its next messages.

        If answers are missing and a quorum has answered, the protocol proceeds without the silent silos.
        """
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
