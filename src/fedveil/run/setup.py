"""Prepare a run from an experiment: population, task, method, trainer and guarantee.

:func:`prepare` reports every mistake in data, model, composition or budget before any training starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32
from torch import Tensor

from fedveil.data.records import Groups, Population, Records, limit_records_per_user
from fedveil.errors import CompositionError, ConfigError, DataError
from fedveil.methods.capabilities import ClientSender
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import Guarantee
from fedveil.methods.method import Method, contribution_weights, message_length
from fedveil.privacy.accountant import Accountant, cached_epsilon
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event
from fedveil.privacy.noise import grid_gaussian
from fedveil.privacy.statement import show_epsilon
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.registry import is_own
from fedveil.run.config.composition import Composition
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.recommended import RECOMMENDED
from fedveil.run.config.task_choice import beginning, task_of
from fedveil.run.environment import unverified_plugins
from fedveil.run.executors import AnyTrainer, batching_caveats, place_on_device
from fedveil.run.populations import PopulationCache
from fedveil.run.releases.evaluation import Evaluation, plan_evaluation
from fedveil.run.releases.preprocessing import Preprocessing, plan_preprocessing
from fedveil.run.releases.release import Release
from fedveil.run.releases.side_releases import compose_with_rounds
from fedveil.run.rounds.round_context import RoundContext, TrainingSetup, draw_users, try_server_stages
from fedveil.training.dpsgd import RECORD_MEMORY, DpSgdTrainer
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.server.optimizers import State
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, PartitionedTrainer, Progress, Trainer
from fedveil.training.trainer_choice import TrainerOptions, can_vectorise_records, choose_trainer


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """An experiment that is ready to run.

    Attributes:
        experiment: the requested experiment, with the name of the trainer that ``auto`` chose.
        population: the records with their users and silos.
        task: the model, its loss and its metrics.
        guarantee: the privacy guarantee of one round, per party that learns from it.
        accountant: composes the events of rounds and releases.
        setting: the method applied to the population; the same for every round.
        uncovered: outputs and conditions that no epsilon covers, as sentences for the statement.
        protocol_spec: the public parameters of the protocol, which all parties have before the first round.
        preprocessing: the side releases before the first round; None if the experiment requests none.
        evaluation: the side releases of the last model; None if the experiment requests none.
    """

    experiment: Experiment
    population: Population
    task: Task
    guarantee: Guarantee
    accountant: Accountant
    setting: TrainingSetup
    uncovered: tuple[str, ...]
    protocol_spec: ProtocolSpec[Any, Any]
    preprocessing: Preprocessing | None = None
    evaluation: Evaluation | None = None

    @property
    def secure(self) -> bool:
        """Return whether noise and sampling are unpredictable: the run has no ``privacy.insecure_seed``."""
        return self.experiment.privacy.insecure_seed is None

    def epsilon_after(self, rounds: int) -> float:
        """Return the epsilon of ``rounds`` rounds against readers of the models, without side releases.

        The number assumes secret noise. A run with a known seed has no guarantee (see ``secure``).
        """
        return self.epsilon_with(Role.READER, rounds, ())

    @property
    def length(self) -> int:
        """Length of a message in numbers: the update's d, plus the numbers that the bound adds."""
        return message_length(self.method, self.task.dimension)

    @property
    def side_releases(self) -> tuple[Release, ...]:
        """The releases of the run that are not rounds of training."""
        return (*self.releases_before_training, *self.releases_after_training)

    @property
    def releases_after_training(self) -> tuple[Release, ...]:
        """The side releases of the last model."""
        return () if self.evaluation is None else self.evaluation.releases

    @property
    def releases_before_training(self) -> tuple[Release, ...]:
        """The side releases that are made before the first round."""
        return () if self.preprocessing is None else self.preprocessing.releases

    def epsilon_with(
        self, role: Role, rounds: int, side_releases: Sequence[Release], again: int = 0
    ) -> float:
        """Return the epsilon of rounds and side releases against one role.

        Args:
            role: the party that the guarantee is against.
            rounds: number of complete rounds.
            side_releases: side releases, repeated as often as they were charged.
            again: number of additional charges of rounds, for attempts that were repeated or not completed.
        """
        return self._counted(self.learned_event(role, rounds, side_releases, again))

    def over_budget(self, rounds: int, side_releases: Sequence[Release], again: int = 0) -> float | None:
        """Return the epsilon of rounds and side releases if it exceeds the budget; else None.

        Args are those of :meth:`epsilon_with`; the role is the reader of the models.
        """
        budget = self.experiment.privacy.budget
        if budget is None:
            return None
        epsilon = self.epsilon_with(Role.READER, rounds, side_releases, again)
        return None if epsilon <= budget else epsilon

    def learned_event(
        self, role: Role, rounds: int, side_releases: Sequence[Release], again: int = 0
    ) -> Event:
        """Return the composed event that a role observes; args are those of :meth:`epsilon_with`."""
        return compose_with_rounds(self.guarantee.learned_event(role, rounds, again), side_releases, role)

    def _counted(self, event: Event) -> float:
        """Return the epsilon of an event at the run's delta."""
        return cached_epsilon(self.accountant, event, self.experiment.privacy.delta)

    def check_countable(self) -> None:
        """Check that the accountant can compute the statement of all rounds, before anything is released.

        Raises:
            PrivacyError: the accountant has no number for one line of the statement; the message says why.
        """
        if not self.secure:
            return
        roles = (Role.READER, *(view.role for view in self.guarantee.views))
        learned = (self.learned_event(role, self.experiment.rounds, self.side_releases) for role in roles)
        for event in dict.fromkeys(learned):  # most roles observe equal events: compose each once
            self._counted(event)

    @property
    def method(self) -> Method:
        """The composed method of the run."""
        return self.setting.method

    def round_context(
        self,
        number: int,
        model: Float32[Tensor, " d"],
        state: State,
        privacy: PrivacyRandomness,
        *,
        progress: Progress | None = None,
        measured: bool = True,
    ) -> RoundContext:
        """Return the context of round ``number``; the arguments are attributes of :class:`RoundContext`."""
        return RoundContext(
            setting=self.setting,
            model=model,
            state=state,
            round_number=number,
            experiment=ExperimentRandomness(self.experiment.seed),
            privacy=privacy,
            progress=progress,
            measured=measured,
        )


