"""Train a model over a population, and resume a run: the engine behind the commands, called from Python."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn

from fedveil.api import methods
from fedveil.api.callbacks import Callback, CallbackObserver
from fedveil.api.methods import MethodChoice
from fedveil.api.objective import LossLike, MetricLike, Objective, objective
from fedveil.api.result import Result
from fedveil.config_keys import whole_argument
from fedveil.data.records import Population
from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import as_path
from fedveil.methods.method import Method
from fedveil.run.config.choice import Choice, choice_of
from fedveil.run.config.experiment import Experiment, TableSection, flatten_keys, merge, parse
from fedveil.run.config.in_memory_method import SESSION, InMemoryMethod
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import continue_run, run
from fedveil.training.server.optimizers import Optimizer

_OWN: Final = ("local", "method", "server")
"""Tables of an experiment that a composed method has in it."""

_NOT_LAID_OVER: Final = frozenset({"schema_version", "data", "model", "name", "preprocessing"})
"""What the arguments say; and what would read tables again, which have been handed over."""


def train(
    model: nn.Module | str,
    people: Population,
    *,
    method: MethodChoice | Method,
    rounds: int,
    epsilon: float | None = None,
    delta: float = 1e-5,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] | None = None,
    server: Optimizer | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    name: str = "run",
    folder: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Train a model on a population's records, in one process, and return it with its privacy statement.

    The guarantee is (epsilon, delta)-differential privacy of the models of all rounds, for the unit that the method
    protects: for most methods one user, with all of the user's records in all silos. ``result.statement`` is derived
    from the method and from what the run's ledger was charged; it says against whom the guarantee holds, and what it
    does not cover.

    Args:
        model: any ``torch.nn.Module`` that computes each record by itself (no BatchNorm), or the name of a shipped
            model or of a factory, ``package.module:factory``. A module is copied, never changed, and its initial
            values count as PUBLIC: do not hand over a model that was trained on these people.
        people: the records, with the user and the silo of each, from :func:`fedveil.data`.
        method: such as ``fedveil.uldp_avg_w(clip=0.5, epochs=5)``. Or a composed ``Method``: it has its own noise and
            its own server optimiser, so leave out ``epsilon`` and ``server``.
        rounds: T, the number of rounds.
        epsilon: the target at ``delta``. The smallest noise multiplier is found for which all rounds stay within it.
            None if the method is given its ``noise_multiplier``, or adds no noise.
        delta: by how much a probability may change beyond the factor e^epsilon; choose it well below 1 / n_users. From
            there on it is refused, unless ``settings`` say ``{"privacy": {"allow_large_delta": True}}``.
        loss: a name, a loss of ``torch.nn``, or a function (outputs, targets) -> one term for each record. None takes
            cross-entropy, squared error or Cox's partial likelihood, by the task and the model's outputs.
        metrics: names, or functions (outputs, targets, weights) -> number, computed on the test records. They carry no
            noise, and epsilon does not cover them, unless ``settings`` ask for ``[evaluation]``.
        server: the server's optimiser, such as ``fedveil.Sgd(20.0)``; None is ``Sgd(1.0)``.
        callbacks: called after every round with public numbers.
        seed: for the initial values of a model given by name, for batches and for dropout. Noise never comes from it.
        name: of the run folder.
        folder: in which run folders are created.
        settings: tables of the experiment that the arguments do not cover, as in a TOML document: ``{"protection":
            {"name": "secure-aggregation"}}``. See docs/reference/experiment.md.

    Returns:
        The result. All of it is also in its run folder.

    Raises:
        FedveilError: a mistake in model, population, method or budget, reported before any training.
    """
    _check(people, method)
    folder = as_path(folder, "fedveil.train: folder")
    if isinstance(method, Method):
        _check_whole({"epsilon": epsilon, "server": server}, settings)
    seed = whole_argument("fedveil.train: seed", seed)
    learned = objective(model, people, seed, loss, metrics)
    document: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "rounds": rounds,
        "data": _data(people),
        "model": dict(learned.section),
        "method": _method(method, epsilon)
        if isinstance(method, MethodChoice)
        else InMemoryMethod.from_method(method),
        "server": _server(server),
        "privacy": {"delta": delta} | ({} if epsilon is None else {"epsilon": epsilon}),
    }
    if isinstance(method, MethodChoice) and method.local is not None:
        document["local"] = dict(method.local)
    experiment = parse(_laid_over(document, settings), "fedveil.train")
    prepared = _prepared(experiment, people, learned)
    watch = CallbackObserver(prepared, callbacks, public_test=people.public_test)
    outcome = watch.until_the_end(lambda: run(prepared, folder, watch))
    return Result.from_outcome(outcome, learned.module, people)


