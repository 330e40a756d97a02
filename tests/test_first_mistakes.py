"""Mistakes of a first day whose message once named neither what is wrong nor what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError, DataError, ModelError
from fedveil.sklearn import Classifier

X, Y, USER = np.eye(3).repeat(20, 0), np.arange(60) % 2, np.arange(60) % 20


def people(**changes: Any) -> Any:
    given = {"data": X, "targets": Y, "user": USER, "silo": USER % 2, "n_users": 20, "task": "classification"}
    return fv.population(**given | {"classes": [0, 1], "silos": [0, 1]} | changes)


def train(folder: Path, model: Any = "linear", **changes: Any) -> Any:
    method = fv.uldp_avg_w(clip=0.5, epochs=1)
    return fv.train(
        model, people(), **{"method": method, "epsilon": 2.0, "rounds": 1, "folder": folder} | changes
    )


MISTAKES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a start that does not exist": (
        lambda path: train(path, start="zero"),
        ConfigError,
        "start: must be one of seed, zeros, zero-output, not 'zero'; did you mean 'zero",
    ),
    "a class of a local algorithm": (
        lambda path: train(path, local=fv.FedProx),
        ConfigError,
        r"local: FedProx is a class; hand over an algorithm of it: FedProx\(...\)",
    ),
    "processes that are a truth value": (
        lambda path: train(path, processes=True),
        ConfigError,
        "fedveil.train: processes must be a whole number >= 1, not True",
    ),
    "no process": (
        lambda path: train(path, processes=0),
        ConfigError,
        "processes must be a whole number >= 1, not 0",
    ),
    "a model of double precision": (
        lambda path: train(path, nn.Linear(3, 2).double()),
        ModelError,
        r"parameter weight is torch.float64; .*float32: call float\(\)",
    ),
    "labels as columns of 0 and 1": (
        lambda _: people(targets=np.eye(2)[Y]),
        DataError,
        r"targets: one class label a record is needed, but the shape is \(60, 2\); .*argmax\(axis=1\)",
    ),
    "labels in a column": (
        lambda _: people(targets=Y[:, None]),
        DataError,
        r"reshape\(-1\) flattens \(n, 1\)",
    ),
    "classes in a set": (
        lambda _: people(classes={0, 1}),
        ConfigError,
        "classes is a set, which has no order; list them",
    ),
    "a prediction before a fit": (
        lambda _: Classifier(epsilon=2, n_users=20).predict(X),
        NotFittedError,
        "not fitted yet",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_first_mistake_is_told_with_what_would_be_right(mistake: str, tmp_path: Path) -> None:
    wrong, kind, said = MISTAKES[mistake]
    with pytest.raises(kind, match=said):
        wrong(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
