"""Section of a run's report on the released model: partial dependence by column, and a tree.

Everything here is computed from the released model and the public schema, so it costs no privacy. No record is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from fedveil.data.schema import (
    EPOCH,
    Amounts,
    Category,
    Date,
    Feature,
    Label,
    Labels,
    Schema,
    Survival,
    read_schema,
)
from fedveil.errors import DataError, RunFolderError
from fedveil.report.document import Section
from fedveil.report.drawing import Axis, Plot, Series, show
from fedveil.report.run_data import RunData
from fedveil.run.folder.run_folder import SCHEMA, stored_tensors
from fedveil.training.models import MODELS
from fedveil.training.trees import DEPTH, LEAVES, BoostedTrees

_MEASURED: Final = {"linear": "1.weight", "boosted-trees": "cuts"} | dict.fromkeys(
    ("whitened-linear", "whitened-rates", "whitened-hazards"), "weight"
)
"""Models that are shown, and the tensor from which their number of features is read."""
_COLUMNS: Final = 6
"""Columns whose partial dependence is shown: those in which the output moves most."""
_POINTS: Final = 81
_SERIES: Final = 7


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the schema, or a feature of records without a schema.

    Attributes:
        name: of the column.
        first: place of its first feature.
        feature: its declaration; None without a schema.
    """

    name: str
    first: int
    feature: Feature | None


def model_section(run: RunData) -> Section | None:
    """Return the section of the released model; None before there is one, and for models of other data than tables."""
    model = _load(run)
    if model is None:
        return None
    module, width = model
    schema = _schema(run, width)
    columns = _columns(schema, width)
    drawn = [*_dependences(module, schema, columns, width)]
    if isinstance(module, BoostedTrees):
        drawn.append(_tree(module, columns))
    if not drawn:
        return None
    return Section(
        identifier="model",
        title="The released model",
        lead="Computed from the released model and the public schema alone: no record is read, no privacy is spent. "
        "Each curve moves one column over its declared range; the other columns stay at the middle of their bounds or "
        "at their first category. These are no averages over people. Noise in the model moves every curve.",
        plots=drawn,
        appendix=True,  # so that a report still prints on two pages
    )


def _load(run: RunData) -> tuple[nn.Module, int] | None:
    """Return the model and its number of features."""
    asked = run.experiment.get("model")
    name = asked.get("name") if isinstance(asked, dict) else None
    path = run.folder / "model.safetensors"
    if not isinstance(name, str) or name not in _MEASURED or not path.is_file():
        return None
    with stored_tensors(path) as stored:
        tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    try:
        outputs, width = _sizes(name, tensors)
        module = MODELS[name]((width,), outputs)
        module.load_state_dict(tensors)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise RunFolderError(f"{path} does not hold the model {name} of experiment.toml") from error
    return module.eval(), width


