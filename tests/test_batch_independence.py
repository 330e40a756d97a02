"""Who else takes part changes nobody's update by a bit: neither the trainer, nor a shape, nor a kernel's rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil.data.records import Population, Records
from fedveil.errors import ModelError
from fedveil.methods.method import training_bound
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import Prepared, prepare, setting_with
from fedveil.training.batch_independence import is_gradient_batch_independent
from fedveil.training.dpsgd import DpSgdTrainer, RecordSums
from fedveil.training.gram.layout import GramPlan
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.record_sums import SiloSums
from fedveil.training.shapes import equal_with_nan, round_up_slots, slot_multiple
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trainer_choice import TrainerOptions, can_vectorise_records, choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests.slow_cases import fast_every
from tests.training import cohort_of, everyone, gradient_sum, task_of

THRESHOLDS = [1, 2, 4, 5, 8, 9, 31, 32, 33, 2, 2]


@pytest.mark.parametrize(("rows", "columns"), [(1, 30), (2, 30), (3, 10), (16, 10), (50, 1)])
def test_where_an_array_lies_in_memory_rounds_nothing(rows: int, columns: int) -> None:
    """Slots of a batch start at other places modulo a vector: Intel's library tells them apart unless asked not to."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, size, 30, generator=generator) for size in (rows, columns))
    products = {
        (torch.bmm(placed(left, here), placed(right, there).mT)).numpy().tobytes()
        for here in range(16)
        for there in range(16)
    }
    assert len(products) == 1


def placed(numbers: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy that starts so many float32 numbers after a multiple of 64 bytes."""
    memory = torch.empty(numbers.numel() + 32)
    first = -memory.data_ptr() // 4 % 16 + offset
    return memory[first : first + numbers.numel()].view(numbers.shape).copy_(numbers)


def updates(
    trainer: Any, task: Task, cohort: Cohort, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the update of every member, unbounded, and its norm."""
    ones = torch.ones(len(members), dtype=torch.float64)
    sums = trainer.sums(
        TrainJob(
            task.initial(),
            cohort.per_contribution(members),
            members,
            ones,
            Unbounded(),
            ExperimentRandomness(3),
            ("round", 1),
        ),
    )
    return sums.total, sums.norms


def assert_nobody_moves_others(trainer: Any, task: Task, cohort: Cohort, dropped: list[int]) -> None:
    count = len(cohort.groups)
    total, norms = updates(trainer, task, cohort, torch.arange(count))
    for one in dropped:
        others = torch.tensor([i for i in range(count) if i != one])
        without, lengths = updates(trainer, task, cohort, others)
        assert torch.equal(without, total[others]), f"without contribution {one}"
        assert torch.equal(lengths.nan_to_num(-1), norms[others].nan_to_num(-1)), f"norms without {one}"


def of(model: str, shape: tuple[int, ...], loss: str, outputs: int) -> Task:
    return Task(model=task_of(model, shape, outputs).model, loss=load_loss(loss))


WILD = {"learning_rate": 3.0, "epochs": 8}
CASES = [
    (VmapTrainer, "mlp", "cross_entropy", 3, WILD),
    (VmapTrainer, "mlp_groupnorm", "cross_entropy", 3, WILD | {"batch_size": 4, "weight_decay": 0.01}),
    (VmapTrainer, "mlp", "binary_cross_entropy", 1, WILD | {"batch_size": 5, "momentum": 0.9}),
    (VmapTrainer, "linear", "cross_entropy", 3, WILD | {"batch_size": 10, "projection": 2.0}),
    (GramTrainer, "linear", "cross_entropy", 3, WILD),
    (GramTrainer, "linear", "binary_cross_entropy", 1, WILD | {"momentum": 0.5, "weight_decay": 0.01}),
    (GramTrainer, "linear", "binary_cross_entropy", 1, WILD | {"batch_size": 6, "projection": 1.0}),
    (GramTrainer, "linear", "cross_entropy", 3, WILD | {"batch_size": 8, "momentum": 0.9}),
    (LoopTrainer, "mlp", "cross_entropy", 3, {"learning_rate": 3.0, "epochs": 2, "batch_size": 10}),
]


@pytest.mark.parametrize(
    "case",
    fast_every(([one] for one in CASES), 2),
    ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}-{len(case[4])}",
)
def test_removing_a_contribution_changes_no_bit_of_the_others(case: Any) -> None:
    """At rates and epochs that amplify, and with one removed on each side of every threshold of sizes."""
    trainer, model, loss, outputs, local = case
    features = 80 if trainer is GramTrainer else 20
    task = of(model, (features,), loss, outputs)
    cohort = cohort_of(THRESHOLDS, (features,), n_classes=max(2, outputs))
    assert_nobody_moves_others(trainer(task=task, local=LocalSgd(**local)), task, cohort, [0, 7])


