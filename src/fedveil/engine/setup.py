"""From an experiment to what a run needs: population, task, method, trainer, guarantee.

Everything that can be wrong with data, model, composition or budget is found here, before any training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from fedveil.engine.aggregation import MaskedRange
from fedveil.engine.agreed import Agreed, OpenRange
from fedveil.engine.experiment import Experiment
from fedveil.engine.partial import PartialRange
from fedveil.engine.sections import ChannelSection, DataSection
from fedveil.engine.setting import Setting
from fedveil.engine.weighting import WeightingRange
from fedveil.errors import CompositionError, ConfigError, DataError
from fedveil.local.choice import choose_trainer, records_together
from fedveil.local.dpsgd import DpSgdTrainer
from fedveil.local.loop import LoopTrainer
from fedveil.local.losses import load_loss
from fedveil.local.metrics import load_metric
from fedveil.local.models import build_model
from fedveil.local.pretrained import take_parameters
from fedveil.local.span import SpanTrainer
from fedveil.local.steps import LocalDpSgd, LocalSgd
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Trainer
from fedveil.local.vectorized import VmapTrainer
from fedveil.methods import METHODS
from fedveil.methods.channels import CentralGaussian, GaussianShares, grid_gaussian
from fedveil.methods.claims import Guarantee, PublicFacts
from fedveil.methods.client_messages import through_messages
from fedveil.methods.contributions import ClientContribution, RecordContribution, SiloUserContribution
from fedveil.methods.derive import derive
from fedveil.methods.layered_shares import LayeredShares
from fedveil.methods.method import Method
from fedveil.methods.paraaegis import partly_encrypted
from fedveil.methods.protections import (
    NO_PROTECTION,
    PartialEncryption,
    Protection,
    SecureAggregation,
)
from fedveil.population.allocation import Allocation
from fedveil.population.catalogue import load
from fedveil.population.catalogue.files import digest_of
from fedveil.population.flags import keep_at_most
from fedveil.population.records import Groups, Population, Records
from fedveil.population.schema import read_schema
from fedveil.population.tables import read_tables
from fedveil.privacy.accounting import Accountant, epsilon_on_grid, make_accountant
from fedveil.privacy.calibration import calibrate_noise
from fedveil.privacy.claims import Role
from fedveil.privacy.closed_form import remark_1_noise, theorem_noise
from fedveil.privacy.events import ComposedEvent, Event
from fedveil.privacy.ledger import Budget
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.server.denoise import make_denoiser


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """An experiment, ready to run."""

    experiment: Experiment
    population: Population
    task: Task
    guarantee: Guarantee
    accountant: Accountant
    setting: Setting
    uncovered: tuple[str, ...]
    agreed: Agreed

    @property
    def secure(self) -> bool:
        """Whether noise and sampling cannot be predicted."""
        return self.experiment.privacy.insecure_seed is None

    def epsilon_after(self, rounds: int) -> float:
        """Return the epsilon that so many rounds spend against readers of the models, were the noise secret."""
        return self.epsilon_of(self.guarantee.event, rounds)

    def epsilon_of(self, event: Event, rounds: int) -> float:
        """Return the epsilon of an event that happens every round, the grid of the noise included."""
        if rounds == 0:
            return 0.0
        released = self.guarantee.after(event, rounds)
        loss = self.guarantee.grid_loss_after(rounds, self.task.dimension)
        return epsilon_on_grid(self.accountant, released, self.experiment.privacy.delta, loss)

    @property
    def method(self) -> Method:
        """The composition that runs."""
        return self.setting.method


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    """What a data set's publications train on it."""

    model: str
    loss: str
    metrics: tuple[str, ...]