def prepare(
    experiment: Experiment,
    populations: PopulationCache | None = None,
    task: Task | None = None,
    *,
    trains: bool = True,
) -> Prepared:
    """Load the data, build the model, compose the method and derive its guarantee.

    Args:
        experiment: the experiment to run.
        populations: populations of the study that the experiment belongs to; None loads the experiment's own.
        task: model, loss and metrics that were passed in Python; None builds the ones that the experiment names.
        trains: whether this process trains. A coordinator does not: it tries no kernels of its machine, and leaves
            the choice of a trainer to each silo.

    Raises:
        FedveilError: any mistake; the message names the file, key, silo or row.
    """
    populations = populations or PopulationCache()
    # Side releases are planned from public numbers first, so that a refusal depends on no record.
    evaluation, preprocessing = _beside(experiment, populations)
    population = populations.load(experiment.data, experiment.seed)
    experiment = _with_delta(experiment, population.n_users)
    experiment.privacy.check_delta(population.n_users)
    if task is None:
        experiment, begin = beginning(experiment)
        task = task_of(experiment, population, begin)
    experiment = _with_local_rate(experiment, population, task)
    if experiment.trainer.precision != task.precision:
        task = replace(task, precision=experiment.trainer.precision)
    beside = (
        *(() if preprocessing is None else preprocessing.releases),
        *(() if evaluation is None else evaluation.releases),
    )
    # A released clip replaces the declared one before the guarantee is derived.
    clip = None if preprocessing is None else preprocessing.clip
    composition = Composition(experiment=experiment, population=population, side_releases=beside, clip=clip)
    method = composition.method()
    local: Any = method.local  # `sums_records` decides its type, which a type checker cannot follow
    if local.sums_records:
        local.vectors(task)  # refuses another model before its outputs are counted and noise is found
    if method.weights.linked and not population.complete:
        raise ConfigError(
            "method.power: 'linked' has a simulation write the file of main silos; between institutions the silos "
            "share one: give power = { main_silos = its sha256 }"
        )
    if preprocessing is not None:
        preprocessing.check(method)
    records = _kept(method, population.train)
    public = composition.public_facts(method, records, message_length(method, task.dimension))
    # Noise that is calibrated to an epsilon depends on the public facts, which depend on the composed method:
    # compose, collect the facts, then find the noise and derive the guarantee of the final method.
    method = composition.resolve_calibrated(method, public)
    # A sampler of another package is tried here: at its first round, the round would be charged already.
    if not is_own(type(method.sampler)):
        draw_users(method, population.n_users, PrivacyRandomness.insecure(0), 1)
    shapes = tuple(tuple(shape) for shape in task.layout.shapes)
    if method.released == "models":
        try_server_stages(method, task.initial, local.message_length(task.dimension), shapes)
    guarantee = derive(method, public)
    accountant = composition.accountant(guarantee)
    groups, n_silos = _groups(method, population, records)
    cohort, trainer = place_on_device(
        experiment.trainer.device,
        lambda device: Cohort.from_records(
            records, groups=groups, n_silos=n_silos, scale=population.scale, device=device
        ),
        lambda cohort: _trainer(experiment, task, method, cohort, population.n_users, tried=trains),
    )
    setting = TrainingSetup(
        method=method,
        trainer=trainer,
        cohort=cohort,
        weights=contribution_weights(method, groups, population),
        n_users=population.n_users,
        shapes=shapes,
    )
    senders = _senders(method, population, n_silos)
    prepared = Prepared(
        experiment=_resolved(experiment, trainer) if trains else experiment,
        population=population,
        task=task,
        guarantee=guarantee,
        accountant=accountant,
        setting=setting,
        uncovered=(
            *guarantee.uncovered,
            *composition.uncovered_choices(method),
            *_handed_over(experiment),
            *unverified_plugins(experiment),
            *batching_caveats(experiment.trainer.name, populations.machines, trainer, cohort.device),
        ),
        protocol_spec=method.protection.make_protocol_spec(
            method, replace(public, n_silos=senders), groups, experiment.rounds
        ),
        preprocessing=preprocessing,
        evaluation=evaluation,
    )
    prepared.check_countable()
    _check_budget(prepared)
    return prepared


