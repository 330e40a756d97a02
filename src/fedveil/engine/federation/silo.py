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
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from fedveil.crypto.keys import IdentityKey
from fedveil.engine.aggregation import MaskedRange
from fedveil.engine.experiment import Experiment, parse
from fedveil.engine.federation.coded_sums import CodedPost, codes, to_bytes
from fedveil.engine.federation.encrypted_sums import EncryptedShare
from fedveil.engine.federation.errors import RefusalError
from fedveil.engine.federation.hidden_sums import MaskedShare
from fedveil.engine.federation.letters import Letter
from fedveil.engine.federation.membership import Membership
from fedveil.engine.federation.parts import (
    Agreement,
    Drawn,
    Joined,
    Lost,
    Part,
    Refused,
    Relay,
    Task,
    Terms,
    Totals,
    Vector,
    only,
)
from fedveil.engine.federation.policy import Policy
from fedveil.engine.federation.share import Held
from fedveil.engine.federation.store import Answered, AnswerStore, ModelShelf
from fedveil.engine.federation.travel import check_own_client, check_travels, discloses_counts
from fedveil.engine.federation.weighted_sums import BlindShare, WeightedInput, weighted_input
from fedveil.engine.partial import PartialRange
from fedveil.engine.sections import ModelSection, TrainerSection
from fedveil.engine.setup import Prepared, prepare, privacy_randomness
from fedveil.engine.silo_side import SiloMessage, client_message, local_sums, members_of, silo_message
from fedveil.engine.weighting import WeightingRange
from fedveil.errors import FedveilError, RunFolderError
from fedveil.methods.client_messages import ClientMessages
from fedveil.population.records import Population
from fedveil.privacy.events import Event, SelfComposedEvent
from fedveil.privacy.ledger import Ledger
from fedveil.protection.messages import SERVER
from fedveil.randomness import ExperimentRandomness

LEDGER: Final = "ledger.jsonl"
"""A silo's ledger over all runs, in its state folder."""

MODELS: Final = "models"
"""In its state folder: the last model of each run whose models the coordinator does not have."""


