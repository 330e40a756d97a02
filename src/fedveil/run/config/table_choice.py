"""Choose model, method, rounds and protection of a table by public facts.

An experiment on ``data.table`` that names neither model nor method, and ``fedveil.train(people, epsilon=2)``, use the
same rule (:meth:`Recommended.table_model`). It reads the schema, the number of silos and the budget, never a record,
so the choice costs no privacy and is the same for all parties. docs/which-model.md has the figures behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fedveil.data.records import Population
from fedveil.data.schema import Amount, Amounts, Label, Labels, Schema, read_schema
from fedveil.run.config.experiment import BudgetSection, Experiment
from fedveil.run.config.recommended import RECOMMENDED, TableFacts, TableModel, subtable
from fedveil.run.config.task_choice import BY_TASK

_DECIDED: Final = ("local", "server")
"""Tables of a document that belong to a method: with one of them, the document has decided for itself."""


def complete_for_table(document: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], TableModel | None]:
    """Return a document with model, loss, method, rounds and protection for its table, and the choice.

    A document is returned as it is if it is not on tables, has no ``privacy.epsilon``, names a model, or has one of the
    tables ``[method]``, ``[local]`` and ``[server]``. Its own ``rounds``, ``[protection]`` and ``method.power`` (the
    file of main silos, which institutions share) stay.

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
    loss = loss_of(chosen, facts)
    found = dict(document) | {"model": {"loss": loss} | dict(model) | {"name": chosen.model}}
    power = method.get("power", "linked")
    if chosen.method is None and method:
        found = RECOMMENDED.complete({key: value for key, value in found.items() if key != "method"})
        found["method"] = found["method"] | {"power": power}
    elif chosen.method is not None:
        n_silos = len(schema.silos or (files if isinstance(files, list) else ()))
        found = {"rounds": chosen.rounds} | found
        found["method"] = {"name": chosen.method, "power": power, "noise_multiplier": "calibrated"} | dict(
            chosen.keys
        )
        if 1 < n_silos <= RECOMMENDED.most_silos:
            found.setdefault("protection", {"name": "secure-aggregation"})
    return found, chosen


def schema_facts(schema: Schema, epsilon: float, protection: str = "") -> TableFacts:
    """Return the public facts of a table, as its schema declares them."""
    target = schema.target
    kinds = {Label: "classification", Amount: "regression", Labels: "multi-label", Amounts: "multi-output"}
    bounds = target.bounds if isinstance(target, Amount) else None
    return TableFacts(
        task=kinds.get(type(target), "survival"),
        classes=len(target.classes) if isinstance(target, Label) else None,
        n_users=schema.n_users,
        columns=len(schema.features),
        scaled=True,
        bounded=bounds is not None,
        epsilon=epsilon,
        largest_count=int(bounds[1]) if isinstance(target, Amount) and target.count and bounds else None,
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
    rest = 1 - _number(budget.get("votes"), defaults.votes)
    for name in ("preprocessing", "evaluation"):
        if document.get(name) is not None:
            rest -= _number(budget.get(name), getattr(defaults, name))
    return epsilon * math.sqrt(max(0.0, rest * _number(subtable(document, "privacy").get("share"), 1.0)))


def describe_choice(experiment: Experiment, people: Population) -> str | None:
    """Return the rule's reason if an experiment on tables has the model, method and rounds of the rule; else None.

    Every party derives the same sentence, because it reads the experiment and public facts alone.
    """
    epsilon = experiment.privacy.epsilon
    if people.schema is None or experiment.data.table is None or epsilon is None:
        return None
    given = experiment.model_dump(mode="json", exclude_none=True)
    asked = protection_of(given)
    facts = population_facts(people, training_epsilon(epsilon, given), asked if asked != "none" else "")
    chosen = RECOMMENDED.table_model(facts)
    found = (experiment.model.name, experiment.method.name, experiment.rounds)
    if found != (chosen.model, chosen.method or "uldp-avg-w", chosen.rounds):
        return None
    return (
        f"model {found[0]}, method {found[1]} and {found[2]} rounds are those that a rule of public facts takes for "
        f"this table: {chosen.reason}"
    )


def _number(value: Any, default: float) -> float:
    """Return a finite number of a document that is not validated yet; else the default."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else default