def test_removing_one_of_more_records_than_features_changes_no_bit_of_the_others() -> None:
    task, sizes = task_of("linear"), [300, 257, 256, 400, 310, 5]
    for local in (LocalSgd(**WILD), LocalSgd(**WILD, batch_size=50)):
        assert_nobody_moves_others(
            GramTrainer(task=task, local=local), task, cohort_of(sizes), list(range(len(sizes)))
        )


def test_one_that_overflows_changes_no_bit_of_those_in_her_block() -> None:
    task, cohort = task_of("linear", (80,)), cohort_of([5, 5, 5, 5, 9, 9, 9], (80,))
    features = cohort.features.clone()
    features[torch.from_numpy(cohort.groups.members(1))] = 1e38
    poisoned = replace(cohort, features=features)
    total, norms = updates(GramTrainer(task=task, local=LocalSgd(**WILD)), task, poisoned, torch.arange(7))
    others = torch.tensor([0, 2, 3, 4, 5, 6])
    without, _ = updates(GramTrainer(task=task, local=LocalSgd(**WILD)), task, poisoned, others)
    assert norms[1].isnan()
    assert torch.equal(without, total[others])


@pytest.mark.parametrize("loss", ["cross_entropy", "cox"])
@pytest.mark.parametrize(
    "local", [{"batch_size": 4}, {"batch_size": 10, "projection": 1.0}, {"batch_size": 50}]
)
def test_the_largest_in_a_stack_changes_no_bit_of_those_beside_her(loss: str, local: dict[str, Any]) -> None:
    """One user decides the width of the stack, and how many tiles its products are added up over."""
    outputs = 1 if loss == "cox" else 3
    task, sizes = of("linear", (80,), loss, outputs), [20, 49, 100, 48, 33, 11, 51, 12]
    cohort = cohort_of(sizes, (80,))
    if loss == "cox":
        times = torch.rand(len(cohort.targets), 2, generator=torch.Generator().manual_seed(0))
        cohort = replace(cohort, targets=torch.stack([(times[:, 0] > 0.5).float(), times[:, 1]], 1))
    assert_nobody_moves_others(
        GramTrainer(task=task, local=LocalSgd(**WILD, **local)), task, cohort, [2, 6, 0]
    )


@pytest.mark.parametrize(
    "local", [{}, {"projection": 0.01}, {"weight_decay": 0.1}, {"momentum": 0.5}, {"steps": 2}], ids=str
)
def test_who_takes_a_second_step_changes_no_bit_of_those_who_take_one(local: dict[str, Any]) -> None:
    """One step is minus the rate times the gradient: as a difference of two models it would be rounded by the model."""
    task, cohort = task_of("mlp", (20,)), cohort_of([10, 10, 9, 3, 1, 25], (20,))
    trainer = VmapTrainer(task=task, local=LocalSgd(learning_rate=0.3, batch_size=10, **local))
    assert_nobody_moves_others(trainer, task, cohort, [5, 0])


