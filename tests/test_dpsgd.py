"""DP-SGD inside a silo: its gradients are Opacus's, its sums are bounded, its batches are Poisson."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.data.records import Affine, Records
from fedveil.errors import CompositionError
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.training import dpsgd
from fedveil.training.dpsgd import DpSgdTrainer, RecordSums, poisson
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalDpSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from tests.slow_cases import slow_only
from tests.training import cohort_of, everyone, gradient_sum, task_of

SEEDS = torch.arange(8) + 5


def no_noise(dimension, std, grid, source):
    raise AssertionError("noise was drawn although the multiplier is 0")


def trainer_of(
    task, noise_multiplier=0.0, noise=no_noise, batch_size=4, epochs=1, learning_rate=0.5, **options
):
    local = LocalDpSgd(
        learning_rate=learning_rate, epochs=epochs, batch_size=batch_size, noise_multiplier=noise_multiplier
    )
    return DpSgdTrainer(task=task, local=local, noise=noise, privacy=PrivacyRandomness.insecure(0), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "shape"), [("linear", (6,)), ("mlp", (6,))])
@pytest.mark.parametrize("norm", [0.05, 100.0])
def test_one_step_is_opacuss(model, shape, norm):
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    task, cohort = task_of(model, shape), cohort_of([9], shape, n_silos=1)
    trainer = trainer_of(task, batch_size=9)  # one batch of everybody
    members, weights = everyone(cohort)
    sums = trainer.sums(
        TrainJob(task.initial(), cohort, members, weights, Clip(norm=norm), ExperimentRandomness(0), ())
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
    full = gradient_sum(records, task.initial(), batch, SEEDS)
    for left_out in (0, 5):
        less = gradient_sum(records, task.initial(), batch[batch != left_out], SEEDS[batch != left_out])
        assert float((full - less).norm()) <= norm


class Coupled(PrivacyRandomness):
    """Words of a silo with more records in front: those that stay draw in every step what they draw beside them."""

    def __init__(self, seed, ahead, records):
        super().__init__(seed)
        self.ahead, self.records, self.drawn = ahead, records, []

    def stream(self, *path):
        source = super().stream(*path)
        return Later(source, self) if path[0] != "dp-sgd noise" else source


class Later:
    def __init__(self, source, owner):
        self._source, self._owner = source, owner

    def uint64(self, count):
        ahead, records = self._owner.ahead, self._owner.records
        words = self._source.uint64(count // records * (records + ahead)).reshape(-1, records + ahead)
        self._owner.drawn.append(words[:, ahead:])
        return words[:, ahead:].ravel()


def silo_of(n, model_shape, left_out=0):
    """Return one silo of n records of which the first ``left_out`` do not exist."""
    rng = np.random.default_rng(8)
    features = rng.normal(size=(n, *model_shape)).astype(np.float32)[left_out:]
    targets = rng.integers(0, 3, n).astype(np.int64)[left_out:]
    zeros = np.zeros(n - left_out, dtype=np.int32)
    records = Records(features=features, targets=targets, silo=zeros, user=zeros)
    groups = records.by_silo(1)
    return Cohort.from_records(records, groups=groups, n_silos=1, scale=Affine(), device=torch.device("cpu"))


def with_dropout():
    layers = [torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 3)]
    return Task(model=torch.nn.Sequential(*layers), loss=load_loss("cross_entropy"))


@pytest.mark.parametrize("model", ["dropout", "mlp_groupnorm"])
def test_removing_the_first_record_moves_every_steps_gradient_sum_by_at_most_the_bound(model, monkeypatch):
    """Under the coupling of the proof: every other record joins the same batches and has the same masks."""
    torch.manual_seed(0)
    task, shape = (with_dropout(), (6,)) if model == "dropout" else (task_of(model, (16,)), (16,))
    clip, steps = Clip(norm=0.01), []
    for left_out in (0, 1):
        sums = []
        gradient_sums = RecordSums.gradient_sums

        def recorded(self, *arguments, sums=sums, gradient_sums=gradient_sums):
            sums.append(gradient_sums(self, *arguments))
            return sums[-1]

        privacy = Coupled(3, ahead=left_out, records=40 - left_out)
        local = LocalDpSgd(learning_rate=1e-30, epochs=5, batch_size=10, noise_multiplier=0.0)
        cohort = silo_of(40, shape, left_out)
        with monkeypatch.context() as patch:
            patch.setattr(RecordSums, "gradient_sums", recorded)
            DpSgdTrainer(task=task, local=local, noise=no_noise, privacy=privacy).sums(
                TrainJob(
                    task.initial(), cohort, *everyone(cohort), clip, ExperimentRandomness(0), ("round", 1)
                )
            )
        steps.append(sums)
    moved = [float((full - less).norm()) for full, less in zip(*steps, strict=True)]
    assert len(moved) == 20
    assert max(moved) <= clip.norm * (1 + 1e-4)  # batched kernels may round the others' gradients differently
    assert (
        0 < sum(step > 0.5 * clip.norm for step in moved) < 20
    )  # the first record joined some batches, not all


def test_masks_are_drawn_for_every_record_and_step_and_only_for_models_that_drop_out():
    for task, drawn in ((with_dropout(), 2), (task_of("mlp"), 1)):
        privacy = Coupled(3, ahead=0, records=12)
        local = LocalDpSgd(learning_rate=0.1, epochs=2, batch_size=4, noise_multiplier=0.0)
        cohort = silo_of(12, (6,))
        DpSgdTrainer(task=task, local=local, noise=no_noise, privacy=privacy).sums(
            TrainJob(
                task.initial(),
                cohort,
                *everyone(cohort),
                Clip(norm=1.0),
                ExperimentRandomness(0),
                ("round", 1),
            )
        )
        assert [words.shape for words in privacy.drawn] == [(6, 12)] * drawn
        assert len(np.unique(np.concatenate(privacy.drawn))) == 12 * 6 * drawn


def test_each_record_of_a_batch_has_the_mask_of_its_own_seed():
    task, cohort = with_dropout(), silo_of(9, (6,))
    records = RecordSums(task, Clip(norm=1.0), cohort, memory=1)
    batch, seeds = torch.arange(9), torch.arange(9) + 100
    alone = sum(gradient_sum(records, task.initial(), batch[[i]], seeds[[i]]) for i in range(9))
    assert torch.equal(gradient_sum(records, task.initial(), batch, seeds), alone)
    assert torch.equal(gradient_sum(records, task.initial(), batch.flip(0), seeds.flip(0)), alone)
    assert not torch.equal(gradient_sum(records, task.initial(), batch, seeds.flip(0)), alone)


def updates_of(task, cohort, members, noise_multiplier=0.0, progress=None, **options):
    """Return the silos' updates, of 4 epochs in batches of 4 by words that are the same in every call."""
    noise = load_noise if noise_multiplier else no_noise
    trainer = trainer_of(task, noise_multiplier=noise_multiplier, noise=noise, epochs=4, **options)
    job = TrainJob(
        task.initial(),
        cohort,
        torch.tensor(members),
        torch.ones(len(members), dtype=torch.float64),
        Clip(norm=0.5),
        ExperimentRandomness(0),
        ("round", 1),
    )
    return trainer.sums(job, progress).total


