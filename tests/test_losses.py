"""Losses: against their definitions, under masks, under vmap and grad, at extreme scores, on bad targets."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from fedveil.errors import ConfigError, DataError, ModelError
from fedveil.training.losses import LOSSES, ClassWeighted, Loss, RecordLoss, load_loss

OUTPUTS = {"cross_entropy": 4, "binary_cross_entropy": 1, "multi_label_cross_entropy": 3} | {
    "focal": 3,
    "squared_error": 3,
    "poisson": 1,
    "cox": 1,
}


def make_batch(name: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return outputs (count, k) and targets of a loss; Cox times have many ties."""
    random = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(count, OUTPUTS[name], generator=random)
    if name == "cross_entropy":
        return outputs, torch.randint(0, 4, (count,), generator=random)
    if name == "focal":
        return outputs, torch.randint(0, 3, (count,), generator=random)
    if name == "binary_cross_entropy":
        return outputs, torch.randint(0, 2, (count,), generator=random)
    if name == "multi_label_cross_entropy":
        return outputs, torch.randint(0, 2, (count, 3), generator=random).float()
    if name == "squared_error":
        return outputs, torch.randn(count, 3, generator=random)
    if name == "poisson":
        return outputs.exp(), torch.randint(0, 5, (count,), generator=random).float()
    event = torch.randint(0, 2, (count,), generator=random)
    time = torch.randint(1, 5, (count,), generator=random)
    return outputs, torch.stack([event, time], -1).float()


def defined(name: str, outputs: Tensor, targets: Tensor) -> float:
    """Return the mean loss by its definition, one record after another, in float64."""
    rows, total = [[float(value) for value in row] for row in outputs], 0.0
    if name == "cox":
        order = sorted(range(len(rows)), key=lambda i: -float(targets[i, 1]))
        for place, i in enumerate(order):
            ratios = sum(math.exp(rows[j][0] - rows[i][0]) for j in order[: place + 1])
            total += float(targets[i, 0]) * math.log(ratios)
        return total / len(rows)
    for row, target in zip(rows, targets, strict=True):
        if name == "cross_entropy":
            total += math.log(sum(math.exp(z) for z in row)) - row[int(target)]
        elif name == "focal":
            own = math.exp(row[int(target)]) / sum(math.exp(z) for z in row)
            total -= (1 - own) ** 2 * math.log(own)
        elif name == "binary_cross_entropy":
            total += math.log1p(math.exp(row[0])) - float(target) * row[0]
        elif name == "poisson":
            total += row[0] - float(target) * math.log(row[0])
        elif name == "multi_label_cross_entropy":
            each = [math.log1p(math.exp(z)) - float(y) * z for z, y in zip(row, target, strict=True)]
            total += sum(each) / len(each)
        else:
            total += sum((z - float(y)) ** 2 for z, y in zip(row, target, strict=True)) / len(row)
    return total / len(rows)


