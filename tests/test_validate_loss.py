"""A loss from outside is refused where it would carry one user's records into another's training."""

from __future__ import annotations

import sys
from functools import cached_property, partial
from itertools import count
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedveil as fv
from fedveil.data.records import Affine, Records
from fedveil.errors import ModelError
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.setup import prepare
from fedveil.training.gram.layout import linear_layer
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import LOSSES, ClassWeighted, Cox, CrossEntropy, Loss, RecordLoss
from fedveil.training.state_leak_check import snapshot
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.validation import validate_behaviour, validate_loss
from fedveil.training.vectorized import VmapTrainer

LABELS = torch.zeros(1, dtype=torch.int64)
KINDS = {"classification": LABELS, "regression": torch.zeros(1), "survival": torch.zeros(1, 2)} | {
    "multi-label": torch.zeros(1, 3),
    "multi-output": torch.zeros(1, 3),
}


def balanced(outputs, targets):
    """Weight classes by their share of the batch, as is often written."""
    share = (targets[:, None] == torch.arange(outputs.shape[-1])).float().mean(0)
    return functional.cross_entropy(outputs, targets, reduction="none") / (share[targets] + 0.1)


def by_count(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none") / len(targets)


def hardest(outputs, targets):
    terms = functional.cross_entropy(outputs, targets, reduction="none")
    return terms * (terms >= terms.median())


class Running(nn.Module):
    """Keeps a running mean of the terms."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs, targets):
        terms = functional.cross_entropy(outputs, targets, reduction="none")
        self.mean.mul_(0.9).add_(0.1 * terms.detach().mean())
        return terms * (terms > self.mean)


def remembering():
    """Return a function that keeps the largest output that it has seen, in no module."""
    seen = [0.0]

    def terms(outputs, targets):
        seen[0] = max(seen[0], float(outputs.detach().max()))
        return functional.cross_entropy(outputs, targets, reduction="none") / (1 + seen[0])

    return terms


PASSES, HELD = 0, [0]


def by_attribute(outputs, targets):
    by_attribute.calls += 1
    return functional.cross_entropy(outputs, targets, reduction="none")


by_attribute.calls = 0


def by_inner_function(outputs, targets):
    def count():
        global PASSES
        PASSES += 1

    count()
    return functional.cross_entropy(outputs, targets, reduction="none")


def step():
    HELD[0] += 1


def by_helper(outputs, targets):
    step()
    return functional.cross_entropy(outputs, targets, reduction="none")


class ByClass:
    """Counts in its class."""

    calls = 0

    def __call__(self, outputs, targets):
        type(self).calls += 1
        return functional.cross_entropy(outputs, targets, reduction="none")


class ByOthers:
    """Counts in an object of an object of an object."""

    def __init__(self) -> None:
        self.trainer = SimpleNamespace(state=SimpleNamespace(counts=SimpleNamespace(step=0)))

    def __call__(self, outputs, targets):
        self.trainer.state.counts.step += 1
        return functional.cross_entropy(outputs, targets, reduction="none")


class Warming:
    """Counts its calls, in no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return functional.cross_entropy(outputs, targets, reduction="none") * (1 + (self.calls > 60))


CALLS = [0]


def counting(outputs, targets):
    """Count calls in a variable of the file."""
    CALLS[0] += 1
    return functional.cross_entropy(outputs, targets, reduction="none")


def at_least_sixteen(outputs, targets):
    """Keep the hardest examples of batches of more than 16."""
    terms = functional.cross_entropy(outputs, targets, reduction="none")
    return terms * (terms >= terms.detach().topk(min(len(terms), max(16, len(terms) // 2))).values[-1])


def drawn(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none") * torch.rand(len(outputs))


class PaddedCox(Loss):
    """Cox's loss with padding rows in the risk sets."""

    name, tasks, separable = "padded", Cox.tasks, False

    def records(self, outputs, targets, mask):
        return LOSSES["cox"].records(outputs, targets, torch.ones_like(mask))

    def check_targets(self, targets, n_outputs):
        """Accept all."""


class Negated(CrossEntropy):
    """Terms of its own beside the slopes of the loss that it derives from."""

    def records(self, outputs, targets, mask):
        return -super().records(outputs, targets, mask)


class InSlots(list):
    """Counts in a slot of its own name."""

    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def __call__(self, outputs, targets):
        self.__calls += 1
        return functional.cross_entropy(outputs, targets, reduction="none")


WEIGHT = torch.ones(())


def by_tensor(outputs, targets):
    WEIGHT.calls = getattr(WEIGHT, "calls", 0) + 1
    return functional.cross_entropy(outputs, targets, reduction="none") * WEIGHT


def by_rows():
    """Return a function that counts in an array of objects, whose rows are made anew by whoever looks."""
    cells = np.array([[[0], [0]], [[0], [0]]], dtype=object)
    counts = np.empty((2, 2), dtype=object)
    for place in np.ndindex(2, 2):
        counts[place] = SimpleNamespace(calls=cells[place][0])

    def terms(outputs, targets):
        counts[1, 1].calls += 1
        return functional.cross_entropy(outputs, targets, reduction="none")

    return terms


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (balanced, "changes with the other records"),
        (by_count, "or with their number"),
        (hardest, "changes with the other records"),
        (Running(), "writes to what it holds"),
        (remembering(), "writes to what it holds"),
        (Warming(), "writes to what it holds"),
        (counting, "writes to what it holds"),
        (by_attribute, "writes to what it holds"),
        (by_inner_function, "writes to what it holds"),
        (by_helper, "writes to what it holds"),
        (ByClass(), "writes to what it holds"),
        (InSlots(), "writes to what it holds"),
        (by_tensor, "writes to what it holds"),
        (by_rows(), "writes to what it holds"),
        (ByOthers(), "writes to what it holds"),
        (partial(lambda numbers, outputs, targets: outputs[:, 0] * next(numbers), count(1)), "holds a count"),
        (at_least_sixteen, "changes with the other records"),
        (drawn, "draws random numbers"),
        (lambda outputs, targets: outputs[:, 0] * targets.clamp_(max=1), "writes to the outputs or targets"),
        (lambda outputs, targets: outputs.mul_(2)[:, 0], "writes to the outputs or targets"),
        (lambda outputs, targets: outputs.mean(), "one floating-point term per record"),
        (lambda outputs, targets: outputs[:, 7], "fails on outputs"),
    ],
)
def test_what_mixes_records_or_remembers_them_is_refused(function, why):
    with pytest.raises(ModelError, match=why):
        validate_loss(RecordLoss("own", function), "classification", 3, LABELS)


def test_a_module_within_a_module_is_looked_into(monkeypatch):
    """Named in the function alone, as ``import outer.inner`` within it does."""
    outer, inner = ModuleType("outer_of_mine"), ModuleType("outer_of_mine.inner")
    outer.inner, inner.past = inner, [0]
    monkeypatch.setitem(sys.modules, "outer_of_mine", outer)
    monkeypatch.setitem(sys.modules, "outer_of_mine.inner", inner)

    space = {"functional": functional, "__name__": "mine"}
    exec(
        "def terms(outputs, targets):\n"
        "    import outer_of_mine.inner\n"
        "    outer_of_mine.inner.past[0] += 1\n"
        "    return functional.cross_entropy(outputs, targets, reduction='none')\n",
        space,
    )
    with pytest.raises(ModelError, match="writes to what it holds"):
        validate_loss(RecordLoss("own", space["terms"]), "classification", 3, LABELS)


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_the_house_are_taken(name):
    loss = LOSSES[name]
    for task in loss.tasks:
        outputs = 3 if name in {"cross_entropy", "focal"} or task.startswith("multi") else 1
        validate_loss(loss, task, outputs, KINDS[task])


def test_formulas_of_the_house_need_no_functional_transform():
    assert [name for name, loss in LOSSES.items() if not loss.in_closed_form] == ["focal", "poisson"]
    assert not RecordLoss("own", by_count).in_closed_form
    assert ClassWeighted(LOSSES["cross_entropy"], [1.0, 2.0], 2).in_closed_form
    assert not ClassWeighted(LOSSES["focal"], [1.0, 2.0], 2).in_closed_form


def test_an_honest_loss_of_records_is_taken():
    smoothed = nn.CrossEntropyLoss(
        reduction="none", label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 3.0])
    )
    validate_loss(RecordLoss("own", smoothed), "classification", 3, LABELS)
    validate_loss(
        RecordLoss("own", lambda outputs, targets: (outputs[:, 0] - targets).abs()),
        "regression",
        1,
        KINDS["regression"],
    )


class Shy(nn.Module):
    """Counts passes over more records than a trial has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(2, 2), [0]

    def forward(self, features):
        self.passes[0] += len(features) > 7
        return self.layer(features)


class Frozen(Shy):
    """Keeps the count in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, features):
        self.count.data += 1
        return self.layer(features)


def test_a_model_may_not_keep_what_no_buffer_shows():
    with pytest.raises(ModelError, match="writes to its count"):
        validate_behaviour(Frozen(), torch.randn(4, 2))


def hooked(kind):
    model, seen = nn.Linear(2, 2), []
    getattr(model, kind)(lambda *_: seen.append(1))
    return model


class CountedByName(nn.Linear):
    """Counts its passes under a name of its module."""

    def forward(self, features):
        step()
        return super().forward(features)


class CountedByClass(nn.Linear):
    """Counts its passes in its class."""

    passes = 0

    def forward(self, features):
        type(self).passes += 1
        return super().forward(features)


def replaced():
    """A layer whose ``forward`` was put in the place of its class's, and counts in a closure."""
    model, seen = nn.Linear(2, 2), [0]

    def forward(features):
        seen[0] += 1
        return functional.linear(features, model.weight, model.bias)

    model.forward = forward
    return model


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (hooked("register_forward_hook"), "_forward_hooks"),
        (hooked("register_forward_pre_hook"), "_forward_pre_hooks"),
        (CountedByName(2, 2), "forward"),
        (CountedByClass(2, 2), "forward"),
        (replaced(), "forward"),
    ],
)
def test_a_model_may_not_count_in_hooks_or_in_what_its_code_names(model, place):
    with pytest.raises(ModelError, match=f"writes to its {place}"):
        validate_behaviour(model, torch.randn(4, 2))


