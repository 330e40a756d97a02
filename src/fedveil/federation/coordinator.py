"""The coordinator of a federation: writes letters, reads the answers, and never needs to know how they travel.

    session:  Terms -> Joined (-> steps of a protocol's setup)
    round:    charge -> Task -> vectors, or steps of a protocol -> sum -> model -> release (checkpoint on disk)

:meth:`CoordinatorParty.letters` returns what still waits for an answer, so a carrier that lost something sends it
again: silos repeat their answers. A restarted coordinator opens the run folder and begins another session; it goes on
with the round that was not released, for the same users and from the same model, under the charge in the ledger.

Where the protocol recovers, :meth:`CoordinatorParty.go_on` leaves silent silos behind. A round that is begun again then
is another release: it is charged again, for users drawn anew. A silo that is heard again is in the next session. The
run ends after ``MOST_ATTEMPTS`` such attempts at one round: a silo that dies in each would spend what all have left.
"""

from __future__ import annotations

import hashlib
import operator
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.crypto.agreement import RUN_BYTES
from fedveil.crypto.keys import IdentityKey
from fedveil.engine.aggregation import PLAIN_SUM
from fedveil.engine.attempts import MOST_ATTEMPTS
from fedveil.engine.coordinator_side import coordinate
from fedveil.engine.experiment import Experiment
from fedveil.engine.folder import Checkpoint, RunFolder
from fedveil.engine.run import (
    Observer,
    Outcome,
    conclude,
    evaluate,
    last_checkpoint,
    over_budget,
    row_of,
)
from fedveil.engine.sections import TableSection
from fedveil.engine.setup import Prepared, privacy_randomness
from fedveil.engine.turn import Turn, draw_users
from fedveil.errors import ModelError, RunFolderError
from fedveil.federation.coded_sums import CodedPost, open_sums
from fedveil.federation.deployable import check_deployable
from fedveil.federation.encrypted_sums import check_learned
from fedveil.federation.errors import RefusalError
from fedveil.federation.exchange import Absentees, Answers, Exchange
from fedveil.federation.grammar import MISSHAPEN, Conversation, Grammar, ends
from fedveil.federation.hidden_sums import HiddenSum, Outgoing, session_run
from fedveil.federation.limits import LARGEST_LETTER
from fedveil.federation.membership import Membership
from fedveil.federation.protocols import hidden_sum
from fedveil.federation.signed_message import SignedMessage
from fedveil.files import parse_json, read_content, reading
from fedveil.methods.protections import PrivateWeighting
from fedveil.privacy.ledger import Ledger
from fedveil.protection.errors import ProtocolError
from fedveil.protection.messages import SERVER
from fedveil.protection.parts import (
    LARGEST_COUNT,
    Agreement,
    Counts,
    Drawn,
    DrawnUsers,
    Model,
    OwnDraw,
    Part,
    Refused,
    Relay,
    Task,
    Terms,
    Totals,
    only,
)
from fedveil.randomness import ExperimentRandomness
from fedveil.server.optimizers import State

STATE: Final = "federation.json"
"""In the run folder: the 16 bytes of the run and its last session."""

_DRAWN: Final = "checkpoint/participants.json"
_SALT_BYTES: Final = 32
_MOST_SESSIONS: Final = 1 << 31


