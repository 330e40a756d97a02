"""Layers may compute in bfloat16 and batches in parts: updates stay float32, bounded, and nobody moves another's."""

import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.errors import ModelError, PrivacyError
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.dpsgd import RecordSums
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import BatchGradient, LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, Sums, Trainer, TrainJob, floats_per_record, records_at_once
from fedveil.training.trainer_choice import TrainerOptions, choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests.test_batch_independence import THRESHOLDS, WILD, assert_nobody_moves_others
from tests.training import cohort_of, everyone, gradient_sum, task_of

LOCAL = LocalSgd(learning_rate=0.3, epochs=2, batch_size=4)
SIZES = [4, 1, 6, 0, 2, 3, 5]


def in_bfloat16(model: str, shape: tuple[int, ...] = (6,)) -> Task:
    return replace(task_of(model, shape), precision="bfloat16")


def updates(trainer: Trainer, task: Task, cohort: Cohort, bound: Bound) -> Sums:
    """Return the updates of all contributions, one a row."""
    members, weights = everyone(cohort)
    job = TrainJob(task.initial(), cohort, members, weights, bound, ExperimentRandomness(0), ("round", 1))
    return trainer.sums(job.per_contribution())


@pytest.mark.parametrize("model", ["mlp", "mlp_32_16"])
def test_vectorised_training_is_the_loop_in_bfloat16_and_neither_is_that_in_float32(model: str) -> None:
    task, cohort = in_bfloat16(model), cohort_of(SIZES)
    loop, vmap = (
        updates(kind(task=task, local=LOCAL), task, cohort, Unbounded()).total
        for kind in (LoopTrainer, VmapTrainer)
    )
    exact = updates(LoopTrainer(task=task_of(model), local=LOCAL), task, cohort, Unbounded()).total
    length = float(exact.norm())
    assert float((vmap - loop).norm()) < 0.02 * length
    assert 1e-4 * length < float((loop - exact).norm()) < 0.2 * length


def test_the_bound_is_enforced_on_what_bfloat16_computed() -> None:
    task, cohort = in_bfloat16("mlp"), cohort_of([4, 1, 6, 2])
    clipped = updates(VmapTrainer(task=task, local=LocalSgd(**WILD)), task, cohort, Clip(norm=0.1))
    assert bool((clipped.norms > 0.1).all())
    assert float(clipped.total.norm(dim=1).max()) <= 0.1


