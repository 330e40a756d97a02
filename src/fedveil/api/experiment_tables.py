"""Tables of an experiment, as in a TOML document, from the arguments of :func:`fedveil.train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedveil.api.methods import MethodChoice
from fedveil.data.memory_tables import declared_path
from fedveil.data.records import Label, Population
from fedveil.errors import ConfigError
from fedveil.methods.method import Method
from fedveil.run.config.choice import choice_of
from fedveil.run.config.experiment import Experiment, TableSection, merge
from fedveil.run.config.in_memory_method import SESSION
from fedveil.training.server.optimizers import Optimizer

_NOT_LAID_OVER: Final = frozenset({"schema_version", "data", "model", "name"})
"""Tables that ``settings`` may not contain: the arguments determine them."""


def data_section(people: Population) -> dict[str, Any]:
    """Return the table ``[data]``: the table files if the population has them, else its public facts."""
    source = people.source
    if source is not None:
        table = TableSection(
            schema_file=source.schema_file,
            files=tuple(map(declared_path, source.files)),
            test_file=None if source.test_file is None else declared_path(source.test_file),
            test_share=source.test_share,
        )
        return {"table": table.model_dump(mode="json"), "seed": source.seed}
    # Records in memory have no location that a later process could read.
    return {"name": f"{SESSION}{people.name}", "n_users": people.n_users, "n_silos": people.n_silos}


def method_section(method: MethodChoice, epsilon: float | None) -> dict[str, Any]:
    """Return the table ``[method]``; the noise multiplier is "calibrated" if epsilon determines it.

    Raises:
        ConfigError: epsilon and a fixed noise multiplier are given, or neither, or the method adds no noise.
    """
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


LOCAL_KEYS: Final = {
    "local_learning_rate": "learning_rate",
    "local_epochs": "epochs",
    "batch_size": "batch_size",
}
"""Keys of the table ``[local]`` by the arguments that set them."""


def local_section(method: MethodChoice | Method | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table ``[local]`` of a method and of the arguments of local training.

    Raises:
        ConfigError: the method and an argument set the same key, or the method does not train locally.
    """
    section = dict(method.local or {}) if isinstance(method, MethodChoice) else {}
    for argument, value in arguments.items():
        if value is None:
            continue
        if isinstance(method, MethodChoice) and method.local is None:
            raise ConfigError(f"{argument}: {method.name} does not train locally; leave it out")
        if LOCAL_KEYS[argument] in section:
            raise ConfigError(f"{argument}: the method has it too; give it once")
        section[LOCAL_KEYS[argument]] = value
    return section


def stage_section(kind: str, argument: str, stage: Any) -> dict[str, Any]:
    """Return the table of a stage that was given as a name, a table or a value.

    Raises:
        ConfigError: a value of a class that nobody registers.
    """
    if isinstance(stage, str):
        return {"name": stage}
    if isinstance(stage, Mapping):
        return dict(stage)
    chosen = choice_of(kind, stage)
    if chosen is None:
        raise ConfigError(
            f"{argument}: a name, a table or a registered stage is needed, not {type(stage).__name__}"
        )
    return chosen.document()


def class_weights_of(weights: Mapping[Label, float] | None, people: Population) -> tuple[float, ...] | None:
    """Return the declared weights in the order of the classes.

    Raises:
        ConfigError: no mapping, or a class without a weight, or a weight of no class.
    """
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise ConfigError(
            "class_weight: a weight for each class is needed, such as {'sick': 5.0, 'well': 1.0}, from public "
            "knowledge of how rare a class is; weights counted from the records ('balanced') reveal the class counts"
        )
    classes = people.classes or tuple(range(people.n_classes or 0))
    if set(weights) != set(classes):
        named = ", ".join(map(str, classes)) or "no classes"
        raise ConfigError(f"class_weight: one weight for each of {named} is needed")
    return tuple(weights[label] for label in classes)


def server_section(server: Optimizer | None, learning_rate: float | str | None) -> dict[str, Any]:
    """Return the table ``[server]``.

    Raises:
        ConfigError: an optimiser that nobody registers, or two learning rates.
    """
    if server is None:
        return {} if learning_rate is None else {"learning_rate": learning_rate}
    if learning_rate is not None:
        raise ConfigError("server_learning_rate: server= has a learning rate of its own; give one of the two")
    chosen = choice_of("optimizers", server)
    if chosen is None:
        raise ConfigError(
            "server: a server optimiser is needed that fedveil or an installed package registers, such as "
            f"fedveil.Sgd(0.5), not {type(server).__name__}; an own class is registered under the entry points "
            "fedveil.optimizers"
        )
    rate = {"learning_rate": getattr(server, "learning_rate", None)} if chosen.needs("learning_rate") else {}
    return {"optimizer": chosen.document(), **rate}


def lay_over(document: dict[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the document with ``settings`` merged over it.

    Raises:
        ConfigError: the settings are no mapping, or contain an unknown table or one that the arguments determine.
    """
    if settings is None:
        return document
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "settings: tables by name are needed, such as {'trainer': {'device': 'cpu'}}, not "
            f"{type(settings).__name__}"
        )
    allowed = sorted(set(Experiment.model_fields) - _NOT_LAID_OVER)
    for table in settings:
        if table not in allowed:
            raise ConfigError(
                f"settings: no table or key '{table}' to lay over; known here: {', '.join(allowed)}"
            )
    preprocessing = settings.get("preprocessing")
    if isinstance(preprocessing, Mapping) and preprocessing.get("pool"):
        raise ConfigError(
            "settings: preprocessing.pool changes the number of features, and the model was handed over; leave it out, "
            "or train from files (fedveil run)"
        )
    return merge(document, dict(settings))
