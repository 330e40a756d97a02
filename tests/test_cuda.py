"""On a CUDA device training is that of a CPU up to rounding, bounds are kept, and what is not covered is named.

Every test here is marked ``cuda``, and skipped with a message where there is no device: `pytest -m cuda` runs them all.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.data.records import Population
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training.batch_independence import is_gradient_batch_independent
from fedveil.training.counters import SeededDropout
from fedveil.training.dpsgd import RecordSums
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, Sums, Trainer, TrainJob, floats_per_record
from fedveil.training.trainer_choice import choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests.training import cohort_of, everyone, task_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available here"),
]

SIZES = [4, 1, 6, 0, 2, 3, 5]
LOCAL = LocalSgd(learning_rate=0.1, epochs=2, batch_size=4, momentum=0.5, weight_decay=0.01)


@pytest.fixture(autouse=True)
def _in_float32() -> Iterator[None]:
    """Compute products and convolutions in float32, not in TF32, so that a CPU can be compared with."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_cuda(cohort: Cohort) -> Cohort:
    device = torch.device("cuda")
    return replace(
        cohort, features=cohort.features.to(device), targets=cohort.targets.to(device), device=device
    )


def updates(trainer: Trainer, task: Task, cohort: Cohort, bound: Bound) -> Sums:
    """Return the updates of all contributions, one a row."""
    members, weights = everyone(cohort)
    job = TrainJob(task.initial(), cohort, members, weights, bound, ExperimentRandomness(0), ("round", 1))
    return trainer.sums(job.per_contribution())


@pytest.mark.parametrize(
    ("kind", "model", "shape"),
    [
        (GramTrainer, "linear", (6,)),
        (VmapTrainer, "mlp", (6,)),
        (VmapTrainer, "cnn", (1, 16, 16)),
        (LoopTrainer, "mlp", (6,)),
        (LoopTrainer, "cnn", (1, 16, 16)),
    ],
)
def test_updates_are_those_of_a_cpu(kind: Any, model: str, shape: tuple[int, ...]) -> None:
    """Dropout of the convolutions included: its masks are hashes of whole numbers."""
    task, cohort = task_of(model, shape), cohort_of(SIZES, shape)
    here = updates(LoopTrainer(task=task, local=LOCAL), task, cohort, Unbounded())
    there = updates(kind(task=task, local=LOCAL), task, on_cuda(cohort), Unbounded())
    assert there.total.is_cuda
    torch.testing.assert_close(there.total.cpu(), here.total, rtol=5e-3, atol=1e-4)
    torch.testing.assert_close(there.norms.cpu(), here.norms, rtol=5e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_a_recurrent_model_is_trained_one_contribution_after_another() -> None:
    task, cohort = task_of("lstm", (80,)), cohort_of([3, 1, 2], (80,))
    cohort = replace(cohort, features=cohort.features.abs().mul(10).floor())
    local = LocalSgd(learning_rate=0.5, epochs=1)
    trainer = choose_trainer(task, local, cohort=on_cuda(cohort), bound=Clip(norm=1.0))
    assert isinstance(trainer, LoopTrainer)
    here, there = (updates(trainer, task, one, Unbounded()).total.cpu() for one in (cohort, on_cuda(cohort)))
    torch.testing.assert_close(there, here, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [VmapTrainer, LoopTrainer])
def test_bfloat16_rounds_and_is_bounded(kind: Any) -> None:
    task, cohort = replace(task_of("mlp"), precision="bfloat16"), on_cuda(cohort_of(SIZES))
    exact = updates(kind(task=task_of("mlp"), local=LOCAL), task, cohort, Unbounded()).total
    rounded = updates(kind(task=task, local=LOCAL), task, cohort, Unbounded()).total
    length = float(exact.norm())
    assert 1e-4 * length < float((rounded - exact).norm()) < 0.2 * length
    clipped = updates(kind(task=task, local=LOCAL), task, cohort, Clip(norm=0.01)).total
    assert 0 < float(clipped.norm(dim=1).max()) <= 0.01


def test_bounded_sums_are_exact_whatever_the_order() -> None:
    """On the bound's grid addition has no rounding: silos together give the sum of contributions one by one."""
    task, cohort = task_of("mlp"), on_cuda(cohort_of(SIZES))
    trainer, (members, weights) = VmapTrainer(task=task, local=LOCAL), everyone(cohort)
    job = TrainJob(
        task.initial(), cohort, members, weights, Clip(norm=0.1), ExperimentRandomness(0), ("round", 1)
    )
    apart, together = trainer.sums(job.per_contribution()).total, trainer.sums(job).total
    rows = cohort.silos(members)
    for silo in range(2):
        assert torch.equal(apart[rows == silo].sum(0), together[silo])


def test_a_batch_that_does_not_fit_is_computed_in_parts() -> None:
    task, cohort = task_of("mlp"), on_cuda(cohort_of([11, 7]))
    memory = 4 * 4 * floats_per_record(task, cohort)
    local = LocalSgd(learning_rate=0.3, epochs=2)
    whole, parts = (
        updates(LoopTrainer(task=task, local=local, memory=most), task, cohort, Unbounded()).total
        for most in (1 << 30, memory)
    )
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)