def test_slopes_of_ones_own_are_not_taken():
    with pytest.raises(ModelError, match="brings slopes of its own"):
        validate_loss(Negated(), "classification", 3, LABELS)


def test_more_than_can_be_compared_is_refused():
    many = [[number] for number in range(100_001)]
    with pytest.raises(ModelError, match="more than 100,000 objects"):
        snapshot(many)
    chain = SimpleNamespace()
    for _ in range(10_000):
        chain = SimpleNamespace(next=chain)
    with pytest.raises(ModelError, match="a chain of many hundreds"):
        snapshot(chain)


def test_parameters_that_are_not_finite_are_told_from_random_numbers():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        validate_behaviour(model, torch.randn(4, 2))


@pytest.mark.parametrize("kind", [LoopTrainer, VmapTrainer])
def test_state_that_no_trial_showed_ends_the_round_with_nothing(kind):
    """The count is part of no update, and nothing is released all the same: nobody can tell what it is for."""
    model = Shy()
    validate_behaviour(model, torch.randn(4, 2))
    task = Task(model=model, loss=LOSSES["cross_entropy"])
    records = Records(
        features=np.ones((9, 2), np.float32),
        targets=np.zeros(9, np.int64),
        silo=np.zeros(9, np.int32),
        user=np.zeros(9, np.int32),
    )
    cohort = Cohort.from_records(
        records, groups=records.by_silo_user(), n_silos=1, scale=Affine(), device=torch.device("cpu")
    )
    job = TrainJob(
        task.initial(),
        cohort,
        torch.arange(1),
        torch.ones(1, dtype=torch.float64),
        Clip(norm=1.0),
        ExperimentRandomness(0),
        ("round",),
    )
    with pytest.raises(ModelError, match="the model wrote to its passes while it was trained"):
        kind(task=task, local=LocalSgd(learning_rate=0.1)).sums(job)


