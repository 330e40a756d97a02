"""The readable trainer against torch's own optimiser, and what every trainer promises."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.records import Affine, Records
from fedveil.errors import ConfigError, ModelError
from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training import trainer
from fedveil.training.counters import batch_order, mix
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalGradient, LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trainer_choice import TrainerOptions, choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests.training import cohort_of, everyone, task_of

RANDOMNESS = ExperimentRandomness(7)
TRAINERS = [LoopTrainer, VmapTrainer]


def torch_update(task: Task, local: LocalSgd, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Train with torch.optim.SGD on all records at once."""
    model = task.model
    start = task.initial()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=local.learning_rate, momentum=local.momentum, weight_decay=local.weight_decay
    )
    for _ in range(local.epochs):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
    end = task.initial()
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(start, model.parameters())
    return end - start


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.5, 0.01)])
def test_full_batch_training_is_torch_sgd(trainer, momentum, weight_decay):
    task, cohort = task_of("mlp"), cohort_of([5])
    local = LocalSgd(learning_rate=0.3, epochs=4, momentum=momentum, weight_decay=weight_decay)
    sums = trainer(task=task, local=local).sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), RANDOMNESS, ())
    )
    rows = torch.from_numpy(cohort.groups.members(0))
    expected = torch_update(task, local, cohort.features[rows], cohort.targets[rows])
    torch.testing.assert_close(sums.total[0].float(), expected, rtol=1e-4, atol=1e-6)
    assert sums.steps == 4


@pytest.mark.parametrize("trainer", TRAINERS)
def test_gradient_step_is_minus_the_mean_gradient(trainer):
    task, cohort = task_of("mlp"), cohort_of([7])
    sums = trainer(task=task, local=LocalGradient()).sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), RANDOMNESS, ())
    )
    rows = torch.from_numpy(cohort.groups.members(0))
    loss = torch.nn.functional.cross_entropy(task.model(cohort.features[rows]), cohort.targets[rows])
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(task.model.parameters()))])
    torch.testing.assert_close(sums.total[0].float(), -gradient, rtol=1e-5, atol=1e-7)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    batch_size=st.integers(1, 6),
    epoch=st.integers(0, 3),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_every_epoch_visits_every_record_once_in_an_order_of_its_own(sizes, batch_size, epoch, seed):
    seeds = mix(torch.arange(len(sizes)) + seed % 1000)
    order = batch_order(seeds, torch.tensor(sizes), epoch, batch_size)
    for i, size in enumerate(sizes):
        assert sorted(order[i, :size].tolist()) == list(range(size))
        alone = batch_order(seeds[i : i + 1], torch.tensor([size]), epoch, batch_size)
        assert alone[0].tolist() == order[i, :size].tolist()


def test_batch_order_is_uniform_over_permutations():
    seeds = mix(torch.arange(60_000))
    order = batch_order(seeds, torch.full((60_000,), 3), 0, 1)
    counts = np.bincount((order * torch.tensor([9, 3, 1])).sum(1).numpy(), minlength=27)
    counts = counts[counts > 0]
    assert len(counts) == 6
    chi_square = ((counts - 10_000) ** 2 / 10_000).sum()
    assert chi_square < 39.0  # 5 degrees of freedom: exceeded with probability 2e-7
    tilted = counts + np.array([300, -300, 0, 0, 300, -300])
    assert ((tilted - 10_000) ** 2 / 10_000).sum() > 20.0


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("bound", [Clip(norm=0.05), Unbounded()])
def test_contributions_without_records_add_nothing(trainer, bound):
    task, cohort = task_of("mlp"), cohort_of([0, 3, 0])
    sums = trainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=2, batch_size=2)).sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), bound, RANDOMNESS, ())
    )
    assert sums.norms[[0, 2]].tolist() == [0.0, 0.0]
    assert sums.total[0].abs().sum() == 0
    assert sums.steps == 4


