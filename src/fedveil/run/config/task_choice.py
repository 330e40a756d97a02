"""Choose what an experiment leaves open: model, loss and metrics, and on tables the model and the method.

An experiment may name import paths, and a run folder may come from another person: reading it must run no code of that
person's choice. Stages, methods and data sets are members of installed packages (:mod:`fedveil.registry`). A model, a
loss or a metric may be any object of any module that Python finds. A user who begins a run names them in the
experiment. A user who resumes, audits or bundles a folder states by name which of them to trust (:func:`check_code`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fedveil.data.catalogue import data_set
from fedveil.data.records import Population
from fedveil.data.schema import Amount, Amounts, Label, Labels, Schema, Survival, Target, read_schema
from fedveil.errors import ConfigError
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import BudgetSection, Experiment, refuse_session
from fedveil.run.config.in_memory_method import SESSION
from fedveil.run.config.recommended import RECOMMENDED, TableFacts, TableModel, subtable
from fedveil.sanitize import sanitize
from fedveil.training.losses import ClassWeighted, Metric, load_loss
from fedveil.training.metrics import load_metrics
from fedveil.training.models import STARTS, build_model
from fedveil.training.pretrained import PublicModel, take_parameters
from fedveil.training.task import Task
from fedveil.training.validation import validate_loss


class Defaults(NamedTuple):
    """Default model, loss and metrics."""

    model: str
    loss: str
    metrics: tuple[str, ...]


BY_TASK: Final[Mapping[str, Defaults]] = {
    "classification": Defaults("linear", "cross_entropy", ("accuracy", "loss")),
    "two classes": Defaults("linear", "binary_cross_entropy", ("auc", "accuracy", "loss")),
    "multi-label": Defaults(
        "linear", "multi_label_cross_entropy", ("auc", "average_precision", "accuracy", "loss")
    ),
    "multi-output": Defaults("linear", "squared_error", ("r2", "mae", "loss")),
    "regression": Defaults("linear", "squared_error", ("r2", "mae", "loss")),
    "survival": Defaults("linear", "cox", ("c_index", "loss")),
}
"""Model, loss and metrics if neither the experiment nor the data set names them."""


def defaults_of(source: str | None, population: Population) -> Defaults:
    """Return the default model, loss and metrics: those of the data set, or of the kind of target.

    Args:
        source: name of the data set; None for tables and for data passed in Python.
        population: the population of the run.
    """
    default = BY_TASK["two classes" if population.n_classes == 2 else population.task]
    if source is None:
        return default
    chosen = data_set(source)
    return Defaults(
        model=chosen.model or default.model,
        loss=chosen.loss or default.loss,
        metrics=chosen.metrics or default.metrics,
    )


def task_of(experiment: Experiment, population: Population, begin: PublicModel | None = None) -> Task:
    """Build the model that an experiment names, with its loss and its metrics.

    Args:
        experiment: names the model, loss and metrics.
        population: the population of the run.
        begin: public model with the initial parameters; None: as the experiment's ``start`` and ``seed`` define.

    Raises:
        FedveilError: a name that does not exist, or a loss that does not fit the targets.
    """
    section = experiment.model
    for key, named in (
        ("name", section.name),
        ("loss", section.loss),
        *(("metrics", metric) for metric in section.metrics or ()),
    ):
        refuse_session(f"model.{key}", named or "")
    default = defaults_of(experiment.data.name, population)
    loss = load_loss(section.loss or default.loss)
    loss.check_task(population.task)
    outputs = 1 if loss.name == "binary_cross_entropy" else population.n_outputs
    validate_loss(loss, population.task, outputs, torch.from_numpy(population.train.targets))
    model = build_model(
        section.name or default.model,
        input_shape=population.feature_shape,
        n_outputs=outputs,
        randomness=ExperimentRandomness(experiment.seed),
    )
    STARTS[section.start](model)
    if begin is not None:
        take_parameters(model, begin, section.initial_layers)
    if section.class_weights is not None:
        loss = ClassWeighted(loss, section.class_weights, population.n_classes)
    loss.check_targets(torch.from_numpy(population.train.targets), outputs)
    loss.check_targets(torch.from_numpy(population.test_targets), outputs)
    metrics = dict[str, Metric]()
    for name in section.metrics or default.metrics:
        metrics |= load_metrics(name, loss, population.task, population.target_names)
    return Task(model=model, loss=loss, metrics=metrics)


def beginning(experiment: Experiment) -> tuple[Experiment, PublicModel | None]:
    """Return the experiment with the digest of its initial model, and the initial model itself.

    The path belongs to the user's machine. The digest identifies the file: silos receive, state and sign it, and a
    resumed run must match it. The file is read once, so that the hashed bytes are the trained ones.

    Returns:
        The experiment and the public model; None if the experiment names no initial model.

    Raises:
        ModelError: the file does not exist.
        ConfigError: the experiment names another digest.
    """
    path, declared = experiment.model.initial, experiment.model.sha256
    if path is None:
        return experiment, None
    begin = PublicModel.read(path)
    digest = begin.sha256
    if declared not in (None, digest):
        raise ConfigError(
            f"model.initial: {path} has the SHA-256 {digest}, and model.sha256 is {declared}: give the file that it is "
            "of, or remove model.sha256"
        )
    named = experiment.model.model_copy(update={"sha256": digest})
    return experiment.model_copy(update={"model": named}), begin


# --- experiments on tables without a model or method ---

_DECIDED: Final = ("local", "server")
"""Tables of a document that belong to a method: with one of them, the document has decided for itself."""


def complete_for_table(document: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], TableModel | None]:
    """Return a document with model, loss, method, rounds and protection for its table, and the choice.

    The rule is that of :func:`fedveil.train` without a model (:meth:`Recommended.table_model`): the schema and epsilon
    decide, and no record is read. A document is returned as it is if it is not on tables, has no ``privacy.epsilon``,
    names a model, or has one of the tables ``[method]``, ``[local]`` and ``[server]``. Its own ``rounds``,
    ``[protection]`` and ``method.power`` (the file of main silos, which institutions share) stay.

    Args:
        document: the tables of an experiment, not validated yet.
        folder: relative paths in the document start here.

    Raises:
        ConfigError: the schema cannot be read.
    """
    privacy, model, data, method = (subtable(document, key) for key in ("privacy", "model", "data", "method"))
    table, epsilon = subtable(data, "table"), privacy.get("epsilon")
    schema_file, files = table.get("schema_file"), table.get("files")
    if any(key in document for key in _DECIDED) or set(model) - {"metrics"} or set(method) - {"power"}:
        return dict(document), None
    if not isinstance(schema_file, str) or not isinstance(epsilon, int | float) or isinstance(epsilon, bool):
        return dict(document), None
    schema = read_schema(folder / schema_file)
    facts = schema_facts(schema, training_epsilon(epsilon, document), protection_of(document))
    chosen = RECOMMENDED.table_model(facts)
    completed = dict(document) | {
        "model": {"loss": loss_of(chosen, facts)} | dict(model) | {"name": chosen.model}
    }
    power = method.get("power", "linked")
    if chosen.method is None and method:
        completed = RECOMMENDED.complete({key: value for key, value in completed.items() if key != "method"})
        completed["method"] = completed["method"] | {"power": power}
    elif chosen.method is not None:
        n_silos = len(schema.silos or (files if isinstance(files, list) else ()))
        completed = {"rounds": chosen.rounds} | completed
        completed["method"] = {
            "name": chosen.method,
            "power": power,
            "noise_multiplier": "calibrated",
            **chosen.keys,
        }
        if 1 < n_silos <= RECOMMENDED.most_silos:
            completed.setdefault("protection", {"name": "secure-aggregation"})
    return completed, chosen


def is_bounded(target: Target) -> bool:
    """Return whether a number to predict has declared bounds, or survival a declared horizon."""
    if isinstance(target, Survival):
        return target.horizon is not None
    return isinstance(target, Amount) and target.bounds is not None


def schema_facts(schema: Schema, epsilon: float, protection: str = "") -> TableFacts:
    """Return the public facts of a table, as its schema declares them.

    Args:
        schema: the declared columns and target.
        epsilon: epsilon of training (:func:`training_epsilon`).
        protection: name of the protection that was asked for; "" for none.
    """
    target = schema.target
    kinds = {Label: "classification", Amount: "regression", Labels: "multi-label", Amounts: "multi-output"}
    bounds = target.bounds if isinstance(target, Amount) and target.count else None
    return TableFacts(
        task=kinds.get(type(target), "survival"),
        classes=len(target.classes) if isinstance(target, Label) else None,
        n_users=schema.n_users,
        columns=len(schema.features),
        features=schema.width,
        scaled=True,
        bounded=is_bounded(target),
        epsilon=epsilon,
        largest_count=None if bounds is None else int(bounds[1]),
        protection=protection,
    )


def population_facts(people: Population, epsilon: float, protection: str = "") -> TableFacts:
    """Return the public facts of a population: those of its schema, or those that its holder declared."""
    if people.schema is not None:
        return schema_facts(people.schema, epsilon, protection)
    return TableFacts(
        task=people.task,
        classes=people.n_classes,
        n_users=people.n_users,
        columns=people.feature_shape[0],
        features=people.feature_shape[0],
        scaled=False,
        bounded=people.target_range is not None,
        epsilon=epsilon,
        protection=protection,
    )


def loss_of(chosen: TableModel, facts: TableFacts) -> str:
    """Return the loss of a chosen model: its own, or that of the kind of target."""
    return chosen.loss or BY_TASK["two classes" if facts.classes == 2 else facts.task].loss


def protection_of(document: Mapping[str, Any]) -> str:
    """Return the name of the protection that a document asks for; "" without one."""
    return str(subtable(document, "protection").get("name", ""))


def training_epsilon(epsilon: float, document: Mapping[str, Any]) -> float:
    """Return about the epsilon of training: epsilon times the root of its share of mu^2.

    Noise grows with 1 / sqrt(share), so that epsilon falls about with sqrt(share).

    Args:
        epsilon: ``privacy.epsilon``.
        document: the tables of an experiment. A share that is no number counts as its default; the validation of the
            document refuses it.

    >>> training_epsilon(3.0, {"privacy": {"share": 0.25}})
    1.5
    >>> round(training_epsilon(2.0, {"evaluation": {}, "budget": {"evaluation": 0.19}}), 6)
    1.8
    """
    budget, defaults = subtable(document, "budget"), BudgetSection()
    share = 1 - _number(budget.get("votes"), defaults.votes)
    for name in ("preprocessing", "evaluation"):
        if document.get(name) is not None:
            share -= _number(budget.get(name), getattr(defaults, name))
    return epsilon * math.sqrt(max(0.0, share * _number(subtable(document, "privacy").get("share"), 1.0)))


def describe_choice(experiment: Experiment, people: Population) -> str | None:
    """Return the rule's reason if an experiment on tables has the model, method and rounds of the rule; else None.

    Every party derives the same sentence, because it reads the experiment and public facts alone.
    """
    epsilon = experiment.privacy.epsilon
    if people.schema is None or experiment.data.table is None or epsilon is None:
        return None
    document = experiment.model_dump(mode="json", exclude_none=True)
    protection = protection_of(document)
    facts = population_facts(
        people, training_epsilon(epsilon, document), protection if protection != "none" else ""
    )
    try:
        chosen = RECOMMENDED.table_model(facts)
    except ConfigError:  # the rule has no model for survival without a horizon
        return None
    actual = (experiment.model.name, experiment.method.name, experiment.rounds)
    if actual != (chosen.model, chosen.method or "uldp-avg-w", chosen.rounds):
        return None
    return (
        f"model {actual[0]}, method {actual[1]} and {actual[2]} rounds are those that a rule of public facts takes for "
        f"this table: {chosen.reason}"
    )


def _number(value: Any, default: float) -> float:
    """Return a finite number of a document that is not validated yet; else the default."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if valid else default