def _with_delta(experiment: Experiment, n_users: int) -> Experiment:
    """Return the experiment with the recommended delta if its document gives none."""
    if "delta" in experiment.privacy.model_fields_set:
        return experiment
    privacy = experiment.privacy.model_copy(update={"delta": RECOMMENDED.delta_for(n_users)})
    return experiment.model_copy(update={"privacy": privacy})


def _with_local_rate(experiment: Experiment, population: Population, task: Task) -> Experiment:
    """Return the experiment with a number for the local rate by rule, from public facts of data and model."""
    local = experiment.local
    if local is None or local.has_rate:
        return experiment
    outputs, features = population.n_outputs, math.prod(population.feature_shape)
    rate = RECOMMENDED.local_rate(task.loss, outputs, features)
    return experiment.model_copy(update={"local": replace(local, learning_rate=rate)})


def _beside(
    experiment: Experiment, populations: PopulationCache
) -> tuple[Evaluation | None, Preprocessing | None]:
    """Plan the side releases of a run before any record is read."""
    if experiment.evaluation is None and experiment.preprocessing is None:
        return None, None
    declared = populations.declared_tables(experiment.data)
    return plan_evaluation(experiment, declared), plan_preprocessing(experiment, declared)


def _senders(method: Method, population: Population, summed: int) -> int:
    """Return the number of parties that send messages.

    In a federation the silos send. In a simulation each client sends if the channel works on clients; else one
    sender stands for all clients whose updates are summed in one batch.
    """
    if not population.complete:
        return population.n_silos
    return population.n_users if isinstance(method.channel, ClientSender) else summed


def _check_budget(prepared: Prepared) -> None:
    """Check that the budget allows the side releases and at least one round.

    Side releases are charged regardless of training, so a run without room for a round would waste them.

    Raises:
        ConfigError: the cost of the side releases and one round exceeds the budget.
    """
    if prepared.side_releases and (least := prepared.over_budget(1, prepared.side_releases)) is not None:
        raise ConfigError(
            f"privacy.budget = {prepared.experiment.privacy.budget:g}: one round and the releases beside it "
            f"({', '.join(release.name for release in prepared.side_releases)}) cost epsilon {show_epsilon(least)}; "
            "give a larger "
            "budget, a smaller privacy.epsilon, or leave them out"
        )


def setting_with(prepared: Prepared, records: Records) -> TrainingSetup:
    """Return the run's training setup over other records of the same population; all else stays.

    The audit uses it to leave users out.
    """
    setting, population, method = prepared.setting, prepared.population, prepared.method
    records = _kept(method, records)
    groups, n_silos = _groups(method, population, records)
    cohort = Cohort.from_records(
        records, groups=groups, n_silos=n_silos, scale=population.scale, device=setting.cohort.device
    )
    return replace(setting, cohort=cohort, weights=contribution_weights(method, groups, population))


def _kept(method: Method, records: Records) -> Records:
    """Return the records that the method trains on.

    If a contribution is a record, each user keeps at most ``contribution.group`` records.
    """
    if method.contribution.per != "record":
        return records
    return records.select(limit_records_per_user(records, method.contribution.group))


