"""The parts of an experiment's run, in their order, and its end.

    prep/1 ─► prep/2 ─► rounds of training ─► eval/1 ─► eval/2 ─► statement, model, spectrum

Every part writes its result into the run folder, and the next part is derived from the folder. A run that was
interrupted at any point therefore continues from its folder alone.

The parties are all in this process, or each in its own. What differs between the two is decided here, by the witness:

===================  ==========================================  ==========================================
                     one process                                 between institutions
===================  ==========================================  ==========================================
step is repeatable   if noise is from a seed                     if silos repeat their answers
charged again        if it is not repeatable                     a round; a release is not requested again
senders of a sum     silos, or 1 if clients share a sum          all silos
last model           written                                     written unless only the silos have it
partial evaluation   removed when the evaluation is complete     kept: silos may sign the end later
===================  ==========================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from fedveil.data.records import empty_groups
from fedveil.errors import RunFolderError
from fedveil.methods.guarantee import Guarantee
from fedveil.methods.method import released_model
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import Entry
from fedveil.privacy.statement import Statement, show_epsilon
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.diagnostics import RECORDS
from fedveil.run.folder.run_folder import PREPROCESSED, STATEMENT, Row, RunFolder
from fedveil.run.folder.statement import state
from fedveil.run.journal import Step, StepKey, Witness
from fedveil.run.loop import Observer, Part, RunParts
from fedveil.run.releases.evaluation import read_evaluation
from fedveil.run.releases.preprocessing import (
    check_declared,
    read_preprocessed,
    settle_schema,
    write_preprocessed,
)
from fedveil.run.releases.records import FILE as PUBLIC_TEST
from fedveil.run.releases.records import describe_public_test, score_held_out, training_records
from fedveil.run.releases.release import Release, ReleasePart, no_model, refuse_repeat
from fedveil.run.releases.side_releases import BESIDE, read_spent_budget
from fedveil.run.setup import Prepared
from fedveil.run.steps.training import TrainingPart
from fedveil.statistics.evaluation.result import EVALUATING, FILE, ReleasedEvaluation, read_evaluated
from fedveil.statistics.result import NoisySum, NoisySums
from fedveil.training.server.denoise import spectrum

_ENDED: Final = (
    "when the run ended: a callback stopped it before its last round, and what the callback looked at is not covered "
    "unless it was public"
)
_REMEDY: Final = (
    "go on with the experiment.toml that it was begun with, or begin another run in a folder of its own"
)


@dataclass(frozen=True, kw_only=True)
class PartEnding:
    """Outcome of a part that other parts follow.

    Attributes:
        folder: the run folder.
        stopped: reason of an early end; None if the part is complete.
    """

    folder: Path
    stopped: str | None


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
        was_complete: whether the folder held the whole run already, so that nothing was played or charged.
    """

    folder: Path
    rounds: int
    stopped: str | None
    row: Row
    statement: Statement
    seconds: float
    evaluated: ReleasedEvaluation | None = None
    was_complete: bool = False


