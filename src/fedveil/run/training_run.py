"""Run one experiment round by round, with every state that a resumed run needs on disk.

Each round has six steps, in this order:

1. check the budget;
2. append the charge to the ledger and flush it to disk;
3. compute the round;
4. evaluate the new model;
5. rename the checkpoint into place, which is the release;
6. append the line of metrics.

A crash between any two steps loses no complete round: :func:`resume` continues from the last checkpoint. A round
that was charged but is missing from the checkpoint is charged again, because nothing shows that nobody saw its
result. Only noise from a known seed repeats the same release and needs no second charge.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from fedveil.errors import BudgetError, IntegrityError, RunFolderError
from fedveil.files import read_json, reading
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import Entry, Ledger
from fedveil.privacy.statement import Statement
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.transcript import Transcript
from fedveil.run.config.named_code import check_code
from fedveil.run.environment import environment
from fedveil.run.folder.diagnostics import population_diagnostics, require_same_records
from fedveil.run.folder.documents import SCHEMA_VERSION
from fedveil.run.folder.run_folder import Checkpoint, Row, RunFolder, finite
from fedveil.run.folder.statement import state
from fedveil.run.movement import clip_at, movement
from fedveil.run.observer import Observer
from fedveil.run.releases.release import Release
from fedveil.run.releases.run_evaluation import evaluate, evaluated_already, release_evaluation
from fedveil.run.releases.run_preprocessing import run_preprocessing
from fedveil.run.releases.side_releases import read_spent_budget
from fedveil.run.remarks import remarks
from fedveil.run.round_charges import retry_policy
from fedveil.run.rounds.diagnostics import RoundDiagnostics
from fedveil.run.rounds.retries import RetryPolicy
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.rounds.round_loop import play_round
from fedveil.run.rounds.simulated_parties import SimulatedParties
from fedveil.run.setup import Prepared, prepare
from fedveil.run.workers import share_training
from fedveil.statistics.evaluation.result import ReleasedEvaluation, read_evaluated
from fedveil.training.server.optimizers import matching
from fedveil.training.server.spectrum import spectrum

_ENDED: Final = (
    "when the run ended: a callback stopped it before its last round, and what the callback looked at is not covered "
    "unless it was public"
)
_STOPPED: Final = "stopped.json"
_TRANSCRIPT: Final = "transcript.jsonl"


class StopTraining(Exception):
    """Signal from an observer to end the run after the current complete round, with a reason.

    The run then evaluates its model and writes its statement, as after its last round.
    """


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run that ended.

    Attributes:
        folder: path of the run folder.
        rounds: number of complete rounds.
        stopped: reason why the run ended before its last round; None if it did not.
        row: the last line of metrics.
        statement: the privacy statement of the run.
        seconds: wall-clock seconds of all rounds together.
        evaluated: the released test metrics; None if the experiment requests none.
    """

    folder: Path
    rounds: int
    stopped: str | None
    row: Row
    statement: Statement
    seconds: float
    evaluated: ReleasedEvaluation | None = None


def run(prepared: Prepared, parent: Path, observer: Observer, *, transcript: bool = False) -> Outcome:
    """Run a prepared experiment in a new folder under ``parent``.

    Args:
        prepared: the experiment with its population, method and guarantee.
        parent: the folder in which the run folder is created.
        observer: receives the start of the run, training progress and each line of metrics.
        transcript: whether ``transcript.jsonl`` lists every protocol message, also after a resume.
    """
    folder = RunFolder.create(parent, prepared.experiment)
    prepared = run_preprocessing(prepared, folder)
    folder.write_json("environment.json", environment(prepared))
    folder.write_json("diagnostics.json", population_diagnostics(prepared))
    if transcript and prepared.method.protection.agrees:
        folder.write(_TRANSCRIPT, b"")
    with share_training(prepared) as shared:
        return _play(shared, folder, observer)


