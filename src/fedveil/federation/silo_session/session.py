"""State machine of a silo in one session: reads parts of messages, and plays rounds from its state.

The order for a contribution is: charge, persist, mark as persisted, send (:attr:`ClientContext.persist`). If only the
silos have the models, the silos make the server's step. A round has then ended for a silo once the next model is
persisted. A tag, which reveals nothing of the model, shows the coordinator that all silos have the same model.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from jaxtyping import Bool, Float32
from safetensors.numpy import save

from fedveil.crypto.key_agreement import RoundId
from fedveil.errors import ProtocolError, RefusedSumError, RunFolderError
from fedveil.federation.audit.run_record import final_attestation, known_before, round_attestation
from fedveil.federation.grammar import Conversation, Grammar
from fedveil.federation.session_plan import MODEL, RoundStartState, SessionPlan
from fedveil.federation.silo_session.statement_check import SiloCharges
from fedveil.federation.silo_session.tasks import SiloTask
from fedveil.federation.silo_state import SiloState
from fedveil.federation.store import RoundRecord
from fedveil.federation.transcript_binding import (
    check_request_signatures,
    exchange_context,
    round_context,
    session_context,
    sign_request,
    with_totals,
)
from fedveil.federation.transport.interface import LARGEST_OPENING
from fedveil.files import reading
from fedveil.methods.method import shows_counts
from fedveil.protocols.field_codecs import Writer
from fedveil.protocols.messages import SERVER
from fedveil.protocols.protocol import ClientContext, ProtocolSpec
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import (
    Attestation,
    Finalize,
    GlobalModel,
    Join,
    LedgerHeads,
    ModelStored,
    ProtocolMessage,
    RequestSignature,
    RequestSignatures,
    RoundClip,
    RoundTask,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    Terms,
    UserCounts,
    UserTotals,
    single_message,
)

_INSTRUCTIONS: Final = (GlobalModel, RoundClip, SampledUsers, SampledFlag, SamplingCommitment)
"""Kinds of the parts that precede a task and belong to it."""

_P = TypeVar("_P", bound=SessionMessage)


class RoundInstructions:
    """Parts that a silo received ahead of the task of a round: at most one part of each kind."""

    def __init__(self) -> None:
        self._parts: dict[type[SessionMessage], SessionMessage] = {}

    def add(self, part: SessionMessage) -> None:
        """Store a part until the task arrives; the grammar admits one part of each kind."""
        self._parts[type(part)] = part

    def get(self, kind: type[_P]) -> _P | None:
        """Return the part of a kind; None if none was received."""
        part = self._parts.get(kind)
        assert part is None or isinstance(part, kind)
        return part

    def encode(self) -> bytes:
        """Return the bytes of all parts, in the order of their kinds."""
        ordered = sorted(self._parts.values(), key=lambda part: part.kind)
        return b"".join(Writer().number(part.kind, 1).block(part.encode()).bytes() for part in ordered)

    def sampled_users(self, plan: SessionPlan, silo: int) -> Bool[np.ndarray, " users"] | None:
        """Return the sampled users as far as disclosed, (|U|,) bool; None if all, or if undisclosed.

        Raises:
            RefusalError: the sample has another number of users.
        """
        users = plan.n_users
        if plan.method.contribution.drawn_alone:  # a silo that is one client learns only its own flag
            mask, own = np.zeros(users, dtype=np.bool_), self.get(SampledFlag)
            mask[silo] = own is None or own.drawn
            return mask
        sampled = self.get(SampledUsers)
        if sampled is not None and len(sampled.users) != users:
            raise RefusalError(Code.USERS, len(sampled.users), users)
        return None if sampled is None else sampled.users

    def start(
        self, plan: SessionPlan, number: int, own: Float32[np.ndarray, " d"] | None = None
    ) -> RoundStartState:
        """Return the state at the start of the round; ``own`` is the model, if only the silos have it.

        The guarantee depends on neither model nor clip. Updates are measured in units of the clip, and the bound in
        these units is constant.

        Raises:
            RefusalError: the model has another length, or the clip cannot occur in this round.
        """
        model, clip = self.get(GlobalModel), self.get(RoundClip)
        if model is not None and len(model.values) != plan.dimension:
            raise RefusalError(Code.PARAMETERS, len(model.values), plan.dimension)
        if clip is not None and not plan.method.bound.possible(clip.length, number):
            shown = clip.length if math.isfinite(clip.length) else 0.0
            raise RefusalError(Code.CLIP_MOVED, shown, number)
        values = own if model is None else model.values
        assert values is not None, "a message with a task has the model, unless the silos have it"
        return RoundStartState(model=values, clip=None if clip is None else clip.length)


class SiloSession:
    """State of a silo in one session.

    Args:
        work: the silo's task in the session.
        place: the silo's identity, number and keys in the session. The session itself supplies ``persist``.
        terms: terms of the session.
        agreed: T, from the terms and the part of the run.
        session: name of the session.
        books: persisted state of the silo.

    Attributes:
        work: the silo's task in the session.
        proposed: digest of the terms.
        client: the silo's end of the protocol.
        talk: grammar state of the session.
        instructions: parts received ahead of the next task.

    Raises:
        ProtocolError: the silo's records do not fit the protocol's public parameters.
    """

    def __init__(
        self,
        *,
        work: SiloTask,
        place: ClientContext,
        terms: Terms,
        agreed: bytes,
        session: bytes,
        books: SiloState,
    ) -> None:
        self.work = work
        self._books, self._run = books, place.run
        self._session, self._place = session, place
        self.proposed, self._terms = terms.digest, agreed
        self._round, self._known = ("", 0), b""
        self._context = session_context(session, agreed)
        self._asked, self._exchange = b"", 0
        self._shown: frozenset[int] = frozenset()
        plan = work.plan
        self._agreement: ProtocolSpec[Any, Any] = plan.protocol_spec
        self._least = self._agreement.quorum
        least = self._least if self._agreement.repeatable else place.least
        self.client = self._agreement.client(
            replace(place, least=least, persist=self._persist_input, privacy=plan.privacy)
        )
        self.client.bind(self._context)
        self.talk = Conversation(Grammar.from_plan(plan, self._agreement.exchanges(place.number)))
        self.instructions = RoundInstructions()
        self._task: RoundTask | None = None
        self._record: RoundRecord | None = None
        self._ended = True

    @property
    def longest(self) -> int:
        """Largest message of the session in bytes: a model, totals of users, and messages of the protocol."""
        plan, (_, down) = self.work.plan, self._agreement.max_exchange_bytes
        return LARGEST_OPENING + down + 4 * (plan.dimension + plan.n_users)

    def join(self) -> list[SessionMessage]:
        """Return the parts with which the silo joins: ledger heads, user counts if needed, and protocol setup."""
        answers: list[SessionMessage] = [Join(heads=self._books.sign_heads(self._session, self._place))]
        if shows_counts(self.work.plan.method):
            answers.append(UserCounts(counts=self.work.scores()))
        first = self.client.announce()
        return answers if first is None else [*answers, ProtocolMessage(message=first)]

    def answer(self, parts: Sequence[SessionMessage]) -> list[SessionMessage]:
        """Return the answer to a message of the expected shape.

        The protocol is bound to X, the digest of the request to all silos, before any part is read.

        Raises:
            FedveilError: the silo refuses a request, or a message is not acceptable.
        """
        begins = any(isinstance(part, RoundTask) for part in parts)
        if begins:
            self._terms = with_totals(self._terms, parts)
            self._asked = round_context(self._context, self._terms, parts)
            self._round = self._books.part, single_message(parts, RoundTask, SERVER).round
            self._known = known_before(parts, self.work.plan.phase)
            self.client.bind(self._asked)
        self._exchange, self._shown = 0 if begins else self._exchange + 1, frozenset()
        answers = [answer for part in parts for answer in self._read(part)]
        # This message must relay a signature of request and ledger head from every silo in the opened sum: else the
        # sum could include a silo that received another request.
        if unshown := sorted(set(self.client.survivors) - self._shown):
            raise RefusalError(Code.UNSHOWN, unshown[0])
        if self.talk.signs:
            context = exchange_context(self._asked, self._exchange)
            answers.append(
                RequestSignature(signed=sign_request(self._place.identity, context, self._books.ledger.head))
            )
        if self.talk.attests:
            answers.append(Attestation(signature=self._place.identity.sign(self._of_round())))
        return answers

    def sign_statement(self, closing: Finalize) -> Attestation:
        """Check the run's statement and sign it; the silo contributes to no round of the run afterwards.

        The number of charges to expect depends on the protocol. If rounds are repeatable, the coordinator charges
        each round once, and a silo charges a round again only after its own crash. Otherwise the coordinator charges
        before each charge of a silo.

        Raises:
            RefusalError: the statement differs from the terms, or charges less than the silo's ledger shows; or the
                silo has signed another end of the run.
        """
        books, agreement = self._books, self._agreement
        places = books.charged_places()
        times = Counter(set(places) if agreement.repeatable else places)
        self.work.check_statement(
            closing, SiloCharges(times=times, needs_all_silos=agreement.quorum == agreement.clients)
        )
        # The note is durable before the signature exists: a crash in between cannot lead to contributions after a
        # signed end.
        books.ledger.end(books.run.hex(), closing.line.hex())
        return Attestation(
            signature=self._place.identity.sign(final_attestation(books.run, self.proposed, closing))
        )

    def _of_round(self) -> bytes:
        """Return the bytes that the silo signs at the end of a round."""
        books = self._books
        return round_attestation(
            books.run, self.proposed, self._round, self._asked, self._known, books.ledger.head
        )

    def _read(self, part: SessionMessage) -> list[SessionMessage]:
        """Read one part of a message of the expected shape; return the replies.

        Raises:
            FedveilError: the silo refuses a request, or a message is not acceptable.
        """
        if isinstance(part, _INSTRUCTIONS):
            self.instructions.add(part)
            return []
        if isinstance(part, UserTotals):
            self.work.compute_weights(part.counts)
            return []
        if isinstance(part, LedgerHeads):
            self._books.check_heads(part, self._session, self._place, least=self._least - 1)
            return []
        if isinstance(part, RequestSignatures):
            before = exchange_context(self._asked, self._exchange - 1)
            check_request_signatures(self._place.roster, before, part.signatures, self._least)
            self._shown = frozenset(silo for silo, _ in part.signatures)
            self._books.note(
                {silo: head for silo, (head, _) in part.signatures if silo != self._place.number}
            )
            return []
        if isinstance(part, ProtocolMessage):
            try:
                replies: list[SessionMessage] = [
                    ProtocolMessage(message=reply) for reply in self.client.receive(part.message)
                ]
            except RefusedSumError as error:
                raise self._other_sum(str(error)) from error
            except ArithmeticError as error:  # numbers that an honest party never sends
                raise ProtocolError(str(error)) from error
            except ProtocolError as error:
                if (silo := error.silo) is None or silo == self._place.number:
                    raise
                raise RefusalError(Code.OF_SILO, silo, detail=str(error)) from error
            return [*replies, *self._learn(), *self._contribute()]
        if isinstance(part, RoundTask):
            self._task = part
            return self._contribute()
        raise RefusalError(Code.SHAPE)

    # --- a round ---------------------------------------------------------------------------------------------

    def _contribute(self) -> list[SessionMessage]:
        """Return the silo's contribution once the task has arrived and the protocol awaits it."""
        task = self._task
        if task is None or not self.client.awaits_input:
            return []
        self._task = None
        round_id = RoundId(run=self._run, round=task.round, attempt=0)
        self.client.check_round(round_id)
        round_input = self._round_input(task)
        self.instructions, self._ended = RoundInstructions(), False
        return [ProtocolMessage(message=message) for message in self.client.contribute(round_id, round_input)]

    def _round_input(self, task: RoundTask) -> Any:
        """Return the silo's input to a round: the persisted one, or a new one that is charged first.

        A round that was charged without a persisted input (a crash between the two) is charged again: new noise
        always costs a charge. The same holds for protocols without repeatable rounds, which sample users anew in
        every session, or may sum over other silos. A missing persisted input is refused
        (:meth:`~fedveil.federation.silo_state.SiloState.last`).

        Raises:
            RefusalError: the round does not exist, the run's end is signed, the request differs from the one answered
                before, or the state does not fit.
        """
        books, repeatable, plan = self._books, self._agreement.repeatable, self.work.plan
        if not 1 <= task.round <= plan.rounds:
            raise RefusalError(Code.NO_SUCH_ROUND, plan.rounds)
        if books.ledger.end_record(books.run.hex()) is not None:
            raise RefusalError(Code.RUN_OVER)
        # The request digest decides whether a repeat is the same request: T', the task, and the instructions (model,
        # sample).
        request_bytes = self._terms + task.encode() + self.instructions.encode()
        request, binding = (
            hashlib.sha256(request_bytes).digest(),
            hashlib.sha256(self.client.binding).digest(),
        )
        last = books.last()
        if last is not None and last.refused:
            raise RefusalError(Code.OTHER_SUM, last.round)
        charged = books.charged_rounds()
        _check_state(charged, 0 if last is None else last.round, repeatable)
        if repeatable and last is not None and task.round == last.round:
            if request != last.request:
                raise RefusalError(Code.ASKED_OTHERWISE, task.round)
            if binding != last.binding:
                raise RefusalError(Code.OTHER_BINDING, task.round)
            self._record = last
            return self._agreement.unpack(last.contribution)
        self._check_follows(last, task.round)
        with reading("what this silo kept of its last round", RunFolderError):
            before = self.work.state_after(last)
        start = self.instructions.start(plan, task.round, before.get(MODEL))
        sampled_users = self.instructions.sampled_users(plan, self._place.number)
        repetitions = charged.count(task.round)
        # Order for a crash: charge, then persist the input (_keep), then send. A crash costs a charge, never an
        # uncharged input.
        books.ledger.ledger.charge(
            run=books.name,
            round=task.round,
            attempt=repetitions,
            event=self.work.event(task.round, again=repetitions > 0),
            budget=books.budget,
            origin=books.origin,
        )
        tensors = {**before, **start.tensors()} if before else {}
        self._record = RoundRecord(
            round=task.round, request=request, binding=binding, head=books.ledger.head, before=tensors
        )
        workload = self.work.workload(task.round, start, sampled_users, before)
        workload.begin(0 if repeatable else repetitions)
        return workload.client_input(self._place.number)

    def _persist_input(self, client_input: Any) -> None:
        """Persist the silo's input to the round, and its mark, before any of it leaves."""
        content = self._agreement.pack(client_input)
        assert self._record is not None
        if content != self._record.contribution:
            self._record = replace(self._record, contribution=content)
            self._books.records.write(self._books.place, self._record)
        self._books.mark(self._record)

    def _check_follows(self, last: RoundRecord | None, number: int) -> None:
        """Refuse a round that does not follow the silo's last one.

        Allowed are the next round, and a later one if rounds can proceed without this silo. A round that the protocol
        does not repeat may be requested again.
        """
        last_round = 0 if last is None else last.round
        agreement = self._agreement
        if number == last_round and not agreement.repeatable:
            return
        if agreement.quorum < agreement.clients:
            if number < last_round:
                raise RefusalError(Code.ROUND_OVER, number, last_round)
        elif number != last_round + 1:
            raise RefusalError(Code.ROUND_AHEAD, number, last_round)

    def _learn(self) -> list[SessionMessage]:
        """Make the server's step once the sum has arrived; persist the next model and confirm it."""
        if self._ended or not self.client.has_result:
            return []
        record = self._record
        assert record is not None
        try:
            after, model = self.work.step(record, self.client.result())
        except Exception as error:  # any error: its kind would reveal something of the sum
            raise self._other_sum(f"the server step failed on the sum: {error}") from error
        if not record.after:
            self._record = replace(record, after=after)
            self._books.records.write(self._books.place, self._record)
        # One round decrypted to two sums: the coordinator has sent other ciphertexts than before (see _other_sum).
        elif save(dict(record.after)) != save(dict(after)):
            raise self._other_sum(f"round {record.round} was decrypted to another sum before")
        self._books.models.put(model)
        self._ended = True
        content = struct.pack(">I", record.round) + save(dict(after))
        return [ModelStored(tag=self.client.tag(content))]

    def _other_sum(self, reason: str) -> RefusalError:
        """Return the refusal of a decrypted sum, and stop the silo's contributions to the run.

        The coordinator chooses the ciphertexts that silos decrypt. If it could ask again, or learn which check
        failed, it could find the values that single silos encrypted by bisection.
        """
        assert self._record is not None
        self._record = replace(self._record, refused=True)
        self._books.records.write(self._books.place, self._record)
        return RefusalError(Code.OTHER_SUM, self._record.round, detail=reason)


def _check_state(charged_rounds: list[int], last_round: int, repeatable: bool) -> None:
    """Refuse to continue if the ledger and the records of a run disagree about its past.

    Args:
        charged_rounds: charged rounds of the part, with repetitions.
        last_round: last round with a persisted input; 0 if none.
        repeatable: whether a repeated round is the same release.
    """
    required = set(range(1, last_round + 1)) if repeatable else {last_round} - {0}
    if not required <= set(charged_rounds) or (
        repeatable and set(charged_rounds) - set(range(1, last_round + 2))
    ):
        raise RefusalError(Code.REPLACED)
