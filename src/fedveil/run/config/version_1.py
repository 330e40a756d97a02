"""Read experiments of schema version 1, in which the server's learning rate was a key of the method.

Version 1 divided the sum of (silo, user) pairs by q |U| |S|, so that a rate of |S| stepped by the mean update of a
user. Version 2 divides by q |U|: a rate of 1 steps by the mean update, for every method. The keys moved as well:

    version 1                        version 2
    method.learning_rate = r         server.learning_rate = r / |S| for pairs, r for other methods
    server.optimizer.learning_rate   server.learning_rate, converted in the same way for sgd
    server.optimizer.tau = t         server.optimizer.tau = t |S| for pairs (fedadam, fedyogi)

|S| may be unknown until the population is read. So reading moves the keys, and preparing a run converts the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedveil.errors import ConfigError
from fedveil.registry import BUILTINS

if TYPE_CHECKING:
    from fedveil.run.config.experiment import Experiment

PAIRS: Final = ("uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w")
"""Methods whose contributions are (silo, user) pairs."""
_RATE: Final = "learning_rate"
_ADAPTIVE: Final = ("fedadam", "fedyogi")
"""Optimizers whose rate is in the unit of a parameter, and whose tau is in mean updates."""


def move_rates(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document of version 1 with its rates at the keys of version 2, in the units of version 1."""
    method, server = _table(document, "method"), _table(document, "server")
    optimizer = _table(server, "optimizer")
    if method.get("name") in BUILTINS["methods"] and method["name"] != "newton":
        rate = method.pop(_RATE, 1.0)
        if not optimizer:
            server.setdefault(_RATE, rate)
    if optimizer.get("name") in BUILTINS["optimizers"] and _RATE in optimizer:
        server[_RATE] = optimizer.pop(_RATE)
        server["optimizer"] = optimizer
    return {**document, **({"method": method} if method else {}), **({"server": server} if server else {})}


def in_mean_updates(experiment: Experiment, n_silos: int) -> Experiment:
    """Return an experiment of version 1 as one of version 2: rates in mean updates.

    Args:
        experiment: read from a document of version 1.
        n_silos: |S|.

    Raises:
        ConfigError: a method whose unit is unknown: it was composed in Python, or comes from another package.
    """
    method, server = experiment.method, experiment.server
    if method.name not in BUILTINS["methods"]:
        raise ConfigError(
            f"schema_version: an experiment of version 1 with the method '{method.name}', whose learning rate may be "
            "in another unit here; run it with the version of fedveil that wrote it"
        )
    update: dict[str, Any] = {}
    if method.name in PAIRS:
        rate, optimizer = server.learning_rate, server.optimizer
        adaptive = optimizer is not None and optimizer.name in _ADAPTIVE
        if not adaptive and isinstance(rate, float | int):
            update["learning_rate"] = rate / n_silos
        if adaptive and optimizer is not None:
            keys = {**optimizer.keys, "tau": optimizer.keys["tau"] * n_silos}
            update["optimizer"] = replace(optimizer, keys=keys)
    return experiment.model_copy(
        update={"schema_version": 2, "server": server.model_copy(update=update)},
    )


def explain_old_rate(document: Mapping[str, Any]) -> str | None:
    """Return how to write a rate that a document has at a key of version 1; None if it has none."""
    method, optimizer = _table(document, "method"), _table(_table(document, "server"), "optimizer")
    known = method.get("name") in BUILTINS["methods"]
    if known and _RATE in method:
        return f"method.{_RATE}: {_instead(method[_RATE], method['name'], document)}"
    if optimizer.get("name") in BUILTINS["optimizers"] and _RATE in optimizer:
        adaptive = optimizer["name"] in _ADAPTIVE
        pairs = "" if adaptive else str(method.get("name"))
        also = (
            "; tau is in mean updates of a user, so that the tau of (silo, user) pairs is |S| times as large as before"
            if adaptive and method.get("name") in PAIRS
            else ""
        )
        return f"server.optimizer.{_RATE}: {_instead(optimizer[_RATE], pairs, document)}{also}"
    return None


def _instead(rate: Any, method: str, document: Mapping[str, Any]) -> str:
    """Return a sentence with the new setting that replaces an old rate."""
    said = "the server's rate is server.learning_rate, in mean updates of a user; in place of"
    if method not in PAIRS or isinstance(rate, str) or not isinstance(rate, float | int):
        return f"{said} {rate!r} write server.learning_rate = {rate!r}"
    n_silos = _table(document, "data").get("n_silos")
    if isinstance(n_silos, int) and n_silos > 0:
        return f"{said} {rate:g} write server.learning_rate = {rate / n_silos:g}, which is {rate:g} / |S|"
    return f"{said} {rate:g} write server.learning_rate = {rate:g} / |S|, |S| the number of silos"


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a table of a document; empty if the document has none."""
    found = document.get(key)
    return dict(found) if isinstance(found, Mapping) else {}
