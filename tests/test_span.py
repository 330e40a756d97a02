"""Span training is the loop's training, in the span of the records: same updates, same bound, far fewer operations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedveil.errors import ModelError, PrivacyError
from fedveil.local.loop import LoopTrainer
from fedveil.local.losses import LOSSES, Loss, RecordLoss
from fedveil.local.span import SpanTrainer, linear_layer
from fedveil.local.span_sums import Lengths, coefficients, round_to_grid
from fedveil.local.steps import LocalGradient, LocalSgd, LocalStep
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort, Sums
from fedveil.population.records import Affine, Records
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.randomness import ExperimentRandomness


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.reshape(outputs.shape)).abs().sum(-1)


ALL_LOSSES: dict[str, Loss] = {**LOSSES, "own": RecordLoss("own", _absolute)}


def make_task(loss: str, n_features: int, bias: bool, seed: int = 0) -> Task:
    torch.manual_seed(seed)
    outputs = {"cross_entropy": 3, "squared_error": 2}.get(loss, 1)
    return Task(model=nn.Sequential(nn.Flatten(), nn.Linear(n_features, outputs, bias=bias)), loss=ALL_LOSSES[loss])


def make_cohort(
    loss: str, sizes: list[int], n_features: int, seed: int = 0, uint8: bool = False, n_silos: int = 2
) -> Cohort:
    """Contribution i is user i in silo i mod n_silos; the table is shuffled."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(len(sizes)), sizes)
    rng.shuffle(user)
    n = len(user)
    features = rng.normal(size=(n, n_features)).astype(np.float32)
    if uint8:
        features = rng.integers(0, 256, size=(n, n_features)).astype(np.uint8)
    targets = {
        "cross_entropy": rng.integers(0, 3, n),
        "binary_cross_entropy": rng.integers(0, 2, n),
        "squared_error": rng.normal(size=(n, 2)).astype(np.float32),
        "cox": np.stack([rng.integers(0, 2, n), rng.integers(1, 6, n)], 1).astype(np.float32),
        "own": rng.normal(size=n).astype(np.float32),
    }[loss]
    silo = (user % n_silos).astype(np.int32)
    records = Records(features=features, targets=targets, silo=silo, user=user.astype(np.int32))
    return Cohort.of(
        records,
        groups=records.by_silo_user(),
        n_silos=n_silos,
        scale=Affine(factor=1 / 128, shift=-1.0) if uint8 else Affine(),
        device=torch.device("cpu"),
    )


def run(
    trainer: SpanTrainer | LoopTrainer,
    cohort: Cohort,
    bound: Bound,
    weights: Tensor | None = None,
    members: Tensor | None = None,
) -> Sums:
    chosen = torch.arange(len(cohort.groups)) if members is None else members
    return trainer.sums(
        trainer.task.initial(),
        cohort,
        chosen,
        torch.ones(len(chosen), dtype=torch.float64) if weights is None else weights,
        bound,
        ExperimentRandomness(5),
        ("round", 1),
    )


sizes_of_contributions = st.lists(
    st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 31, 33, 70])), min_size=1, max_size=8
)
local_steps = st.one_of(
    st.just(LocalGradient()),
    st.builds(
        LocalSgd,
        learning_rate=st.sampled_from([0.01, 0.1]),
        epochs=st.integers(1, 3),
        batch_size=st.sampled_from([None, 3, 8, 64]),
        momentum=st.sampled_from([0.0, 0.9]),
        weight_decay=st.sampled_from([0.0, 0.05]),
    ),
)


@given(
    loss=st.sampled_from(sorted(ALL_LOSSES)),
    sizes=sizes_of_contributions,
    local=local_steps,
    bias=st.booleans(),
    uint8=st.booleans(),
    n_features=st.sampled_from([1, 5, 80]),
    seed=st.integers(0, 10_000),
)
@hypothesis_settings(max_examples=40)
def test_sums_are_those_of_the_loop(
    loss: str, sizes: list[int], local: LocalStep, bias: bool, uint8: bool, n_features: int, seed: int
) -> None:
    task, cohort = make_task(loss, n_features, bias), make_cohort(loss, sizes, n_features, seed, uint8)
    rng = np.random.default_rng(seed)
    members = torch.from_numpy(rng.permutation(len(cohort.groups))[: max(1, len(sizes) - 2)])
    weights = torch.from_numpy(rng.random(len(members)))
    want = run(LoopTrainer(task=task, local=local), cohort, Unbounded(), weights, members)
    trainer = SpanTrainer(task=task, local=local)
    for _ in range(2):  # the second time with the kept plan
        got = run(trainer, cohort, Unbounded(), weights, members)
        scale = max(1.0, float(want.norms.sum()))
        torch.testing.assert_close(got.total, want.total, rtol=0, atol=2e-5 * scale)
        torch.testing.assert_close(got.norms, want.norms, rtol=2e-4, atol=1e-6 * scale)
        assert (got.steps, got.nonfinite) == (want.steps, 0)


@given(
    loss=st.sampled_from(sorted(LOSSES)),
    sizes=sizes_of_contributions,
    local=local_steps,
    norm=st.sampled_from([0.01, 0.3, 1.0]),
    seed=st.integers(0, 10_000),
)
@hypothesis_settings(max_examples=25)
def test_clipped_sums_are_those_of_the_loop_up_to_the_grid(
    loss: str, sizes: list[int], local: LocalStep, norm: float, seed: int
) -> None:
    task, cohort, bound = make_task(loss, 20, True), make_cohort(loss, sizes, 20, seed), Clip(norm=norm)
    want = run(LoopTrainer(task=task, local=local), cohort, bound)
    got = run(SpanTrainer(task=task, local=local), cohort, bound)
    lost = len(sizes) * (2 * math.sqrt(task.dimension) + 1) * bound.grid
    for total, wanted in zip(got.total, want.total, strict=True):
        assert float((total - wanted).norm()) <= lost + 1e-4 * norm * len(sizes)
    units = got.total / bound.grid
    assert torch.equal(units, units.round())