# --- code that an experiment names ---


def find_named_code(experiment: Experiment) -> dict[str, str]:
    """Return the import paths that an experiment names, each with its first key; nothing is imported."""
    model = experiment.model
    named = [("model.name", model.name), ("model.loss", model.loss)]
    named += [("model.metrics", metric) for metric in model.metrics or ()]
    keys_by_path: dict[str, str] = {}
    for key, path in named:
        if path is not None and ":" in path and not path.startswith(SESSION):
            keys_by_path.setdefault(path, key)
    return keys_by_path


def check_code(experiment: Experiment, trusted: Collection[str], folder: Path) -> None:
    """Check that all code named by a run folder's experiment is trusted, before any of it is imported.

    Args:
        experiment: the experiment of the folder.
        trusted: import paths that the reader of the folder names.
        folder: the run folder, for errors.

    Raises:
        ConfigError: the experiment names other code; the message lists it, and how to trust it.
    """
    strange = {path: key for path, key in find_named_code(experiment).items() if path not in trusted}
    if not strange:
        return
    names = ", ".join(f"{key} = '{sanitize(path)}'" for path, key in strange.items())
    allowed = " ".join(f"--code {sanitize(path)}" for path in strange)
    raise ConfigError(
        f"{folder}: its experiment names code of this machine that would be imported and run: {names}. "
        f"A run folder may come from another person; if you trust that code to run on what this folder holds, "
        f"say so: {allowed}"
    )
