"""A gradient that runs as a list of kernels is the gradient, bit for bit, and the list holds nobody's records."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness
from fedveil.training.counters import SeededDropout
from fedveil.training.dpsgd import RecordSums
from fedveil.training.kernel_replay import (
    CALLS_OF_POOLING,
    ReplayedGradient,
    max_pool_channels_last,
    optimise_graph,
)
from fedveil.training.losses import load_loss
from fedveil.training.shapes import equal_with_nan
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import TrainJob
from fedveil.training.vectorized import BatchedGradients, VmapTrainer
from tests.slow_cases import fast_every
from tests.test_vectorized import Shared
from tests.training import cohort_of, everyone, gradient_sum, task_of

SLOTS, WIDTH = 4, 3
AT_ONE, AT_EACH = (None, 0, 0, 0, 0), (0, 0, 0, 0, 0)
TASKS = {
    "linear": task_of("linear"),
    "dropout": task_of("mlp_groupnorm"),
    "convolutions": task_of("cnn", (1, 16, 16)),
    "shared, frozen, unused": Task(model=Shared(), loss=load_loss("cross_entropy")),
    "survival": Task(model=torch.nn.Linear(6, 1), loss=load_loss("cox")),
}


def batch_of(task, generator, slots=SLOTS, width=WIDTH):
    shape = (1, 16, 16) if task is TASKS["convolutions"] else (6,)
    features = torch.randn(slots, width, *shape, generator=generator)
    if task is TASKS["survival"]:
        targets = torch.rand(slots, width, 2, generator=generator).add_(torch.tensor([0.5, 0.0]))
        targets[..., 0] = targets[..., 0].floor()
    else:
        targets = torch.randint(0, 3, (slots, width), generator=generator)
    mask = torch.ones(slots, width, dtype=torch.bool)
    mask[0, 1:] = False
    return features, targets, mask, torch.randint(0, 2**60, (slots,), generator=generator)


def models_of(task, at, generator, slots=SLOTS):
    models = task.initial() + 0.1 * torch.randn(slots, task.dimension, generator=generator)
    return task.layout.unflatten(models[0] if at == "at_shared_model" else models)


def same(ours, theirs):
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


GRID = [(name, "at_own_models") for name in TASKS] + [
    pytest.param(name, "at_shared_model", marks=[pytest.mark.slow] * (name in ("dropout", "convolutions")))
    for name in TASKS
]


@pytest.mark.parametrize(("name", "at"), fast_every(GRID, 3))
def test_a_list_of_kernels_gives_the_gradients_bit_for_bit(name, at):
    task, generator = TASKS[name], torch.Generator().manual_seed(3)
    gradients = getattr(BatchedGradients(task, torch.device("cpu"), False), at)
    plain = gradients._function
    replayed = ReplayedGradient(plain, gradients._constants, calls=1)
    for count in range(4):
        models, batch = models_of(task, at, generator), batch_of(task, generator)
        assert same(replayed(models, *batch), plain(models, *batch))
        assert replayed.lists == 1, count


def test_sizes_and_strides_are_the_shape():
    task, generator = TASKS["linear"], torch.Generator().manual_seed(4)
    plain = BatchedGradients(task, torch.device("cpu"), False).at_own_models._function
    replayed = ReplayedGradient(plain, calls=1)
    features, *rest = batch_of(task, generator)
    models = models_of(task, "at_own_models", generator)
    turned = features.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert turned.shape == features.shape
    for given in (features, turned, features, turned):
        assert same(replayed(models, given, *rest), plain(models, given, *rest))
    assert replayed.lists == 2
    wider = batch_of(task, generator, width=WIDTH + 1)
    assert same(replayed(models, *wider), plain(models, *wider))
    assert replayed.lists == 3


def test_nothing_is_traced_before_it_pays():
    task, generator = TASKS["linear"], torch.Generator().manual_seed(5)
    replayed = ReplayedGradient(
        BatchedGradients(task, torch.device("cpu"), False).at_own_models._function, calls=3
    )
    models, batch = models_of(task, "at_own_models", generator), batch_of(task, generator)
    lists = [replayed(models, *batch) is not None and replayed.lists for _ in range(4)]
    assert lists == [0, 0, 1, 1]


class ReadsItself(torch.nn.Linear):
    """A layer whose Python reads a number of its own parameters."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) / (1.0 + float(self.weight.detach().abs().max()))