_BY_DATA_SET = {
    "digits": _Defaults(model="mlp", loss="cross_entropy", metrics=("accuracy", "loss")),
    "mnist": _Defaults(model="cnn", loss="cross_entropy", metrics=("accuracy", "loss")),
    "mnist_canonical": _Defaults(model="linear", loss="cross_entropy", metrics=("accuracy", "loss")),
    "mnist_centred": _Defaults(model="mlp_32_16", loss="cross_entropy", metrics=("accuracy", "loss")),
    "mnist_rgb": _Defaults(model="svhn_cnn", loss="cross_entropy", metrics=("accuracy", "loss")),
    "svhn": _Defaults(model="svhn_cnn", loss="cross_entropy", metrics=("accuracy", "loss")),
    "svhn_subset": _Defaults(model="svhn_cnn", loss="cross_entropy", metrics=("accuracy", "loss")),
    "imagenette_subset": _Defaults(
        model="resnet_small_groupnorm", loss="cross_entropy", metrics=("accuracy", "loss")
    ),
    "shakespeare": _Defaults(model="lstm", loss="cross_entropy", metrics=("accuracy", "loss")),
    "creditcard": _Defaults(
        model="mlp_groupnorm", loss="cross_entropy", metrics=("balanced_accuracy", "loss")
    ),
    "heart_disease": _Defaults(
        model="linear", loss="binary_cross_entropy", metrics=("accuracy", "auc", "loss")
    ),
    "tcga_brca": _Defaults(model="linear", loss="cox", metrics=("c_index", "loss")),
}
_BY_TASK = {
    "classification": _Defaults(model="linear", loss="cross_entropy", metrics=("accuracy", "loss")),
    "two classes": _Defaults(
        model="linear", loss="binary_cross_entropy", metrics=("accuracy", "auc", "loss")
    ),
    "regression": _Defaults(model="linear", loss="squared_error", metrics=("loss",)),
    "survival": _Defaults(model="linear", loss="cox", metrics=("c_index", "loss")),
}


class Populations:
    """The populations of the experiments of one study: each is loaded once, however many train on it."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[DataSection, int], Population] = {}

    def of(self, data: DataSection, seed: int) -> Population:
        """Return the population of a data section; ``seed`` is the experiment's, used where the section has none."""
        key = (data, seed if data.seed is None else data.seed)
        if key not in self._loaded:
            self._loaded[key] = load_population(data, seed)
        return self._loaded[key]


def prepare(experiment: Experiment, populations: Populations | None = None) -> Prepared:
    """Load the data, build the model, compose the method and derive its guarantee.

    Args:
        experiment: what is to run.
        populations: of the study that it belongs to; None loads its own.

    Raises:
        FedveilError: whatever is wrong, named by file, key, silo or row.
    """
    randomness = ExperimentRandomness(experiment.seed)
    population = (populations or Populations()).of(experiment.data, experiment.seed)
    task = _task(experiment, population, randomness)
    method, uncovered = _compose(experiment, population)
    records = population.train
    if isinstance(method.contribution, RecordContribution):
        records = records.select(keep_at_most(records, method.contribution.per_user))
    federation = _federation(experiment, method, population, records, task.dimension)
    if experiment.method.noise_multiplier == "calibrated":
        assert experiment.privacy.epsilon is not None
        method = _calibrate(experiment, population, federation, experiment.privacy.epsilon)
    elif experiment.method.noise_multiplier == "closed-form":
        method = _compose(experiment, population, _closed_form(experiment))[0]
        if method.noise_decay < 1:
            spent = _epsilon_of_steady_noise(experiment, method, federation)
            method = _calibrate(experiment, population, federation, spent)
    guarantee = derive(method, federation)
    numerics = _accountant(experiment, guarantee)
    groups, n_silos = _groups(method, population, records)
    cohort = Cohort.of(
        records, groups=groups, n_silos=n_silos, scale=population.scale, device=_device(experiment)
    )
    trainer = _trainer(experiment, task, method, cohort)
    setting = Setting(
        method=method,
        trainer=trainer,
        cohort=cohort,
        weights=method.weights.of(groups, population.n_silos, population.n_users),
        n_users=population.n_users,
        shapes=tuple(tuple(shape) for shape in task.layout.shapes),
    )
    return Prepared(
        experiment=_resolved(experiment, trainer),
        population=population,
        task=task,
        guarantee=guarantee,
        accountant=numerics,
        setting=setting,
        uncovered=(
            *guarantee.uncovered,
            *uncovered,
            *_initial(experiment),
            *_batching(trainer, cohort.device),
        ),
        agreed=_agreed(experiment, method, setting, population, task.dimension),
    )