def load_noise(dimension, std, grid, source):
    return np.asarray(source.uint64(dimension) % 8 * (std * 0.25))


@pytest.mark.parametrize("model", ["linear", *slow_only(["mlp_groupnorm"])])
def test_no_silo_feels_those_it_takes_its_steps_beside(model):
    task, cohort = task_of(model), cohort_of([12, 40, 3, 0], n_silos=4)
    alone = [updates_of(task, cohort, [silo], 1.0)[silo] for silo in range(4)]
    assert torch.equal(updates_of(task, cohort, [0, 1, 2, 3], 1.0), torch.stack(alone))
    assert torch.equal(updates_of(task, cohort, [2, 0], 1.0)[0], alone[0])
    cohort.features[cohort.groups.members(1)] = float("inf")
    poisoned = updates_of(task, cohort, [0, 1, 2, 3], 1.0)
    assert all(torch.equal(poisoned[silo], alone[silo]) for silo in (0, 2, 3))


def test_silos_side_by_side_train_as_one_by_one():
    task, cohort = task_of("mlp_groupnorm"), cohort_of([6, 12, 3, 0], n_silos=4)
    together = updates_of(task, cohort, [0, 1, 2, 3])
    one_by_one = updates_of(task, cohort, [0, 1, 2, 3], together=False)
    assert float(one_by_one[:3].norm(dim=1).min()) > 0.01
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-5)