def resume(path: Path, observer: Observer, code: Collection[str] = ()) -> Outcome:
    """Resume an interrupted run; if the run is complete, only evaluate and report it again.

    Args:
        path: the run folder.
        observer: receives the progress of the run.
        code: import paths that the experiment may name and that may run.

    Raises:
        ConfigError: the experiment names an import path that is missing from ``code``.
    """
    folder, experiment = RunFolder.open(path)
    check_code(experiment, code, path)
    return continue_run(folder, prepare(experiment), observer)


def continue_run(folder: RunFolder, prepared: Prepared, observer: Observer) -> Outcome:
    """Resume the run of a folder whose experiment has been prepared again.

    Raises:
        RunFolderError: the training records differ from those of the folder's run.
    """
    prepared = run_preprocessing(prepared, folder)
    folder.write_json("environment.json", environment(prepared))
    if (folder / "diagnostics.json").exists():
        require_same_records(folder, prepared)
    else:  # `run` writes diagnostics.json after experiment.toml: a crash between the two leaves none
        folder.write_json("diagnostics.json", population_diagnostics(prepared))
    with share_training(prepared) as shared:
        return _play(shared, folder, observer)


def _play(prepared: Prepared, folder: RunFolder, observer: Observer) -> Outcome:
    """Play all rounds with the run's ledger open, and return the outcome."""
    guarantee = prepared.guarantee
    with Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency) as ledger:
        return _Playing(prepared, folder, ledger, observer).to_its_end()


