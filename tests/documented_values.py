"""The documented values of every key of an experiment or of a release, read off types and registries; and those played.

A value is written as the reference has it: the words of a choice, `true` and `false`, a member's name, `none` where a
key may be left out. Of a range there is `a number`, and each end of it that belongs to it and can be played.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from torch import Tensor, nn

from fedveil.config_keys import Key, keys_of
from fedveil.registry import find, names
from fedveil.run.config.choice import Choice, ChoiceField, StageField, own_keys
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import TableDocument
from fedveil.statistics.inference.request import Inference
from fedveil.statistics.request import SHOWN, Request
from fedveil.training.losses import LOSSES
from fedveil.training.metrics import METRIC_NAMES
from fedveil.training.models import MODELS

Value = tuple[str, str]
"""A key and one of its values."""

OWN: Final = "package.module:name"
NUMBER, TEXT, LIST, EMPTY, TABLE, NONE = "a number", "text", "a list", "an empty list", "a table", "none"
NAMED: Final = {
    "data.name": names("data_sets"),
    "model.name": (*MODELS, OWN),
    "model.loss": (*LOSSES, OWN),
    "model.metrics": (*METRIC_NAMES, OWN),
    "statistics.release[ColumnRelease].show": SHOWN,
}
"""Texts whose values the reference lists."""
_MOST: Final = 1000
"""The largest end of a range that a test can play."""


@cache
def documented() -> frozenset[Value]:
    """Return every documented value of every key."""
    return frozenset(
        (*_of_table(Experiment, ""), *_of_tables(Inference, "inference"), *_of_table(Request, "statistics."))
    )


def played(document: Experiment | TableDocument) -> set[Value]:
    """Return the values that an experiment, or a document of a release, has."""
    if isinstance(document, Experiment):
        return set(_in_table(document, ""))
    return set(
        _in_value(document.table, getattr(document, document.table), _hints(type(document))[document.table])
    )


# --- what is documented ---------------------------------------------------------------------------------------------


def _of_table(table: type[BaseModel], above: str) -> Iterator[Value]:
    for name, hint in _hints(table).items():
        key, mark = f"{above}{name}", _mark(hint)
        if _is_optional(hint):
            yield key, NONE
        if isinstance(mark, ChoiceField):
            for member in names(mark.kind):
                yield f"{key}.name", member
                for one in own_keys(find(mark.kind, member).load()):
                    yield from _of_key(one, f"{key}[{member}].{one.name}")
        elif isinstance(mark, StageField):
            for one in own_keys(mark.stage):
                yield from _of_key(one, f"{key}.{one.name}")
        elif _sections(hint):
            yield from _of_tables(hint, key)
        elif key in NAMED:
            yield from ((key, value) for value in NAMED[key])
        else:
            yield from ((key, value) for value in _labels(hint))


def _of_tables(hint: Any, key: str) -> Iterator[Value]:
    """Yield the values of the tables that a key's value may be, each by its name where there are several."""
    found = _sections(hint)
    for table in found:
        yield from _of_table(table, f"{key}." if len(found) == 1 else f"{key}[{table.__name__}].")


def _of_key(one: Key, key: str) -> Iterator[Value]:
    yield from ((key, value) for value in (*_labels(one.type), *one.words))
    for table in _tables(one.type):
        yield from (
            (f"{table.__name__}.{inner.name}", value)
            for inner in keys_of(table)
            if not inner.filled
            for value in _labels(inner.type)
        )