def test_who_takes_a_second_step_moves_a_sum_of_many_by_no_more_than_the_bound() -> None:
    """A thousand alike, whose steps are far below the last digit of their model: rounding would move all one way."""
    task, count = task_of("mlp", (20,)), 1000
    cohort, bound = cohort_of([1] * count + [2], (20,)), Clip(norm=2.0**-20)
    alike = replace(cohort, features=cohort.features[:1].expand_as(cohort.features).contiguous())
    trainer = VmapTrainer(task=task, local=LocalSgd(learning_rate=2.0**-20, batch_size=1))

    def total(members: int) -> torch.Tensor:
        ones = torch.ones(members, dtype=torch.float64)
        job = TrainJob(
            task.initial(), alike, torch.arange(members), ones, bound, ExperimentRandomness(3), ("round", 1)
        )
        return trainer.sums(job).total

    assert (total(count + 1) - total(count)).norm() <= bound.norm


def test_a_norm_does_not_depend_on_how_many_rows_are_measured_with_it() -> None:
    """Several threads cut a long row where it is the only one: its last bit is then another."""
    rows, dimension, threads = 31, 65_000, torch.get_num_threads()
    deltas = torch.randn(rows, dimension, generator=torch.Generator().manual_seed(0))
    ones, silos = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)

    def norms(count: int) -> torch.Tensor:
        sums = SiloSums(1, dimension, Clip(norm=1.0), torch.device("cpu"))
        return sums.add_(deltas[:count].clone(), ones[:count], silos[:count])

    torch.set_num_threads(4)
    try:
        together = norms(rows)
        assert all(torch.equal(norms(count), together[:count]) for count in range(1, rows, 2))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_convolutions_do_not_depend_on_others() -> None:
    """31 and 32 records a step are where the loop takes over; one user's presence used to decide for all."""
    task, sizes = task_of("cnn", (1, 16, 16)), [31, 32, 33, 2, 7]
    cohort = cohort_of(sizes, (1, 16, 16))
    trainer = VmapTrainer(task=task, local=LocalSgd(learning_rate=1.0, epochs=8))
    assert_nobody_moves_others(trainer, task, cohort, list(range(len(sizes))))


def test_memory_and_processes_change_no_bit() -> None:
    task, cohort = task_of("mlp", (80,)), cohort_of(THRESHOLDS, (80,))
    few, many = (
        VmapTrainer(task=task, local=LocalSgd(**WILD), memory=memory) for memory in (4 << 20, 1 << 28)
    )
    assert torch.equal(*(updates(trainer, task, cohort, torch.arange(11))[0] for trainer in (few, many)))


def test_removing_a_record_changes_no_bit_of_the_others_gradients() -> None:
    task, cohort = task_of("mlp", (80,), 3), cohort_of([70], (80,))
    records = torch.from_numpy(cohort.groups.members(0))
    exact = RecordSums(task, Clip(norm=1.0), cohort, 48 << 20)
    model, none = task.initial() * 3, torch.zeros(70, dtype=torch.int64)
    total = gradient_sum(exact, model, records, none)
    for one in (0, 31, 32, 63, 69):
        others = torch.arange(70) != one
        alone = gradient_sum(exact, model, records[~others], none[:1])
        assert torch.equal(gradient_sum(exact, model, records[others], none[:69]) + alone, total)


class Mixing(torch.nn.Module):
    """A kernel that rounds by the length of its batch, which no layer's type and no single record shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(self.layer(features))


class _Rounded(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> torch.Tensor:
        return slopes

    @staticmethod
    def vmap(info: Any, dims: Any, outputs: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs * (1 + 1e-6 * info.batch_size), dims[0]


def test_kernels_that_round_by_their_batch_are_found_and_refused() -> None:
    task, cohort = Task(model=Mixing(), loss=load_loss("cross_entropy")), cohort_of([3, 2])
    local = LocalSgd(learning_rate=0.1, epochs=1)
    assert is_gradient_batch_independent(task_of("mlp"), cohort, {1: 64, 16: 4})
    assert not is_gradient_batch_independent(task, cohort, {1: 64})
    assert not is_gradient_batch_independent(task, cohort, {16: 4})
    assert isinstance(choose_trainer(task, local, cohort=cohort), LoopTrainer)
    with pytest.raises(ModelError, match="beside it"):
        choose_trainer(task, local, TrainerOptions(name="vmap"), cohort=cohort, bound=Clip(norm=1.0))


def test_nan_hides_no_difference() -> None:
    nan, one = torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0 + 2**-23])
    assert equal_with_nan(nan, nan.clone())
    assert not equal_with_nan(nan, one)
    assert not equal_with_nan(nan, torch.tensor([1.0, torch.nan]))


class RoundingProducts(TorchDispatchMode):
    """Batched products that are rounded by how many there are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("bmm", "baddbmm"):
            result.mul_(1 + 1e-6 * len(result))
        return result