def _agreed(
    experiment: Experiment, method: Method, setting: Setting, population: Population, dimension: int
) -> Agreed:
    """Return what the parties agree on before any training."""
    if method.protection.weighs and experiment.trainer.processes > 1:
        raise ConfigError(
            "trainer.processes: private weighting takes contributions one by one and runs in one process"
        )
    n_silos, n_users = population.n_silos, population.n_users
    if method.protection.weighs:
        groups, rounds = setting.cohort.groups, experiment.rounds
        weighting = WeightingRange.of(
            method, groups, n_silos=n_silos, n_users=n_users, length=dimension, rounds=rounds
        )
        if population.complete:
            weighting.check_counts()
        return weighting
    if method.protection.divides:
        return PartialRange.of(method, n_silos=n_silos, n_users=n_users, length=dimension)
    if method.protection.masks:
        return MaskedRange.of(method, n_silos=n_silos, n_users=n_users, length=dimension)
    clients = n_silos
    if population.complete:  # clients without messages of their own are added up at once in one process
        clients = n_users if method.channel.by_clients else setting.cohort.n_silos
    return OpenRange(method=method, clients=clients, length=dimension)


def seat_with(prepared: Prepared, records: Records) -> Setting:
    """Return the run's seat over other records of the same population: fewer users, say; all else stays."""
    setting, population, method = prepared.setting, prepared.population, prepared.method
    if isinstance(method.contribution, RecordContribution):
        records = records.select(keep_at_most(records, method.contribution.per_user))
    groups, n_silos = _groups(method, population, records)
    cohort = Cohort.of(
        records, groups=groups, n_silos=n_silos, scale=population.scale, device=setting.cohort.device
    )
    weights = method.weights.of(groups, population.n_silos, population.n_users)
    return replace(setting, cohort=cohort, weights=weights)


def _groups(method: Method, population: Population, records: Records) -> tuple[Groups, int]:
    """Return the contributions, and over how many silos they are summed: clients share one sum."""
    if isinstance(method.contribution, ClientContribution):
        groups = records.by_silo_user()
        if max(np.bincount(groups.silo, minlength=1).max(), np.bincount(groups.user, minlength=1).max()) > 1:
            raise DataError(
                f"{method.name}: a client is a silo that holds one user, but these data have silos with several "
                'users or users in several silos; allot them by data.allocation.law = "clients"'
            )
        if isinstance(method.protection, SecureAggregation | PartialEncryption):
            return _numbered_by_silo(method, groups, population), population.n_silos
        return replace(groups, silo=np.zeros_like(groups.silo)), 1
    if isinstance(method.contribution, SiloUserContribution):
        return records.by_silo_user(), population.n_silos
    return records.by_silo(population.n_silos), population.n_silos


def _numbered_by_silo(method: Method, groups: Groups, population: Population) -> Groups:
    """Return clients whose number is that of their silo, which sends their message: users are numbered by who is there.

    Raises:
        CompositionError: the public numbers of users and silos differ, so that some client is no silo.
    """
    if population.n_users != population.n_silos:
        raise CompositionError(
            f"{method.name}: under {type(method.protection).__name__} a client is a silo, and there are "
            f"{population.n_users} users and {population.n_silos} silos: declare as many users as silos"
        )
    key = groups.user.astype(np.int64) if groups.key is None else groups.key
    return replace(groups, user=groups.silo, key=key)


