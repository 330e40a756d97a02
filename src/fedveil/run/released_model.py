"""Explain a released model of a table: partial dependence by column, and a surrogate tree.

Everything here follows from the released model and the public schema, so it costs no privacy. No record is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from fedveil.errors import ConfigError, DataError, FedveilError, RunFolderError
from fedveil.randomness import ExperimentRandomness
from fedveil.run.environment import is_schema_of_run
from fedveil.run.folder.run_folder import SCHEMA, stored_tensors
from fedveil.training.models import build_model
from fedveil.training.trees import BoostedTrees

_MEASURED: Final = {"linear": "1.weight", "boosted-trees": "cuts"} | dict.fromkeys(
    ("whitened-linear", "whitened-rates", "whitened-hazards"), "weight"
)
"""Models that are shown, and the tensor from which their number of features is read."""
_COLUMNS: Final = 6
"""Columns whose partial dependence is shown: those in which the output moves most."""
_POINTS: Final = 81
_SERIES: Final = 7


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """Partial dependence on one column, the other columns at public reference values.

    Attributes:
        column: its name.
        unit: unit of the axis, after the name; empty for that of the column.
        categories: categories of a category column; empty for numbers.
        places: (n,) values of the column.
        curves: what the model gives there, by name.
    """

    column: str
    unit: str
    categories: tuple[str, ...]
    places: tuple[float, ...]
    curves: dict[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class ShownTree:
    """One oblivious tree: all nodes of a level ask one question.

    Attributes:
        questions: by level, the root first.
        leaves: what each leaf adds; the first bit of a leaf's number answers the root.
        trees: number of trees of the model.
        output: the output to which the leaves are added; None for the only one.
    """

    questions: tuple[str, ...]
    leaves: tuple[float, ...]
    trees: int
    output: int | None


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """Partial dependence and a tree of a released model.

    Attributes:
        dependences: dependences of the columns in which the output moves most.
        tree: the tree whose leaves differ most; None for models without trees.
    """

    dependences: tuple[Dependence, ...]
    tree: ShownTree | None


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the schema, or a feature of records without a schema.

    Attributes:
        name: name of the column.
        first: place of its first feature.
        feature: its declaration; None without a schema.
    """

    name: str
    first: int
    feature: Feature | None


def read_released_model(folder: Path, experiment: Mapping[str, Any]) -> ReleasedModel | None:
    """Read what the released model of a run folder does; None before there is one, and for models of other data.

    Args:
        folder: the run folder.
        experiment: the document of its experiment.

    Raises:
        RunFolderError: model.safetensors does not hold the model that the experiment names.
    """
    loaded = _load(folder, experiment)
    if loaded is None:
        return None
    module, width = loaded
    schema = _schema(folder, experiment, width)
    columns = _columns(schema, width)
    return ReleasedModel(
        dependences=tuple(_dependences(module, schema, columns, width)),
        tree=_tree(module, columns) if isinstance(module, BoostedTrees) else None,
    )


def _load(folder: Path, experiment: Mapping[str, Any]) -> tuple[nn.Module, int] | None:
    """Return the model and its number of features."""
    section = experiment.get("model")
    name = section.get("name") if isinstance(section, dict) else None
    path = folder / "model.safetensors"
    if not isinstance(name, str) or name not in _MEASURED or not path.is_file():
        return None
    with stored_tensors(path) as stored:
        tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    try:
        outputs, width = _sizes(name, tensors)
        randomness = ExperimentRandomness(experiment.get("seed", 0))
        module = build_model(name, input_shape=(width,), n_outputs=outputs, randomness=randomness)
        # The file has the trained parameters alone. The structure of trees is a buffer, which the seed gives.
        if set(tensors) != {key for key, _ in module.named_parameters()}:
            raise ValueError(name)
        module.load_state_dict(tensors, strict=False)
    except (KeyError, IndexError, RuntimeError, ValueError, FedveilError) as error:
        raise RunFolderError(f"{path} does not hold the model {name} of experiment.toml") from error
    return module.eval(), width


