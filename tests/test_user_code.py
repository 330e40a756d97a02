"""Code of a user's own that fails is named in one line, without what it says, and the run goes on once it is mended."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.errors import UserCodeError
from fedveil.user_code import failed_at, name_user_code
from tests.commands import ended

SECRET = "patient 4711 has HIV"
OWN = f"""
import torch
from pathlib import Path

def fails(where):
    if (Path(__file__).parent / where).exists():
        raise ZeroDivisionError("{SECRET}")

measurements, HELD = 0, 2

def measured(outputs, targets, weights):
    global measurements
    measurements += 1
    if measurements > HELD:
        fails("metric")
    return float(outputs.shape[0])

def lost(outputs, targets):
    fails("loss")
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

class Net(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, features):
        fails("model")
        return self.layer(features.flatten(1))

def network(input_shape, n_outputs):
    return Net(torch.Size(input_shape).numel(), n_outputs)
"""
EXPERIMENT = """
name = "own"
rounds = 2
[data]
name = "digits"
n_users = 20
n_silos = 2
[model]
name = "own_pieces:network"
loss = "own_pieces:lost"
metrics = ["own_pieces:measured"]
[local]
learning_rate = 0.1
[method]
name = "uldp-avg"
clip = 1.0
noise_multiplier = 2.0
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_pieces.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(EXPERIMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_pieces", None)


@pytest.mark.parametrize("number", [0, 1])
def test_a_metric_that_fails_in_a_run_is_named_without_its_words_and_the_run_goes_on(
    place: Path, number: int
) -> None:
    (place / "own_pieces.py").write_text(OWN.replace("HELD = 0, 2", f"HELD = 0, {number + 1}"))
    asked = ("--code", "own_pieces:network", "--code", "own_pieces:lost", "--code", "own_pieces:measured")
    (place / "metric").touch()
    said = ended("run", place / "own.toml", "--runs", place / "runs").mistake
    assert f"fails ({place / 'own_pieces.py'}, line 7) raised ZeroDivisionError" in said
    assert f"`fedveil resume {place / 'runs' / 'own'}` goes on" in said
    assert "4711" not in said
    assert "Traceback" not in said
    assert (place / "runs" / "own" / "checkpoint" / "state.safetensors").exists() == bool(number)
    (place / "metric").unlink()
    assert ended("resume", place / "runs" / "own", *asked).code == 0
    # The round whose metric failed was charged and has its model: it is kept, and not charged again.
    lines = (place / "runs" / "own" / "metrics.jsonl").read_text().splitlines()
    tests = [json.loads(line)["test"] is not None for line in lines]
    assert tests == [True, not number, True]
    charges = (place / "runs" / "own" / "ledger.jsonl").read_text().count('"round"')
    assert charges == len(lines) - 1


def test_the_log_shows_what_it_says_to_whoever_asks(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "metric").touch()
    with caplog.at_level("DEBUG", logger="fedveil"):
        ended("--log-level", "debug", "run", place / "own.toml", "--runs", place / "runs")
    assert SECRET in caplog.text


@pytest.mark.parametrize("where", ["loss", "model"])
def test_a_loss_and_a_model_that_fail_are_no_bugs_of_this_program(place: Path, where: str) -> None:
    (place / where).touch()
    said = ended("check", place / "own.toml").mistake
    assert "own_pieces" in said
    assert "4711" not in said
    assert "Traceback" not in said


def test_what_python_code_raises_is_raised_as_it_is_with_how_to_go_on(tmp_path: Path) -> None:
    class Broken(fv.Callback):
        def on_round_end(self, round: fv.RoundSummary) -> str | None:
            raise KeyError(SECRET)

    people = fv.population(
        np.eye(4).repeat(10, 0),
        np.arange(40) % 2,
        user=np.arange(40) % 8,
        silo=np.arange(40) % 2,
        n_users=8,
        task="classification",
        classes=[0, 1],
        silos=[0, 1],
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    with pytest.raises(KeyError) as raised:
        fv.train(
            model,
            people,
            method=fv.uldp_sgd(clip=0.5, noise_multiplier=2.0),
            rounds=2,
            callbacks=[Broken()],
            folder=tmp_path,
        )
    assert any(f"fedveil.resume('{tmp_path / 'run'}'" in note for note in raised.value.__notes__)
    assert failed_at(raised.value) is not None
    assert fv.resume(tmp_path / "run", model, people).rounds == 2


def test_a_package_that_is_not_installed_is_named_where_the_code_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where it was computed: the name may be a cell of a table."""
    (tmp_path / "own_imports.py").write_text(
        "import importlib\n"
        "def stated():\n    from no_such_package.part import anything\n"
        "def computed(cell):\n    importlib.import_module(cell)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("own_imports")
    stated = r"line 3\) imports no_such_package, which is not installed$"
    with pytest.raises(UserCodeError, match=stated), name_user_code():
        own.stated()
    computed = pytest.raises(UserCodeError, match="raised ModuleNotFoundError: code of your own")
    with computed as hidden, name_user_code():
        own.computed("patient_4711")
    assert "4711" not in str(hidden.value)


def test_a_bug_of_this_program_stays_one() -> None:
    with mock.patch("fedveil.run.config.study.presets", side_effect=ValueError("a bug")):
        found = ended("presets")
    assert found.code == 70
    assert "ValueError: a bug" in found.err