@pytest.mark.parametrize("batch_size", [None, 4])
def test_products_that_round_by_their_number_keep_span_away(batch_size: int | None) -> None:
    task, cohort = task_of("linear", (80,)), cohort_of([3, 2], (80,))
    local, clip = LocalSgd(learning_rate=0.1, epochs=3, batch_size=batch_size), Clip(norm=1.0)
    assert isinstance(choose_trainer(task, local, cohort=cohort, bound=clip), GramTrainer)
    with RoundingProducts():
        assert not isinstance(choose_trainer(task, local, cohort=cohort, bound=clip), GramTrainer)
        with pytest.raises(ModelError, match="beside it"):
            choose_trainer(task, local, TrainerOptions(name="gram"), cohort=cohort, bound=clip)


def test_a_model_that_vmap_cannot_batch_is_refused_by_it() -> None:
    task, cohort = Task(model=Branching(), loss=load_loss("cross_entropy")), cohort_of([3, 2])
    local = LocalSgd(learning_rate=0.1, epochs=1)
    for bound in (None, Clip(norm=1.0)):
        with pytest.raises(ModelError, match="cannot batch"):
            choose_trainer(task, local, TrainerOptions(name="vmap"), cohort=cohort, bound=bound)
    with pytest.raises(ModelError, match="single records"):
        can_vectorise_records(task, cohort)


class Branching(torch.nn.Module):
    """Control flow that depends on the records, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(features)
        return outputs if bool(outputs.sum() < 1e9) else -outputs


def test_gradients_of_records_are_computed_one_at_a_time_where_kernels_round_by_their_batch() -> None:
    task, cohort = Task(model=Mixing(), loss=load_loss("cross_entropy")), cohort_of([6])
    assert can_vectorise_records(task_of("mlp"), cohort)
    assert not can_vectorise_records(task, cohort)
    exact = RecordSums(task, Clip(norm=1.0), cohort, 0)
    records, none = torch.from_numpy(cohort.groups.members(0)), torch.zeros(6, dtype=torch.int64)
    model = task.initial()
    total = gradient_sum(exact, model, records, none)
    parts = [gradient_sum(exact, model, record, none[:1]) for record in torch.split(records, 1)]
    assert torch.equal(torch.stack(parts).sum(0), total)


def test_the_sums_of_span_need_no_order_of_silos() -> None:
    """A silo whose contributions lie apart in the table has one total, and all of them are in it."""
    task, cohort = task_of("linear"), cohort_of([3, 2, 4, 5])
    apart = replace(cohort, rows=np.array([1, 0, 1, 0]), n_silos=2)
    local, members = LocalSgd(learning_rate=0.1, epochs=2), torch.tensor([3, 0, 1, 2])
    ones = torch.ones(4, dtype=torch.float64)
    place = (Unbounded(), ExperimentRandomness(0), ("round", 1))
    span, loop = (
        trainer(task=task, local=local).sums(TrainJob(task.initial(), apart, members, ones, *place))
        for trainer in (GramTrainer, LoopTrainer)
    )
    torch.testing.assert_close(span.total, loop.total, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(span.norms, loop.norms, rtol=1e-4, atol=1e-6)
    order = {"bias": True, "batch_size": None, "by_row": True, "memory": 0}
    with pytest.raises(ValueError, match="sorted by their silo"):
        _ = GramPlan.build(apart, np.arange(4), **order).silo_ranges


METHODS = {
    "fedavg": {},
    "uldp-naive": {"clip": 1.0, "noise_multiplier": 5.0},
    "uldp-group": {"clip": 1.0, "noise_multiplier": 5.0, "group_size": 2},
    "uldp-sgd": {"clip": 1.0, "noise_multiplier": 5.0},
    "uldp-avg": {"clip": 1.0, "noise_multiplier": 5.0},
    "uldp-avg-w": {"clip": 1.0, "noise_multiplier": 5.0},
    "dp-fed": {"clip": 1.0, "noise_multiplier": 5.0, "client_sampling_rate": 0.5},
    "cepam-gaussian": {"clip": 1.0, "noise_multiplier": 5.0},
}


class Given(PopulationCache):
    """A population of our own in the place of the experiment's."""

    def __init__(self, population: Population) -> None:
        super().__init__()
        self._population = population

    def load(self, data: Any, seed: int) -> Population:
        return self._population


