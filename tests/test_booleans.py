"""Neither true nor "1" is a 1: keys that want a number refuse true, false and text, and others numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

import fedveil
from fedveil.data.schema import Schema
from fedveil.errors import CompositionError, ConfigError
from fedveil.federation.hosts.folders import CoordinatorSettings
from fedveil.federation.hosts.link_folder import LinkSettings
from fedveil.federation.policy import Policy
from fedveil.registry import BUILTINS
from fedveil.run.config.choice import section_of
from fedveil.run.config.experiment import EvaluationSection, Experiment
from fedveil.statistics.inference.request import LinearInference
from fedveil.statistics.request import ColumnRelease
from fedveil.training.steps import LocalSgd
from fedveil.validation import validate_document

SAMPLES: tuple[Any, ...] = (0.5, 1, 0.05, 2.0, "linear", "a", [1.0, 2.0], {"a": 0.5}, {}, 2048, 0, True)
MEMBERS = [(kind, name) for kind in BUILTINS if kind != "data_sets" for name in BUILTINS[kind]]
NUMERIC = ("int'", "float'", "bool'", "int,", "float,")

EXPERIMENT: dict[str, Any] = {
    "schema_version": 2,
    "name": "one",
    "seed": 0,
    "rounds": 3,
    "evaluate_every": 1,
    "data": {"name": "digits", "n_users": 10, "n_silos": 2, "seed": 3, "allocation": {"user_exponent": 0.5}},
    "model": {"class_weights": [1.0, 2.0]},
    "local": {"learning_rate": 0.1, "epochs": 1},
    "trainer": {"memory_mb": 64, "processes": 1, "compile": False},
    "method": {"name": "uldp-avg", "clip": {"start": 0.1}, "noise_multiplier": 1.0},
    "protection": {"name": "secure-aggregation", "max_dropouts": 1},
    "server": {"optimizer": {"name": "sgd", "momentum": 0.5, "nesterov": True}},
    "privacy": {"delta": 1e-5, "budget": 3.0, "colluding_silos": 0, "insecure_seed": 4},
}
SCHEMA = {
    "n_users": 10,
    "user": "patient",
    "target": {"kind": "number", "column": "days", "lower": 0, "upper": 9.5},
    "features": {"age": {"kind": "number", "lower": 0, "upper": 9, "missing": "middle", "fill": 4.5}},
}
LINEAR = {
    "family": "linear",
    "cut": 3,
    "centre": 1.5,
    "bound": 2.0,
    "scale": {"age": {"centre": 6, "scale": 13}},
}
COLUMN = {"bins": 4, "quantiles": [0.5], "lower": 0, "upper": 9, "weight": 2}
METRICS = {"bins": 16, "max_standard_error": 4, "horizons": [2.5]}

DOCUMENTS: dict[type[BaseModel], dict[str, Any]] = {
    Experiment: EXPERIMENT,
    Schema: SCHEMA,
    LinearInference: LINEAR,
    ColumnRelease: COLUMN,
    EvaluationSection: METRICS,
}
TABLES = [*(section_of(*member) for member in MEMBERS), Policy, LinkSettings, CoordinatorSettings]


def _swapped(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Give the path of every number in a value, and the value with true or text there; and of every boolean, with 1."""
    if isinstance(value, bool):
        yield ".".join(above), int(value)
        yield ".".join(above), str(value).lower()
    elif isinstance(value, int | float):
        yield ".".join(above), True
        yield ".".join(above), False
        yield ".".join(above), str(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from ((path, {**value, key: one}) for path, one in _swapped(inner, (*above, key)))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            changed = _swapped(inner, (*above, str(at)))
            yield from ((path, [*value[:at], one, *value[at + 1 :]]) for path, one in changed)


def test_every_table_of_every_document_keeps_true_text_and_numbers_apart() -> None:
    bases = [
        (path.name, name)
        for path in sorted(Path(fedveil.__file__).parent.rglob("*.py"))
        for name in re.findall(
            r"^class (\w+)\([^)]*\bBaseModel\b", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert bases == [("validation.py", "DocumentTable")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda kind: kind.__name__)
def test_true_and_text_are_no_numbers_at_any_depth_of_a_document(document: type[BaseModel]) -> None:
    document.model_validate(DOCUMENTS[document])
    changed = list(_swapped(DOCUMENTS[document]))
    assert len(changed) >= 6
    for path, wrong in changed:
        with pytest.raises(ConfigError, match=f"file: {path.replace('.', '[.]')}(: must be | = '4': )"):
            validate_document(document, wrong, "file")


@pytest.mark.parametrize("table", TABLES, ids=lambda kind: kind.__name__)
def test_true_and_text_are_no_numbers_for_any_key_of_a_member_or_of_a_party(table: type[BaseModel]) -> None:
    required = {
        name: next(value for value in SAMPLES if _fits(one, value))
        for name, one in table.model_fields.items()
        if one.is_required()
    }
    for name, section in table.model_fields.items():
        right = [one for one in SAMPLES if _reads(table, {**required, name: one})]
        wrong = [one for value in right for _, one in _swapped(value)]
        for value in wrong:
            with pytest.raises(ConfigError, match=f"file: {name}"):
                validate_document(table, {**required, name: value}, "file")
        assert wrong or not any(one in str(section.annotation) for one in NUMERIC), name


def _fits(section: FieldInfo, value: Any) -> bool:
    try:
        TypeAdapter(section.annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _reads(table: type[BaseModel], document: dict[str, Any]) -> bool:
    try:
        table.model_validate(document)
    except ValidationError:
        return False
    return True


def test_a_stage_built_in_python_refuses_true_for_a_number() -> None:
    with pytest.raises(CompositionError, match="epochs = True: a whole number >= 1 is needed"):
        LocalSgd(learning_rate=0.1, epochs=True)
