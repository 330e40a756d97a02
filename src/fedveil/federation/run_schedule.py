"""The parts of a run that its folder lacks, in their order, as their coordinator plays them.

    releases:    1 ─► 2 ─► ...
    experiment:  prep/1 ─► prep/2 ─► rounds of training ─► eval/1 ─► eval/2

Every part writes what it ended with into the run folder, and the next is found there: a run that was cut off anywhere
goes on from its folder alone. The end of a run is signed by the silos in a session of its last part: where a signature
is missing, that part has another session (``again``), in which no round is played.
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
        stopped: why it ended early; None if it did not.
    """

    folder: Path
    stopped: str | None


def next_document_release(
    prepared: PreparedReleases, folder: RunFolder, *, again: bool = False
) -> DueRelease[PartEnding] | None:
    """Return the next release of a document; if all are made None, or the last one ``again``.

    Raises:
        RunFolderError: a damaged folder.
    """
    made = prepared.read(folder)
    whole = len(made) == prepared.count
    if whole and not again:
        return None
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
    """Return the releases of a run's preprocessing that are made.

    Raises:
        RunFolderError: a damaged one.
    """
    settle_schema(folder)
    found = read_preprocessed(folder.path)
    return () if found is None else found.made


def phase_of_training(prepared: Prepared, folder: RunFolder) -> RunPart | None:
    """Return what silos are told of the rounds of training; None where there is nothing but them."""
    return phase_of("", preprocessing_releases(folder)) if prepared.side_releases else None


def next_preprocessing_release(prepared: Prepared, folder: RunFolder) -> DueRelease[PartEnding] | None:
    """Return the next release of the preprocessing that is asked for; None where all are made.

    Raises:
        RunFolderError: a damaged folder.
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
    """Return why the budget does not allow to charge a release beside the rounds; None if it does.

    A coordinator charges each of them once: silos repeat a release that is asked for again, or it is not asked for.
    """
    round_repeatable = prepared.protocol_spec.repeatable if trains else None
    needed = release_over_budget(prepared, folder, ledger, repeatable=True, round_repeatable=round_repeatable)
    if needed is None:
        return None
    budget = prepared.experiment.privacy.budget
    follows = ", what is due after it and one more round" if trains else " and what is due after it"
    return f"{name}{follows} would bring epsilon to {show_epsilon(needed)}, above the budget of {budget:g}"


def evaluating(folder: RunFolder) -> NoisySums:
    """Return the releases of an evaluation that is not whole yet.

    Raises:
        RunFolderError: a damaged file.
    """
    path = folder / EVALUATING
    if not path.exists():
        return ()
    content = read_json(path, RunFolderError)
    with reading(path, RunFolderError):
        return tuple(NoisySum.from_json(one, len(one["vector"]), path) for one in content["releases"])


def has_trained(prepared: Prepared, folder: RunFolder) -> bool:
    """Whether the rounds of a run have ended that is evaluated after them: at the last, or where the budget ends.

    A run that is not evaluated is concluded again whenever it is opened.

    Raises:
        RunFolderError: a damaged folder.
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
    due = charges == checkpoint.round or not prepared.protocol_spec.repeatable
    return over_budget(prepared, number, charges + due, beside) is not None


def next_evaluation_release(
    prepared: Prepared, folder: RunFolder, *, again: bool = False
) -> DueRelease[Outcome] | None:
    """Return the next release of the evaluation that is asked for; if all are made None, or the last one ``again``.

    The rounds have ended.

    Raises:
        RunFolderError: a damaged folder.
    """
    evaluation, experiment = prepared.evaluation, prepared.experiment
    whole = (folder / FILE).exists()
    if evaluation is None or (whole and not again):
        return None
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
    """Put releases of an evaluation on the disk; all of them are the evaluation."""
    if len(made) == len(evaluation.releases):
        folder.write_json(
            FILE, evaluation.combine_releases(prepared.experiment.name, round_number, made).to_json()
        )
    else:
        folder.write_json(EVALUATING, {"releases": [one.to_json() for one in made]})
