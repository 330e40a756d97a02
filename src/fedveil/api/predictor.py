"""Predictor: a trained model that returns numbers, probabilities or labels for new records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import nn

from fedveil.data.input_arrays import read_features
from fedveil.data.records import Affine, Label, Task
from fedveil.errors import ConfigError, DataError

_BATCH: Final = 1024


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
        scale: the map from stored features to the features that the model sees.
    """

    model: nn.Module
    task: Task
    classes: tuple[Label, ...]
    shape: tuple[int, ...]
    targets: tuple[str, ...] = ()
    feature_names: tuple[str, ...] | None = None
    scale: Affine = field(default_factory=Affine)

    def __repr__(self) -> str:
        return f"Predictor(model={type(self.model).__name__}, task='{self.task}', shape={self.shape})"

    def outputs(self, features: Any) -> Float32[np.ndarray, "n k"]:
        """Return the model's (n, k) float32 outputs for records like those it was trained on.

        Args:
            features: (n, ...) in any form that :func:`fedveil.population` accepts. Of a table, the columns of training
                are taken by name, in any order; other columns are not read.

        Raises:
            DataError: the columns or the shape differ from training; a value is invalid; an output is not finite.
        """
        table = read_features(features, wanted=self.feature_names)
        if table.values.shape[1:] != self.shape:
            raise DataError(
                f"features: a record has shape {table.values.shape[1:]}, the model was trained on {self.shape}"
            )
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