def load_population(data: DataSection, seed: int) -> Population:
    """Load the records an experiment trains on."""
    if data.table is not None:
        return read_tables(
            read_schema(data.table.schema_file),
            data.table.files,
            test=data.table.test_file,
            test_share=data.table.test_share,
            seed=seed if data.seed is None else data.seed,
        )
    assert data.name is not None
    assert data.n_users is not None
    law = {} if data.allocation is None else data.allocation.model_dump()
    return load(
        data.name,
        allocation=Allocation(**law),
        n_users=data.n_users,
        n_silos=data.n_silos,
        seed=seed if data.seed is None else data.seed,
        folder=data.folder,
    )


def _task(experiment: Experiment, population: Population, randomness: ExperimentRandomness) -> Task:
    asked = experiment.model
    kind = "two classes" if population.n_classes == 2 else population.task
    defaults = _BY_DATA_SET.get(experiment.data.name or "", _BY_TASK[kind])
    loss = load_loss(asked.loss or defaults.loss)
    loss.check_task(population.task)
    one_output = population.n_classes is None or loss.name == "binary_cross_entropy"
    outputs = 1 if one_output else population.n_classes
    assert outputs is not None
    model = build_model(
        asked.name or defaults.model,
        input_shape=population.feature_shape,
        n_outputs=outputs,
        randomness=randomness,
    )
    if asked.initial is not None:
        take_parameters(model, asked.initial, asked.initial_layers)
    loss.check_targets(torch.from_numpy(population.train.targets), outputs)
    loss.check_targets(torch.from_numpy(population.test_targets), outputs)
    metrics = {name: load_metric(name, loss) for name in asked.metrics or defaults.metrics}
    return Task(model=model, loss=loss, metrics=metrics)


