"""State machine of a silo: reads the coordinator's messages and answers each with one message.

    Terms                        -> Join or Declined     checks policy, users' budget over all runs, experiment
    Finalize                     -> Attestation          computes the run's statement again, and signs it
    RoundTask, ProtocolMessage   -> ProtocolMessage      charges and persists before anything leaves
    other                        -> Ready                outside its session (:mod:`~.session_plan`): no change

A repeated request gets the same answer. The silo refuses another request for an answered round, and a round that does
not follow the last one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from fedveil.crypto.keys import IdentityKey
from fedveil.data.main_silos import MainSilosError
from fedveil.errors import (
    BudgetError,
    ConfigError,
    FedveilError,
    IntegrityError,
    OwnRecordsError,
    ProtocolError,
    RunFolderError,
)
from fedveil.federation.grammar import is_proposal, out_of_session_kind
from fedveil.federation.ledger_heads import HEADS, SeenHeads
from fedveil.federation.membership import Membership
from fedveil.federation.policy import UNCHARGED_CPU_FILE, CpuQuota, Outcome, Policy
from fedveil.federation.proposal_review import review_proposal
from fedveil.federation.session_plan import SessionAdmission, session_run
from fedveil.federation.signed_message import SignedMessage, session_in
from fedveil.federation.silo_data import LocalPopulation
from fedveil.federation.silo_ledger import SiloLedger
from fedveil.federation.silo_session.session import SiloSession
from fedveil.federation.silo_session.tasks import SiloTask
from fedveil.federation.silo_state import KEPT, ReplayMarks, SiloState
from fedveil.federation.store import ModelStore, RecordStore
from fedveil.federation.terms import is_batch_independent_run, without_trainer
from fedveil.federation.transcript_binding import terms_context
from fedveil.federation.transport.interface import LARGEST_OPENING
from fedveil.files import read_content, replace_file, writing
from fedveil.privacy.ledger import Origin
from fedveil.protocols.messages import SERVER
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.refusals import Code, Refusal, RefusalError
from fedveil.protocols.session_messages import (
    Declined,
    Finalize,
    Goodbye,
    InProgress,
    RunPart,
    SessionMessage,
    Terms,
    single_message,
)
from fedveil.sanitize import quiet_log

_log = quiet_log("fedveil.silo")

MODELS: Final = "models"
"""Folder in the state folder: the last model of each run whose models the coordinator does not have."""

TERMS: Final = "terms"
"""Folder in the state folder: the signed messages with the terms of all charges."""

MEMBERSHIPS: Final = "memberships"
"""Folder in the state folder: the memberships that the terms of all charges name, by digest."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Membership and policy in the silo's files, read before every session.

    A revocation or a stricter policy therefore applies from the next session.

    Attributes:
        membership: the federation, signed by its founder.
        policy: the silo's policy.
    """

    membership: Membership
    policy: Policy


@dataclass
class _Exchange:
    """The last answered message of a session; a repetition gets the same answer.

    Attributes:
        run: the run.
        session: name of the session.
        number: number of the exchange.
        request: digest of the message.
        reply: the answer.
    """

    run: bytes
    session: bytes
    number: int
    request: bytes
    reply: bytes


class SiloParty:
    """State machine of one silo.

    Args:
        standing: reads membership and policy; called at once and before every session.
        number: number of the silo.
        identity: long-term key of the silo.
        share: population with the silo's own records and the public facts of the federation.
        state: persistent folder with the ledger and the last answer of each run.
        clock: seconds since any moment; never goes back.

    Raises:
        RunFolderError: the ledger is damaged, or another process serves this silo.
    """

    def __init__(
        self,
        *,
        standing: Callable[[], Standing],
        number: int,
        identity: IdentityKey,
        share: LocalPopulation,
        state: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._standing, self._number, self._identity, self._share = standing, number, identity, share
        now = standing()
        self._membership, self._policy = now.membership, now.policy
        self._store = RecordStore(state / "answers")
        self._state = state
        self._heads = SeenHeads(state / HEADS, now.membership.charter)
        charter, serial = now.membership.charter, now.membership.serial
        self._ledger = SiloLedger(state, now.policy, self._store, charter=charter, serial=serial)
        self._unpaid: Path | None = None
        self._session: SiloSession | None = None
        self._last: _Exchange | None = None
        self._over = False
        self._admission = SessionAdmission(clock)
        self._cpu_quota = CpuQuota(state / UNCHARGED_CPU_FILE)
        self._outcome: Outcome = "refused"

    def __enter__(self) -> SiloParty:
        """Return the silo."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ledger."""
        self.close()

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        self._ledger.close()

    def receive(self, data: bytes) -> bytes:
        """Read a message of the coordinator and return the answer.

        Raises:
            ProtocolError: the message is not from the coordinator to this silo, or the day's quota of uncharged work
                is spent. The message gets no answer, and nothing changes.
        """
        self._cpu_quota.check(self._policy.uncharged_cpu_seconds)
        # Processor time of this thread, not wall-clock time: a silo that waits for its disk spends nothing.
        began, charges, self._outcome = time.thread_time(), self._ledger.charges, "refused"
        try:
            return self._receive(data)
        finally:
            charged = self._ledger.charges - charges
            if charged:
                _log.info(
                    "charged ledger entries: %d; the ledger ends with %s",
                    charged,
                    self._ledger.head.hex()[:16],
                )
            outcome = "charged" if charged else self._outcome
            self._cpu_quota.count(time.thread_time() - began, outcome)

    @property
    def membership(self) -> Membership:
        """The membership under which the silo was opened."""
        return self._membership

    def proposed_membership(self, data: bytes) -> bytes | None:
        """Return the digest of the membership that a message proposes a session under; None if it proposes none.

        Raises:
            ProtocolError: the message is not from the coordinator to this silo, or the day's quota of uncharged work
                is spent.
        """
        with self.uncharged_work():
            parts = self._open(data).parts
            return single_message(parts, Terms, SERVER).membership if is_proposal(parts) else None

    @contextmanager
    def uncharged_work(self) -> Iterator[None]:
        """Count the processor time of a ``with`` block as work that leads to no charged round.

        Raises:
            ProtocolError: the day's quota of such work is spent.
        """
        self._cpu_quota.check(self._policy.uncharged_cpu_seconds)
        began = time.thread_time()
        try:
            yield
        finally:
            self._cpu_quota.count(time.thread_time() - began, "refused")

    def in_progress_message(self, data: bytes) -> bytes:
        """Return a keep-alive that answers a message; may be called while :meth:`receive` runs.

        It reports no progress: the number of steps would reveal the number of records.

        Raises:
            ProtocolError: the message is not from the coordinator to this silo.
        """
        return self._open(data).answer(InProgress()).seal(self._identity)

    def longest(self, beginning: bytes) -> int:
        """Return the size limit in bytes of a message with this beginning, before the rest is read.

        Args:
            beginning: the first :data:`~.transport.interface.BEGINNING` bytes, or more; unverified.
        """
        session, last = self._session, self._last
        is_current = (
            session is not None and last is not None and session_in(beginning) == (last.run, last.session)
        )
        return min(
            self._policy.max_message_bytes, session.longest if is_current and session else LARGEST_OPENING
        )

    def _open(self, data: bytes) -> SignedMessage:
        return SignedMessage.open(
            data,
            sender=SERVER,
            identity=self._membership.coordinator,
            recipient=self._number,
            largest=self.longest(data),
        )

    def _receive(self, data: bytes) -> bytes:
        message = self._open(data)
        digest, last = hashlib.sha256(data).digest(), self._last
        if last is not None and (message.run, message.session, message.number) == (
            last.run,
            last.session,
            last.number,
        ):
            # A lost answer is sent again byte for byte: nothing is computed or charged twice. Another message under
            # the same number is refused.
            if digest == last.request:
                return last.reply
            return self._seal(message, Declined(why=Refusal(Code.OTHER_MESSAGE)))
        try:
            return self._answer(message, data)
        except (Exception, SystemExit) as error:
            return self._seal(message, _refused(error))

    def _answer(self, message: SignedMessage, data: bytes) -> bytes:
        """Return the answer to a message, or raise without a change of state."""
        last, session, kind = self._last, self._session, out_of_session_kind(message.parts)
        if is_proposal(message.parts):
            return self._join(message, data)
        if last is None or session is None or (message.run, message.session) != (last.run, last.session):
            return self._here(message)
        # Only the last answer is stored, so an earlier exchange cannot be repeated.
        if message.number <= last.number:
            raise RefusalError(Code.EXCHANGE_OVER, message.number, last.number)
        if kind in (Goodbye, Finalize):
            _log.info("run %s ended", message.run.hex()[:16])
            self._over = True
            self._admission.keep(message.run, busy=False)
        if kind is Finalize:
            return self._seal(
                message, session.sign_statement(single_message(message.parts, Finalize, SERVER))
            )
        if self._over or kind is not None:
            return self._here(message)
        session.talk.ask(message.parts)
        if session.talk.begins:
            self._cpu_quota.begin_round()
        answers: list[SessionMessage] = []
        self._over = True  # on failure, parts may have taken effect: end the session
        try:
            answers = session.answer(message.parts)
            session.talk.answer(answers)
            self._over, self._outcome = False, "answered"
        except (Exception, SystemExit) as error:
            # Any error: without an answer, the coordinator would request the round again, and it would be charged
            # again.
            answers = [_refused(error)]
        return self._reply(message, data, answers)

    def _here(self, message: SignedMessage) -> bytes:
        return self._seal(message, self._admission.ready_message(message.run))

    def _reply(self, message: SignedMessage, data: bytes, answers: Sequence[SessionMessage]) -> bytes:
        """Store the answer to an exchange for repetitions, and return it."""
        assert self._session is not None
        self._admission.keep(message.run, busy=self._session.talk.underway and not self._over)
        reply, digest = self._seal(message, *answers), hashlib.sha256(data).digest()
        self._last = _Exchange(message.run, message.session, message.number, digest, reply)
        return reply

    # --- joining a run ---------------------------------------------------------------------------------------

    def _join(self, message: SignedMessage, data: bytes) -> bytes:
        """Check the terms of a session and answer with a `Join`, or sign the end of the run."""
        terms = single_message(message.parts, Terms, SERVER)
        phase = next((part for part in message.parts if isinstance(part, RunPart)), None)
        if not self._admission.admits(self._number, message.run, message.session, terms):
            return self._here(message)
        self._stand()
        if terms.membership != self._membership.digest:
            raise RefusalError(Code.MEMBERSHIP)
        # The coordinator's last known head of this ledger: a ledger that went back is refused before any work.
        self._ledger.require(terms.head)
        closing = next((part for part in message.parts if isinstance(part, Finalize)), None)
        if closing is None and self._ledger.end_record(message.run.hex()) is not None:
            raise RefusalError(Code.RUN_OVER)
        work = review_proposal(terms.experiment, phase, self._policy, self._share, self._number)
        self._check_one_experiment(message.run, terms)
        self._ledger.reopen(self._policy)
        agreed, part = terms_context(terms, phase), "" if phase is None else phase.name
        books = SiloState(
            run=message.run,
            part=part,
            silos=self._membership.silos,
            ledger=self._ledger,
            origin=self._origin(terms),
            budget=self._policy.budget,
            heads=self._heads,
            records=self._store,
            marks=ReplayMarks(self._state / KEPT),
            models=ModelStore(self._state / MODELS, message.run),
        )
        client_context = ClientContext(
            run=session_run(message.session, agreed),
            number=self._number,
            identity=self._identity,
            roster=self._membership.roster,
            secret=lambda: self._store.secret(books.place),
        )
        session = SiloSession(
            work=work, place=client_context, terms=terms, agreed=agreed, session=message.session, books=books
        )
        if closing is not None:
            self._admission.admit()
            return self._seal(message, session.sign_statement(closing))
        self._check_budget(books, work)
        session.talk.ask(message.parts)
        answers = session.join()
        session.talk.answer(answers)
        # The terms are on disk before the session exists: every later charge names their digest, and an auditor reads
        # them.
        self._keep_terms(terms, data)
        # The nonce changes only now, after every step that can fail: a failed join can be tried again under it.
        self._admission.admit()
        self._cpu_quota.begin()
        self._session, self._over, self._outcome = session, False, "answered"
        _log.info("joined run %s", message.run.hex()[:16])
        return self._reply(message, data, answers)

    def _check_budget(self, books: SiloState, work: SiloTask) -> None:
        """Refuse a run whose whole cost exceeds the remaining budget, before its first charge.

        Later, each round must fit by itself. A round that is charged twice therefore ends the run where the budget
        ends, not at the start of the next session.
        """
        budget = self._policy.budget
        if budget is None or books.has_earlier_charges:
            return
        if self._ledger.ledger.would_exceed(work.whole_run, budget):
            raise RefusalError(Code.RUN_BUDGET, work.rounds, budget.epsilon, budget.delta)

    def _stand(self) -> None:
        """Read membership and policy again; refuse if they cannot be read or the membership has changed."""
        try:
            now = self._standing()
        except FedveilError as error:
            raise RefusalError(Code.STANDING, detail=str(error)) from error
        if now.membership.digest != self._membership.digest:
            detail = "membership.toml has changed since this silo is served: serve it again"
            raise RefusalError(Code.STANDING, detail=detail)
        self._policy = now.policy

    # --- its own files -----------------------------------------------------------------------------------------

    def _origin(self, terms: Terms) -> Origin:
        return Origin(
            terms=terms.digest.hex(),
            coordinator=hashlib.sha256(self._membership.coordinator.raw).hexdigest(),
            membership=self._membership.serial,
            policy=self._ledger.policy_digest,
        )

    def _keep_terms(self, terms: Terms, data: bytes) -> None:
        """Persist the coordinator's signed terms, and the membership, before a charge can name them.

        Terms that no charge names are deleted when the next terms arrive.
        """
        path, unpaid = self._state / TERMS / f"{terms.digest.hex()}.message", self._unpaid
        members = self._membership_file(terms.membership)
        with writing(members, RunFolderError):
            if not members.exists():
                members.parent.mkdir(mode=0o700, exist_ok=True)
                replace_file(members, self._membership.to_toml().encode(), mode=0o600)
        with writing(path, RunFolderError):
            if unpaid is not None and unpaid != path and not self._ledger.names(unpaid.stem):
                unpaid.unlink(missing_ok=True)
            if not path.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                replace_file(path, data, mode=0o600)
                self._unpaid = path

    def _check_one_experiment(self, run: bytes, terms: Terms) -> None:
        """Refuse to continue a run that was charged under another experiment.

        The run's rounds are charged, and stated at its end, as rounds of one experiment among the same silos. A renewed
        membership gives other terms for the same experiment, so the experiments in the messages are compared, and the
        silos of the memberships: what each of them learns depends on how many there are, and nothing in an experiment
        has to say that. Trainers do not affect a bound, with one exception. The statement of a batch-independent run
        says nothing about batches, so no round of it may have been trained in batches.
        """
        now, trained = terms.experiment, self._ledger.training_terms(run.hex())
        for digest in self._ledger.charged_terms(run.hex()) - {terms.digest.hex()}:
            before = self._charged_terms(digest)
            text = before.experiment
            batched = digest in trained and not is_batch_independent_run(text)
            if without_trainer(text) != without_trainer(now) or (batched and is_batch_independent_run(now)):
                raise RefusalError(Code.OTHER_EXPERIMENT)
            if not self._has_same_silos(before.membership):
                raise RefusalError(
                    Code.OTHER_EXPERIMENT, detail="it was charged in a federation with other silos"
                )

    def _charged_terms(self, digest: str) -> Terms:
        """Return the stored terms with this digest."""
        data = read_content(
            self._state / TERMS / f"{digest}.message", RunFolderError, largest=LARGEST_OPENING
        )
        # A coordinator whose key was revoked since may have signed the terms.
        coordinators = (
            self._membership.coordinator,
            *(revoked_key.identity for revoked_key in self._membership.revoked),
        )
        for identity in coordinators:
            with suppress(ProtocolError):
                message = SignedMessage.open(
                    data, sender=SERVER, identity=identity, recipient=self._number, largest=LARGEST_OPENING
                )
                return single_message(message.parts, Terms, SERVER)
        raise RefusalError(Code.OTHER_EXPERIMENT)

    def _has_same_silos(self, digest: bytes) -> bool:
        """Return whether a stored membership has the present silos, in their order, under the present charter.

        A membership that is not stored, or that another one replaced, does not.
        """
        path, now = self._membership_file(digest), self._membership
        if digest == now.digest:
            return True
        if not path.exists():
            return False
        earlier = Membership.read(path)
        return earlier.digest == digest and (earlier.silos, earlier.charter) == (now.silos, now.charter)

    def _membership_file(self, digest: bytes) -> Path:
        return self._state / MEMBERSHIPS / f"{digest.hex()}.toml"

    def _seal(self, message: SignedMessage, *parts: SessionMessage) -> bytes:
        return replace(message.answer(*parts), head=self._ledger.head).seal(self._identity)


def _refused(error: Exception | SystemExit) -> Declined:
    """Return the refusal for an error, and write the full error to the silo's own log."""
    refusal = to_refusal(error)
    _log.warning("refused (%s): %s", refusal.code.name, error, exc_info=not isinstance(error, FedveilError))
    return Declined(why=refusal)


def to_refusal(error: BaseException) -> Refusal:
    """Map an error in a silo to the refusal that the coordinator receives.

    The refusal holds neither text of the error nor facts of the silo's files: an error message may quote private
    records. An error of an unlisted class maps to ``OWN_RECORDS``, because the error may depend on private data.
    """
    if isinstance(error, RefusalError):
        return error.why
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Refusal(code)
    return Refusal(Code.OWN_RECORDS)


_CODES: Final[tuple[tuple[type[FedveilError], Code], ...]] = (
    (OwnRecordsError, Code.OWN_RECORDS),  # before its base class ProtocolError: the first match counts
    (BudgetError, Code.ROUND_BUDGET),
    (IntegrityError, Code.INTEGRITY),
    (RunFolderError, Code.STORAGE),
    (MainSilosError, Code.MAIN_SILOS),
    (ConfigError, Code.EXPERIMENT),
    (ProtocolError, Code.PROTOCOL),
)
