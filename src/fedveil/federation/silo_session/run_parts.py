"""Tasks of a silo in a run with releases in addition to its rounds: prep/1, training, eval/1, eval/2.

Claim: every silo computes the refined schema and the bins of scores from the released numbers. The silo checks the
whole run (rounds and releases) against its budget before the first charge. Conditions and enforcement as in
:mod:`~.release_task`. A hash of the user's id selects the held-out records, so a silo's own table and a table of all
silos give the same selection. Held-out records take no part in training, nor in the release that refines the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float32

from fedveil.data.columns import ColumnTable
from fedveil.federation.cpu_quota import Deadline
from fedveil.federation.errors import RefusalError
from fedveil.federation.policy import Policy
from fedveil.federation.silo_data import PartyTable
from fedveil.federation.silo_session.release_task import SiloReleaseTask, earlier_sums, release_plan
from fedveil.federation.silo_session.round_inputs import as_tensor
from fedveil.federation.silo_session.statement_check import check_training
from fedveil.federation.silo_session.task import SiloTask
from fedveil.federation.silo_session.training_task import SiloTrainingTask, training_event
from fedveil.privacy.events import ComposedEvent, Event
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import RunPart
from fedveil.run.releases.evaluation import Evaluation, groups_of, outputs_of, with_outputs
from fedveil.run.releases.preprocessing import Preprocessing
from fedveil.run.releases.release import Release
from fedveil.run.releases.run_preprocessing import lengths_of_updates, training_rows
from fedveil.run.setup import Prepared
from fedveil.statistics.result import NoisySums


class SiloTasks:
    """Tasks of a silo by part of one run.

    Args:
        policy: the silo's policy.
        table: the silo's table, under the declared schema.
        prepare: function that prepares the experiment over a table.
    """

    def __init__(self, policy: Policy, table: PartyTable, prepare: Callable[[PartyTable], Prepared]) -> None:
        self._policy, self._table, self._prepare = policy, table, prepare
        self._prepared = prepare(table)

    def work(self, phase: RunPart) -> SiloTask:
        """Return the silo's task in a part of the run.

        The expected part follows from the number of earlier releases; any other part is refused.

        Args:
            phase: the part, and the numbers released before it.

        Raises:
            RefusalError: the policy excludes a release, or the part does not fit the earlier releases.
            DataError: the table does not fit the schema.
        """
        told, planned = phase.released, self._prepared.preprocessing
        if planned is not None:
            experiment, releases = self._prepared.experiment, planned.releases
            made = earlier_sums(told[: len(releases)], planned.release)
            if made:
                found = planned.combine_releases(experiment, made)
                self._table = self._table.with_refined_schema(found.schema, found.clip)
                self._prepared = self._prepare(self._table)
            if len(made) < len(releases):
                if phase.name != releases[len(made)].name:
                    raise RefusalError(Code.RELEASED)
                return self._refinement(planned, made, phase)
            told = told[len(releases) :]
        if not phase.name and not told:
            return self._training(phase)
        evaluation = self._prepared.evaluation
        if evaluation is None or len(told) >= len(evaluation.releases):
            raise RefusalError(Code.RELEASED)
        if phase.name != evaluation.releases[len(told)].name:
            raise RefusalError(Code.RELEASED)
        return self._evaluation(evaluation, earlier_sums(told, evaluation.release), phase)

    def _training(self, phase: RunPart) -> SiloTrainingTask:
        prepared, policy = self._prepared, self._policy
        event = policy.event(prepared.guarantee)
        return SiloTrainingTask(prepared, event, policy.round_seconds, phase, whole=self._whole())

    def _refinement(self, planned: Preprocessing, made: NoisySums, phase: RunPart) -> SiloReleaseTask:
        """Return the task of the next preprocessing release, over the training records."""
        prepared, release = self._prepared, planned.release(made)
        if release.of_model:

            def lengths(model: Float32[np.ndarray, " d"]) -> ColumnTable:
                return lengths_of_updates(prepared, as_tensor(model), Deadline(self._policy.round_seconds))

            return self._release(release, phase, (training_rows(prepared.population), lengths))
        own, tested = self._table.columns(release.step.columns), prepared.population.test_rows
        if tested is not None:
            own = own.take(np.setdiff1d(np.arange(len(own)), tested))
        return self._release(release, phase, (own, lambda _: own))

    def _evaluation(self, evaluation: Evaluation, made: NoisySums, phase: RunPart) -> SiloReleaseTask:
        """Return the task of the next evaluation release, over the held-out records and the received model."""
        prepared, asked = self._prepared, evaluation.asked
        own, tested = self._table.columns(groups_of(asked)), prepared.population.test_rows
        assert tested is not None, "records are held out where metrics are released"

        def scored(model: Float32[np.ndarray, " d"]) -> ColumnTable:
            deadline = Deadline(self._policy.round_seconds)
            outputs = outputs_of(prepared.task, prepared.population, as_tensor(model), deadline)
            return with_outputs(asked, own, prepared.population, outputs)

        return self._release(evaluation.release(made), phase, (own.take(tested), scored))

    def _release(
        self,
        release: Release,
        phase: RunPart,
        records: tuple[ColumnTable, Callable[[Float32[np.ndarray, " d"]], ColumnTable]],
    ) -> SiloReleaseTask:
        """Return the task of a release.

        Args:
            release: the release.
            phase: the part of the run.
            records: the records, and the function that computes the step's columns from the received model.
        """
        prepared, policy = self._prepared, self._policy
        policy.check_release(release.step.length, release.std())
        whose, read = records
        dimension = prepared.task.dimension if release.of_model else 0
        whole, rounds = self._whole()
        source = prepared.experiment.privacy.randomness()
        return SiloReleaseTask(
            plan=release_plan(release, whose.pairs(), source, phase, dimension),
            whole=whole,
            rounds=rounds,
            release=release,
            charged=release.with_grid(policy.event(release.guarantee)),
            records=read,
            states=partial(check_training, prepared),
            seconds=policy.round_seconds,
        )

    def _whole(self) -> tuple[Event, int]:
        """Return the event of the whole run in the silo's ledger, and its number of charges."""
        prepared, policy = self._prepared, self._policy
        training = training_event(prepared, policy.event(prepared.guarantee))
        beside = (one.with_grid(policy.event(one.guarantee)) for one in prepared.side_releases)
        rounds = prepared.experiment.rounds + len(prepared.side_releases)
        return ComposedEvent(events=(training, *beside)), rounds