def _sizes(name: str, tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the number of outputs and of features."""
    if name == "boosted-trees":
        return tensors["leaves"].shape[-1], len(tensors["cuts"])
    outputs, width = tensors[_MEASURED[name]].shape
    return outputs, width if name == "linear" else width - 1


def _schema(run: RunData, width: int) -> Schema | None:
    """Return the run's schema if it can be read and has this number of features."""
    table: Any = run.experiment.get("data")
    table = table.get("table") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(table.get("schema_file"), str):
        return None
    refined = run.folder / SCHEMA
    try:
        found = read_schema(refined if refined.is_file() else Path(table["schema_file"]))
    except (DataError, OSError):
        return None
    return found if found.width == width else None


def _columns(schema: Schema | None, width: int) -> list[_Column]:
    if schema is None:
        return [_Column(name=f"feature {place}", first=place, feature=None) for place in range(width)]
    found, place = [], 0
    for name, feature in schema.features.items():
        found.append(_Column(name=name, first=place, feature=feature))
        place += feature.width + schema.bins_invalid
    return found


def _unscaled(column: _Column, scaled: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return values in [-1, 1] in the unit of the column."""
    if column.feature is None or isinstance(column.feature, Category):
        return scaled
    lower, upper = column.feature.bounds
    return lower + (scaled + 1) / 2 * (upper - lower)


# --- partial dependence ---------------------------------------------------------------------------------------------


def _dependences(
    module: nn.Module, schema: Schema | None, columns: list[_Column], width: int
) -> Iterator[Plot]:
    """Yield the partial dependence of the columns in which the first outputs move most."""
    reference = np.zeros(width)
    for column in columns:
        if isinstance(column.feature, Category):
            reference[column.first] = 1.0
    names = _names(module, schema)
    found = []
    for column in columns:
        values = _values(module, schema, _grid(column, reference))
        found.append((float(np.ptp(values, axis=0).max()), column, values))
    found.sort(key=lambda one: -one[0])
    for _, column, values in found[:_COLUMNS]:
        shown = names or tuple(f"output {place}" for place in range(values.shape[1]))
        yield _dependence(column, shown, values)


def _grid(column: _Column, reference: Float64[np.ndarray, " p"]) -> Float64[np.ndarray, "n p"]:
    """Return records that differ in one column."""
    if isinstance(column.feature, Category):
        size = len(column.feature.categories)
        rows = np.tile(reference, (size, 1))
        rows[:, column.first : column.first + size] = np.eye(size)
        return rows
    rows = np.tile(reference, (_POINTS, 1))
    rows[:, column.first] = np.linspace(-1, 1, _POINTS)
    return rows


def _values(
    module: nn.Module, schema: Schema | None, rows: Float64[np.ndarray, "n p"]
) -> Float64[np.ndarray, "n k"]:
    """Return what is shown of the outputs: probabilities where the schema declares classes, else the outputs."""
    with torch.no_grad():
        outputs = module(torch.from_numpy(rows).float()).double()
    target = None if schema is None else schema.target
    if isinstance(target, Label) and outputs.shape[1] == 1:
        outputs = outputs.sigmoid()
    elif isinstance(target, Label):
        outputs = outputs.softmax(1)[:, 1:] if outputs.shape[1] == 2 else outputs.softmax(1)
    elif isinstance(target, Labels):
        outputs = outputs.sigmoid()
    return np.asarray(outputs[:, :_SERIES])


def _names(module: nn.Module, schema: Schema | None) -> tuple[str, ...]:
    """Return the names of what is shown; empty if the schema does not tell them."""
    target = None if schema is None else schema.target
    if isinstance(target, Label):
        classes = target.classes[1:] if len(target.classes) == 2 else target.classes
        return tuple(f"probability of {one}" for one in classes)
    if isinstance(target, Labels | Amounts):
        return tuple(target.columns)
    if isinstance(target, Survival):
        return ("log hazard",)
    return () if target is None else (target.column,)


def _dependence(column: _Column, names: tuple[str, ...], values: Float64[np.ndarray, "n k"]) -> Plot:
    """Return the plot of one column."""
    feature = column.feature
    several = values.shape[1] > 1
    x: tuple[float, ...]
    if isinstance(feature, Category):
        x, axis = tuple(range(len(values))), Axis(title=column.name, categories=feature.categories)
    else:
        x = tuple(_unscaled(column, np.linspace(-1, 1, len(values))).tolist())
        unit = {None: ", scaled to [-1, 1]", "date": ", days since 1970-01-01"}.get(
            None if feature is None else feature.kind, ""
        )
        axis = Axis(title=f"{column.name}{unit}")
    ends = "; ".join(
        f"{name}: {show(float(of.min()))} to {show(float(of.max()))}"
        for name, of in zip(names, values.T, strict=False)
    )
    return Plot(
        title=f"Partial dependence on {column.name}",
        alt=f"What the model gives by {column.name}, the other columns at public reference values. {ends}.",
        caption=f"The other columns at public reference values. {ends}.",
        x=axis,
        y=Axis(title="" if several else names[0]),
        series=tuple(
            Series(
                name=name if several else "",
                mark="points" if axis.categories else "line",
                colour=place,
                x=x,
                y=tuple(of.tolist()),
            )
            for place, (name, of) in enumerate(zip(names, values.T, strict=False))
        ),
    )


# --- a tree ---------------------------------------------------------------------------------------------------------


def _tree(module: BoostedTrees, columns: list[_Column]) -> Plot:
    """Return the picture of the tree whose leaves differ most, for the output in which they do."""
    leaves = module.leaves.detach().double().flatten(0, 1)
    spread = leaves.std(dim=1)
    tree, output = divmod(int(spread.argmax()), leaves.shape[-1])
    values = leaves[tree, :, output].tolist()
    features = module.feature.flatten(0, 1)[tree].tolist()
    ranks = module.rank.flatten(0, 1)[tree].tolist()
    questions = [
        _question(columns, feature, float(module.cuts.detach()[feature, rank]))
        for feature, rank in zip(features, ranks, strict=True)
    ]
    # Nodes of level d lie above the middle of their leaves; the two sides of an edge are apart by a gap.
    sides: tuple[list[float], list[float]] = ([], [])
    heights: list[float] = []
    for level in range(DEPTH):
        under = LEAVES >> level
        for node in range(1 << level):
            middle = node * under + (under - 1) / 2
            for side, found in enumerate(sides):
                found += [middle, middle + (2 * side - 1) * under / 4, math.nan]
            heights += [level, level + 1, math.nan]  # category 0 is at the top
    asked = ", then ".join(questions)
    return Plot(
        title="One tree of the model",
        alt=f"A tree that asks {asked}. Its leaves, from no to yes: {', '.join(show(one) for one in values)}.",
        caption=f"Of {len(leaves)} trees, the one with the most different leaves. Nodes of a level ask one question; "
        f"a leaf's number is added to {'the output' if leaves.shape[-1] == 1 else f'output {output}'}.",
        x=Axis(title="added by the leaf", categories=tuple(f"{one:+.2g}" for one in values)),
        y=Axis(title="", categories=(*questions, "leaf")),
        series=tuple(
            Series(name=name, mark="line and points", colour=side, x=tuple(found), y=tuple(heights))
            for side, (name, found) in enumerate(zip(("no", "yes"), sides, strict=True))
        ),
    )


def _question(columns: list[_Column], feature: int, cut: float) -> str:
    """Return what a level of a tree asks."""
    column = max((one for one in columns if one.first <= feature), key=lambda one: one.first)
    place = feature - column.first
    own = 1 if column.feature is None else column.feature.width
    if isinstance(column.feature, Category) and place < len(column.feature.categories):
        # The feature is 0 or 1: a cut outside of [0, 1) does not divide people.
        category = column.feature.categories[place]
        return f"{column.name} = {category}?" if 0 <= cut < 1 else f"{column.name} (no cut)"
    if place:
        return f"{column.name} {'missing' if place < own else 'invalid'}?"
    value = float(_unscaled(column, np.array([cut]))[0])
    if isinstance(column.feature, Date):
        return f"{column.name} > {EPOCH + timedelta(days=value)}?"
    return f"{column.name} > {show(value)}?"