def test_a_model_whose_python_reads_numbers_is_not_written_down():
    task, generator = Task(model=ReadsItself(6, 3), loss=load_loss("cross_entropy")), torch.Generator()
    replayed = ReplayedGradient(
        BatchedGradients(task, torch.device("cpu"), False).at_shared_model._function, calls=1
    )
    for scale in (1.0, 5.0):
        models = {
            name: scale * values
            for name, values in models_of(task, "at_shared_model", generator.manual_seed(6)).items()
        }
        batch = batch_of(task, generator)
        found = replayed(models, *batch)
        alone = torch.stack(
            [
                torch.autograd.grad(
                    task.loss(
                        task.outputs(leaves := {n: v.clone().requires_grad_() for n, v in models.items()}, x),
                        y,
                        m,
                    ),
                    leaves["bias"],
                )[0]
                for x, y, m in zip(*batch[:3], strict=True)
            ]
        )
        torch.testing.assert_close(found["bias"], alone)
    assert replayed.lists == 0


def test_a_list_that_would_hold_records_is_not_used():
    kept = []

    def loss(parameters, features, targets, mask, seed):
        del targets, mask, seed
        return ((features @ parameters["w"] - beside) ** 2).mean()

    generator = torch.Generator().manual_seed(7)
    for known in (False, True):
        beside = torch.randn(WIDTH, generator=generator)
        replayed = ReplayedGradient(vmap(grad(loss), in_dims=AT_EACH), [beside] if known else [], calls=1)
        for _ in range(3):
            features = torch.randn(SLOTS, WIDTH, 6, generator=generator)
            replayed({"w": torch.randn(SLOTS, 6, generator=generator)}, features, *[torch.zeros(SLOTS)] * 3)
        kept.append(replayed.lists)
    assert kept == [0, 1]


class ByRow(torch.autograd.Function):
    """Each row times its own largest number, which Python reads: a rule for vmap that mixes no rows."""

    @staticmethod
    def forward(rows):
        return rows * float(rows.max())

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return slope

    @staticmethod
    def vmap(info, in_dims, rows):
        return torch.stack([row * float(row.numpy().max()) for row in rows.movedim(in_dims[0], 0)]), 0


def own_rule(parameters, features):
    return ByRow.apply(features @ parameters["w"])


def counts_its_numbers(parameters, features):
    return features @ parameters["w"] * (1 + (parameters["w"] > 0).nonzero().shape[0])


def lists_its_numbers(parameters, features):
    return features @ parameters["w"] * parameters["w"].detach().tolist()[0]


def writes_to_its_records(parameters, features):
    return features.mul_(2.0) @ parameters["w"]


@pytest.mark.parametrize(
    ("outputs", "at"),
    [
        (own_rule, AT_EACH),
        (own_rule, AT_ONE),
        (counts_its_numbers, AT_ONE),
        (lists_its_numbers, AT_ONE),
        (writes_to_its_records, AT_EACH),
    ],
)
def test_what_one_batch_holds_is_in_no_other_ones_gradient(outputs, at):
    """Numbers that Python reads, and what is written to a batch, would be those of whoever was traced."""

    def loss(parameters, features, targets, mask, seed):
        del mask, seed
        return ((outputs(parameters, features) - targets) ** 2).mean()

    generator, plain = torch.Generator().manual_seed(8), vmap(grad(loss), in_dims=at)
    replayed = ReplayedGradient(plain, calls=2)
    for _ in range(5):
        models = torch.randn(SLOTS, 6, generator=generator)
        features = torch.randn(SLOTS, WIDTH, 6, generator=generator)
        batch = (torch.randn(SLOTS, WIDTH, generator=generator), *[torch.zeros(SLOTS)] * 2)
        parameters = {"w": models if at is AT_EACH else models[0]}
        ours = replayed(parameters, features.clone(), *batch)
        assert same(ours, plain(parameters, features.clone(), *batch))
    assert replayed.lists == 0


def test_a_list_is_for_one_place_in_memory_and_one_kind_of_number():
    def loss(parameters, features, targets, mask, seed):
        del mask, seed
        windows = features.as_strided((2, 3), (3, 1))
        return ((windows @ parameters["w"]).sum() - targets) ** 2

    generator, plain = torch.Generator().manual_seed(9), vmap(grad(loss), in_dims=AT_EACH)
    replayed, lists = ReplayedGradient(plain, calls=1), []
    table = torch.randn(3 * SLOTS, 6, generator=generator)
    for first, kind in ((0, torch.float32), (SLOTS, torch.float32), (SLOTS, torch.float64)):
        models = {"w": torch.randn(SLOTS, 3, generator=generator)}
        batch = (torch.ones(SLOTS, dtype=kind), *[torch.zeros(SLOTS)] * 2)
        features = table[first : first + SLOTS]
        assert same(replayed(models, features, *batch), plain(models, features, *batch))
        lists.append(replayed.lists)
    assert lists == [1, 2, 3]


