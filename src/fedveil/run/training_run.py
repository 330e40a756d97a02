"""Run an experiment with all parties in this process, or resume it from its folder.

    releases before training ─► rounds ─► releases of the last model ─► statement, model

:mod:`fedveil.run.steps.experiment` has these parts in order, and :func:`~fedveil.run.loop.play_part` plays each step
of a part: check the budget, charge durably, play, release durably. A crash between any two stages loses no complete
round: :func:`resume` continues from the run folder.

Between institutions the silos share a file that names each user's main silo (:mod:`fedveil.data.main_silos`), and the
statement names the file's digest. With ``method.power = "linked"`` a run of this module writes such a file into its
folder, with a salt of its own. The file names every user's main silo, so it is as private as the records.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedveil.errors import BudgetError, ConfigError, RunFolderError
from fedveil.files import read_content
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.task_choice import check_code
from fedveil.run.environment import environment
from fedveil.run.folder.diagnostics import RECORDS, population_diagnostics, require_same_records
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import Observer, play_part
from fedveil.run.process_group import agree, follow, lead, rank, share_training, share_with_ranks
from fedveil.run.setup import Prepared, prepare
from fedveil.run.simulation import TRANSCRIPT, ReleaseParties, TrainingParties
from fedveil.run.steps.experiment import ExperimentParts, Outcome

# --- file of main silos ---

FILE = "main_silos.csv"


def write_main_silos(prepared: Prepared, folder: RunFolder) -> Prepared:
    """Return the run with the digest of its file of main silos; write the file if the folder has none yet.

    A run without ``power = "linked"`` is returned as it is; so is one whose population brings the file that it names.

    Raises:
        ConfigError: the run names a file by its digest, which a simulation does not read.
        RunFolderError: the run has begun and its file is lost or changed.
    """
    weights = prepared.method.weights
    if weights.law != "declared" or not prepared.population.complete:
        return prepared
    declared = prepared.population.main_silos
    if declared is not None and declared.digest == weights.digest:
        return prepared
    if not weights.linked:
        raise ConfigError(
            "method.power: a file of main silos is shared between institutions, and a simulation reads none; "
            "power = 'linked' writes one into the run folder"
        )
    lines = _lines(prepared)
    if not (folder / FILE).exists():
        if (folder / "metrics.jsonl").exists():
            raise RunFolderError(f"{folder / FILE} is missing, and the run's statement names it; put it back")
        folder.write(FILE, f"{secrets.token_hex(32)}\n{lines}".encode())
    content = read_content(folder / FILE, RunFolderError)
    if content.decode(errors="replace").partition("\n")[2] != lines:
        raise RunFolderError(f"{folder / FILE} is not of these records; put back the file of the run")
    declared_weights = weights.with_file(hashlib.sha256(content).hexdigest())
    method = replace(prepared.method, weights=declared_weights)
    before, after = weights.uncovered_facts(prepared.method), declared_weights.uncovered_facts(method)
    named = dict(zip(before, after, strict=True))
    guarantee = prepared.guarantee
    return replace(
        prepared,
        setting=replace(prepared.setting, method=method),
        guarantee=replace(
            guarantee, uncovered=tuple(named.get(sentence, sentence) for sentence in guarantee.uncovered)
        ),
        uncovered=tuple(named.get(sentence, sentence) for sentence in prepared.uncovered),
    )


def _lines(prepared: Prepared) -> str:
    """Return a line for every user: the number, a comma, and the name of the main silo.

    Users without records get the first silo: the line of a user depends on the user's own records alone.
    """
    population, groups = prepared.population, prepared.setting.cohort.groups
    main = np.zeros(population.n_users, dtype=np.int64)
    chosen = prepared.setting.weights.numpy() == 1
    main[groups.user[chosen]] = groups.silo[chosen]
    return "".join(f"{user},{population.silo_names[silo]}\n" for user, silo in enumerate(main.tolist()))


# --- runs ---


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
