"""The trials of kernels are as wide as what they guard: every slot, every width, every length of a batch."""

import os
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil.data.records import Affine, Records
from fedveil.errors import ModelError
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.training import trainer_choice
from fedveil.training.batch_independence import (
    LINE,
    is_gradient_batch_independent,
    trial_memory,
    trial_slots,
)
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.shapes import slot_multiple
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trainer_choice import TrainerOptions, can_vectorise_records, choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests import shape_checks
from tests.slow_cases import slow_only
from tests.test_batch_independence import RoundingProducts
from tests.training import cohort_of, task_of

LAWS: dict[str, Any] = {
    "odd": lambda slots: torch.arange(slots) % 2 == 1,
    "first": lambda slots: torch.arange(slots) == 0,
    "last": lambda slots: torch.arange(slots) == slots - 1,
    "ninth": lambda slots: torch.arange(slots) % LINE == 9,
    "long": lambda slots: torch.full((slots,), slots > 32),
}
"""Which slots of a batched product are rounded otherwise."""


class RoundsBySlot(TorchDispatchMode):
    """A library of matrix products that rounds some slots of a batch otherwise, for products over one width alone."""

    def __init__(self, law: str, width: int) -> None:
        super().__init__()
        self.law, self.width = law, width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        batched = func.overloadpacket.__name__ in ("bmm", "baddbmm")
        if batched and any(self.width in one.shape[1:] for one in args[-2:]):
            result[LAWS[self.law](len(result))] *= 1 + 1e-6
        return result


def network(features: int = 17) -> Task:
    torch.manual_seed(0)
    layers = torch.nn.Linear(features, 33), torch.nn.ReLU(), torch.nn.Linear(33, 2)
    return Task(model=torch.nn.Sequential(*layers), loss=load_loss("cross_entropy"))


@pytest.mark.parametrize("law", ["odd", "first", "last", "ninth"])
def test_a_kernel_that_rounds_by_slot_is_found_at_every_width(law: str) -> None:
    task, cohort = network(), cohort_of([2, 2], (17,), 2)
    widths = VmapTrainer(task=task, local=LocalSgd(learning_rate=0.1)).batch_shapes(cohort)
    assert {4, 16, 32, 48} <= {*widths, 48}
    for width, most in widths.items():
        if width <= 64:
            assert is_gradient_batch_independent(task, cohort, {width: most})
            with RoundsBySlot(law, width):
                assert not is_gradient_batch_independent(task, cohort, {width: most}), width


def test_a_kernel_that_rounds_by_the_number_of_slots_is_found() -> None:
    task, cohort = network(), cohort_of([2, 2], (17,), 2)
    with RoundsBySlot("long", 1):
        assert not is_gradient_batch_independent(task, cohort, {1: 64})
        assert is_gradient_batch_independent(task, cohort, {1: 32})


@pytest.mark.parametrize(("model", "shape"), [("mlp", (6,)), *slow_only([("cnn", (1, 16, 16))])])
def test_kernels_that_are_chosen_by_the_number_of_slots_round_nothing_where_it_is_fixed(
    model: str, shape: tuple[int, ...]
) -> None:
    """As on a CUDA device: contributions that leave, or have no records left, change no shape."""
    task, sizes = task_of(model, shape), [9, 1, 6, 2, 3, 5, 7, 4] * 3
    cohort, local = cohort_of(sizes, shape), LocalSgd(learning_rate=0.1, epochs=2, batch_size=2)
    trained = {}
    with RoundingProducts():
        for slots in (None, 32):
            trainer = VmapTrainer(task=task, local=local, slots=slots)
            shapes, fixed = trainer.batch_shapes(cohort), trainer.has_fixed_slots(cohort)
            assert is_gradient_batch_independent(task, cohort, shapes, fixed=fixed) == fixed
            whole, fewer = (updates(trainer, task, cohort, gone) for gone in ({}, {0, 3, 8, *range(16, 24)}))
            trained[slots] = all(torch.equal(whole[member], row) for member, row in fewer.items())
    assert trained == {None: False, 32: True}


def updates(
    trainer: VmapTrainer, task: Task, cohort: Cohort, gone: Collection[int]
) -> dict[int, torch.Tensor]:
    """Return the update of every contribution that has not left."""
    left = [member for member in range(len(cohort.groups)) if member not in gone]
    weights = torch.ones(len(left), dtype=torch.float64)
    members = torch.tensor(left)
    job = TrainJob(
        task.initial(), cohort, members, weights, Unbounded(), ExperimentRandomness(0), ("round", 1)
    )
    return dict(zip(left, trainer.sums(job.per_contribution()).total, strict=True))


