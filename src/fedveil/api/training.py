"""Train a model on a population from Python, and resume a run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from torch import nn

from fedveil.api import methods
from fedveil.api.callbacks import Callback, CallbackObserver
from fedveil.api.experiment_tables import (
    LOCAL_KEYS,
    class_weights_of,
    data_section,
    lay_over,
    local_section,
    method_section,
    server_section,
    stage_section,
)
from fedveil.api.methods import MethodChoice
from fedveil.api.objective import Beginning, LossLike, MetricLike, Objective, objective
from fedveil.api.result import Result
from fedveil.arguments import explain_arguments, stacklevel_of_caller
from fedveil.config_keys import whole_argument
from fedveil.data.records import Label, Population
from fedveil.errors import ConfigError, RunFolderError, did_you_mean
from fedveil.files import as_path
from fedveil.methods.method import Method
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.run.config.choice import Choice
from fedveil.run.config.experiment import Experiment, flatten_keys, parse
from fedveil.run.config.in_memory_method import SESSION, InMemoryMethod, describe_algorithm
from fedveil.run.config.recommended import METHOD_OF_MODEL, RECOMMENDED
from fedveil.run.config.task_choice import (
    defaults_of,
    loss_of,
    population_facts,
    protection_of,
    training_epsilon,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.populations import FixedPopulation, on_refined_schema, with_schema_file
from fedveil.run.process_group import check_carried
from fedveil.run.remarks import people_warnings
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import continue_run, run
from fedveil.stage import answers
from fedveil.training.local_algorithms import PLAIN, LocalAlgorithm
from fedveil.training.server.averages import Average
from fedveil.training.server.denoise import Denoiser
from fedveil.training.server.optimizers import Optimizer

Table: TypeAlias = str | Mapping[str, Any]
"""A stage by its name, or by its table as in a TOML document."""

_METHOD_TABLES: Final = ("local", "method", "server")
"""Tables of an experiment that a composed method already determines."""


@explain_arguments
def train(
    model: nn.Module | str | Population,
    people: Population | None = None,
    *,
    method: MethodChoice | Method | None = None,
    rounds: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] | None = None,
    local: LocalAlgorithm | None = None,
    local_learning_rate: float | None = None,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    server_learning_rate: float | Literal["by-rule"] | None = None,
    server: Optimizer | None = None,
    average: Average | Table | None = None,
    denoiser: Denoiser | Table | None = None,
    protection: ProtectionStage | Table | None = None,
    start: Literal["zeros", "zero-output"] | None = None,
    class_weight: Mapping[Label, float] | None = None,
    callbacks: Sequence[Callback] = (),
    processes: int = 1,
    seed: int = 0,
    name: str = "run",
    folder: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Train a model on a population's records, and return it with its privacy statement.

    The guarantee is (epsilon, delta)-differential privacy of the models of all rounds, for the unit that the method
    protects. For most methods the unit is one user, with all of the user's records in all silos.
    ``result.statement`` is derived from the method and the charges in the run's ledger. It lists the parties against
    which the guarantee holds, and the exceptions that it does not cover.

    Args:
        model: any ``torch.nn.Module`` that computes each record independently (no BatchNorm that trains), or the name
            of a shipped model or of a factory, ``package.module:factory``. A module is copied and never changed. Its
            initial values count as PUBLIC: do not pass a model that was trained on these people. Left out, as in
            ``fedveil.train(people, epsilon=2)``, a rule of public facts chooses it and prints it (docs/which-model.md).
        people: the records, with the user and the silo of each record, from :func:`fedveil.population`.
        method: a method such as ``fedveil.uldp_avg_w(clip=0.5, epochs=5)``, or a composed ``Method``. A composed
            method has its own noise and its own server optimiser: leave out ``epsilon`` and ``server``. None takes the
            recommended settings for ``epsilon`` (docs/theory/recommended.md); other arguments replace single ones.
        rounds: T, the number of rounds. None: 30; for the method newton 12 (24 if the target is a count), for
            boosted-trees 31.
        epsilon: the target at ``delta``. fedveil finds the smallest noise multiplier for which all rounds stay within
            it. None if the method has a ``noise_multiplier``, or adds no noise. There is no default.
        delta: additive slack of the guarantee: the amount by which a probability may change beyond the factor
            e^epsilon. None: min(1e-5, 1 / (10 n_users)). A delta of 1 / n_users or more is refused unless ``settings``
            contain ``{"privacy": {"allow_large_delta": True}}``.
        loss: a name, a loss of ``torch.nn``, or a function (outputs, targets) -> one term per record. None takes
            cross-entropy, squared error or Cox's partial likelihood, by the task and the model's outputs.
        metrics: names, or functions (outputs, targets, weights) -> number, computed on the test records. They carry no
            noise, and epsilon does not cover them, unless ``settings`` request ``[evaluation]``.
        local: local algorithm, such as ``fedveil.FedProx(mu=0.1)`` or one of your own; None takes plain gradient
            steps.
        local_learning_rate: rate of local training; also a parameter of the method, given once.
        local_epochs: passes of local training over a contribution's records; the method's ``epochs``.
        batch_size: records of a local step; None takes all records of a contribution.
        server_learning_rate: step of the server in mean updates: 1 adds the mean of the users' updates (of the silos',
            where a contribution is a silo). "by-rule" takes min(3, 0.25 / rho), rho the noise-to-travel ratio. None is
            the method's own, which is 1.
        server: optimiser of the server, such as ``fedveil.Sgd(0.5, momentum=0.9)``, with its own rate; None is a plain
            step at ``server_learning_rate``.
        average: which model the run releases: a stage, a name or a table, such as ``{"name": "ema", "beta": 0.8}``.
        denoiser: the server's estimate of the noisy mean, in the same forms.
        protection: what hides a silo's message from the server, in the same forms, such as ``"secure-aggregation"``.
        start: "zeros" sets all parameters of a model of one linear layer to zero, "zero-output" those of the last
            layer. A module is copied first.
        class_weight: DECLARED weight of each class in the loss, by label; weights counted from the records are refused.
        callbacks: callbacks that receive public numbers after every round.
        processes: number of processes that share local training. The call then stands under ``if __name__ ==
            "__main__":``, and model, loss and local algorithm must be importable (docs/how-to/several-processes.md).
        seed: seed of the initial values of a model given by name, of batches and of dropout. The noise does not
            depend on it.
        name: name of the run.
        folder: parent folder of the run folder.
        settings: tables of the experiment that the arguments do not cover, as in a TOML document: ``{"protection":
            {"name": "secure-aggregation"}}``. See docs/reference/experiment.md.

    Returns:
        The result; the run folder contains all of it.

    Raises:
        FedveilError: the model, population, method or budget is invalid; the error is raised before any training.

    Warns:
        TooFewPeopleWarning: noise is more than a quarter of the largest possible movement of the model.
        LargeDeltaWarning: delta is 1 / (10 n_users) or more.
    """
    arguments = TrainingArguments(
        method=method,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        loss=loss,
        metrics=metrics,
        local=local,
        local_learning_rate=local_learning_rate,
        local_epochs=local_epochs,
        batch_size=batch_size,
        server_learning_rate=server_learning_rate,
        server=server,
        average=average,
        denoiser=denoiser,
        protection=protection,
        start=start,
        class_weight=class_weight,
        processes=processes,
        seed=seed,
        name=name,
        settings=settings,
    )
    parent = as_path(folder, "fedveil.train: folder")
    prepared, learned = arguments.prepare(model, people)
    return play(prepared, learned, parent, callbacks)