class _Playing:
    """A run in progress: the state that stays the same between checkpoints.

    All parties are simulated in this process. Their cryptographic keys, if any, are fresh for each process.
    """

    def __init__(self, prepared: Prepared, folder: RunFolder, ledger: Ledger, observer: Observer) -> None:
        self._prepared, self._folder, self._ledger, self._observer = prepared, folder, ledger, observer
        self._privacy, method = prepared.experiment.privacy.randomness(), prepared.method
        listed = Transcript() if method.protection.agrees else None
        driver: LocalDriver[Any, Any] = LocalDriver(
            prepared.protocol_spec, listed, method.kinds, self._privacy
        )
        self._parties = SimulatedParties(driver=driver, initial=prepared.task.initial())
        self._listed = listed if (folder / _TRANSCRIPT).exists() else None

    def to_its_end(self) -> Outcome:
        """Play rounds until the last one, the end of the budget or a stop by the observer; then evaluate."""
        folder, rounds = self._folder, self._prepared.experiment.rounds
        checkpoint = self._begin()
        # A run whose model was already evaluated must not train on: its released metrics are of that model.
        stopped = evaluated_already(folder) if checkpoint.round < rounds else None
        ended = stopped is not None and _ended_at(folder) == checkpoint.round
        while checkpoint.round < rounds and stopped is None:
            try:
                checkpoint = self._next(checkpoint)
            except BudgetError as spent_up:
                stopped = str(spent_up)
                break
            try:
                self._observer.on_round_end(checkpoint.row)
            except StopTraining as asked:
                # Written before the evaluation, so that a resumed run states the callback as uncovered as well.
                stopped, ended = str(asked), True
                folder.write_json(_STOPPED, {"round": checkpoint.round})
        prepared = self._prepared
        if ended:
            prepared = replace(prepared, uncovered=(*prepared.uncovered, _ENDED))
        skipped = release_evaluation(prepared, folder, checkpoint, self._ledger)
        stopped = "; ".join(filter(None, (stopped, skipped))) or None
        return conclude(prepared, folder, checkpoint, self._ledger, stopped)

    def _begin(self) -> Checkpoint:
        """Return the last complete checkpoint and repair the folder's other files to match it.

        Raises:
            RunFolderError: the ledger has a charge for an event that is not one of this experiment's.
        """
        prepared, folder, ledger = self._prepared, self._folder, self._ledger
        # Announce a new run before code of a user's model runs in the evaluation of round 0, so that the observer can
        # show how to resume it. The round of a resumed run is known only after its checkpoint is read.
        if begins := not folder.has_begun:
            self._observer.on_run_start(folder.path, prepared.experiment, 0)
        checkpoint = last_checkpoint(prepared, folder, ledger)
        # A charge of another event means another experiment: its cost would be stated under the wrong guarantee.
        if any(entry.event != self._event_of(entry) for entry in ledger.entries):
            raise RunFolderError(
                f"{folder.path}: the ledger was charged for other events than this experiment's: go on with the "
                "experiment.toml that it was begun with, or begin another run in a folder of its own"
            )
        folder.mend_metrics(checkpoint)
        if self._listed is not None:
            folder.drop_torn_line(_TRANSCRIPT)
        if not begins:
            self._observer.on_run_start(folder.path, prepared.experiment, checkpoint.round)
        return checkpoint

    def _event_of(self, entry: Entry) -> Event | None:
        """Return the event that a ledger entry must charge; None if no release has its name."""
        name, guarantee = self._prepared.experiment.name, self._prepared.guarantee
        beside = {one.of_run(name): one.guarantee.event for one in self._prepared.side_releases}
        if entry.run == name:
            return guarantee.event_at_round(guarantee.event, entry.round, again=entry.attempt > 0)
        return beside.get(entry.run)

    def _next(self, last: Checkpoint) -> Checkpoint:
        """Charge and play the round after a checkpoint, and store it in the folder.

        Raises:
            BudgetError: the round would exceed the budget.
        """
        turn, folder = self._turn(last), self._folder
        retry = retry_policy(self._prepared, folder, self._ledger, turn.round_number)
        # Charge before compute: a crash after the release must not leave the release uncharged.
        retry.pay()
        checkpoint = self._played(last, turn, retry)
        if self._listed is not None:
            folder.append(_TRANSCRIPT, *(line.to_json() for line in self._listed.take()))
        folder.write_checkpoint(checkpoint)
        # The checkpoint above is the commit point of the round. A crash after it loses the line of metrics only,
        # which `mend_metrics` restores from the checkpoint.
        folder.append("metrics.jsonl", checkpoint.row)
        return checkpoint

    def _turn(self, last: Checkpoint) -> RoundContext:
        """Return the context of the round after a checkpoint."""
        number, asked, observer = last.round + 1, self._prepared.experiment, self._observer
        return self._prepared.round_context(
            number,
            last.model,
            last.state,
            self._privacy,
            progress=lambda done, total: observer.training(number, done, total),
            measured=number % asked.evaluate_every == 0 or number == asked.rounds,
        )

    def _played(self, last: Checkpoint, turn: RoundContext, retry: RetryPolicy) -> Checkpoint:
        """Play the round of a context and return its checkpoint, which is not stored yet."""
        prepared, number, begin = self._prepared, turn.round_number, time.perf_counter()
        model, kept, diagnostics = play_round(turn, self._parties, retry)
        seconds = time.perf_counter() - begin
        test = evaluate(prepared, prepared.method.model_of(model, kept)) if turn.measured else None
        spent = read_spent_budget(self._ledger, prepared.experiment.name, prepared.side_releases)
        row = row_of(prepared, number, test, diagnostics, charges=spent.charges, beside=spent.beside)
        row["clip"] = clip_at(prepared.method.at_round(number, last.state))
        row["movement"] = movement(prepared, last, model, diagnostics.summed)
        row |= {"seconds": seconds, "elapsed": last.row["elapsed"] + seconds}
        return Checkpoint(round=number, model=model, state=kept, row=row, ledger=self._ledger.head)


def _ended_at(folder: RunFolder) -> int | None:
    """Return the round after which a callback ended the run; None if no callback did."""
    path = folder / _STOPPED
    if not path.exists():
        return None
    with reading(path, RunFolderError):
        return int(read_json(path, RunFolderError)["round"])