def test_no_more_silos_take_their_steps_at_once_than_memory_is_for():
    task, cohort = task_of("linear"), cohort_of([12, 40, 3, 0, 7], n_silos=5)
    done = {5: [0], 2: [0]}  # steps after each batch of steps
    found = [
        updates_of(
            task, cohort, [0, 1, 2, 3, 4], 1.0, lambda now, _, at=at: done[at].append(now), silos_at_once=at
        )
        for at in done
    ]
    assert torch.equal(*found)
    assert [int(np.diff(done[at]).max()) for at in done] == [5, 2]
    assert done[5][-1] == done[2][-1]


def test_what_is_drawn_at_once_leaves_out_no_step():
    for steps, numbers in ((0, 5), (1, 5), (7, 10**6), (40_000, 3), (65_536, 1), (65_537, 1), (3, 0)):
        blocks = list(dpsgd._blocks(steps, numbers, 2**16))
        assert [step for first, some in blocks for step in range(first, first + some)] == list(range(steps))
        assert all(some * numbers <= 2**16 or some == 1 for _, some in blocks)


def test_a_poisoned_record_adds_nothing():
    task, cohort = task_of("mlp"), cohort_of([8])
    records = RecordSums(task, Clip(norm=1.0), cohort, memory=1 << 20)
    clean = gradient_sum(records, task.initial(), torch.arange(1, 8), SEEDS[1:])
    cohort.features[0] = float("nan")
    poisoned = gradient_sum(records, task.initial(), torch.arange(8), SEEDS)
    torch.testing.assert_close(poisoned, clean, rtol=0, atol=1e-4)


def test_noise_has_its_scale_and_the_divisor_is_the_expected_batch():
    task, cohort = task_of("mlp"), cohort_of([12], n_silos=1)
    calls = []

    def recording(dimension, std, grid, source):
        calls.append((dimension, std, grid))
        return np.full(dimension, 1000.0)

    clip = Clip(norm=0.01)
    trainer = trainer_of(task, noise_multiplier=2.0, noise=recording, batch_size=6, epochs=3)
    members, weights = everyone(cohort)
    sums = trainer.sums(TrainJob(task.initial(), cohort, members, weights, clip, ExperimentRandomness(0), ()))
    assert calls == [(6 * task.dimension, 0.02, clip.grid)]
    assert sums.steps == 6
    # Six steps of -0.5 * 1000 / 6 each; the clipped gradients are at most 12 * 0.01.
    torch.testing.assert_close(sums.total[0], torch.full_like(sums.total[0], -500.0), rtol=0, atol=0.2)


@pytest.mark.parametrize("at_once", [1, 2**16])
def test_every_step_of_every_silo_has_noise_and_a_batch_of_its_own(at_once):
    task, cohort = task_of("mlp"), cohort_of([12, 12], n_silos=2)
    drawn = []

    def recording(dimension, std, grid, source):
        noise = (source.uint64(dimension) % 1000).astype(np.float64)
        drawn.extend(step.tobytes() for step in noise.reshape(-1, task.dimension))
        return noise

    options = {"noise": recording, "numbers_at_once": at_once}
    trainer = trainer_of(task, noise_multiplier=2.0, batch_size=6, epochs=3, **options)
    members, weights = everyone(cohort)
    for number in (1, 2):
        trainer.sums(
            TrainJob(
                task.initial(), cohort, members, weights, Clip(norm=0.01), ExperimentRandomness(0), (number,)
            )
        )
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 6


def test_an_empty_silo_and_an_empty_batch():
    task, cohort = task_of("mlp"), cohort_of([0, 1])
    members, weights = everyone(cohort)
    sums = trainer_of(task).sums(
        TrainJob(task.initial(), cohort, members, weights, Clip(norm=1.0), ExperimentRandomness(0), ())
    )
    assert sums.total[0].abs().sum() == 0
    records = RecordSums(task, Clip(norm=1.0), cohort, memory=1)
    assert (
        gradient_sum(records, task.initial(), torch.zeros(0, dtype=torch.int64), SEEDS[:0]).abs().sum() == 0
    )


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
            TrainJob(task.initial(), cohort, members, weights, Unbounded(), ExperimentRandomness(0), ())
        )