def play(
    prepared: Prepared, objective: Objective, parent: Path, callbacks: Sequence[Callback] = ()
) -> Result:
    """Run a prepared experiment in a new folder under ``parent``, and return its result.

    Args:
        prepared: the experiment with its population and model.
        objective: the initial model, with its loss and metrics.
        parent: parent folder of the run folder.
        callbacks: callbacks that receive public numbers after every round.

    Warns:
        TooFewPeopleWarning, LargeDeltaWarning: as :func:`train`.
    """
    people = prepared.population
    for warning in people_warnings(prepared):
        warnings.warn(warning, stacklevel=stacklevel_of_caller())
    watch = CallbackObserver(prepared, callbacks, public_test=people.public_test)
    again = partial(_prepared, people=people, objective=objective)
    outcome = watch.until_the_end(lambda: run(prepared, parent, watch, prepare_again=again))
    experiment = RunFolder(outcome.folder).with_refined_schema(prepared.experiment)
    people = with_schema_file(people, experiment.data)
    return Result.from_outcome(outcome, experiment, objective, people)


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The arguments of :func:`train` that determine an experiment, with the same names and meanings."""

    method: MethodChoice | Method | None
    rounds: int | None
    epsilon: float | None
    delta: float | None
    loss: LossLike | None
    metrics: Sequence[MetricLike] | None
    local: LocalAlgorithm | None
    local_learning_rate: float | None
    local_epochs: int | None
    batch_size: int | None
    server_learning_rate: float | Literal["by-rule"] | None
    server: Optimizer | None
    average: Average | Table | None
    denoiser: Denoiser | Table | None
    protection: ProtectionStage | Table | None
    start: Literal["zeros", "zero-output"] | None
    class_weight: Mapping[Label, float] | None
    processes: int
    seed: int
    name: str
    settings: Mapping[str, Any] | None

    @classmethod
    def bind(cls, function: str, arguments: Mapping[str, Any]) -> TrainingArguments:
        """Return the arguments of a call of :func:`train`; those that are left out have their defaults.

        Args:
            function: name of the function that was called, for errors.
            arguments: the keyword arguments, without ``callbacks`` and ``folder``.

        Raises:
            ConfigError: an argument is missing, or does not exist.
        """
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(train).parameters.items()
            if name in _FIELDS
        }
        for name in arguments:
            if name not in parameters:
                raise ConfigError(
                    f"{function}: no argument '{name}'; there are, as of fedveil.train: {', '.join(parameters)}"
                    f"{did_you_mean(name, parameters)}"
                )
        values = {name: arguments.get(name, parameter.default) for name, parameter in parameters.items()}
        for name, value in values.items():
            if value is inspect.Parameter.empty:
                raise ConfigError(f"{function}: {name} is needed, as of fedveil.train")
        return cls(**values)

    def for_table(self, people: Any) -> tuple[str, Population, TrainingArguments]:
        """Choose model, method, rounds and protection for a table by public facts, and print the choice.

        Returns:
            The name of the chosen model, the population, and the arguments with the choice in them.

        Raises:
            ConfigError: ``people`` is not a population, its records are not rows of a table, epsilon is missing, or an
                argument is given that depends on the model.
        """
        if not isinstance(people, Population):
            raise ConfigError(
                "people: a population is needed (fedveil.data): fedveil.train(model, people, ...)"
            )
        if len(people.feature_shape) != 1:
            raise ConfigError(
                f"model: needed for records of shape {people.feature_shape}; without one, a model is chosen for tables"
            )
        for name in _MODEL_ARGUMENTS:
            if getattr(self, name) is not None:
                raise ConfigError(f"model: needed where {name} is given; without a model, both are chosen")
        _check(people, None, self.epsilon)
        assert self.epsilon is not None
        section = (
            {} if self.protection is None else stage_section("protections", "protection", self.protection)
        )
        tables = lay_over({"protection": section}, self.settings)
        protection = protection_of(tables)
        facts = population_facts(people, training_epsilon(self.epsilon, tables), protection)
        chosen = RECOMMENDED.table_model(facts)
        print(chosen)
        if chosen.method is None:
            return chosen.model, people, self
        masked = not protection and 1 < people.n_silos <= RECOMMENDED.most_silos
        arguments = replace(
            self,
            method=methods.method(chosen.method, power="linked", **chosen.keys),
            rounds=chosen.rounds if self.rounds is None else self.rounds,
            loss=loss_of(chosen, facts),
            protection="secure-aggregation" if masked else self.protection,
        )
        return chosen.model, people, arguments

    def prepare(
        self, model: nn.Module | str | Population, people: Population | None
    ) -> tuple[Prepared, Objective]:
        """Check all arguments, and return the prepared experiment and the initial model; train and charge nothing.

        Args:
            model: as for :func:`train`.
            people: as for :func:`train`.

        Raises:
            FedveilError: as for :func:`train`.
        """
        if people is None:
            model, people, chosen = self.for_table(model)
            return chosen.prepare(model, people)
        if isinstance(model, Population):
            raise ConfigError(
                "model: a torch.nn.Module or a name is needed before the population, not a population"
            )
        if self.method is None and isinstance(model, str) and model in METHOD_OF_MODEL:
            return self._for_own_method(METHOD_OF_MODEL[model], people).prepare(model, people)
        method, epsilon = self.method, self.epsilon
        _check(people, method, epsilon)
        if isinstance(method, Method):
            _refuse_repeated({name: getattr(self, name) for name in _METHOD_ARGUMENTS}, self.settings)
        # The arguments become a document, as if read from a file: the run folder stores it, and the checks of an
        # experiment's file apply to it.
        seed = whole_argument("fedveil.train: seed", self.seed)
        learned = self._objective(model, people, seed)
        delta = RECOMMENDED.delta_for(people.n_users) if self.delta is None else self.delta
        document: dict[str, Any] = {
            "name": self.name,
            "seed": seed,
            "data": data_section(people),
            "model": dict(learned.section),
            "server": self._server(),
            "privacy": {"delta": delta} | ({} if epsilon is None else {"epsilon": epsilon}),
        }
        if self.rounds is not None:
            document["rounds"] = self.rounds
        if (processes := whole_argument("fedveil.train: processes", self.processes, least=1)) > 1:
            document["trainer"] = {"processes": processes}
        if self.protection is not None:
            document["protection"] = stage_section("protections", "protection", self.protection)
        if local := local_section(method, {name: getattr(self, name) for name in LOCAL_KEYS}):
            document["local"] = local
        if isinstance(method, MethodChoice):
            document |= {"method": method_section(method, epsilon)} | (
                {} if method.local is None else {"local": local}
            )
        elif method is not None:
            document["method"] = InMemoryMethod.from_method(method)
        experiment = parse(lay_over(document, self.settings), "fedveil.train")
        if self.local is not None:
            experiment = _with_algorithm(experiment, self.local)
        return _prepared(experiment, people, learned), learned

    def _for_own_method(self, method: str, people: Population) -> TrainingArguments:
        """Return the arguments for a model that one method alone can train, such as boosted trees.

        The method's weights are "linked": a user counts in the silo with most of the user's records. Without a
        protection among the arguments, secure aggregation is taken for up to ``RECOMMENDED.most_silos`` silos.
        """
        _check(people, None, self.epsilon)
        has_protection = self.protection is not None or "protection" in (self.settings or {})
        masked = not has_protection and 1 < people.n_silos <= RECOMMENDED.most_silos
        return replace(
            self,
            method=methods.method(method, power="linked"),
            loss=defaults_of(None, people).loss if self.loss is None else self.loss,
            protection="secure-aggregation" if masked else self.protection,
        )

    def _objective(self, model: nn.Module | str, people: Population, seed: int) -> Objective:
        """Return the checked model, loss and metrics."""
        start: str | None = self.start
        if start is None and self.method is None and isinstance(model, str) and ":" not in model:
            start = "zero-output"
        weights = class_weights_of(self.class_weight, people)
        return objective(model, people, seed, self.loss, self.metrics, Beginning(start, weights))

    def _server(self) -> dict[str, Any]:
        """Return the table ``[server]``."""
        section = server_section(self.server, self.server_learning_rate)
        for key, kind in (("average", "averages"), ("denoiser", "denoisers")):
            if (stage := getattr(self, key)) is not None:
                section[key] = stage_section(kind, key, stage)
        return section


_FIELDS: Final = frozenset(field.name for field in fields(TrainingArguments))


@explain_arguments
def resume(
    folder: str | Path,
    model: nn.Module | str | Population,
    people: Population | None = None,
    *,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] | None = None,
    callbacks: Sequence[Callback] = (),
    method: Method | None = None,
    local: LocalAlgorithm | None = None,
) -> Result:
    """Resume a run after its last complete round, with the objects with which it began.

    A round that was charged but not completed is charged again, with a new sample of users, because its result may have
    been seen.

    Args:
        folder: the run folder.
        model: the model that was passed to :func:`train`, with the same initial values. If it is left out, as in
            ``fedveil.resume(folder, people)``, the run folder's experiment must name the model.
        people: the same population.
        loss: the loss that was passed to :func:`train`; None: the one that the run folder's experiment names.
        metrics: the metrics that were passed to :func:`train`; None: those that the run folder's experiment names.
        callbacks: callbacks that receive public numbers after every further round.
        method: the composed ``Method`` with which the run began; None if the run began with a named method.
        local: the local algorithm that was passed to :func:`train`; None for an algorithm with a registered name.

    Returns:
        The result of the whole run.

    Raises:
        RunFolderError: the folder is not a run folder or is damaged, or the run began with another model, other data,
            another loss or other metrics; the error names the difference.
    """
    opened, experiment = RunFolder.open(as_path(folder, "fedveil.resume: folder"))
    if people is None and isinstance(model, Population) and not _in_session(experiment.model.name):
        assert experiment.model.name is not None, "a run folder's experiment names its model"
        people, model = model, experiment.model.name
    if not isinstance(people, Population) or isinstance(model, Population):
        raise ConfigError(
            "people: the population is needed after the folder and the model: fedveil.resume(folder, model, people)"
        )
    if loss is None and experiment.model.loss is not None and not _in_session(experiment.model.loss):
        loss = experiment.model.loss
    if metrics is None and experiment.model.metrics and not any(map(_in_session, experiment.model.metrics)):
        metrics = experiment.model.metrics
    people = on_refined_schema(opened.path, experiment.data, people)
    experiment = experiment.model_copy(update={"method": _same_method(opened, experiment, method)})
    begun = Beginning(experiment.model.start, experiment.model.class_weights)
    if local is not None:
        experiment = _with_same_algorithm(opened, experiment, local)
    learned = objective(model, people, experiment.seed, loss, metrics, begun)
    # Compare what the objects of this call would record with the recorded experiment: the digest of a model, the
    # names of loss and metrics, and the public facts of the data. The loop names the first difference.
    recorded = flatten_keys(experiment.model_dump(mode="json"))
    for key, value in flatten_keys({"data": data_section(people), "model": learned.section}).items():
        original = recorded.get(key)
        if original != value:
            raise RunFolderError(
                f"{opened.path}: the run began with another {key}: {_words(original)}, and now it is {_words(value)}; "
                "hand over what it began with, or train in a folder of its own"
            )
    prepared = _prepared(experiment, people, learned)
    watch = CallbackObserver(prepared, callbacks, public_test=people.public_test)
    again = partial(_prepared, people=people, objective=learned)
    outcome = watch.until_the_end(lambda: continue_run(opened, prepared, watch, again))
    experiment = opened.with_refined_schema(prepared.experiment)
    people = with_schema_file(people, experiment.data)
    return Result.from_outcome(outcome, experiment, learned, people)


def _in_session(name: str | None) -> bool:
    """Return whether a name stands for a Python object that was passed in, which a document cannot hold."""
    return name is None or ":" in name


def _check(people: Any, method: Any, epsilon: float | None) -> None:
    """Check the types of population and method, and that there is an epsilon if there is no method."""
    if not isinstance(people, Population):
        raise ConfigError(f"people: a population is needed (fedveil.data), not {type(people).__name__}")
    if method is None and epsilon is None:
        raise ConfigError(
            "epsilon: needed; there is no default. fedveil.train(model, people, epsilon=2) takes the recommended "
            "settings, fedveil.train(model, people, method=fedveil.uldp_avg_w(clip=0.5), epsilon=2) a method of yours"
        )
    if method is None:
        return
    if not isinstance(method, MethodChoice | Method):
        name = getattr(method, "__name__", None)
        own = isinstance(name, str) and getattr(methods, name, None) is method
        correction = (
            f"call it: fedveil.{name}(...)"
            if own
            else f"not {'a builder: call it' if inspect.isroutine(method) else type(method).__name__}"
        )
        raise ConfigError(
            f"method: a method is needed, such as fedveil.uldp_avg_w(clip=0.5) or a Method: {correction}"
        )


def _refuse_repeated(arguments: Mapping[str, Any], settings: Mapping[str, Any] | None) -> None:
    """Refuse arguments and settings that a composed method already determines."""
    from_settings = {f"settings: {key}": key for key in settings or () if key in _METHOD_TABLES}
    for name, value in {**arguments, **from_settings}.items():
        if value is not None:
            raise ConfigError(
                f"{name}: a composed method has its own noise, local steps and server; change the composition "
                "(dataclasses.replace) instead"
            )


def _same_method(folder: RunFolder, experiment: Experiment, method: Method | None) -> Choice:
    """Return the method of a run; a composed method must equal the one with which the run began.

    Raises:
        ConfigError: the run began with a composed method and ``method`` is None, or the run began with a named method
            and ``method`` is not None.
        RunFolderError: the composed method is another one; the error names the first stage that differs.
    """
    began = experiment.method
    if not began.name.startswith(SESSION):
        if method is not None:
            raise ConfigError(
                f"method: {folder.path} knows that it began with {began.name}; leave method out"
            )
        return began
    if not isinstance(method, Method):
        raise ConfigError(
            f"method: {folder.path} began with a composed Method ({began.name}); hand over the same"
        )
    now = InMemoryMethod.from_method(method)
    for stage in began.keys["stages"] | now.keys["stages"]:
        before, current = (choice.keys["stages"].get(stage) for choice in (began, now))
        if before != current:
            raise RunFolderError(
                f"{folder.path}: the run began with another method: its {stage} was {before}, and now it is {current}; "
                "hand over what it began with, or train in a folder of its own"
            )
    return now


def _with_algorithm(experiment: Experiment, algorithm: LocalAlgorithm) -> Experiment:
    """Return the experiment with a local algorithm that was passed as an object.

    Raises:
        ConfigError: the object is not a local algorithm, the method has no local training, or ``settings`` name a local
            algorithm too.
    """
    if isinstance(algorithm, type):
        name = algorithm.__name__
        raise ConfigError(f"local: {name} is a class; hand over an algorithm of it: {name}(...)")
    if not answers(algorithm, "slope"):
        raise ConfigError(
            f"local: a local algorithm is needed, such as fedveil.FedProx(mu=0.1), not {type(algorithm).__name__}"
        )
    if experiment.local is None:
        raise ConfigError(f"local: {experiment.method.name} takes no local steps; leave local out")
    if experiment.local.algorithm != PLAIN:
        raise ConfigError("local: settings name a local algorithm too; leave one of the two out")
    return experiment.model_copy(update={"local": replace(experiment.local, algorithm=algorithm)})


def _with_same_algorithm(folder: RunFolder, experiment: Experiment, algorithm: LocalAlgorithm) -> Experiment:
    """Return the experiment of a run with its local algorithm, which must equal the one that it began with.

    Raises:
        RunFolderError: the run began with another local algorithm.
    """
    began = PLAIN if experiment.local is None else experiment.local.algorithm
    plain = experiment
    if experiment.local is not None:
        plain = experiment.model_copy(update={"local": replace(experiment.local, algorithm=PLAIN)})
    now = _with_algorithm(plain, algorithm)
    before, current = (describe_algorithm(candidate) for candidate in (began, algorithm))
    if before != current:
        raise RunFolderError(
            f"{folder.path}: the run began with another local algorithm: {before}, and now it is {current}; hand over "
            "what it began with, or train in a folder of its own"
        )
    return now


_MODEL_ARGUMENTS: Final = (
    *("method", "loss", "local", "local_learning_rate", "local_epochs", "batch_size", "server_learning_rate"),
    *("server", "average", "denoiser", "start", "class_weight"),
)
"""Arguments that depend on the model; a call without a model must leave them out."""
_METHOD_ARGUMENTS: Final = (
    *(
        "epsilon",
        "local",
        "local_learning_rate",
        "local_epochs",
        "batch_size",
        "server_learning_rate",
        "server",
    ),
    *("average", "denoiser", "protection"),
)
"""Arguments that a composed method already determines."""


def _prepared(experiment: Experiment, people: Population, objective: Objective) -> Prepared:
    prepared = prepare(experiment, FixedPopulation(people, "this"), objective.task)
    check_carried(prepared)
    return prepared


def _words(value: Any) -> str:
    """Return a value as text for an error; a text of 64 characters is a digest and is abbreviated."""
    text = "none" if value is None else str(value)
    return f"{text[:16]}..." if len(text) == 64 else text