@pytest.mark.parametrize("name", sorted(LOSSES))
@given(count=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_a_loss_is_its_definition(name: str, count: int, seed: int) -> None:
    outputs, targets = make_batch(name, count, seed)
    value = load_loss(name)(outputs, targets, torch.ones(count))
    assert float(value) == pytest.approx(defined(name, outputs, targets), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
@given(count=st.integers(1, 10), padding=st.integers(0, 5), seed=st.integers(0, 10_000))
def test_padding_changes_nothing(name: str, count: int, padding: int, seed: int) -> None:
    loss = load_loss(name)
    outputs, targets = make_batch(name, count + padding, seed)
    mask = torch.zeros(count + padding)
    chosen = (
        torch.randperm(count + padding, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    )
    mask[chosen] = 1
    padded = torch.where(mask.bool()[:, None], outputs, torch.nan)
    value, slopes = loss(padded, targets, mask), grad(loss)(padded, targets, mask)
    torch.testing.assert_close(value, loss(outputs[chosen], targets[chosen], torch.ones(count)))
    torch.testing.assert_close(
        slopes[chosen], grad(loss)(outputs[chosen], targets[chosen], torch.ones(count))
    )
    assert not slopes[mask == 0].any()


@pytest.mark.parametrize("name", [*sorted(LOSSES), "own"])
@given(groups=st.integers(1, 3), count=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_slopes_are_the_gradients_under_vmap(name: str, groups: int, count: int, seed: int) -> None:
    own = RecordLoss("own", lambda z, y: (z[:, 0] - y).abs() ** 1.5)
    loss: Loss = own if name == "own" else load_loss(name)
    base = "binary_cross_entropy" if name == "own" else name
    batches = [make_batch(base, count, seed + group) for group in range(groups)]
    outputs, targets = (torch.stack(parts) for parts in zip(*batches, strict=True))
    mask = torch.rand(groups, count, generator=torch.Generator().manual_seed(seed)) < 0.7
    gradients = vmap(grad(loss))(outputs, targets, mask)
    slopes = torch.where(mask[:, None], loss.slopes(outputs.mT.contiguous(), targets, mask), 0)
    slopes = slopes / mask.sum(1).clamp(min=1)[:, None, None]
    torch.testing.assert_close(slopes.mT, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_record_has_loss_and_gradient_zero(name: str) -> None:
    outputs, targets = make_batch(name, 3, 0)
    assert float(load_loss(name)(outputs, targets, torch.zeros(3))) == 0
    assert not grad(load_loss(name))(outputs, targets, torch.zeros(3)).any()


def test_one_output_is_two_for_the_focal_loss() -> None:
    outputs, targets = make_batch("binary_cross_entropy", 9, 3)
    both = torch.cat([torch.zeros_like(outputs), outputs], 1)
    ones = torch.ones(9)
    torch.testing.assert_close(
        load_loss("focal")(outputs, targets, ones), load_loss("focal")(both, targets, ones)
    )


@pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy", "focal"])
def test_weights_of_classes_multiply_every_term_and_slope(name: str) -> None:
    outputs, targets = make_batch(name, 8, 5)
    k = max(2, OUTPUTS[name])
    weights = [1.0, 7.0, 0.5, 2.0][:k]
    base, weighted = load_loss(name), ClassWeighted(load_loss(name), weights, k)
    factor, ones = torch.tensor(weights)[targets], torch.ones(8)
    torch.testing.assert_close(
        weighted.records(outputs, targets, ones), factor * base.records(outputs, targets, ones)
    )
    slopes = weighted.slopes(outputs.mT[None].contiguous(), targets[None], ones.bool()[None])
    gradient = grad(lambda z: weighted.records(z, targets, ones).sum())(outputs)
    torch.testing.assert_close(slopes[0].mT, gradient, rtol=1e-4, atol=1e-6)
    assert weighted.name == name


def test_weights_that_are_no_classes_are_refused() -> None:
    for base, weights, classes in (("cox", [1.0, 2.0], None), ("focal", [1.0], 2), ("focal", [1.0, 0.0], 2)):
        with pytest.raises(ConfigError, match=r"model\.class_weights: "):
            ClassWeighted(load_loss(base), weights, classes)


def test_one_record_teaches_cox_nothing() -> None:
    targets = torch.tensor([[1.0, 5.0]])
    assert float(grad(load_loss("cox"))(torch.tensor([[2.0]]), targets, torch.ones(1))) == 0


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_cox_is_finite_for_large_scores(scale: float) -> None:
    loss, targets = load_loss("cox"), torch.tensor([[1.0, 3.0], [1.0, 2.0], [0.0, 2.5], [1.0, 1.0]])
    outputs = scale * torch.tensor([[1.0], [-1.0], [0.5], [-0.3]])
    value, slopes = loss(outputs, targets, torch.ones(4)), grad(loss)(outputs, targets, torch.ones(4))
    assert torch.isfinite(value)
    assert torch.isfinite(slopes).all()
    closed = loss.slopes(outputs.mT[None], targets[None], torch.ones(1, 4, dtype=torch.bool))[0].mT / 4
    torch.testing.assert_close(closed, slopes)
    # the longest survivor's score dominates everybody's risk set: its loss is 0, the others' the difference
    assert float(value) == pytest.approx(scale * (2 + 1.3) / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "targets", "n_outputs", "error", "words"),
    [
        ("cross_entropy", torch.tensor([0, 3, 1]), 3, DataError, "row 1: the label is not in 0..2"),
        ("cross_entropy", torch.tensor([0.0, 1.0]), 3, DataError, "int64 label"),
        ("cross_entropy", torch.tensor([0, 1]), 1, ModelError, "binary_cross_entropy"),
        ("binary_cross_entropy", torch.tensor([0, 1, 2]), 1, DataError, "row 2: the label is neither"),
        ("binary_cross_entropy", torch.tensor([0, 1]), 2, ModelError, "one output"),
        ("squared_error", torch.tensor([0, 1]), 1, DataError, "floating-point"),
        ("squared_error", torch.tensor([0.0, math.nan]), 1, DataError, "row 1: the target is not finite"),
        ("squared_error", torch.zeros(2, 3), 2, DataError, "2 floating-point numbers"),
        ("cox", torch.zeros(2), 1, DataError, "event, time"),
        ("cox", torch.tensor([[2.0, 1.0]]), 1, DataError, "row 0: the event is neither"),
        ("cox", torch.tensor([[1.0, math.inf]]), 1, DataError, "row 0: the time is not finite"),
        ("cox", torch.zeros(2, 2), 3, ModelError, "one output"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    name: str, targets: Tensor, n_outputs: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        load_loss(name).check_targets(targets, n_outputs)
    assert "rows)" not in str(refused.value)  # how many are wrong is private


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_targets_that_fit_are_accepted(name: str) -> None:
    load_loss(name).check_targets(make_batch(name, 9, 1)[1], OUTPUTS[name])


def test_a_loss_for_another_task_is_refused_with_those_that_fit() -> None:
    with pytest.raises(ConfigError, match="use one of: cox"):
        load_loss("cross_entropy").check_task("survival")
    load_loss("cox").check_task("survival")


def halved(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of a user's own."""
    return (outputs[:, 0] - targets) ** 2 / 2


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not one term per record."""
    return ((outputs[:, 0] - targets) ** 2).sum()


def test_an_import_path_names_an_own_loss() -> None:
    loss = load_loss(f"{__name__}:halved")
    value = loss(torch.tensor([[1.0], [5.0]]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]))
    assert float(value) == 0.5
    loss.check_task("regression")


def test_an_own_loss_must_return_a_term_per_record() -> None:
    with pytest.raises(
        ModelError, match=r"one floating-point term per record, not torch.float32 of shape \(\)"
    ):
        load_loss(f"{__name__}:summed")(torch.zeros(2, 1), torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hinge", "no loss named 'hinge'; use one of cross_entropy"),
        ("no_such_module:f", "module no_such_module cannot be imported"),
        ("tests.no_module_at_import:f", r"cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("focl", "did you mean 'focal'"),
        ("math:no_such", "has no no_such"),
        ("math:pi", "it must be a Loss or a function"),
    ],
)
def test_a_name_that_names_nothing_is_refused(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_loss(path)
