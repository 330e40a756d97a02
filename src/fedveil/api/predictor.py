"""Predictor: a trained model that returns numbers, probabilities or labels for new records."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import nn

from fedveil.arguments import stacklevel_of_caller
from fedveil.data.input_arrays import read_features
from fedveil.data.record_columns import as_arrow_table
from fedveil.data.records import Affine, Label, Task
from fedveil.errors import ConfigError, DataError

_BATCH: Final = 1024


def warn_of_positions(trained_names: Sequence[str] | None, new_names: Sequence[str] | None) -> None:
    """Warn that columns are taken by position, where only the training records or only the new ones have names.

    The names 0 to p - 1, which pandas gives to columns without names, do not count as names.

    Args:
        trained_names: names of the feature columns in training; None without names.
        new_names: those of the new records.
    """
    if _is_named(trained_names) and not _is_named(new_names):
        names = ", ".join(trained_names or ())
        warnings.warn(
            f"features: the records have no column names; their columns are taken, in this order, for: {names}",
            stacklevel=stacklevel_of_caller(),
        )
    if _is_named(new_names) and not _is_named(trained_names):
        # The names are not repeated: those of a file without a header are its first record.
        warnings.warn(
            "features: the model was trained without column names; the columns of these records are taken by their "
            "places",
            stacklevel=stacklevel_of_caller(),
        )


def _is_named(names: Sequence[str] | None) -> bool:
    return names is not None and list(names) != [str(index) for index in range(len(names))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A model with the facts that are needed to read records and to name its outputs.

    Args:
        model: the model in evaluation mode, on the CPU.
        task: the task of the model.
        classes: labels in the order of their numbers; empty unless the task is classification.
        targets: names of k labels or numbers to predict; empty for any other task.
        shape: shape of one record's features.
        feature_names: names of the feature columns; None if the training records had no names.
        by_schema: whether a schema encoded the features, so that a table's own columns are not those of the model.
        scale: the map from stored features to the features that the model sees.
    """

    model: nn.Module
    task: Task
    classes: tuple[Label, ...]
    shape: tuple[int, ...]
    targets: tuple[str, ...] = ()
    feature_names: tuple[str, ...] | None = None
    by_schema: bool = False
    scale: Affine = field(default_factory=Affine)

    def __repr__(self) -> str:
        return f"Predictor(model={type(self.model).__name__}, task='{self.task}', shape={self.shape})"

    @property
    def by_place(self) -> Predictor:
        """The same predictor for arrays whose columns are known to be in the order of training; it warns of nothing."""
        return replace(self, feature_names=None)

    def outputs(self, features: Any) -> Float32[np.ndarray, "n k"]:
        """Return the model's (n, k) float32 outputs for records like those it was trained on.

        Args:
            features: (n, ...) in any form that :func:`fedveil.population` accepts. Of a table, the columns of training
                are taken by name, in any order; other columns are not read. Where only one side has names, a warning
                says that columns are taken by their places.

        Raises:
            DataError: the columns or the shape differ from training; a table, where a schema encodes them; a value is
                invalid; an output is not finite.
        """
        table = read_features(as_arrow_table(features, "features"), column_names=self.feature_names)
        if self.by_schema and table.names is not None:
            raise DataError(
                "features: the model was trained on tables, whose columns its schema encodes; write the records into a "
                "file and call fedveil.load(result.save('model')).predict_table('new.csv')"
            )
        if table.values.shape[1:] != self.shape:
            raise DataError(
                f"features: a record has shape {table.values.shape[1:]}, the model was trained on {self.shape}"
            )
        warn_of_positions(self.feature_names, table.names)
        with np.errstate(over="ignore"):  # an overflow gives a non-finite output, which is refused below
            ready = torch.from_numpy(self.scale.apply(table.values))
        with torch.no_grad():
            outputs = torch.cat([self.model(part) for part in torch.split(ready, _BATCH)])
        lost = ~outputs.isfinite().flatten(1).all(1)
        if bool(lost.any()):
            raise DataError(
                f"features, row {int(lost.int().argmax())}: the model's outputs are not finite; the record, or the "
                "model, is out of range"
            )
        return np.asarray(outputs)

    def probabilities(self, features: Any) -> Float32[np.ndarray, "n classes"]:
        """Return the (n, classes) probabilities of a classification model, or (n, labels) of each label of several.

        Raises:
            ConfigError: the task has no classes or labels.
            DataError: as :meth:`outputs`.
        """
        if self.task not in ("classification", "multi-label"):
            raise ConfigError(f"probabilities belong to classification; this model is for {self.task}")
        logits = torch.from_numpy(self.outputs(features))
        if self.task == "multi-label":
            return np.asarray(torch.sigmoid(logits))
        if logits.shape[1] == 1:  # binary cross-entropy: one logit, of class 1
            positive = torch.sigmoid(logits)
            return np.asarray(torch.cat((1 - positive, positive), dim=1))
        return np.asarray(torch.softmax(logits, dim=1))

    def predict(self, features: Any) -> Shaped[np.ndarray, "n"]:
        """Return the most probable label (classification), number (regression) or log hazard (survival).

        Of several targets (n, k): 1 for a label that is more probable than not and 0 for any other, or k numbers.
        """
        if self.task == "multi-label":
            return np.asarray(self.outputs(features) > 0).astype(np.int64)
        if self.task == "multi-output":
            return self.outputs(features)
        if self.task != "classification":  # one output: the number, or the log hazard
            return np.asarray(self.outputs(features)[:, 0])
        return np.asarray(np.array(self.classes)[self.probabilities(features).argmax(axis=1)])
