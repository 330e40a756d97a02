"""Training rounds in the coordinator's run folder: durably charged, sampled, released, in this order."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import ExitStack
from typing import Final

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.crypto.key_agreement import RUN_BYTES
from fedveil.errors import RunFolderError
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.session_plan import EVERYBODY, RoundStartState, SampleDraw
from fedveil.federation.silo_session.training_task import training_plan
from fedveil.files import parse_json, read_content, reading
from fedveil.privacy.ledger import Ledger
from fedveil.protocols.session_messages import RunPart, SessionMessage
from fedveil.run.folder.run_folder import Checkpoint, Row, RunFolder
from fedveil.run.movement import clip_at, movement
from fedveil.run.observer import Observer
from fedveil.run.releases.run_evaluation import evaluate
from fedveil.run.releases.side_releases import read_spent_budget
from fedveil.run.round_charges import over_budget
from fedveil.run.rounds.next_model import next_model
from fedveil.run.rounds.retries import MOST_ATTEMPTS
from fedveil.run.rounds.round_context import draw_users
from fedveil.run.run_budget import reserved_releases
from fedveil.run.setup import Prepared
from fedveil.run.training_run import Outcome, conclude, last_checkpoint, row_of
from fedveil.training.server.optimizers import State

STATE: Final = "federation.json"
"""File in the run folder with the 16 bytes of the run."""

_DRAWN: Final = "checkpoint/participants.json"
_SALT_BYTES: Final = 32


def identify(folder: RunFolder) -> bytes:
    """Return the 16 bytes of a run from its folder; create them if the folder is new.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / STATE
    if not path.exists():
        run = os.urandom(RUN_BYTES)
        folder.write_json(STATE, {"run": run.hex()})
        return run
    with reading(f"{path}, by which the silos know the run,", RunFolderError):
        run = bytes.fromhex(parse_json(read_content(path, RunFolderError), path, RunFolderError)["run"])
        if len(run) != RUN_BYTES:
            raise ValueError
        return run