def resume(
    folder: str | Path,
    model: nn.Module | str,
    people: Population,
    *,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] | None = None,
    callbacks: Sequence[Callback] = (),
    method: Method | None = None,
) -> Result:
    """Resume a run after its last complete round, with the objects with which it began.

    A round that was charged but not completed is drawn and charged again, because nobody can show that its result was
    not seen.

    Args:
        folder: the run folder.
        model: the model that was given to :func:`train`, with the same initial values.
        people: the same population.
        loss: as it was given to :func:`train`.
        metrics: as they were given to :func:`train`.
        callbacks: called after every further round.
        method: the composed ``Method`` with which the run began, if there was one.

    Returns:
        The result of the whole run.

    Raises:
        RunFolderError: no run folder, a damaged one, or one that began with another model, other data, another loss or
            other metrics; the error names what differs.
    """
    opened, experiment = RunFolder.open(as_path(folder, "fedveil.resume: folder"))
    if not isinstance(people, Population):
        raise ConfigError(f"people: a population is needed (fedveil.data), not {type(people).__name__}")
    experiment = experiment.model_copy(update={"method": _same_method(opened, experiment, method)})
    learned = objective(model, people, experiment.seed, loss, metrics)
    recorded = flatten_keys(experiment.model_dump(mode="json"))
    for key, value in flatten_keys({"data": _data(people), "model": learned.section}).items():
        found = recorded.get(key)
        if found != value:
            raise RunFolderError(
                f"{opened.path}: the run began with another {key}: {_words(found)}, and now it is {_words(value)}; "
                "hand over what it began with, or train in a folder of its own"
            )
    prepared = _prepared(experiment, people, learned)
    watch = CallbackObserver(prepared, callbacks, public_test=people.public_test)
    outcome = watch.until_the_end(lambda: continue_run(opened, prepared, watch))
    return Result.from_outcome(outcome, learned.module, people)


def _check(people: Any, method: Any) -> None:
    if not isinstance(people, Population):
        raise ConfigError(f"people: a population is needed (fedveil.data), not {type(people).__name__}")
    if not isinstance(method, MethodChoice | Method):
        name = getattr(method, "__name__", None)
        own = isinstance(name, str) and getattr(methods, name, None) is method
        what = (
            f"call it: fedveil.{name}(...)"
            if own
            else f"not {'a builder: call it' if inspect.isroutine(method) else type(method).__name__}"
        )
        raise ConfigError(
            f"method: a method is needed, such as fedveil.uldp_avg_w(clip=0.5) or a Method: {what}"
        )


def _check_whole(given: Mapping[str, Any], settings: Mapping[str, Any] | None) -> None:
    """Refuse beside a composed method what it has itself."""
    laid_over = {f"settings: {key}": key for key in settings or () if key in _OWN}
    for name, value in {**given, **laid_over}.items():
        if value is not None:
            raise ConfigError(
                f"{name}: a composed method has its own noise, local steps and server; change the composition "
                "(dataclasses.replace) instead"
            )


def _same_method(folder: RunFolder, experiment: Experiment, method: Method | None) -> Choice:
    """Return the method of a run, with the composition that it began with if it was composed.

    Raises:
        ConfigError: none is handed over to a run that was composed, or one to a run that names its method.
        RunFolderError: another one; names the first stage that differs.
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
        before, here = (one.keys["stages"].get(stage) for one in (began, now))
        if before != here:
            raise RunFolderError(
                f"{folder.path}: the run began with another method: its {stage} was {before}, and now it is {here}; "
                "hand over what it began with, or train in a folder of its own"
            )
    return now


def _data(people: Population) -> dict[str, Any]:
    source = people.source
    if source is not None:
        table = TableSection(
            schema_file=source.schema_file,
            files=source.files,
            test_file=source.test_file,
            test_share=source.test_share,
        )
        return {"table": table.model_dump(mode="json"), "seed": source.seed}
    return {"name": f"{SESSION}{people.name}", "n_users": people.n_users, "n_silos": people.n_silos}


def _method(method: MethodChoice, epsilon: float | None) -> dict[str, Any]:
    section = {"name": method.name, **method.parameters}
    noise = section.get("noise_multiplier")
    if epsilon is not None and not method.takes_noise:
        raise ConfigError(
            f"epsilon: {method.name} adds no noise, so no epsilon can be met; leave epsilon out"
        )
    if epsilon is not None and noise is not None and not isinstance(noise, str):
        raise ConfigError(
            "epsilon: the target that noise is found for, but noise_multiplier is given too; leave one of them out, or "
            'stop at a budget: settings={"privacy": {"budget": ...}}'
        )
    if method.takes_noise and noise is None:
        if epsilon is None:
            raise ConfigError(
                f"epsilon: {method.name} needs epsilon=, for which noise is found, or noise_multiplier="
            )
        section["noise_multiplier"] = "calibrated"
    return section


def _server(server: Optimizer | None) -> dict[str, Any]:
    if server is None:
        return {}
    chosen = choice_of("optimizers", server)
    if chosen is None:
        name = type(server).__name__
        if isinstance(server, Optimizer):
            raise ConfigError(
                f"server: {name} is no optimiser that fedveil or an installed package registers; take "
                "fedveil.Sgd, Adam or "
                "Yogi, or register it under the entry points fedveil.optimizers"
            )
        raise ConfigError(f"server: a server optimiser is needed, such as fedveil.Sgd(1.0), not {name}")
    return {"optimizer": chosen.document()}


def _laid_over(document: dict[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    if settings is None:
        return document
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "settings: tables by name are needed, such as {'trainer': {'device': 'cpu'}}, not "
            f"{type(settings).__name__}"
        )
    known = sorted(set(Experiment.model_fields) - _NOT_LAID_OVER)
    for table in settings:
        if table not in known:
            raise ConfigError(
                f"settings: no table or key '{table}' to lay over; known here: {', '.join(known)}"
            )
    return merge(document, dict(settings))


def _prepared(experiment: Experiment, people: Population, learned: Objective) -> Prepared:
    if experiment.trainer.processes > 1:
        raise ConfigError(
            "trainer.processes: what is handed over in Python is in this process alone; leave processes at 1"
        )
    return prepare(experiment, FixedPopulation(people, "this"), learned.task)


def _words(value: Any) -> str:
    text = "none" if value is None else str(value)
    return f"{text[:16]}..." if len(text) == 64 else text