def population(sizes: list[int], clients: bool) -> Population:
    """User u has ``sizes[u]`` records: in a silo of their own, or over three silos."""
    rng = np.random.default_rng(5)
    user = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    silo = user if clients else (np.arange(len(user)) % 3).astype(np.int32)
    records = Records(
        features=rng.normal(size=(len(user), 8)).astype(np.float32),
        targets=rng.integers(0, 3, len(user)),
        silo=silo.astype(np.int32),
        user=user,
    )
    names = tuple(f"s{i}" for i in range(len(sizes) if clients else 3))
    return Population(
        name="made up",
        train=records,
        test_features=records.features[:5],
        test_targets=records.targets[:5],
        n_users=len(sizes),
        silo_names=names,
        task="classification",
        n_classes=3,
    )


def prepared(method: str, model: str, people: Population, batch_size: int | None) -> Prepared:
    document: dict[str, Any] = {
        "name": "alone",
        "rounds": 1,
        "data": {"name": "digits", "n_users": people.n_users, "n_silos": people.n_silos},
        "model": {"name": model, "loss": "cross_entropy"},
        "method": {"name": method} | METHODS[method],
        "local": {"learning_rate": 5.0, "epochs": 15, "batch_size": batch_size},
        "trainer": {"device": "cpu"},
    }
    document["local"] = {key: value for key, value in document["local"].items() if value is not None}
    if method == "uldp-group":
        document["local"] |= {"batch_size": batch_size or 8, "epochs": 1}
    if method == "uldp-sgd":
        del document["local"]
    return prepare(parse(document, "test"), Given(people))


def _noiseless(ready: Prepared) -> DpSgdTrainer:
    """Return a trainer of the same records, batches and masks without noise: what is left is arithmetic."""
    trainer = ready.setting.trainer
    assert isinstance(trainer, DpSgdTrainer)
    privacy = PrivacyRandomness.insecure(1)
    return replace(trainer, local=replace(trainer.local, noise_multiplier=0.0), privacy=privacy)


def by_pair(ready: Prepared) -> dict[tuple[int, int], torch.Tensor]:
    """Return the bounded update of every contribution by its silo and user, as the run's own trainer computes it."""
    cohort, groups = ready.setting.cohort, ready.setting.cohort.groups
    sums = ready.setting.trainer.sums(
        TrainJob(
            ready.task.initial(),
            cohort.per_contribution(torch.arange(len(groups))),
            torch.arange(len(groups)),
            torch.ones(len(groups), dtype=torch.float64),
            training_bound(ready.method),
            ExperimentRandomness(0),
            ("round", 1),
        ),
    )
    pairs = zip(groups.silo.tolist(), groups.user.tolist(), strict=True)
    return dict(zip(pairs, sums.total, strict=True))


def _asked() -> Iterator[Any]:
    """Every method, model and batch size; networks take longest."""
    for method in sorted(METHODS):
        for model, batch_size in (("linear", None), ("linear", 4), ("mlp", None), ("mlp", 4)):
            long = model == "mlp" and method != "uldp-avg"
            yield pytest.param(method, model, batch_size, marks=[pytest.mark.slow] if long else [])