class TrainingRounds:
    """Training rounds of a run.

    Args:
        prepared: the experiment.
        folder: the run folder, new or of an interrupted run.
        observer: receives the progress of the run.
        record: record of the parties' signatures.
        phase: the part of the run, as sent to the silos; None: the run is training without releases.

    Raises:
        RunFolderError: the folder is damaged, or another process works in it.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        observer: Observer,
        record: RunRecord,
        phase: RunPart | None = None,
    ) -> None:
        self._prepared, self._folder, self._observer, self._record = prepared, folder, observer, record
        self.plan = training_plan(prepared, phase)
        guarantee = prepared.guarantee
        ledger = Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency)
        with ExitStack() as opened:  # a failure here closes the ledger
            self._ledger = opened.enter_context(ledger)
            self.checkpoint = last_checkpoint(prepared, folder, self._ledger)
            folder.mend_metrics(self.checkpoint)
            # Lines of the record = released rounds + earlier releases; a further line belongs to a round that was not
            # released.
            record.mend(self.checkpoint.round + (0 if phase is None else len(phase.released)))
            opened.pop_all()
        self._attempts, self._draw, self._began = 0, EVERYBODY, time.perf_counter()
        self._closing: list[SessionMessage] = []
        self._spent = False
        observer.on_run_start(folder.path, prepared.experiment, self.checkpoint.round)

    @property
    def number(self) -> int:
        """Number of the next round, from 1."""
        return self.checkpoint.round + 1

    @property
    def start(self) -> RoundStartState:
        """Model and clip at the start of the round."""
        last = self.checkpoint
        return RoundStartState(model=last.model.cpu().numpy(), clip=self._prepared.method.clip_at(last.state))

    @property
    def has_rounds_left(self) -> bool:
        """Whether a round remains."""
        return self.number <= self._prepared.experiment.rounds

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        self._ledger.close()

    def stop_reason(self, repeats: bool) -> str | None:
        """Return why an attempt at the round may not begin; None if it may.

        Args:
            repeats: whether a repeated attempt is the same release; else it costs another charge.
        """
        prepared, number = self._prepared, self.number
        # The budget of releases that are still due is reserved: training may not spend it.
        beside = reserved_releases(prepared, self._folder, self._ledger, repeatable=True)
        reason = over_budget(prepared, number, self.charges + self._due(repeats), beside)
        self._spent = reason is not None
        if reason is None and not repeats and self._attempts == MOST_ATTEMPTS:
            return (
                f"silos vanished in each of {MOST_ATTEMPTS} attempts at round {number}; resume when they stay"
            )
        return reason

    def begin(self, repeats: bool) -> SampleDraw:
        """Charge an attempt at the round if a charge is due, and sample the users."""
        prepared, number, charged = self._prepared, self.number, self._charged()
        # A repeatable round is charged once. Otherwise every attempt is a new release, with a charge of its own.
        due = self._due(repeats)
        self._attempts += 1
        self._began = time.perf_counter()
        if due:
            event = prepared.guarantee.event_at_round(prepared.guarantee.event, number, again=charged > 0)
            self._ledger.charge(run=prepared.experiment.name, round=number, attempt=charged, event=event)
        # A charge amplified by sampling holds for one sample only: each further charge samples anew, a repeat keeps
        # the sample.
        self._draw = self._drawn(number, 0 if repeats else charged)
        return self._draw

    def _charged(self) -> int:
        return sum(entry.round == self.number for entry in self._ledger.entries)

    def _due(self, repeats: bool) -> bool:
        return not self._charged() or not repeats

    def _drawn(self, number: int, attempt: int) -> SampleDraw:
        """Return the persisted sample of the attempt; draw and persist it if it is new.

        A repeated attempt has the same sample. Otherwise one charge would pay for two samples.
        """
        path, method, users = self._folder / _DRAWN, self._prepared.method, self._prepared.population.n_users
        if method.protection.draws_blindly or not method.draws:
            return EVERYBODY
        document = None
        if path.exists():
            document = parse_json(read_content(path, RunFolderError), path, RunFolderError)
        with reading(path, RunFolderError):
            if document is None or (document["round"], document["attempt"]) != (number, attempt):
                drawn = draw_users(method, users, self.plan.privacy, number, attempt)
                if drawn is None:
                    return EVERYBODY
                # The salt hides the sample behind its commitment: without it, a silo could test guesses at the
                # sample.
                bits, salt = np.packbits(drawn).tobytes().hex(), os.urandom(_SALT_BYTES).hex()
                document = {"round": number, "attempt": attempt, "drawn": bits, "salt": salt}
                self._folder.write_json(_DRAWN, document)
            packed, salted = bytes.fromhex(document["drawn"]), bytes.fromhex(document["salt"])
            if (len(packed), len(salted)) != (-(-users // 8), _SALT_BYTES):
                raise ValueError
            drawn = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=users).astype(np.bool_)
            return SampleDraw(users=drawn, commitment=hashlib.sha256(salted + packed).digest())

    def release(self, total: Float64[np.ndarray, " d"], summed: int) -> None:
        """Compute the next model from a sum and persist it; the round counts as released only then.

        Args:
            total: (d,) float64 noisy sum.
            summed: number of silos in the sum.

        Raises:
            ModelError: the sum or the model is not finite.
        """
        prepared, number, setting = self._prepared, self.number, self._prepared.setting
        drawn = setting.n_users if self._draw.users is None else int(self._draw.users.sum())
        experiment, last = prepared.experiment, self.checkpoint
        turn = prepared.round_context(number, last.model, last.state, self.plan.privacy)
        silos = prepared.population.n_silos
        model, state = next_model(turn, total, n_silos=silos, summed=summed, drawn=drawn)
        due = number % experiment.evaluate_every == 0 or number == experiment.rounds
        released = prepared.method.model_of(model, state)
        moved = movement(prepared, self.checkpoint, model, summed)
        self._complete(model, state, evaluate(prepared, released) if due else None, summed, moved)

    def pass_on(self, summed: int) -> None:
        """Persist the end of a round whose model only the silos have."""
        self._complete(self.checkpoint.model, self.checkpoint.state, None, summed)

    def _complete(
        self,
        model: Float32[Tensor, " d"],
        state: State,
        test: dict[str, float | None] | None,
        summed: int,
        moved: Row | None = None,
    ) -> None:
        prepared, number, last = self._prepared, self.number, self.checkpoint
        row = row_of(prepared, number, test, None, charges=self.charges)
        seconds = time.perf_counter() - self._began
        row |= {"clip": clip_at(prepared.method.at_round(number, last.state))}
        row |= {"summed": summed, "movement": moved}
        row |= {"seconds": seconds, "elapsed": last.row["elapsed"] + seconds}
        checkpoint = Checkpoint(round=number, model=model, state=state, row=row, ledger=self._ledger.head)
        after = hashlib.sha256(model.cpu().numpy().astype("<f4").tobytes()).digest()
        # Order for a crash: signed line, then checkpoint. A line without its checkpoint is removed by mend() on the
        # next start, and the round is played again. The reverse order could leave a released round without
        # signatures.
        self._record.add(after, checkpoint.ledger.digest)
        self._folder.write_checkpoint(checkpoint)
        self.checkpoint, self._attempts = checkpoint, 0
        self._folder.append("metrics.jsonl", row)
        self._observer.on_round_end(row)

    def conclude(self, reason: str | None, *, has_model: bool) -> Outcome:
        """Write the final files of the run, and close the ledger."""
        found = conclude(
            self._prepared, self._folder, self.checkpoint, self._ledger, reason, has_model=has_model
        )
        if self._prepared.evaluation is None and (
            self._spent or not self.has_rounds_left
        ):  # else the run can be resumed
            self._closing = self._record.close(found.rounds, self.charges)
        self._ledger.close()
        return found

    def closing(self) -> list[SessionMessage]:
        """Return the messages with the run's statement that the silos sign."""
        return self._closing

    @property
    def charges(self) -> int:
        """Number of charges for training rounds in the run's ledger."""
        return read_spent_budget(self._ledger, self._prepared.experiment.name, ()).charges
