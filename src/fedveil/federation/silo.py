"""A silo of a federation: reads the coordinator's letters, answers each with one, and keeps its own counsel.

    Terms  -> Joined or Refused       its policy, its users' budget over all runs, the experiment
    Task   -> Vector, Sealed or Relay charged and answered durably before anything leaves
    Relay  -> Relay                   a step of secure aggregation
    other  -> Lost                    a session it does not know: it was restarted

A request that comes twice is answered twice with the same noisy sum. Another request for a round that was answered is
refused, and so is a round that does not follow the last one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from fedveil.crypto.keys import IdentityKey
from fedveil.engine.experiment import Experiment, parse
from fedveil.engine.sections import ModelSection, TrainerSection
from fedveil.engine.setup import Prepared, prepare
from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.coded_sums import CodedPost, to_bytes
from fedveil.federation.deployable import check_deployable, check_own_client
from fedveil.federation.errors import RefusalError, told
from fedveil.federation.grammar import Conversation, Grammar, opens
from fedveil.federation.hidden_sums import HiddenShare, Place, check_next, session_run
from fedveil.federation.limits import LARGEST_EXPERIMENT
from fedveil.federation.membership import Membership
from fedveil.federation.own_round import Asked, OwnRound, Told
from fedveil.federation.policy import Policy
from fedveil.federation.promise import Promise
from fedveil.federation.protocols import SiloDisk, hidden_share
from fedveil.federation.share import FixedPopulation
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.store import Answered, AnswerStore, ModelStore
from fedveil.files import parse_toml
from fedveil.foreign import foreign, quiet_log
from fedveil.methods.claims import Guarantee
from fedveil.population.records import Population
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import Ledger
from fedveil.protection.messages import SERVER
from fedveil.protection.parts import (
    Agreement,
    Counts,
    Drawn,
    DrawnUsers,
    Joined,
    Lost,
    Model,
    OwnDraw,
    Part,
    Refused,
    Relay,
    Task,
    Terms,
    Totals,
    Vector,
    only,
)

LEDGER: Final = "ledger.jsonl"
"""A silo's ledger over all runs, in its state folder."""

_log = quiet_log("fedveil.silo")

MODELS: Final = "models"
"""In its state folder: the last model of each run whose models the coordinator does not have."""


@dataclass
class _Session:
    """What a silo knows of the session it is in."""

    run: bytes
    number: int
    exchange: int
    prepared: Prepared
    promise: Promise
    talk: Conversation
    hidden: HiddenShare | None
    post: CodedPost | None
    terms: bytes
    told: Told = field(default_factory=Told)
    over: bool = False
    task: Task | None = None
    request: bytes = b""
    reply: bytes = b""

    def reply_with(self, exchange: int, request: bytes, reply: bytes) -> bytes:
        """Note the answer to an exchange, which is given again when its letter comes again; return it."""
        self.exchange, self.request, self.reply = exchange, request, reply
        return reply


