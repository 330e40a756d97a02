"""A silo's tasks in a session: training rounds, releases of statistics, and runs that have both.

Claim of a release: whatever the coordinator proposes, and whatever earlier results it reports, the silo's contribution
has the norm, length and noise of the event charged to its ledger. The silo's counts affect only the contributed
numbers. Enforced by: the silo computes step, bound, noise and event itself, from the document and the policy
(:func:`make_release_task`). From earlier results it accepts only finite numbers of the right lengths, and the norm of
the next step does not depend on them. A coordinator that reports other sums than it received requests the release at
another point. All silos sign that they received the same report, and no guarantee depends on the point.
``tests/test_federation_releases.py`` tries both.

Claim of training: a silo trains a round only with the weights that its guarantee assumes. Uniform weights are exactly
1/|S|, and constant weights are 1. Main-silo weights are 1 or 0 by the file of main silos that the run names (0 without
it). Weights by records are n_su / N_u in [0, 1], from the totals of this session. Enforced by
:meth:`SiloTrainingTask.event`, the only source of the charged event, before anything is trained.

Claim of a run with releases in addition to its rounds (prep/1, training, eval/1, eval/2): every silo computes the
refined schema and the bins of scores from the released numbers. The silo checks the whole run against its budget
before the first charge. A hash of the user's id selects the held-out records, so a silo's own table and a table of all
silos give the same selection. Held-out records take no part in training, nor in the release that refines the schema.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.data.columns import ColumnTable
from fedveil.data.records import Groups
from fedveil.errors import OwnRecordsError
from fedveil.federation.policy import Deadline, Policy
from fedveil.federation.session_plan import MODEL, UNIT, RoundStartState, SessionPlan
from fedveil.federation.silo_data import PartyTable
from fedveil.federation.silo_session.statement_check import SiloCharges, check_releases, check_training
from fedveil.federation.store import RoundRecord, Tensors
from fedveil.methods.capabilities import memory_of
from fedveil.methods.method import (
    begin_reader_state,
    begin_state,
    contribution_weights,
    decode_sum,
    released_model,
    shows_counts,
    with_clip,
)
from fedveil.privacy.events import ComposedEvent, Event
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import Finalize, RunPart
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.releases.evaluation import Evaluation, groups_of, outputs_of, with_outputs
from fedveil.run.releases.preprocessing import Preprocessing
from fedveil.run.releases.records import lengths_of_updates, training_rows
from fedveil.run.releases.release import Release, ReleaseInputs
from fedveil.run.releases.series import PreparedReleases
from fedveil.run.rounds.client_inputs import ChannelInputs, RoundInputs, make_round_inputs
from fedveil.run.rounds.round_context import RoundContext, SumHistory, next_model
from fedveil.run.setup import Prepared
from fedveil.statistics.result import NoisySum, NoisySums
from fedveil.training.server.optimizers import State, matching

# --- what tasks have in common ---


class SiloTask(ABC):
    """Work of a silo in a session.

    Attributes:
        plan: plan of the session.
        whole_run: event of the whole run in the silo's ledger.
        rounds: number of charges in ``whole``.
    """

    plan: SessionPlan
    whole_run: Event
    rounds: int

    @abstractmethod
    def event(self, number: int, *, again: bool) -> Event:
        """Return the event that the silo's ledger is charged with for a round.

        Args:
            number: number of the round, from 1.
            again: whether the round was charged before.

        Raises:
            RefusalError: the round would differ from the one that its guarantee describes.
        """

    @abstractmethod
    def workload(
        self,
        number: int,
        start: RoundStartState,
        sampled_users: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> ChannelInputs:
        """Return the silo's inputs to a round that has been charged, in the form of the protocol.

        Args:
            number: number of the round, from 1.
            start: state at the start of the round.
            sampled_users: (|U|,) the sampled users; None: all users, or the sample is unknown.
            before: result of :meth:`state_after`.
        """

    def scores(self) -> Int64[np.ndarray, " users"]:
        """Return the scores of the users' records in this silo, (|U|,) int64, for public weights by records."""
        raise RefusalError(Code.SHAPE)

    def compute_weights(self, totals: Int64[np.ndarray, " users"]) -> None:
        """Compute the weights from the users' total scores over all silos, (|U|,) int64."""
        raise RefusalError(Code.SHAPE)

    @abstractmethod
    def check_statement(self, closing: Finalize, silo_charges: SiloCharges) -> None:
        """Check that the statement of a run that ends in this session is the one that its terms give.

        Args:
            closing: the coordinator's message with the statement.
            silo_charges: charges of the run in the silo's ledger.

        Raises:
            RefusalError: the statement differs.
        """

    def state_after(self, last: RoundRecord | None) -> Tensors:
        """Return the state that the silo must carry into the next round.

        It is empty if the coordinator sends all of the state.

        Args:
            last: record of the silo's last contribution, including the state that this method returned for it.

        Raises:
            RefusalError: the next round does not continue from the last one.
        """
        return {}

    def step(self, record: RoundRecord, result: Any) -> tuple[Tensors, dict[str, Tensor]]:
        """Make the server's step, if only silos have the models; return the state to persist, and the model."""
        raise RefusalError(Code.SHAPE)


