"""One run: rounds until the last or until the budget is spent, with everything on disk that a resumed run needs.

Per round, in this order: the budget is checked; the ledger is charged, durably; the round is played; the new model is
evaluated; the checkpoint is renamed into place (the release); the line of metrics is appended. A kill between any
two of them loses nothing: :func:`resume` goes on from the checkpoint, under the charge that is already in the ledger.
"""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.engine.aggregation import SecureSum
from fedveil.engine.experiment import SCHEMA_VERSION, Experiment
from fedveil.engine.folder import Checkpoint, Row, RunFolder, finite
from fedveil.engine.round import RoundDiagnostics, play_round
from fedveil.engine.setup import Prepared, prepare, privacy_randomness
from fedveil.engine.statement import state
from fedveil.engine.workers import spread
from fedveil.errors import RunFolderError
from fedveil.privacy.ledger import Head, Ledger
from fedveil.privacy.statement import Statement
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.server.spectrum import spectrum

_TRANSCRIPT: Final = "transcript.jsonl"


class Observer(Protocol):
    """Who is told how a run goes on; sees public numbers only."""

    def started(self, folder: Path, experiment: Experiment, done: int) -> None:
        """A run begins, or goes on after ``done`` complete rounds."""

    def training(self, round_number: int, done: int, total: int) -> None:
        """Local training of a round has taken ``done`` of ``total`` steps."""

    def completed(self, row: Row) -> None:
        """A round is complete; its line of metrics."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        folder: the run folder.
        rounds: complete rounds.
        stopped: why the run ended before its last round; None if it did not.
        row: the last line of metrics.
        statement: what privacy the run gave.
        seconds: wall-clock seconds of all rounds together.
    """

    folder: Path
    rounds: int
    stopped: str | None
    row: Row
    statement: Statement
    seconds: float


def run(prepared: Prepared, parent: Path, observer: Observer, *, transcript: bool = False) -> Outcome:
    """Run a prepared experiment in a new folder under ``parent``.

    Args:
        prepared: what to run.
        parent: where the run folder is made.
        observer: who is told how it goes on.
        transcript: whether to list every message of a protocol in ``transcript.jsonl``, also after a resume.
    """
    folder = RunFolder.create(parent, prepared.experiment)
    folder.write_json("environment.json", _environment(prepared))
    folder.write_json("diagnostics.json", _population_diagnostics(prepared))
    if transcript and prepared.masked_range is not None:
        folder.write(_TRANSCRIPT, b"")
    with spread(prepared) as shared:
        return _go_on(shared, folder, observer)


def resume(path: Path, observer: Observer) -> Outcome:
    """Go on with an interrupted run; a complete one is evaluated and reported again, nothing else."""
    folder, experiment = RunFolder.open(path)
    prepared = prepare(experiment)
    folder.write_json("environment.json", _environment(prepared))
    folder.write_json("diagnostics.json", _population_diagnostics(prepared))
    with spread(prepared) as shared:
        return _go_on(shared, folder, observer)


def _go_on(prepared: Prepared, folder: RunFolder, observer: Observer) -> Outcome:
    experiment = prepared.experiment
    privacy = privacy_randomness(experiment)
    guarantee = prepared.guarantee
    secure_sum = None if prepared.masked_range is None else SecureSum(prepared.masked_range)
    with Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency) as ledger:
        checkpoint = folder.read_checkpoint() or _initial(prepared, folder, ledger.head)
        ledger.require_extends(checkpoint.ledger)
        if any(entry.event != prepared.guarantee.event for entry in ledger.entries):
            raise RunFolderError(
                f"{folder.path}: the ledger was charged for other events than this experiment's"
            )
        folder.mend_metrics(checkpoint)
        listed = secure_sum if (folder / _TRANSCRIPT).exists() else None
        if listed is not None:
            folder.drop_torn_line(_TRANSCRIPT)
        observer.started(folder.path, experiment, checkpoint.round)
        stopped = None
        while checkpoint.round < experiment.rounds:
            number = checkpoint.round + 1
            stopped = _over_budget(prepared, number)
            if stopped:
                break
            if len(ledger.entries) < number:
                ledger.charge(run=experiment.name, round=number, attempt=0, event=prepared.guarantee.event)
            checkpoint = _round(prepared, checkpoint, number, privacy, secure_sum, observer, ledger.head)
            if listed is not None:
                folder.append(_TRANSCRIPT, *(line.to_json() for line in listed.messages()))
            folder.write_checkpoint(checkpoint)
            folder.append("metrics.jsonl", checkpoint.row)
            observer.completed(checkpoint.row)
        charges, spent = len(ledger.entries), ledger.spent()
    folder.write_model(prepared.task.state(checkpoint.model))
    moved = checkpoint.model.cpu() - prepared.task.initial().cpu()
    folder.write_json("spectrum.json", asdict(spectrum(moved)))
    statement = state(prepared, checkpoint.round, charges, spent)
    folder.write_json("privacy.json", statement.to_json())
    return Outcome(
        folder=folder.path,
        rounds=checkpoint.round,
        stopped=stopped,
        row=checkpoint.row,
        statement=statement,
        seconds=checkpoint.row["elapsed"],
    )


