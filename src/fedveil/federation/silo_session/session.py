"""A silo in one session of a run: it reads the parts of letters, and plays rounds from what it keeps on its disk.

What a silo gives to a round is charged first, then kept, then marked as kept, and only then leaves
(:attr:`ClientContext.persist`). Where the silos alone have the models, they make the server's step: a round has ended
for a silo once the next model is on its disk, and the coordinator sees that all have the same by a tag that tells
nothing of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from safetensors.numpy import save

from fedveil.crypto.key_agreement import RoundId
from fedveil.errors import RunFolderError
from fedveil.federation.audit.run_record import final_attestation, known_before, round_attestation
from fedveil.federation.errors import RefusalError
from fedveil.federation.grammar import Conversation, Grammar
from fedveil.federation.limits import LARGEST_OPENING
from fedveil.federation.session_plan import MODEL
from fedveil.federation.silo_session.round_inputs import RoundInstructions
from fedveil.federation.silo_session.statement_check import SiloCharges
from fedveil.federation.silo_session.task import SiloTask
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
from fedveil.files import reading
from fedveil.protocols.errors import ProtocolError, RefusedSumError
from fedveil.protocols.messages import SERVER
from fedveil.protocols.protocol import ClientContext, ProtocolSpec
from fedveil.protocols.refusals import Code
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

_TOLD: Final = (GlobalModel, RoundClip, SampledUsers, SampledFlag, SamplingCommitment)
"""What stands before a task and belongs to it."""


class SiloSession:
    """What a silo knows of the session it is in, and does in it.

    Args:
        work: what it does in the session.
        place: the silo's in the session; what it gives is kept by the session itself.
        terms: on which the session began.
        agreed: T, of them and of the part of the run that is played.
        session: its name.
        books: where it writes down what it spends and gives.

    Raises:
        ProtocolError: the silo's records do not fit what the parties agree on.
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
            replace(place, least=least, persist=self._keep, privacy=plan.privacy)
        )
        self.client.bind(self._context)
        self.talk = Conversation(Grammar.from_plan(plan, self._agreement.exchanges(place.number)))
        self.instructions = RoundInstructions()
        self._task: RoundTask | None = None
        self._record: RoundRecord | None = None
        self._ended = True

    @property
    def longest(self) -> int:
        """Bytes of the longest letter of the session: a model, totals of users, and messages of the protocol."""
        plan, (_, down) = self.work.plan, self._agreement.max_exchange_bytes
        return LARGEST_OPENING + down + 4 * (plan.dimension + plan.n_users)

    def join(self) -> list[SessionMessage]:
        """Return what the silo says when it joins."""
        answers: list[SessionMessage] = [Join(heads=self._books.sign_heads(self._session, self._place))]
        if self.work.plan.method.shows_counts:
            answers.append(UserCounts(counts=self.work.scores()))
        first = self.client.announce()
        return answers if first is None else [*answers, ProtocolMessage(message=first)]

    def answer(self, parts: Sequence[SessionMessage]) -> list[SessionMessage]:
        """Return the answer to a letter whose shape is due; what it asks of all is bound before any of it is read.

        Raises:
            FedveilError: a request that the silo does not grant, or a message that must not be accepted.
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
        """Return the silo's signature of what the run states, computed again; it gives to no round of the run then.

        Where a round that is asked for again is the same, the coordinator charges it once, and a silo again only for
        its own crash; where it is another release, the coordinator charges before every time that a silo does.

        Raises:
            RefusalError: it states something else than the terms give, or fewer charges than the silo's ledger shows;
                or the silo has signed another end of the run.
        """
        books, agreement = self._books, self._agreement
        places = books.charged_places()
        times = Counter(set(places) if agreement.repeatable else places)
        self.work.check_statement(
            closing, SiloCharges(times=times, whole=agreement.quorum == agreement.clients)
        )
        books.ledger.end(books.run.hex(), closing.line.hex())
        return Attestation(
            signature=self._place.identity.sign(final_attestation(books.run, self.proposed, closing))
        )

    def _of_round(self) -> bytes:
        """Return what the silo signs at the end of a round."""
        books = self._books
        return round_attestation(
            books.run, self.proposed, self._round, self._asked, self._known, books.ledger.head
        )

    def _read(self, part: SessionMessage) -> list[SessionMessage]:
        """Read a part of a letter whose shape is due; return what follows.

        Raises:
            FedveilError: a request that the silo does not grant, or a message that must not be accepted.
        """
        if isinstance(part, _TOLD):
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
            except ArithmeticError as error:  # numbers that no party of the protocol sends
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
        """Return the silo's part of the round, as soon as its task is there and the protocol has come to it."""
        task = self._task
        if task is None or not self.client.awaits_input:
            return []
        self._task = None
        round_id = RoundId(run=self._run, round=task.round, attempt=0)
        self.client.check_round(round_id)
        given = self._given(task)
        self.instructions, self._ended = RoundInstructions(), False
        return [ProtocolMessage(message=message) for message in self.client.contribute(round_id, given)]

    def _given(self, task: RoundTask) -> Any:
        """Return what the silo gives to a round: what it kept of it, or something new that is charged first.

        A round that was charged and not kept (a crash between the two) is charged again: new noise is never free. So is
        one that the protocol does not repeat: whose users are drawn anew in every session, or that may be summed over
        other silos. One that was kept and is not there any more is refused (:meth:`~.books.Books.last`).
        """
        books, repeats, plan = self._books, self._agreement.repeatable, self.work.plan
        if not 1 <= task.round <= plan.rounds:
            raise RefusalError(Code.NO_SUCH_ROUND, plan.rounds)
        if books.ledger.end_record(books.run.hex()) is not None:
            raise RefusalError(Code.RUN_OVER)
        asked = self._terms + task.encode() + self.instructions.encode()
        request, binding = hashlib.sha256(asked).digest(), hashlib.sha256(self.client.binding).digest()
        last = books.last()
        if last is not None and last.refused:
            raise RefusalError(Code.OTHER_SUM, last.round)
        charged = books.charged_rounds()
        _check_state(charged, 0 if last is None else last.round, repeats)
        if repeats and last is not None and task.round == last.round:
            if request != last.request:
                raise RefusalError(Code.ASKED_OTHERWISE, task.round)
            if binding != last.binding:
                raise RefusalError(Code.OTHER_BINDING, task.round)
            self._record = last
            return self._agreement.unpack(last.given)
        self._check_follows(last, task.round)
        with reading("what this silo kept of its last round", RunFolderError):
            before = self.work.state_after(last)
        start = self.instructions.start(plan, task.round, before.get(MODEL))
        drawn = self.instructions.sampled_users(plan, self._place.number)
        again = charged.count(task.round)
        books.ledger.charge(
            run=books.name,
            round=task.round,
            attempt=again,
            event=self.work.event(task.round, again=again > 0),
            budget=books.budget,
            origin=books.origin,
        )
        kept = {**before, **start.tensors()} if before else {}
        self._record = RoundRecord(
            round=task.round, request=request, binding=binding, head=books.ledger.head, before=kept
        )
        workload = self.work.workload(task.round, start, drawn, before)
        workload.begin(0 if repeats else again)
        return workload.client_input(self._place.number)

    def _keep(self, given: Any) -> None:
        """Put what the silo gives to the round on its disk, and a mark of it, before anything of it leaves."""
        content = self._agreement.pack(given)
        assert self._record is not None
        if content != self._record.given:
            self._record = replace(self._record, given=content)
            self._books.records.write(self._books.place, self._record)
        self._books.mark(self._record)

    def _check_follows(self, last: RoundRecord | None, number: int) -> None:
        """Refuse a round that does not follow the last one: the next, or a later one that was played without the silo.

        One that the protocol does not repeat may be asked for again.
        """
        done = 0 if last is None else last.round
        agreement = self._agreement
        if number == done and not agreement.repeatable:
            return
        if agreement.quorum < agreement.clients:
            if number < done:
                raise RefusalError(Code.ROUND_OVER, number, done)
        elif number != done + 1:
            raise RefusalError(Code.ROUND_AHEAD, number, done)

    def _learn(self) -> list[SessionMessage]:
        """Make the server's step from the sum, once it has arrived; keep the next model, and say so."""
        if self._ended or not self.client.has_result:
            return []
        record = self._record
        assert record is not None
        try:
            after, model = self.work.step(record, self.client.result())
        except Exception as error:  # whatever it is: that there is one would tell of the sum
            raise self._other_sum(f"no step is made from the sum: {error}") from error
        if not record.after:
            self._record = replace(record, after=after)
            self._books.records.write(self._books.place, self._record)
        elif save(dict(record.after)) != save(dict(after)):
            raise self._other_sum(f"round {record.round} ended here with another sum before")
        self._books.models.put(model)
        self._ended = True
        content = struct.pack(">I", record.round) + save(dict(after))
        return [ModelStored(tag=self.client.tag(content))]

    def _other_sum(self, reason: str) -> RefusalError:
        """Return the refusal of a sum that the silo has decrypted; it gives nothing more to the run.

        A coordinator chooses what silos decrypt. If it could ask again, or read of a refusal which check it comes from,
        it would find what single silos encrypted by bisection.
        """
        assert self._record is not None
        self._record = replace(self._record, refused=True)
        self._books.records.write(self._books.place, self._record)
        return RefusalError(Code.OTHER_SUM, self._record.round, detail=reason)


def _check_state(charged: list[int], done: int, repeats: bool) -> None:
    """Refuse to go on where ledger and records of a run tell of different pasts."""
    known = set(range(1, done + 1)) if repeats else {done} - {0}
    if not known <= set(charged) or (repeats and set(charged) - set(range(1, done + 2))):
        raise RefusalError(Code.REPLACED)