class CoordinatorParty:
    """The coordinator's state machine for one run.

    Args:
        prepared: the experiment; its population is the coordinator's own share: a public test table.
        membership: the federation.
        identity: the coordinator's long-term key.
        folder: the run folder, new or of a run that was interrupted.
        observer: who is told how the run goes on.

    Raises:
        CompositionError: a method that does not run between institutions.
        RunFolderError: a damaged folder, or another process at work in it.
    """

    def __init__(
        self,
        *,
        prepared: Prepared,
        membership: Membership,
        identity: IdentityKey,
        folder: RunFolder,
        observer: Observer,
    ) -> None:
        check_deployable(prepared)
        self._prepared, self._membership, self._identity = prepared, membership, identity
        self._folder, self._observer = folder, observer
        self._privacy = privacy_randomness(prepared.experiment)
        guarantee = prepared.guarantee
        self._ledger = Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency)
        self._checkpoint = last_checkpoint(prepared, folder, self._ledger)
        folder.mend_metrics(self._checkpoint)
        self._run, self._session = self._identify()
        self._number = self._attempts = 0
        self._hidden: HiddenSum | None = None
        self._post: CodedPost | None = None
        self._talks: dict[int, Conversation] = {}
        self._totals: Int64[np.ndarray, " users"] | None = None
        self._taking_part = prepared.setting.n_users
        self._began = time.perf_counter()
        self._exchange: Exchange | None = None
        self._absent = Absentees()
        self.outcome: Outcome | None = None
        observer.started(folder.path, prepared.experiment, self._checkpoint.round)
        self._begin_session()

    @property
    def run(self) -> bytes:
        """16 bytes that no other run has."""
        return self._run

    @property
    def finished(self) -> bool:
        """Whether the run has ended; :attr:`outcome` says how."""
        return self.outcome is not None

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        self._ledger.close()

    def letters(self) -> list[tuple[int, bytes]]:
        """Return the letters that still wait for an answer, as pairs of silo and bytes.

        Among them is the last one to every silo that was left behind: an answer to it shows that it is back.
        """
        if self._exchange is None:
            return []
        waiting = [(silo, self._exchange.letters[silo]) for silo in self._exchange.missing]
        return waiting + self._absent.letters()

    def go_on(self) -> tuple[str, ...]:
        """Go on without the silos that have not answered, where the protocol allows it; return their names.

        Where too few would be left, but enough with those that are back meanwhile, the round is begun again with them.
        """
        exchange, hidden = self._exchange, self._hidden
        if exchange is None or hidden is None:
            return ()
        silent = exchange.missing
        if self._leave(silent):
            self._proceed()
        elif len(self._present) - len(silent) + self._absent.back >= hidden.least and self._absent.back:
            for silo in silent:
                self._absent.leave(silo, exchange)
            self._begin_session()
        else:
            return ()
        return tuple(self._membership.silos[silo] for silo in silent)

    def receive(self, silo: int, data: bytes) -> None:
        """Read a silo's letter. What belongs to an exchange that is over is passed over in silence.

        Args:
            silo: who sent it, as the carrier says.
            data: the letter.

        Raises:
            ProtocolError: no letter of this silo, or one that says what it must not; nothing changes.
            RunFolderError: the disk is full; the run goes on when the folder is opened again.
        """
        if not 0 <= silo < len(self._membership.silos):
            raise ProtocolError(f"there are {len(self._membership.silos)} silos in the federation", silo=silo)
        letter = SignedMessage.open(
            data,
            sender=silo,
            identity=self._membership.roster[silo],
            recipient=SERVER,
            largest=self._largest_answer(),
        )
        exchange = self._exchange
        if exchange is None or letter.run != self._run:
            return
        if silo in self._absent:
            self._absent.hear(silo, letter)
            return
        if not exchange.awaits(silo, letter):
            return
        if ends(letter.parts):
            self._end(silo, letter)
            return
        try:
            self._talks[silo].answer(letter.parts)
        except RefusalError:
            self.stop(f"silo {self._membership.silos[silo]}: sent {MISSHAPEN}")
            return
        exchange.answers[silo] = letter.parts
        self._proceed()

    def _end(self, silo: int, letter: SignedMessage) -> None:
        """Read that a silo refuses, which ends the run, or does not know the session: it is left, or another begins."""
        (part,) = letter.parts
        if isinstance(part, Refused):
            self.stop(str(RefusalError(part.cause, part.reason, silo=self._membership.silos[silo])))
        elif self._leave((silo,)):
            self._absent.hear(silo, letter)
            self._proceed()
        else:
            self._begin_session()

    def stop(self, reason: str) -> None:
        """End the run with the model it has; the folder can be resumed."""
        self._exchange = None
        self.outcome = conclude(
            self._prepared,
            self._folder,
            self._checkpoint,
            self._ledger,
            reason or None,
            has_model=self._hidden is None or self._hidden.shows_model,
        )
        self._ledger.close()

    def _proceed(self) -> None:
        """Read the answers once all of an exchange are in."""
        exchange = self._exchange
        if exchange is None or exchange.missing:
            return
        try:
            exchange.then(dict(sorted(exchange.answers.items())))
        except (ProtocolError, ModelError) as error:
            self.stop(str(error))

    def _leave(self, silos: tuple[int, ...]) -> bool:
        """Leave silos of the exchange behind, if the protocol can go on without them; return whether it can."""
        exchange, hidden = self._exchange, self._hidden
        if exchange is None or hidden is None or not silos:
            return False
        if len(exchange.letters) - len(silos) < hidden.least:
            return False
        for silo in silos:
            self._absent.leave(silo, exchange)
        return True

    # --- sessions --------------------------------------------------------------------------------------------

    def _identify(self) -> tuple[bytes, int]:
        """Return the run's 16 bytes and the number of its last session, from the folder or new."""
        path = self._folder / STATE
        if not path.exists():
            return os.urandom(RUN_BYTES), 0
        with reading(f"{path}, by which the silos know the run,", RunFolderError):
            document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
            run, session = bytes.fromhex(document["run"]), operator.index(document["session"])
            if len(run) != RUN_BYTES or not 0 <= session < _MOST_SESSIONS:
                raise ValueError
            return run, session

    def _begin_session(self) -> None:
        self._session += 1
        self._folder.write_json(STATE, {"run": self._run.hex(), "session": self._session})
        terms = Terms(experiment=self._shown().to_toml(), membership=self._membership.digest)
        run = session_run(self._run, self._session, terms)
        self._hidden = hidden_sum(self._prepared, run)
        self._absent.readmit()
        self._totals = None
        self._talks = {silo: Conversation(Grammar.of(self._prepared, silo)) for silo in self._present}
        self._number = -1
        offer: list[Part] = [terms]
        if self._prepared.method.channel.coded:
            self._post = CodedPost(run)
            offer.append(self._post.offer)
        self._ask(dict.fromkeys(self._present, offer), self._joined)

    @property
    def _present(self) -> tuple[int, ...]:
        """The silos that were not left behind."""
        return tuple(silo for silo in range(len(self._membership.silos)) if silo not in self._absent)

    def _shown(self) -> Experiment:
        """Return the experiment as the silos see it: without the coordinator's own paths."""
        experiment = self._prepared.experiment
        model = experiment.model.model_copy(update={"initial": None, "initial_layers": None})
        table = experiment.data.table
        if table is not None:
            names = tuple(Path(f"{name}.csv") for name in self._membership.silos)
            table = TableSection(schema_file=Path("schema.toml"), files=names)
        data = experiment.data.model_copy(update={"table": table, "folder": None})
        return experiment.model_copy(update={"model": model, "data": data})

    def _joined(self, answers: Answers) -> None:
        if self._prepared.method.shows_counts:
            users = self._prepared.population.n_users
            counts = {silo: only(parts, Counts, silo).counts for silo, parts in answers.items()}
            for silo, own in counts.items():
                if len(own) != users:
                    raise ProtocolError(f"counts records of {len(own)} users instead of {users}", silo=silo)
            self._totals = np.sum(list(counts.values()), axis=0)
            if (self._totals > LARGEST_COUNT).any():
                most = max(counts, key=lambda silo: int(counts[silo].max()))
                raise ProtocolError(
                    f"counts more records of a user than {LARGEST_COUNT} over all silos", silo=most
                )
        if self._post is not None:
            for silo, parts in answers.items():
                self._post.meet(silo, only(parts, Agreement, silo))
        self._set_up(answers)

    def _set_up(self, answers: Answers) -> None:
        outgoing = self._route(answers)
        if self._hidden is None or self._hidden.ready:
            self._begin_round(outgoing)
        else:
            self._ask(_by_silo(outgoing), self._set_up)

    # --- rounds ----------------------------------------------------------------------------------------------

    def _begin_round(self, before: Outgoing) -> None:
        """Charge the next round, then ask for it; ``before`` is what silos must read first."""
        prepared, number = self._prepared, self._checkpoint.round + 1
        if number > prepared.experiment.rounds:
            self.stop("")
            return
        charged = sum(entry.round == number for entry in self._ledger.entries)
        repeats = self._hidden is None or self._hidden.repeats
        due = not charged or not repeats
        stopped = over_budget(prepared, number, len(self._ledger.entries) + due)
        if stopped is None and not repeats and self._attempts == MOST_ATTEMPTS:
            stopped = (
                f"silos vanished in each of {MOST_ATTEMPTS} attempts at round {number}; resume when they stay"
            )
        if stopped is not None:
            self.stop(stopped)
            return
        self._attempts += 1
        self._began = time.perf_counter()
        if due:
            event = prepared.guarantee.of_round(prepared.guarantee.event, number)
            self._ledger.charge(run=prepared.experiment.name, round=number, attempt=charged, event=event)
        drawn, commitment = self._drawn(number, 0 if repeats else charged)
        self._taking_part = prepared.setting.n_users if drawn is None else int(drawn.sum())
        model: list[Part] = [Model(values=self._checkpoint.model.cpu().numpy())]
        if self._hidden is not None and not self._hidden.shows_model:
            model = []
        task = Task(round=number)
        begin = [] if self._hidden is None else self._hidden.begin(number, drawn, self._present)
        relays = _by_silo([*before, *begin])
        totals: list[Part] = [] if self._totals is None else [Totals(counts=self._totals)]
        self._totals = None
        self._ask(
            {
                silo: [*totals, *relays.get(silo, []), *self._told(silo, drawn, commitment), *model, task]
                for silo in self._present
            },
            self._collect,
        )

    def _told(self, silo: int, drawn: Bool[np.ndarray, " users"] | None, commitment: bytes) -> list[Part]:
        """Return what a silo is told of who takes part: all users, itself alone, or a commitment."""
        if drawn is None:
            return []
        told = {one.kind for one in self._prepared.method.sends()}
        every: list[Part] = [
            Drawn(commitment=commitment),
            OwnDraw(drawn=bool(drawn[silo % len(drawn)])),
            DrawnUsers(users=drawn),
        ]
        return [part for part in every if type(part) in told]

    def _drawn(self, number: int, attempt: int) -> tuple[Bool[np.ndarray, " users"] | None, bytes]:
        """Return who takes part, drawn once and kept, and a commitment: an attempt that is asked for again is the same.

        None where everybody does, or where nobody knows: the users are drawn by oblivious transfer.
        """
        path, method, users = self._folder / _DRAWN, self._prepared.method, self._prepared.population.n_users
        hidden = isinstance(method.protection, PrivateWeighting) and method.protection.private_sampling
        if hidden or method.sampler.rate == 1:
            return None, b""
        document = None
        if path.exists():
            document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
        with reading(path, RunFolderError):
            if document is None or (document["round"], document["attempt"]) != (number, attempt):
                drawn = draw_users(method, users, self._privacy, number, attempt)
                if drawn is None:
                    return None, b""
                bits, salt = np.packbits(drawn).tobytes().hex(), os.urandom(_SALT_BYTES).hex()
                document = {"round": number, "attempt": attempt, "drawn": bits, "salt": salt}
                self._folder.write_json(_DRAWN, document)
            packed, salted = bytes.fromhex(document["drawn"]), bytes.fromhex(document["salt"])
            if (len(packed), len(salted)) != (-(-users // 8), _SALT_BYTES):
                raise ValueError
            drawn = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=users).astype(np.bool_)
            return drawn, hashlib.sha256(salted + packed).digest()

    def _collect(self, answers: Answers) -> None:
        if self._hidden is None:
            number = self._checkpoint.round + 1
            vectors = open_sums(
                answers,
                method=self._prepared.method.at_round(number),
                post=self._post,
                round_number=number,
                length=self._prepared.task.dimension,
            )
            self._release(PLAIN_SUM.total(number, vectors), len(vectors))
            return
        outgoing = self._route(answers)
        if outgoing:
            self._ask(_by_silo(outgoing), self._collect)
        elif self._hidden.shows_model:
            self._release(self._hidden.result(), self._hidden.summed)
        else:
            check_learned(answers)
            self._complete(
                self._checkpoint.model, self._checkpoint.state, test=None, summed=self._hidden.summed
            )

    def _release(self, aggregate: Float64[np.ndarray, " d"], summed: int) -> None:
        """Turn a sum into the next model and put it on the disk: then, and not before, it counts as released."""
        prepared, number = self._prepared, self._checkpoint.round + 1
        experiment, setting = prepared.experiment, prepared.setting
        turn = Turn(
            setting=replace(setting, method=prepared.method.at_round(number)),
            model=self._checkpoint.model,
            state=self._checkpoint.state,
            round_number=number,
            experiment=ExperimentRandomness(experiment.seed),
            privacy=self._privacy,
        )
        silos = len(self._membership.silos)
        model, state = coordinate(turn, aggregate, n_silos=silos, summed=summed, drawn=self._taking_part)
        due = number % experiment.evaluate_every == 0 or number == experiment.rounds
        test = evaluate(prepared, model) if due else None
        self._complete(model, state, test=test, summed=summed)

    def _complete(
        self,
        model: Float32[Tensor, " d"],
        state: State,
        *,
        test: dict[str, float | None] | None,
        summed: int,
    ) -> None:
        """Put a round on the disk; where the silos keep the models, model and state are the initial ones."""
        prepared, number = self._prepared, self._checkpoint.round + 1
        row = row_of(prepared, number, test, None, charges=len(self._ledger.entries))
        seconds = time.perf_counter() - self._began
        row |= {"summed": summed, "seconds": seconds, "elapsed": self._checkpoint.row["elapsed"] + seconds}
        checkpoint = Checkpoint(round=number, model=model, state=state, row=row, ledger=self._ledger.head)
        self._folder.write_checkpoint(checkpoint)
        self._checkpoint, self._attempts = checkpoint, 0
        self._folder.append("metrics.jsonl", row)
        self._observer.completed(row)
        if self._absent.back and number < prepared.experiment.rounds:
            self._begin_session()
        else:
            self._begin_round([])

    # --- letters ---------------------------------------------------------------------------------------------

    def _ask(self, parts: dict[int, list[Part]], then: Callable[[Answers], None]) -> None:
        self._number += 1
        for silo, content in parts.items():
            self._talks[silo].ask(content)
        letters = {
            silo: SignedMessage(
                run=self._run,
                session=self._session,
                number=self._number,
                sender=SERVER,
                recipient=silo,
                parts=tuple(content),
            ).seal(self._identity)
            for silo, content in sorted(parts.items())
        }
        self._exchange = Exchange(session=self._session, number=self._number, letters=letters, then=then)

    def _route(self, answers: Answers) -> Outgoing:
        """Hand the silos' messages to the protection's protocol; return the messages that follow."""
        messages = {
            silo: [part.message for part in parts if isinstance(part, Relay)]
            for silo, parts in answers.items()
        }
        if self._hidden is not None:
            return self._hidden.read(messages)
        for silo, sent in messages.items():
            if sent:
                raise ProtocolError("sent a message of a protocol that is not played", silo=silo)
        return []

    def _largest_answer(self) -> int:
        """Return how long an answer may be: a vector, a count per user, and messages of a protocol."""
        needed = 8 * self._prepared.task.dimension + 4 * self._prepared.population.n_users + (1 << 16)
        return min(LARGEST_LETTER, needed if self._hidden is None else max(needed, self._hidden.largest))


def _by_silo(outgoing: Outgoing) -> dict[int, list[Part]]:
    messages: dict[int, list[Part]] = {}
    for silo, message in outgoing:
        messages.setdefault(silo, []).append(Relay(message=message))
    return messages