def _compose(
    experiment: Experiment, population: Population, noise_multiplier: float | None = None
) -> tuple[Method, tuple[str, ...]]:
    """Build the method for this population; return it with the private choices that its parameters rest on."""
    given = experiment.method.parameters()
    uncovered: tuple[str, ...] = ()
    if isinstance(given.get("noise_multiplier"), str):
        given["noise_multiplier"] = noise_multiplier or 1.0
    if given.get("group_size") in ("median", "max"):
        rule, per_user = given["group_size"], population.records_per_user()
        present = per_user[per_user > 0]
        given["group_size"] = 1
        if len(present):
            given["group_size"] = int(present.max() if rule == "max" else sorted(present)[len(present) // 2])
        uncovered = (f"the group size is the {rule} of the users' record counts, which are private",)
    method = METHODS[experiment.method.name].compose(
        given,
        local=None if experiment.local is None else LocalSgd(**experiment.local.model_dump()),
        n_silos=population.n_silos,
        n_users=population.n_users,
        largest_silo=max(1, int(population.records_per_silo().max())),
        colluding_silos=experiment.privacy.colluding_silos,
        learning_rate=experiment.method.learning_rate,
    )
    method = _through(method, experiment.channel, population.n_users)
    server = experiment.server
    if server.denoiser is not None:
        method = replace(method, denoiser=make_denoiser(server.denoiser, **server.options()))
    method = _protected(method, experiment.protection.value(), population.n_users)
    if experiment.method.calibration == "as-published":
        uncovered += ("the noise is measured in the records of the largest client, which count as public",)
    if experiment.method.scale == "norm":
        uncovered += (
            "published figures are computed from the records of the smallest client, which count as public",
        )
    return method, uncovered


def _protected(method: Method, protection: Protection, n_users: int) -> Method:
    """Return the method under a protection, with its noise where and as large as that needs it."""
    if protection == NO_PROTECTION:
        return method
    if isinstance(protection, PartialEncryption):
        return partly_encrypted(method, protection, n_users)
    if method.protection not in (NO_PROTECTION, protection):
        raise CompositionError(
            f"{method.name} brings its own protection ({type(method.protection).__name__}); remove protection.name, or "
            "take the method that it is a variant of"
        )
    channel = method.channel
    if isinstance(protection, SecureAggregation) and isinstance(channel, GaussianShares):
        channel = replace(channel, missing_silos=protection.missing_silos)
    return replace(method, channel=channel, protection=protection)


def _through(method: Method, channel: ChannelSection, n_users: int) -> Method:
    """Return the method with its silos' noisy sums, or its clients' updates, sent through the channel asked for."""
    if channel.name == "additive":
        return method
    if isinstance(method.channel, CentralGaussian):
        messages = through_messages(method.channel, method.sampler, n_users, channel.lattice)
        return replace(method, channel=messages)
    if not isinstance(method.channel, GaussianShares):
        raise CompositionError(
            f"{method.name}: channel.name = 'lrsuq' makes shares of Gaussian noise, but in this method neither silos "
            "nor the server add any to a sum; use uldp-naive, uldp-sgd, uldp-avg, uldp-avg-w, dp-fed or dp-fed-ls, or "
            "cepam-gaussian as it is"
        )
    return replace(method, channel=LayeredShares(shares=method.channel, lattice=channel.lattice))


def _closed_form(experiment: Experiment) -> float:
    """Return the noise multiplier that a published theorem admits for the target epsilon."""
    method, privacy = experiment.method, experiment.privacy
    assert method.clip is not None
    assert privacy.epsilon is not None
    if method.calibration == "as-published":
        return remark_1_noise(rounds=experiment.rounds, epsilon=privacy.epsilon, delta=privacy.delta)
    found = theorem_noise(
        method.client_sampling or "poisson",
        rate=method.client_sampling_rate or 1.0,
        clip=method.clip,
        rounds=experiment.rounds,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
    )
    return found.noise_std / method.clip


def _trainer(experiment: Experiment, task: Task, method: Method, cohort: Cohort) -> Trainer:
    if isinstance(method.local, LocalDpSgd):
        if experiment.trainer.processes > 1:
            raise ConfigError(
                f"trainer.processes: {method.name} draws noise in every local step and runs in one process"
            )
        return DpSgdTrainer(
            task=task,
            local=method.local,
            noise=grid_gaussian,
            privacy=privacy_randomness(experiment),
            together=records_together(task, cohort),
        )
    return choose_trainer(
        task,
        method.local,
        name=experiment.trainer.name,
        memory=None if experiment.trainer.memory_mb is None else experiment.trainer.memory_mb << 20,
        compile=experiment.trainer.compile,
        cohort=cohort,
        bound=method.bound,
    )


def _initial(experiment: Experiment) -> tuple[str, ...]:
    """Name what a model from outside leaves open: whether it is public cannot be seen from here."""
    path = experiment.model.initial
    if path is None:
        return ()
    return (
        f"the initial parameters come from {path.name} (sha256 {digest_of(path)[:16]}...) and count as public: "
        "what they were trained on is not covered",
    )


def _batching(trainer: Trainer, device: torch.device) -> tuple[str, ...]:
    """Name what batching leaves open: that others beside a contribution do not round hers was not tried everywhere."""
    compiled = isinstance(trainer, VmapTrainer) and trainer.compile
    if isinstance(trainer, LoopTrainer) or (device.type == "cpu" and not compiled):
        return ()
    where = "by compiled kernels" if compiled else "on a CUDA device"
    return (
        f"training in batches {where} may round one contribution by those computed beside it, and training at a high "
        "rate makes any difference of that; no bound covers it (trainer.name = 'loop' computes each alone)",
    )


def _resolved(experiment: Experiment, trainer: Trainer) -> Experiment:
    """Return the experiment with the name of the trainer that ``auto`` chose, for whoever reads which one ran."""
    if not isinstance(trainer, LoopTrainer | VmapTrainer | SpanTrainer):
        return experiment
    section = experiment.trainer.model_copy(update={"name": trainer.name})
    return experiment.model_copy(update={"trainer": section})


def privacy_randomness(experiment: Experiment) -> PrivacyRandomness:
    """Return the randomness of noise and sampling: the operating system's, unless a seed was asked for by name."""
    seed = experiment.privacy.insecure_seed
    return PrivacyRandomness.system() if seed is None else PrivacyRandomness.insecure(seed)


def _federation(
    experiment: Experiment, method: Method, population: Population, records: Records, dimension: int
) -> PublicFacts:
    """Return the public facts that the guarantee rests on.

    Records a silo are among them only where the statement names them as counted public; a silo without any is taken for
    one with one, as DP-SGD does.
    """
    counts = None
    published = experiment.method.calibration == "as-published" or experiment.method.scale == "norm"
    if published or isinstance(method.contribution, RecordContribution):
        counts = tuple(max(1, int(n)) for n in records.by_silo(population.n_silos).size)
    return PublicFacts(
        n_silos=population.n_silos,
        n_users=population.n_users,
        silo_records=counts,
        dimension=dimension,
    )


def _accountant(experiment: Experiment, guarantee: Guarantee) -> Accountant:
    """Return the accountant that was asked for, if it has a bound for all that the method releases.

    Raises:
        ConfigError: it has none; names those that have.
    """
    asked = experiment.privacy.accountant
    events = ComposedEvent(events=(guarantee.event, *(view.event for view in guarantee.views)))
    fitting = [name for name in ("pld", "rdp") if make_accountant(name, guarantee.adjacency).supports(events)]
    if asked not in fitting:
        raise ConfigError(
            f"privacy.accountant: '{asked}' has no bound for what {experiment.method.name} releases here; "
            f"{' or '.join(fitting) or 'no accountant'} has"
        )
    return make_accountant(asked, guarantee.adjacency)


def _epsilon_of_steady_noise(experiment: Experiment, method: Method, federation: PublicFacts) -> float:
    """Return what the whole run would spend against the server or readers if its noise stayed that of round 1.

    A published formula gives the noise of every round alike. Noise that falls starts higher, so that the run spends
    the same: methods are compared at one budget.
    """
    steady = derive(replace(method, noise_decay=1.0), federation)
    target = steady.against(Role.READER if method.calibrated_to == "readers" else Role.SERVER)
    assert federation.dimension is not None
    return epsilon_on_grid(
        make_accountant(experiment.privacy.accountant, steady.adjacency),
        steady.after(target, experiment.rounds),
        experiment.privacy.delta,
        steady.grid_loss_after(experiment.rounds, federation.dimension),
    )


def _calibrate(
    experiment: Experiment, population: Population, federation: PublicFacts, epsilon: float
) -> Method:
    """Return the method with the least noise whose whole run spends at most ``epsilon``, as it will be stated.

    Where noise falls from round to round, what is found is that of the first.
    """

    @lru_cache(maxsize=4)
    def claimed(noise_multiplier: float) -> tuple[Method, Guarantee]:
        method, _ = _compose(experiment, population, noise_multiplier)
        return method, derive(method, federation)

    def event(noise_multiplier: float) -> Event:
        method, guarantee = claimed(noise_multiplier)
        target = guarantee.against(Role.READER if method.calibrated_to == "readers" else Role.SERVER)
        return guarantee.after(target, experiment.rounds)

    def loss(noise_multiplier: float) -> float:
        assert federation.dimension is not None
        return claimed(noise_multiplier)[1].grid_loss_after(experiment.rounds, federation.dimension)

    budget = Budget(
        epsilon=epsilon,
        delta=experiment.privacy.delta,
        accountant=make_accountant(
            experiment.privacy.accountant, derive(_compose(experiment, population)[0], federation).adjacency
        ),
    )
    found = calibrate_noise(event, budget, loss=loss)
    return _compose(experiment, population, found)[0]


def _device(experiment: Experiment) -> torch.device:
    wanted = experiment.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device = cuda: no CUDA device is available here; use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
