"""What public facts say against a model and its features: said once, before noise, and never from private records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.report.page import write_report
from fedveil.run.advice import advice_of
from fedveil.run.remarks import remarks
from fedveil.training.losses import LOSSES, RecordLoss
from fedveil.training.task import Task

CLASSES = {"task": "classification", "classes": [0, 1, 2], "silos": [0, 1], "n_users": 30}


def people(size: float = 1.0, *, private_size: float | None = None, test: bool = True, **changes: Any) -> Any:
    """Return 90 records of 30 users with four features of this size, and a public test table of 30 more."""
    random = np.random.default_rng(0)
    features, user = random.normal(size=(120, 4)), np.repeat(np.arange(40), 3)
    targets = changes.pop("targets", np.digitize(features[:, 0], [-0.5, 0.5]))
    keys = CLASSES | changes
    if test:
        keys["test"] = (size * features[90:], targets[90:])
    private = size if private_size is None else private_size
    return fv.population(private * features[:90], targets[:90], user=user[:90], silo=user[:90] % 2, **keys)


def model(*last: nn.Module, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), *last)


def said(module: nn.Module, given: Any, loss: str = "cross_entropy") -> str:
    return " ".join(remarks(Task(model=module, loss=LOSSES[loss]), given))


@pytest.mark.parametrize("last", [nn.Softmax(dim=1), nn.Sigmoid(), nn.Tanh(), nn.Hardtanh()])
@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_outputs_that_cannot_be_logits_are_told(last: nn.Module, loss: str) -> None:
    assert "Leave out the last layer" in said(model(last), people(), loss)


@pytest.mark.parametrize("last", [nn.LogSoftmax(dim=1), nn.Identity(), nn.ReLU(), nn.GELU()])
def test_outputs_that_may_be_logits_are_not(last: nn.Module) -> None:
    assert said(model(last), people()) == ""


def test_a_sigmoid_before_the_loss_of_one_logit_is_told() -> None:
    """The loss of one output that is a logit; of one that is a probability it is right."""
    two = people(classes=[0, 1], targets=np.arange(120) % 2)
    assert "Leave out" in said(model(nn.Sigmoid(), outputs=1), two, "binary_cross_entropy")
    assert said(model(outputs=1), two, "binary_cross_entropy") == ""
    zeros = model(outputs=1)
    for parameter in zeros.parameters():
        nn.init.zeros_(parameter)
    assert said(zeros, two, "binary_cross_entropy") == ""


def test_a_loss_of_probabilities_has_a_softmax_before_it() -> None:
    def of_probabilities(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.nll_loss((outputs.clamp(min=1e-9)).log(), targets.long(), reduction="none")

    task = Task(model=model(nn.Softmax(dim=1)), loss=RecordLoss("own", of_probabilities))
    assert remarks(task, people()) == ()


@pytest.mark.parametrize("size", [1e6, 3e3, 1e-6])
def test_features_of_absurd_size_are_told_from_the_public_test_records_alone(size: float) -> None:
    """Private features are never looked at: with ordinary public ones nothing is said of them, and the reverse."""
    assert "Features of the public test records" in said(model(), people(size))
    assert said(model(), people(1.0, private_size=size)) == ""
    assert said(model(), people(size, private_size=1.0)) != ""
    assert said(model(), people(size, test=False)) == ""


@pytest.mark.parametrize("size", [1.0, 255.0, 0.01, 0.0])
def test_features_of_usual_size_are_not_told(size: float) -> None:
    assert said(model(), people(size)) == ""


def test_targets_of_absurd_size_are_told() -> None:
    large = {
        "task": "regression",
        "classes": None,
        "targets": 1e6 * np.random.default_rng(1).normal(size=120),
    }
    assert "Targets of the public" in said(model(outputs=1), people(**large), "squared_error")
    small = large | {"targets": np.random.default_rng(1).normal(size=120)}
    assert said(model(outputs=1), people(**small), "squared_error") == ""


def test_a_run_says_it_in_its_folder_its_report_and_while_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = fv.uldp_avg(clip=0.5, noise_multiplier=0.5, local_learning_rate=0.1)
    result = fv.train(
        model(nn.Softmax(dim=1)),
        people(1e6),
        method=method,
        rounds=2,
        delta=1e-3,
        folder=tmp_path,
        callbacks=[fv.Progress()],
    )
    assert result.advice is not None
    assert result.advice.startswith("The model's outputs stay between -1 and 1")
    assert "\nFeatures of the public test records have the size 1e+06" in result.advice
    assert advice_of(result.folder) == result.advice
    printed = capsys.readouterr().out
    assert printed.count("Leave out the last layer") == printed.count("the size 1e+06") == 1
    assert "Leave out the last layer" in write_report(result.folder).read_text(encoding="utf-8")


def test_a_loss_of_log_probabilities_has_a_log_softmax_before_it() -> None:
    def of_log_probabilities(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.nll_loss(outputs, targets.long(), reduction="none")

    loss = RecordLoss("own", of_log_probabilities)
    (told,) = remarks(Task(model=model(), loss=loss), people())
    assert "End the model with a log-softmax" in told
    assert remarks(Task(model=model(nn.LogSoftmax(dim=1)), loss=loss), people()) == ()