def _groups(method: Method, population: Population, records: Records) -> tuple[Groups, int]:
    """Return the contributions and the number of silos over which they are summed.

    If a contribution is a client and no protection hides the sums, all clients share one sum.

    Raises:
        DataError: a contribution is a client, and a silo has several users or a user is in several silos.
    """
    if method.contribution.per == "client":
        groups = records.by_silo_user()
        if max(np.bincount(groups.silo, minlength=1).max(), np.bincount(groups.user, minlength=1).max()) > 1:
            raise DataError(
                f"{method.name}: a client is a silo that holds one user, but these data have silos with several "
                'users or users in several silos; allot catalogue data by data.allocation.law = "clients", and for '
                "tables of silos take a method for users in several silos, such as uldp-avg"
            )
        if method.protection.agrees:
            return _numbered_by_silo(method, groups, population), population.n_silos
        return replace(groups, silo=np.zeros_like(groups.silo)), 1
    if method.contribution.per == "pair":
        return records.by_silo_user(), population.n_silos
    return records.by_silo(population.n_silos), population.n_silos


def _numbered_by_silo(method: Method, groups: Groups, population: Population) -> Groups:
    """Return the clients, numbered by the silo that sends their message.

    Users are numbered by the records that are present, so the user's number cannot name the sender.

    Raises:
        CompositionError: the public numbers of users and silos differ, so that some client is not a silo.
    """
    if population.n_users != population.n_silos:
        raise CompositionError(
            f"{method.name}: under {type(method.protection).__name__} a client is a silo, and there are "
            f"{population.n_users} users and {population.n_silos} silos: declare as many users as silos"
        )
    key = groups.user.astype(np.int64) if groups.key is None else groups.key
    return replace(groups, user=groups.silo, key=key)


def check_dealt_out(method: Method) -> None:
    """Check that several processes can share the training of a method.

    Raises:
        ConfigError: the method is DP-SGD in silos, or private weighting, which takes contributions one by one.
    """
    alone = "takes contributions one by one under private weighting" if method.protection.weighs else ""
    if method.local.sums_records:
        alone = "sums statistics of records"
    if method.local.own_noise:
        alone = "draws noise in every local step"
    if alone:
        raise ConfigError(f"trainer.processes: {method.name} {alone} and runs in one process")


def _trainer(
    experiment: Experiment, task: Task, method: Method, cohort: Cohort, n_users: int, *, tried: bool
) -> AnyTrainer:
    """Return the trainer of the method's local step, with the memory limit of the experiment."""
    local: Any = method.local  # `own_noise` decides its type, which a type checker cannot follow
    megabytes = experiment.trainer.memory_mb
    memory = None if megabytes is None else megabytes << 20
    if experiment.trainer.processes > 1:
        check_dealt_out(method)
    if local.sums_records:
        return RecordSumsTrainer(task=task, local=local)
    if local.own_noise:
        records = RECORD_MEMORY if memory is None else memory
        return DpSgdTrainer(
            task=task,
            local=local,
            noise=grid_gaussian,
            privacy=experiment.privacy.randomness(),
            memory=records,
            together=can_vectorise_records(task, cohort, records, tried=tried),
        )
    section = experiment.trainer
    options = TrainerOptions(name=section.name, memory=memory, compile=section.compile, tried=tried)
    return choose_trainer(task, local, options, cohort=cohort, bound=method.bound, users=n_users)


def _handed_over(experiment: Experiment) -> tuple[str, ...]:
    """Return sentences about a third-party model, loss or class weights, which count as public unverified."""
    model, sentences = experiment.model, list[str]()
    if model.sha256 is not None:
        sentences.append(
            f"the initial model was handed over (sha256 {model.sha256[:16]}...) and counts as public: the data "
            "that it was trained on, and how it was chosen, are not covered"
        )
    if model.loss is not None and ":" in model.loss:
        sentences.append(
            f"the loss {model.loss} was handed over and counts as public: weights or other numbers in it that were "
            "computed from private records are not covered, and they may change everybody's update"
        )
    if any(path is not None and ":" in path for path in (model.name, model.loss)):
        sentences.append(
            "code of a model or a loss from outside that fails at a record ends the run, which is seen: that it fails "
            "at none is not covered"
        )
    if model.class_weights is not None:
        sentences.append(
            "model.class_weights were declared and count as public: if they were computed from private records, that "
            "is not covered"
        )
    return tuple(sentences)


def _resolved(experiment: Experiment, trainer: Trainer) -> Experiment:
    """Return the experiment with the name of the trainer that ``auto`` chose, so that the record names it."""
    if not isinstance(trainer, PartitionedTrainer):
        return experiment
    section = experiment.trainer.model_copy(update={"name": trainer.name})
    return experiment.model_copy(update={"trainer": section})