def test_every_slot_that_a_contribution_can_have_is_tried_at_every_width() -> None:
    """A shift by one, the wrap to the end of the chunk before and a shorter last chunk lead from slot to slot."""
    for width in range(1, 512):
        one = slot_multiple(width)
        for most in range(one, 5 * max(one, LINE), one):
            long, short = trial_slots(width, most)
            assert short % one == long % one == 0
            assert short <= long <= most
            assert short < long or most == one, "two lengths, where there are two"
            offsets = set(range(long)) if long < LINE else set(range(LINE))
            assert {slot if long < LINE else slot % LINE for slot in range(most)} <= offsets


@pytest.mark.parametrize("batch_size", [None, 5, 32, 100, 700])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_every_batch_of_the_trainer_has_a_shape_that_is_tried(model: str, batch_size: int | None) -> None:
    shape = (6,) if model == "mlp" else (1, 16, 16)
    task, sizes = task_of(model, shape), [*range(1, 90), 127, 128, 129, 255, 257, 400, 450, 512, 600] * 2
    cohort = cohort_of(sizes, shape)
    for memory in (None, 1 << 20, 40 << 10):
        trainer = VmapTrainer(
            task=task, local=LocalSgd(learning_rate=0.1, batch_size=batch_size), memory=memory
        )
        tried = trainer.batch_shapes(cohort)
        chunks = list(trainer._chunks(cohort, torch.arange(len(sizes))))
        side_by_side = [chunk for chunk in chunks if chunk.slots > 1]
        assert all(chunk.slots <= tried[chunk.width] for chunk in side_by_side)
        assert all(chunk.slots % slot_multiple(chunk.width) == 0 for chunk in side_by_side)
        assert side_by_side or memory is not None


def test_a_trial_takes_no_more_memory_than_training() -> None:
    """A model of which no two fit into a chunk is trained alone: nothing is tried; more memory tries more."""
    task, cohort, local = task_of("mlp", (30,)), cohort_of([2], (30,)), LocalSgd(learning_rate=0.1)
    assert VmapTrainer(task=task, local=local, memory=4096).batch_shapes(cohort) == {}
    few, many = (
        VmapTrainer(task=task, local=local, memory=size).batch_shapes(cohort) for size in (1 << 17, 1 << 22)
    )
    assert set(few) < set(many)
    assert all(trial_slots(width, few[width])[0] <= few[width] for width in few)
    with RoundsBySlot("odd", 32):
        for memory, chosen in ((4096, VmapTrainer), (1 << 22, LoopTrainer)):
            options = TrainerOptions(memory=memory)
            assert isinstance(
                choose_trainer(task, local, options, cohort=cohort, bound=Clip(norm=1.0)), chosen
            )
    with RoundsBySlot("odd", 1):
        assert can_vectorise_records(task, cohort, 4096)
        assert not can_vectorise_records(task, cohort, 1 << 22)


def test_a_linear_model_whose_trial_exceeds_the_memory_is_trained_without_gram_matrices() -> None:
    """The trial of the Gram trainer holds the updates of all its contributions, by public facts alone."""
    task, cohort, local = (
        task_of("linear", (300,)),
        cohort_of([3, 2], (300,)),
        LocalSgd(learning_rate=0.1, batch_size=4),
    )
    needed = trial_memory(task.dimension, cohort, 4)
    assert 50 * 8 * task.dimension < needed < 2 << 20
    for memory, chosen in ((None, GramTrainer), (needed, GramTrainer), (needed - 1, VmapTrainer)):
        trainer = choose_trainer(
            task, local, TrainerOptions(memory=memory), cohort=cohort, bound=Clip(norm=1.0)
        )
        assert isinstance(trainer, chosen), memory
    named = TrainerOptions(name="gram", memory=needed - 1)
    with pytest.raises(ModelError, match=r"trainer.memory_mb.*or use 'auto'"):
        choose_trainer(task, local, named, cohort=cohort, bound=Clip(norm=1.0))
    assert isinstance(choose_trainer(task, local, named, cohort=cohort), GramTrainer)


def alike(users: int, records: int, features: int) -> Cohort:
    """Return users with equally many records in one silo."""
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(users), records).astype(np.int32)
    table = Records(
        features=rng.normal(size=(len(user), features)).astype(np.float32),
        targets=rng.integers(0, 2, len(user)),
        silo=np.zeros_like(user),
        user=user,
    )
    device = torch.device("cpu")
    return Cohort.from_records(table, groups=table.by_silo_user(), n_silos=1, scale=Affine(), device=device)


