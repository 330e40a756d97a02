"""Choose the model of a table by public facts: Newton steps, boosted trees or the recommended settings.

``fedveil.train(people, epsilon=2)`` and an experiment on ``data.table`` that names neither a model nor a method use
this rule. It reads the schema, the number of silos and the budget, never a record. So the choice costs no privacy and
is the same for all parties. The choice is written into the experiment before it is validated: a federation signs the
chosen model, method and number of rounds. docs/which-model.md has the figures behind the rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fedveil.data.records import Population
from fedveil.data.schema import Label, Schema, read_schema
from fedveil.data.tables import TASKS
from fedveil.errors import ConfigError
from fedveil.run.config.experiment import BudgetSection, Experiment, parse
from fedveil.run.config.recommended import RECOMMENDED
from fedveil.run.config.task_choice import BY_TASK

MOST_CLASSES: Final = 10
"""Number of classes up to which Newton steps are chosen."""
TREES_FROM: Final = 7_500
"""Users times epsilon from which on boosted trees are chosen for a table of few columns."""
TREES_FROM_A_COLUMN: Final = 1_000
"""The same for each column; the larger of the two decides."""
_OF_A_MODEL: Final = ("local", "sampler", "channel", "server")
"""Tables that belong to a model or a method, and are refused where the rule chooses both."""
_LEFT_OPEN: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("metrics",),
    "method": ("power", "colluding_silos"),
}
"""Keys that a document may have in [model] and [method] and still leave the choice to the rule."""


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """Public facts of a table, from which its model is chosen.

    Attributes:
        task: kind of the targets.
        classes: k; None for other targets.
        n_users: |U|.
        columns: number of declared columns; of a table without a schema the number of features.
        scaled: whether a schema scales the features to [-1, 1].
        bounded: whether a number to predict has declared bounds.
        epsilon: of training, without the shares of other releases.
    """

    task: str
    classes: int | None
    n_users: int
    columns: int
    scaled: bool
    bounded: bool
    epsilon: float

    @classmethod
    def from_schema(cls, schema: Schema, epsilon: float) -> TableFacts:
        """Return the facts that a schema declares."""
        target = schema.target
        return cls(
            task=TASKS[target.kind],
            classes=len(target.classes) if isinstance(target, Label) else None,
            n_users=schema.n_users,
            columns=len(schema.features),
            scaled=True,
            bounded=schema.target_range is not None,
            epsilon=epsilon,
        )

    @classmethod
    def from_population(cls, people: Population, epsilon: float) -> TableFacts:
        """Return the facts of a population: those of its schema, or those that its holder declared."""
        if people.schema is not None:
            return cls.from_schema(people.schema, epsilon)
        return cls(
            task=people.task,
            classes=people.n_classes,
            n_users=people.n_users,
            columns=people.feature_shape[0],
            scaled=False,
            bounded=people.target_range is not None,
            epsilon=epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class TableModel:
    """The model that the rule chooses for a table.

    Attributes:
        model: name of the model.
        method: name of the method; None: the recommended settings.
        rounds: T.
        reason: the facts that decided, in one sentence.
    """

    model: str
    method: str | None
    rounds: int
    reason: str

    def __str__(self) -> str:
        return f"model {self.model}, method {self.method or 'recommended'}: {self.reason}"

    def tables(self, n_silos: int | None) -> dict[str, Any]:
        """Return the tables of an experiment; with 2 to 50 silos they ask for secure aggregation.

        Args:
            n_silos: |S|; None if it is not known yet.
        """
        found = RECOMMENDED.tables(n_silos, denoises=self.method is None)
        if self.method is None:
            found["model"]["name"] = self.model
            return found
        masked = {"protection": found["protection"]} if "protection" in found else {}
        return {
            "rounds": self.rounds,
            "model": {"name": self.model},
            "method": {"name": self.method, "power": "linked", "noise_multiplier": "calibrated"},
        } | masked


def choose_table_model(facts: TableFacts) -> TableModel:
    """Return the model for a table by public facts."""
    linear = TableModel(model="linear", method=None, rounds=RECOMMENDED.rounds, reason="")
    if facts.task == "survival":
        return replace(
            linear, reason="newton needs a declared horizon for survival, and there are no trees for it"
        )
    if facts.task not in ("classification", "regression"):
        return replace(linear, reason=f"{facts.task} has no Newton step and no tree here")
    if facts.task == "regression" and not facts.bounded:
        return replace(linear, reason="the number to predict has no declared bounds, which the others need")
    if (facts.classes or 2) > MOST_CLASSES:
        return replace(linear, reason=f"Newton steps were compared on up to {MOST_CLASSES} classes")
    evidence, needed = facts.n_users * facts.epsilon, max(TREES_FROM, TREES_FROM_A_COLUMN * facts.columns)
    newton = TableModel(model="whitened-linear", method="newton", rounds=12, reason="")
    if facts.task == "regression":
        return replace(newton, reason="trees lost against it where a number was predicted")
    if not facts.scaled:
        return replace(newton, reason="no schema scales the features to [-1, 1], as trees need")
    if (facts.classes or 2) > 2:
        return replace(newton, reason=f"{facts.classes} classes, and trees were compared on two")
    compared = f"{facts.n_users:,} users x epsilon {facts.epsilon:.4g} = {evidence:,.0f}"
    limit = f"{needed:,}, from which on trees are taken for {facts.columns} columns"
    if evidence < needed:
        return replace(newton, reason=f"{compared} is below {limit}")
    return TableModel(
        model="boosted-trees", method="boosted-trees", rounds=31, reason=f"{compared} reaches {limit}"
    )


def training_epsilon(epsilon: float, document: Mapping[str, Any]) -> float:
    """Return about the epsilon that training has: epsilon times the root of its share of mu^2.

    Args:
        epsilon: ``privacy.epsilon``.
        document: the tables of an experiment. A share that is no number counts as its default, and is left to the
            validation of the document.

    >>> training_epsilon(3.0, {"privacy": {"share": 0.25}})
    1.5
    """
    budget, defaults = _table(document, "budget"), BudgetSection()
    rest = 1 - _number(budget.get("votes"), defaults.votes)
    for name in ("preprocessing", "evaluation"):
        if name in document:
            rest -= _number(budget.get(name), getattr(defaults, name))
    return epsilon * math.sqrt(max(0.0, rest * _number(_table(document, "privacy").get("share"), 1.0)))


def parse_in_folder(document: dict[str, Any], origin: str, folder: Path) -> Experiment:
    """Validate an experiment whose paths are relative to a folder; choose the model of a table if none is named.

    Args:
        document: the nested tables.
        origin: name of the document in an error.
        folder: folder of the document.

    Raises:
        FedveilError: a wrong document, or, where a model is chosen, a wrong schema.
    """
    return parse(_with_table_model(document, origin, folder), origin).resolve_paths(folder)


def describe_choice(experiment: Experiment, people: Population) -> str | None:
    """Return the rule's reason if the experiment of a table has the model, method and rounds of the rule; else None.

    Every party derives the same sentence, because it reads the experiment and public facts alone.
    """
    epsilon = experiment.privacy.epsilon
    if people.schema is None or experiment.data.table is None or epsilon is None:
        return None
    given = experiment.model_dump(mode="json", exclude_none=True)
    chosen = choose_table_model(TableFacts.from_population(people, training_epsilon(epsilon, given)))
    tables = chosen.tables(people.n_silos)
    found = (experiment.model.name, experiment.method.name, experiment.rounds)
    if found != (tables["model"]["name"], tables["method"]["name"], tables["rounds"]):
        return None
    return (
        f"model {found[0]}, method {found[1]} and {found[2]} rounds are those that a rule of public facts takes for "
        f"this table: {chosen.reason}"
    )


def _with_table_model(document: dict[str, Any], origin: str, folder: Path) -> dict[str, Any]:
    """Return the document with the settings of the chosen model, if it leaves model and method of a table open.

    Raises:
        ConfigError: a key that belongs to a model or a method.
    """
    source, given = _table(document, "data").get("table"), _table(document, "privacy").get("epsilon")
    if not isinstance(source, Mapping) or not isinstance(source.get("schema_file"), str):
        return document
    epsilon = _number(given, 0.0)
    if not epsilon > 0 or any("name" in _table(document, key) for key in _LEFT_OPEN):
        return document
    for key in _keys_of_a_model(document):
        raise ConfigError(
            f"{origin}: {key} belongs to a model or a method, and without model.name and method.name both are chosen "
            'by public facts: remove it, or name the model, such as model.name = "linear"'
        )
    schema = read_schema(folder / source["schema_file"])
    facts = TableFacts.from_schema(schema, training_epsilon(epsilon, document))
    files = source.get("files")
    n_silos = len(files) if isinstance(files, list | tuple) else None
    found = choose_table_model(facts).tables(n_silos if schema.silos is None else len(schema.silos))
    found["model"]["loss"] = BY_TASK["two classes" if facts.classes == 2 else facts.task].loss
    for key, value in document.items():
        found[key] = found[key] | value if key in _LEFT_OPEN and isinstance(value, Mapping) else value
    return found


def _keys_of_a_model(document: Mapping[str, Any]) -> list[str]:
    """Return the keys of a document that only a named model or method can read."""
    found = [f"[{name}]" for name in _OF_A_MODEL if name in document]
    for table, open_keys in _LEFT_OPEN.items():
        found += [f"{table}.{key}" for key in _table(document, table) if key not in open_keys]
    return found


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any, default: float) -> float:
    """Return a finite number of a document that is not validated yet; else the default."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else default