@dataclass
class _Session:
    """What a silo knows of the session it is in."""

    run: bytes
    number: int
    exchange: int
    prepared: Prepared
    event: Event
    hidden: MaskedShare | BlindShare | EncryptedShare | None
    post: CodedPost | None
    weighted: bool
    terms: bytes
    drawn: bytes = b""
    task: Task | None = None
    request: bytes = b""
    reply: bytes = b""


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
        letter = Letter.open(
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
            parts = self._answer(letter)
        except RefusalError as refusal:
            return self._seal(letter, Refused(cause=refusal.cause, reason=refusal.reason))
        except RunFolderError as error:
            self._session = None
            return self._seal(letter, Refused(cause="storage", reason=str(error)))
        except FedveilError as error:
            return self._seal(letter, Refused(cause="request", reason=str(error)))
        reply = self._seal(letter, *parts)
        if self._session is not None:
            self._session.exchange, self._session.request, self._session.reply = letter.number, digest, reply
        return reply

    def _answer(self, letter: Letter) -> list[Part]:
        """Return what the silo answers, or raise."""
        terms = [part for part in letter.parts if isinstance(part, Terms)]
        if terms:
            return self._join(letter, terms[0])
        session = self._session
        if session is None or (letter.run, letter.session) != (session.run, session.number):
            if session is not None and letter.run == session.run and letter.session < session.number:
                raise RefusalError("replay", f"session {letter.session} is over, this is {session.number}")
            return [Lost()]
        if letter.number <= session.exchange:
            raise RefusalError("replay", f"exchange {letter.number} is over, the last was {session.exchange}")
        answers: list[Part] = []
        for part in letter.parts:
            answers += self._read(session, part)
        return answers

    def _read(self, session: _Session, part: Part) -> list[Part]:
        if isinstance(part, Totals):
            self._weigh(session, part)
            return []
        if isinstance(part, Drawn) and isinstance(session.hidden, BlindShare):
            session.drawn = part.commitment
            return []
        if isinstance(part, Relay) and session.hidden is not None:
            replies = [Relay(message=reply) for reply in session.hidden.receive(part.message)]
            learned = session.hidden.learn() if isinstance(session.hidden, EncryptedShare) else []
            return [*replies, *learned, *self._contribute(session)]
        if isinstance(part, Task):
            if session.hidden is not None and not session.hidden.begun:
                raise RefusalError("request", f"round {part.round} comes before its masks")
            session.task = part
            return self._contribute(session)
        raise RefusalError("request", f"a silo does not read {type(part).__name__} now")

    def _contribute(self, session: _Session) -> list[Part]:
        """Return the silo's part of the round, as soon as its task is there and the protocol has come to it."""
        task, hidden = session.task, session.hidden
        if task is None or (hidden is not None and not hidden.awaits_input):
            return []
        session.task = None
        answered = self._sum(session, task)
        session.drawn = b""
        if session.post is not None:
            return [session.post.seal(self._number, task.round, answered.coded)]
        if hidden is None:
            return [Vector(values=answered.vector)]
        if isinstance(hidden, EncryptedShare):
            return [Relay(message=message) for message in hidden.begin(answered)]
        if isinstance(hidden, BlindShare):
            return [Relay(message=hidden.contribute(WeightedInput.decode(answered.coded)))]
        return [Relay(message=hidden.contribute(answered.vector))]

    # --- joining a run ---------------------------------------------------------------------------------------

    def _join(self, letter: Letter, terms: Terms) -> list[Part]:
        session = self._session
        if session is not None and letter.run == session.run and letter.session <= session.number:
            raise RefusalError("replay", f"session {letter.session} of this run has begun before")
        if terms.membership != self._membership.digest:
            raise RefusalError(
                "schema", "the coordinator has another membership or schema; compare membership.toml"
            )
        experiment = self._request(terms.experiment)
        self._policy.check_request(experiment)
        prepared = prepare(_own(experiment), Held(self._share))
        self._policy.check_method(prepared.method)
        check_travels(prepared)
        check_own_client(prepared, self._number)
        event = self._policy.event(prepared.guarantee)
        self._reopen_ledger()
        self._check_budget(letter.run, experiment, event)
        by_records = discloses_counts(prepared.method)
        hidden = self._hide(prepared, letter)
        post = CodedPost(run=letter.run, session=letter.session) if codes(prepared.method) else None
        if post is not None:
            post.meet(self._number, only(letter.parts, Agreement, SERVER))
        self._session = _Session(
            run=letter.run,
            number=letter.session,
            exchange=letter.number,
            prepared=prepared,
            event=event,
            hidden=hidden,
            post=post,
            weighted=not by_records,
            terms=hashlib.sha256(terms.encode()).digest(),
        )
        joined = Joined(counts=self._counts() if by_records else np.zeros(0, dtype=np.int64))
        if post is not None:
            return [joined, post.offer]
        return [joined] if hidden is None else [joined, Relay(message=hidden.announce())]

    def _request(self, text: str) -> Experiment:
        try:
            return parse(tomllib.loads(text), "the coordinator's experiment")
        except tomllib.TOMLDecodeError as error:
            raise RefusalError("request", f"the experiment is no TOML document: {error}") from None

    def _check_budget(self, run: bytes, experiment: Experiment, event: Event) -> None:
        """Refuse a run whose remaining rounds do not fit what the users have left."""
        last = self._store.read(run)
        remaining = experiment.rounds - (0 if last is None else last.round)
        budget = self._policy.budget
        if budget is None or remaining < 1:
            return
        if self._ledger.would_exceed(SelfComposedEvent(event=event, count=remaining), budget):
            raise RefusalError(
                "budget",
                f"{remaining} rounds would bring this silo's users above epsilon {budget.epsilon:g} at delta "
                f"{budget.delta:g} over all runs; fewer rounds, or more noise",
            )

    def _hide(self, prepared: Prepared, letter: Letter) -> MaskedShare | BlindShare | EncryptedShare | None:
        agreed, run, session = prepared.agreed, letter.run, letter.session
        number, identity, roster = self._number, self._identity, self._membership.roster
        if isinstance(agreed, MaskedRange):
            return MaskedShare(
                agreed, run=run, session=session, number=number, identity=identity, roster=roster
            )
        if isinstance(agreed, WeightingRange):
            return BlindShare(
                agreed, run=run, session=session, number=number, identity=identity, roster=roster
            )
        if isinstance(agreed, PartialRange):
            return EncryptedShare(
                prepared,
                run=run,
                session=session,
                number=number,
                identity=identity,
                roster=roster,
                orders=None if number else self._store.secret(run),
                keep=lambda answered: self._store.write(run, answered),
                publish=ModelShelf(self._state / MODELS, run).put,
            )
        return None

    def _counts(self) -> np.ndarray:
        return np.bincount(self._share.train.user, minlength=self._share.n_users).astype(np.int64)

    def _weigh(self, session: _Session, totals: Totals) -> None:
        """Take the weights n_su / N_u from what every user holds over all silos."""
        if len(totals.counts) != self._share.n_users or (totals.counts < self._counts()).any():
            raise RefusalError("request", "a user has fewer records over all silos than in this one")
        groups = session.prepared.seat.cohort.groups
        weights = session.prepared.seat.weights
        weights.copy_(torch.from_numpy(groups.size / totals.counts[groups.user]))
        session.weighted = True
        session.terms = hashlib.sha256(session.terms + totals.encode()).digest()

    # --- a round ---------------------------------------------------------------------------------------------

    def _sum(self, session: _Session, task: Task) -> Answered:
        """Return the noisy sum of a round: the one that was stored before, or a new one that is charged first.

        A round that was charged and not stored (a crash between the two) is charged again: new noise is never free.
        So is one whose users are drawn anew in every session.
        """
        prepared, name, hidden = session.prepared, _run_name(session.run), session.hidden
        self._check_task(session, task)
        blind = hidden if isinstance(hidden, BlindShare) else None
        asked = session.terms + task.encode()
        if blind is not None:
            asked += session.drawn + blind.binding
        request = hashlib.sha256(asked).digest()
        last = self._store.read(session.run)
        charged = {entry.round for entry in self._ledger.entries if entry.run == name}
        done = 0 if last is None else last.round
        if charged - set(range(1, done + 2)) or not set(range(1, done + 1)) <= charged:
            raise RefusalError("state", "ledger and answers of this run do not fit: one of them was replaced")
        if last is not None and task.round == last.round:
            if request != last.request:
                counted = "" if blind is None else ", or for other records of its users"
                raise RefusalError(
                    "replay",
                    f"round {task.round} was answered for another experiment, another model or other users{counted}",
                )
            if blind is None or blind.repeats:
                return last
        elif task.round != done + 1 or task.round > prepared.experiment.rounds:
            raise RefusalError(
                "replay", f"round {task.round} does not follow round {done}, the last answered"
            )
        again = sum(entry.run == name and entry.round == task.round for entry in self._ledger.entries)
        if isinstance(hidden, EncryptedShare):
            hidden.follow(last)
        self._ledger.charge(
            run=name, round=task.round, attempt=again, event=session.event, budget=self._policy.budget
        )
        answered = self._new_answer(session, task, request)
        self._store.write(session.run, answered)
        return answered

    def _check_task(self, session: _Session, task: Task) -> None:
        encrypted = isinstance(session.hidden, EncryptedShare)
        dimension = 0 if encrypted else session.prepared.task.dimension
        if len(task.model) != dimension:
            raise RefusalError(
                "request", f"the model has {len(task.model)} parameters instead of {dimension}"
            )
        if task.drawn is not None and len(task.drawn) != self._share.n_users:
            raise RefusalError(
                "request", f"{len(task.drawn)} users were drawn from instead of {self._share.n_users}"
            )
        blind = session.hidden if isinstance(session.hidden, BlindShare) else None
        if blind is not None and (task.drawn is not None or bool(session.drawn) != blind.draws):
            raise RefusalError("request", "who is drawn, silos are not told; the coordinator commits itself")
        if not session.weighted:
            raise RefusalError("request", "a round begins before the users' totals are known")

    def _new_answer(self, session: _Session, task: Task, request: bytes) -> Answered:
        """Train and draw noise."""
        prepared, number = session.prepared, task.round
        if isinstance(session.hidden, BlindShare):
            start = torch.from_numpy(task.model)
            content = weighted_input(prepared, start, silo=self._number, round_number=number)
            return Answered(round=number, request=request, coded=content.encode())
        if isinstance(session.hidden, EncryptedShare):
            total = self._own_sum(session, replace(task, model=session.hidden.before))
            return Answered(round=number, request=request, coded=session.hidden.first(number, total))
        message = self._train(session, task)
        coded = None if message.sent is None else message.sent.coded
        if coded is not None:
            return Answered(round=number, request=request, coded=to_bytes(coded))
        return Answered(round=number, request=request, vector=message.vector)

    def _train(self, session: _Session, task: Task) -> SiloMessage:
        prepared, number = session.prepared, task.round
        seat = prepared.seat
        if isinstance(seat.method.channel, ClientMessages):
            return client_message(
                seat,
                torch.from_numpy(task.model),
                client=self._number,
                round_number=number,
                experiment=ExperimentRandomness(prepared.experiment.seed),
                privacy=privacy_randomness(prepared.experiment),
            )
        return silo_message(
            seat.method,
            self._own_sum(session, task),
            n_silos=seat.cohort.n_silos,
            silo=self._number,
            round_number=number,
            privacy=privacy_randomness(prepared.experiment),
        )

    def _own_sum(self, session: _Session, task: Task) -> Float64[np.ndarray, " d"]:
        """Train, and return the silo's bounded, weighted sum; it carries no noise."""
        seat = session.prepared.seat
        own = seat.cohort.groups.silo == self._number
        members = members_of(seat.cohort.groups, task.drawn)
        members = members[torch.from_numpy(own)[members]]
        experiment = ExperimentRandomness(session.prepared.experiment.seed)
        sums = local_sums(seat, torch.from_numpy(task.model), members, task.round, experiment)
        total: np.ndarray = sums.total[self._number].cpu().numpy()
        return total

    # --- its own files -----------------------------------------------------------------------------------------

    def _open_ledger(self) -> Ledger:
        return Ledger(self._state / LEDGER, unit="user")

    def _reopen_ledger(self) -> None:
        """Open the ledger again: a charge that failed closed it."""
        self._ledger.close()
        self._ledger = self._open_ledger()

    def _seal(self, letter: Letter, *parts: Part) -> bytes:
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