class CastsInputs(torch.nn.Module):
    """Computes in the type of its weights, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 64), torch.nn.Linear(64, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.last(torch.tanh(self.first(features.to(self.first.weight.dtype))))
        return hidden


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [VmapTrainer, LoopTrainer, GramTrainer])
def test_a_default_type_that_a_user_sets_changes_no_bit(kind: type, default: torch.dtype) -> None:
    """With torch.set_default_dtype(torch.float16) updates were rounded after the bound, up to more than it."""
    torch.manual_seed(0)
    task = (
        task_of("linear")
        if kind is GramTrainer
        else Task(model=CastsInputs(), loss=load_loss("cross_entropy"))
    )
    cohort = cohort_of(SIZES)
    for local in (LOCAL, LocalSgd(learning_rate=0.3, epochs=1)):
        wanted = updates(kind(task=task, local=local), task, cohort, Clip(norm=0.01)).total
        try:
            torch.set_default_dtype(default)
            found = updates(kind(task=task, local=local), task, cohort, Clip(norm=0.01)).total
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_updates_of_fewer_bits_are_not_bounded(narrow: torch.dtype) -> None:
    rows, one = torch.ones(1, 3, dtype=narrow), torch.ones(1, dtype=torch.float64)
    quantize = inspect.unwrap(
        Clip.quantize_
    )  # without the check of shapes and types, which is that of tests alone
    with pytest.raises(PrivacyError, match="cannot be bounded"):
        quantize(Clip(norm=1.0), rows, one, one)


def test_who_takes_part_changes_no_bit_in_the_trainer_that_is_chosen() -> None:
    task, cohort = in_bfloat16("mlp", (20,)), cohort_of(THRESHOLDS, (20,))
    trainer = choose_trainer(task, LocalSgd(**WILD), cohort=cohort, bound=Clip(norm=1.0))
    assert_nobody_moves_others(trainer, task, cohort, [0, 7])


def test_removing_a_record_moves_a_sum_of_gradients_by_at_most_the_bound() -> None:
    task, cohort = in_bfloat16("mlp"), cohort_of([9])
    sums = RecordSums(task, Clip(norm=0.05), cohort, 48 << 20)
    records, none = torch.from_numpy(cohort.groups.members(0)), torch.zeros(9, dtype=torch.int64)
    whole = gradient_sum(sums, task.initial(), records, none)
    for one in (0, 4, 8):
        others = torch.arange(9) != one
        assert float((whole - gradient_sum(sums, task.initial(), records[others], none[:8])).norm()) <= 0.05


def test_span_computes_in_float32_alone() -> None:
    task, cohort = in_bfloat16("linear"), cohort_of([3, 2])
    assert isinstance(choose_trainer(task_of("linear"), LOCAL, cohort=cohort), GramTrainer)
    assert not isinstance(choose_trainer(task, LOCAL, cohort=cohort), GramTrainer)
    with pytest.raises(ModelError, match="gram computes in float32"):
        choose_trainer(task, LOCAL, TrainerOptions(name="gram"), cohort=cohort)


def test_metrics_are_computed_in_float32() -> None:
    task, features = task_of("mlp"), torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    outputs = [one.predict(one.initial(), features) for one in (task, replace(task, precision="bfloat16"))]
    assert torch.equal(*outputs)


@pytest.mark.slow
def test_a_run_in_bfloat16_has_the_guarantee_of_one_in_float32(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    features, user = random.normal(size=(60, 4)), random.integers(0, 20, 60)
    people = fv.population(
        features,
        (features[:, 0] > 0).astype(int),
        user=user,
        silo=user % 2,
        n_users=20,
        task="classification",
        classes=[0, 1],
        silos=[0, 1],
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    single, half = (
        fv.train(
            model,
            people,
            method=fv.uldp_avg(clip=0.5, noise_multiplier=2.0, local_learning_rate=0.5),
            rounds=1,
            delta=1e-3,
            folder=tmp_path,
            settings={"trainer": {"precision": precision, "device": "cpu"}, "privacy": {"insecure_seed": 1}},
        )
        for precision in ("float32", "bfloat16")
    )
    assert half.statement.to_json() == single.statement.to_json()
    assert 'precision = "bfloat16"' in (half.folder / "experiment.toml").read_text()
    one, other = (torch.cat([p.flatten() for p in run.model.parameters()]) for run in (single, half))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", [LoopTrainer, VmapTrainer])
def test_a_batch_that_does_not_fit_is_computed_in_parts(
    kind: type[LoopTrainer | VmapTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = [0]

    def counted(_: object, features: torch.Tensor) -> torch.Tensor:
        most[0] = max(most[0], len(features))
        return torch.tanh(features)

    monkeypatch.setattr(torch.nn.Tanh, "forward", counted)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    task, cohort = Task(model=model, loss=load_loss("cross_entropy")), cohort_of([11, 7, 2])
    memory = 4 * 4 * floats_per_record(task, cohort)
    most[0] = 0
    assert records_at_once(task, cohort, memory) == 4
    local = LocalSgd(learning_rate=0.3, epochs=2, momentum=0.5)
    whole = updates(LoopTrainer(task=task, local=local), task, cohort, Unbounded()).total
    assert most[0] == 11
    most[0] = 0
    parts = updates(kind(task=task, local=local, memory=memory), task, cohort, Unbounded()).total
    assert most[0] == 4
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_a_part_counts_by_its_records() -> None:
    """Eleven records in parts of four: the last has three, and parts that count alike would give another gradient."""
    task, cohort = task_of("mlp"), cohort_of([11])
    model, batch, seed = task.initial(), cohort.batch(torch.arange(11)), torch.tensor(3)
    device = torch.device("cpu")
    whole = BatchGradient(task, device, 11).evaluate(model, *batch, seed)
    parts = [
        BatchGradient(task, device, 4).evaluate(model, *(one[i : i + 4] for one in batch), seed)
        for i in (0, 4, 8)
    ]
    assert float(
        (BatchGradient(task, device, 4).evaluate(model, *batch, seed) - whole).norm()
    ) < 1e-6 * float(whole.norm())
    assert float((torch.stack(parts).mean(0) - whole).norm()) > 0.02 * float(whole.norm())


def test_parts_have_dropout_masks_of_their_own() -> None:
    """Two equal parts under one mask would have the gradient of either."""
    layers = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 3))
    task = Task(model=layers, loss=load_loss("cross_entropy"))
    records, targets = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
    gradient, seed = BatchGradient(task, torch.device("cpu"), 4), torch.tensor(3)
    divided = BatchGradient(task, torch.device("cpu"), 4).evaluate(
        task.initial(), records.repeat(2, 1), targets.repeat(2), seed
    )
    assert not torch.allclose(divided, gradient.evaluate(task.initial(), records, targets, seed))


def test_a_loss_over_sets_of_records_is_not_divided() -> None:
    task = Task(model=torch.nn.Linear(6, 1), loss=load_loss("cox"))
    survival = torch.rand(9, 2, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    survival[:, 0] = (survival[:, 0] > 0.3).float()
    features = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    whole, few = (
        BatchGradient(task, torch.device("cpu"), at_once).evaluate(
            task.initial(), features, survival, torch.tensor(0)
        )
        for at_once in (9, 2)
    )
    assert torch.equal(whole, few)