def test_gradients_of_records_are_bounded_and_those_of_a_cpu() -> None:
    task, cohort = task_of("mlp"), cohort_of([9])
    records, none = torch.from_numpy(cohort.groups.members(0)), torch.zeros(9, dtype=torch.int64)
    bound, model = Clip(norm=0.05), task.initial()
    there = RecordSums(task, bound, on_cuda(cohort), 48 << 20)
    whole = there.gradient_sum(model.cuda(), records, none)
    here = RecordSums(task, bound, cohort, 48 << 20).gradient_sum(model, records, none)
    torch.testing.assert_close(whole.cpu(), here, rtol=1e-3, atol=1e-5)
    for one in (0, 8):
        others = torch.arange(9) != one
        assert float((whole - there.gradient_sum(model.cuda(), records[others], none[:8])).norm()) <= 0.05


def test_dropout_masks_are_those_of_a_cpu() -> None:
    dropout = SeededDropout(0.3, 2, False)
    here = dropout(torch.ones(50, 40))
    assert torch.equal(dropout.cuda()(torch.ones(50, 40, device="cuda")).cpu(), here)


def test_updates_that_are_not_finite_count_as_nothing() -> None:
    task, cohort = Task(model=torch.nn.Linear(6, 3), loss=load_loss("cross_entropy")), cohort_of([3, 2])
    features = cohort.features.clone()
    features[torch.from_numpy(cohort.groups.members(0))] = torch.inf
    poisoned = on_cuda(replace(cohort, features=features))
    sums = updates(VmapTrainer(task=task, local=LOCAL), task, poisoned, Clip(norm=1.0))
    assert sums.nonfinite == 1
    assert bool((sums.total[0] == 0).all())
    assert bool((sums.total[1] != 0).any())


@pytest.fixture(scope="module")
def people() -> Population:
    random = np.random.default_rng(0)
    features, user = random.normal(size=(400, 8)), random.integers(0, 80, 400)
    targets = (features[:, 0] > 0).astype(int)
    return fv.population(
        features,
        targets,
        user=user,
        silo=user % 3,
        n_users=80,
        task="classification",
        classes=[0, 1],
        silos=[0, 1, 2],
    )


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


METHODS = {
    "uldp-avg": fv.uldp_avg(clip=0.5, noise_multiplier=2.0, local_learning_rate=0.5),
    "uldp-sgd": fv.uldp_sgd(clip=0.5, noise_multiplier=2.0),
    "uldp-group": fv.uldp_group(
        clip=0.5, noise_multiplier=2.0, group_size=2, epochs=1, local_learning_rate=0.1, batch_size=32
    ),
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_run_on_the_device_says_so_and_its_bundle_serves_elsewhere(
    name: str, people: Population, tmp_path: Path
) -> None:
    def trained(device: str, **trainer: Any) -> fv.Result:
        return fv.train(
            network(),
            people,
            method=METHODS[name],
            rounds=2,
            delta=1e-3,
            folder=tmp_path,
            settings={"trainer": {"device": device, **trainer}, "privacy": {"insecure_seed": 1}},
        )

    there, here = trained("cuda"), trained("cpu")
    assert there.statement.epsilon == here.statement.epsilon
    said = "training in batches on a CUDA device: the last digits of one contribution may depend on"
    alone = 'name = "loop"' in (there.folder / "experiment.toml").read_text()
    assert any(said in one for one in there.statement.uncovered) is not alone
    assert not any(said in one for one in here.statement.uncovered)
    one, other = (torch.cat([p.flatten() for p in run.model.parameters()]) for run in (there, here))
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    there.save(tmp_path / "model.zip")
    some = np.zeros((3, 8), dtype=np.float32)
    assert (
        fv.load(tmp_path / "model.zip", model=network()).predict(some).tolist()
        == there.predict(some).tolist()
    )


def test_a_run_in_bfloat16_can_be_resumed(people: Population, tmp_path: Path) -> None:
    class Once(fv.Callback):
        def on_round_end(self, round: fv.RoundSummary) -> str | None:
            return "enough"

    settings = {"trainer": {"device": "cuda", "precision": "bfloat16", "memory_mb": 1}}
    method = METHODS["uldp-avg"]
    begun = fv.train(
        network(),
        people,
        method=method,
        rounds=2,
        delta=1e-3,
        folder=tmp_path,
        settings=settings,
        callbacks=[Once()],
    )
    assert begun.rounds == 1
    assert fv.resume(begun.folder, network(), people).rounds == 2


@pytest.mark.parametrize(("model", "shape"), [("mlp", (6,)), ("cnn", (1, 16, 16))])
def test_contributions_that_leave_change_no_bit_where_the_trial_passes(
    model: str, shape: tuple[int, ...]
) -> None:
    """The device computes 64 slots in every step; its trial decides whether contributions with a bound share them."""
    task, cohort = task_of(model, shape), on_cuda(cohort_of([9, 1, 6, 2, 3, 5, 7, 4] * 3, shape))
    trainer = VmapTrainer(task=task, local=LOCAL)
    assert trainer.has_fixed_slots(cohort)
    if not is_gradient_batch_independent(task, cohort, trainer.batch_shapes(cohort), fixed=True):
        assert isinstance(choose_trainer(task, LOCAL, cohort=cohort, bound=Clip(norm=1.0)), LoopTrainer)
        return
    rows = []
    for left in (range(24), range(0, 24, 2)):
        members = torch.tensor(list(left))
        weights = torch.ones(len(members), dtype=torch.float64)
        job = TrainJob(
            task.initial(), cohort, members, weights, Unbounded(), ExperimentRandomness(0), ("round", 1)
        )
        rows.append(trainer.sums(job.per_contribution()).total)
    assert torch.equal(rows[0][::2], rows[1])
