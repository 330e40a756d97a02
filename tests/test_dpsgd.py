"""DP-SGD inside a silo: its gradients are Opacus's, its sums are bounded, its batches are Poisson."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from scipy import stats

from fedveil.errors import CompositionError
from fedveil.local.dpsgd import DpSgdTrainer, RecordSums, poisson
from fedveil.local.losses import load_loss
from fedveil.local.steps import LocalDpSgd
from fedveil.local.task import Task
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from tests.training import cohort_of, everyone, task_of

SEED = torch.tensor(5)


def no_noise(dimension, std, grid, source):
    raise AssertionError("noise was drawn although the multiplier is 0")


def trainer_of(task, noise_multiplier=0.0, noise=no_noise, batch_size=4, epochs=1, learning_rate=0.5):
    local = LocalDpSgd(
        learning_rate=learning_rate, epochs=epochs, batch_size=batch_size, noise_multiplier=noise_multiplier
    )
    return DpSgdTrainer(task=task, local=local, noise=noise, privacy=PrivacyRandomness.insecure(0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "shape"), [("linear", (6,)), ("mlp", (6,))])
@pytest.mark.parametrize("norm", [0.05, 100.0])
def test_one_step_is_opacuss(model, shape, norm):
    task, cohort = task_of(model, shape), cohort_of([9], shape, n_silos=1)
    trainer = trainer_of(task, batch_size=9)  # one batch of everybody
    members, weights = everyone(cohort)
    sums = trainer.sums(
        task.initial(), cohort, members, weights, Clip(norm=norm), ExperimentRandomness(0), ()
    )

    private = GradSampleModule(task_of(model, shape).model)
    optimizer = DPOptimizer(
        torch.optim.SGD(private.parameters(), lr=0.5),
        noise_multiplier=0.0,
        max_grad_norm=norm,
        expected_batch_size=9,
    )
    rows = torch.from_numpy(cohort.groups.members(0))
    torch.nn.functional.cross_entropy(private(cohort.features[rows]), cohort.targets[rows]).backward()
    optimizer.step()
    end = torch.cat([p.detach().reshape(-1) for p in private.parameters()])
    torch.testing.assert_close(
        sums.total[0].float(), end - task.initial(), rtol=1e-3, atol=0.5 * Clip(norm=norm).grid + 1e-6
    )


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 1e6]),
    norm=st.sampled_from([1e-3, 0.7, 50.0]),
)
def test_one_record_moves_the_gradient_sum_by_at_most_the_bound(seed, scale, norm):
    task, cohort = task_of("mlp"), cohort_of([8], seed=seed)
    cohort.features.mul_(scale)
    records = RecordSums(task, Clip(norm=norm), cohort, memory=1)
    batch = torch.arange(8)
    full = records.gradient_sum(task.initial(), batch, SEED)
    for left_out in (0, 5):
        less = records.gradient_sum(task.initial(), batch[batch != left_out], SEED)
        assert float((full - less).norm()) <= norm


def test_a_poisoned_record_adds_nothing():
    task, cohort = task_of("mlp"), cohort_of([8])
    records = RecordSums(task, Clip(norm=1.0), cohort, memory=1 << 20)
    clean = records.gradient_sum(task.initial(), torch.arange(1, 8), SEED)
    cohort.features[0] = float("nan")
    poisoned = records.gradient_sum(task.initial(), torch.arange(8), SEED)
    torch.testing.assert_close(poisoned, clean, rtol=0, atol=1e-4)


def test_noise_has_its_scale_and_the_divisor_is_the_expected_batch():
    task, cohort = task_of("mlp"), cohort_of([12], n_silos=1)
    calls = []

    def recording(dimension, std, grid, source):
        calls.append((std, grid))
        return np.full(dimension, 1000.0)

    clip = Clip(norm=0.01)
    trainer = trainer_of(task, noise_multiplier=2.0, noise=recording, batch_size=6, epochs=3)
    members, weights = everyone(cohort)
    sums = trainer.sums(task.initial(), cohort, members, weights, clip, ExperimentRandomness(0), ())
    assert calls == [(0.02, clip.grid)] * 6
    assert sums.steps == 6
    # Six steps of -0.5 * 1000 / 6 each; the clipped gradients are at most 12 * 0.01.
    torch.testing.assert_close(sums.total[0], torch.full_like(sums.total[0], -500.0), rtol=0, atol=0.2)


def test_an_empty_silo_and_an_empty_batch():
    task, cohort = task_of("mlp"), cohort_of([0, 1])
    members, weights = everyone(cohort)
    sums = trainer_of(task).sums(
        task.initial(), cohort, members, weights, Clip(norm=1.0), ExperimentRandomness(0), ()
    )
    assert sums.total[0].abs().sum() == 0
    records = RecordSums(task, Clip(norm=1.0), cohort, memory=1)
    assert records.gradient_sum(task.initial(), torch.zeros(0, dtype=torch.int64), SEED).abs().sum() == 0


def test_batches_are_poisson():
    source = PrivacyRandomness.insecure(1).stream("test")
    joined = poisson(1_000_000, 0.3, source)
    count = int(joined.sum())
    assert stats.binomtest(count, len(joined), 0.3).pvalue > 1e-7
    assert stats.binomtest(count, len(joined), 0.3 * 1.02).pvalue < 1e-7
    assert bool(poisson(1000, 1.0, source).all())
    assert not bool(poisson(1000, 0.0, source).any())


def test_what_dp_sgd_cannot_do_is_refused():
    with pytest.raises(CompositionError, match="cox"):
        trainer_of(Task(model=torch.nn.Linear(6, 1), loss=load_loss("cox")))
    task, cohort = task_of("mlp"), cohort_of([3])
    members, weights = everyone(cohort)
    with pytest.raises(CompositionError, match="clip"):
        trainer_of(task).sums(
            task.initial(), cohort, members, weights, Unbounded(), ExperimentRandomness(0), ()
        )