@pytest.mark.parametrize("trainer", [*TRAINERS, GramTrainer])
def test_nobody_trains(trainer):
    task, cohort = task_of("linear"), cohort_of([0, 0])
    sums = trainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=2)).sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), Clip(norm=1.0), RANDOMNESS, ())
    )
    assert sums.total.abs().sum() == 0
    assert (sums.steps, sums.nonfinite) == (0, 0)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_an_update_that_is_not_finite_is_counted_and_never_reaches_the_sum(trainer, poison):
    task, cohort = task_of("mlp"), cohort_of([3, 4, 5, 2])
    row = int(cohort.groups.members(2)[0])
    features = cohort.features.clone()
    features[row] = poison
    poisoned = dataclasses.replace(cohort, features=features)
    run = trainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=3, batch_size=2))
    members, weights = everyone(cohort)
    sums = run.sums(TrainJob(task.initial(), poisoned, members, weights, Clip(norm=0.1), RANDOMNESS, ()))
    others = members[members != 2]
    clean = run.sums(
        TrainJob(task.initial(), cohort, others, weights[others], Clip(norm=0.1), RANDOMNESS, ())
    )
    assert sums.nonfinite == 1
    assert sums.norms.isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(sums.total, clean.total, rtol=0, atol=1e-5)


@given(seed=st.integers(0, 1000), left_out=st.integers(0, 2), scale=st.sampled_from([1.0, 30.0, 1e4]))
def test_one_user_moves_the_loop_trainers_sum_by_at_most_her_bound(seed, left_out, scale):
    task, cohort = task_of("mlp"), cohort_of([3, 1, 2], seed=seed)
    cohort = dataclasses.replace(cohort, scale=Affine(factor=scale))
    run = LoopTrainer(task=task, local=LocalSgd(learning_rate=0.5, epochs=1, batch_size=2))
    members, weights = everyone(cohort)
    clip = Clip(norm=0.37)
    full = run.sums(TrainJob(task.initial(), cohort, members, weights, clip, RANDOMNESS, ("round", 1)))
    others = members[members != left_out]
    less = run.sums(TrainJob(task.initial(), cohort, others, weights[others], clip, RANDOMNESS, ("round", 1)))
    difference = full.total - less.total
    assert float(difference.norm()) <= clip.norm
    alone = members[left_out : left_out + 1]
    own = run.sums(TrainJob(task.initial(), cohort, alone, weights[:1], clip, RANDOMNESS, ("round", 1)))
    assert torch.equal(difference, own.total)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rounds_differ_and_repeat(trainer):
    task, cohort = task_of("mlp"), cohort_of([9, 8])
    run = trainer(task=task, local=LocalSgd(learning_rate=0.5, epochs=1, batch_size=2))
    first, again, second = (
        run.sums(
            TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), RANDOMNESS, ("round", r))
        ).total
        for r in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_progress_counts_local_steps(trainer):
    task, cohort = task_of("mlp"), cohort_of([4, 0, 7])
    seen = []
    trainer(task=task, local=LocalSgd(learning_rate=0.5, epochs=2, batch_size=3)).sums(
        TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), RANDOMNESS, ()),
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (10, 10)


@pytest.mark.parametrize(
    ("made", "sizes"),
    [(LoopTrainer, [6]), (VmapTrainer, [6, 6]), (partial(VmapTrainer, memory=1), [6])],
    ids=["loop", "side by side", "alone"],
)
def test_who_watches_can_end_training_within_a_chunk(made, sizes, monkeypatch):
    """A deadline is looked at every second, or the training of a silo's one contribution would have none."""
    monkeypatch.setattr(trainer, "_PROGRESS_SECONDS", 0.0)
    task, cohort, seen = task_of("mlp"), cohort_of(sizes), []

    def progress(done, total):
        seen.append(done)
        if len(seen) == 5:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        made(task=task, local=LocalSgd(learning_rate=0.5, epochs=50, batch_size=3)).sums(
            TrainJob(task.initial(), cohort, *everyone(cohort), Unbounded(), RANDOMNESS, ()), progress
        )
    assert seen == [0] * 5


def test_stored_bytes_are_scaled_one_batch_at_a_time():
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (5, 4), dtype=np.uint8)
    raw.setflags(write=False)
    column = np.zeros(5, dtype=np.int32)
    records = Records(features=raw, targets=column.astype(np.int64), silo=column, user=column)
    scale = Affine(factor=1 / 255, shift=-0.5)
    cohort = Cohort.from_records(
        records, groups=records.by_silo_user(), n_silos=1, scale=scale, device=torch.device("cpu")
    )
    features, targets = cohort.batch(torch.tensor([[3, 1], [0, 0]]))
    assert features.shape == (2, 2, 4)
    assert targets.shape == (2, 2)
    np.testing.assert_allclose(features[0, 1].numpy(), scale.apply(raw[1:2])[0], rtol=1e-6, atol=1e-7)
    assert cohort.features.dtype == torch.uint8


