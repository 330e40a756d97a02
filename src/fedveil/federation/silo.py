"""A silo of a federation: reads the coordinator's letters, answers each with one, and keeps its own counsel.

    Terms        -> Joined or Refused   its policy, its users' budget over all runs, the experiment
    Closing      -> Attested            the run's statement, computed again and signed: in its session, or behind Terms
    Task, Relay  -> Relay               charged and kept durably before anything leaves (:mod:`~.own.session`)
    other        -> Here                whatever is not of its session (:mod:`~.sessions`): it changes nothing

A request that comes twice is answered twice alike. Another request for a round that was answered is refused, and so is
a round that does not follow the last one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from fedveil.crypto.keys import IdentityKey
from fedveil.errors import FedveilError, RunFolderError
from fedveil.federation.allowance import Allowance, Outcome
from fedveil.federation.attendance import but_trainer, trains_alone
from fedveil.federation.binding import proposed
from fedveil.federation.books import Books
from fedveil.federation.errors import RefusalError, told
from fedveil.federation.grammar import opens, outside
from fedveil.federation.heads import HEADS, HeadsSeen
from fedveil.federation.kept import KEPT, KeptMarks
from fedveil.federation.limits import LARGEST_OPENING
from fedveil.federation.membership import Membership
from fedveil.federation.own.session import OwnSession
from fedveil.federation.own.work import OwnWork
from fedveil.federation.policy import Policy
from fedveil.federation.proposals import own_work
from fedveil.federation.sessions import Reception, session_run
from fedveil.federation.share import Share
from fedveil.federation.signed_message import SignedMessage, session_in
from fedveil.federation.silo_ledger import SiloLedger
from fedveil.federation.store import ModelStore, RecordStore
from fedveil.files import read_content, replace_file, writing
from fedveil.foreign import quiet_log
from fedveil.privacy.ledger_lines import Origin
from fedveil.protection.errors import ProtocolError
from fedveil.protection.letter_parts import Closing, Over, Part, Phase, Refused, Terms, Working, only
from fedveil.protection.messages import SERVER
from fedveil.protection.protocol import Place
from fedveil.protection.refusals import Code, Refusal

_log = quiet_log("fedveil.silo")

MODELS: Final = "models"
"""In its state folder: the last model of each run whose models the coordinator does not have."""

TERMS: Final = "terms"
"""In its state folder: the signed letters that proposed what was charged."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a silo's own files say now: read before every session, so a revocation or a stricter policy holds from then.

    Attributes:
        membership: the federation, as its founder sealed it.
        policy: what the silo takes part in.
    """

    membership: Membership
    policy: Policy


@dataclass
class _Exchange:
    """The last letter that a session has answered: it is answered alike when it comes again.

    Attributes:
        run: the run.
        session: its name.
        number: of the exchange.
        request: digest of the letter.
        reply: its answer.
    """

    run: bytes
    session: bytes
    number: int
    request: bytes
    reply: bytes


class SiloParty:
    """One silo's state machine.

    Args:
        standing: reads membership and policy, at once and before every session.
        number: the silo's own.
        identity: its long-term key.
        share: the population as it holds it: its own records, and the public facts of the federation.
        state: a folder that survives restarts: the ledger, and the last answer of each run.

    Raises:
        RunFolderError: the ledger is damaged, or another process serves this silo.
    """

    def __init__(
        self,
        *,
        standing: Callable[[], Standing],
        number: int,
        identity: IdentityKey,
        share: Share,
        state: Path,
    ) -> None:
        self._standing, self._number, self._identity, self._share = standing, number, identity, share
        now = standing()
        self._membership, self._policy = now.membership, now.policy
        self._store = RecordStore(state / "answers")
        self._state = state
        self._heads = HeadsSeen(state / HEADS, now.membership.charter)
        charter, serial = now.membership.charter, now.membership.serial
        self._ledger = SiloLedger(state, now.policy, self._store, charter=charter, serial=serial)
        self._unpaid: Path | None = None
        self._session: OwnSession | None = None
        self._last: _Exchange | None = None
        self._over = False
        self._reception = Reception()
        self._allowance = Allowance()
        self._outcome: Outcome = "refused"

    def __enter__(self) -> SiloParty:
        """Return the silo."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the ledger back."""
        self.close()

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        self._ledger.close()

    def receive(self, data: bytes) -> bytes:
        """Read a letter of the coordinator; return the letter that answers it.

        Raises:
            ProtocolError: no letter of the coordinator to this silo, or too many before it led to nothing; it gets no
                answer and nothing changes.
        """
        self._allowance.check(self._policy.fruitless_seconds)
        began, charges, self._outcome = time.thread_time(), self._ledger.charges, "refused"
        try:
            return self._receive(data)
        finally:
            outcome = "charged" if self._ledger.charges > charges else self._outcome
            self._allowance.count(time.thread_time() - began, outcome)

    def working(self, data: bytes) -> bytes:
        """Return the word that the silo is at work, on this letter or on another; it may be asked while it is.

        It says nothing of how far the work is: steps would count records.

        Raises:
            ProtocolError: no letter of the coordinator to this silo.
        """
        return self._open(data).answer(Working()).seal(self._identity)

    def longest(self, beginning: bytes) -> int:
        """Return how many bytes a letter that begins so may have; it is judged before the rest is read or believed.

        Args:
            beginning: its first :data:`~.limits.BEGINNING` bytes, or more.
        """
        session, last = self._session, self._last
        known = session is not None and last is not None and session_in(beginning) == (last.run, last.session)
        return min(self._policy.largest_letter, session.longest if known and session else LARGEST_OPENING)

    def _open(self, data: bytes) -> SignedMessage:
        return SignedMessage.open(
            data,
            sender=SERVER,
            identity=self._membership.coordinator,
            recipient=self._number,
            largest=self.longest(data),
        )

    def _receive(self, data: bytes) -> bytes:
        letter = self._open(data)
        digest, last = hashlib.sha256(data).digest(), self._last
        if last is not None and (letter.run, letter.session, letter.number) == (
            last.run,
            last.session,
            last.number,
        ):
            if digest == last.request:
                return last.reply
            return self._seal(letter, Refused(why=Refusal(Code.OTHER_LETTER)))
        try:
            return self._answer(letter, data)
        except (Exception, SystemExit) as error:
            return self._seal(letter, _refused(error))

    def _answer(self, letter: SignedMessage, data: bytes) -> bytes:
        """Return the letter that answers another one, or raise: then nothing has changed."""
        last, session, kind = self._last, self._session, outside(letter.parts)
        if opens(letter.parts):
            return self._join(letter, data)
        if last is None or session is None or (letter.run, letter.session) != (last.run, last.session):
            return self._here(letter)
        if letter.number <= last.number:
            raise RefusalError(Code.EXCHANGE_OVER, letter.number, last.number)
        if kind in (Over, Closing):
            self._over = True
            self._reception.keep(letter.run, busy=False)
        if kind is Closing:
            return self._seal(letter, session.sign_statement(only(letter.parts, Closing, SERVER)))
        if self._over or kind is not None:
            return self._here(letter)
        session.talk.ask(letter.parts)
        if session.talk.begins:
            self._allowance.begin_round()
        answers: list[Part] = []
        self._over = True  # should this fail, a part may have taken effect, and no letter can follow
        try:
            answers = session.answer(letter.parts)
            session.talk.answer(answers)
            self._over, self._outcome = False, "answered"
        except (Exception, SystemExit) as error:
            # whatever it is: unanswered, the round would be asked for and charged again
            answers = [_refused(error)]
        return self._reply(letter, data, answers)

    def _here(self, letter: SignedMessage) -> bytes:
        return self._seal(letter, self._reception.here(letter.run))

    def _reply(self, letter: SignedMessage, data: bytes, answers: Sequence[Part]) -> bytes:
        """Note the answer to an exchange, and return it."""
        assert self._session is not None
        self._reception.keep(letter.run, busy=self._session.talk.underway and not self._over)
        reply, digest = self._seal(letter, *answers), hashlib.sha256(data).digest()
        self._last = _Exchange(letter.run, letter.session, letter.number, digest, reply)
        return reply

    # --- joining a run ---------------------------------------------------------------------------------------

    def _join(self, letter: SignedMessage, data: bytes) -> bytes:
        terms = only(letter.parts, Terms, SERVER)
        phase = next((part for part in letter.parts if isinstance(part, Phase)), None)
        if not self._reception.admits(self._number, letter.run, letter.session, terms):
            return self._here(letter)
        self._stand()
        if terms.membership != self._membership.digest:
            raise RefusalError(Code.MEMBERSHIP)
        self._ledger.require(terms.head)
        closing = next((part for part in letter.parts if isinstance(part, Closing)), None)
        if closing is None and self._ledger.ended(letter.run.hex()) is not None:
            raise RefusalError(Code.RUN_OVER)
        work = own_work(terms.experiment, phase, self._policy, self._share, self._number)
        self._check_one_experiment(letter.run, terms)
        self._ledger.reopen(self._policy)
        agreed, part = proposed(terms, phase), "" if phase is None else phase.name
        books = Books(
            run=letter.run,
            part=part,
            silos=self._membership.silos,
            ledger=self._ledger,
            origin=self._origin(terms),
            budget=self._policy.budget,
            heads=self._heads,
            records=self._store,
            marks=KeptMarks(self._state / KEPT),
            models=ModelStore(self._state / MODELS, letter.run),
        )
        place = Place(
            run=session_run(letter.session, agreed),
            number=self._number,
            identity=self._identity,
            roster=self._membership.roster,
            secret=lambda: self._store.secret(books.place),
        )
        session = OwnSession(
            work=work, place=place, terms=terms, agreed=agreed, session=letter.session, books=books
        )
        if closing is not None:
            self._reception.admit()
            return self._seal(letter, session.sign_statement(closing))
        self._check_budget(books, work)
        session.talk.ask(letter.parts)
        answers = session.join()
        session.talk.answer(answers)
        self._keep_terms(terms, data)
        self._reception.admit()
        self._allowance.begin()
        self._session, self._over, self._outcome = session, False, "answered"
        return self._reply(letter, data, answers)

    def _check_budget(self, books: Books, work: OwnWork) -> None:
        """Refuse a run that does not all fit what the users have left, before the first of it is charged.

        Later each round must fit by itself: an attempt that was charged twice ends the run where the budget does, and
        not when the next session begins.
        """
        budget = self._policy.budget
        if budget is None or books.known:
            return
        if self._ledger.ledger.would_exceed(work.whole, budget):
            raise RefusalError(Code.RUN_BUDGET, work.rounds, budget.epsilon, budget.delta)

    def _stand(self) -> None:
        """Read membership and policy again; without them, or under another membership, nothing is joined."""
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
        """Keep what the coordinator asked for, signed, before a charge can name it; one that none has named goes."""
        path, unpaid = self._state / TERMS / f"{terms.digest.hex()}.letter", self._unpaid
        with writing(path, RunFolderError):
            if unpaid is not None and unpaid != path and not self._ledger.names(unpaid.stem):
                unpaid.unlink(missing_ok=True)
            if not path.exists():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                replace_file(path, data, mode=0o600)
                self._unpaid = path

    def _check_one_experiment(self, run: bytes, terms: Terms) -> None:
        """Refuse to go on with a run of which anything was charged under another experiment.

        Its rounds were charged, and are stated at its end, as those of one. A membership that was renewed makes other
        terms of the same experiment, and so the letters are read. Of trainers, which bound nothing, one matters: who
        computes each contribution alone states nothing of batches, so no round may have been trained in some.
        """
        now, trained = terms.experiment, self._ledger.trained(run.hex())
        for one in self._ledger.asked(run.hex()) - {terms.digest.hex()}:
            text = self._experiment(one)
            batched = one in trained and not trains_alone(text)
            if but_trainer(text) != but_trainer(now) or (batched and trains_alone(now)):
                raise RefusalError(Code.OTHER_EXPERIMENT)

    def _experiment(self, terms: str) -> str:
        """Return the experiment of a letter that proposed what was charged."""
        data = read_content(self._state / TERMS / f"{terms}.letter", RunFolderError, largest=LARGEST_OPENING)
        known = (self._membership.coordinator, *(one.identity for one in self._membership.revoked))
        for identity in known:
            with suppress(ProtocolError):
                letter = SignedMessage.open(
                    data, sender=SERVER, identity=identity, recipient=self._number, largest=LARGEST_OPENING
                )
                return only(letter.parts, Terms, SERVER).experiment
        raise RefusalError(Code.OTHER_EXPERIMENT)

    def _seal(self, letter: SignedMessage, *parts: Part) -> bytes:
        return replace(letter.answer(*parts), head=self._ledger.head).seal(self._identity)


def _refused(error: Exception | SystemExit) -> Refused:
    """Return what is told of an error, and leave the whole of it in the silo's own log."""
    why = told(error)
    _log.warning("refused (%s): %s", why.code.name, error, exc_info=not isinstance(error, FedveilError))
    return Refused(why=why)