def test_under_autocast_there_are_no_lists():
    """The kernel of a bilinear layer calls others, which autocast computes in bfloat16, and a list would not."""
    task = Task(model=torch.nn.Bilinear(6, 6, 3), loss=load_loss("cross_entropy"), precision="bfloat16")
    gradients = BatchedGradients(task, torch.device("cpu"), False)
    assert not any(
        isinstance(one, ReplayedGradient) for one in (gradients.at_shared_model, gradients.at_own_models)
    )


@pytest.mark.slow
def test_tracing_reads_nobodys_records_and_leaves_none_behind():
    task, generator = TASKS["dropout"], torch.Generator().manual_seed(10)
    plain, seen = BatchedGradients(task, torch.device("cpu"), False).at_own_models._function, []

    def watched(parameters, features, *rest):
        seen.append(features)
        return plain(parameters, features, *rest)

    replayed = ReplayedGradient(watched, calls=1)
    models, (features, *rest) = models_of(task, "at_own_models", generator), batch_of(task, generator)
    replayed(models, features, *rest)
    assert replayed.lists == 1
    assert [one is features for one in seen] == [False] * (len(seen) - 1) + [True]
    assert all(not torch.isin(features, one).any() for one in seen[:-1])


def test_training_that_is_written_down_is_training():
    local = LocalSgd(learning_rate=0.3, epochs=12, batch_size=2, momentum=0.5)
    cohort = cohort_of([4, 1, 6, 2, 2, 3, 5])
    totals = []
    for written in (True, False):
        task = task_of("mlp_groupnorm")
        gradients = BatchedGradients.for_task(task, torch.device("cpu"))
        if written:
            gradients.at_shared_model, gradients.at_own_models = (
                ReplayedGradient(at._function, at._constants, calls=4)
                for at in (gradients.at_shared_model, gradients.at_own_models)
            )
        else:
            gradients.at_shared_model, gradients.at_own_models = (
                gradients.at_shared_model._function,
                gradients.at_own_models._function,
            )
        job = TrainJob(
            task.initial(), cohort, *everyone(cohort), Clip(norm=0.1), ExperimentRandomness(0), ("a",)
        )
        totals.append(VmapTrainer(task=task, local=local).sums(job).total)
        assert (gradients.at_own_models.lists > 0) if written else True
    assert torch.equal(*totals)