@pytest.mark.parametrize(("method", "model", "batch_size"), fast_every(_asked(), 3))
def test_through_prepare_a_user_changes_nobody_elses_contribution(
    method: str, model: str, batch_size: int | None
) -> None:
    """Every method; the user removed is the one whose records used to decide how everybody trains."""
    clients = method in ("dp-fed", "cepam-gaussian")
    sizes = [3, 12, 31, 33, 64, 97, 5, 2]
    everybody = population(sizes, clients)
    ready = prepared(method, model, everybody, batch_size)
    if method == "uldp-group":
        ready = replace(ready, setting=replace(ready.setting, trainer=_noiseless(ready)))
    whole_cohort = by_pair(ready)
    for gone in (0, 5):
        kept = np.flatnonzero(everybody.train.user != gone)
        fewer = setting_with(ready, everybody.train.select(kept))
        again = (
            choose_trainer(ready.task, ready.method.local, cohort=fewer.cohort, bound=ready.method.bound)
            if (method != "uldp-group")
            else ready.setting.trainer
        )
        others = by_pair(replace(ready, setting=replace(fewer, trainer=again)))
        touched = set(everybody.train.silo[everybody.train.user == gone].tolist())
        checked = 0
        for (silo, user), update in others.items():
            if user == -1 and silo in touched:
                continue  # a silo's own update, which holds the user's records
            assert torch.equal(update, whole_cohort[silo, user]), (silo, user, gone)
            checked += 1
        assert checked or not clients


def test_the_resolved_experiment_names_the_trainer_that_ran() -> None:
    people = population([3, 4, 5], clients=False)
    assert prepared("uldp-avg", "linear", people, None).experiment.trainer.name == "gram"
    assert prepared("uldp-avg", "mlp", people, None).experiment.trainer.name == "vmap"


class ReducedProducts(TorchDispatchMode):
    """Rounds what float32 matrix products read to bfloat16, as backends do that are allowed to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "addbmm"):
            args = tuple(_short(value) for value in args)
        return func(*args, **(kwargs or {}))


def _short(value: Any) -> Any:
    short = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.bfloat16().float() if short else value


@contextmanager
def reduced() -> Iterator[None]:
    with ReducedProducts():
        yield


@pytest.mark.parametrize("trainer", [LoopTrainer, VmapTrainer, GramTrainer])
def test_reduced_products_do_not_reach_the_bound_nor_the_sum(trainer: Any) -> None:
    """A neighbour's sum differs by at most C, and the sum is that of the bounded updates, whatever precision trains."""
    task, cohort, clip = task_of("linear", (40,)), cohort_of([6] * 40, (40,), n_silos=1), Clip(norm=1.0)
    members, _ = everyone(cohort)

    def total(chosen: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(chosen), dtype=torch.float64)
        mine = trainer(task=task, local=LocalSgd(learning_rate=20.0, epochs=2))
        sums = mine.sums(
            TrainJob(task.initial(), cohort, chosen, ones, clip, ExperimentRandomness(0), ("round", 1))
        )
        return sums.total

    with reduced():
        everybody = total(members)
        for gone in (0, 7, 39):
            assert float((everybody - total(members[members != gone])).norm()) <= 1.0


def test_sums_hold_where_products_are_reduced() -> None:
    clip, rng = Clip(norm=1.0), torch.Generator().manual_seed(0)
    deltas, silos = torch.randn(64, 50, generator=rng), torch.arange(64) % 3
    ones = torch.ones(64, dtype=torch.float64)
    units = clip.quantize_(deltas.clone(), clip.norms(deltas), ones).double()
    exact = torch.stack([units[silos == silo].sum(0) for silo in range(3)]) * clip.grid
    sums = SiloSums(3, 50, clip, torch.device("cpu"))
    with reduced():
        sums.add_(deltas, ones, silos)
    assert torch.equal(sums.total(), exact)


def test_slots_come_in_whole_vectors() -> None:
    assert all(
        round_up_slots(slots, width) * width % 32 == 0 for slots in range(1, 70) for width in range(1, 33)
    )
    assert all(slot_multiple(width) >= 2 for width in range(1, 200))