def _sizes(name: str, tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the number of outputs and of features."""
    if name == "boosted-trees":
        return tensors["leaves"].shape[-1], len(tensors["cuts"])
    outputs, width = tensors[_MEASURED[name]].shape
    return outputs, width if name == "linear" else width - 1


def _schema(folder: Path, experiment: Mapping[str, Any], width: int) -> Schema | None:
    """Return the run's schema if it can be read, is unchanged and has this number of features."""
    table: Any = experiment.get("data")
    table = table.get("table") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(table.get("schema_file"), str):
        return None
    refined = folder / SCHEMA
    path = refined if refined.is_file() else Path(table["schema_file"])
    try:
        if not is_schema_of_run(folder, path):
            return None
        schema = read_schema(path)
    except (DataError, ConfigError, OSError):
        return None
    return schema if schema.width == width else None


def _columns(schema: Schema | None, width: int) -> list[_Column]:
    if schema is None:
        return [_Column(name=f"feature {index}", first=index, feature=None) for index in range(width)]
    columns, position = [], 0
    for name, feature in schema.features.items():
        columns.append(_Column(name=name, first=position, feature=feature))
        position += feature.width + schema.bins_invalid
    return columns


def _unscaled(column: _Column, scaled: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return values in [-1, 1] in the unit of the column."""
    if column.feature is None or isinstance(column.feature, Category):
        return scaled
    lower, upper = column.feature.bounds
    return lower + (scaled + 1) / 2 * (upper - lower)


# --- partial dependence ---------------------------------------------------------------------------------------------


def _dependences(
    module: nn.Module, schema: Schema | None, columns: list[_Column], width: int
) -> Iterator[Dependence]:
    """Yield the partial dependence of the columns in which the outputs move most."""
    reference = np.zeros(width)
    for column in columns:
        if isinstance(column.feature, Category):
            reference[column.first] = 1.0
    measured = []
    for column in columns:
        values = _values(module, schema, _grid(column, reference))
        measured.append((float(np.ptp(values, axis=0).max()), column, values))
    measured.sort(key=lambda entry: -entry[0])
    for _, column, values in measured[:_COLUMNS]:
        feature = column.feature
        categories = feature.categories if isinstance(feature, Category) else ()
        scaled = np.linspace(-1, 1, len(values))
        names = _names(schema) or tuple(f"output {index}" for index in range(values.shape[1]))
        yield Dependence(
            column=column.name,
            unit="scaled to [-1, 1]"
            if feature is None
            else "days since 1970-01-01"
            if isinstance(feature, Date)
            else "",
            categories=categories,
            places=tuple(range(len(values))) if categories else tuple(_unscaled(column, scaled).tolist()),
            curves={name: tuple(curve.tolist()) for name, curve in zip(names, values.T, strict=False)},
        )


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
    """Return probabilities where the schema declares classes, else the model's outputs."""
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


def _names(schema: Schema | None) -> tuple[str, ...]:
    """Return the names of what is shown; empty if the schema does not tell them."""
    target = None if schema is None else schema.target
    if isinstance(target, Label):
        classes = target.classes[1:] if len(target.classes) == 2 else target.classes
        return tuple(f"probability of {label}" for label in classes)
    if isinstance(target, Labels | Amounts):
        return tuple(target.columns)
    if isinstance(target, Survival):
        return ("log hazard",)
    return () if target is None else (target.column,)


# --- a tree ---------------------------------------------------------------------------------------------------------


def _tree(module: BoostedTrees, columns: list[_Column]) -> ShownTree:
    """Return the tree whose leaves differ most, for the output in which they do."""
    leaves, cuts = module.leaves.detach().double().flatten(0, 1), module.cuts.detach()
    tree, output = divmod(int(leaves.std(dim=1).argmax()), leaves.shape[-1])
    features = module.feature.flatten(0, 1)[tree].tolist()
    ranks = module.rank.flatten(0, 1)[tree].tolist()
    return ShownTree(
        questions=tuple(
            _question(columns, feature, float(cuts[feature, rank]))
            for feature, rank in zip(features, ranks, strict=True)
        ),
        leaves=tuple(leaves[tree, :, output].tolist()),
        trees=len(leaves),
        output=None if leaves.shape[-1] == 1 else output,
    )


def _question(columns: list[_Column], feature: int, cut: float) -> str:
    """Return the condition of a tree's level in words."""
    column = max(
        (candidate for candidate in columns if candidate.first <= feature),
        key=lambda candidate: candidate.first,
    )
    offset = feature - column.first
    own = 1 if column.feature is None else column.feature.width
    if isinstance(column.feature, Category) and offset < len(column.feature.categories):
        # The feature is 0 or 1: a cut outside of [0, 1) does not divide people.
        category = column.feature.categories[offset]
        return f"{column.name} = {category}?" if 0 <= cut < 1 else f"{column.name} (no cut)"
    if offset:
        return f"{column.name} {'missing' if offset < own else 'invalid'}?"
    value = float(_unscaled(column, np.array([cut]))[0])
    if isinstance(column.feature, Date):
        return f"{column.name} > {EPOCH + timedelta(days=value)}?"
    return f"{column.name} > {value:.4g}?"