def test_gradients_of_single_records_keep_their_lists_over_rounds():
    task, cohort = task_of("linear"), cohort_of([4, 4, 4])
    for _ in range(3):
        sums = RecordSums(task, Clip(norm=0.1), cohort, 1 << 20)
        for step in range(60):
            gradient_sum(sums, task.initial() * step, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert BatchedGradients.for_task(task, torch.device("cpu")).at_own_models.lists == 1
    assert BatchedGradients.for_task(replace(task), torch.device("cpu")).at_own_models.lists == 0


def short(function, *given):
    """Return the list of a function's kernels after it was made short."""
    kernels = make_fx(function)(*given)
    optimise_graph(kernels)
    kernels.recompile()
    return kernels


def calls(kernels):
    return [str(node.target) for node in kernels.graph.nodes if node.op.startswith("call")]


def test_what_follows_from_no_argument_is_computed_once_and_what_nobody_reads_never():
    def function(numbers):
        numbers.exp()
        return numbers * (torch.arange(3.0).add_(1.0) / 7)

    numbers = torch.randn(3)
    kernels = short(function, numbers)
    assert calls(kernels) == ["mul"]
    for _ in range(2):
        assert torch.equal(kernels(numbers), function(numbers))


def written_within(numbers):
    return torch.zeros(3).add_(numbers)


def written_in_a_view(numbers):
    zeros = torch.zeros(3)
    zeros[:2].add_(numbers[:2])
    return zeros * numbers


def written_in_a_part(numbers):
    first, second = torch.zeros(6).split(3)
    return first.add_(numbers) + second


def given_away(numbers):
    return torch.ones(3), numbers + 1


def given_away_as_a_view(numbers):
    return torch.ones(3).view(1, 3), numbers + 1


@pytest.mark.parametrize(
    "function",
    [written_within, written_in_a_view, written_in_a_part, given_away, given_away_as_a_view],
    ids=lambda one: one.__name__,
)
def test_numbers_that_somebody_could_write_to_are_computed_in_every_call(function):
    kernels = short(function, torch.randn(3))
    for turn in range(3):
        numbers = torch.randn(3, generator=torch.Generator().manual_seed(turn))
        ours, theirs = kernels(numbers), function(numbers)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        for one in ours if isinstance(ours, tuple) else (ours,):
            one.add_(5.0)


def test_a_kernel_that_is_called_twice_with_the_same_tensors_is_called_once():
    def function(numbers):
        return (
            numbers.exp().sum(0) + numbers.exp().sum(1) + torch.rand_like(numbers) + torch.rand_like(numbers)
        )

    kernels = short(function, torch.randn(3, 3))
    assert calls(kernels).count("exp") == 1
    assert sum("rand_like" in call for call in calls(kernels)) == 2


def written_between(numbers):
    doubled = numbers * 2
    first = doubled.exp()
    return first * 1, doubled.add_(1.0).exp() * first


def returned_twice(numbers):
    return numbers.exp(), numbers.exp()


def returned_twice_as_views(numbers):
    return numbers.exp().view(-1), numbers.exp().t()


def returned_in_parts(numbers):
    return numbers.exp().split(1)[0], numbers.exp().split(1)[0]


@pytest.mark.parametrize(
    "function",
    [written_between, returned_twice, returned_twice_as_views, returned_in_parts],
    ids=lambda one: one.__name__,
)
def test_results_that_somebody_could_write_to_are_not_shared(function):
    numbers = torch.randn(3, 3)
    kernels = short(function, numbers)
    (one, other), expected = kernels(numbers), function(numbers)
    one.add_(5.0)
    assert torch.equal(other, expected[1])
    assert torch.equal(one, expected[0] + 5.0)


def test_what_would_fill_memory_is_computed_in_every_call():
    def function(numbers):
        return numbers * torch.arange(1 << 15)

    kernels = short(function, torch.ones(1 << 15))
    assert calls(kernels) == ["aten.arange.default", "mul"]


def test_only_kernels_that_start_with_their_tensor_are_called_as_methods():
    """``Tensor.where`` starts with its first choice, its kernel with the condition; the other is no method at all."""

    def function(numbers):
        ranked = torch.where(numbers > 0, numbers.sum(1, keepdim=True), numbers.mT)
        return torch.nn.functional.layer_norm(ranked, (3,)).clamp(min=-0.5)

    numbers = torch.randn(3, 3)
    kernels = short(function, numbers)
    assert {"gt", "sum", "transpose"} <= set(calls(kernels))
    assert {"aten.where.self", "aten.native_layer_norm.default"} <= set(calls(kernels))
    assert torch.equal(kernels(numbers), function(numbers))


def test_a_layer_of_dropout_hashes_its_positions_once():
    """Of a mask's words those of its positions follow from no seed."""
    dropout = SeededDropout(0.5, 2, channels=False)

    def function(seeds, features):
        return vmap(lambda seed, rows: functional_call(dropout, {"seed": seed}, (rows,)))(seeds, features)

    given = torch.tensor([3, -4]), torch.randn(2, 3, 6)
    kernels = short(function, *given)
    hashes = sum("rshift" in call for call in calls(kernels)) / 3
    assert hashes == 2  # of the seed with the layer, and of that with the positions
    assert not {"aten.arange.default", "aten.view.default", "aten.mul.Tensor"} & set(calls(kernels))
    for seeds in (given[0], given[0] + 1):
        assert torch.equal(kernels(seeds, given[1]), function(seeds, given[1]))


@pytest.mark.parametrize(
    "settings", [([2, 2],), ([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2])]
)
@pytest.mark.parametrize("channels", [3, 16, 40])
def test_pooling_with_channels_innermost_chooses_the_same_numbers(channels: int, settings: Any) -> None:
    """Equal numbers and NaN included: values, positions and memory layout are those of PyTorch's kernel."""
    generator = torch.Generator().manual_seed(0)
    planes = torch.randint(-2, 3, (3, channels, 9, 8), generator=generator).float()
    planes[0, 0, 2, 3] = torch.nan
    for given in (planes, planes[:, :, :, ::2], planes.contiguous(memory_format=torch.channels_last)):
        expected = torch.ops.aten.max_pool2d_with_indices(given, *settings)
        for one, other in zip(max_pool_channels_last(given, *settings), expected, strict=True):
            assert equal_with_nan(one, other)
            assert one.stride() == other.stride()


def test_the_list_of_a_pooling_model_pools_with_channels_innermost() -> None:
    task = Task(
        model=torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(144, 2)
        ),
        loss=load_loss("cross_entropy"),
    )
    gradients = BatchedGradients(task, torch.device("cpu"), False).at_own_models
    parameters = task.layout.unflatten(task.initial().repeat(2, 1))
    batch = (
        torch.rand(2, 3, 1, 8, 8),
        torch.zeros(2, 3).long(),
        torch.ones(2, 3).bool(),
        torch.zeros(2).long(),
    )
    expected = gradients._function(parameters, *batch)
    for _ in range(CALLS_OF_POOLING):
        gradients(parameters, *batch)
    (kernels,) = gradients._lists.values()
    assert any("max_pool_channels_last" in call for call in calls(kernels.__self__))
    found = gradients(parameters, *batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
