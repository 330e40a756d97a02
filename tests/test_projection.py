"""Projected local SGD: after EVERY local step the model is in the ball, whatever the records."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.steps import LocalSgd, project_
from fedveil.training.trainer import TrainJob
from fedveil.training.vectorized import VmapTrainer
from tests.training import cohort_of, everyone, task_of

TRAINERS = [LoopTrainer, VmapTrainer, GramTrainer]


def norms(trainer, local: LocalSgd, sizes: list[int], seed: int = 0) -> torch.Tensor:
    task, cohort = task_of("linear"), cohort_of(sizes, seed=seed)
    run = trainer(task=task, local=local)
    sums = run.sums(
        TrainJob(
            task.initial(), cohort, *everyone(cohort), Unbounded(), ExperimentRandomness(seed), ("round", 1)
        )
    )
    return sums.norms


@pytest.mark.parametrize("trainer", TRAINERS)
@settings(max_examples=10)
@given(
    radius=st.sampled_from([1e-4, 0.05, 0.7]),
    rate=st.sampled_from([0.1, 5.0, 1e4]),
    batch_size=st.sampled_from([None, 1, 3]),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_no_update_is_longer_than_the_radius(trainer, radius, rate, batch_size, epochs, seed) -> None:
    local = LocalSgd(
        learning_rate=rate, epochs=epochs, batch_size=batch_size, weight_decay=0.01, projection=radius
    )
    assert norms(trainer, local, [5, 1, 0, 9], seed).max() <= radius * (1 + 1e-4) + 1e-6


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_projection_acts_after_every_step_not_only_at_the_end(trainer) -> None:
    """Two steps that each leave the ball: the second starts on its surface."""
    radius, task, cohort = 0.01, task_of("linear"), cohort_of([4])
    start, (features, targets) = task.initial(), cohort.batch(torch.from_numpy(cohort.groups.members(0)))
    delta = torch.zeros_like(start)
    for _ in range(2):
        torch.nn.utils.vector_to_parameters(start + delta, task.model.parameters())
        loss = torch.nn.functional.cross_entropy(task.model(features), targets)
        slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(task.model.parameters()))])
        delta = delta - 0.02 * slope
        delta = delta / max(1.0, float(delta.norm()) / radius)
    torch.nn.utils.vector_to_parameters(start, task.model.parameters())
    run = trainer(task=task, local=LocalSgd(learning_rate=0.02, epochs=2, projection=radius))
    sums = run.sums(TrainJob(start, cohort, *everyone(cohort), Unbounded(), ExperimentRandomness(0), ()))
    torch.testing.assert_close(sums.total[0].float(), delta, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_radius_out_of_reach_changes_nothing(trainer) -> None:
    free = LocalSgd(learning_rate=0.1, epochs=2, batch_size=2)
    far = LocalSgd(learning_rate=0.1, epochs=2, batch_size=2, projection=1e6)
    torch.testing.assert_close(
        norms(trainer, far, [5, 3]), norms(trainer, free, [5, 3]), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("trainer", [LoopTrainer, VmapTrainer])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_is_counted_not_projected(trainer, poison) -> None:
    task, cohort = task_of("mlp"), cohort_of([3, 4])
    cohort.features[int(cohort.groups.members(1)[0])] = poison
    run = trainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=2, batch_size=2, projection=0.1))
    sums = run.sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), Clip(norm=0.1), ExperimentRandomness(0), ())
    )
    assert sums.norms.isnan().tolist() == [False, True]


def test_rows_too_long_for_float32_norms_are_projected() -> None:
    rows = torch.full((2, 4), 2e38)
    project_(rows, None, 2.0)
    torch.testing.assert_close(rows, torch.ones(2, 4))


def test_the_learning_rate_falls_by_its_decay_from_round_to_round() -> None:
    local = LocalSgd(learning_rate=0.1, epochs=1, decay=0.99)
    assert local.at_round(1).learning_rate == 0.1
    assert local.at_round(3).learning_rate == pytest.approx(0.1 * 0.99**2)
    assert local.at_round(3).at_round(3) == local.at_round(3)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"projection": 0.0}, "projection"),
        ({"projection": math.inf}, "projection"),
        ({"decay": 0.0}, "decay"),
    ],
)
def test_values_outside_their_range_are_refused(changes: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LocalSgd(learning_rate=0.1, epochs=1, **changes)