class SiloParty:
    """One silo's state machine.

    Args:
        membership: the federation.
        number: the silo's own.
        identity: its long-term key.
        policy: what it takes part in.
        share: the population as it holds it: its own records, and the public facts of the federation.
        state: a folder that survives restarts: the ledger, and the last answer of each run.

    Raises:
        RunFolderError: the ledger is damaged, or another process serves this silo.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        number: int,
        identity: IdentityKey,
        policy: Policy,
        share: Population,
        state: Path,
    ) -> None:
        self._membership, self._number, self._identity = membership, number, identity
        self._policy, self._share = policy, share
        self._store = AnswerStore(state / "answers")
        self._state = state
        self._ledger = self._open_ledger()
        self._session: _Session | None = None

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
            ProtocolError: no letter of the coordinator to this silo; it gets no answer and nothing changes.
        """
        letter = SignedMessage.open(
            data,
            sender=SERVER,
            identity=self._membership.coordinator,
            recipient=self._number,
            largest=self._policy.largest_letter,
        )
        digest = hashlib.sha256(data).digest()
        session = self._session
        if session is not None and (letter.run, letter.session, letter.number) == (
            session.run,
            session.number,
            session.exchange,
        ):
            if digest == session.request:
                return session.reply
            return self._seal(
                letter, Refused(cause="replay", reason="this exchange had another letter before")
            )
        try:
            return self._answer(letter, digest)
        except Exception as error:
            return self._seal(letter, _refused(error))

    def _answer(self, letter: SignedMessage, digest: bytes) -> bytes:
        """Return the letter that answers another one, or raise: then nothing has changed."""
        if opens(letter.parts):
            return self._join(letter, digest)
        session = self._session
        if session is None or (letter.run, letter.session) != (session.run, session.number):
            if session is not None and letter.run == session.run and letter.session < session.number:
                raise RefusalError("replay", f"session {letter.session} is over, this is {session.number}")
            return self._seal(letter, Lost())
        if letter.number <= session.exchange:
            raise RefusalError("replay", f"exchange {letter.number} is over, the last was {session.exchange}")
        if session.over:
            return self._seal(letter, Lost())
        session.talk.ask(letter.parts)
        answers: list[Part] = []
        session.over = True  # should this fail, a part may have taken effect, and no letter can follow
        try:
            for part in letter.parts:
                answers += self._read(session, part)
            session.talk.answer(answers)
            session.over = False
        except (
            Exception
        ) as error:  # whatever it is: unanswered, the round would be asked for and charged again
            answers = [_refused(error)]
        return session.reply_with(letter.number, digest, self._seal(letter, *answers))

    def _read(self, session: _Session, part: Part) -> list[Part]:
        if isinstance(part, Totals):
            self._weigh(session, part)
            return []
        if isinstance(part, Model | DrawnUsers | OwnDraw | Drawn):
            session.told.add(part)
            return []
        if isinstance(part, Relay) and session.hidden is not None:
            replies = [Relay(message=reply) for reply in session.hidden.receive(part.message)]
            return [*replies, *session.hidden.learn(), *self._contribute(session)]
        if isinstance(part, Task):
            session.task = part
            return self._contribute(session)
        raise RefusalError("request", f"a silo does not read {type(part).__name__}")

    def _contribute(self, session: _Session) -> list[Part]:
        """Return the silo's part of the round, as soon as its task is there and the protocol has come to it."""
        task, hidden = session.task, session.hidden
        if task is None or (hidden is not None and not hidden.awaits_input):
            return []
        session.task = None
        if hidden is not None:
            hidden.check_round(task.round)
        answered = self._sum(session, task)
        session.told = Told()
        if session.post is not None:
            return [session.post.seal(self._number, task.round, answered.coded)]
        if hidden is None:
            return [Vector(values=answered.vector)]
        return [Relay(message=message) for message in hidden.contribute(answered)]

    # --- joining a run ---------------------------------------------------------------------------------------

    def _join(self, letter: SignedMessage, digest: bytes) -> bytes:
        session, terms = self._session, only(letter.parts, Terms, SERVER)
        if session is not None and letter.run == session.run and letter.session <= session.number:
            raise RefusalError("replay", f"session {letter.session} of this run has begun before")
        if terms.membership != self._membership.digest:
            raise RefusalError(
                "schema", "the coordinator has another membership or schema; compare membership.toml"
            )
        experiment = self._request(terms.experiment)
        self._policy.check_request(experiment)
        prepared = prepare(_own(experiment), FixedPopulation(self._share))
        self._policy.check_method(prepared.method)
        check_deployable(prepared)
        check_own_client(prepared, self._number)
        talk = Conversation(Grammar.of(prepared, self._number))
        talk.ask(letter.parts)
        event = self._policy.event(prepared.guarantee)
        self._reopen_ledger()
        self._check_budget(letter.run, experiment.rounds, prepared.guarantee, event)
        place = Place(
            run=session_run(letter.run, letter.session, terms),
            number=self._number,
            identity=self._identity,
            roster=self._membership.roster,
        )
        hidden = hidden_share(prepared, place, self._disk(letter.run))
        post = CodedPost(place.run) if prepared.method.channel.coded else None
        if post is not None:
            post.meet(self._number, only(letter.parts, Agreement, SERVER))
        answers: list[Part] = [Joined()]
        if prepared.method.shows_counts:
            answers.append(Counts(counts=self._counts()))
        if post is not None:
            answers.append(post.offer)
        first = None if hidden is None else hidden.announce()
        if first is not None:
            answers.append(Relay(message=first))
        talk.answer(answers)
        self._session = _Session(
            run=letter.run,
            number=letter.session,
            exchange=letter.number,
            prepared=prepared,
            promise=Promise.of(prepared, event),
            talk=talk,
            hidden=hidden,
            post=post,
            terms=hashlib.sha256(terms.encode()).digest(),
        )
        return self._session.reply_with(letter.number, digest, self._seal(letter, *answers))

    def _request(self, text: str) -> Experiment:
        if len(text) > LARGEST_EXPERIMENT:
            raise RefusalError("request", f"the experiment has more than {LARGEST_EXPERIMENT} characters")
        place = "the coordinator's experiment"
        document = parse_toml(text, place, ConfigError)
        self._policy.check_packages(document)
        return parse(document, place)

    def _check_budget(self, run: bytes, rounds: int, guarantee: Guarantee, event: Event) -> None:
        """Refuse a run whose rounds do not all fit what the users have left, before the first of them is charged.

        Later each round must fit by itself: an attempt that was charged twice ends the run where the budget does, and
        not when the next session begins.
        """
        budget = self._policy.budget
        if budget is None or any(entry.run == _run_name(run) for entry in self._ledger.entries):
            return
        if self._ledger.would_exceed(guarantee.after(event, rounds), budget):
            raise RefusalError(
                "budget",
                f"{rounds} rounds would bring this silo's users above epsilon {budget.epsilon:g} at delta "
                f"{budget.delta:g} over all runs; fewer rounds, or more noise",
            )

    def _disk(self, run: bytes) -> SiloDisk:
        return SiloDisk(
            secret=lambda: self._store.secret(run),
            keep=lambda answered: self._store.write(run, answered),
            publish=ModelStore(self._state / MODELS, run).put,
        )

    def _counts(self) -> np.ndarray:
        return np.bincount(self._share.train.user, minlength=self._share.n_users).astype(np.int64)

    def _weigh(self, session: _Session, totals: Totals) -> None:
        """Take the weights n_su / N_u from what every user holds over all silos."""
        if len(totals.counts) != self._share.n_users:
            raise RefusalError(
                "request", f"totals of {len(totals.counts)} users instead of {self._share.n_users}"
            )
        prepared = session.prepared
        session.promise = session.promise.by_records(prepared.setting.cohort.groups, totals.counts)
        assert session.promise.weights is not None
        setting = replace(prepared.setting, weights=session.promise.weights.clone())
        session.prepared = replace(prepared, setting=setting)
        session.terms = hashlib.sha256(session.terms + totals.encode()).digest()

    # --- a round ---------------------------------------------------------------------------------------------

    def _sum(self, session: _Session, task: Task) -> Answered:
        """Return the noisy sum of a round: the one that was stored before, or a new one that is charged first.

        A round that was charged and not stored (a crash between the two) is charged again: new noise is never free.
        So is one that the protocol does not repeat: whose users are drawn anew in every session, or that may be
        summed over other silos.
        """
        prepared, name, hidden = session.prepared, _run_name(session.run), session.hidden
        self._check_task(session, task)
        repeats = hidden is None or hidden.repeats
        asked = session.terms + task.encode() + session.told.encode()
        request = hashlib.sha256(asked if hidden is None else asked + hidden.binding).digest()
        last = self._store.read(session.run)
        self._check_state(session, 0 if last is None else last.round, repeats)
        if last is None or task.round != last.round:
            if hidden is None:
                check_next(last, task.round)
            else:
                hidden.follow(last, task.round)
        elif repeats:
            if request != last.request:
                raise RefusalError(
                    "replay",
                    f"round {task.round} was answered for another experiment or model, or other records of its users",
                )
            return last
        again = sum(entry.run == name and entry.round == task.round for entry in self._ledger.entries)
        self._ledger.charge(
            run=name,
            round=task.round,
            attempt=again,
            event=session.promise.of_round(prepared.setting, task.round),
            budget=self._policy.budget,
        )
        own = OwnRound(prepared=prepared, silo=self._number, attempt=0 if repeats else again)
        work = Asked.of(task, session.told, self._number, self._share.n_users)
        answered = self._new_answer(own, session, work, request)
        self._store.write(session.run, answered)
        return answered

    def _check_state(self, session: _Session, done: int, repeats: bool) -> None:
        """Refuse to go on where ledger and answers of a run tell of different pasts."""
        name = _run_name(session.run)
        charged = {entry.round for entry in self._ledger.entries if entry.run == name}
        known = set(range(1, done + 1)) if repeats else {done} - {0}
        if not known <= charged or (repeats and charged - set(range(1, done + 2))):
            raise RefusalError("state", "ledger and answers of this run do not fit: one of them was replaced")

    def _check_task(self, session: _Session, task: Task) -> None:
        """Refuse a round that the run lacks, and a model or a draw of another length; the grammar saw to the rest."""
        told, rounds = session.told, session.prepared.experiment.rounds
        if not 1 <= task.round <= rounds:
            raise RefusalError("replay", f"the run has rounds 1 to {rounds}")
        model, drawn = told.get(Model), told.get(DrawnUsers)
        dimension = session.prepared.task.dimension
        if model is not None and len(model.values) != dimension:
            raise RefusalError(
                "request", f"the model has {len(model.values)} parameters instead of {dimension}"
            )
        if drawn is not None and len(drawn.users) != self._share.n_users:
            raise RefusalError(
                "request", f"{len(drawn.users)} users were drawn from instead of {self._share.n_users}"
            )

    def _new_answer(self, own: OwnRound, session: _Session, task: Asked, request: bytes) -> Answered:
        """Train and draw noise."""
        if session.hidden is not None:
            return session.hidden.new_answer(own, task, request)
        message = own.message(task)
        if message.sent is not None and message.sent.coded is not None:
            return Answered(round=task.round, request=request, coded=to_bytes(message.sent.coded))
        return Answered(round=task.round, request=request, vector=message.vector)

    # --- its own files -----------------------------------------------------------------------------------------

    def _open_ledger(self) -> Ledger:
        return Ledger(self._state / LEDGER, unit="user")

    def _reopen_ledger(self) -> None:
        """Open the ledger again: a charge that failed closed it."""
        self._ledger.close()
        self._ledger = self._open_ledger()

    def _seal(self, letter: SignedMessage, *parts: Part) -> bytes:
        return letter.answer(*parts).seal(self._identity)


def _run_name(run: bytes) -> str:
    """Return what a silo's ledger calls a run: what the coordinator calls it may repeat."""
    return run.hex()


def _own(experiment: Experiment) -> Experiment:
    """Return the experiment without what concerns the coordinator alone, or names files: none is read here.

    The server's step stays: under partial encryption the silos make it.
    """
    return experiment.model_copy(
        update={
            "model": ModelSection(name=experiment.model.name, loss=experiment.model.loss),
            "trainer": TrainerSection(name=experiment.trainer.name),
        }
    )


def _refused(error: Exception) -> Refused:
    """Return what is told of an error, and leave the whole of it in the silo's own log."""
    cause, reason = told(error)
    _log.warning("refused (%s): %s", cause, error, exc_info=not isinstance(error, FedveilError))
    return Refused(cause=cause, reason=foreign(reason))
