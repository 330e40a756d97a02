"""Choice of model and method for an experiment on tables whose document names neither."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fedveil.data.schema import Amount, Amounts, Label, Labels, Schema, Survival, Target, read_schema
from fedveil.run.config.recommended import RECOMMENDED, TableFacts, TableModel, subtable
from fedveil.run.config.task_choice import BY_TASK

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
    # A part of a study's budget; noise grows with 1 / sqrt(share), so that epsilon falls about with sqrt(share).
    share = privacy.get("share", 1.0)
    part = math.sqrt(share) if isinstance(share, int | float) and 0 < share <= 1 else 1.0
    facts = _facts(schema, part * float(epsilon))
    chosen = RECOMMENDED.table_model(facts)
    default = BY_TASK["two classes" if facts.classes == 2 else facts.task]
    found = dict(document) | {"model": {"loss": default.loss} | dict(model) | {"name": chosen.model}}
    power = method.get("power", "linked")
    if chosen.method is None and method:
        found = RECOMMENDED.complete({key: value for key, value in found.items() if key != "method"})
        found["method"] = found["method"] | {"power": power}
    elif chosen.method is not None:
        n_silos = len(schema.silos or (files if isinstance(files, list) else ()))
        found = {"rounds": chosen.rounds} | found
        found["method"] = {"name": chosen.method, "power": power, "noise_multiplier": "calibrated"}
        if 1 < n_silos <= RECOMMENDED.most_silos:
            found.setdefault("protection", {"name": "secure-aggregation"})
    return found, chosen


def is_bounded(target: Target) -> bool:
    """Return whether a number to predict has declared bounds, or survival a declared horizon."""
    if isinstance(target, Survival):
        return target.horizon is not None
    return isinstance(target, Amount) and target.bounds is not None


def _facts(schema: Schema, epsilon: float) -> TableFacts:
    """Return the public facts of a table, as its schema declares them."""
    target = schema.target
    kinds = {Label: "classification", Amount: "regression", Labels: "multi-label", Amounts: "multi-output"}
    return TableFacts(
        task=kinds.get(type(target), "survival"),
        classes=len(target.classes) if isinstance(target, Label) else None,
        n_users=schema.n_users,
        columns=len(schema.features),
        scaled=True,
        bounded=is_bounded(target),
        epsilon=epsilon,
    )