def conclude(
    prepared: Prepared,
    folder: RunFolder,
    checkpoint: Checkpoint,
    ledger: Ledger,
    stopped: str | None,
    *,
    has_model: bool = True,
) -> Outcome:
    """Write the last files of a run: privacy statement, model and spectrum.

    Args:
        prepared: the experiment that ran.
        folder: the run folder.
        checkpoint: the last complete round.
        ledger: the charges of the run.
        stopped: reason why the run ended early; None if it did not.
        has_model: False if only the silos hold the model; then neither model nor spectrum is written.
    """
    spent = read_spent_budget(ledger, prepared.experiment.name, prepared.side_releases)
    if has_model:
        released = prepared.method.model_of(checkpoint.model, checkpoint.state)
        folder.write_model(prepared.task.state(released))
        moved = released.cpu() - prepared.task.initial().cpu()
        folder.write_json("spectrum.json", asdict(spectrum(moved)))
    statement = state(prepared, checkpoint.round, spent)
    folder.write_json("privacy.json", statement.to_json())
    return Outcome(
        folder=folder.path,
        rounds=checkpoint.round,
        stopped=stopped,
        row=checkpoint.row,
        statement=statement,
        seconds=checkpoint.row["elapsed"],
        evaluated=read_evaluated(folder.path),
    )


def last_checkpoint(prepared: Prepared, folder: RunFolder, ledger: Ledger) -> Checkpoint:
    """Return the last complete round of a folder; write and return round 0 if none is complete.

    Raises:
        RunFolderError: a damaged checkpoint, an optimiser state of another optimiser, or a ledger that ends before
            the ledger head in the checkpoint.
        IntegrityError: the folder has the metrics of a round for which the ledger has no charge.
    """
    found = folder.read_checkpoint()
    # The metrics of a round are written after its charge. Without a checkpoint they are the only evidence of rounds
    # that were released, and a ledger that lacks a charge for one would understate what was spent.
    charged = {entry.round for entry in ledger.entries if entry.run == prepared.experiment.name}
    if lost := sorted(folder.rounds_with_metrics() - charged):
        raise IntegrityError(
            f"{folder.path}: metrics.jsonl has round {lost[0]}, and ledger.jsonl has no charge for it; "
            "charges were lost "
            "or replaced, so what was spent is unknown"
        )
    if found is None:
        return initial_checkpoint(prepared, folder, ledger)
    # A ledger that is shorter than the checkpoint's has lost charges: the statement would be too small.
    ledger.require_extends(found.ledger)
    method = prepared.method
    if not matching(method, found.model, found.state):
        raise RunFolderError(
            f"{folder.path}: the checkpoint has no state of server.optimizer ({type(method.server).__name__}) and "
            f"server.average ({type(method.average).__name__}) for this model; it was put there by another run"
        )
    return found


def initial_checkpoint(prepared: Prepared, folder: RunFolder, ledger: Ledger) -> Checkpoint:
    """Write and return round 0, which holds the initial model."""
    model = prepared.task.initial()
    spent = read_spent_budget(ledger, prepared.experiment.name, prepared.side_releases)
    row = row_of(prepared, 0, evaluate(prepared, model), None, charges=spent.charges, beside=spent.beside)
    row |= {"seconds": 0.0, "elapsed": 0.0}
    if said := remarks(prepared.task, prepared.population):
        row["remarks"] = said
    checkpoint = Checkpoint(
        round=0, model=model, state=prepared.method.init(model), row=row, ledger=ledger.head
    )
    folder.write_checkpoint(checkpoint)
    return checkpoint


def row_of(
    prepared: Prepared,
    number: int,
    test: dict[str, float | None] | None,
    diagnostics: RoundDiagnostics | None,
    *,
    charges: int,
    beside: Sequence[Release] | None = None,
) -> Row:
    """Return one line of metrics.

    Args:
        prepared: the experiment that runs.
        number: the round; 0 is the initial model.
        test: value of every metric on the test records; None if the round is not evaluated.
        diagnostics: diagnostics of a simulation; None if no process sees all silos.
        charges: number of ledger charges for rounds.
        beside: the side releases before the first round, repeated as often as they were charged; None: each once.
    """
    beside = prepared.releases_before_training if beside is None else beside
    epsilon = (
        prepared.epsilon_with(Role.READER, number, beside, charges - number) if prepared.secure else None
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "round": number,
        "test": test,
        "epsilon": None if epsilon is None else finite(epsilon),
        "clip": clip_at(prepared.method),
        **(asdict(diagnostics) if diagnostics else {}),
    }
