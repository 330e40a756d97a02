"""A frozen BatchNorm of a pretrained layer is a constant; any other BatchNorm is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.data.records import Population
from fedveil.errors import ModelError
from fedveil.training.counters import with_seeded_dropout
from fedveil.training.losses import load_loss
from fedveil.training.pretrained import FrozenNorm, with_frozen_norms
from fedveil.training.task import Task
from fedveil.training.validation import validate_layers

RANDOM = np.random.default_rng(0)
X, USER = RANDOM.normal(size=(90, 6)).astype(np.float32), RANDOM.integers(0, 20, 90)


def people() -> Population:
    labels = (X[:, 0] > 0).astype(int)
    return fv.population(
        X, labels, user=USER, silo=USER % 2, n_users=20, task="classification", classes=[0, 1], silos=[0, 1]
    )


def pretrained(*, trained: bool = False, evaluated: bool = True, affine: bool = True) -> nn.Sequential:
    """A backbone with statistics of other records, and a layer to train."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
    for _ in range(5):
        backbone(3 + 2 * torch.randn(40, 6))
    backbone.requires_grad_(trained).train(not evaluated)
    return nn.Sequential(backbone, nn.Linear(8, 1))


@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("affine", [True, False])
def test_a_frozen_norm_computes_what_the_layer_computes_in_evaluation_mode(
    make: Callable[..., nn.Module], affine: bool
) -> None:
    shape = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 2, 2)}[make]  # type: ignore[index]
    torch.manual_seed(0)
    layer = make(4, affine=affine)
    layer(5 + 3 * torch.randn(20, 4, *shape))
    for one in layer.parameters():
        nn.init.normal_(one)
    layer.requires_grad_(False).eval()
    inputs = torch.randn(9, 4, *shape)
    wanted = layer(inputs)
    frozen = with_frozen_norms(nn.Sequential(layer)).train()
    assert isinstance(frozen[0], FrozenNorm)  # type: ignore[index]
    torch.testing.assert_close(frozen(inputs), wanted)
    torch.testing.assert_close(frozen(inputs[:1]), wanted[:1])  # of a record alone, too


@pytest.mark.parametrize("trainer", ["loop", "vmap"])
def test_no_statistic_moves_while_the_layers_behind_it_train(trainer: str, tmp_path: Path) -> None:
    model = pretrained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = fv.train(
        model, people(), method=fv.uldp_avg_w(clip=1.0, epochs=3, local_learning_rate=0.5), epsilon=50.0, rounds=3,
        folder=tmp_path, settings={"trainer": {"name": trainer}},
    )  # fmt: skip
    for name, value in result.model.state_dict().items():
        if name.startswith("1."):
            assert not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_update_of_a_record_does_not_depend_on_its_batch() -> None:
    task = Task(model=pretrained(), loss=load_loss("binary_cross_entropy"))
    state, features = (
        dict(task.model.named_parameters()) | dict(task.model.named_buffers()),
        torch.from_numpy(X),
    )
    whole = task.outputs(state, features)
    alone = torch.cat([task.outputs(state, features[row : row + 1]) for row in range(9)])
    torch.testing.assert_close(whole[:9], alone, rtol=1e-5, atol=1e-6)
    assert task.dimension == 9


class Own(nn.BatchNorm1d):
    pass


def hooked() -> nn.Module:
    layer = nn.BatchNorm1d(8).requires_grad_(False).eval()
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (pretrained(trained=True)[0], "this one has parameters that are trained"),
        (pretrained(evaluated=False)[0], "this one is in training mode"),
        (pretrained(evaluated=False, affine=False)[0], "this one is in training mode"),
        (nn.BatchNorm1d(8, track_running_stats=False).requires_grad_(False).eval(), "keeps no running statistics"),
        (Own(8).requires_grad_(False).eval(), "has code of its own"),
        (nn.SyncBatchNorm(8).requires_grad_(False).eval(), "has code of its own"),
        (hooked(), "has code of its own"),
    ],
)  # fmt: skip
def test_a_norm_that_is_not_frozen_is_refused(layer: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=f"GroupNorm.*requires_grad_.False..eval.*{said}"):
        validate_layers(nn.Sequential(layer, nn.Linear(8, 1)))


def test_a_layer_with_two_names_is_a_constant_under_both() -> None:
    norm, dropout = nn.BatchNorm1d(3).requires_grad_(False).eval(), nn.Dropout()
    model = with_seeded_dropout(
        with_frozen_norms(nn.Sequential(norm, dropout, nn.Linear(3, 3), norm, dropout))
    )
    assert not any(isinstance(one, nn.BatchNorm1d | nn.Dropout) for one in model.train())
