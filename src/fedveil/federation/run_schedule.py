"""Order of a run's parts, and the next part that the coordinator's run folder lacks.

    releases:    1 ─► 2 ─► ...
    experiment:  prep/1 ─► prep/2 ─► rounds of training ─► eval/1 ─► eval/2

Every part writes its result into the run folder, and the next part is derived from the folder. A run that was
interrupted at any point therefore resumes from its folder alone. The silos sign the end of a run in a session of the
last part. If a signature is missing, that part has another session (``again``), in which no round is played.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.errors import RunFolderError
from fedveil.federation.audit.released_sums import EVALUATING
from fedveil.federation.release_rounds import DueRelease, no_model, phase_of
from fedveil.files import read_json, reading
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import show_epsilon
from fedveil.protocols.session_messages import RunPart
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.evaluation import Evaluation
from fedveil.run.releases.prepared_releases import PreparedReleases, conclude
from fedveil.run.releases.preprocessing import read_preprocessed, settle_schema, write_preprocessed
from fedveil.run.releases.side_releases import BESIDE, read_spent_budget
from fedveil.run.round_charges import over_budget
from fedveil.run.run_budget import release_over_budget, reserved_releases
from fedveil.run.setup import Prepared
from fedveil.run.training_run import Outcome, last_checkpoint
from fedveil.run.training_run import conclude as conclude_run
from fedveil.statistics.evaluation.result import FILE
from fedveil.statistics.stored import NoisySum, NoisySums


@dataclass(frozen=True, kw_only=True)
class PartEnding:
    """How a part of a run ended.

    Attributes:
        folder: the run folder.
        stopped: reason of an early end; None if the part is complete.
    """

    folder: Path
    stopped: str | None


def next_document_release(
    prepared: PreparedReleases, folder: RunFolder, *, again: bool = False
) -> DueRelease[PartEnding] | None:
    """Return the next release of a document; if all are made, None, or the last one for ``again``.

    Raises:
        RunFolderError: the folder is damaged.
    """
    made = prepared.read(folder)
    whole = len(made) == prepared.count
    if whole and not again:
        return None
    # For `again`, the last release is planned as it was: from the releases before it.
    made = made[: prepared.count - 1]
    release = prepared.release(made)

    def end(reason: str | None, ledger: Ledger) -> PartEnding:
        if ledger.entries:
            conclude(prepared, folder, ledger, again=whole)
        return PartEnding(folder=folder.path, stopped=reason)

    return DueRelease(
        release=release,
        phase=phase_of(prepared.part(len(made)), made),
        run=prepared.document.name,
        round=release.number,
        event=release.guarantee.event,
        privacy=prepared.series.privacy.randomness(),
        keep=lambda one: prepared.write(folder, (*made, one)),
        conclude=end,
        made=whole,
        charges=(lambda _: 0) if len(made) == prepared.count - 1 else None,
    )


def preprocessing_releases(folder: RunFolder) -> NoisySums:
    """Return the finished releases of a run's preprocessing.

    Raises:
        RunFolderError: a release is damaged.
    """
    settle_schema(folder)
    found = read_preprocessed(folder.path)
    return () if found is None else found.made


def phase_of_training(prepared: Prepared, folder: RunFolder) -> RunPart | None:
    """Return the `RunPart` of the training rounds; None if the run has no releases."""
    return phase_of("", preprocessing_releases(folder)) if prepared.side_releases else None


def next_preprocessing_release(prepared: Prepared, folder: RunFolder) -> DueRelease[PartEnding] | None:
    """Return the next release of the requested preprocessing; None if all are made.

    Raises:
        RunFolderError: the folder is damaged.
    """
    planned, experiment = prepared.preprocessing, prepared.experiment
    made = preprocessing_releases(folder)
    if planned is None or len(made) == len(planned.releases):
        return None
    release = planned.release(made)
    return DueRelease(
        release=release,
        phase=phase_of(release.name, made),
        run=release.of_run(experiment.name),
        round=BESIDE,
        event=release.guarantee.event,
        privacy=experiment.privacy.randomness(),
        keep=lambda one: write_preprocessed(folder, planned.combine_releases(experiment, (*made, one))),
        conclude=lambda reason, _: PartEnding(folder=folder.path, stopped=reason),
        model=prepared.task.initial().cpu().numpy() if release.of_model else no_model(),
        refusal=lambda ledger: _refusal(prepared, folder, ledger, release.name, trains=True),
    )


def _refusal(prepared: Prepared, folder: RunFolder, ledger: Ledger, name: str, *, trains: bool) -> str | None:
    """Return why the budget forbids to charge a release in addition to the rounds; None if it allows it.

    The coordinator charges each side release once: either the silos repeat a release, or the coordinator does not
    request it again.
    """
    # A run whose releases spend the whole budget could never train: one more round must still fit.
    round_repeatable = prepared.protocol_spec.repeatable if trains else None
    needed = release_over_budget(prepared, folder, ledger, repeatable=True, round_repeatable=round_repeatable)
    if needed is None:
        return None
    budget = prepared.experiment.privacy.budget
    follows = ", what is due after it and one more round" if trains else " and what is due after it"
    return f"{name}{follows} would bring epsilon to {show_epsilon(needed)}, above the budget of {budget:g}"


def evaluating(folder: RunFolder) -> NoisySums:
    """Return the releases of an unfinished evaluation.

    Raises:
        RunFolderError: the file is damaged.
    """
    # The file of a complete evaluation has another name: this one never contains the last release.
    path = folder / EVALUATING
    if not path.exists():
        return ()
    content = read_json(path, RunFolderError)
    with reading(path, RunFolderError):
        return tuple(NoisySum.from_json(one, len(one["vector"]), path) for one in content["releases"])


def has_trained(prepared: Prepared, folder: RunFolder) -> bool:
    """Return whether the training rounds of a run with an evaluation have ended.

    They end at the last round, or where the budget does. A run without an evaluation gives False: it is concluded
    again whenever its folder is opened.

    Raises:
        RunFolderError: the folder is damaged.
    """
    if prepared.evaluation is None:
        return False
    checkpoint = folder.read_checkpoint()
    if checkpoint is None:
        return False
    number, guarantee = checkpoint.round + 1, prepared.guarantee
    if number > prepared.experiment.rounds:
        return True
    with Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency) as ledger:
        charges = read_spent_budget(ledger, prepared.experiment.name, ()).charges
        beside = reserved_releases(prepared, folder, ledger, repeatable=True)
    # The next round costs a charge, unless a repeatable round was charged already and not released.
    due = charges == checkpoint.round or not prepared.protocol_spec.repeatable
    return over_budget(prepared, number, charges + due, beside) is not None


def next_evaluation_release(
    prepared: Prepared, folder: RunFolder, *, again: bool = False
) -> DueRelease[Outcome] | None:
    """Return the next release of the evaluation; if all are made, None, or the last one for ``again``.

    Precondition: the training rounds have ended.

    Raises:
        RunFolderError: the folder is damaged.
    """
    evaluation, experiment = prepared.evaluation, prepared.experiment
    whole = (folder / FILE).exists()
    if evaluation is None or (whole and not again):
        return None
    # The intermediate file holds all releases but the last, even after the evaluation is complete: `again` gives the
    # last.
    before, made = preprocessing_releases(folder), evaluating(folder)
    release = evaluation.release(made)
    guarantee = prepared.guarantee
    with Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency) as ledger:
        checkpoint = last_checkpoint(prepared, folder, ledger)
    model = prepared.method.model_of(checkpoint.model, checkpoint.state)
    return DueRelease(
        release=release,
        phase=phase_of(release.name, (*before, *made)),
        run=release.of_run(experiment.name),
        round=BESIDE,
        event=release.guarantee.event,
        privacy=experiment.privacy.randomness(),
        keep=lambda one: _keep(evaluation, prepared, folder, checkpoint.round, (*made, one)),
        conclude=lambda reason, ledger: replace(
            conclude_run(prepared, folder, checkpoint, ledger, reason), stopped=reason
        ),
        model=model.cpu().numpy(),
        made=whole,
        refusal=lambda ledger: _refusal(prepared, folder, ledger, release.name, trains=False),
        trained=checkpoint.round,
        charges=(lambda ledger: read_spent_budget(ledger, experiment.name, ()).charges)
        if len(made) == len(evaluation.releases) - 1
        else None,
    )


def _keep(
    evaluation: Evaluation, prepared: Prepared, folder: RunFolder, round_number: int, made: NoisySums
) -> None:
    """Persist the releases of an evaluation: as the evaluation if complete, else as intermediate file."""
    if len(made) == len(evaluation.releases):
        folder.write_json(
            FILE, evaluation.combine_releases(prepared.experiment.name, round_number, made).to_json()
        )
    else:
        folder.write_json(EVALUATING, {"releases": [one.to_json() for one in made]})