def test_padding_may_not_count_in_a_loss_that_is_not_separable():
    with pytest.raises(ModelError, match="whose mask is 0"):
        validate_loss(PaddedCox(), "survival", 1, KINDS["survival"])


def warned(outputs, targets):
    """Turns around when any output of the batch is large: no trial has such ones."""
    terms = functional.cross_entropy(outputs, targets, reduction="none")
    return torch.where(outputs.detach().abs().amax() > 1e3, -1.0, 1.0) * terms


def test_rows_of_two_contributions_meet_in_no_call_of_an_own_loss():
    """Two users with two records each would stand side by side; the second one's are enormous."""
    sums = []
    for scale in (0.0, 1e6):
        features = np.concatenate([np.ones((2, 2)), np.full((2, 2), scale)]).astype(np.float32)
        user = np.repeat(np.arange(2, dtype=np.int32), 2)
        records = Records(
            features=features, targets=np.array([0, 1, 0, 0]), silo=np.zeros(4, np.int32), user=user
        )
        cohort = Cohort.from_records(
            records, groups=records.by_silo_user(), n_silos=1, scale=Affine(), device=torch.device("cpu")
        )
        torch.manual_seed(0)
        task = Task(model=nn.Linear(2, 2), loss=RecordLoss("own", warned))
        weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
        job = TrainJob(
            task.initial(),
            cohort,
            torch.arange(2),
            weights,
            Clip(norm=1.0),
            ExperimentRandomness(0),
            ("round",),
        )
        trainer = GramTrainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=3))
        sums.append(trainer.sums(job).total)
    assert torch.equal(*sums)
    assert sums[0].any()