# --- a release ---


def release_plan(
    release: Release, groups: Groups, privacy: PrivacyRandomness, phase: RunPart, dimension: int = 0
) -> SessionPlan:
    """Return the plan of a release's session: one round.

    Args:
        release: the release.
        groups: the party's (silo, user) pairs; empty at the coordinator.
        privacy: source of the noise.
        phase: name of the release, and the numbers released before it.
        dimension: number of parameters of the model that the release evaluates; 0 if none.
    """
    return SessionPlan(
        method=release.method,
        protocol_spec=release.protocol_spec(groups),
        rounds=1,
        n_users=release.public.n_users,
        dimension=dimension,
        privacy=privacy,
        phase=phase,
    )


def earlier_sums(
    reported: Sequence[tuple[float, Float64[np.ndarray, " d"]]], release: Callable[[NoisySums], Release]
) -> NoisySums:
    """Check reported results of earlier releases and return them as noisy sums.

    Args:
        reported: the reported numbers, as pairs of noise standard deviation and vector.
        release: function that returns the release that follows some noisy sums.

    Raises:
        RefusalError: a vector has another length or impossible numbers, or a standard deviation is impossible.
    """
    sums: NoisySums = ()
    for std, vector in reported:
        expected, noisy_sum = release(sums), NoisySum(vector, std)
        # The noise of a sum depends on the number of silos in it: one value per possible number.
        possible = {expected.std(summed) for summed in range(1, expected.public.n_silos + 1)}
        if not noisy_sum.fits(expected.step.length) or std not in possible:
            raise RefusalError(Code.RELEASED)
        sums = (*sums, noisy_sum)
    return sums


