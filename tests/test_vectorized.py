"""The vectorised trainer computes what the loop computes, whatever the shapes and the chunks."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import TrainJob
from fedveil.training.vectorized import VmapTrainer
from tests.training import cohort_of, everyone, task_of

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=7)
MIXED = [4, 1, 6, 0, 2, 3, 5]
LOCAL = st.builds(
    LocalSgd,
    learning_rate=st.sampled_from([0.05, 0.3]),
    epochs=st.integers(1, 3),
    batch_size=st.none() | st.integers(1, 5),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.05]),
    projection=st.sampled_from([None, 1e-3, 0.05, 1.0]),
)


def assert_same_sums(task, local, cohort, bound, memory, seed):
    members, weights = everyone(cohort)
    members, weights = members.flip(0), weights * 0.7
    job = TrainJob(task.initial(), cohort, members, weights, bound, ExperimentRandomness(seed), ("round", 2))
    oracle = LoopTrainer(task=task, local=local).sums(job)
    fast = VmapTrainer(task=task, local=local, memory=memory).sums(job)
    torch.testing.assert_close(fast.norms, oracle.norms, rtol=2e-3, atol=2e-5)
    torch.testing.assert_close(fast.total, oracle.total, rtol=2e-3, atol=5e-5)
    assert (fast.steps, fast.nonfinite) == (oracle.steps, oracle.nonfinite)


@settings(max_examples=25)
@example(
    "linear", MIXED, LocalSgd(learning_rate=0.3, epochs=2, batch_size=2, momentum=0.9), 100, Unbounded(), 1
)
@example(
    "mlp", MIXED, LocalSgd(learning_rate=0.3, epochs=3, batch_size=2, weight_decay=0.05), 3, Unbounded(), 2
)
@example("mlp_groupnorm", MIXED, LocalSgd(learning_rate=0.05, epochs=2, batch_size=2), 100, Unbounded(), 3)
@example(
    "mlp_32_16", MIXED, LocalSgd(learning_rate=0.3, epochs=1, steps=2, batch_size=2), 2, ClipL1(norm=0.1), 5
)
@example(
    "linear", MIXED, LocalSgd(learning_rate=0.3, epochs=1, steps=3, batch_size=1), 9, ClipL1(norm=1.0), 6
)
@example("mlp_groupnorm", MIXED, LocalSgd(learning_rate=0.05, epochs=2, batch_size=3), 3, Clip(norm=0.1), 4)
@given(
    model=st.sampled_from(["linear", "mlp", "mlp_groupnorm"]),
    sizes=SIZES,
    local=LOCAL,
    chunk=st.sampled_from([1, 3, 100]),
    clip=st.sampled_from([Unbounded(), Clip(norm=0.1)]),
    seed=st.integers(0, 10**6),
)
def test_vectorised_training_is_the_loop(model, sizes, local, chunk, clip, seed):
    task = task_of(model)
    assert_same_sums(task, local, cohort_of(sizes, seed=seed), clip, 30 * chunk * task.dimension, seed)


@settings(max_examples=4)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), local=LOCAL)
def test_convolutions_and_their_dropout_are_the_loop(sizes, local):
    task = task_of("cnn", (1, 16, 16))
    assert_same_sums(task, local, cohort_of(sizes, (1, 16, 16)), Clip(norm=0.1), 1 << 20, 3)


class Shared(torch.nn.Module):
    """One matrix used twice, one frozen layer, one unused layer and one constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(6, 3)
        self.head.requires_grad_(False)
        self.unused = torch.nn.Linear(2, 2)
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("constant", torch.tensor(2.0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(features))))
        return self.head(hidden) * self.scalar * self.constant


def test_shared_frozen_unused_and_scalar_parameters():
    task = Task(model=Shared(), loss=load_loss("cross_entropy"))
    assert task.dimension == 36 + 6 + 6 + 6 + 1
    assert_same_sums(
        task, LocalSgd(learning_rate=0.3, epochs=2, batch_size=2), cohort_of([3, 1, 0, 4]), Unbounded(), 1, 0
    )


def test_cox_loss_over_minibatches():
    task = Task(model=torch.nn.Linear(6, 1), loss=load_loss("cox"))
    cohort = cohort_of([5, 1, 2, 0])
    survival = torch.rand(len(cohort.targets), 2, generator=torch.Generator().manual_seed(0))
    survival[:, 0] = (survival[:, 0] > 0.3).float()
    cohort = type(cohort)(**(vars(cohort) | {"targets": survival}))
    assert_same_sums(
        task, LocalSgd(learning_rate=0.3, epochs=2, batch_size=3), cohort, Clip(norm=0.2), 1 << 20, 1
    )


@pytest.mark.parametrize("path", [("round", 1), ("round", 2)])
def test_chunks_do_not_change_the_sum_beyond_rounding(path):
    task, cohort = task_of("mlp_groupnorm"), cohort_of([4, 1, 6, 2, 2, 3, 5])
    local = LocalSgd(learning_rate=0.1, epochs=2, batch_size=2)
    totals = [
        VmapTrainer(task=task, local=local, memory=memory)
        .sums(
            TrainJob(task.initial(), cohort, *everyone(cohort), Clip(norm=0.1), ExperimentRandomness(0), path)
        )
        .total
        for memory in (1 << 14, 3 << 16, 1 << 24)
    ]
    for total in totals[1:]:
        torch.testing.assert_close(total, totals[0], rtol=0, atol=1e-4)


def test_memory_does_not_grow_with_the_number_of_contributions():
    task = task_of("mlp")
    trainer = VmapTrainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=1), memory=1 << 20)
    few, many = (cohort_of([2] * users) for users in (500, 2000))
    largest = [
        max(chunk.slots for chunk in trainer._chunks(cohort, torch.arange(len(cohort.groups))))
        for cohort in (few, many)
    ]
    assert largest[0] == largest[1] < 500


class Sum(torch.nn.Module):
    """An affine layer whose weight is the sum of two parameters: autograd hands both one tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.zeros(3, 6))
        self.change = torch.nn.Parameter(torch.zeros(3, 6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features @ (self.base + self.change).T


def test_parameters_with_one_gradient_have_a_momentum_each():
    task = Task(model=Sum(), loss=load_loss("cross_entropy"))
    local = LocalSgd(learning_rate=0.3, epochs=3, batch_size=2, momentum=0.9)
    assert_same_sums(task, local, cohort_of(MIXED), Clip(norm=50.0), None, 7)