class Doubled(nn.Sequential):
    """Computes something else than its parts."""

    def forward(self, features):
        return 2 * super().forward(features)


def test_linear_is_what_is_made_of_linear_parts_alone():
    assert linear_layer(nn.Sequential(nn.Flatten(), nn.Linear(2, 2))) is not None
    assert linear_layer(Doubled(nn.Linear(2, 2))) is None
    assert linear_layer(CountedByName(2, 2)) is None
    assert linear_layer(hooked("register_forward_hook")) is None
    shared, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    assert linear_layer(nn.Sequential(shared, shared)) is None
    patched.forward = lambda features: 2 * features
    assert linear_layer(patched) is None


def test_what_is_made_at_the_first_call_and_stays_is_no_state():
    class Once:
        @cached_property
        def scale(self):
            return 2.0

        def __call__(self, outputs, targets):
            return self.scale * functional.cross_entropy(outputs, targets, reduction="none")

    validate_loss(RecordLoss("own", Once()), "classification", 3, LABELS)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_told_by_its_numbers():
    places = torch.tensor([[0, 1], [1, 0]])
    one, other = (
        torch.sparse_coo_tensor(places, torch.tensor([1.0, x]), (2, 2), check_invariants=True)
        for x in (2.0, 3.0)
    )
    assert snapshot(one) == snapshot(one.clone())
    assert snapshot(one) != snapshot(other)
    assert snapshot(one.to_sparse_csr()) != snapshot(other.to_sparse_csr())


def test_what_is_told_hangs_on_no_order_of_a_set_and_on_no_address():
    """Which is how another process, that resumes a run, tells it too."""

    def name(value):
        return getattr(value, "__qualname__", type(value).__qualname__)

    def made():
        kinds = [SimpleNamespace(value=value) for value in range(20)]
        return [set(map(Member, range(20))), {balanced: 1, hardest: 2}, kinds]

    class Member:
        def __init__(self, value):
            self.value = value

    assert snapshot(made(), name) == snapshot(made(), name)


def test_both_surfaces_ask(tmp_path, monkeypatch):
    people = fv.population(
        features=np.eye(8, dtype=np.float32),
        targets=np.arange(8) % 2,
        user=np.arange(8),
        silo=np.zeros(8, dtype=int),
        task="classification",
        n_users=8,
    )
    with pytest.raises(ModelError, match="changes with the other records"):
        fv.train(nn.Linear(8, 2), people, method=fv.fedavg(), loss=balanced, rounds=1, folder=tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "batch_loss_of_mine.py").write_text(
        "def terms(outputs, targets):\n    return outputs[:, 0] - outputs.mean()\n"
    )
    document = {
        "name": "own",
        "data": {"name": "digits", "n_users": 20},
        "model": {"loss": "batch_loss_of_mine:terms"},
        "local": {"learning_rate": 0.1},
        "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 1.0},
        "rounds": 1,
    }
    with pytest.raises(ModelError, match="changes with the other records"):
        prepare(parse(document, "own"))


def test_no_call_of_a_loss_sees_rows_of_two_contributions():
    """Whatever a function does with its batch, slopes show it one contribution's rows at a time."""
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(4, 3, 5, generator=generator)
    targets = torch.randint(3, (4, 5), generator=generator)
    present = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False], [False] * 5])
    loss: Loss = RecordLoss("own", balanced)
    together = loss.slopes(outputs, targets, present)
    for row in range(4):
        alone = loss.slopes(outputs[row : row + 1], targets[row : row + 1], present[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-6)
    assert (together[3] == 0).all()
    leaf = outputs[0].mT.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(balanced(leaf, targets[0]).sum(), leaf)
    torch.testing.assert_close(together[0].mT, slopes, rtol=1e-5, atol=1e-6)