class Recurrent(torch.nn.Module):
    """The last state of an LSTM over the features, one number a step."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = torch.nn.LSTM(1, 4, batch_first=True)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(features[:, :, None])[0][:, -1])


class Branching(torch.nn.Module):
    """Looks at a value to decide what to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features) if bool((self.layer.bias < 9).all()) else features[:, :3]


def test_the_trainer_is_chosen_by_what_the_model_can_do():
    local, cohort = LocalSgd(learning_rate=0.1, epochs=1), cohort_of([3])
    assert isinstance(choose_trainer(task_of("linear"), local), GramTrainer)
    assert isinstance(choose_trainer(task_of("mlp"), local, cohort=cohort), VmapTrainer)
    recurrent = Task(model=Recurrent(), loss=load_loss("cross_entropy"))
    assert isinstance(choose_trainer(recurrent, local), LoopTrainer)
    branching = Task(model=Branching(), loss=load_loss("cross_entropy"))
    assert isinstance(choose_trainer(branching, local, cohort=cohort), LoopTrainer)
    assert isinstance(choose_trainer(task_of("linear"), local, TrainerOptions(name="loop")), LoopTrainer)
    with pytest.raises(ConfigError, match="auto, loop, vmap or gram"):
        choose_trainer(recurrent, local, TrainerOptions(name="fast"))
    with pytest.raises(ModelError, match="gram"):
        choose_trainer(recurrent, local, TrainerOptions(name="gram"))


def test_span_knows_neither_l1_bounds_nor_passes_that_end_early():
    task, cohort = task_of("linear"), cohort_of([3, 2])
    local, bound = LocalSgd(learning_rate=0.1, epochs=1), ClipL1(norm=1.0)
    limited = LocalSgd(learning_rate=0.1, epochs=1, steps=1, batch_size=1)
    assert isinstance(choose_trainer(task, local, cohort=cohort, bound=bound), VmapTrainer)
    assert isinstance(choose_trainer(task, limited, cohort=cohort), VmapTrainer)
    with pytest.raises(ModelError, match="early"):
        choose_trainer(task, limited, TrainerOptions(name="gram"))
    with pytest.raises(ModelError, match="l1"):  # before a round is charged
        choose_trainer(task, local, TrainerOptions(name="gram"), cohort=cohort, bound=bound)
    with pytest.raises(ModelError, match="l1"):
        GramTrainer(task=task, local=local).sums(
            TrainJob(task.initial(), cohort, *everyone(cohort), bound, ExperimentRandomness(0), ("round", 1))
        )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_pass_ends_after_its_steps_or_with_the_records(trainer):
    """Three steps of one record each, of contributions of 5, 2 and 0 records."""
    task, cohort = task_of("linear"), cohort_of([5, 2, 0])
    limited = LocalSgd(learning_rate=0.1, epochs=1, steps=3, batch_size=1)
    sums = trainer(task=task, local=limited).sums(
        TrainJob(
            task.initial(), cohort, *everyone(cohort), Unbounded(), ExperimentRandomness(0), ("round", 1)
        )
    )
    assert sums.steps == 3 + 2


def test_convolutions_on_large_batches_are_computed_one_by_one_whoever_else_is_there():
    network = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 6)), torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )
    task = Task(model=network, loss=load_loss("cross_entropy"))
    local = LocalSgd(learning_rate=0.1, epochs=1, batch_size=40)
    for sizes in ([80, 40], [80, 1, 1, 1]):
        cohort = cohort_of(sizes)
        trainer = choose_trainer(task, local, cohort=cohort)
        assert isinstance(trainer, VmapTrainer)
        chunks = list(trainer._chunks(cohort, torch.arange(len(sizes))))
        assert {chunk.width: chunk.slots for chunk in chunks}[40] == 1


def test_a_recurrent_model_trains_in_the_loop():
    task, cohort = Task(model=Recurrent(), loss=load_loss("cross_entropy")), cohort_of([3, 2])
    trainer = choose_trainer(task, LocalSgd(learning_rate=0.1, epochs=2))
    sums = trainer.sums(TrainJob(task.initial(), cohort, *everyone(cohort), Clip(norm=1.0), RANDOMNESS, ()))
    assert (sums.norms > 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"epochs": 0},
        {"batch_size": 0},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"steps": 0},
        {"epochs": 2, "steps": 1},
    ],
)
def test_local_steps_outside_their_domain_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LocalSgd(**({"learning_rate": 0.1, "epochs": 1} | wrong))