class ExperimentParts(RunParts[Outcome | PartEnding]):
    """The parts of an experiment's run.

    Attributes:
        prepared: the experiment, on the schema and clip that the releases so far give.

    Args:
        prepared: the experiment.
        folder: the run folder, new or of an interrupted run.
        observer: receives the progress of the run.
        prepare: prepares the experiment again, after a release refined its schema or clip.
        witness: record of the steps that the parties sign; None if all parties are in this process.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        observer: Observer,
        *,
        prepare: Callable[[Experiment], Prepared],
        witness: Witness | None = None,
    ) -> None:
        super().__init__(folder, witness)
        self.prepared, self._observer, self._prepare = prepared, observer, prepare
        self._training: TrainingPart | None = None

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of one round."""
        return self.prepared.guarantee

    @property
    def document(self) -> Experiment:
        """The experiment."""
        return self.prepared.experiment

    # --- parts -----------------------------------------------------------------------------------------------

    def parts(self, *, again: bool = False) -> Iterator[Part]:
        """Yield each part that the folder lacks, when the one before is released.

        A run without evaluation is concluded again whenever its folder is opened, so its training is always yielded.

        Args:
            again: whether to yield the last release of the evaluation even if it is made, so that the silos can sign
                the end.

        Raises:
            FedveilError: a damaged folder, or a ledger of another experiment.
        """
        yield from self.preprocessing()
        training = self.training()
        if self.prepared.evaluation is None or not (training.is_over or training.stopped):
            yield training
        if training.is_over or training.stopped:
            yield from self.evaluation(again=again)

    def preprocessing(self) -> Iterator[ReleasePart]:
        """Yield the releases before training that the folder lacks; prepare the run again after each.

        Raises:
            ConfigError: another run refined the declared schema.
            RunFolderError: a damaged folder, or a ledger of another experiment.
        """
        if self.prepared.preprocessing is None:
            return
        check_declared(self.prepared.experiment, self.folder)  # before the ledger exists
        if settle_schema(self.folder):
            self._prepare_again()
        while len(self._preprocessed()) < len(self.prepared.releases_before_training):
            part = self._preprocessing_part(self.prepared, self._preprocessed())
            yield part
            if part.step is not None:  # refused
                return
            self._prepare_again()

    def _preprocessing_part(self, prepared: Prepared, sums: NoisySums) -> ReleasePart:
        """Return the release of the preprocessing that follows ``sums``."""
        planned, experiment, journal = prepared.preprocessing, prepared.experiment, self.journal
        assert planned is not None
        # The events of rounds follow from the schema that these releases give: `training` checks them.
        journal.check_charged(
            lambda entry: entry.event if entry.run == experiment.name else self._event_of(entry), _REMEDY
        )
        self._require_charges()
        journal.mend(len(sums))
        release = planned.release(sums)

        def refusal() -> str | None:
            number = self._complete_rounds() + 1
            # A run whose releases spend the whole budget could never train: one more round must still fit.
            if number <= experiment.rounds:
                needed = self._excess(number, int(self._round_step(number).is_due))
            else:
                needed = self._excess(number - 1, 0)
            if needed is not None:
                return self._above(f"{release.name}, what is due after it and one more round", needed)
            self._check_untrained()
            return None

        return ReleasePart(
            name=release.name,
            journal=journal,
            planned=release,
            step=self._release_step(release, refusal),
            before=sums,
            keep=lambda noisy_sum: write_preprocessed(
                self.folder, planned.combine_releases(experiment, (*sums, noisy_sum))
            ),
            records=lambda: training_records(prepared, len(sums)),
            privacy=experiment.privacy.randomness(),
            model=prepared.task.initial().cpu().numpy() if release.of_model else no_model(),
        )

    def training(self) -> TrainingPart:
        """Return the rounds of training, whether or not some are left.

        Raises:
            RunFolderError: a damaged folder, or a ledger of another experiment.
        """
        self._require_charges()  # before the first checkpoint is written
        prepared, before = self.prepared, self._preprocessed()
        senders = prepared.setting.cohort if self.witness is None else prepared.population
        self._training = training = TrainingPart(
            prepared,
            self.journal,
            self._observer,
            round_step=self._round_step,
            n_senders=senders.n_silos,
            before=before,
        )
        self.journal.check_charged(self._event_of, _REMEDY)
        self.journal.mend(training.checkpoint.round + len(before) + len(self._evaluated()))
        return training

    def evaluation(self, *, again: bool = False) -> Iterator[ReleasePart]:
        """Yield the releases of the last model that the folder lacks; training has ended.

        Args:
            again: whether to yield the last release even if it is made.
        """
        prepared, training, planned = self.prepared, self._training, self.prepared.evaluation
        if planned is None:
            return
        assert training is not None, "the last model is evaluated"
        checkpoint, experiment, before = training.checkpoint, prepared.experiment, training.before
        model = released_model(prepared.method, checkpoint.model, checkpoint.state)
        held_out = cache(lambda: score_held_out(prepared, model))  # scored once for all releases
        while again or len(self._evaluated()) < len(planned.releases):
            released = self._evaluated()
            whole = len(released) == len(planned.releases)
            released = released[
                : len(planned.releases) - 1
            ]  # if whole, the last release is planned as it was
            release = planned.release(released)

            def refusal(subject: str = f"{release.name} and what is due after it") -> str | None:
                needed = self._excess(checkpoint.round, 0)
                return None if needed is None else self._above(subject, needed)

            def keep(noisy_sum: NoisySum, earlier: NoisySums = released) -> None:
                sums = (*earlier, noisy_sum)
                if len(sums) == len(planned.releases):
                    combined = planned.combine_releases(experiment.name, checkpoint.round, sums)
                    self.folder.write_json(FILE, combined.to_json())
                else:
                    self.folder.write_json(EVALUATING, {"releases": [sum_.to_json() for sum_ in sums]})

            part = ReleasePart(
                name=release.name,
                journal=self.journal,
                planned=release,
                step=None if whole else self._release_step(release, refusal),
                before=(*before, *released),
                keep=keep,
                records=held_out,
                privacy=experiment.privacy.randomness(),
                model=model.cpu().numpy(),
            )
            yield part
            if part.step is not None:  # refused
                return
            again = False

    def _preprocessed(self) -> NoisySums:
        """Return the releases of the preprocessing that are made."""
        preprocessed = None if self.prepared.preprocessing is None else read_preprocessed(self.folder.path)
        return () if preprocessed is None else preprocessed.sums

    def _evaluated(self) -> NoisySums:
        """Return the releases of the evaluation that are made."""
        return () if self.prepared.evaluation is None else read_evaluation(self.folder)

    def _require_charges(self) -> None:
        """Check that every side release that the folder has is charged; `TrainingPart` checks the rounds.

        Raises:
            IntegrityError: a release has no charge.
        """
        prepared, name = self.prepared, self.prepared.experiment.name
        releases = prepared.releases_before_training[: len(self._preprocessed())]
        releases += prepared.releases_after_training[: len(self._evaluated())]
        self.journal.require_charges(StepKey(release.of_run(name), BESIDE) for release in releases)

    def _prepare_again(self) -> None:
        """Prepare the experiment on the schema that the folder's releases give."""
        self.prepared = self._prepare(self.folder.with_refined_schema(self.prepared.experiment))

    def _complete_rounds(self) -> int:
        checkpoint = self.folder.read_checkpoint()
        return 0 if checkpoint is None else checkpoint.round

    def _check_untrained(self) -> None:
        """Check that no training began on a release that is about to be made again with fresh noise.

        The file that names the records is written after the preprocessing is complete. Another release would give
        another schema or clip, which that file does not fit, and the run would be refused after the charge. Noise
        from a seed gives the same schema again.

        Raises:
            RunFolderError: training began.
        """
        if self.prepared.secure and (self.folder / RECORDS).exists():
            raise RunFolderError(
                f"{self.folder.path}: {PREPROCESSED} is lost, and training has begun with its releases; put it back, "
                "or begin another run: a release that is made again has other noise. Nothing was charged"
            )

    # --- charges and budget ----------------------------------------------------------------------------------

    def _is_repeatable(self, protocol_spec: ProtocolSpec[Any, Any]) -> bool:
        """Return whether a step of this protocol that is played again is the same release."""
        return not self.prepared.secure if self.witness is None else protocol_spec.repeatable

    def _round_step(self, number: int) -> Step:
        """Return the charge of a round."""
        name, guarantee = self.prepared.experiment.name, self.prepared.guarantee

        def refusal() -> str | None:
            needed = self._excess(number, 1)
            if needed is None:
                return None
            return f"{self._above(f'round {number}', needed)}; the model after round {number - 1} is kept"

        return Step(
            self.journal,
            StepKey(name, number),
            # A unit changes the sum of a repeated round once more, so `again` charges at least strength 1.
            event=lambda again: guarantee.event_at_round(guarantee.event, number, again=again),
            refusal=refusal,
            repeatable=self._is_repeatable(self.prepared.protocol_spec),
        )

    def _release_step(self, release: Release, refusal: Callable[[], str | None]) -> Step:
        """Return the charge of a side release, which a refusal beside that of :func:`refuse_repeat` may forbid."""
        key = StepKey(release.of_run(self.prepared.experiment.name), BESIDE)
        return Step(
            self.journal,
            key,
            event=lambda _: release.event,
            refusal=lambda: refuse_repeat(self.journal, key, release.name) or refusal(),
            repeatable=self._is_repeatable(release.protocol_spec(empty_groups())),
        )

    def _excess(self, rounds: int, charges: int) -> float | None:
        """Return the epsilon that the run would reach if that exceeds the budget; else None.

            needed = rounds, charged as often as the ledger and ``charges`` say
                   + every side release, as often as it was charged
                   + every side release that is not made yet, if it will be charged (again)

        Charges are counted from the ledger, and releases from the run folder's files. Thus a file that was lost after
        its charge needs budget for another charge.

        Args:
            rounds: number of rounds.
            charges: number of charges of rounds that are not in the ledger yet.
        """
        prepared = self.prepared
        if prepared.experiment.privacy.budget is None:
            return None
        spent = read_spent_budget(self.journal.ledger, prepared.experiment.name, prepared.side_releases)
        lacking = prepared.releases_before_training[len(self._preprocessed()) :]
        lacking += prepared.releases_after_training[len(self._evaluated()) :]
        due = (release for release in lacking if self._release_step(release, lambda: None).is_due)
        again = max(0, spent.charges + charges - rounds)
        return prepared.over_budget(rounds, (*spent.side_releases, *due), again)

    def _above(self, subject: str, epsilon: float) -> str:
        """Return the sentence about a step that exceeds the budget."""
        budget = self.prepared.experiment.privacy.budget
        return f"{subject} would bring epsilon to {show_epsilon(epsilon)}, above the budget of {budget:g}"

    def _event_of(self, entry: Entry) -> Event | None:
        """Return the event that a ledger entry must charge; None if no step has its name."""
        name, guarantee = self.prepared.experiment.name, self.prepared.guarantee
        if entry.run == name:
            return guarantee.event_at_round(guarantee.event, entry.round, again=entry.attempt > 0)
        beside = {release.of_run(name): release.event for release in self.prepared.side_releases}
        return beside.get(entry.run)

    # --- end -------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is left to release."""
        if self._training is None:
            return False
        if self.prepared.evaluation is not None:
            return len(self._evaluated()) == len(self.prepared.evaluation.releases)
        return self._training.is_over

    @property
    def counts(self) -> tuple[int, int]:
        """Number of complete training rounds, and of their charges."""
        assert self._training is not None
        spent = read_spent_budget(self.journal.ledger, self.prepared.experiment.name, ())
        return self._training.checkpoint.round, spent.charges

    def conclude(self, reason: str | None) -> Outcome | PartEnding:
        """Write the final files if training has begun; before that, only report how the part ended."""
        if self._training is None:
            return PartEnding(folder=self.folder.path, stopped=reason)
        return self.finish(reason)

    def finish(self, reason: str | None) -> Outcome:
        """Write the last files of a run: model, spectrum and privacy statement.

        Args:
            reason: why the run ended early; None if it did not.
        """
        prepared, training, folder = self.prepared, self._training, self.folder
        assert training is not None, "a run without training has no model"
        checkpoint = training.checkpoint
        if training.ended:
            prepared = replace(prepared, uncovered=(*prepared.uncovered, _ENDED))
        if self.witness is None or prepared.protocol_spec.result_at_server:
            released = released_model(prepared.method, checkpoint.model, checkpoint.state)
            folder.write_model(prepared.task.state(released))
            moved = released.cpu() - prepared.task.initial().cpu()
            folder.write_json("spectrum.json", asdict(spectrum(moved)))
            if (described := describe_public_test(prepared, released)) is not None:
                folder.write_json(PUBLIC_TEST, described)
        spent = read_spent_budget(self.journal.ledger, prepared.experiment.name, prepared.side_releases)
        statement = state(prepared, checkpoint.round, spent)
        folder.write_json(STATEMENT, statement.to_json())
        evaluated = None if prepared.evaluation is None else read_evaluated(folder.path)
        if self.witness is None and evaluated is not None:
            (folder / EVALUATING).unlink(missing_ok=True)
        return Outcome(
            folder=folder.path,
            rounds=checkpoint.round,
            stopped=reason,
            row=checkpoint.row,
            statement=statement,
            seconds=checkpoint.row["elapsed"],
            evaluated=evaluated,
        )