def _labels(hint: Any) -> Iterator[str]:
    """Yield the values that a type documents."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ends = set(_ends(inside[1:]))
        yield from (label for label in _labels(inside[0]) if label != EMPTY or EMPTY not in ends)
        yield from ends - {EMPTY}
    elif origin in (Union, UnionType):
        for one in inside:
            yield from _labels(one)
    elif origin is Literal:
        yield from map(str, inside)
    elif origin is tuple or hint is tuple:
        yield from (LIST, EMPTY)
    elif origin in (dict, Mapping) or (isinstance(hint, type) and is_dataclass(hint)):
        yield TABLE
    else:
        yield from {NoneType: (NONE,), bool: ("true", "false"), int: (NUMBER,), float: (NUMBER,)}.get(
            hint, (TEXT,)
        )


def _ends(marks: tuple[Any, ...]) -> Iterator[str]:
    """Yield the ends of a range that belong to it, and that a list may not be empty."""
    for mark in marks:
        for limit in mark.metadata if isinstance(mark, FieldInfo) else ():
            if getattr(limit, "min_length", 0):
                yield EMPTY
            for name in ("ge", "le"):
                end = getattr(limit, name, None)
                if end is not None and end <= _MOST and end == int(end):
                    yield f"{end:g}"


@cache
def _hints(table: type[BaseModel]) -> dict[str, Any]:
    """Return the types of a table's keys."""
    hints = get_type_hints(table, include_extras=True)
    return {name: hints[name] for name in table.model_fields}


def _is_optional(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _is_optional(get_args(hint)[0])
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


def _mark(hint: Any) -> ChoiceField | StageField | None:
    """Return what says that a field is the section of a stage, or of one that it names."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return next((mark for mark in marks if isinstance(mark, ChoiceField | StageField)), _mark(inner))
    found = (_mark(one) for one in get_args(hint))
    return next((mark for mark in found if mark is not None), None)


def _sections(hint: Any) -> list[type[BaseModel]]:
    """Return the tables of a document that a value of this type may be, or may hold."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [table for one in get_args(hint) for table in _sections(one)]


def _tables(hint: Any) -> set[type[Any]]:
    """Return the tables that a value of this type may be."""
    if isinstance(hint, type):
        return {hint} if is_dataclass(hint) else set()
    return {table for one in get_args(hint) for table in _tables(one)}


# --- what an experiment plays ---------------------------------------------------------------------------------------


def _in_table(table: BaseModel, above: str) -> Iterator[Value]:
    for name, hint in _hints(type(table)).items():
        key, value = f"{above}{name}", getattr(table, name)
        if value is None:
            yield key, NONE
        elif isinstance(value, Choice):
            yield f"{key}.name", value.name
            for one, given in value.keys.items():
                yield from _in_key(f"{key}[{value.name}].{one}", given)
        elif _sections(hint):
            yield from _in_value(key, value, hint)
        elif is_dataclass(value):
            for one in own_keys(type(value)):
                yield from _in_key(f"{key}.{one.name}", getattr(value, one.name))
        elif key in NAMED:
            for text in value if isinstance(value, tuple) else (value,):
                yield key, OWN if ":" in text else text
        else:
            yield from _in_key(key, value)


def _in_value(key: str, value: Any, hint: Any) -> Iterator[Value]:
    """Yield the values of a table, or of all tables that a value holds."""
    for table in value.values() if isinstance(value, Mapping) else (value,):
        several = len(_sections(hint)) > 1
        yield from _in_table(table, f"{key}[{type(table).__name__}]." if several else f"{key}.")


def _in_key(key: str, value: Any) -> Iterator[Value]:
    if is_dataclass(value):
        yield key, TABLE
        for one in keys_of(type(value)):
            if not one.filled:
                yield from _in_key(f"{type(value).__name__}.{one.name}", getattr(value, one.name))
    elif value is None:
        yield key, NONE
    elif isinstance(value, bool):
        yield key, str(value).lower()
    elif isinstance(value, int | float):
        end = key, f"{value:g}"
        yield end if end in documented() else (key, NUMBER)
    elif isinstance(value, tuple):
        yield key, LIST if value else EMPTY
    elif isinstance(value, Mapping):
        yield key, TABLE
    else:
        yield key, TEXT
        if not isinstance(value, Path):
            yield key, str(value)


# --- named by import path -------------------------------------------------------------------------------------------


def affine(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """One affine map, as a factory of one's own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), n_outputs))


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own: one term a record."""
    return (outputs - nn.functional.one_hot(targets, outputs.shape[1])).square().sum(dim=1)


def share_right(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> float:
    """A metric of one's own."""
    return float((outputs.argmax(dim=1) == targets).double().mean())
