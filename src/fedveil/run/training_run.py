"""Run an experiment with all parties in this process, or resume it from its folder.

    releases before training ─► rounds ─► releases of the last model ─► statement, model

:mod:`fedveil.run.steps.experiment` has these parts in order, and :func:`~fedveil.run.loop.play_part` plays each step
of a part: check the budget, charge durably, play, release durably. A crash between any two stages loses no complete
round: :func:`resume` continues from the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from fedveil.errors import BudgetError
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.named_code import check_code
from fedveil.run.environment import environment
from fedveil.run.folder.diagnostics import RECORDS, population_diagnostics, require_same_records
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import play_part
from fedveil.run.main_silos_file import write_main_silos
from fedveil.run.observer import Observer
from fedveil.run.ranks import agree, follow, lead, rank, share_with_ranks
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import TRANSCRIPT, ReleaseParties, TrainingParties
from fedveil.run.steps.experiment import ExperimentParts, Outcome
from fedveil.run.workers import share_training


def run(
    prepared: Prepared,
    parent: Path,
    observer: Observer,
    *,
    transcript: bool = False,
    prepare_again: Callable[[Experiment], Prepared] = prepare,
) -> Outcome:
    """Run a prepared experiment in a new folder under ``parent``.

    Args:
        prepared: the experiment with its population, method and guarantee.
        parent: the folder in which the run folder is created.
        observer: receives the start of the run, training progress and each line of metrics.
        transcript: whether ``transcript.jsonl`` lists every protocol message, also after a resume.
        prepare_again: as of :func:`continue_run`.
    """
    agree(prepared)  # before the folder exists
    if rank() > 0:
        return follow(prepared, prepare_again)
    folder = RunFolder.create(parent, prepared.experiment)
    if transcript and prepared.method.protection.agrees:
        folder.write(TRANSCRIPT, b"")
    return _play(folder, prepared, observer, prepare_again)


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


def continue_run(
    folder: RunFolder,
    prepared: Prepared,
    observer: Observer,
    prepare_again: Callable[[Experiment], Prepared] = prepare,
) -> Outcome:
    """Play what a folder lacks of the run of a prepared experiment.

    Args:
        folder: the run folder.
        prepared: the experiment.
        observer: receives the progress of the run.
        prepare_again: prepares the experiment again, after a release refined its schema or clip.

    Raises:
        BudgetError: the budget does not allow a release before training.
        RunFolderError: the training records differ from those of the folder's run.
    """
    agree(prepared)
    if rank() > 0:
        return follow(prepared, prepare_again)
    return _play(folder, prepared, observer, prepare_again)


def _play(
    folder: RunFolder,
    prepared: Prepared,
    observer: Observer,
    prepare_again: Callable[[Experiment], Prepared],
) -> Outcome:
    """Play what a folder lacks of a run, and tell other ranks how it ends."""
    with (
        lead(folder) as tell_outcome,
        ExperimentParts(prepared, folder, observer, prepare=prepare_again) as parts,
    ):
        return tell_outcome(_play_parts(parts, folder))


def _play_parts(parts: ExperimentParts, folder: RunFolder) -> Outcome:
    for release in parts.preprocessing():
        if (refused := play_part(release, ReleaseParties(release))) is not None:
            raise BudgetError(refused)
    folder.write_json("environment.json", environment(parts.prepared))
    if (folder / RECORDS).exists():
        require_same_records(folder, parts.prepared)
    else:  # a new run, or one that was killed before this file
        folder.write_json(RECORDS, population_diagnostics(parts.prepared))
    parts.prepared = write_main_silos(parts.prepared, folder)
    with (
        share_with_ranks(parts.prepared, folder) as parts.prepared,
        share_training(parts.prepared) as parts.prepared,
    ):
        training = parts.training()
        was_complete = parts.is_whole
        reasons = [play_part(training, TrainingParties(training))]
        reasons += [play_part(release, ReleaseParties(release)) for release in parts.evaluation()]
        outcome = parts.finish("; ".join(filter(None, reasons)) or None)
        return replace(outcome, was_complete=was_complete)