@dataclass(frozen=True, kw_only=True, eq=False)
class SiloReleaseTask(SiloTask):
    """Task of a silo in one release.

    Attributes:
        plan: plan of the session.
        whole_run: event of the whole run in the silo's ledger.
        rounds: number of charges in ``whole``.
        release: the release.
        charged_event: the event charged to the silo's ledger.
        records: function that returns the columns of the step from the silo's records, given the received model.
        states: statement check of the run, as :meth:`SiloTask.check_statement`.
        seconds: time limit for counting the records.
    """

    plan: SessionPlan
    whole_run: Event
    rounds: int
    release: Release
    charged_event: Event
    records: Callable[[Float32[np.ndarray, " d"]], ColumnTable]
    states: Callable[[Finalize, SiloCharges], None]
    seconds: float

    def event(self, number: int, *, again: bool) -> Event:
        """Return the event of the release."""
        return self.charged_event

    def workload(
        self,
        number: int,
        start: RoundStartState,
        sampled_users: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> ReleaseInputs:
        """Return the inputs of the silo's sum, or of its users' vectors under private weighting."""
        records, deadline = self.records(start.model), Deadline(self.seconds)
        return ReleaseInputs(self.release, records, self.plan.privacy, deadline)

    def check_statement(self, closing: Finalize, silo_charges: SiloCharges) -> None:
        """Check the run's statement against its terms and the silo's charges."""
        self.states(closing, silo_charges)


def make_release_task(
    prepared: PreparedReleases, phase: RunPart, policy: Policy, table: PartyTable
) -> SiloReleaseTask:
    """Return a silo's task in one release of a document.

    Args:
        prepared: releases of the document, whose requests the policy allows.
        phase: name of the release, and the numbers released before it.
        policy: the silo's policy.
        table: the silo's table.

    Raises:
        RefusalError: the release is more precise than the policy allows, or the part does not fit the earlier
            releases.
        DataError: the table cannot be read.
    """
    series = prepared.series
    if len(phase.released) >= prepared.count:
        raise RefusalError(Code.RELEASED)
    sums = earlier_sums(phase.released, prepared.release)
    if phase.name != prepared.part(len(sums)):
        raise RefusalError(Code.RELEASED)
    release = prepared.release(sums)
    policy.check_release(release.step.length, release.std())
    events = [planned.with_grid(policy.event(planned.guarantee)) for planned in series.releases]
    own = table.columns(release.step.columns)
    return SiloReleaseTask(
        plan=release_plan(release, own.pairs(), series.privacy.randomness(), phase),
        whole_run=ComposedEvent(events=tuple(events)),
        rounds=prepared.count,
        release=release,
        charged_event=events[len(sums)],
        records=lambda _: own,
        states=partial(check_releases, prepared),
        seconds=policy.round_seconds,
    )


# --- training ---

_WEIGHTS: Final = "weights"
"""Name of the silo's weights in the record of a round whose noise enters other rounds too."""
_RECORDS: Final = "records"
"""Name, in the same record, of the digest of the silo's records and their users' keys; never sent."""
_STATE: Final = "state."
"""Prefix of the optimiser's tensors in the record of a round."""


def training_plan(prepared: Prepared, phase: RunPart | None = None) -> SessionPlan:
    """Return the plan of a training session."""
    return SessionPlan(
        method=prepared.method,
        protocol_spec=prepared.protocol_spec,
        rounds=prepared.experiment.rounds,
        n_users=prepared.population.n_users,
        dimension=prepared.task.dimension,
        privacy=prepared.experiment.privacy.randomness(),
        phase=phase,
    )


def training_event(prepared: Prepared, event: Event) -> Event:
    """Return the event of all training rounds in a silo's ledger.

    Args:
        prepared: the experiment as the silo holds it.
        event: event of one round at strength 1, without the grid of its noise.
    """
    return prepared.guarantee.after_rounds(event, prepared.experiment.rounds)


@dataclass(frozen=True, kw_only=True)
class SiloRoundContext(RoundContext):
    """Round context of one silo, with the sample that the silo received.

    Attributes:
        instructions: (|U|,) the sampled users; None: all users, or the sample is unknown.
    """

    instructions: Bool[np.ndarray, " users"] | None

    @classmethod
    def from_instructions(
        cls,
        prepared: Prepared,
        number: int,
        start: RoundStartState,
        sampled: Bool[np.ndarray, " users"] | None,
        privacy: PrivacyRandomness,
    ) -> SiloRoundContext:
        """Create the context of a round from the silo's instructions.

        Args:
            prepared: the experiment as the silo holds it.
            number: number of the round, from 1.
            start: model and clip of the round.
            sampled: (|U|,) the sampled users.
            privacy: randomness of the silo.
        """
        method = prepared.method if start.clip is None else with_clip(prepared.method, start.clip)
        return cls(
            setting=replace(prepared.setting, method=method),
            model=_as_tensor(start.model),
            round_number=number,
            experiment=ExperimentRandomness(prepared.experiment.seed),
            privacy=privacy,
            measured=False,
            instructions=sampled,
        )

    def draw(self, attempt: int) -> Bool[np.ndarray, " users"] | None:
        """Return the sampled users that the silo received; it samples nothing itself."""
        return self.instructions


def _as_tensor(values: np.ndarray) -> Tensor:
    """Copy an array into a tensor: an array that views a received message is read-only."""
    return torch.from_numpy(values.copy())


class SiloTrainingTask(SiloTask):
    """Task of a silo in training rounds.

    Args:
        prepared: the experiment as the silo holds it.
        event: event of one round in the silo's ledger.
        seconds: time limit of a round's training.
        part: the part of the run; None: the run is training without releases.
        whole_run: event and number of charges of the whole run; None: those of this training.
    """

    def __init__(
        self,
        prepared: Prepared,
        event: Event,
        seconds: float,
        part: RunPart | None = None,
        *,
        whole_run: tuple[Event, int] | None = None,
    ) -> None:
        self.prepared, self._seconds = prepared, seconds
        self.plan = training_plan(prepared, part)
        self._event = event
        self._promised: Float64[Tensor, " m"] | None = None
        if not shows_counts(prepared.method):
            self._promised = contribution_weights(
                prepared.method, prepared.setting.cohort.groups, prepared.population
            )
        rounds = prepared.experiment.rounds
        self.whole_run, self.rounds = (
            (training_event(prepared, event), rounds) if whole_run is None else whole_run
        )
        self._past = SumHistory()

    def event(self, number: int, *, again: bool) -> Event:
        """Return the event of a round, after checking that the weights are those of the guarantee.

        Raises:
            RefusalError: the weights differ, or are unknown because the users' totals have not arrived.
        """
        # Exact equality: the sensitivity in the event is computed from these very weights.
        if self._promised is None or not torch.equal(self.prepared.setting.weights, self._promised):
            raise RefusalError(Code.WEIGHTS)
        return self.prepared.guarantee.event_at_round(self._event, number, again=again)

    def workload(
        self,
        number: int,
        start: RoundStartState,
        sampled_users: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> RoundInputs:
        """Return the inputs of the silo to a round: training, and its message or contributions.

        A session that begins in the middle of a stream repeats the training of the earlier rounds that enter its
        messages. The time limit grows by one round's limit for each of them.
        """
        # _past holds the sums of rounds trained in this session; if empty, up to `memory` earlier rounds are trained
        # again.
        rounds = 1 if self._past else min(number, 1 + memory_of(self.prepared.method.channel))
        context = SiloRoundContext.from_instructions(
            self.prepared, number, start, sampled_users, self.plan.privacy
        )
        context = replace(
            context, state=_state(before), past=self._past, progress=Deadline(rounds * self._seconds)
        )
        return make_round_inputs(context, self.plan.protocol_spec, self.prepared.task.initial())

    def scores(self) -> Int64[np.ndarray, " users"]:
        """Return the score of every user in this silo, (|U|,) int64: the number of records, or a power of it."""
        share = self.prepared.population
        return self.prepared.method.weights.scores(share.records_per_user(), share.n_silos)

    def compute_weights(self, totals: Int64[np.ndarray, " users"]) -> None:
        """Compute the weights n_su^p / sum_s n_su^p from the total scores sum_s n_su^p of all users.

        Args:
            totals: (|U|,) sums of the scores n_su^p over all silos.

        Raises:
            RefusalError: the totals have another number of users.
            OwnRecordsError: a weight would exceed 1.
        """
        prepared, users, silos = self.prepared, self.plan.n_users, self.prepared.population.n_silos
        if len(totals) != users:
            raise RefusalError(Code.USERS, len(totals), users)
        groups = prepared.setting.cohort.groups
        scores = prepared.method.weights.scores(groups.size, silos)
        user_totals = totals[groups.user]
        # A total below the silo's own score is false: the weight would exceed 1, and the contribution its bound.
        if (user_totals < scores).any():
            raise OwnRecordsError("a user has fewer records over all silos than in this one")
        self._promised = torch.from_numpy(scores / user_totals)
        setting = replace(prepared.setting, weights=self._promised.clone())
        self.prepared = replace(prepared, setting=setting)

    def check_statement(self, closing: Finalize, silo_charges: SiloCharges) -> None:
        """Check the run's statement against its terms and the silo's charges."""
        check_training(self.prepared, closing, silo_charges)

    def state_after(self, last: RoundRecord | None) -> Tensors:
        """Return the state that the silo must carry into the next round.

        Raises:
            RefusalError: the next round does not continue from the last one.
        """
        method = self.prepared.method
        if method.protection.divides:
            return self._own_model(last)
        return {} if method.sampler.period == 1 else self._stream(last)

    # --- where a user's rounds belong together -----------------------------------------------------------------

    def _stream(self, last: RoundRecord | None) -> Tensors:
        """Return the state of a stream of rounds, and check the facts that must not change.

        The state holds the starts of the earlier rounds whose parts enter the next message. The guarantee covers a
        stream of rounds: a round is charged for its addition to the earlier ones. Therefore a user's weights are the
        same in all rounds, and so are the records, which are trained again. The users' keys are constant too: they
        determine the rounds in which a user takes part. Another key could place a user in two rounds of one period.

        Raises:
            RefusalError: the weights, the records here, or their users' keys differ from those of the earlier rounds.
        """
        method, weights = self.prepared.method, self.prepared.setting.weights.cpu().numpy()
        digest = np.frombuffer(bytes.fromhex(self.prepared.population.train.sha256), dtype=np.uint8)
        stays = {_WEIGHTS: weights, _RECORDS: digest}
        if last is None:
            return {**stays, **_named(begin_reader_state(method, self.prepared.task.initial()))}
        if not np.array_equal(weights, last.before[_WEIGHTS]):
            raise RefusalError(Code.WEIGHTS)
        if not np.array_equal(digest, last.before[_RECORDS]):
            raise RefusalError(Code.RECORDS)
        # With an empty sum, decode_sum only advances the reader's state from the start of the last round.
        clipped_method, model = with_clip(method, float(last.before[UNIT][0])), _as_tensor(last.before[MODEL])
        _, state = decode_sum(clipped_method, np.zeros(0), model, _state(last.before))
        return {**stays, **_named(state)}

    # --- where the silos alone have the models -----------------------------------------------------------------

    def _own_model(self, last: RoundRecord | None) -> Tensors:
        """Return model and optimiser's state for the next round: initial, or from the end of the last round.

        Raises:
            RefusalError: the sum of the last round has not arrived, so that round is still to be played.
        """
        initial, method = self.prepared.task.initial().cpu(), self.prepared.method
        if last is None:
            return _kept(initial, begin_state(method, initial))
        if MODEL not in last.after:
            raise RefusalError(Code.UNENDED, last.round)
        after = last.after[MODEL]
        if len(after) != len(initial):
            raise RefusalError(Code.OTHER_LENGTH, last.round, len(after), len(initial))
        if not matching(begin_state(method, _as_tensor(after)), _state(last.after)):
            raise RefusalError(Code.OTHER_SERVER, last.round)
        return last.after

    def step(self, record: RoundRecord, result: Any) -> tuple[Tensors, dict[str, Tensor]]:
        """Make the server's step from the sum; return the state to persist, and the model's tensors."""
        prepared, model = self.prepared, _as_tensor(record.before[MODEL])
        context = prepared.round_context(record.round, model, _state(record.before), self.plan.privacy)
        silos = prepared.population.n_silos
        total = prepared.protocol_spec.decode_sum(result)
        new_model, state = next_model(
            context, total, n_silos=silos, summed=silos, n_sampled=self.plan.n_users
        )
        return _kept(new_model, state), prepared.task.state(released_model(prepared.method, new_model, state))


def _kept(model: Float32[Tensor, " d"], state: State) -> Tensors:
    """Return a model and its optimiser's state as persisted tensors."""
    return {MODEL: model.cpu().numpy(), **_named(state)}


def _named(state: State) -> Tensors:
    return {_STATE + name: value.cpu().numpy() for name, value in state.items()}


def _state(tensors: Tensors) -> State:
    """Return the optimiser's state in persisted tensors."""
    return {
        name.removeprefix(_STATE): torch.from_numpy(value.copy())
        for name, value in tensors.items()
        if name.startswith(_STATE)
    }


# --- a run of several parts ---


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

    def task_for(self, part: RunPart) -> SiloTask:
        """Return the silo's task in a part of the run.

        The expected part follows from the number of earlier releases; any other part is refused.

        Args:
            part: the part, and the numbers released before it.

        Raises:
            RefusalError: the policy excludes a release, or the part does not fit the earlier releases.
            DataError: the table does not fit the schema.
        """
        released, planned = part.released, self._prepared.preprocessing
        if planned is not None:
            experiment, releases = self._prepared.experiment, planned.releases
            sums = earlier_sums(released[: len(releases)], planned.release)
            if sums:
                refined = planned.combine_releases(experiment, sums)
                self._table = self._table.with_refined_schema(refined.schema, refined.clip)
                self._prepared = self._prepare(self._table)
            if len(sums) < len(releases):
                if part.name != releases[len(sums)].name:
                    raise RefusalError(Code.RELEASED)
                return self._refinement(planned, sums, part)
            released = released[len(releases) :]
        if not part.name and not released:
            return self._training(part)
        evaluation = self._prepared.evaluation
        if evaluation is None or len(released) >= len(evaluation.releases):
            raise RefusalError(Code.RELEASED)
        if part.name != evaluation.releases[len(released)].name:
            raise RefusalError(Code.RELEASED)
        return self._evaluation(evaluation, earlier_sums(released, evaluation.release), part)

    def _training(self, part: RunPart) -> SiloTrainingTask:
        prepared, policy = self._prepared, self._policy
        event = policy.event(prepared.guarantee)
        return SiloTrainingTask(prepared, event, policy.round_seconds, part, whole_run=self._whole_run())

    def _refinement(self, planned: Preprocessing, sums: NoisySums, part: RunPart) -> SiloReleaseTask:
        """Return the task of the next preprocessing release, over the training records."""
        prepared, release = self._prepared, planned.release(sums)
        if release.of_model:

            def lengths(model: Float32[np.ndarray, " d"]) -> ColumnTable:
                return lengths_of_updates(prepared, _as_tensor(model), Deadline(self._policy.round_seconds))

            return self._release(release, part, (training_rows(prepared.population), lengths))
        own, tested = self._table.columns(release.step.columns), prepared.population.test_rows
        if tested is not None:
            own = own.take(np.setdiff1d(np.arange(len(own)), tested))
        return self._release(release, part, (own, lambda _: own))

    def _evaluation(self, evaluation: Evaluation, sums: NoisySums, part: RunPart) -> SiloReleaseTask:
        """Return the task of the next evaluation release, over the held-out records and the received model."""
        prepared, metrics = self._prepared, evaluation.request
        columns, held_out_rows = self._table.columns(groups_of(metrics)), prepared.population.test_rows
        assert held_out_rows is not None, "records are held out where metrics are released"

        def scored(model: Float32[np.ndarray, " d"]) -> ColumnTable:
            deadline = Deadline(self._policy.round_seconds)
            outputs = outputs_of(prepared.task, prepared.population, _as_tensor(model), deadline)
            return with_outputs(metrics, columns, prepared.population, outputs)

        return self._release(evaluation.release(sums), part, (columns.take(held_out_rows), scored))

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
        groups, read = records
        dimension = prepared.task.dimension if release.of_model else 0
        whole, rounds = self._whole_run()
        source = prepared.experiment.privacy.randomness()
        return SiloReleaseTask(
            plan=release_plan(release, groups.pairs(), source, phase, dimension),
            whole_run=whole,
            rounds=rounds,
            release=release,
            charged_event=release.with_grid(policy.event(release.guarantee)),
            records=read,
            states=partial(check_training, prepared),
            seconds=policy.round_seconds,
        )

    def _whole_run(self) -> tuple[Event, int]:
        """Return the event of the whole run in the silo's ledger, and its number of charges."""
        prepared, policy = self._prepared, self._policy
        training = training_event(prepared, policy.event(prepared.guarantee))
        release_events = (
            release.with_grid(policy.event(release.guarantee)) for release in prepared.side_releases
        )
        rounds = prepared.experiment.rounds + len(prepared.side_releases)
        return ComposedEvent(events=(training, *release_events)), rounds
