"""A denoiser, an optimiser or an average of another package that returns something else is refused before a charge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedveil as fv
from fedveil.errors import CompositionError, ModelError
from fedveil.methods.uldp import uldp_avg_w
from fedveil.training.server.averages import Last
from fedveil.training.server.denoise import Denoiser
from fedveil.training.server.optimizers import Optimizer, State
from fedveil.training.steps import LocalSgd

PUBLISHED = uldp_avg_w(local=LocalSgd(learning_rate=0.5, epochs=1), clip=1.0, noise_multiplier=5.0)
USER = np.arange(40) % 10
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(40, 5)).astype(np.float32)


def train(folder: Path, **stages: Any) -> fv.Result:
    people = fv.population(
        features=FEATURES,
        targets=np.arange(40) % 2,
        user=USER,
        silo=USER % 2,
        n_users=10,
        task="classification",
        test=(RANDOM.normal(size=(8, 5)).astype(np.float32), np.arange(8) % 2),
    )
    method = replace(PUBLISHED, name="mine", **stages)
    return fv.train("linear", people, method=method, rounds=2, folder=folder)


DRAWN = torch.Generator().manual_seed(0)
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "double": Tensor.double,
    "half": Tensor.half,
    "short": lambda x: x[:-1],
    "array": Tensor.numpy,
    "meta": lambda x: x.to("meta"),
    "nothing": lambda x: None,
    "nan": lambda x: x * torch.nan,
    "random": lambda x: x + torch.rand(1, generator=DRAWN),
    "column": lambda x: x[:, None],
    "first": lambda x: x[0],
    "parameter": torch.nn.Parameter,
}
"""What a stage makes of the right result; stages themselves are numbers and texts."""
STATES: dict[str, Any] = {"none": {}, "list": [1], "other": {"speed": torch.zeros(4)}}


@dataclass(frozen=True)
class Steps(Optimizer):
    """Adds the mean, and returns something else than a float32 vector from a call on."""

    change: str
    late: int = 0
    calls: ClassVar[list[int]] = []

    def init(self, model: Tensor) -> State:
        return {}

    def step(self, model: Tensor, mean: Tensor, state: State) -> tuple[Any, State]:
        self.calls.append(1)
        after = (model.double() + mean).float()
        return (CHANGES[self.change](after) if len(self.calls) > self.late else after), {}


@dataclass(frozen=True)
class Keeps(Optimizer):
    """Returns another state than the one that it begins with."""

    state: str

    def init(self, model: Tensor) -> State:
        return {"speed": torch.zeros(3)}

    def step(self, model: Tensor, mean: Tensor, state: State) -> tuple[Tensor, Any]:
        return (model.double() + mean).float(), STATES[self.state]


@dataclass(frozen=True)
class Estimates(Denoiser):
    needs_noise_std: ClassVar[bool] = False
    description: ClassVar[str] = "an own one"
    change: str

    def estimate(self, noisy: Tensor, noise_std: float, shapes: Any) -> Any:
        return CHANGES[self.change](noisy)


@dataclass(frozen=True, kw_only=True)
class Releases(Last):
    change: str

    def released_model(self, model: Tensor, state: State) -> Any:
        return CHANGES[self.change](model)


class Adds:
    """Writes to the model that it is given."""

    def step(self, model: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return model.add_(mean.float()), {}


@dataclass(frozen=True)
class InPlace(Adds, Optimizer):
    def init(self, model: Tensor) -> State:
        return {}


FLOAT = r"a tensor of torch.float32, of shape \(12,\), on cpu is needed"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "double": (
        {"server": Steps("double")},
        rf"^Steps, given as server optimizer: the model of step.*{FLOAT}",
    ),
    "short": ({"server": Steps("short")}, r"Steps, .*of shape \(11,\), on cpu; "),
    "array": ({"server": Steps("array")}, r"Steps, .*is a value of ndarray"),
    "meta": ({"server": Steps("meta")}, r"Steps, .*on meta; "),
    "nothing": ({"server": Steps("nothing")}, r"Steps, .*is a value of NoneType"),
    "nan": ({"server": Steps("nan")}, r"Steps, .*has a NaN or an infinity"),
    "random": ({"server": Steps("random")}, r"Steps, .*equal means gave another"),
    "in place": ({"server": InPlace()}, r"InPlace, .*writes to the mean, the model or the state"),
    "no state": ({"server": Keeps("none")}, r"Keeps, .*has the tensors none, and init\(\) has speed"),
    "list": ({"server": Keeps("list")}, r"Keeps, .*is a value of list; a dict of tensors is needed"),
    "other state": ({"server": Keeps("other")}, r"Keeps, .*'speed', is .*of shape \(4,\)"),
    "no estimate": (
        {"denoiser": Estimates("nothing")},
        r"Estimates, given as denoiser: estimate\(\) is a value of",
    ),
    "wide estimate": ({"denoiser": Estimates("column")}, r"Estimates, .*of shape \(12, 1\)"),
    "one number": ({"denoiser": Estimates("first")}, r"Estimates, .*of shape \(\)"),
    "average": (
        {"average": Releases(change="double")},
        r"Releases, given as average: released_model.*float64",
    ),
}


@pytest.mark.parametrize(("stages", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_refused_before_a_charge_and_names_the_class(
    stages: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CompositionError, match=said):
        train(tmp_path, **stages)
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_a_wrong_result_of_a_later_round_ends_the_run_and_the_charge_stays(tmp_path: Path) -> None:
    """Before, a model of doubles became a checkpoint that no run reads."""
    Steps.calls.clear()
    with pytest.raises(ModelError, match="Steps, given as server optimizer: the model of step"):
        train(tmp_path, server=Steps("double", late=5))  # four calls of the trial, and one round
    (folder,) = (path.parent for path in tmp_path.rglob("ledger.jsonl"))
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_result_that_carries_a_gradient_or_is_a_narrow_float_is_taken(tmp_path: Path) -> None:
    server = Steps("parameter")
    assert train(tmp_path, server=server, denoiser=Estimates("half")).statement.epsilon is not None