def _round(
    prepared: Prepared,
    last: Checkpoint,
    number: int,
    privacy: PrivacyRandomness,
    secure_sum: SecureSum | None,
    observer: Observer,
    charged: Head,
) -> Checkpoint:
    begin = time.perf_counter()
    model, diagnostics = play_round(
        prepared.seat,
        last.model,
        number,
        ExperimentRandomness(prepared.experiment.seed),
        privacy,
        lambda done, total: observer.training(number, done, total),
        secure_sum,
    )
    seconds = time.perf_counter() - begin
    due = number % prepared.experiment.evaluate_every == 0 or number == prepared.experiment.rounds
    row = _row(prepared, number, evaluate(prepared, model) if due else None, diagnostics)
    row |= {"seconds": seconds, "elapsed": last.row["elapsed"] + seconds}
    if secure_sum is not None:
        row["bytes_up"] = secure_sum.bytes_up(number)
    return Checkpoint(round=number, model=model, row=row, ledger=charged)


def _initial(prepared: Prepared, folder: RunFolder, charged: Head) -> Checkpoint:
    model = prepared.task.initial()
    row = _row(prepared, 0, evaluate(prepared, model), None) | {"seconds": 0.0, "elapsed": 0.0}
    checkpoint = Checkpoint(round=0, model=model, row=row, ledger=charged)
    folder.write_checkpoint(checkpoint)
    return checkpoint


def _row(
    prepared: Prepared,
    number: int,
    test: dict[str, float | None] | None,
    diagnostics: RoundDiagnostics | None,
) -> Row:
    shown = asdict(diagnostics) if diagnostics else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "round": number,
        "test": test,
        "epsilon": finite(prepared.epsilon_after(number)) if prepared.secure else None,
        "clip": getattr(prepared.method.bound, "norm", None),
        **shown,
    }


def evaluate(prepared: Prepared, model: Float32[Tensor, " d"]) -> dict[str, float | None]:
    """Return every metric of the task on the test table; None where a metric is not defined."""
    population = prepared.population
    raw = torch.from_numpy(population.scale.apply(np.asarray(population.test_features)))
    outputs = prepared.task.predict(model.to(prepared.seat.cohort.device), raw).cpu()
    targets = torch.from_numpy(population.test_targets)
    weights = None if population.test_weights is None else torch.from_numpy(population.test_weights)
    return {name: finite(metric(outputs, targets, weights)) for name, metric in prepared.task.metrics.items()}


def _over_budget(prepared: Prepared, number: int) -> str | None:
    budget = prepared.experiment.privacy.budget
    if budget is None:
        return None
    needed = prepared.epsilon_after(number)
    if needed <= budget:
        return None
    return (
        f"round {number} would bring epsilon to {needed:.4g}, above the budget of {budget:g}; "
        f"the model after round {number - 1} is kept"
    )


def _environment(prepared: Prepared) -> Row:
    packages = ("fedveil", "torch", "numpy", "scipy", "dp-accounting")
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(prepared.seat.cohort.device),
        "trainer": type(prepared.seat.trainer).__name__,
        "parameters": prepared.task.dimension,
        "packages": {name: version(name) for name in packages},
    }


def _population_diagnostics(prepared: Prepared) -> Row:
    per_user = prepared.population.records_per_user()
    return {
        "records_per_user": {
            "quantiles": np.quantile(per_user, np.linspace(0, 1, 11)).tolist(),
            "users_with_records": int((per_user > 0).sum()),
            "users": prepared.population.n_users,
        },
        "records_per_silo": prepared.population.records_per_silo().tolist(),
        "silo_names": list(prepared.population.silo_names),
    }
