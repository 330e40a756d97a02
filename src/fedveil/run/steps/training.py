"""The rounds of training as a part of a run: each round is charged, and its checkpoint is its release."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.files import read_json, reading
from fedveil.methods.method import Method, begin_state, clip_of_round, released_model, sum_noise_std
from fedveil.privacy.claims import Role
from fedveil.privacy.ledger import Ledger
from fedveil.run.folder.documents import SCHEMA_VERSION
from fedveil.run.folder.run_folder import Checkpoint, Row, RunFolder, finite
from fedveil.run.journal import Journal, Step
from fedveil.run.loop import Observer, Played, StopTraining
from fedveil.run.releases.evaluation import read_evaluation
from fedveil.run.releases.records import evaluate
from fedveil.run.releases.side_releases import read_spent_budget
from fedveil.run.remarks import remarks
from fedveil.run.rounds.diagnostics import RoundDiagnostics
from fedveil.run.rounds.round_context import RoundContext, next_model
from fedveil.run.setup import Prepared
from fedveil.statistics.evaluation.result import read_evaluated
from fedveil.statistics.result import NoisySums
from fedveil.training.server.optimizers import matching

_STOPPED: Final = "stopped.json"


class TrainingPart:
    """The rounds of training that a run folder lacks.

    Attributes:
        name: empty, as sent to the silos.
        prepared: the experiment that runs.
        journal: journal of the run.
        before: the releases before training.
        privacy: source of noise and samples.
        checkpoint: the last complete round.
        number: number of the next round, from 1.
        step: the charge of the next round; None if no round is left.
        context: state at the start of the next round; None if no round is left.
        stopped: why training ended before its last round, other than by its budget; None if it did not.
        ended: whether a callback stopped the run at this checkpoint.

    Args:
        prepared: the experiment that runs.
        journal: journal of the run.
        observer: receives the progress of the run.
        round_step: returns the charge of a round.
        n_senders: number of parties whose noise a sum has.
        before: the releases before training.

    Raises:
        RunFolderError: the folder is damaged.
        IntegrityError: the folder has the metrics of a round for which the ledger has no charge.
    """

    name = ""

    def __init__(
        self,
        prepared: Prepared,
        journal: Journal,
        observer: Observer,
        *,
        round_step: Callable[[int], Step],
        n_senders: int,
        before: NoisySums,
    ) -> None:
        self.prepared, self.journal, self._observer, self.before = prepared, journal, observer, before
        self._round_step, self._n_senders = round_step, n_senders
        folder, experiment = journal.folder, prepared.experiment
        # Announce a new run before code of a user's model runs in the evaluation of round 0, so that the observer can
        # show how to resume it. The round of a resumed run is known only after its checkpoint is read.
        if begins := not folder.has_begun:
            observer.on_run_start(folder.path, experiment, 0)
        self.checkpoint = _last_checkpoint(prepared, folder, journal.ledger)
        folder.mend_metrics(self.checkpoint)
        if not begins:
            observer.on_run_start(folder.path, experiment, self.checkpoint.round)
        self.privacy = experiment.privacy.randomness()
        # A run whose model was already evaluated must not train on: its released metrics are of that model.
        self.stopped: str | None = None
        if prepared.evaluation is not None and self.checkpoint.round < experiment.rounds:
            self.stopped = _evaluated_already(folder)
        self.ended = self.stopped is not None and _ended_at(folder) == self.checkpoint.round
        self._open_round()

    def _open_round(self) -> None:
        """Describe the next round, if one is left."""
        last, experiment = self.checkpoint, self.prepared.experiment
        self.number = number = last.round + 1
        self.step: Step | None = None
        self.context: RoundContext | None = None
        if self.stopped is None and number <= experiment.rounds:
            self.step = self._round_step(number)
            self.context = self.prepared.round_context(
                number,
                last.model,
                last.state,
                self.privacy,
                progress=lambda completed, total: self._observer.training(number, completed, total),
                measured=number % experiment.evaluate_every == 0 or number == experiment.rounds,
            )

    def start(self) -> tuple[Float32[np.ndarray, " d"], float | None]:
        """Return model and clip at the start of the next round."""
        last = self.checkpoint
        return last.model.cpu().numpy(), clip_of_round(self.prepared.method, last.state)

    @property
    def is_over(self) -> bool:
        """Return whether the last round is complete, or the budget allows no other."""
        if self.step is None:
            return self.number > self.prepared.experiment.rounds
        return self.step.refusal() is not None

    def release(self, result: Played) -> None:
        """Compute the next model from a sum and write the checkpoint, which is the release of the round.

        If only the silos have the sum, the model stays and the checkpoint marks the end of the round.

        An evaluation that fails or is interrupted loses no round: the checkpoint is written without test metrics, and
        the exception raised after it.

        Raises:
            ModelError: the sum or the model is not finite.
        """
        prepared, folder, last, number = self.prepared, self.journal.folder, self.checkpoint, self.number
        step, context, shown = self.step, self.context, result.diagnostics
        assert step is not None
        assert context is not None
        model, state, test, moved = last.model, last.state, None, None
        if result.total is not None:
            model, state = next_model(
                context,
                result.total,
                n_silos=self._n_senders,
                summed=result.summed,
                n_sampled=result.n_sampled,
            )
        seconds, failure = step.seconds, None
        if result.total is not None:
            if context.measured:
                try:
                    test = evaluate(prepared, released_model(prepared.method, model, state))
                except BaseException as error:
                    # The round is charged and its model exists: keep both, and report the failure after that.
                    failure = error
            moved = movement(prepared, last, model, result.summed if shown is None else shown.summed)
        row = _row_of(prepared, number, test, self.journal.ledger, shown)
        if shown is None:
            row["summed"] = result.summed
        row |= {"clip": clip_at(prepared.method.at_round(number, last.state)), "movement": moved}
        row |= {"seconds": seconds, "elapsed": last.row["elapsed"] + seconds}
        checkpoint = Checkpoint(
            round=number, model=model, state=state, row=row, ledger=self.journal.ledger.head
        )
        self.journal.release(
            lambda: hashlib.sha256(model.cpu().numpy().astype("<f4").tobytes()).digest(),
            lambda: folder.write_checkpoint(checkpoint),
        )
        # A crash here loses the line of metrics only, which `mend_metrics` restores from the checkpoint.
        self.checkpoint = checkpoint
        folder.append("metrics.jsonl", row)
        if failure is not None:
            raise failure
        try:
            self._observer.on_round_end(row)
        except StopTraining as stop:
            # Written before the evaluation, so that a resumed run states the callback as uncovered as well.
            self.stopped, self.ended = str(stop), True
            folder.write_json(_STOPPED, {"round": number})
        self._open_round()


def _evaluated_already(folder: RunFolder) -> str | None:
    """Return the reason why a run may not train on; None if no release of its evaluation is made.

    Raises:
        RunFolderError: a damaged evaluation.
    """
    evaluated = read_evaluated(folder.path)
    if evaluated is not None:
        return f"the model after round {evaluated.round} was evaluated; another evaluation would need another budget"
    if read_evaluation(folder):
        return "the model was evaluated in part; an evaluation of another model would need another budget"
    return None


def _ended_at(folder: RunFolder) -> int | None:
    """Return the round after which a callback ended the run; None if no callback did."""
    path = folder / _STOPPED
    if not path.exists():
        return None
    with reading(path, RunFolderError):
        return int(read_json(path, RunFolderError)["round"])


def _last_checkpoint(prepared: Prepared, folder: RunFolder, ledger: Ledger) -> Checkpoint:
    """Return the last complete round of a folder; write and return round 0 if none is complete.

    Raises:
        RunFolderError: a damaged checkpoint, one of another folder, an optimiser state of another optimiser, or a
            ledger that ends before the ledger head in the checkpoint.
        IntegrityError: the folder has the metrics of a round for which the ledger has no charge.
    """
    checkpoint = folder.read_checkpoint()
    # The metrics of a round are written after its charge. Without a checkpoint they are the only evidence of rounds
    # that were released, and a ledger that lacks a charge for one would understate what was spent.
    charged = {entry.round for entry in ledger.entries if entry.run == prepared.experiment.name}
    if lost := sorted(folder.rounds_with_metrics() - charged):
        raise IntegrityError(
            f"{folder.path}: metrics.jsonl has round {lost[0]}, and ledger.jsonl has no charge for it; "
            "charges were lost or replaced, so what was spent is unknown"
        )
    if checkpoint is None:
        return _initial_checkpoint(prepared, folder, ledger)
    # A ledger that is shorter than the checkpoint's has lost charges: the statement would be too small.
    ledger.require_extends(checkpoint.ledger)
    folder.check_own_checkpoint(checkpoint)
    method = prepared.method
    if not matching(begin_state(method, checkpoint.model), checkpoint.state):
        raise RunFolderError(
            f"{folder.path}: the checkpoint has no state of server.optimizer ({type(method.server).__name__}) and "
            f"server.average ({type(method.average).__name__}) for this model; it was put there by another run"
        )
    return checkpoint


def _initial_checkpoint(prepared: Prepared, folder: RunFolder, ledger: Ledger) -> Checkpoint:
    """Write and return round 0, which holds the initial model."""
    model = prepared.task.initial()
    row = _row_of(prepared, 0, evaluate(prepared, model), ledger)
    row |= {"seconds": 0.0, "elapsed": 0.0}
    if sentences := remarks(prepared.task, prepared.population):
        row["remarks"] = sentences
    checkpoint = Checkpoint(
        round=0, model=model, state=begin_state(prepared.method, model), row=row, ledger=ledger.head
    )
    folder.write_checkpoint(checkpoint)
    return checkpoint


def _row_of(
    prepared: Prepared,
    number: int,
    test: dict[str, float | None] | None,
    ledger: Ledger,
    diagnostics: RoundDiagnostics | None = None,
) -> Row:
    """Return one line of metrics.

    Args:
        prepared: the experiment that runs.
        number: the round; 0 is the initial model.
        test: value of every metric on the test records; None if the round is not evaluated.
        ledger: the charges of the run.
        diagnostics: diagnostics of a simulation; None if no process sees all silos.
    """
    epsilon = None
    if prepared.secure:
        spent = read_spent_budget(ledger, prepared.experiment.name, prepared.side_releases)
        epsilon = prepared.epsilon_with(Role.READER, number, spent.side_releases, spent.charges - number)
    return {
        "schema_version": SCHEMA_VERSION,
        "round": number,
        "test": test,
        "epsilon": None if epsilon is None else finite(epsilon),
        "clip": clip_at(prepared.method),
        **(asdict(diagnostics) if diagnostics else {}),
    }


# --- movement of the model ----------------------------------------------------------------------------------
# Measure how far a run, its noise and its users can move the model, from public numbers.
#
# Let the server take plain steps x_s = x_{s-1} + eta (mean_s + noise_s) and change nothing else. Then after t rounds
#
#     model = ||x_t - x_0||,    noise = eta sqrt(d sum_s nu_s^2),    most = eta sum_s C_s n_s / divisor,
#
# where nu_s is the standard deviation of the noise on a coordinate of the mean. C_s n_s is the sum of the updates of
# all n_s participants if they agree and have length C_s. All three are public; :mod:`fedveil.run.advice` reads them.


def clip_at(method: Method) -> float | None:
    """Return the bound of an update, in the update's unit; None if updates are not bounded.

    It is a function of earlier releases, so it is public.
    """
    return method.bound.longest if method.bound.bounded else None


def movement(
    prepared: Prepared, last: Checkpoint, model: Float32[Tensor, " d"], summed: int | None = None
) -> Row | None:
    """Return the movement of the model up to the round that leads from a checkpoint to a model.

    Args:
        prepared: the experiment that runs.
        last: the checkpoint before the round.
        model: (d,) float32 global model after the round.
        summed: number of silos in the sum; None: all.

    Returns:
        The row's ``movement``; None if the server's steps are not plain, or the noise on the mean is not public.
    """
    number, people = last.round + 1, prepared.population
    method = prepared.method.at_round(number, last.state)
    std, rate = sum_noise_std(method, people.n_silos, summed), method.server.plain_rate
    plain = rate is not None and not method.denoiser.changes and method.denominator == "expected"
    before = last.row.get("movement")
    # Without the movement of the round before, the sums over rounds stay unknown for the rest of the run.
    if std is None or rate is None or not plain or (last.round > 0 and before is None):
        return None
    begun = before or {"noise": 0.0, "most": 0.0}
    # One unit of the sum moves the model by `step`: learning rate times clip unit over the divisor of the mean.
    step = rate * method.bound.unit / method.divisor(people.n_users, people.n_silos, summed)
    most = None
    if method.contribution.by_user and method.bound.bounded and begun["most"] is not None:
        longest = method.bound.longest / method.bound.unit
        # C_s n_s with the expected number of participants n_s = q |U|.
        most = begun["most"] + step * longest * method.sampler.rate * people.n_users
    parameters = len(model)
    return {
        "parameters": parameters,
        # In place: a model of many parameters would be held once more.
        "model": float(model.to("cpu", torch.float64, copy=True).sub_(prepared.task.initial().cpu()).norm()),
        # noise^2 adds up over rounds: each adds (step std)^2 on each of d coordinates.
        "noise": math.hypot(begun["noise"], step * std * math.sqrt(parameters)),
        "most": most,
    }
