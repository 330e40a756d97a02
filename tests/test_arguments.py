"""Calls of public functions whose arguments do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from fedveil.errors import ConfigError
from tests.test_recommended import people


@pytest.mark.parametrize(
    ("function", "args", "given", "said"),
    [
        (fv.train, (), {"epsilonn": 2}, r"fedveil.train: no argument 'epsilonn'; .* did you mean 'epsilon'"),
        (fv.train, (), {"epsilon": 2}, r"fedveil.train: model: needed; the arguments are: model, people"),
        (fv.plan, (), {}, r"fedveil.plan: n_users, n_silos: needed"),
        (fv.sweep, ("linear", None), {}, r"fedveil.sweep: grid: needed"),
        (fv.cross_validate, ("linear", None), {}, r"fedveil.cross_validate: epsilon: needed"),
        (fv.infer, (None, "a ~ b"), {"epsilon": 1}, r"fedveil.infer: family: needed"),
        (fv.stats, (None, {}), {"epsilon": 1, "delte": 1}, r"no argument 'delte'; .* did you mean 'delta'"),
        (fv.check, (None,), {"epsilonn": 1}, r"no argument 'epsilonn'; .* did you mean 'epsilon'"),
        (fv.audit, ("run", 3), {}, r"fedveil.audit: give arguments by name after run"),
        (fv.audit, ("run",), {"run": 3}, r"fedveil.audit: run: given twice"),
        (fv.spent, (), {"delte": 1}, r"fedveil.spent: no argument 'delte'"),
    ],
)
def test_a_call_that_does_not_fit_is_explained(function: Any, args: Any, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        function(*args, **given)


def test_a_run_is_resumed_with_the_model_and_loss_that_its_folder_names(tmp_path: Path) -> None:
    """The rule takes one logit for two classes, which is not the loss of a call without one."""
    result = fv.train(people(400), epsilon=3, rounds=2, folder=tmp_path)
    assert fv.resume(result.folder, people(400)).rounds == 2
    with pytest.raises(ConfigError, match="people: the population is needed"):
        fv.resume(result.folder, "whitened-linear")