def test_under_a_library_that_rounds_by_slot_one_user_moves_nobody_else() -> None:
    """Batches of 32, of users with 40 records: the shift by one slot was not tried at this width.

    Of 100 such users, trained at rate 5 for 30 epochs, one moved the bounded sum by 7.7 C.
    """
    task, cohort = network(), alike(8, 40, 17)
    local = LocalSgd(learning_rate=5.0, epochs=3, batch_size=32)
    with RoundsBySlot("odd", 32):
        trainer = choose_trainer(task, local, cohort=cohort, bound=Clip(norm=1.0))

        def updates(members: torch.Tensor) -> torch.Tensor:
            ones = torch.ones(len(members), dtype=torch.float64)
            place = (Clip(norm=1.0), ExperimentRandomness(0), ("round", 1))
            return trainer.sums(
                TrainJob(task.initial(), cohort, members, ones, *place).per_contribution()
            ).total

        assert torch.equal(updates(torch.arange(8))[1:], updates(torch.arange(1, 8)))


@pytest.mark.parametrize("batch_size", [4, *slow_only([100, 250])])
def test_span_tries_the_stack_of_a_batch_at_every_slot(batch_size: int) -> None:
    task, cohort = task_of("linear", (300,)), cohort_of([3, 2], (300,))
    local, clip = LocalSgd(learning_rate=0.1, epochs=2, batch_size=batch_size), Clip(norm=1.0)
    assert isinstance(choose_trainer(task, local, cohort=cohort, bound=clip), GramTrainer)
    for law in ("odd", "ninth"):
        with RoundsBySlot(law, batch_size):
            assert not isinstance(choose_trainer(task, local, cohort=cohort, bound=clip), GramTrainer)


def test_sums_of_steps_round_the_last_numbers_of_an_array_as_the_others() -> None:
    """What a step adds and scales is computed by vectors, and by other code where less than a vector is left."""
    generator = torch.Generator().manual_seed(0)
    models, slopes = (torch.randn(100, generator=generator) for _ in range(2))
    whole = torch.add(models, slopes, alpha=-0.3)
    moved = models.clone().mul_(0.9).add_(slopes, alpha=0.7)
    for count in range(1, 100):
        some, theirs = models[:count], slopes[:count]
        assert torch.equal(torch.add(some, theirs, alpha=-0.3), whole[:count])
        assert torch.equal(some.clone().mul_(0.9).add_(theirs, alpha=0.7), moved[:count])


@pytest.mark.parametrize(
    ("said", "asked"), [(None, "AUTO"), ("", "AUTO"), (" ", "AUTO"), ("COMPATIBLE", "COMPATIBLE")]
)
def test_an_empty_variable_asks_for_nothing(said: str | None, asked: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment |= {} if said is None else {"MKL_CBWR": said}
    found = child("import fedveil, os; print(os.environ['MKL_CBWR'])", environment)
    assert found.stdout == f"{asked}\n"


AFTER_A_PRODUCT = """
import torch
torch.ones(40, 40) @ torch.ones(40, 40)
import fedveil
from fedveil.training.trainer_choice import rounds_by_place
print(rounds_by_place())
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another library computes products here")
@pytest.mark.slow
def test_a_product_before_the_import_is_noticed() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    assert child(AFTER_A_PRODUCT, environment).stdout == "True\n"


def child(code: str, environment: dict[str, str]) -> Any:
    """Run code in a new interpreter: the library reads its variable once in a process."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_without_the_reproducible_mode_contributions_are_trained_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_choice, "rounds_by_place", lambda: True)
    local, clip, cohort = LocalSgd(learning_rate=0.1), Clip(norm=1.0), cohort_of([3, 2])
    # Where every function is checked while the tests run, the check calls the function that warns.
    caller = shape_checks.__file__ if hasattr(choose_trainer, "remembers") else __file__
    for model in ("mlp", "linear"):
        with pytest.warns(UserWarning, match="import fedveil first") as said:
            trainer = choose_trainer(task_of(model), local, cohort=cohort, bound=clip)
        assert isinstance(trainer, LoopTrainer)
        assert {one.filename for one in said} == {caller}  # the caller's line, not one of fedveil
    with pytest.warns(UserWarning, match="MKL_CBWR=AUTO"):
        assert not can_vectorise_records(task_of("mlp"), cohort)
    for name in ("vmap", "gram"):
        with (
            pytest.raises(ModelError, match=r"beside it.*import fedveil first"),
            pytest.warns(UserWarning, match="import fedveil first"),
        ):
            choose_trainer(task_of("linear"), local, TrainerOptions(name=name), cohort=cohort, bound=clip)
